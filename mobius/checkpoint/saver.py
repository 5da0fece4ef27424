"""Saves a run's checkpoints: when, what is in them, and which are kept. All ranks call it alike.

    main threads      save(step 8)                    each step's numbers: who has written     save(step 16) ...
    rank threads      copy and write own stages ....  records-1.json                            (waits for the end of 8)
    rank 0's thread                                        check, name, remove older ones

Nobody waits for a save but the next one and the end of the run. A save that fails on one rank is given up by all and
told, and the run goes on as it would have.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mobius.checkpoint.folders import (
    checkpoint_path,
    commit_checkpoint,
    create_partial,
    discard,
    find_checkpoints,
    open_checkpoint,
    partial_path,
    rotate_checkpoints,
    write_text,
)
from mobius.checkpoint.manifest import MANIFEST_FILE, Manifest, file_record
from mobius.checkpoint.model_card import Origin
from mobius.checkpoint.model_folder import write_adapter, write_model_files
from mobius.checkpoint.resume import ORIGIN, restore
from mobius.checkpoint.saved_stage import OpenRun, SavedStage, export_bytes, saved_parameters
from mobius.checkpoint.stage_saver import AsyncStageSaver, SaveOutcome
from mobius.checkpoint.tensor_files import (
    MODEL_PREFIX,
    TRAINED_PREFIX,
    FileRecord,
    check_disk_space,
    checkpoint_disk_bytes,
    free_disk_bytes,
    nearest_folder,
    plan_files,
    write_stage,
)
from mobius.config.config import ALL_CHECKPOINTS, Config, SaveStrategy, steps_between
from mobius.distributed.node_checks import versions
from mobius.distributed.transport import all_gather_numbers
from mobius.engine.optimizer_stepper import StepCounts
from mobius.errors import CheckpointError, MobiusError, first_line
from mobius.hardware.devices import num_optimizer_threads
from mobius.hardware.disk_rate import measure_write_rate
from mobius.hardware.host_memory import available_host_bytes
from mobius.models.adapters.peft_folder import AdapterBase
from mobius.models.model_files import ModelFiles
from mobius.planner.checkpoint_estimates import estimate_checkpoint
from mobius.planner.run_setup import RunSetup
from mobius.regular_files import read_json
from mobius.reporting.events import CheckpointSaved
from mobius.reporting.trainer_state import STATE_FILE, TrainerState
from mobius.units import GIB, format_bytes

logger = logging.getLogger(__name__)

_WORTH_MEASURING = GIB
"""Bytes of a checkpoint from which on the disk's rate is measured, in two seconds."""


@dataclass(frozen=True, kw_only=True)
class StepMetadata:
    """Everything that a checkpoint tells beside tensors, at the end of a step."""

    step: int
    counts: StepCounts
    epoch: float
    metric: float | None
    is_best: bool
    """Whether no evaluation so far had a better metric."""
    loop_state: Mapping[str, Any]
    """Whatever else the loop needs to go on, as JSON has it."""
    trainer_state: TrainerState | str
    """Contents of trainer_state.json, as a snapshot of which the text is made beside training; the first rank's."""
    follows: str = "training goes on"
    """Next part of the run, whether the save fails or not."""


@dataclass(frozen=True, kw_only=True)
class RunMetadata:
    """Everything in a checkpoint that stays the same over a run; the first rank's."""

    model_files: ModelFiles
    files: Mapping[str, str]
    """Texts by file name, such as training_args.yaml and plan.json."""
    options: Mapping[str, Any]
    data_fingerprint: str
    origin: Origin
    base: AdapterBase | None = None
    """The model that adapters are for; None where there are none."""


def count_saves(config: Config, *, num_steps_done: int, epochs_done: float, epochs: float) -> int:
    """Checkpoints that a run is to save from `num_steps_done` on; its last step is in epoch `epochs`, about."""
    saving, total = config.saving, config.optim.num_steps
    if saving.save_strategy is SaveStrategy.EPOCH:
        return math.floor(epochs) - math.floor(epochs_done)
    every = steps_between(saving.save_steps, total)
    return total // every - num_steps_done // every


