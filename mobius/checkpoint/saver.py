"""Saves a run's checkpoints while training goes on, and removes older ones. All ranks make the same calls.

    main threads      save(step 8)                    each step's numbers: which ranks are done  save(step 16) ...
    rank threads      copy and write own stages ....  records-1.json                            (waits for the end of 8)
    rank 0's thread                                        check, name, remove older ones

Only the next save and the end of the run wait for a save. If a save fails on one rank, all ranks give it up with a
warning, and the run goes on.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import Tensor

from mobius.checkpoint.contents import CheckpointContents, StepMetadata
from mobius.checkpoint.folders import (
    checkpoint_path,
    commit_checkpoint,
    create_partial,
    discard,
    find_checkpoints,
    partial_path,
    rotate_checkpoints,
)
from mobius.checkpoint.manifest import file_record
from mobius.checkpoint.saved_stage import OpenRun, SavedStage, export_bytes
from mobius.checkpoint.stage_saver import AsyncStageSaver, SaveOutcome
from mobius.checkpoint.tensor_files import (
    MODEL_PREFIX,
    TRAINED_PREFIX,
    FileRecord,
    check_disk_space,
    checkpoint_disk_bytes,
    plan_files,
    write_stage,
    write_text,
)
from mobius.config.config import ALL_CHECKPOINTS, SaveStrategy, SavingConfig, steps_between
from mobius.distributed.transport import all_gather_numbers
from mobius.errors import CheckpointError, MobiusError, first_line
from mobius.files.atomic_files import nearest_folder
from mobius.files.regular_files import read_json
from mobius.hardware.disk_rate import measure_rates
from mobius.hardware.host_memory import available_host_bytes
from mobius.reporting.events import CheckpointSaved
from mobius.schedule.checkpoint_estimates import estimate_checkpoint
from mobius.units import GIB

logger = logging.getLogger(__name__)

_WORTH_MEASURING = GIB
"""Smallest checkpoint, in bytes, for which the disk's rate is measured, which takes two seconds."""


class _NotBegunError(CheckpointError):
    """A save for which the first rank could not create a folder; the first rank logs the reason."""


def describe_kept(saving: SavingConfig, num_steps: int, save_dir: Path) -> str:
    """Describe which checkpoints are kept in `save_dir`, or say that none is due in a run of `num_steps` steps."""
    if saving.save_strategy is SaveStrategy.STEPS and steps_between(saving.save_steps, num_steps) > num_steps:
        return f"none is due in {num_steps} steps (--save_steps {saving.save_steps:g})"
    limit = saving.save_total_limit
    return f"{'all' if limit == ALL_CHECKPOINTS else f'the newest {limit}'} are kept in {save_dir}"


@dataclass
class _Save:
    """A save in progress."""

    metadata: StepMetadata
    begun: float = field(default_factory=time.monotonic)
    records: list[FileRecord] = field(default_factory=list)
    """Files that this rank has written."""
    is_written: bool = False
    """Whether all ranks have reported their part as written or failed."""


