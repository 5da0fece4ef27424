"""Phase of a distillation run: the teacher plays the samples forward in the place of the student, and leaves.

    samples that the run needs -> rows -> teacher, forward only -> K most likely tokens of each target -> files

The teacher is a run of its own, with a plan for its own size, that trains nothing. When it has left, the student is
planned and loaded as in any other run. If files of the same samples exist, no teacher is loaded.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mobius.config.config import AdapterConfig, Config, EvaluationConfig, ModelConfig, PipelineConfig, PlanningConfig
from mobius.config.objective import NO_OPTIONS
from mobius.data.batches import EvaluationBatches
from mobius.data.token_store import TokenizedDataset, remove_abandoned
from mobius.distributed.rendezvous import Rendezvous
from mobius.hardware.devices import free_cached_memory
from mobius.models.tokenizer import pad_token_id
from mobius.objectives.distillation import teacher_numbers
from mobius.objectives.objective import TeacherTokens
from mobius.objectives.registry import make_objective
from mobius.process.ranks import cache_folder
from mobius.reporting.events import table_row
from mobius.training.data import RunData, packed_rows
from mobius.training.inputs import ModelInputs, read_model
from mobius.training.phases import Start
from mobius.training.reference import Scorer, steps_of, weight_files
from mobius.training.run_setup import complete_run
from mobius.training.session import Session, open_session
from mobius.training.teacher import TargetPlaces, Teacher, TeacherFiles
from mobius.units import format_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Samples:
    """Datasets of a run, the sequences that it needs of each, and the places of their targets."""

    datasets: Sequence[TokenizedDataset]
    needed: Sequence[npt.NDArray[np.bool_]]
    places: Sequence[TargetPlaces]

    @property
    def num_targets(self) -> int:
        parts = zip(self.places, self.needed, strict=True)
        return sum(int(each.num_targets[is_needed].sum()) for each, is_needed in parts)


@dataclass(frozen=True)
class _Asked:
    """A student that needs a teacher's numbers."""

    model: ModelInputs
    data: RunData
    start: Start
    rendezvous: Rendezvous | None
    """Connection to all ranks; None for one rank."""
    teacher: TeacherTokens

    def gather(self, value: bool | str) -> list[bool | str]:
        """Return the values of all ranks; collective."""
        return [value] if self.rendezvous is None else self.rendezvous.gather(value)

    @property
    def vocab_size(self) -> int:
        return self.model.draft.shape.vocab_size

    def log(self, text: str) -> None:
        """Log a row on the first rank."""
        if self.start.ranks.is_first:
            logger.info("%s", table_row("teacher", text))


def read_teacher(model: ModelInputs, data: RunData, start: Start, rendezvous: Rendezvous | None) -> Teacher | None:
    """Return the numbers of --teacher_model, made now or by an earlier run; None for other objectives. Collective.

    `rendezvous` connects all ranks; None for one rank. Raises CheckpointError, and the errors of a run.
    """
    teacher = make_objective(model.config.objective).teacher
    if teacher is None:
        return None
    asked = _Asked(model, data, start, rendezvous, teacher)
    samples = _samples_of(model.config, data)
    files = TeacherFiles(_folder(asked, samples), samples.num_targets, teacher.number)
    if all(asked.gather(files.exists)):
        asked.log(f"the numbers of an earlier run are used: {files.folder}")
    else:
        _make_files(files, samples, asked)
    ids, logps = files.read()
    of_datasets, num_training = samples.places, len(data.prepared.training)
    number_of = {id(dataset): place for place, dataset in enumerate(samples.datasets)}
    return Teacher(
        ids,
        logps,
        TargetPlaces.joined(of_datasets[:num_training]),
        [of_datasets[number_of[id(dataset.tokenized)]] for dataset, _ in data.evaluation_parts()],
    )


def _samples_of(config: Config, data: RunData) -> _Samples:
    """Return the samples that the run trains or evaluates on."""
    prepared = data.prepared
    datasets = [each.tokenized for each in (*prepared.training, *prepared.evaluation)]
    number = sum(each.tokenized.num_sequences for each in prepared.training)
    is_trained = np.zeros(number, dtype=np.bool_)
    if config.evaluation.do_train:
        has_all = all(each.entry.weight >= 1 for each in prepared.training)
        batches = data.make_batches(is_packed=prepared.is_packed)
        for batch in steps_of(batches, config.optim.num_steps, has_all_in_an_epoch=has_all):
            assert batch.sequence_numbers is not None, "the rows of a student have sequences"
            is_trained[batch.sequence_numbers[batch.sequence_numbers >= 0]] = True
    ends = np.cumsum([each.tokenized.num_sequences for each in prepared.training])
    needed = np.split(is_trained, ends[:-1])
    needed += [np.zeros(each.tokenized.num_sequences, dtype=np.bool_) for each in prepared.evaluation]
    if config.evaluation.evaluates:
        number_of = {id(dataset): place for place, dataset in enumerate(datasets)}
        for dataset, indices in data.evaluation_parts():
            needed[number_of[id(dataset.tokenized)]][indices] = True
    return _Samples(datasets, needed, TargetPlaces.of(datasets, needed))


