"""Mismatched answers: each prompt with the answer of the sample before it, for the KL term of KTO."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from mobius.data.batches import Batch, RowFormat
from mobius.data.packing import pack_samples
from mobius.data.token_store import TokenizedDataset, TokenizedSample


class MismatchedAnswers:
    """Prompts of samples with the answer of the sample before, in the order of the dataset; the first gets the last's.

    The pairs do not depend on epochs or steps, so a pass before step 1 can score them. An answer begins at its sample's
    first target, and is cut at the length of a row. (TRL 1.16 takes the whole answer of a sample that was cut.)
    """

    def __init__(self, datasets: Sequence[TokenizedDataset], row_format: RowFormat, *, row_multiple: int) -> None:
        """`datasets` have samples of one sequence; their samples are numbered in order, as in `Batch`.

        `row_multiple` divides the number of rows of every batch.
        """
        self._datasets, self._format, self._row_multiple = datasets, row_format, row_multiple
        self._firsts = [0, *accumulate(map(len, datasets))]

    def batches(self, numbers: npt.NDArray[np.int64]) -> Iterator[Batch]:
        """Yield batches of rows with the mismatched answers of the samples with these numbers, which they keep.

        Packed answers of a step often need a row or two more than the step, so the last batch has few rows.
        """
        samples, most = [self._sample(int(number)) for number in numbers], self._format.max_documents
        assert most is not None, "samples with labels have sequences"
        lengths = np.array([len(sample) for sample in samples], dtype=np.int64)
        rows = sorted(sorted(row) for row in pack_samples(lengths, self._format.seq_length, most - 1))
        size = self._format.batch_size
        for first in range(0, len(rows), size):
            numbered = [
                [(samples[place], range(int(numbers[place]), int(numbers[place]) + 1)) for place in row]
                for row in rows[first : first + size]
            ]
            needed = -(-len(numbered) // self._row_multiple) * self._row_multiple
            yield replace(self._format, batch_size=needed).assemble(numbered, epoch=0.0)

    def _sample(self, number: int) -> TokenizedSample:
        part = bisect_right(self._firsts, number) - 1
        tokenized, index = self._datasets[part], number - self._firsts[part]
        own, other = tokenized.sample(index), tokenized.sample((index - 1) % len(tokenized))
        prompt, answer = slice(int(np.argmax(own.is_target))), slice(int(np.argmax(other.is_target)), None)
        ids = np.concatenate([own.input_ids[prompt], other.input_ids[answer]])[: self._format.seq_length]
        targets = np.concatenate([own.is_target[prompt], other.is_target[answer]])[: self._format.seq_length]
        return TokenizedSample.plain(ids, targets)
