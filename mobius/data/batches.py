"""Orders rows by the seed and pads them into batches that are equal on every rank.

`TrainingBatches` are endless or cover a number of epochs; `EvaluationBatches` hold each sample once, in order.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate, chain, count
from operator import attrgetter
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from mobius.data.images import ImageFile
from mobius.data.mixture import WeightedSamples, epoch_samples, epoch_size, seeded_generator
from mobius.data.packing import (
    PACKING_WINDOW,
    attention_cost,
    balanced_order,
    choose_max_samples_per_row,
    pack_samples,
    packing_window_size,
)
from mobius.data.token_store import TokenizedDataset, TokenizedSample, neutral_value
from mobius.errors import DataError

IGNORE_INDEX = -100  # default ignore_index of torch's cross entropy
_NEAR = 0.1
"""Relative tolerance between the samples per step with and without packing, within which both count as equal."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one optimizer step, int64[batch, L], padded on the right.

    `labels[b, t]` is `input_ids[b, t]` if that token is a target, else -100. Labels are not shifted: position t - 1
    predicts `labels[b, t]`. The first token of a sequence is therefore always -100.
    """

    input_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    num_targets: int
    """Number of labels that are not -100."""
    num_tokens: int
    """Number of tokens without padding."""
    num_samples: int
    """Number of samples; one of several sequences, such as a pair, counts once."""
    epoch: float
    """Epochs completed after this batch."""
    document_lengths: tuple[tuple[int, ...], ...] | None = None
    """Token counts of each row's sequences, without padding; None if each row holds one sequence."""
    row_lengths: tuple[int, ...] | None = None
    """Token count of each row, without padding; None if rows are full."""
    token_values: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Values of each token by name, fp32[batch, L], or [batch, L, K] for K numbers of a token; 0 in padding."""
    sequence_values: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    """Values of each sequence by name, fp32[batch, S]; 0 in padding. S: the most documents of a row of the run."""
    sequences: npt.NDArray[np.int64] | None = None
    """int64[batch, L]: place of each token's sequence in its row, S in padding.

    None unless sequences matter (`TokenizedDataset.has_sequences`).
    """
    sequence_numbers: npt.NDArray[np.int64] | None = None
    """int64[batch, S]: number of each sequence among the sequences of all datasets of the batches, in their order.

    -1: no sequence. None without `sequences`.
    """
    images: tuple[tuple[ImageFile, ...], ...] | None = None
    """Images of each row, in the order of their tokens; None if no row of the run has any."""


def balance_microbatches(batch: Batch, num_microbatches: int) -> Batch:
    """Reorder packed rows so that the microbatches, which take consecutive rows, have nearly equal attention cost."""
    if batch.document_lengths is None:
        return batch
    costs = np.array([attention_cost(lengths, batch.input_ids.shape[1]) for lengths in batch.document_lengths])
    return _with_rows(batch, balanced_order(costs, num_microbatches))


def shard_batch(batch: Batch, index: int, num_replicas: int) -> Batch:
    """Return the rows of `batch` for data-parallel replica `index`: every `num_replicas`-th row from `index` on.

    The counts remain the counts of the whole batch, so that all replicas divide their loss by the same number.
    """
    return batch if num_replicas == 1 else _with_rows(batch, range(index, len(batch.input_ids), num_replicas))


def _with_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return `batch` with only the rows numbered `rows`, in this order; the counts do not change."""
    document_lengths, row_lengths = batch.document_lengths, batch.row_lengths
    return replace(
        batch,
        input_ids=batch.input_ids[rows],
        labels=batch.labels[rows],
        document_lengths=None if document_lengths is None else tuple(document_lengths[row] for row in rows),
        row_lengths=None if row_lengths is None else tuple(row_lengths[row] for row in rows),
        token_values={name: values[rows] for name, values in batch.token_values.items()},
        sequence_values={name: values[rows] for name, values in batch.sequence_values.items()},
        sequences=None if batch.sequences is None else batch.sequences[rows],
        sequence_numbers=None if batch.sequence_numbers is None else batch.sequence_numbers[rows],
        images=None if batch.images is None else tuple(batch.images[row] for row in rows),
    )


_Numbered = tuple[TokenizedSample, range]
"""A sample, and the numbers of its sequences."""


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """Averages over the rows of a run's first window; they serve as estimates for the whole run."""

    samples_per_row: float
    padding: float
    """Fraction of positions that are padding."""
    attention_length: float
    """Length of a position's document, averaged over positions: sum of squared lengths / sum of lengths.

    A row's padding counts as one more document. Without packing: seq_length.
    """


