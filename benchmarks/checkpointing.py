"""Checkpoints of a benchmark's run: saved as main.py saves them, timed, and gone on from.

Its steps are the trainer's own: a save begins behind each step that `--save_steps` names but the last.
"""

import time
from pathlib import Path
from typing import Any

from mobius.checkpoint.contents import CheckpointContents, StepMetadata
from mobius.checkpoint.folders import open_checkpoint
from mobius.checkpoint.model_card import Origin
from mobius.checkpoint.reader import CheckpointReader
from mobius.checkpoint.saver import CheckpointSaver
from mobius.data.batches import TrainingBatches
from mobius.distributed.transport import all_gather_numbers
from mobius.engine.optimizer_stepper import StepCounts
from mobius.errors import MobiusError
from mobius.models.model_files import read_model_files
from mobius.models.weights import folder_has_weights
from mobius.reporting.events import StepMetrics
from mobius.training.session import Session
from mobius.training.stages import RankStages
from mobius.training.trainer import Trainer
from mobius.units import GIB


class FailedSaveError(MobiusError):
    """A save was given up; the log tells why."""


class ResumePoint:
    """The checkpoint that a run goes on from; without one it begins at the first step."""

    def __init__(self, path: Path | None) -> None:
        """Raises CheckpointError where `path` holds no checkpoint."""
        self.reader: CheckpointReader | None = None if path is None else open_checkpoint(path)

    def trainer(
        self, session: Session, batches: TrainingBatches, saves: "TimedSaves | None", *, has_kernel: bool
    ) -> Trainer:
        """The trainer behind the steps that are done."""
        manifest = None if self.reader is None else self.reader.manifest
        num_steps_done = 0 if manifest is None else manifest.step
        batches.seek(num_steps_done)
        return session.trainer(
            batches,
            has_kernel=has_kernel,
            num_steps_done=num_steps_done,
            counts=None if manifest is None else StepCounts(**manifest.training),
            before_update=None if saves is None else saves.before_update,
        )


class TimedSaves:
    """Owns a run's saves, and the seconds of each."""

    def __init__(self, session: Session, model_folder: Path) -> None:
        """Take memory for copies; collective. Whatever is in `--save_dir` stays beside the run's own."""
        config = session.run_setup.config
        self._session = session
        self._begun: list[tuple[int, float]] = []
        self._ended: list[float] = []
        self._saver = CheckpointSaver(
            session,
            Path(config.output.save_dir),
            CheckpointContents(
                session,
                read_model_files(model_folder),
                data_fingerprint="random tokens",
                origin=Origin(config.model.model_path, folder_has_weights(model_folder)),
            ),
            on_complete=lambda: self._ended.append(time.monotonic()),
        )
        self.before_update = self._saver.before_update

    def train(self, trainer: Trainer) -> list[StepMetrics]:
        """Run all steps, saving on the way; collective. Nothing is under way when it returns."""
        config, steps = self._session.run_setup.config, list[StepMetrics]()
        trainer.step_gather = self._saver
        for metrics in trainer.train():
            steps.append(metrics)
            if metrics.step % int(config.saving.save_steps) == 0 and metrics.step < config.optim.num_steps:
                self._begun.append((metrics.step, time.monotonic()))
                self._saver.save(_point(trainer, metrics))
        trainer.drain()
        self._saver.finish()
        return steps

    def results(self) -> dict[str, Any]:
        """All saves, by the slowest rank of each; collective, on the first rank with the seconds until each was named.

        `stage_gib` is what the largest stage of each rank takes, added up. Raises FailedSaveError on all ranks where a
        checkpoint is not complete, whoever failed to write or to name it.
        """
        outcomes, transport = self._saver.outcomes, self._session.transport
        missing = len(self._begun) - len(self._ended) if transport.rank == 0 else 0
        missing = int(all_gather_numbers(transport, [missing]).sum())
        if missing:
            raise FailedSaveError(f"{missing} of {len(self._begun)} checkpoints are not saved; see above")
        own = [
            number
            for each in outcomes
            for number in (each.num_bytes, each.seconds, each.writing_seconds, each.waited_seconds)
        ]
        largest = max((_stage_bytes(self._session.stages, stage) for stage in self._session.stages.memory), default=0)
        table = all_gather_numbers(transport, [largest, *own])
        saves = []
        for number, (step, start) in enumerate(self._begun):
            part = table[:, 1 + 4 * number : 5 + 4 * number]
            _, written, writing, waited = part.amax(0).tolist()
            told = {"step": step, "num_bytes": int(part[:, 0].sum()), "written_seconds": written}
            told |= {"writing_seconds": writing, "waited_seconds": waited}
            saves.append(told | ({"seconds": self._ended[number] - start} if transport.rank == 0 else {}))
        return {
            "saves": saves,
            "describes": self._saver.describe(),
            "stage_gib": float(table[:, 0].sum()) / GIB,
            "newest": str(self._saver.newest),
        }

    def close(self) -> None:
        """Give the memory of the copies back."""
        self._saver.close()


def _point(trainer: Trainer, metrics: StepMetrics) -> StepMetadata:
    return StepMetadata(
        step=metrics.step,
        counts=trainer.counts,
        epoch=metrics.epoch,
        metric=None,
        is_best=False,
        loop_state={},
        trainer_state="{}\n",
    )


def _stage_bytes(stages: RankStages, stage: int) -> int:
    state = stages.memory[stage].state
    return sum(tensor.nbytes for tensor in (state.weights, *state.parts.values()))
