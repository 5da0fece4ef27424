"""Lines that a run logs on its way to the first step."""

from __future__ import annotations

import logging
from pathlib import Path

from mobius.log import RANK_ZERO_ONLY
from mobius.machine.devices import MemoryMeter
from mobius.machine.host_memory import HostMemoryUsage, huge_page_share
from mobius.models.attention import DocumentAttention
from mobius.models.config_rules import max_positions_warning
from mobius.plan.memory_estimates import estimate_host_memory
from mobius.plan.plan_table import describe_short_host
from mobius.planning.run_setup import RunSetup
from mobius.training.session import Session
from mobius.units import GIB

logger = logging.getLogger(__name__)

_ENOUGH_HUGE_PAGES = 0.5


def log_model(run_setup: RunSetup, folder: Path) -> None:
    """The milestone of the model; its weights follow when the stages are filled, each rank's own."""
    family, dtype = run_setup.parts.config.model_type, run_setup.config.model.dtype.value
    logger.info("model loaded: %s (%s), %s, %s", folder, family, run_setup.shape.describe(), dtype)
    warning = max_positions_warning(run_setup.parts.config, run_setup.config.data.seq_length)
    if warning is not None:
        logger.warning("%s", warning, extra=RANK_ZERO_ONLY)


def log_stages(session: Session) -> None:
    """The stages and how they run, and what slows them down."""
    _warn_of_small_pages(session)
    run_setup = session.run_setup
    logger.info("stages generated: %s", run_setup.plan.describe(run_setup.shape))
    if run_setup.tile_tokens is not None:
        logger.info("recomputed layers run in tiles of %d tokens", run_setup.tile_tokens)


def _warn_of_small_pages(session: Session) -> None:
    """Tell what slows the updates of a rank whose stages lie on small pages, if they are large."""
    arena = session.stages.arena
    if arena is None or arena.num_bytes < GIB:
        return
    share = huge_page_share()
    if share < _ENOUGH_HUGE_PAGES:
        logger.warning(
            "only %.0f %% of this process's memory lies on huge pages, which slows the optimizer. To change that: "
            "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`, or restart where memory is less fragmented.",
            100 * share,
        )


def log_host_memory_usage(session: Session, use: HostMemoryUsage) -> None:
    """Line about what host memory went to until now; collective."""
    result, ranks = session.run_setup.result, session.run_setup.rank_context.ranks
    planned = estimate_host_memory(result.request, result.plan).total if ranks.num_replicas == 1 else None
    logger.info("host memory: %s", use.describe(session.all_ranks.sum_over_ranks, planned=planned))


def log_start(run_setup: RunSetup) -> None:
    """Start of training: steps, rows, tokens, device, and the forecast."""
    config, pipeline = run_setup.config, run_setup.config.pipeline
    logger.info(
        "start of training: %d steps of %d rows x %d tokens, in %d microbatches of %d, on %s",
        config.optim.num_steps,
        pipeline.batch_size,
        config.data.seq_length,
        pipeline.num_microbatches,
        run_setup.result.request.microbatch_rows,
        MemoryMeter(run_setup.rank_context.device).device_name,
    )
    ranks = run_setup.rank_context.ranks
    if ranks.num_replicas > 1:
        logger.info(
            "%d replicas of %d rank(s) on %d node(s) play %d rows of each step and update 1/%d of each stage",
            ranks.num_replicas,
            ranks.num_pipeline_ranks,
            ranks.num_nodes,
            run_setup.result.request.rows,
            ranks.num_replicas,
        )
    if run_setup.parts.attention is DocumentAttention.FLEX:
        logger.warning(
            "packed rows run by FlexAttention, their layers without graphs of their own, which is slower: "
            "variable-length attention takes bf16 and fp16 on GPUs from Ampere on, and heads of up to 256"
        )
    if run_setup.result.step_time_prediction is not None:
        logger.info("%s", run_setup.result.step_time_prediction.describe())
    if (short := describe_short_host(run_setup.result)) is not None:
        logger.info("host memory: %s", short)