def _folder(asked: _Asked, samples: _Samples) -> Path:
    """Return the folder for the samples' tokens, the teacher's weights, and the options that decide its numbers."""
    config, prepared = asked.model.config, asked.data.prepared
    chosen = hashlib.sha256(b"".join(np.packbits(each).tobytes() for each in samples.needed)).hexdigest()
    facts = [
        *(dataset.cache_folder.name for dataset in (*prepared.training, *prepared.evaluation)),
        *(chosen, weight_files(asked.model.teacher), config.model.dtype, config.data.seq_length),
        *(asked.teacher, asked.vocab_size),
    ]
    return cache_folder() / "teachers" / hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _make_files(files: TeacherFiles, samples: _Samples, asked: _Asked) -> None:
    """Load the teacher, write its numbers, and leave no trace of it in memory; collective."""
    began, is_first = time.monotonic(), asked.start.ranks.is_first
    size = f"{files.num_targets:,} targets, {files.num_logprobs} tokens of each: {format_bytes(files.num_bytes)}"
    asked.log(f"{asked.model.config.objective.teacher_model} scores {size}")
    written = files.partial(str(asked.gather(secrets.token_hex(4))[0]))
    with asked.start.run_status.cleaning(partial(shutil.rmtree, written, ignore_errors=True)):
        if is_first:
            files.folder.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(files.folder.parent)
            files.create(written)
        asked.gather(True)  # from here on the files exist
        session = _open_session(asked)
        play = partial(teacher_numbers, teacher=asked.teacher, vocab_size=asked.vocab_size)
        for places, numbers in Scorer(session).numbers(_batches(samples, session, asked.data), play):
            files.write(written, places, numbers)
        session.all_ranks.barrier()
        if is_first:
            files.publish(written)
        session.all_ranks.barrier()
        session.close()
    del session
    free_cached_memory(asked.model.draft.device)
    asked.log(f"{files.folder} in {time.monotonic() - began:.1f} s")


def _open_session(asked: _Asked) -> Session:
    """Plan and load the teacher. Raises the errors of a run."""
    inputs = read_model(teacher_config(asked.model.config), asked.start.ranks, given=None, resume=None)
    setup = complete_run(inputs.draft, inputs.config, packed=packed_rows(asked.data.batches))
    return open_session(setup, inputs.folder, activity=asked.start.watchdog.activity)


def teacher_config(config: Config) -> Config:
    """Return the options of the teacher's run: it has the student's device and rows, and trains nothing."""
    assert config.objective.teacher_model is not None, "the options of a student name a teacher"
    own, usual = config.pipeline, PipelineConfig(num_stages=None, num_chunks=None, num_slices=1)
    return replace(
        config,
        model=ModelConfig(config.objective.teacher_model, dtype=config.model.dtype),
        objective=NO_OPTIONS,
        adapters=AdapterConfig(),
        evaluation=EvaluationConfig(do_train=False, do_eval=True, save_scores=True),
        planning=PlanningConfig(),
        optim=replace(config.optim, num_iterations=1, num_train_epochs=None),
        pipeline=replace(
            usual,
            batch_size=own.batch_size,
            use_prefetch=own.use_prefetch,
            use_offload=own.use_offload,
            compile=own.compile,
            copy_messages=own.copy_messages,
            cross_mapping=own.cross_mapping,
            device=own.device,
            gpu_memory_limit=own.gpu_memory_limit,
            host_memory_limit=own.host_memory_limit,
            loss_chunk_tokens=own.loss_chunk_tokens,
        ),
    )


def _batches(samples: _Samples, session: Session, data: RunData) -> Iterator[tuple[EvaluationBatches, TargetPlaces]]:
    """Yield the batches of each dataset's needed samples, with the places of their targets."""
    setup, request = session.run_setup, session.run_setup.result.request
    for dataset, needed, places in zip(samples.datasets, samples.needed, samples.places, strict=True):
        if needed.any():
            batches = EvaluationBatches(
                dataset,
                np.flatnonzero(needed),
                batch_size=request.rows,
                seq_length=setup.config.data.seq_length,
                pad_token_id=pad_token_id(data.tokenizer),
                max_documents=None if request.packed is None else request.packed.max_documents,
                has_sequences=True,
            )
            yield batches, places
