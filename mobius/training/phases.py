"""Values that each phase of a run passes to the next: start -> run -> training -> outcome."""

from __future__ import annotations

from dataclasses import dataclass

from mobius.checkpoint.durable_steps import DurableSteps
from mobius.checkpoint.resume import Resume
from mobius.checkpoint.run_folder import OutputFolder
from mobius.checkpoint.saver import CheckpointSaver
from mobius.config.config import Config
from mobius.distributed.watchdog import Watchdog
from mobius.engine.slot_files import SlotPlace
from mobius.process.ranks import Ranks
from mobius.process.signal_handling import RunStatus
from mobius.reporting.run_log import RunLog
from mobius.training.data import RunData
from mobius.training.inputs import ModelInputs
from mobius.training.loop import StopReason, TrainingLoop
from mobius.training.reporting import StartupMeter
from mobius.training.session import Session
from mobius.training.teacher import Teacher


@dataclass(frozen=True, kw_only=True)
class Start:
    """Facts that are known when a run starts."""

    ranks: Ranks
    run_status: RunStatus
    startup: StartupMeter
    watchdog: Watchdog
    resume: Resume | None
    """The checkpoint to resume from, if the options ask for one."""

    @property
    def steps_before(self) -> int:
        return 0 if self.resume is None else self.resume.num_steps_done

    @property
    def epochs_before(self) -> float:
        return 0.0 if self.resume is None else self.resume.epochs_done


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run after its model and data are read, and its ranks are connected and have loaded their stages."""

    start: Start
    model: ModelInputs
    data: RunData
    output: OutputFolder
    session: Session
    slots: SlotPlace | None
    """Place of durable steps. Even if this run has none, an earlier start may have left some there."""
    teacher: Teacher | None
    """Numbers of the teacher of a distillation run."""

    @property
    def config(self) -> Config:
        """The options, with numbers in place of auto."""
        return self.session.run_setup.config

    @property
    def resume(self) -> Resume | None:
        return self.start.resume


@dataclass(frozen=True, kw_only=True)
class Training:
    """Parts that train, save, evaluate and log."""

    loop: TrainingLoop
    saver: CheckpointSaver | None
    durable: DurableSteps | None
    log: RunLog | None
    """Log of the run on the first rank; None on other ranks."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Reason why the steps ended, and the times of their start and end, by `time.monotonic`."""

    stop_reason: StopReason
    loaded_at: float
    trained_at: float