class TrainingBatches:
    """Iterator over a run's batches. It is endless, or ends after `num_epochs`; then empty rows fill the last batch.

    The rows of all epochs form one stream; (seed, epoch) determines the rows of an epoch. Step k takes rows
    [k * batch_size, (k + 1) * batch_size). So a batch may span epochs, a small dataset repeats, and any step can be
    reached directly. Raises DataError if the weights leave no samples.
    """

    def __init__(
        self,
        parts: Sequence[WeightedSamples],
        *,
        batch_size: int,
        seq_length: int,
        pad_token_id: int,
        seed: int,
        is_packed: bool,
        num_epochs: float | None = None,
        max_sequences: int = 1,
        has_sequences: bool = False,
    ) -> None:
        """`is_packed` False: one sample per row. `has_sequences` as in `EvaluationBatches`.

        `max_sequences`: the largest number of sequences of a sample that `EvaluationBatches` will hold.
        """
        self._batch_size, self._seq_length = batch_size, seq_length
        self._stream = _RowStream(
            parts, seed=seed, seq_length=seq_length, is_packed=is_packed, max_sequences=max_sequences
        )
        self.row_format = RowFormat.of(
            [part.tokenized for part in parts],
            batch_size=batch_size,
            seq_length=seq_length,
            pad_token_id=pad_token_id,
            max_documents=self._stream.max_documents,
            has_sequences=has_sequences,
        )
        self._num_rows = None if num_epochs is None else self._stream.num_rows_of(Fraction(str(num_epochs)))
        self._step = 0

    @property
    def num_steps(self) -> int | None:
        """Number of steps until all epochs are done; None if the batches are endless."""
        return None if self._num_rows is None else -(-self._num_rows // self._batch_size)

    @property
    def max_documents(self) -> int | None:
        """Maximum number of documents per row (padding is one), constant during a run; None: rows of one sequence."""
        return self._stream.max_documents

    @property
    def row_statistics(self) -> RowStatistics:
        """Averages for the log and the planner."""
        return self._stream.row_statistics

    def seek(self, step: int) -> None:
        """Make the batch of `step` (from 0) the next batch, forwards or backwards, without reading tokens.

        The next batch first packs all skipped rows by their lengths, in a few microseconds per sample.
        """
        self._step = step

    def num_epochs_of(self, num_steps: int) -> float:
        """Return the number of epochs in `num_steps` steps, estimated from the first window."""
        return num_steps * self._batch_size * self.row_statistics.samples_per_row / self._stream.mean_size

    def describe(self, unit: int | None) -> str:
        """Return a log line about padding and samples per step.

        With packing and a `unit`, the line also suggests a smaller batch size: a multiple of `unit` rows with which a
        step has as many samples as without packing.
        """
        row_statistics, size = self.row_statistics, self._batch_size
        rows = f"of {self._seq_length} tokens, {row_statistics.padding:.1%} padding".replace("%", " %")
        if self._stream.max_samples_per_row == 1:
            return f"no packing: one sample in a row {rows}"
        text = (
            f"packing: {row_statistics.samples_per_row:.1f} samples in a row {rows}; a step of {size} rows holds some "
        )
        text += f"{row_statistics.samples_per_row * size:.0f} samples"
        if unit is None:
            return text
        smaller = max(1, round(size / row_statistics.samples_per_row / unit)) * unit
        is_near = abs(smaller * row_statistics.samples_per_row - size) <= _NEAR * size
        if smaller >= size or not is_near:
            return text
        num_samples = f"{smaller * row_statistics.samples_per_row:.0f}"
        return f"{text} (--batch_size {smaller} keeps it at some {num_samples}; without packing it is {size})"

    def __iter__(self) -> "TrainingBatches":
        return self

    def __next__(self) -> Batch:
        first = self._step * self._batch_size
        last = first + self._batch_size
        if self._num_rows is not None:
            if first >= self._num_rows:
                raise StopIteration
            last = min(last, self._num_rows)
        rows = [self._stream.row(number) for number in range(first, last)]
        self._step += 1
        return self.row_format.assemble(rows, epoch=self._stream.epochs_after(last))


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Shape of batches, and the names of their values."""

    batch_size: int
    seq_length: int
    pad_token_id: int
    max_documents: int | None
    token_values: Collection[str]
    sequence_values: Collection[str]
    has_sequences: bool
    has_images: bool = False

    @classmethod
    def of(cls, datasets: Sequence[TokenizedDataset], *, has_sequences: bool = False, **shape: Any) -> Self:
        """Return the format of rows of samples of `datasets`; `shape` gives the first four fields."""
        return cls(
            **shape,
            token_values={name for dataset in datasets for name in dataset.token_values},
            sequence_values={name for dataset in datasets for name in dataset.sequence_values},
            has_sequences=has_sequences or any(dataset.has_sequences for dataset in datasets),
            has_images=any(dataset.image_offsets is not None for dataset in datasets),
        )

    def assemble(self, rows: Sequence[Sequence[_Numbered]], *, epoch: float) -> Batch:
        """Return a batch of `rows`, followed by empty rows up to `batch_size`."""
        input_ids = np.full((self.batch_size, self.seq_length), self.pad_token_id, dtype=np.int64)
        labels = np.full_like(input_ids, IGNORE_INDEX)
        joined = [TokenizedDataset.of_samples([sample for sample, _ in row]) for row in rows]
        for number, row in enumerate(joined):
            length = len(row.input_ids)
            assert length <= self.seq_length, f"{length} tokens in a row of {self.seq_length}"
            input_ids[number, :length] = row.input_ids
            labels[number, :length] = np.where(row.is_target, row.input_ids, IGNORE_INDEX)
            labels[number, row.all_sequence_offsets[:-1]] = IGNORE_INDEX  # the first token is never predicted
        document_lengths = tuple(tuple(np.diff(row.all_sequence_offsets).tolist()) for row in joined)
        document_lengths += ((),) * (self.batch_size - len(rows))
        batch = Batch(
            input_ids,
            labels,
            num_targets=int(np.count_nonzero(labels != IGNORE_INDEX)),
            num_tokens=sum(map(sum, document_lengths)),
            num_samples=sum(map(len, rows)),
            epoch=epoch,
            document_lengths=None if self.max_documents is None else document_lengths,
            row_lengths=tuple(map(sum, document_lengths)),
            token_values=self._token_values(joined),
            images=self._images(joined) if self.has_images else None,
        )
        return self._with_sequences(batch, rows, joined) if self.has_sequences else batch

    def _images(self, joined: Sequence[TokenizedDataset]) -> tuple[tuple[ImageFile, ...], ...]:
        return (*(tuple(row.images) for row in joined), *[()] * (self.batch_size - len(joined)))

    def _token_values(self, joined: Sequence[TokenizedDataset]) -> dict[str, npt.NDArray[np.float32]]:
        found = {name: np.zeros((self.batch_size, self.seq_length), dtype=np.float32) for name in self.token_values}
        for name, values in found.items():
            for number, row in enumerate(joined):
                values[number, : len(row.input_ids)] = row.token_values.get(name, neutral_value(name))
        return found

    def _with_sequences(
        self, batch: Batch, rows: Sequence[Sequence[_Numbered]], joined: Sequence[TokenizedDataset]
    ) -> Batch:
        """Return `batch` with values of sequences, the place of each token's sequence, and the sequences' numbers."""
        most = self.max_documents or 2  # a row of one sample, and its padding
        found = {name: np.zeros((self.batch_size, most), dtype=np.float32) for name in self.sequence_values}
        sequences = np.full(batch.input_ids.shape, most, dtype=np.int64)
        numbers = np.full((self.batch_size, most), -1, dtype=np.int64)
        for number, row in enumerate(joined):
            sequences[number, : len(row.input_ids)] = np.repeat(
                np.arange(row.num_sequences), np.diff(row.all_sequence_offsets)
            )
            numbers[number, : row.num_sequences] = list(chain.from_iterable(own for _, own in rows[number]))
            for name, values in found.items():
                values[number, : row.num_sequences] = row.sequence_values.get(name, neutral_value(name))
        return replace(batch, sequence_values=found, sequences=sequences, sequence_numbers=numbers)


class EvaluationBatches:
    """Batches that hold each sample of a dataset once; equal on every rank and in every pass.

    Samples keep the order of `indices`. Packing joins samples of one window, and sorts rows by their first sample.
    Empty rows fill the last batch. The batches do not depend on ranks, stages or microbatches.
    """

    def __init__(
        self,
        tokenized: TokenizedDataset,
        indices: Sequence[int] | npt.NDArray[np.int64] | None = None,
        *,
        batch_size: int,
        seq_length: int,
        pad_token_id: int,
        max_documents: int | None,
        has_sequences: bool = False,
    ) -> None:
        """`indices` must have at least one sample; None: all samples.

        `max_documents` as in `TrainingBatches`; None: each row holds one sample. `has_sequences`: also plain rows have
        `sequences` and their numbers.
        """
        self._tokenized, self._batch_size = tokenized, batch_size
        self.row_format = RowFormat.of(
            [tokenized],
            batch_size=batch_size,
            seq_length=seq_length,
            pad_token_id=pad_token_id,
            max_documents=max_documents,
            has_sequences=has_sequences,
        )
        chosen = np.arange(len(tokenized)) if indices is None else np.asarray(indices, dtype=np.int64)
        assert len(chosen), "the caller must refuse a dataset without samples"
        lengths = tokenized.lengths[chosen]
        rows: list[list[int]] = [[place] for place in range(len(chosen))]
        if max_documents is not None:
            rows, size = [], packing_window_size(lengths[:PACKING_WINDOW], seq_length)
            for first in range(0, len(chosen), size):
                # Padding after a row's last sample counts as one more document, so samples get one document less.
                most = (max_documents - 1) // tokenized.max_sequences
                filled = pack_samples(lengths[first : first + size], seq_length, most)
                rows += sorted(sorted(first + place for place in row) for row in filled)
        self._rows = [[int(chosen[place]) for place in row] for row in rows]

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """Indices of all samples, in ascending order."""
        return np.sort(np.concatenate([np.array(row, dtype=np.int64) for row in self._rows]))

    def __len__(self) -> int:
        """Number of batches."""
        return -(-len(self._rows) // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, len(self._rows), self._batch_size):
            rows = self._rows[first : first + self._batch_size]
            samples = [
                [(self._tokenized.sample(index), self._tokenized.sequence_numbers(index)) for index in row]
                for row in rows
            ]
            yield self.row_format.assemble(samples, epoch=(first + len(rows)) / len(self._rows))


@dataclass(frozen=True, slots=True)
class _Window:
    """Consecutive samples in an epoch's order: dataset, index and length of each, and rows as lists of positions."""

    parts: npt.NDArray[np.int16]
    indices: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    rows: list[list[int]]


class _Counted(NamedTuple):
    """A window with counted rows: its epoch, its number in the epoch, and the number of all rows up to its end."""

    epoch: int
    number: int
    end: int


class _RowStream:
    """Rows of all epochs in sequence, built window by window; reads tokens only when a row is requested.

    Holds the sample order of one epoch, one window, and the end of every counted window.
    """

    def __init__(
        self, parts: Sequence[WeightedSamples], *, seed: int, seq_length: int, is_packed: bool, max_sequences: int
    ) -> None:
        self._parts, self._seed, self._seq_length = parts, seed, seq_length
        self.mean_size = float(sum(part.exact_weight * len(part) for part in parts))
        """Average number of samples per epoch."""
        if self.mean_size < 1:
            sizes = " + ".join(f"{len(part):,} x {part.weight:.15g}" for part in parts)
            raise DataError(
                f"an empty mixture: samples times weights give {self.mean_size:.3g} samples per epoch ({sizes}), at "
                "least 1 is needed. Raise the weights, or give more data"
            )
        self._lengths = [part.tokenized.lengths for part in parts]
        self._first_sequences = [0, *accumulate(part.tokenized.num_sequences for part in parts)]
        self._epoch, self._order = 0, epoch_samples(parts, seed, 0)
        self._windows, self._next = list[_Counted](), (0, 0)
        self._window_size = PACKING_WINDOW
        self.max_samples_per_row = 1
        first = next(epoch for epoch in count() if epoch_size(parts, epoch))
        if is_packed:
            self._window_size = packing_window_size(self._fill(first, 0).lengths, seq_length)
            self.max_samples_per_row = choose_max_samples_per_row(self._fill(first, 0).lengths, seq_length)
        self.max_documents: int | None = None
        """Maximum number of documents per row, with one for its padding; None if each row holds one sequence."""
        if is_packed or any(part.tokenized.has_sequences for part in parts):
            most = max(max_sequences, *(part.tokenized.max_sequences for part in parts))
            self.max_documents = self.max_samples_per_row * most + 1
        self._loaded, self._window = -1, self._fill(first, 0)
        self.row_statistics = self._measure(self._window)

    def row(self, number: int) -> list[_Numbered]:
        """Return the samples in row `number` of the stream."""
        while self._end_before(len(self._windows)) <= number:
            self._make_window()
        window = bisect_right(self._windows, number, key=attrgetter("end"))
        if window != self._loaded:
            self._loaded, self._window = window, self._fill(*self._windows[window][:2])
        here = self._window
        places = here.rows[number - self._end_before(window)]
        return [self._sample(int(here.parts[place]), int(here.indices[place])) for place in places]

    def _sample(self, part: int, index: int) -> _Numbered:
        tokenized, first = self._parts[part].tokenized, self._first_sequences[part]
        numbers = tokenized.sequence_numbers(index)
        return tokenized.sample(index), range(first + numbers.start, first + numbers.stop)

    def num_rows_of(self, num_epochs: Fraction) -> int:
        """Return the rows in `num_epochs` epochs; a share of an epoch has this share of its rows, rounded up."""
        whole = math.floor(num_epochs)
        num_rows = self._num_rows_before(whole)
        if num_epochs > whole:
            num_rows += math.ceil((num_epochs - whole) * (self._num_rows_before(whole + 1) - num_rows))
        if num_rows == 0:
            raise DataError(
                f"--num_train_epochs {float(num_epochs):.15g}: with these dataset weights, so few epochs include no "
                "sample. Raise the number of epochs, or the weights"
            )
        return num_rows

    def epochs_after(self, num_rows: int) -> float:
        """Return the epochs completed after `num_rows` rows, by samples; `row` must have been called for these rows."""
        window = bisect_left(self._windows, num_rows, key=attrgetter("end"))
        (epoch, number, end), first_row = self._windows[window], self._end_before(window)
        start, stop = self._bounds(epoch, number)
        share = (num_rows - first_row) / (end - first_row)
        return epoch + (start + share * (stop - start)) / epoch_size(self._parts, epoch)

    def _num_rows_before(self, epoch: int) -> int:
        while self._next[0] < epoch:
            self._make_window()
        return self._end_before(bisect_left(self._windows, epoch, key=attrgetter("epoch")))

    def _end_before(self, window: int) -> int:
        return self._windows[window - 1].end if window else 0

    def _make_window(self) -> None:
        """Count the rows of the next window; an epoch without samples has one window without rows."""
        epoch, number = self._next
        start, stop = self._bounds(epoch, number)
        num_rows = stop - start
        if self.max_samples_per_row > 1:
            self._loaded, self._window = len(self._windows), self._fill(epoch, number)
            num_rows = len(self._window.rows)
        self._windows.append(_Counted(epoch, number, num_rows + self._end_before(len(self._windows))))
        is_last = stop == epoch_size(self._parts, epoch)
        self._next = (epoch + 1, 0) if is_last else (epoch, number + 1)

    def _bounds(self, epoch: int, number: int) -> tuple[int, int]:
        """Return the range of a window in its epoch's order; windows of an epoch have nearly equal sizes."""
        size = epoch_size(self._parts, epoch)
        num_windows = max(1, -(-size // self._window_size))
        return number * size // num_windows, (number + 1) * size // num_windows

    def _fill(self, epoch: int, number: int) -> _Window:
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_samples(self._parts, self._seed, epoch)
        window = slice(*self._bounds(epoch, number))
        parts, indices = self._order[0][window], self._order[1][window]
        lengths = np.empty(len(parts), dtype=np.int64)
        for part, part_lengths in enumerate(self._lengths):
            lengths[parts == part] = part_lengths[indices[parts == part]]
        if self.max_samples_per_row == 1:
            return _Window(parts, indices, lengths, [[place] for place in range(len(parts))])
        rows = pack_samples(lengths, self._seq_length, self.max_samples_per_row)
        # Shuffle, because best fit puts rows of the longest samples first.
        order = seeded_generator(self._seed, epoch, number + 1).permutation(len(rows))
        return _Window(parts, indices, lengths, [rows[row] for row in order])

    def _measure(self, window: _Window) -> RowStatistics:
        num_positions = len(window.rows) * self._seq_length
        document_lengths = (
            [length for place in row for length in self._sequence_lengths(window, place)] for row in window.rows
        )
        cost = sum(attention_cost(lengths, self._seq_length) for lengths in document_lengths)
        return RowStatistics(
            samples_per_row=len(window.lengths) / len(window.rows),
            padding=1 - int(window.lengths.sum()) / num_positions,
            attention_length=self._seq_length if self.max_documents is None else cost / num_positions,
        )

    def _sequence_lengths(self, window: _Window, place: int) -> tuple[int, ...]:
        tokenized = self._parts[int(window.parts[place])].tokenized
        if tokenized.sequence_offsets is None:
            return (int(window.lengths[place]),)
        return tokenized.sequence_lengths(int(window.indices[place]))
