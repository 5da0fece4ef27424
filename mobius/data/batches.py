"""Owns the order of the rows and their padding into batches: the same on every rank, from the seed alone.

`TrainingBatches` are those of training, without end or through epochs; `EvaluationBatches` hold each sample once, in
order.
"""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count

import numpy as np
import numpy.typing as npt

from mobius.data.mixture import WeightedSamples, epoch_samples, epoch_size, seeded_generator
from mobius.data.packing import (
    PACKING_WINDOW,
    attention_cost,
    balanced_order,
    choose_max_samples_per_row,
    pack_samples,
    packing_window_size,
)
from mobius.data.token_store import TokenizedDataset, TokenizedSample
from mobius.errors import DataError

IGNORE_INDEX = -100  # what torch's cross entropy ignores by default
_NEAR = 0.1
"""Share by which the samples of a step may differ from those without packing where a batch is told to keep them."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One optimizer step's rows, int64[batch, L], padded on the right.

    `labels[b, t]` is `input_ids[b, t]` where that token is a target and -100 elsewhere, not shifted: position t - 1
    predicts it. The first token of a sample is therefore always -100.
    """

    input_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    num_targets: int
    """Labels that are not -100."""
    num_tokens: int
    """Tokens that are not padding."""
    num_samples: int
    epoch: float
    """Epochs that are done after this batch."""
    document_lengths: tuple[tuple[int, ...], ...] | None = None
    """Token counts of the samples of each row, without the padding behind them; None if rows hold one each."""
    row_lengths: tuple[int, ...] | None = None
    """Tokens of each row, without the padding behind them; None: rows are full."""

    @property
    def padding(self) -> float:
        """Share of the positions that are padding."""
        return 1 - self.num_tokens / self.input_ids.size


def balance_microbatches(batch: Batch, num_microbatches: int) -> Batch:
    """The batch with packed rows in such an order that its microbatches, consecutive rows, cost attention alike."""
    if batch.document_lengths is None:
        return batch
    costs = np.array([attention_cost(lengths, batch.input_ids.shape[1]) for lengths in batch.document_lengths])
    order = balanced_order(costs, num_microbatches)
    return replace(
        batch,
        input_ids=batch.input_ids[order],
        labels=batch.labels[order],
        document_lengths=tuple(batch.document_lengths[row] for row in order),
        row_lengths=None if batch.row_lengths is None else tuple(batch.row_lengths[row] for row in order),
    )


def shard_batch(batch: Batch, index: int, num_replicas: int) -> Batch:
    """The rows of `batch` that replica `index` plays: every row whose number is that modulo `num_replicas`.

    Counts are still those of the whole batch, so that each replica divides its loss by the same number of targets.
    """
    if num_replicas == 1:
        return batch
    own = slice(index, None, num_replicas)
    document_lengths = None if batch.document_lengths is None else batch.document_lengths[own]
    row_lengths = None if batch.row_lengths is None else batch.row_lengths[own]
    return replace(
        batch,
        input_ids=batch.input_ids[own],
        labels=batch.labels[own],
        document_lengths=document_lengths,
        row_lengths=row_lengths,
    )


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """Averages over the rows of a run's first window, which stand for all."""

    samples_per_row: float
    padding: float
    """Share of the positions."""
    attention_length: float
    """Mean over positions of the length of the document that a position is in: sum of squares over sum of lengths.

    Padding behind the documents counts as one more. Without packing, seq_length.
    """


