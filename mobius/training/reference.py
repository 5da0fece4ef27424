"""Reference scores: log-probabilities by the weights before step 1, summed for each sequence, or of each token.

A forward-only pass plays the rows and microbatches of the training steps, until every sequence of these steps has its
score, and the rows of the evaluations. The scores stay in a file of the run, from which a resumed run reads them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor
from tqdm import tqdm

from mobius.data.batches import Batch, EvaluationBatches, balance_microbatches, shard_batch
from mobius.data.token_store import TokenizedDataset
from mobius.distributed.transport import RankGroup, all_gather_numbers
from mobius.engine.executor import Executor
from mobius.engine.step_inputs import StepBatch
from mobius.engine.waits import Observers, WaitClock
from mobius.errors import CheckpointError, listed, reason_of
from mobius.files.atomic_files import atomic_write
from mobius.limits import max_sends_in_flight
from mobius.objectives.objective import REFERENCE, Evaluation
from mobius.objectives.sequences import reference_scores, token_scores
from mobius.reporting.events import table_row
from mobius.schedule.build import build_schedule
from mobius.training.session import Session
from mobius.training.step_batches import concatenate_batches
from mobius.training.teacher import TargetPlaces

logger = logging.getLogger(__name__)

ReferenceScores = npt.NDArray[np.float32]
"""Score of each sequence by its number, or of each token of the sequences one after the other; NaN if not known."""
REFERENCE_FILE: Final = "reference.scores"
TRAINING: Final = "training"
"""Name of the training data's scores in the file."""
BEFORE_STEP_1: Final = "the log-probabilities before step 1"
_AT_ONCE: Final = 64
"""Number of passes whose results wait on the device."""


@dataclass(frozen=True)
class ScorePlaces:
    """Places of scores in their array."""

    size: int
    """Number of scores."""
    offsets: npt.NDArray[np.int64] | None = None
    """Bounds of the sequences in scores of tokens; None for scores of sequences."""

    @classmethod
    def of(cls, datasets: Iterable[TokenizedDataset], *, of_tokens: bool) -> Self:
        """Return the places for the sequences of `datasets`, one after the other."""
        lengths = [np.diff(dataset.all_sequence_offsets) for dataset in datasets]
        if not of_tokens:
            return cls(sum(map(len, lengths)))
        offsets = np.cumsum(np.concatenate([[0], *lengths]), dtype=np.int64)
        return cls(int(offsets[-1]), offsets)

    def in_batch(self, batch: Batch) -> npt.NDArray[np.int64]:
        """Return the place of each score of a batch, [rows, S] or [rows, L]; -1 for none."""
        numbers = batch.sequence_numbers
        assert numbers is not None, "rows of this objective have sequences"
        if self.offsets is None:
            return numbers
        lengths = np.where(numbers < 0, 0, self.offsets[numbers + 1] - self.offsets[numbers])
        starts = np.cumsum(lengths, axis=1) - lengths
        shifts = np.pad(np.where(numbers < 0, 0, self.offsets[numbers]) - starts, ((0, 0), (0, 1)))
        places, positions = batch.sequences, np.arange(batch.input_ids.shape[1])
        assert places is not None, "rows with numbers of sequences have their places"
        return np.where(places < numbers.shape[1], np.take_along_axis(shifts, places, 1) + positions, -1)


def with_reference(batch: Batch, scores: ReferenceScores, places: ScorePlaces) -> Batch:
    """Return `batch` with its scores. Raises CheckpointError if one of them is not known."""
    numbers = places.in_batch(batch)
    values = np.where(numbers < 0, np.float32(0), scores[numbers])
    if np.isnan(values).any():
        raise CheckpointError(
            "the run was extended beyond the samples that were scored before step 1, and the weights of step 1 are no "
            "longer here. Give as many steps as at first, or begin a new run."
        )
    if places.offsets is None:
        return replace(batch, sequence_values={**batch.sequence_values, REFERENCE: values})
    return replace(batch, token_values={**batch.token_values, REFERENCE: values})


class ScoredBatches:
    """Batches with their reference scores."""

    def __init__(self, batches: Iterator[Batch], scores: ReferenceScores, places: ScorePlaces) -> None:
        self._batches, self._scores, self._places = batches, scores, places

    def __iter__(self) -> ScoredBatches:
        return self

    def __next__(self) -> Batch:
        return with_reference(next(self._batches), self._scores, self._places)


@dataclass(frozen=True)
class _Pass:
    """Places of the scores of a pass, and the results of its microbatches on the rank of the last stage."""

    numbers: npt.NDArray[np.int64]
    results: Mapping[int, Tensor]

    @property
    def joined(self) -> Tensor:
        """Results of all rows in order."""
        return torch.cat([self.results[place] for place in sorted(self.results)])


