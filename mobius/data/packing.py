"""Decides only from token counts which samples share a row of seq_length, and which rows share a microbatch.

Rows are packed window by window in an epoch's order, so at most one window is in memory and sorted.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

PACKING_WINDOW = 8192
"""Number of samples packed together. With log-normal lengths of mean 700, 0.4 % of the positions of rows of 4096 tokens
stay empty; windows of 1024 samples leave 0.7 %, larger windows no less than 0.4 %."""
_LEAST_ROWS = 64
"""Minimum number of rows in a window of short samples, because the last row is half empty on average."""
_TOLERANCE = 0.005
"""Fraction of all positions that the limit of samples per row may waste."""

Counts = npt.NDArray[np.integer]


def packing_window_size(lengths: Counts, seq_length: int) -> int:
    """Window size for samples of these lengths: `PACKING_WINDOW`, or more if that gives only a few rows."""
    return max(PACKING_WINDOW, math.ceil(_LEAST_ROWS * seq_length / float(lengths.mean())))


def pack_samples(lengths: Counts, capacity: int, max_samples_per_row: int) -> list[list[int]]:
    """Rows, as lists of indices into `lengths`: at most `capacity` tokens and `max_samples_per_row` samples each.

    Best-fit decreasing: samples from the longest to the shortest, each into the fullest row that has space. Lengths are
    1..capacity.
    """
    if not len(lengths):
        return []
    sizes, shortest = lengths.tolist(), int(lengths.min())
    assert 0 < shortest <= lengths.max() <= capacity, f"samples of {shortest} to {lengths.max()} tokens in {capacity}"
    rows = list[list[int]]()
    by_space: list[list[list[int]]] = [[] for _ in range(capacity + 1)]  # open rows by free space
    spaces = list[int]()  # ascending, unique: amounts of free space with open rows
    for index in np.argsort(-lengths.astype(np.int64), kind="stable").tolist():
        place = bisect_left(spaces, sizes[index])
        if place == len(spaces):
            space, row = capacity, list[int]()
            rows.append(row)
        else:
            space = spaces[place]
            row = by_space[space].pop()
            if not by_space[space]:
                del spaces[place]
        row.append(index)
        space -= sizes[index]
        if space >= shortest and len(row) < max_samples_per_row:
            if not by_space[space]:
                insort(spaces, space)
            by_space[space].append(row)
    return rows


def choose_max_samples_per_row(lengths: Counts, seq_length: int) -> int:
    """Smallest limit of samples per row that wastes at most `_TOLERANCE` of the positions.

    Tensors of document bounds have this fixed size, and the memory of attention's backward grows with it. Candidates
    are 2, 3, 4, 6, 8, 12, 16, ...; `lengths` are the sample lengths of one window.
    """
    num_tokens = int(lengths.sum())

    def padding(max_samples_per_row: int) -> float:
        return 1 - num_tokens / (seq_length * len(pack_samples(lengths, seq_length, max_samples_per_row)))

    least, most = padding(len(lengths)), 2
    while padding(most) > least + _TOLERANCE:
        most = most * 4 // 3 if most & (most - 1) else most * 3 // 2
    return most


def attention_cost(document_lengths: Sequence[int], seq_length: int) -> int:
    """Sum of squared document lengths in a row; padding counts as one more document."""
    return sum(length * length for length in document_lengths) + (seq_length - sum(document_lengths)) ** 2


def balanced_order(costs: Counts, num_microbatches: int) -> list[int]:
    """Order of a step's rows that gives microbatches, each of B / M consecutive rows, nearly equal cost.

    Greedy: rows from the most expensive to the cheapest, each to the cheapest microbatch with space.
    """
    size, rest = divmod(len(costs), num_microbatches)
    assert rest == 0, f"{len(costs)} rows in {num_microbatches} microbatches"
    microbatches: list[list[int]] = [[] for _ in range(num_microbatches)]
    loads = [(0, microbatch) for microbatch in range(num_microbatches)]
    heapify(loads)
    for row in np.argsort(-costs.astype(np.int64), kind="stable").tolist():
        load, microbatch = heappop(loads)
        microbatches[microbatch].append(row)
        if len(microbatches[microbatch]) < size:
            heappush(loads, (load + int(costs[row]), microbatch))
    return [row for rows in microbatches for row in sorted(rows)]
