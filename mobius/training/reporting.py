"""Reports of a run: first the startup log and trackers; at the end loss plot, model card and `--save_results`."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from transformers import PreTrainedTokenizerBase

from mobius.checkpoint.model_card import CardFacts, Origin, model_card
from mobius.config.config import MatmulDtype, OptimizerStates, split_names
from mobius.config.sources import to_yaml, written_options
from mobius.data.batches import TrainingBatches
from mobius.distributed.transport import all_gather_numbers
from mobius.errors import CheckpointError, reason_of
from mobius.files.atomic_files import atomic_write
from mobius.hardware.devices import MemoryMeter
from mobius.hardware.host_memory import HostMemoryUsage, huge_page_share
from mobius.models.attention import DocumentAttention
from mobius.models.config_rules import max_positions_warning
from mobius.planner.gpu_specs import GIGA
from mobius.planner.measured_disks import keep_rates
from mobius.planner.memory_estimates import estimate_host_memory, largest_gpu_estimate
from mobius.planner.plan_table import describe_disks, describe_long_step, describe_short_host, describe_stages
from mobius.process.log import RANK_ZERO_ONLY
from mobius.process.ranks import seconds_since_start
from mobius.reporting.events import RunStarted, table_row
from mobius.reporting.pictures import draw_training
from mobius.reporting.recordings import Recordings
from mobius.reporting.run_log import RunLog, WarningRecorder
from mobius.reporting.summary import RankMemory, StepTotals, Timings, closing_lines, steady_seconds, write_report
from mobius.reporting.trackers import TrackedRun, start_trackers
from mobius.reporting.trainer_state import TrainerState
from mobius.training.run_setup import RunSetup
from mobius.training.session import Session
from mobius.units import GIB

logger = logging.getLogger(__name__)

USUAL_WEIGHT, LAST_BIT = 0.02, 2.0**-21
"""Size of a usual weight, and the value of the last bit of such a weight in a 24-bit format."""
SMALL_LEARNING_RATE = LAST_BIT / 4
"""A run with compact states warns if its learning rate is smaller."""
_ENOUGH_HUGE_PAGES = 0.5
_OWNERS: Final = {
    "data": "data and tokenizer",
    "connections": "connections",
    "measuring": "connections",
    "rehearsal": "stages",
    "weights": "stages",
}
"""Part of the startup -> owner of the host memory that this part allocates."""


class StartupMeter(WarningRecorder):
    """Seconds, host memory and warnings of the startup, counted from the start of the process."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = {"imports": seconds_since_start()}
        self.host = HostMemoryUsage()
        self._last = time.monotonic()
        self.started = self._last - self.seconds["imports"]

    def mark(self, part: str) -> None:
        """Add the time since the last mark to `part`, and the growth of host memory to the owner of `part`."""
        now = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now
        if part in _OWNERS:
            self.host.mark(_OWNERS[part])


def log_model(run_setup: RunSetup, folder: Path) -> None:
    """Log the model's row; each rank loads its stages' weights later."""
    family, dtype = run_setup.parts.config.model_type, run_setup.config.model.dtype.value
    products = run_setup.config.model.matmul_dtype
    if products is not MatmulDtype.BF16:
        number = sum(len(layer.quantizable) for layer in run_setup.parts.layers)
        dtype = f"{dtype}, {number} linears of its layers multiply in {products}"
    shape = run_setup.shape.describe(trains=run_setup.config.evaluation.do_train)
    logger.info("%s", table_row("model", f"{folder} ({family}), {shape}, {dtype}"))
    is_known = run_setup.result.request.machine.gpu_spec is not None and not run_setup.result.is_given
    if is_known and (names := run_setup.requested_config.pipeline.manual_numbers):
        options = " ".join(f"--{name} auto" for name in names)
        logger.info("%s", table_row("numbers", f"the manual's defaults; mobius plan predicts the effect of {options}"))
    warning = max_positions_warning(run_setup.parts.config, run_setup.config.data.seq_length)
    if warning is not None:
        logger.warning("%s", warning, extra=RANK_ZERO_ONLY)
    optim = run_setup.config.optim
    if optim.optimizer_states is OptimizerStates.COMPACT and optim.learning_rate < SMALL_LEARNING_RATE:
        logger.warning(
            "--optimizer_states compact with --learning_rate %g: a step is %.2g of the last bit of a 24-bit master "
            "weight of %g. Most steps then change a weight only by random rounding, which is right on average; "
            "--optimizer_states bf16 keeps all 32 bits",
            optim.learning_rate,
            optim.learning_rate / LAST_BIT,
            USUAL_WEIGHT,
            extra=RANK_ZERO_ONLY,
        )


def log_end_token(tokenizer: PreTrainedTokenizerBase, others: Sequence[int]) -> None:
    """Log the tokens that end an answer of the saved model: the tokenizer's end token and `others`."""
    also = f"; the model's own: {', '.join(map(str, others))}" if others else ""
    text = f"{tokenizer.eos_token_id} ({tokenizer.eos_token}), which is trained, is added to generation_config.json"
    logger.info("%s", table_row("end", f"{text} of what is saved{also}"))


