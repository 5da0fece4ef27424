"""Report on datasets before a run: tables of samples, tokens and steps, and a histogram of sample lengths."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from mobius.config.options import DatasetEntry
from mobius.data.batches import TrainingBatches
from mobius.data.datasets import PreparedDataset
from mobius.data.preview import escape_invisible
from mobius.data.statistics import SampleStatistics
from mobius.units import format_columns

Counts = npt.NDArray[np.int64]
"""Number of samples of each length: index n counts samples of n tokens."""

_MAX_BINS: Final = 16
_BAR: Final = 50
"""Characters of the longest bar."""
_NAME: Final = 32
"""Maximum characters of a dataset's name in a table; the end of a path is shown, because it is more specific."""


@dataclass(frozen=True)
class DatasetStatistics:
    """A dataset, its counts, and the number of its samples that are trained on (0 for an evaluation dataset)."""

    dataset: PreparedDataset
    statistics: SampleStatistics
    num_trained: int

    @property
    def name(self) -> str:
        return name_of(self.dataset.entry)

    @property
    def epoch_tokens(self) -> float:
        """Mean number of the dataset's tokens in an epoch."""
        return self.statistics.num_tokens * self.dataset.entry.weight * self.num_trained / self.statistics.num_samples


def name_of(entry: DatasetEntry) -> str:
    """Dataset's name as given, shortened, with the options that select a part of it."""
    parts = [entry.name, *([entry.subset] if entry.subset else []), *([entry.split] if entry.split != "train" else [])]
    name = escape_invisible(" ".join(parts)).replace("\n", "\\n")
    return name if len(name) <= _NAME else f"...{name[3 - _NAME :]}"


def dataset_table(datasets: Sequence[DatasetStatistics]) -> list[str]:
    """Line for each dataset: its records, samples and tokens, and its share of an epoch."""
    total = sum(each.epoch_tokens for each in datasets)
    has_weights = any(each.dataset.entry.weight != 1 for each in datasets)
    heads = ("dataset", "format", "read", "kept", "cut", "dropped", "empty", "samples", "tokens", "targets", "of them")
    rows: list[Sequence[str]] = [(*heads, *(["weight"] if has_weights else []), "epoch")]
    for each in datasets:
        counts, statistics = each.dataset.counts, each.statistics
        numbers = (counts.read, counts.kept, counts.cut, counts.dropped, counts.empty)
        sums = (statistics.num_samples, statistics.num_tokens, statistics.num_targets)
        uses = [_percent(each.epoch_tokens / total)]
        if has_weights:
            uses.insert(0, f"{each.dataset.entry.weight:g}")
        uses = uses if each.num_trained else ["-"] * len(uses)
        cells = (f"{number:,}" for number in (*numbers, *sums))
        targets = _percent(statistics.num_targets / statistics.num_tokens)
        rows.append((each.name, each.dataset.format_name, *cells, targets, *uses))
    lines = format_columns(rows, num_left=2).splitlines()
    if any(each.dataset.counts.cut for each in datasets):
        lines.append("  cut: longer than seq_length, so that tokens are lost")
    dropped = sum((Counter(each.dataset.counts.dropped_by_reason) for each in datasets), Counter[str]())
    if dropped:
        lines.append(f"  dropped: {', '.join(f'{number:,} {reason}' for reason, number in dropped.items())}")
    return lines


def step_table(
    ways: Sequence[tuple[str, TrainingBatches]], *, batch_size: int, seq_length: int, target_share: float
) -> list[str]:
    """Line for each packing mode (name, batches): the contents of a step, and the steps of an epoch."""
    rows: list[Sequence[str]] = [("a step holds", "samples", "tokens", "targets", "padding", "steps of an epoch")]
    for name, batches in ways:
        row_statistics = batches.row_statistics
        tokens = batch_size * seq_length * (1 - row_statistics.padding)
        samples = row_statistics.samples_per_row * batch_size
        steps = 1 / batches.num_epochs_of(1)
        numbers = (
            f"{samples:,.0f}",
            f"{tokens:,.0f}",
            f"{tokens * target_share:,.0f}",
            _percent(row_statistics.padding),
        )
        rows.append((name, *numbers, f"{steps:,.1f}" if steps >= 1 else f"{steps:.2g}"))
    return format_columns(rows).splitlines()


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def added(datasets: Sequence[Counts]) -> Counts:
    """Number of samples of each length in all datasets together."""
    total = np.zeros(max(map(len, datasets)), dtype=np.int64)
    for counts in datasets:
        total[: len(counts)] += counts
    return total


def bin_edges(counts: Counts) -> list[int]:
    """Return the inclusive ends of the bins; the first is below the shortest sample, the last is the longest sample.

    Bins are equally wide. But if the first bin would then hold half of all samples, each end is twice the previous end.
    """
    found = np.flatnonzero(counts)
    shortest, longest = int(found[0]), int(found[-1])
    width = 1 << max(0, -(-longest // _MAX_BINS) - 1).bit_length()
    inner = range((shortest - 1) // width * width, longest, width)
    first = int(counts[: inner[0] + width + 1].sum())
    if 2 * first < int(counts.sum()) or 8 * inner[0] >= longest or longest <= _MAX_BINS:
        return [*inner, longest]
    start = max(0, (shortest - 1).bit_length() - 1)
    powers = [1 << power for power in range(start, longest.bit_length()) if 1 << power < longest]
    return [0 if shortest <= powers[0] else powers.pop(0), *powers, longest]


def binned(counts: Counts, edges: Sequence[int]) -> list[int]:
    """Number of samples in each bin."""
    through = np.cumsum(counts)
    ends = [int(through[min(edge, len(counts) - 1)]) for edge in edges]
    return [after - before for before, after in pairwise(ends)]


def describe_lengths(counts: Counts) -> str:
    """Text with the shortest, median, mean and longest length."""
    found, through = np.flatnonzero(counts), np.cumsum(counts)
    median = int(np.searchsorted(through, (through[-1] + 1) // 2))
    mean = float(counts @ np.arange(len(counts))) / int(through[-1])
    return f"shortest {found[0]:,}, median {median:,}, mean {mean:,.1f}, longest {found[-1]:,}"


def histogram_lines(counts: Counts, *, block: str) -> list[str]:
    """Line for each bin: its lengths, samples and a bar of `block`s, at least one if the bin has samples."""
    edges = bin_edges(counts)
    numbers = binned(counts, edges)
    labels = _labels(edges)
    width, digits, most = max(map(len, labels)), len(f"{max(numbers):,}"), max(numbers)
    return [
        f"  {label:>{width}} | {number:>{digits},} {block * -(-number * _BAR // most)}".rstrip()
        for label, number in zip(labels, numbers, strict=True)
    ]


def _labels(edges: Sequence[int]) -> list[str]:
    return [f"{last:,}" if last == first + 1 else f"{first + 1:,}-{last:,}" for first, last in pairwise(edges)]
