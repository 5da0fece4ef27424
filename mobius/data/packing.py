"""Decides which samples share a row of seq_length, and which rows share a microbatch, from token counts alone.

Samples are packed window by window in an epoch's order, so only one window at a time is in memory and sorted.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

PACKING_WINDOW = 8192
"""Number of samples in a window. With log-normal lengths of mean 700 and rows of 4096 tokens, 0.4 % of the positions
are empty. With windows of 1024 samples, 0.7 % are empty; with larger windows no less than 0.4 %."""
_LEAST_ROWS = 64
"""Minimum number of rows in a window of short samples, because its last row is half empty on average."""
_TOLERANCE = 0.005
"""Share of all positions that may be empty because of the limit of samples per row."""

Counts = npt.NDArray[np.integer]


def packing_window_size(lengths: Counts, seq_length: int) -> int:
    """Return the window size for samples of these lengths: `PACKING_WINDOW`, or more if that gives only a few rows."""
    return max(PACKING_WINDOW, math.ceil(_LEAST_ROWS * seq_length / float(lengths.mean())))


def pack_samples(lengths: Counts, capacity: int, max_samples_per_row: int) -> list[list[int]]:
    """Return rows of at most `capacity` tokens and `max_samples_per_row` samples, as lists of indices into `lengths`.

    Best-fit decreasing: samples go, from the longest to the shortest, into the fullest row that has space. Lengths must
    be 1..capacity.
    """
    if not len(lengths):
        return []
    sizes, shortest = lengths.tolist(), int(lengths.min())
    assert 0 < shortest <= lengths.max() <= capacity, f"samples of {shortest} to {lengths.max()} tokens in {capacity}"
    rows = list[list[int]]()
    by_space: list[list[list[int]]] = [[] for _ in range(capacity + 1)]  # entry n: open rows with n free tokens
    spaces = list[int]()  # free tokens of open rows, ascending, without duplicates
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
    """Return the smallest limit of samples per row that leaves at most `_TOLERANCE` of the positions empty.

    The limit is the fixed size of tensors of document bounds, and the memory of attention's backward grows with it.
    Candidates are 2, 3, 4, 6, 8, 12, 16, ...; `lengths` are the sample lengths of one window.
    """
    num_tokens = int(lengths.sum())

    def padding(max_samples_per_row: int) -> float:
        return 1 - num_tokens / (seq_length * len(pack_samples(lengths, seq_length, max_samples_per_row)))

    least, most = padding(len(lengths)), 2
    while padding(most) > least + _TOLERANCE:
        most = most * 4 // 3 if most & (most - 1) else most * 3 // 2
    return most


def attention_cost(document_lengths: Sequence[int], seq_length: int) -> int:
    """Return the sum of squared document lengths in a row; padding counts as one more document."""
    return sum(length * length for length in document_lengths) + (seq_length - sum(document_lengths)) ** 2


def balanced_order(costs: Counts, num_microbatches: int) -> list[int]:
    """Return an order of a step's rows with which the microbatches (B / M consecutive rows) have nearly equal cost.

    Greedy: rows go, from the most expensive to the cheapest, to the cheapest microbatch that has space.
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