def check_disk_space_for_run(run_setup: RunSetup, save_dir: Path, *, num_saves: int) -> None:
    """Refuse a run whose disk has no room for its first checkpoint and its model; warn where later ones do not fit.

    Call it before weights are read, on the first rank. Raises CheckpointError.
    """
    config = run_setup.config
    parameters, limit = saved_parameters(run_setup), config.saving.save_total_limit
    has_optimizer, model = not config.saving.save_only_model, export_bytes(run_setup)
    each = checkpoint_disk_bytes(parameters, run_setup.dtype, has_optimizer)
    free = free_disk_bytes(save_dir)
    room = (free - model) // each
    found = f"--save_dir {save_dir}: a checkpoint takes {format_bytes(each)}, the model {format_bytes(model)}; "
    found += f"{format_bytes(free)} is free"
    smaller = checkpoint_disk_bytes(parameters, run_setup.dtype, has_optimizer=False)
    if num_saves > 0 and room < 1:
        less = f"save weights only (--save_only_model: {format_bytes(smaller)}), " if has_optimizer else ""
        raise CheckpointError(
            f"{found}. Nothing is trained yet. Free some space, choose another --save_dir, {less}or save no "
            "checkpoints: --save_strategy no."
        )
    # An older one is removed when the new one is complete.
    wanted = num_saves
    if limit != ALL_CHECKPOINTS:
        wanted = min(num_saves, max(1, limit + 1 - len(find_checkpoints(save_dir).valid)))
    if room < wanted:
        logger.warning(
            "%s, room for %d of the %d further checkpoints that are there at once. Saves that find no room are told "
            "and left out: free some space, or lower --save_total_limit",
            found,
            room,
            wanted,
        )


class _NotBegunError(CheckpointError):
    """A save for which the first rank could not make a folder."""