class TrainingBatches:
    """Iterator over the batches of a run: without end, or through `num_epochs`, whose last step has empty rows too.

    The epochs' rows, each a function of (seed, epoch), form one stream, of which step k takes the rows
    [k * batch_size, (k + 1) * batch_size): a batch may span epochs, a small dataset repeats, any step can be sought.
    Raises DataError if the weights leave no samples.
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
    ) -> None:
        self._parts, self._pad_token_id = parts, pad_token_id
        self._batch_size, self._seq_length = batch_size, seq_length
        self._stream = _RowStream(parts, seed=seed, seq_length=seq_length, is_packed=is_packed)
        self._num_rows = None if num_epochs is None else self._stream.num_rows_of(Fraction(str(num_epochs)))
        self._step = 0

    @property
    def num_steps(self) -> int | None:
        """Steps until the epochs are through; None without end."""
        return None if self._num_rows is None else -(-self._num_rows // self._batch_size)

    @property
    def max_documents(self) -> int | None:
        """Limit of documents in a row, the padding behind them counted as one: fixed for a run. None if not packed."""
        return None if self._stream.max_samples_per_row is None else self._stream.max_samples_per_row + 1

    @property
    def row_statistics(self) -> RowStatistics:
        """Averages for log and planner."""
        return self._stream.row_statistics

    @property
    def state(self) -> int:
        """Number of batches taken: what `seek` needs to continue from here."""
        return self._step

    def seek(self, step: int) -> None:
        """Make the next batch the one of this step, counted from 0, forwards or backwards, without reading tokens.

        Rows before it that were never reached are packed by their lengths, in some microseconds a sample.
        """
        self._step = step

    def num_epochs_of(self, num_steps: int) -> float:
        """Epochs that so many steps make, about: from the first window, without packing the rest."""
        return num_steps * self._batch_size * self.row_statistics.samples_per_row / self._stream.mean_size

    def describe(self, unit: int | None) -> str:
        """A line for the log: how full rows are, and the samples of a step; batches are multiples of `unit` rows.

        Where another batch has about as many samples as this one without packing, it is told; not if `unit` is None.
        """
        row_statistics, size = self.row_statistics, self._batch_size
        rows = f"of {self._seq_length} tokens, {row_statistics.padding:.1%} padding".replace("%", " %")
        if self.max_documents is None:
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
        kept = f"{smaller * row_statistics.samples_per_row:.0f}"
        return f"{text} (--batch_size {smaller} keeps it at some {kept}; without packing it is {size})"

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
        return _assemble(
            rows,
            batch_size=self._batch_size,
            seq_length=self._seq_length,
            pad_token_id=self._pad_token_id,
            epoch=self._stream.epochs_after(last),
            is_packed=self.max_documents is not None,
        )


def _assemble(
    rows: Sequence[Sequence[TokenizedSample]],
    *,
    batch_size: int,
    seq_length: int,
    pad_token_id: int,
    epoch: float,
    is_packed: bool,
) -> Batch:
    """The batch of `rows`, each the samples that share it, and of empty rows behind them."""
    input_ids = np.full((batch_size, seq_length), pad_token_id, dtype=np.int64)
    labels = np.full_like(input_ids, IGNORE_INDEX)
    for number, row in enumerate(rows):
        start = 0
        for tokens, is_target in row:
            span = slice(start, start + len(tokens))
            assert span.stop <= seq_length, f"{span.stop} tokens in a row of {seq_length}"
            input_ids[number, span] = tokens
            labels[number, span] = np.where(is_target, tokens, IGNORE_INDEX)
            labels[number, start] = IGNORE_INDEX  # nothing predicts the first token
            start = span.stop
    document_lengths = tuple(tuple(len(tokens) for tokens, _ in row) for row in rows) + ((),) * (batch_size - len(rows))
    return Batch(
        input_ids,
        labels,
        num_targets=int(np.count_nonzero(labels != IGNORE_INDEX)),
        num_tokens=sum(map(sum, document_lengths)),
        num_samples=sum(map(len, document_lengths)),
        epoch=epoch,
        document_lengths=document_lengths if is_packed else None,
        row_lengths=tuple(map(sum, document_lengths)),
    )


class EvaluationBatches:
    """Batches that hold each sample of a dataset once: the same on every rank, however often they are gone through.

    Samples come in the order of `indices`. Packed ones share rows with others of their window, and rows come in the
    order of their first samples. The last batch has empty rows behind its own. Nothing depends on ranks, stages or
    microbatches.
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
    ) -> None:
        """`indices` None stands for all samples, one at least.

        `max_documents` of a row is that of a run, the padding behind them counted as one; None: rows hold one sample.
        """
        self._tokenized, self._batch_size = tokenized, batch_size
        self._seq_length, self._pad_token_id = seq_length, pad_token_id
        self._is_packed = max_documents is not None
        chosen = np.arange(len(tokenized)) if indices is None else np.asarray(indices, dtype=np.int64)
        assert len(chosen), "a dataset without samples must be refused before"
        lengths = tokenized.lengths[chosen]
        rows: list[list[int]] = [[place] for place in range(len(chosen))]
        if max_documents is not None:
            rows, size = [], packing_window_size(lengths[:PACKING_WINDOW], seq_length)
            for first in range(0, len(chosen), size):
                # Behind the last sample of a row padding may be one document more.
                filled = pack_samples(lengths[first : first + size], seq_length, max_documents - 1)
                rows += sorted(sorted(first + place for place in row) for row in filled)
        self._rows = [[int(chosen[place]) for place in row] for row in rows]

    def __len__(self) -> int:
        """Number of batches."""
        return -(-len(self._rows) // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, len(self._rows), self._batch_size):
            rows = self._rows[first : first + self._batch_size]
            yield _assemble(
                [[self._tokenized.sample(index) for index in row] for row in rows],
                batch_size=self._batch_size,
                seq_length=self._seq_length,
                pad_token_id=self._pad_token_id,
                epoch=(first + len(rows)) / len(self._rows),
                is_packed=self._is_packed,
            )


@dataclass(frozen=True, slots=True)
class _Window:
    """Consecutive samples of an epoch's order: part, index and length of each, and the rows as places in these."""

    parts: npt.NDArray[np.int16]
    indices: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    rows: list[list[int]]


class _RowStream:
    """Rows of all epochs, one after the other, made window by window: only lengths are read until a row is asked for.

    Holds one epoch's order, one window, and of every window before it where it ends.
    """

    def __init__(self, parts: Sequence[WeightedSamples], *, seed: int, seq_length: int, is_packed: bool) -> None:
        self._parts, self._seed, self._seq_length = parts, seed, seq_length
        self.mean_size = float(sum(part.exact_weight * len(part) for part in parts))
        """Samples in an epoch, on average."""
        if self.mean_size < 1:
            sizes = " + ".join(f"{len(part):,} x {part.weight:.15g}" for part in parts)
            raise DataError(
                f"an empty mixture: samples times weights make {self.mean_size:.3g} samples in an epoch ({sizes}), at "
                "least 1 is needed. Raise the weights, or give more data"
            )
        self._lengths = [part.tokenized.lengths for part in parts]
        self._epoch, self._order = 0, epoch_samples(parts, seed, 0)
        # Of each window made so far: its epoch, its number in it, and the rows of all windows through it.
        self._epochs, self._numbers, self._ends = array("q"), array("q"), array("q")
        self._next = (0, 0)
        self._window_size = PACKING_WINDOW
        self.max_samples_per_row: int | None = None
        """Limit of samples in a row; None if rows hold one each."""
        first = next(epoch for epoch in count() if epoch_size(parts, epoch))
        if is_packed:
            self._window_size = packing_window_size(self._fill(first, 0).lengths, seq_length)
            self.max_samples_per_row = choose_max_samples_per_row(self._fill(first, 0).lengths, seq_length)
        self._loaded, self._window = -1, self._fill(first, 0)
        self.row_statistics = self._measure(self._window)

    def row(self, number: int) -> list[TokenizedSample]:
        """Tokens and targets of each sample of a row, from the start of the stream."""
        while not self._ends or self._ends[-1] <= number:
            self._make_window()
        window = bisect_right(self._ends, number)
        if window != self._loaded:
            self._loaded, self._window = window, self._fill(self._epochs[window], self._numbers[window])
        here = self._window
        places = here.rows[number - self._end_before(window)]
        return [self._parts[here.parts[place]].tokenized.sample(int(here.indices[place])) for place in places]

    def num_rows_of(self, num_epochs: Fraction) -> int:
        """Rows of so many epochs; of the last, if it is a part of one, that share of its rows, rounded up."""
        whole = math.floor(num_epochs)
        num_rows = self._num_rows_before(whole)
        if num_epochs > whole:
            num_rows += math.ceil((num_epochs - whole) * (self._num_rows_before(whole + 1) - num_rows))
        if num_rows == 0:
            raise DataError(
                f"--num_train_epochs {float(num_epochs):.15g}: by their weights no sample of the datasets is in them. "
                "Raise it, or the weights"
            )
        return num_rows

    def epochs_after(self, num_rows: int) -> float:
        """Epochs that are done after so many rows, which `row` has reached; counted in samples."""
        window = bisect_left(self._ends, num_rows)
        epoch, first_row = self._epochs[window], self._end_before(window)
        start, stop = self._bounds(epoch, self._numbers[window])
        share = (num_rows - first_row) / (self._ends[window] - first_row)
        return epoch + (start + share * (stop - start)) / epoch_size(self._parts, epoch)

    def _num_rows_before(self, epoch: int) -> int:
        while self._next[0] < epoch:
            self._make_window()
        return self._end_before(bisect_left(self._epochs, epoch))

    def _end_before(self, window: int) -> int:
        return self._ends[window - 1] if window else 0

    def _make_window(self) -> None:
        """Count the rows of the next window; an epoch without samples has one without rows."""
        epoch, number = self._next
        start, stop = self._bounds(epoch, number)
        num_rows = stop - start
        if self.max_samples_per_row is not None:
            self._loaded, self._window = len(self._ends), self._fill(epoch, number)
            num_rows = len(self._window.rows)
        self._epochs.append(epoch)
        self._numbers.append(number)
        self._ends.append(num_rows + self._end_before(len(self._ends)))
        is_last = stop == epoch_size(self._parts, epoch)
        self._next = (epoch + 1, 0) if is_last else (epoch, number + 1)

    def _bounds(self, epoch: int, number: int) -> tuple[int, int]:
        """Places of a window in its epoch's order; an epoch's windows are equally large, so that none is too small."""
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
        if self.max_samples_per_row is None:
            return _Window(parts, indices, lengths, [[place] for place in range(len(parts))])
        rows = pack_samples(lengths, self._seq_length, self.max_samples_per_row)
        # Long and short rows mix: best fit makes those of the longest samples first.
        order = seeded_generator(self._seed, epoch, number + 1).permutation(len(rows))
        return _Window(parts, indices, lengths, [rows[row] for row in order])

    def _measure(self, window: _Window) -> RowStatistics:
        num_positions = len(window.rows) * self._seq_length
        document_lengths = ([int(window.lengths[place]) for place in row] for row in window.rows)
        cost = sum(attention_cost(lengths, self._seq_length) for lengths in document_lengths)
        return RowStatistics(
            samples_per_row=len(window.lengths) / len(window.rows),
            padding=1 - int(window.lengths.sum()) / num_positions,
            attention_length=self._seq_length if self.max_samples_per_row is None else cost / num_positions,
        )