def log_stages(session: Session) -> None:
    """Log each stage (`--verbose`), and warn about slow attention and small pages."""
    run_setup = session.run_setup
    _warn_of_small_pages(session)
    if run_setup.parts.attention is DocumentAttention.FLEX:
        logger.warning(
            "packed rows run with FlexAttention. It is slower, because its layers are not compiled to separate "
            "graphs. Variable-length attention needs bf16 or fp16, a GPU from Ampere on, and heads of up to 256",
            extra=RANK_ZERO_ONLY,
        )
    logger.debug("stages generated: %s", describe_stages(run_setup.plan, run_setup.shape))
    if run_setup.tile_tokens is not None:
        logger.debug("recomputed layers run in tiles of %d tokens", run_setup.tile_tokens)
    if (step := run_setup.result.step_time_prediction) is not None:
        logger.debug("predicted: %.3f s per step, limited by %s, %s", step.step_seconds, step.bottleneck, step.basis)
    if run_setup.config.pipeline.offload_states_to is not None:
        logger.info("%s", table_row("disks", describe_disks(run_setup.result)))
    if (long := describe_long_step(run_setup.result.request)) is not None:
        logger.info("%s", table_row("step", long))
    if (short := describe_short_host(run_setup.result)) is not None:
        logger.info("%s", table_row("host", short))


def _warn_of_small_pages(session: Session) -> None:
    """Warn if large stages in host memory use small pages, which slow the optimizer."""
    arena = session.stages.arena
    if arena is None or arena.num_bytes < GIB:
        return
    share = huge_page_share()
    if share < _ENOUGH_HUGE_PAGES:
        logger.warning(
            "only %.0f %% of this process's memory is on huge pages, which slows the optimizer. To change that: "
            "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`, or restart where memory is less fragmented.",
            100 * share,
        )


def log_host_memory_usage(session: Session, use: HostMemoryUsage) -> None:
    """Log the host memory by owner (`--verbose`); collective."""
    result, ranks = session.run_setup.result, session.run_setup.ranks
    planned = estimate_host_memory(result.request, result.plan).total if ranks.num_replicas == 1 else None
    logger.debug("host memory: %s", use.describe(session.all_ranks.sum_over_ranks, planned=planned))


def log_disk_rates(session: Session, since: float) -> None:
    """Log the rates that the disks of optimizer states reached since the time `since`; keep the rates for later plans.

    Collective.
    """
    folders, arena = split_names(session.run_setup.config.pipeline.offload_states_to), session.stages.arena
    if not folders:
        return
    files, ranks = None if arena is None else arena.state_files, session.run_setup.ranks
    traffic = ((), ()) if files is None else (files.reads, files.writes)
    for mount, rates in keep_rates(folders, traffic, since=since, ranks=ranks, all_ranks=session.all_ranks).items():
        kind = "in a burst that may have gone to the disk's cache" if rates.is_burst else "sustained"
        both = "" if rates.at_once is None else f", {rates.at_once / GIGA:.3g} both at once"
        text = f"{mount}: {rates.read / GIGA:.3g} GB/s read, {rates.write / GIGA:.3g} written{both}, {kind}"
        text += "; later plans use these rates"
        logger.info("%s", table_row("disks", text))


def run_started(run_setup: RunSetup, batches: TrainingBatches, startup: StartupMeter) -> RunStarted:
    """Return the event of the start of training; `startup` has the seconds of the startup's parts."""
    config, result, ranks = run_setup.config, run_setup.result, run_setup.ranks
    has_gpu, prediction = run_setup.device.type == "cuda", result.step_time_prediction
    return RunStarted(
        name=config.output.name,
        num_parameters=run_setup.shape.num_parameters,
        num_trained=run_setup.shape.num_trained,
        dtype=config.model.dtype.value,
        device=MemoryMeter(run_setup.device).device_name,
        num_ranks=ranks.num_pipeline_ranks,
        num_replicas=ranks.num_replicas,
        num_steps=config.optim.num_steps,
        num_epochs=config.optim.num_train_epochs or batches.num_epochs_of(config.optim.num_steps),
        batch_size=config.pipeline.batch_size,
        seq_length=config.data.seq_length,
        num_microbatches=config.pipeline.num_microbatches,
        microbatch_rows=result.request.microbatch_rows,
        plan=run_setup.plan.describe(),
        planned_gpu_bytes=largest_gpu_estimate(result.gpu_estimates).total if has_gpu else None,
        gpu_bytes=result.request.gpu_bytes,
        planned_host_bytes=estimate_host_memory(result.request, result.plan).total,
        predicted_step_seconds=None if prediction is None else prediction.step_seconds,
        bottleneck=None if prediction is None else str(prediction.bottleneck),
        startup_seconds=dict(startup.seconds),
    )