class CheckpointSaver:
    """Owns the saves of a run, one at a time, and the copies that they are made from."""

    def __init__(
        self,
        session: OpenRun,
        save_dir: Path,
        run_metadata: RunMetadata,
        *,
        on_complete: Callable[[], None] = lambda: None,
    ) -> None:
        """Take memory for copies; collective. What is complete in `save_dir` counts as the run's own.

        `on_complete` is called on the first rank with each checkpoint that is complete.
        """
        self._made_safe = on_complete
        self.on_saved: Callable[[CheckpointSaved], None] = lambda event: logger.info("%s", event.line)
        """Called on the first rank with each checkpoint, once it has its name; in a thread."""
        run_setup = session.run_setup
        self._session, self.save_dir, self._run_metadata = session, save_dir, run_metadata
        self._activity = session.activity
        self._config, self._run_setup, self._all_ranks = run_setup.config, run_setup, session.all_ranks
        self._rank, self._is_first = self._all_ranks.rank, self._all_ranks.rank == 0
        self._writes = run_setup.rank_context.ranks.replica == 0
        """Whether this rank writes its stages, of which all replicas have the same."""
        saving = run_setup.config.saving
        self._has_optimizer = not saving.save_only_model
        self._parameters = saved_parameters(run_setup)
        self._is_whole = not self._config.adapters.is_lora
        self._weights_name = MODEL_PREFIX if self._is_whole else TRAINED_PREFIX
        self._files = plan_files(
            self._parameters,
            dtype=run_setup.dtype,
            has_optimizer=self._has_optimizer,
            weights_prefix=self._weights_name,
        )
        self.num_bytes = checkpoint_disk_bytes(self._parameters, run_setup.dtype, self._has_optimizer)
        self.estimate = estimate_checkpoint(run_setup.result.request, run_setup.plan, has_optimizer=self._has_optimizer)
        self.disk_rate = self._measure_disk()
        """Bytes per second; None where a save takes no time to speak of."""
        self._stage_saver = self._take_room()
        self._next_number = self._first_number()
        self._metadata: StepMetadata | None = None
        self._save_number = 0
        """Number of the save that is under way; 0 if there is none."""
        self._is_written = False
        self._finisher: threading.Thread | None = None
        self._begun = 0.0
        self.best_step: int | None = None
        """Step of the best checkpoint, which is not to be removed; on the first rank."""
        self._newest: Path | None = None
        self.newest_step = 0
        self.outcomes: list[SaveOutcome] = []

    def resume_from(self, newest: Path, step: int, best_step: int | None) -> None:
        """Take over what the run had before it was resumed: its checkpoint, and the best one."""
        if newest.resolve().parent == self.save_dir.resolve():
            self._newest, self.newest_step = newest, step
            if best_step is not None and checkpoint_path(self.save_dir, best_step).exists():
                self.best_step = best_step

    @property
    def newest(self) -> Path | None:
        """The last one that was completed, on the first rank; None, too, where somebody has removed it."""
        return self._newest if self._newest is not None and self._newest.is_dir() else None

    def before_update(self, stage: int) -> None:
        """For the stepper: return when the state of `stage` may change."""
        self._stage_saver.before_update(stage)

    def describe(self) -> str:
        """A line for the log: what a checkpoint takes, how long, and what training waits for."""
        limit = self._config.saving.save_total_limit
        kept = "all" if limit == ALL_CHECKPOINTS else f"the newest {limit}"
        return f"{self.estimate.describe(self._free_bytes, self.disk_rate)}; {kept} are kept in {self.save_dir}"

    @property
    def seconds(self) -> float | None:
        """Time that a save takes, where the disk was measured."""
        return None if self.disk_rate is None else self.estimate.seconds(self.disk_rate)

    def save(self, metadata: StepMetadata) -> None:
        """Begin to save the state behind the last step; collective. Waits for the save before."""
        self._activity.start_action(f"the begin of the save of step {metadata.step}")
        self.finish()
        self._metadata, self._save_number, self._is_written = metadata, self._next_number, False
        self._next_number += 1
        self._begun = time.monotonic()
        self._records: list[FileRecord] = []
        partial = partial_path(self.save_dir, metadata.step)
        num_bytes = self.num_bytes if self._is_first else self._stage_saver.num_bytes
        problem: list[Exception] = []
        try:
            if self._writes:
                check_disk_space(self.save_dir, num_bytes)
            if self._is_first:
                create_partial(self.save_dir, metadata.step)
        except CheckpointError as error:
            problem = [error]
        self._all_ranks.barrier()  # the folder is there, or there is none to write to
        if not problem and self._writes and not partial.is_dir():
            problem = [_NotBegunError("the first rank tells why")]

        def write(stage: int, tensors: Mapping[str, Tensor]) -> None:
            try:
                if problem:
                    raise problem[0]
                if stage < len(self._files) and self._writes:
                    self._records += write_stage(
                        partial, self._files[stage], tensors.__getitem__, progress=self._activity.progress
                    )
            except Exception as error:
                if self._session.transport.replicas is None:
                    raise
                problem[:] = problem or [error]  # other replicas wait until they have given all their parts

        def on_written() -> None:
            if problem:
                raise problem[0]
            if not self._is_first and self._writes:
                text = json.dumps([asdict(record) for record in self._records])
                write_text(partial, f"records-{self._rank}.json", text)

        self._stage_saver.begin(write, on_written=on_written)

    def local(self) -> Sequence[float]:
        """This rank's part in each step's exchange: the save that it has written, negative if that failed."""
        if not self._save_number or self._is_written or not self._stage_saver.is_done:
            return [0.0]
        return [self._report()]

    def gathered(self, table: Tensor) -> None:
        """Finish the save once all ranks have written: the other part of the exchange."""
        if not self._save_number or self._is_written:
            return
        told = table[:, 0].tolist()
        if all(abs(number) == self._save_number for number in told):
            self._is_written = True
            self._all_have_written(all(number > 0 for number in told))

    def finish(self) -> None:
        """Wait until no save is under way; collective."""
        if not self._save_number or self._metadata is None:
            return
        with self._activity.waiting(f"the save of step {self._metadata.step} on all ranks"):
            if not self._is_written:
                self.gathered(all_gather_numbers(self._all_ranks, [self._report()]))
            if self._finisher is not None:
                self._finisher.join()
                self._finisher = None
            self._save_number = 0
            self._all_ranks.barrier()

    def close(self) -> None:
        """Give memory back; no save may be under way."""
        self._stage_saver.close()

    def _report(self) -> float:
        """Number that `own` tells once this rank's threads are through."""
        if self._stage_saver.is_saving:
            self._settled(self._stage_saver.wait())
        return float(-self._save_number if self._outcome.error else self._save_number)

    def _settled(self, outcome: SaveOutcome) -> None:
        """Take the outcome of this rank's threads; what they wrote they have told the first rank by a file."""
        if outcome.error is not None:
            self._tell_failure(outcome.error)
        self._outcome = outcome
        self.outcomes.append(outcome)

    def _tell_failure(self, error: BaseException) -> None:
        assert self._metadata is not None
        if isinstance(error, _NotBegunError):
            return
        is_ours = isinstance(error, MobiusError)
        told = str(error) if is_ours else f"{type(error).__name__}: {first_line(error)}"
        last = f" The last good checkpoint is {self.newest}." if self.newest else ""
        step, follows = self._metadata.step, self._metadata.follows
        trace = None if is_ours else error  # nobody else would tell where a save stumbled that is not seen again
        logger.warning("checkpoint of step %d is not saved, and %s: %s%s", step, follows, told, last, exc_info=trace)

    def _all_have_written(self, is_good: bool) -> None:
        if not self._is_first:
            return
        name = "saving: name"
        self._finisher = threading.Thread(target=self._name, args=(is_good,), name=name, daemon=True)
        self._finisher.start()

    def _name(self, is_good: bool) -> None:
        """Make a complete checkpoint of what all ranks have written, on the first rank."""
        metadata = self._metadata
        assert metadata is not None
        self._activity.start_task("writer", f"the end of the checkpoint of step {metadata.step}")
        try:
            partial = partial_path(self.save_dir, metadata.step)
            if not is_good:
                discard(partial)
            elif self._is_completed(partial, metadata):
                self._made_safe()
                self._remove_old()
        except CheckpointError as error:  # the checkpoint itself is there, or was told
            logger.warning("%s", error)
        finally:
            self._activity.end_task("writer")

    def _is_completed(self, partial: Path, metadata: StepMetadata) -> bool:
        """Give the checkpoint its name; False where that failed, which is told."""
        try:
            newest = self._complete(partial, metadata)
        except Exception as error:
            self._tell_failure(error)
            if not checkpoint_path(self.save_dir, metadata.step).exists():
                discard(partial)
            return False
        self._newest, self.newest_step = newest, metadata.step
        if metadata.is_best:
            self.best_step = metadata.step
        self.on_saved(
            CheckpointSaved(
                step=metadata.step,
                path=str(newest),
                num_bytes=self.estimate.disk_bytes,
                seconds=time.monotonic() - self._begun,
                waited_seconds=self._outcome.waited_seconds,
            )
        )
        return True

    def _remove_old(self) -> None:
        best = [] if self.best_step is None else [checkpoint_path(self.save_dir, self.best_step)]
        for path in rotate_checkpoints(self.save_dir, keep=self._config.saving.save_total_limit, protected=best):
            logger.info("checkpoint removed: %s (--save_total_limit)", path)

    def _complete(self, partial: Path, metadata: StepMetadata) -> Path:
        records = list(self._records)
        for file in sorted(partial.glob("records-*.json")):
            records += [file_record(entry) for entry in read_json(file)]
            file.unlink()
        write_model_files(
            partial, self._run_metadata.model_files, self._run_setup.parts.config, dtype=self._run_setup.dtype
        )
        if self._run_metadata.base is not None:
            files = sorted(partial.glob(f"{TRAINED_PREFIX}*.safetensors"))
            write_adapter(partial, files, self._run_setup.parts, self._run_metadata.base)
            (partial / "config.json").unlink()
        state = metadata.trainer_state
        state_text = state if isinstance(state, str) else state.to_json()
        for name, text in {**self._run_metadata.files, STATE_FILE: state_text}.items():
            write_text(partial, name, text)
        manifest = Manifest(
            step=metadata.step,
            save_number=self._save_number,
            num_parameters=sum(parameter.num_elements for parameter in self._parameters),
            dtype=str(self._run_setup.dtype).removeprefix("torch."),
            has_optimizer=self._has_optimizer,
            files=tuple(sorted(records, key=lambda record: record.file_name)),
            training=asdict(metadata.counts),
            data={
                **metadata.loop_state,
                "epoch": metadata.epoch,
                "fingerprint": self._run_metadata.data_fingerprint,
                ORIGIN: asdict(self._run_metadata.origin),
            },
            options=self._run_metadata.options,
            versions=versions(),
            metric=metadata.metric,
        )
        return commit_checkpoint(
            partial,
            manifest,
            parameters=self._parameters,
            dtype=self._run_setup.dtype,
            weights_prefix=self._weights_name,
        )

    def _first_number(self) -> int:
        """The number of the next save, as the first rank counts: other nodes may not see --save_dir."""
        own = find_checkpoints(self.save_dir).next_save_number if self._is_first else 0
        return int(all_gather_numbers(self._all_ranks, [float(own)]).sum())

    def _measure_disk(self) -> float | None:
        """The rate that the first rank measures, on all ranks."""
        if self.estimate.disk_bytes < _WORTH_MEASURING:
            return None
        own = measure_write_rate(nearest_folder(self.save_dir)) if self._is_first else None
        return float(all_gather_numbers(self._all_ranks, [own or 0.0]).sum()) or None

    def _take_room(self) -> AsyncStageSaver:
        config = self._config
        own = self._session.memory
        replicas = self._session.transport.replicas
        common = self._is_whole, replicas, self._run_setup.parts.parameter_pieces
        names = {stage: {p.name for p in self._parameters if p.stage == stage} for stage in own}
        stages = {stage: SavedStage(memory, names[stage], *common) for stage, memory in own.items()}
        limit = config.pipeline.host_memory_limit
        if limit is None:
            free = float(all_gather_numbers(self._all_ranks, [float(available_host_bytes())]).amin())
        else:  # memory that grows on demand is not there yet
            free = limit * GIB - self._run_setup.result.host_estimate.total
        self._free_bytes = free
        rank_context = self._run_setup.rank_context
        # Clipping updates in forward order behind the step; else stages follow their backward.
        forward = config.optim.max_grad_norm > 0
        return AsyncStageSaver(
            stages,
            order=sorted(own, reverse=not forward),
            has_optimizer=self._has_optimizer,
            staging_bytes=self.estimate.staging_bytes(
                rank_context.ranks.pipeline_rank, free / rank_context.pipelines_per_host
            ),
            device=rank_context.device,
            num_threads=num_optimizer_threads(rank_context.ranks.num_local),
            activity=self._activity,
            in_order=replicas is not None,
        )


