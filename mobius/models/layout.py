"""Layout of a stage's flat buffers: parameter name -> slice."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from mobius.models.quantization import EightBitFormat

ALIGNMENT = 128
"""Alignment of parameters, in elements: 256 bytes in bf16, enough for vectorized kernels and compiled graphs."""


@dataclass(frozen=True)
class FlatRange:
    """A contiguous range of trained parameters with the same weight decay and learning rate."""

    start: int
    end: int
    has_decay: bool
    name: str | None = None
    """The only parameter in this range, if its optimizer state is in a reduced format; else None."""
    offset: int = 0
    """First element within that parameter."""
    rate: float = 1.0
    """Factor of the learning rate."""


@dataclass(frozen=True)
class NamedRange:
    """Consecutive elements of one parameter, identified independently of stages and shards."""

    name: str
    offset: int
    """First element within the parameter."""
    place: slice
    """Elements in the stage's flat buffers."""


@dataclass(frozen=True)
class StageLayout:
    """Offsets of a stage's parameters in its flat buffers; frozen parameters follow trained parameters.

    weights                       | trained: reduced, decayed, then undecayed | frozen |
    gradients, master, moments    | trained: reduced, decayed, then undecayed |
    """

    offsets: Mapping[str, tuple[int, tuple[int, ...]]]
    """Name -> (offset in elements, shape), in forward order of the stage's parameters."""
    num_elements: int
    """Length of the flat weights, including padding."""
    num_trained: int
    """Length of the trained part, including padding: the length of gradients, master and moments."""
    ranges: tuple[FlatRange, ...]
    """Contiguous ranges of the trained part: one per parameter in a reduced format, then decayed, then undecayed."""
    num_reduced: int = 0
    """Length of the first part, whose optimizer state is in `reduced_format`."""
    reduced_format: str = ""
    """Name of the format, as in --optimizer_states."""
    quantized: tuple[str, ...] = ()
    """Matrices, frozen or trained, whose products are computed in eight bits."""
    eight_bit: EightBitFormat | None = None
    """Format of the products of `quantized` matrices."""

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        frozen: Collection[str] = frozenset(),
        no_weight_decay: Collection[str] | None = None,
        reduced: Collection[str] = frozenset(),
        reduced_format: str = "",
        quantized: Collection[str] = (),
        eight_bit: EightBitFormat | None = None,
        rates: Mapping[str, float] | None = None,
    ) -> StageLayout:
        """Lay out `shapes` (name -> shape); the parameters named in `frozen` are not trained.

        Parameters in `no_weight_decay` have no weight decay; with None, these are all parameters with fewer than two
        dimensions. Parameters in `reduced` that have weight decay keep their optimizer states in `reduced_format`.
        Products of parameters in `quantized` are computed in `eight_bit`. `rates`: factors of the learning rate, for
        parameters that have others than 1.
        """
        rates = rates or {}
        trained = [name for name in shapes if name not in frozen]
        without = {name for name in shapes if len(shapes[name]) < 2} if no_weight_decay is None else no_weight_decay
        smaller = [name for name in trained if name in reduced and name not in without]
        decayed = [name for name in trained if name not in reduced and name not in without]
        others = [name for name in trained if name in without]
        offsets: dict[str, tuple[int, tuple[int, ...]]] = {}
        ends = [0]
        for names in (smaller, decayed, others, [name for name in shapes if name in frozen]):
            position = ends[-1]
            for name in sorted(names, key=lambda each: rates.get(each, 1.0)):
                offsets[name] = (position, shapes[name])
                position += -(-torch.Size(shapes[name]).numel() // ALIGNMENT) * ALIGNMENT
            ends.append(position)
        _, num_reduced, decayed_end, num_trained, num_elements = ends
        starts = [*(offsets[name][0] for name in smaller), num_reduced]
        own = [FlatRange(*both, True, name) for name, both in zip(smaller, pairwise(starts), strict=True)]
        own += [FlatRange(num_reduced, decayed_end, has_decay=True)]
        own += [FlatRange(decayed_end, num_trained, has_decay=False)]
        ranges = tuple(_split_by_rate((part for part in own if part.end > part.start), offsets, rates))
        ordered = {name: offsets[name] for name in shapes}
        codes = tuple(name for name in ordered if name in quantized)
        return cls(ordered, num_elements, num_trained, ranges, num_reduced, reduced_format, codes, eight_bit)

    def split(self) -> tuple[StageLayout, StageLayout]:
        """Return one layout of the frozen parameters and one of the trained parameters."""
        shapes = {name: shape for name, (_, shape) in self.offsets.items()}
        frozen = {name: shape for name, shape in shapes.items() if not self.is_trained(name)}
        trained = {name: shape for name, shape in shapes.items() if name not in frozen}
        decayed_end = max((part.end for part in self.ranges if part.has_decay), default=0)
        no_weight_decay = {name for name in trained if self.offsets[name][0] >= decayed_end}
        starts = {name: offset for name, (offset, _) in self.offsets.items()}
        rates = {name: part.rate for part in self.ranges for name in trained if part.start <= starts[name] < part.end}
        codes: dict[str, Any] = {"quantized": self.quantized, "eight_bit": self.eight_bit}
        return (
            StageLayout.of(frozen, frozen=frozen, **codes),
            StageLayout.of(trained, no_weight_decay=no_weight_decay, rates=rates, **codes),
        )

    def part(self, trained: slice) -> StageLayout:
        """Return a layout of only the elements in the slice `trained`, without names."""
        length = trained.stop - trained.start
        num_reduced = max(0, min(trained.stop, self.num_reduced) - trained.start)
        return StageLayout({}, length, length, within(self.ranges, trained), num_reduced, self.reduced_format)

    def pieces(self, max_elements: int) -> tuple[tuple[FlatRange, ...], ...]:
        """Split `ranges` into groups of `max_elements` consecutive elements; the last group may be smaller."""
        starts = range(0, self.num_trained, max_elements)
        return tuple(_cut(self.ranges, start, start + max_elements) for start in starts)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Name -> view of the flat weights `flat` [num_elements or more] in the parameter's shape."""
        return {name: self._view(flat, name) for name in self.offsets}

    def trained_views(self, flat: Tensor) -> dict[str, Tensor]:
        """Name -> view of `flat` [num_trained or more] in the parameter's shape, for trained parameters only."""
        return {name: self._view(flat, name) for name in self.trained_names}

    @property
    def trained_names(self) -> tuple[str, ...]:
        """Names of the parameters that the optimizer updates, in the order of `offsets`."""
        return tuple(name for name in self.offsets if self.is_trained(name))

    def is_trained(self, name: str) -> bool:
        """Whether the optimizer updates the parameter."""
        return self.offsets[name][0] < self.num_trained

    def slice_of(self, name: str) -> slice:
        """Return the slice of the parameter's elements in the flat buffers."""
        offset, shape = self.offsets[name]
        return slice(offset, offset + torch.Size(shape).numel())

    def named_ranges(self, part: slice) -> Iterator[NamedRange]:
        """Yield, in the order of `offsets`, the range of each parameter that lies in `part` of the flat buffers."""
        for name in self.offsets:
            whole = self.slice_of(name)
            start, stop = max(whole.start, part.start), min(whole.stop, part.stop)
            if start < stop:
                yield NamedRange(name, start - whole.start, slice(start, stop))

    def _view(self, flat: Tensor, name: str) -> Tensor:
        return flat[self.slice_of(name)].view(self.offsets[name][1])


def _split_by_rate(
    ranges: Iterable[FlatRange], offsets: Mapping[str, tuple[int, tuple[int, ...]]], rates: Mapping[str, float]
) -> Iterator[FlatRange]:
    """Yield `ranges`, split where the factor of the learning rate changes; `offsets` as in `StageLayout`."""
    starts = sorted((offset, rates.get(name, 1.0)) for name, (offset, _) in offsets.items())
    for whole in ranges:
        inside = [(start, rate) for start, rate in starts if whole.start <= start < whole.end]
        groups = [next(group) for _, group in groupby(inside, key=lambda each: each[1])]
        ends = [*(start for start, _ in groups[1:]), whole.end]
        for (start, rate), end in zip(groups, ends, strict=True):
            yield replace(whole, start=start, end=end, rate=rate)


def within(ranges: Iterable[FlatRange], part: slice) -> tuple[FlatRange, ...]:
    """Return the ranges inside `part`, relative to its start."""
    cut = _cut(ranges, part.start, part.stop)
    return tuple(replace(each, start=each.start - part.start, end=each.end - part.start) for each in cut)


def _cut(ranges: Iterable[FlatRange], start: int, end: int) -> tuple[FlatRange, ...]:
    """Return the parts of the ranges that lie in [start, end)."""
    inside = (whole for whole in ranges if whole.start < end and start < whole.end)
    return tuple(
        replace(
            each,
            start=max(each.start, start),
            end=min(each.end, end),
            offset=each.offset + max(0, start - each.start) if each.name is not None else 0,
        )
        for each in inside
    )