def open_log(
    run_setup: RunSetup, folder: Path, state: TrainerState | None = None, *, tracker_run_id: str | None = None
) -> RunLog | None:
    """Open the log of a run in `folder`; None on all ranks except the first.

    `state` and `tracker_run_id` come from the checkpoint that the run resumes from.
    """
    if not run_setup.ranks.is_first:
        return None
    config = run_setup.config
    first_step = 1 if state is None else state.global_step + 1
    tracked = TrackedRun(config.output.name, folder, written_options(config), first_step, tracker_run_id)
    return RunLog(
        folder,
        state or TrainerState.at_start(config),
        start_trackers(config.output.trackers, tracked),
        ideal_step_seconds=_ideal_step_seconds(run_setup),
    )


def recordings_of(run_setup: RunSetup, folder: Path) -> Recordings | None:
    """Return the recordings of this rank, which are written to `folder`; None if its pipeline is not the first."""
    ranks, device = run_setup.ranks, run_setup.device
    return (
        None if ranks.replica else Recordings(run_setup.config, rank=ranks.pipeline_rank, device=device, folder=folder)
    )


def _ideal_step_seconds(run_setup: RunSetup) -> float | None:
    """Return the seconds of a step at the full rate of the GPUs' data sheet; None if that rate is unknown.

    MFU is this time / the measured time of a step.
    """
    result = run_setup.result
    if result.step_time_prediction is None or result.request.machine.gpu_spec is None:
        return None
    return result.mfu * result.step_seconds


def write_records(
    log: RunLog,
    run_setup: RunSetup,
    folder: Path,
    *,
    origin: Origin,
    is_changed: bool = True,
    others: str | None = None,
) -> list[str]:
    """Write results, loss plot and model card into `folder` after the last step; return problems that fail the run.

    After training, failed writes are only logged, because the model must still be saved. Without training, a failed
    write is a problem. `origin`: the model before training; `is_changed`: whether training changed it;
    `others`: as in the card.
    """
    error = log.finish()
    if not run_setup.config.evaluation.do_train:
        where = f"--save_dir {run_setup.config.output.save_dir}"
        advice = "Free some space, or choose another folder, and start again."
        return [] if error is None else [f"{where}: the results cannot be written ({reason_of(error)}). {advice}"]
    title = f"{run_setup.config.output.name}: {log.state.global_step} steps"
    picture = folder / "training_loss.png"
    _leave(picture, lambda path: draw_training(log.state.entries(), path, title=title))
    losses = [float(entry["loss"]) for entry in log.state.entries() if "loss" in entry] or [math.nan]
    facts = CardFacts(
        config=run_setup.config,
        origin=origin,
        is_changed=is_changed,
        num_parameters=run_setup.shape.num_parameters,
        num_trained=run_setup.shape.num_trained,
        num_active=run_setup.shape.num_active,
        first_loss=losses[0],
        last_loss=losses[-1] if log.last_loss is None else log.last_loss,
        state=log.state,
        others=others,
        evaluation=log.results.get("eval", {}),
        has_picture=picture.is_file(),
    )
    _leave(folder / "README.md", lambda path: path.write_text(model_card(facts), encoding="utf-8"))
    return []


def _leave(path: Path, write: Callable[[Path], object]) -> None:
    try:
        with atomic_write(path) as temporary:
            write(temporary)
    except Exception as error:  # also errors of matplotlib
        logger.warning("%s is not written (%s: %s)", path.name, type(error).__name__, error)


def gather_memory(session: Session) -> list[RankMemory]:
    """Return the memory use of each rank; collective."""
    meter = MemoryMeter(session.run_setup.device)
    reading = meter.read()
    own = [reading.peak_allocated, reading.peak_reserved, reading.allocated, reading.peak_host]

    def gpu_bytes(value: float) -> int | None:
        return int(value) if meter.has_gpu else None

    return [
        RankMemory(
            rank=rank,
            device=meter.device_name,
            peak_allocated_bytes=gpu_bytes(row[0]),
            peak_reserved_bytes=gpu_bytes(row[1]),
            persistent_bytes=gpu_bytes(row[2]),
            peak_host_bytes=int(row[3]),
        )
        for rank, row in enumerate(all_gather_numbers(session.all_ranks, own).tolist())
    ]


def write_final_report(
    run_setup: RunSetup, steps: StepTotals, per_rank: Sequence[RankMemory], timings: Timings
) -> list[str]:
    """Log the closing lines and write `--save_results`; returns the problems."""
    config = run_setup.config
    plan_text, prediction = describe_stages(run_setup.plan, run_setup.shape), run_setup.result.step_time_prediction
    ideal = _ideal_step_seconds(run_setup)
    mfu = None if ideal is None else ideal / steady_seconds(steps.seconds)
    if prediction is not None:
        predicted, measured = prediction.step_seconds, steady_seconds(steps.seconds)
        text = "predicted %.3f s per step, measured %.3f: off by %+.1f%%"
        logger.info(text, predicted, measured, 100 * (predicted / measured - 1))
    for line in closing_lines(steps, per_rank, timings, mfu):
        logger.info("%s", line)
    if config.output.results_file is None:
        return []
    report = Path(config.output.results_file)
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        write_report(report, to_yaml(config), plan_text, steps, per_rank, timings, prediction, mfu)
        logger.info("results saved to %s", report)
    except (CheckpointError, OSError) as error:
        return [f"--save_results: {error}"]
    return []