def load_best_model(session: OpenRun, saver: CheckpointSaver, earlier: Path | None = None) -> int | None:
    """Put the best checkpoint's weights into the stages; returns its step, None if there is none. Collective.

    `earlier` is the best one of before the run was resumed, in whichever folder. Only a rank that has been told of a
    failed save knows that a checkpoint is not there, so the first one decides.
    """
    found = [0.0, 0.0]
    if session.all_ranks.rank == 0:
        has_earlier = earlier is not None and (earlier / MANIFEST_FILE).is_file()
        best = saver.best_step or 0
        if not (checkpoint_path(saver.save_dir, best) / MANIFEST_FILE).is_file():
            best = 0  # somebody has removed it
        found = [float(best), float(not best and has_earlier)]
    step, is_earlier = map(int, all_gather_numbers(session.all_ranks, found).sum(0).tolist())
    if not step and not is_earlier:
        logger.warning(
            "--load_best_model_at_end: there is no checkpoint that was evaluated, so the last weights are the result"
        )
        return None
    reader = open_checkpoint(earlier if is_earlier and earlier else checkpoint_path(saver.save_dir, step))
    session.activity.start_action("the weights of the best checkpoint")
    progress = session.activity.progress
    restore(session, session.run_setup.parts, reader, weights_only=True, progress=progress)
    logger.info("weights of the best checkpoint are taken: %s", reader.path)
    session.all_ranks.barrier()
    return reader.manifest.step