class Scorer:
    """Plays rows forward through the session's stages for log-probabilities of sequences or tokens."""

    def __init__(self, session: Session) -> None:
        self._session, self._run_setup = session, session.run_setup
        self._observers = Observers(WaitClock(self._run_setup.device), activity=session.activity)
        self._executors = dict[int, Executor]()

    def score(
        self,
        batches: Iterable[Batch],
        places: ScorePlaces,
        *,
        is_training: bool,
        action: str = BEFORE_STEP_1,
    ) -> ReferenceScores:
        """Return the scores of `batches`; a batch without a new sequence is skipped. Collective.

        `is_training`: the batches are steps, else rounds of an evaluation. `action` names the passes if they hang; only
        passes before step 1 draw a bar on a terminal.
        """
        session, plan = self._session, self._run_setup.plan
        sums, counts = np.zeros(places.size), np.zeros(places.size)
        is_known = np.zeros(places.size, dtype=np.bool_)
        session.transport.limit_pending_sends(max_sends_in_flight(plan.microbatches_per_round))
        waiting = list[_Pass]()
        evaluate = reference_scores if places.offsets is None else token_scores
        is_hidden = None if action == BEFORE_STEP_1 else True
        for batch in tqdm(batches, desc="scoring", unit="batch", leave=False, disable=is_hidden):
            session.activity.start_action(action)
            numbers = places.in_batch(batch)
            numbers = numbers[numbers >= 0]
            if not is_known[numbers].all():
                is_known[numbers] = True
                waiting += self._play(batch, places.in_batch, evaluate, is_training=is_training)
            if len(waiting) >= _AT_ONCE:
                _collect(waiting, sums, counts)
        _collect(waiting, sums, counts)
        session.transport.limit_pending_sends(plan.max_sends_in_flight)
        both = session.all_ranks.sum_over_ranks(torch.from_numpy(np.stack([sums, counts]))).numpy()
        with np.errstate(invalid="ignore"):
            # A sequence that is scored several times has equal scores, whose mean is exact.
            scores: ReferenceScores = (both[0] / both[1]).astype(np.float32)
        return scores

    def numbers(
        self, parts: Iterable[tuple[EvaluationBatches, TargetPlaces]], evaluate: Evaluation
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
        """Yield the places of targets, and what `evaluate` gives at each, on ranks of the last stage. Collective.

        `evaluate` returns fp32 [B, L, n], whose position t is about the token after it. Replicas take turns.
        """
        session, ranks, plan = self._session, self._run_setup.ranks, self._run_setup.plan
        session.transport.limit_pending_sends(max_sends_in_flight(plan.microbatches_per_round))
        every = ((batch, places) for batches, places in parts for batch in batches)
        for number, (batch, places) in enumerate(tqdm(every, desc="scoring", unit="batch", leave=False, disable=None)):
            session.activity.start_action(BEFORE_STEP_1)
            if number % ranks.num_replicas != ranks.replica:
                continue
            for each in self._play(batch, places.in_batch, evaluate, is_training=False):
                if each.results:
                    at, found = each.numbers[:, 1:], each.joined[:, :-1]
                    yield at[at >= 0], found[torch.from_numpy(at >= 0).to(found.device)].cpu().numpy()
        session.transport.limit_pending_sends(plan.max_sends_in_flight)

    def _play(
        self,
        batch: Batch,
        places_of: Callable[[Batch], npt.NDArray[np.int64]],
        evaluate: Evaluation,
        *,
        is_training: bool,
    ) -> Iterator[_Pass]:
        """Yield the passes of a batch: one for each round. Replicas share the rows of a training step."""
        ranks, size = self._run_setup.ranks, self._run_setup.result.request.microbatch_rows
        own = shard_batch(batch, ranks.replica, ranks.num_replicas) if is_training else batch
        number, most = len(own.input_ids) // size, self._run_setup.plan.microbatches_per_round
        rows = concatenate_batches([own], self._run_setup, number)
        numbers = places_of(balance_microbatches(own, number))
        for first in range(0, number, most):
            microbatches = range(number)[first : first + most]
            found = self._executor_of(len(microbatches)).evaluate(_part(rows, microbatches, size), evaluate)
            yield _Pass(numbers[first * size : microbatches.stop * size], found)

    def _executor_of(self, num_microbatches: int) -> Executor:
        if num_microbatches not in self._executors:
            schedule = build_schedule(self._run_setup.plan.evaluation(num_microbatches))
            self._executors[num_microbatches] = self._session.stages.executor(
                schedule, self._session.transport, self._observers
            )
        return self._executors[num_microbatches]


def _collect(waiting: list[_Pass], sums: npt.NDArray[np.float64], counts: npt.NDArray[np.float64]) -> None:
    """Add the results of the `waiting` passes, and empty the list."""
    for each in waiting:
        if each.results:
            found = each.joined.double().cpu().numpy()
            exists = each.numbers >= 0
            np.add.at(sums, each.numbers[exists], found[exists])
            np.add.at(counts, each.numbers[exists], 1)
    waiting.clear()


def _part(rows: StepBatch, microbatches: range, size: int) -> StepBatch:
    """Return the rows of some microbatches of `size` rows each."""
    part = slice(microbatches.start * size, microbatches.stop * size)
    documents = rows.documents
    if documents is not None:
        documents = documents[0][part], documents[1][microbatches.start : microbatches.stop]
    return replace(
        rows,
        input_ids=rows.input_ids[part],
        labels=rows.labels[part],
        documents=documents,
        lengths=None if rows.lengths is None else rows.lengths[part],
        document_lengths=rows.document_lengths[part],
        sequence_values={name: value[part] for name, value in rows.sequence_values.items()},
        token_values={name: value[part] for name, value in rows.token_values.items()},
        sequences=None if rows.sequences is None else rows.sequences[part],
    )


def save_scores(scores: Mapping[str, ReferenceScores], folder: Path) -> None:
    """Write the scores of a run into its folder. Raises OSError."""
    with atomic_write(folder / REFERENCE_FILE) as path:
        save_file(dict(scores), path)


@dataclass(frozen=True)
class ScoreCache:
    """File with the scores of earlier runs on the same tokens by the same weights in the same format."""

    path: Path
    layout: str
    """Rows and microbatches of this run. Scores of another layout differ by rounding."""

    @classmethod
    def of(cls, folder: Path, facts: Sequence[object], *, layout: str) -> ScoreCache:
        """Return the cache in `folder` for `facts`, which decide the scores up to rounding."""
        key = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
        return cls(folder / f"{key}.safetensors", layout)

    def read(self, needed: Mapping[str, npt.NDArray[np.int64]], ranks: RankGroup) -> dict[str, ReferenceScores]:
        """Return the scores if all ranks have those at all `needed` places, else {}. Collective."""
        scores, layout = dict[str, ReferenceScores](), None
        with contextlib.suppress(OSError, SafetensorError), safe_open(self.path, framework="numpy") as file:
            scores = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            layout = (file.metadata() or {}).get("layout")
        has_all = all(
            name in scores and numbers.max(initial=-1) < len(scores[name]) and np.isfinite(scores[name][numbers]).all()
            for name, numbers in needed.items()
        )
        if int(all_gather_numbers(ranks, [float(has_all)]).sum()) < ranks.num_ranks:
            return {}
        if layout != self.layout and ranks.rank == 0:
            text = f"scores of other rows ({layout}) are used; they differ from scores of this run's rows by rounding"
            logger.info("%s", table_row("reference", text))
        return scores

    def write(self, scores: Mapping[str, ReferenceScores]) -> None:
        """Keep the scores; if that fails, only a warning is logged."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.path, has_many_writers=True) as path:
                save_file(dict(scores), path, metadata={"layout": self.layout})
        except OSError as error:
            logger.warning("the reference scores cannot be kept in %s: %s", self.path, reason_of(error))


def weight_files(*folders: Path | None) -> list[tuple[str, int, int]]:
    """Return path, size and time of change of each weight file in the folders."""
    files = [path for folder in folders if folder is not None for path in sorted(folder.glob("*.safetensors"))]
    return [(str(path.resolve()), status.st_size, status.st_mtime_ns) for path in files for status in (path.stat(),)]


def read_scores(folders: Sequence[Path], sizes: Mapping[str, int]) -> dict[str, ReferenceScores]:
    """Return the scores of the first of the run's `folders` that has them; `sizes`: number of scores of each part.

    Raises CheckpointError.
    """
    paths = [folder / REFERENCE_FILE for folder in folders]
    path = next(filter(Path.exists, paths), paths[-1])
    try:
        with safe_open(path, framework="numpy") as file:
            scores = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: the log-probabilities before step 1 cannot be read, and the weights of step 1 are no longer "
            f"here: {error}. Put the file back, or begin a new run."
        ) from error
    if missing := [name for name, size in sizes.items() if len(scores.get(name, ())) != size]:
        raise CheckpointError(
            f"{path}: it has no scores of these data: {listed(missing)}. Give the data that the run began with, or "
            "begin a new run."
        )
    return scores


def steps_of(batches: Iterator[Batch], num_steps: int, *, has_all_in_an_epoch: bool) -> Iterator[Batch]:
    """Yield the batches of the first `num_steps` steps, or of one epoch if it has all samples."""
    for _, batch in zip(range(num_steps), batches, strict=False):
        yield batch
        if has_all_in_an_epoch and batch.epoch >= 1:
            return
