"""Sessions and trainers of tiny models in this process, and what they save and resume."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import numpy as np
import torch
from harness.local_transport import LocalTransport, run_replica_threads
from harness.run_setups import make_run_setup
from harness.runs import make_checkpoint
from harness.samples import dataset_of
from harness.shared_parts import SharedParts
from harness.shared_parts import rank as rank_thread
from torch import Tensor

from mobius.checkpoint.contents import CheckpointContents, StepMetadata
from mobius.checkpoint.folders import open_checkpoint
from mobius.checkpoint.model_card import Origin
from mobius.checkpoint.reader import CheckpointReader
from mobius.checkpoint.saved_stage import SavedStage
from mobius.checkpoint.saver import CheckpointSaver
from mobius.config.cli import given_options, parse_args
from mobius.data.batches import TrainingBatches
from mobius.data.mixture import WeightedSamples
from mobius.data.token_store import TokenizedDataset
from mobius.engine.optimizer_stepper import StepCounts
from mobius.hardware.devices import MemoryMeter
from mobius.models.families import load_model_config
from mobius.models.model_files import read_model_files
from mobius.models.weights import folder_has_weights
from mobius.process.ranks import Ranks
from mobius.schedule.checkpoint_estimates import CheckpointEstimate
from mobius.training.data import packed_rows
from mobius.training.evaluation.evaluator import Evaluator
from mobius.training.run import run_training
from mobius.training.run_setup import RunSetup
from mobius.training.session import Session, open_session
from mobius.training.trainer import Trainer

T = TypeVar("T")
VOCAB = 512
"""Tokens of random samples; models of these alone compute in a third of the time."""
_MAKING = threading.Lock()


def resume(checkpoint: str, *arguments: str) -> None:
    """Go on from a checkpoint with these options and no others."""
    words = f"--device cpu --resume_from_checkpoint {checkpoint} --save_params none".split()
    words += ["--save_results", "resumed.txt", *arguments]
    run_training(parse_args(words, num_ranks=1), Ranks(0, 1, 0), given=given_options(words))


def random_samples(num_samples: int, longest: int, *, seed: int = 0, shortest: int = 2) -> TokenizedDataset:
    """Samples of different lengths, the first third of each a prompt."""
    draw = np.random.default_rng(seed)
    rows = []
    for length in draw.integers(shortest, longest, num_samples, endpoint=True).tolist():
        tokens = draw.integers(1, VOCAB, length, dtype=np.int32)
        rows.append((tokens, np.arange(length) >= max(1, length // 3)))
    return dataset_of(rows)


def in_sessions(
    num_ranks: int,
    folder: Path,
    options: str,
    training: TokenizedDataset,
    work: Callable[[Session, TrainingBatches], T],
    *,
    num_replicas: int = 1,
) -> list[T]:
    """Open a session in a thread for each rank, and give what `work` makes of each, with its batches of `training`.

    `num_ranks` are those of a pipeline.
    """
    num_all = num_replicas * num_ranks

    def run(rank: int, transport: LocalTransport) -> T:
        rank_thread.number = rank
        with _MAKING:
            words = f"--device cpu --model_path {folder} {options}".split()
            config = parse_args(words, num_ranks=num_all, num_nodes=num_replicas)
            batches = TrainingBatches(
                [WeightedSamples(training)],
                batch_size=config.pipeline.batch_size,
                seq_length=config.data.seq_length,
                pad_token_id=0,
                seed=config.optim.seed,
                is_packed=config.data.packing.value != "off",
            )
            ranks = Ranks(rank, num_all, transport.rank, num_replicas=num_replicas, num_nodes=num_replicas)
            model_config = load_model_config(folder, config.model)
            run_setup = make_run_setup(config, ranks, model_config, packed=packed_rows(batches))
        session = open_session(run_setup, folder, transport=transport)
        # A rank alone would take a thread on every core for matrices that take one less time.
        torch.set_num_threads(threads)
        try:
            return work(session, batches)
        finally:
            session.stages.close()

    threads = torch.get_num_threads()  # those of this process, which runs other tests too
    try:
        with patch("mobius.training.run_setup.ModelParts", SharedParts):
            return run_replica_threads(num_replicas, num_ranks, run)
    finally:
        torch.set_num_threads(threads)


def evaluator_of(session: Session, *datasets: TokenizedDataset, names: Sequence[str] = "abc") -> Evaluator:
    """The evaluator on all samples of `datasets`, which have the names of letters."""
    samples = [(name, each, None) for name, each in zip(names, datasets, strict=False)]
    return Evaluator(session, samples, pad_token_id=0)


SAMPLES = 60
State = dict[str, Tensor]
"""Copies on the host of all that a checkpoint holds, by full name."""


@dataclass(frozen=True)
class Record:
    """Everything that a run leaves."""

    numbers: dict[int, tuple[float, float]]
    """Loss and norm of each step."""
    final: State
    states: dict[int, State] = field(default_factory=dict)
    """Behind steps, where they were asked for."""
    had_room: bool | None = None
    """Whether all stages' copies had memory of their own, where the run saved."""


