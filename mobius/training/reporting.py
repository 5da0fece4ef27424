"""The records of a run on its first rank: log and trackers from the start on, picture and model card at the end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import yaml

from mobius.atomic_files import atomic_write
from mobius.checkpoint.model_card import CardFacts, Origin, model_card
from mobius.config.config import OptimConfig
from mobius.config.yaml_file import to_yaml
from mobius.errors import reason_of
from mobius.optim.lr_schedule import learning_rate_at
from mobius.output.curves_picture import draw_training
from mobius.output.recordings import Recordings
from mobius.output.run_log import RunLog, TrainerState
from mobius.output.trackers import TrackedRun, start_trackers
from mobius.planning.run_setup import RunSetup

logger = logging.getLogger(__name__)


def open_log(
    run_setup: RunSetup, folder: Path, state: TrainerState | None = None, *, tracker_run_id: str | None = None
) -> RunLog | None:
    """The log of a run that writes into `folder`; None on all ranks but the first.

    `state` is that of a checkpoint which the run goes on from, and `tracker_run_id` the `RunLog`'s that it has.
    """
    if not run_setup.rank_context.ranks.is_first:
        return None
    config = run_setup.config
    if state is not None and not config.saving.changes and (line := other_schedule(state, config.optim)):
        logger.warning("%s", line)
    first_step = 1 if state is None else state.global_step + 1
    tracked = TrackedRun(config.output.name, folder, yaml.safe_load(to_yaml(config)), first_step, tracker_run_id)
    return RunLog(
        folder,
        state or TrainerState.at_start(config),
        start_trackers(config.output.trackers, tracked),
        ideal_step_seconds=ideal_step_seconds(run_setup),
    )


def other_schedule(state: TrainerState, optim: OptimConfig) -> str | None:
    """The line about a run that goes on in another schedule than it was in, though its options are the same.

    A version that begins its warm-up elsewhere has left such checkpoints.
    """
    shown = (entry for entry in reversed(state.log_history) if "learning_rate" in entry)
    if (entry := next(shown, None)) is None or not 0 < entry["step"] <= optim.num_steps:
        return None
    was, now = float(entry["learning_rate"]), learning_rate_at(entry["step"] - 1, optim)
    if math.isclose(was, now, rel_tol=1e-6):
        return None
    return (
        f"step {entry['step']} had a learning rate of {was:.4g}, and in the schedule of this version of Mobius it has "
        f"{now:.4g}: the run goes on in the latter (see docs/guide.md)"
    )


def recordings_of(run_setup: RunSetup, folder: Path) -> Recordings | None:
    """Recordings of the first pipeline's ranks, in `folder`; replicas do the same."""
    ranks, device = run_setup.rank_context.ranks, run_setup.rank_context.device
    return (
        None if ranks.replica else Recordings(run_setup.config, rank=ranks.pipeline_rank, device=device, folder=folder)
    )


def ideal_step_seconds(run_setup: RunSetup) -> float | None:
    """Time of a step at the full speed of the GPUs' data sheet; None where that is not known.

    Its share of a measured step is the MFU.
    """
    result = run_setup.result
    if result.simulated_steps is None or result.request.machine.gpu_spec is None:
        return None
    return result.mfu * result.step_seconds


def write_records(
    log: RunLog, run_setup: RunSetup, folder: Path, *, origin: Origin, is_changed: bool = True
) -> list[str]:
    """After the last step: results, picture and card into `folder`; returns the problem that the run is to end with.

    After training there is none: what fails is told, and the model is still to be saved. Without it results are all
    that the run was for. `origin` is what was trained, `is_changed` whether that changed anything.
    """
    error = log.finish()
    if not run_setup.config.evaluation.do_train:
        where = f"--save_dir {run_setup.config.output.save_dir}"
        told = "the results cannot be written", "Free some space, or choose another folder, and start again."
        return [] if error is None else [f"{where}: {told[0]} ({reason_of(error)}). {told[1]}"]
    history = log.state.log_history
    title = f"{run_setup.config.output.name}: {log.state.global_step} steps"
    facts = CardFacts(
        config=run_setup.config,
        origin=origin,
        is_changed=is_changed,
        num_parameters=run_setup.shape.num_parameters,
        num_trained=run_setup.shape.num_trained,
        num_active=run_setup.shape.num_active,
        first_loss=_first_loss(history),
        last_loss=_first_loss(reversed(history)) if log.last_loss is None else log.last_loss,
        state=log.state,
        evaluation=log.results.get("eval", {}),
    )
    _leave(folder / "training_loss.png", lambda path: draw_training(history, path, title=title))
    _leave(folder / "README.md", lambda path: path.write_text(model_card(facts), encoding="utf-8"))
    return []


def _first_loss(entries: Iterable[Mapping[str, object]]) -> float:
    losses = (entry.get("loss") for entry in entries)
    return next((float(loss) for loss in losses if isinstance(loss, int | float)), math.nan)


def _leave(path: Path, write: Callable[[Path], object]) -> None:
    try:
        with atomic_write(path) as temporary:
            write(temporary)
    except Exception as error:  # also one of matplotlib's own
        logger.warning("%s is left out (%s: %s)", path.name, type(error).__name__, error)
