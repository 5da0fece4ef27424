"""Lines that a run logs on its way to the first step."""

from __future__ import annotations

import logging
from pathlib import Path

from mobius.log import SAID_ONCE
from mobius.machine.available import huge_page_share
from mobius.machine.devices import MemoryMeter
from mobius.machine.host_use import HostUse
from mobius.models.attention import DocumentAttention
from mobius.models.config_rules import unseen_positions
from mobius.plan.budget import host_need
from mobius.plan.plan_table import describe_short_host
from mobius.planning.blueprint import Blueprint
from mobius.training.session import Session
from mobius.units import GIB

logger = logging.getLogger(__name__)

_ENOUGH_HUGE_PAGES = 0.5


def log_model(blueprint: Blueprint, folder: Path) -> None:
    """The milestone of the model; its weights follow when the stages are filled, each rank's own."""
    family, dtype = blueprint.parts.config.model_type, blueprint.config.model.dtype.value
    logger.info("model loaded: %s (%s), %s, %s", folder, family, blueprint.shape.describe(), dtype)
    warning = unseen_positions(blueprint.parts.config, blueprint.config.data.seq_length)
    if warning is not None:
        logger.warning("%s", warning, extra=SAID_ONCE)


def log_stages(session: Session) -> None:
    """The stages and how they run, and what slows them down."""
    _warn_of_small_pages(session)
    blueprint = session.blueprint
    logger.info("stages generated: %s", blueprint.plan.describe(blueprint.shape))
    if blueprint.tile_tokens is not None:
        logger.info("recomputed layers run in tiles of %d tokens", blueprint.tile_tokens)


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


def log_host_use(session: Session, use: HostUse) -> None:
    """Line about what host memory went to until now; collective."""
    answer, ranks = session.blueprint.answer, session.blueprint.place.ranks
    planned = host_need(answer.request, answer.plan).total if ranks.num_replicas == 1 else None
    logger.info("host memory: %s", use.describe(session.everyone.sum_over_ranks, planned=planned))


def log_start(blueprint: Blueprint) -> None:
    """Start of training: steps, rows, tokens, device, and the forecast."""
    config, pipeline = blueprint.config, blueprint.config.pipeline
    logger.info(
        "start of training: %d steps of %d rows x %d tokens, in %d microbatches of %d, on %s",
        config.optim.num_steps,
        pipeline.batch_size,
        config.data.seq_length,
        pipeline.num_microbatches,
        blueprint.answer.request.microbatch_rows,
        MemoryMeter(blueprint.place.device).device_name,
    )
    ranks = blueprint.place.ranks
    if ranks.num_replicas > 1:
        logger.info(
            "%d replicas of %d rank(s) on %d node(s) play %d rows of each step and update 1/%d of each stage",
            ranks.num_replicas,
            ranks.num_places,
            ranks.num_nodes,
            blueprint.answer.request.rows,
            ranks.num_replicas,
        )
    if blueprint.parts.attention is DocumentAttention.FLEX:
        logger.warning(
            "packed rows run by FlexAttention, their layers without graphs of their own, which is slower: "
            "variable-length attention takes bf16 and fp16 on GPUs from Ampere on, and heads of up to 256"
        )
    if blueprint.answer.forecast is not None:
        logger.info("%s", blueprint.answer.forecast.describe())
    if (short := describe_short_host(blueprint.answer)) is not None:
        logger.info("host memory: %s", short)