@dataclass(frozen=True)
class SavedSession:
    """One kind of run: a model's folder, and options of main.py without --model_path and --save_dir."""

    model_folder: Path
    options: str
    longest: int
    """Tokens of the longest sample."""

    def run(
        self,
        *,
        save_dir: Path | None = None,
        saved_steps: tuple[int, ...] = (),
        resumed: Path | None = None,
        noted_steps: tuple[int, ...] = (),
        is_tight: bool = False,
        evaluates: bool = False,
    ) -> Record:
        """Train all steps; nothing waits for the device but behind `noted_steps`, whose states are copied.

        `saved_steps` are saved into `save_dir`; `is_tight` leaves no host memory for copies. `resumed` is the
        checkpoint to go on from. `evaluates` behind every step.
        """
        with self._opened(None if resumed is None else open_checkpoint(resumed), save_dir) as opened:
            session, batches, reader = opened
            with patch.object(CheckpointEstimate, "staging_bytes", lambda *_: 0) if is_tight else nullcontext():
                saver = _saver(session, save_dir) if save_dir is not None else None
            manifest = None if reader is None else reader.manifest
            batches.seek(0 if manifest is None else manifest.step)
            trainer = session.trainer(
                batches,
                num_steps_done=0 if manifest is None else manifest.step,
                counts=None if manifest is None else StepCounts(**manifest.training),
                before_update=None if saver is None else saver.before_update,
            )
            trainer.step_gather = saver
            evaluator = self.evaluator(session) if evaluates else None
            numbers, states = dict[int, tuple[float, float]](), dict[int, State]()
            for metrics in trainer.train():
                numbers[metrics.step] = metrics.loss, metrics.grad_norm
                if evaluator is not None:
                    evaluator.evaluate()
                if metrics.step in noted_steps:
                    trainer.drain()
                    states[metrics.step] = state_of(session)
                if saver is not None and metrics.step in saved_steps:
                    point = {"epoch": metrics.epoch, "metric": None, "is_best": False, "loop_state": {}}
                    saver.save(
                        StepMetadata(step=metrics.step, counts=trainer.counts, trainer_state="{}\n", **point)  # type: ignore[arg-type]
                    )
            trainer.drain()
            had_room = None
            if saver is not None:
                saver.finish()
                assert [outcome.error for outcome in saver.outcomes] == [None] * len(saved_steps)
                assert saver._stage_saver.staging_buffers is not None
                had_room = saver._stage_saver.staging_buffers.has_buffer_per_stage
                saver.close()
            return Record(numbers, state_of(session), states, had_room)

    def evaluator(self, session: Session) -> Evaluator:
        """The evaluator on samples of another seed."""
        return evaluator_of(session, random_samples(9, self.longest, seed=5))

    @contextmanager
    def _opened(
        self, reader: CheckpointReader | None, save_dir: Path | None
    ) -> Iterator[tuple[Session, TrainingBatches, CheckpointReader | None]]:
        words = [f"--model_path {self.model_folder} {self.options} --save_total_limit 0"]
        words += [] if save_dir is None else [f"--save_dir {save_dir}"]
        run_setup, batches = self._drawn(words)
        threads = torch.get_num_threads()  # those of this process, which runs other tests too
        session = open_session(
            run_setup,
            self.model_folder,
            checkpoint=reader,
        )
        torch.set_num_threads(threads)
        try:
            yield session, batches, reader
        finally:
            MemoryMeter(session.run_setup.device).synchronize()
            session.close()

    def _drawn(self, words: list[str]) -> tuple[RunSetup, TrainingBatches]:
        config = parse_args(" ".join(words).split())
        batches = TrainingBatches(
            [WeightedSamples(random_samples(SAMPLES, self.longest))],
            batch_size=config.pipeline.batch_size,
            seq_length=config.data.seq_length,
            pad_token_id=0,
            seed=config.optim.seed,
            is_packed=config.data.packing.value != "off",
        )
        model_config = load_model_config(self.model_folder, config.model)
        return make_run_setup(config, Ranks(0, 1, 0), model_config, packed=packed_rows(batches)), batches