class CheckpointSaver:
    """Owns the saves of a run, one at a time, and the copies from which they are written."""

    def __init__(
        self,
        session: OpenRun,
        save_dir: Path,
        contents: CheckpointContents,
        *,
        on_complete: Callable[[], None] = lambda: None,
    ) -> None:
        """Allocate memory for copies; collective. Complete checkpoints in `save_dir` count as checkpoints of this run.

        `on_complete` is called on the first rank after each complete checkpoint.
        """
        run_setup = session.run_setup
        self._on_complete = on_complete
        self.on_saved: Callable[[CheckpointSaved], None] = lambda event: logger.info("%s", event.line)
        """Function that a thread of the first rank calls with each checkpoint once it has its final name."""
        self._session, self.save_dir, self._contents = session, save_dir, contents
        self._activity, self._config, self._run_setup = session.activity, run_setup.config, run_setup
        self._all_ranks, self._is_first = session.all_ranks, session.all_ranks.rank == 0
        self._writes = run_setup.ranks.replica == 0
        """Whether this rank writes its stages: only the first replica does, because all replicas have equal stages."""
        self._has_optimizer = not self._config.saving.save_only_model
        self._parameters = contents.parameters
        self._files = plan_files(
            self._parameters,
            dtype=run_setup.dtype,
            has_optimizer=self._has_optimizer,
            weights_prefix=TRAINED_PREFIX if self._config.adapters.has_frozen_base else MODEL_PREFIX,
        )
        self.num_bytes = checkpoint_disk_bytes(self._parameters, run_setup.dtype, self._has_optimizer)
        self.estimate = estimate_checkpoint(
            run_setup.plan, run_setup.shape, run_setup.memory_rules, has_optimizer=self._has_optimizer
        )
        self.disk_rate = self._measure_disk()
        """Bytes per second; None if checkpoints are too small to measure it."""
        self._free_bytes = self._measure_free_bytes()
        self._stage_saver = self._make_stage_saver()
        found = find_checkpoints(save_dir).newest_save_number if self._is_first else 0
        self.save_number = int(self._from_first(found))  # ranks of other nodes may not see --save_dir
        """Number of the newest save, complete or not."""
        self._save: _Save | None = None
        """The save in progress."""
        self._finisher: threading.Thread | None = None
        self.best_step: int | None = None
        """Step of the best checkpoint, which must not be removed; on the first rank."""
        self._newest: Path | None = None
        self.newest_step = 0
        self.outcomes: list[SaveOutcome] = []

    def resume_from(self, newest: Path, step: int, best_step: int | None) -> None:
        """Record the checkpoint that the run was resumed from and the best checkpoint so far, if in `save_dir`."""
        if newest.resolve().parent == self.save_dir.resolve():
            self._newest, self.newest_step = newest, step
            if best_step is not None and checkpoint_path(self.save_dir, best_step).exists():
                self.best_step = best_step

    @property
    def newest(self) -> Path | None:
        """The newest complete checkpoint, on the first rank; None also if a user has removed it."""
        return self._newest if self._newest is not None and self._newest.is_dir() else None

    def before_update(self, stage: int) -> None:
        """Wait until the state of `stage` may change; the stepper calls this."""
        self._stage_saver.before_update(stage)

    def describe(self) -> str:
        """Return a log line: size and time of a checkpoint, whether training waits, and which checkpoints are kept."""
        kept = describe_kept(self._config.saving, self._config.optim.num_steps, self.save_dir)
        return f"{self.estimate.describe(self._free_bytes, self.disk_rate)}; {kept}"

    @property
    def seconds(self) -> float | None:
        """Seconds that a save takes; None if the disk was not measured."""
        return None if self.disk_rate is None else self.estimate.disk_bytes / self.disk_rate

    def save(self, metadata: StepMetadata) -> None:
        """Wait for the previous save, then begin to save the state after the last step; collective."""
        self._activity.start_action(f"the start of the save of step {metadata.step}")
        self.finish()
        save = self._save = _Save(metadata)
        self.save_number += 1
        partial = partial_path(self.save_dir, metadata.step)
        problems: list[Exception] = []
        try:
            if self._writes:
                check_disk_space(self.save_dir, self.num_bytes if self._is_first else self._stage_saver.num_bytes)
            if self._is_first:
                create_partial(self.save_dir, metadata.step)
        except CheckpointError as error:
            problems.append(error)
        self._all_ranks.barrier()  # from here on the folder exists, unless the first rank could not create it
        if not problems and self._writes and not partial.is_dir():
            problems.append(_NotBegunError())
        self._begin_stages(save, partial, problems)

    def _begin_stages(self, save: _Save, partial: Path, problems: list[Exception]) -> None:
        """Begin this rank's part of a save, which fails if there are `problems`."""

        def write(stage: int, tensors: Mapping[str, Tensor]) -> None:
            # After an error the other stages are still gathered, but not written: other replicas wait for each gather.
            if problems or stage >= len(self._files) or not self._writes:
                return
            try:
                save.records += write_stage(
                    partial,
                    self._files[stage],
                    tensors.__getitem__,
                    parts=lambda _, tensor: self._session.memory[stage].parts(tensor),
                    progress=self._activity.progress,
                )
            except Exception as error:
                problems.append(error)

        def on_written() -> None:
            if problems:
                raise problems[0]
            if not self._is_first and self._writes:
                text = json.dumps([asdict(record) for record in save.records])
                write_text(partial / f"records-{self._all_ranks.rank}.json", text)

        self._stage_saver.begin(write, on_written=on_written)

    def local(self) -> Sequence[float]:
        """Return this rank's number for each step's exchange: the save that it wrote, negative if failed, else 0."""
        if self._save is None or self._save.is_written or not self._stage_saver.is_done:
            return [0.0]
        return [self._report(self._save)]

    def gathered(self, table: Tensor) -> None:
        """Finish the save if all ranks have written their part; `table` has the numbers that `local` returned."""
        numbers, save = table[:, 0].tolist(), self._save
        if save is None or save.is_written or any(abs(each) != self.save_number for each in numbers):
            return
        save.is_written = True
        if self._is_first:
            arguments = save, all(number > 0 for number in numbers)
            self._finisher = threading.Thread(target=self._end_save, args=arguments, name="saving: name", daemon=True)
            self._finisher.start()

    def finish(self) -> None:
        """Wait until no save is in progress; collective."""
        if (save := self._save) is None:
            return
        with self._activity.waiting(f"the save of step {save.metadata.step} on all ranks"):
            if not save.is_written:
                self.gathered(all_gather_numbers(self._all_ranks, [self._report(save)]))
            if self._finisher is not None:
                self._finisher.join()
                self._finisher = None
            self._save = None
            self._all_ranks.barrier()

    def close(self) -> None:
        """Release memory; no save may be in progress."""
        self._stage_saver.close()

    def _report(self, save: _Save) -> float:
        """Wait for this rank's threads; returns the number for `local`."""
        outcome = self._stage_saver.wait()
        if outcome is not None:
            self.outcomes.append(outcome)
            if (error := self.outcomes[-1].error) is not None:
                self._warn_of_failure(error, save.metadata)
        return float(-self.save_number if self.outcomes[-1].error else self.save_number)

    def _warn_of_failure(self, error: BaseException, metadata: StepMetadata) -> None:
        if isinstance(error, _NotBegunError):
            return
        is_ours = isinstance(error, MobiusError)
        reason = str(error) if is_ours else f"{type(error).__name__}: {first_line(error)}"
        last = f" The last good checkpoint is {self.newest}." if self.newest else ""
        trace = None if is_ours else error  # log a bug's traceback, because nothing else does
        logger.warning(
            "checkpoint of step %d is not saved, and %s: %s%s",
            *(metadata.step, metadata.follows, reason, last),
            exc_info=trace,
        )

    def _end_save(self, save: _Save, is_good: bool) -> None:
        """Complete the checkpoint that all ranks have written, and remove older ones; on the first rank."""
        metadata = save.metadata
        self._activity.start_task("writer", f"the end of the checkpoint of step {metadata.step}")
        partial = partial_path(self.save_dir, metadata.step)
        try:
            newest = self._complete(partial, save) if is_good else None
        except Exception as error:
            self._warn_of_failure(error, metadata)
            newest = None
        try:
            if newest is None:
                discard(partial)
            else:
                self._after_completion(newest, save)
        except CheckpointError as error:  # only cleaning up failed
            logger.warning("%s", error)
        finally:
            self._activity.end_task("writer")

    def _after_completion(self, newest: Path, save: _Save) -> None:
        step = save.metadata.step
        self._newest, self.newest_step = newest, step
        if save.metadata.is_best:
            self.best_step = step
        self.on_saved(
            CheckpointSaved(
                step=step,
                path=str(newest),
                num_bytes=self.estimate.disk_bytes,
                seconds=time.monotonic() - save.begun,
                waited_seconds=self.outcomes[-1].waited_seconds,
            )
        )
        self._on_complete()
        best = [] if self.best_step is None else [checkpoint_path(self.save_dir, self.best_step)]
        for path in rotate_checkpoints(self.save_dir, keep=self._config.saving.save_total_limit, protected=best):
            logger.info("checkpoint removed: %s (--save_total_limit)", path)

    def _complete(self, partial: Path, save: _Save) -> Path:
        """Add all files without tensors to the files that the ranks have written, and give the checkpoint its name."""
        records = list(save.records)
        for file in sorted(partial.glob("records-*.json")):
            records += [file_record(entry) for entry in read_json(file)]
            file.unlink()
        self._contents.write_common(partial)
        self._contents.write_history(partial, save.metadata)
        manifest = self._contents.manifest(
            save.metadata, records, save_number=self.save_number, has_optimizer=self._has_optimizer
        )
        return commit_checkpoint(partial, manifest, self._files, weight_bytes=export_bytes(self._run_setup))

    def _from_first(self, number: float) -> float:
        """Return the first rank's `number` on all ranks; collective."""
        return float(all_gather_numbers(self._all_ranks, [number if self._is_first else 0.0]).sum())

    def _measure_disk(self) -> float | None:
        if self.estimate.disk_bytes < _WORTH_MEASURING:
            return None
        own = measure_rates(nearest_folder(self.save_dir), reads=False) if self._is_first else None
        return self._from_first(own[0] if own else 0.0) or None

    def _measure_free_bytes(self) -> float:
        """Host memory that copies may take on each machine; collective."""
        limit = self._config.pipeline.host_memory_limit
        if limit is None:
            return float(all_gather_numbers(self._all_ranks, [float(available_host_bytes())]).amin())
        return limit * GIB - self._run_setup.host_bytes  # not the free memory: some machines get memory on demand

    def _make_stage_saver(self) -> AsyncStageSaver:
        config, own, replicas = self._config, self._session.memory, self._session.transport.replicas
        common = not config.adapters.has_frozen_base, replicas, self._run_setup.parts.parameter_pieces
        names = {stage: {p.name for p in self._parameters if p.stage == stage} for stage in own}
        # With clipping, stages are updated in forward order after the step; otherwise, each after its backward.
        forward = config.optim.max_grad_norm > 0
        return AsyncStageSaver(
            {stage: SavedStage(memory, names[stage], *common) for stage, memory in own.items()},
            order=sorted(own, reverse=not forward),
            has_optimizer=self._has_optimizer,
            staging_bytes=self.estimate.staging_bytes(
                self._run_setup.ranks.pipeline_rank, self._free_bytes / self._run_setup.pipelines_per_host
            ),
            device=self._run_setup.device,
            num_threads=self._run_setup.optimizer_threads,
            activity=self._activity,
            in_order=replicas is not None,
        )