def weights_of(session: Session) -> dict[str, Tensor]:
    """Copies of what a rank trains, by name."""
    states = [memory.state for memory in session.stages.memory.values()]
    return {name: view.clone() for each in states for name, view in each.layout.views(each.weights).items()}


def state_of(session: Session) -> State:
    """Copies of all stages' states; the device has ended its work before they are taken."""
    MemoryMeter(session.run_setup.device).synchronize()
    found: State = {}
    for memory in session.stages.memory.values():
        stage = SavedStage(memory, memory.state.layout.offsets.keys())
        flat = stage.flat_tensors(has_optimizer=True)
        found |= stage.named_tensors({kind: memory.in_memory(tensor) for kind, tensor in flat.items()})
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in found.items()}


def saved_state(checkpoint: Path, like: Mapping[str, Tensor]) -> State:
    """The tensors of `like` as a checkpoint has them."""
    reader = open_checkpoint(checkpoint)
    return {name: reader.read(name, torch.empty_like(tensor)) for name, tensor in like.items()}


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names whose bits are not the same."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(_bits(one[name]), _bits(other[name]))]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _saver(session: Session, save_dir: Path) -> CheckpointSaver:
    folder = Path(session.run_setup.config.model.model_path)
    origin = Origin(str(folder), folder_has_weights(folder))
    contents = CheckpointContents(session, read_model_files(folder), data_fingerprint="random", origin=origin)
    return CheckpointSaver(session, save_dir, contents)


def make_single_trainer(folder: Path, options: str, *, is_tied: bool = False) -> tuple[Trainer, Session]:
    """A trainer with `options` of main.py, and its session; that is to be closed when nothing copies any more."""
    make_checkpoint(folder, is_tied=is_tied)
    config = parse_args(f"--model_path {folder} {options}".split())
    size, length = config.pipeline.batch_size, config.data.seq_length
    run_setup = make_run_setup(config, Ranks(0, 1, 0), load_model_config(folder, config.model))
    tokens = np.random.default_rng(0).integers(0, run_setup.shape.vocab_size, size * length, dtype=np.int32)
    offsets = np.arange(size + 1, dtype=np.int64) * length
    dataset = TokenizedDataset(tokens, np.ones(len(tokens), dtype=bool), offsets)
    batches = TrainingBatches(
        [WeightedSamples(dataset)], batch_size=size, seq_length=length, pad_token_id=0, seed=1, is_packed=False
    )
    threads = torch.get_num_threads()  # those of this process, which runs other tests too
    session = open_session(run_setup, folder)
    torch.set_num_threads(threads)
    return session.trainer(batches), session
