"""Layout of a stage's flat buffers: parameter name -> slice."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mobius.models.quantization import EightBitFormat
from mobius.models.weight_codecs import WeightCodec

ALIGNMENT = 128
"""Alignment of parameters, in elements: 256 bytes in bf16, enough for vectorized kernels and compiled graphs."""


FP32_UNITS = 2
"""Numbers of a 16-bit working format that an fp32 weight takes."""


class _Group(IntEnum):
    """Groups of a stage's parameters, in their order in the flat buffers."""

    REDUCED = 0
    DECAYED = 1
    UNDECAYED = 2
    DECAYED_FP32 = 3
    UNDECAYED_FP32 = 4
    FROZEN = 5
    FROZEN_FP32 = 6
    CODES = 7


_DECAY = {
    _Group.DECAYED: True,
    _Group.UNDECAYED: False,
    _Group.DECAYED_FP32: True,
    _Group.UNDECAYED_FP32: False,
}
"""Whether the parameters of a trained group have weight decay; each reduced parameter has a range of its own."""
_FORMATS = (
    (_Group.REDUCED, _Group.UNDECAYED, None),
    (_Group.DECAYED_FP32, _Group.UNDECAYED_FP32, torch.float32),
    (_Group.FROZEN, _Group.FROZEN, None),
    (_Group.FROZEN_FP32, _Group.FROZEN_FP32, torch.float32),
)
"""First group, last group and format of each region of the weights."""


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


class WeightFormats(NamedTuple):
    """Formats of weights that do not have the working format."""

    in_fp32: Collection[str] = frozenset()
    """Parameters in fp32 beside others in 16 bits."""
    codecs: Mapping[str, WeightCodec] = MappingProxyType({})
    """Frozen matrices that are codes."""
    unit_bytes: int = 2
    """Bytes of a number of the working format."""


WORKING_FORMAT = WeightFormats()
"""All weights have the working format."""


class WeightRegion(NamedTuple):
    """Consecutive parameters whose weights have one format."""

    elements: slice
    """Elements in the flat gradients and states; for frozen parameters, a continued count."""
    units: slice
    """Numbers of the working format in the flat weights."""
    dtype: torch.dtype | None = None
    """Format of the weights; None: the working format, or codes."""
    codec: WeightCodec | None = None
    """Format of the codes of the region's only parameter, a frozen matrix; None: values."""

    @property
    def units_per_element(self) -> int:
        """Numbers of the working format that a weight takes."""
        return 1 if self.dtype is None else FP32_UNITS

    def units_of(self, part: slice) -> slice:
        """Return the place of the elements `part`, which must be in the region; of codes, only beginning and end."""
        if self.codec is not None:
            ends = {self.elements.start: self.units.start, self.elements.stop: self.units.stop}
            return slice(ends[part.start], ends[part.stop])
        return slice(
            *(
                self.units.start + (each - self.elements.start) * self.units_per_element
                for each in (part.start, part.stop)
            )
        )


@dataclass(frozen=True)
class StageLayout:
    """Offsets of a stage's parameters in its flat buffers; frozen parameters follow trained parameters.

    weights                  | trained: reduced, decayed, undecayed | trained in fp32 | frozen | frozen in fp32 |
    gradients, states        | trained: reduced, decayed, undecayed | trained in fp32 |

    Weights are one flat buffer in the working format. In 16-bit runs some parameters, such as routers, have weights in
    fp32: each takes two numbers of the buffer (`WeightRegion`). Such a weight is its own master.
    Frozen matrices may be codes, which stand at the end.
    """

    offsets: Mapping[str, tuple[int, tuple[int, ...]]]
    """Name -> (offset in elements, shape), in forward order of the stage's parameters."""
    num_units: int
    """Length of the flat weights, including padding, in numbers of the working format."""
    num_trained: int
    """Number of trained elements, including padding: the length of gradients, master and moments."""
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
    regions: tuple[WeightRegion, ...] = ()
    """Formats of all weights, in order; empty: all weights have the working format."""
    unit_bytes: int = 2
    """Bytes of a number of the working format, for codes."""

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
        formats: WeightFormats = WORKING_FORMAT,
    ) -> StageLayout:
        """Lay out `shapes` (name -> shape); the parameters named in `frozen` are not trained.

        Parameters in `no_weight_decay` have no weight decay; with None, these are all parameters with fewer than two
        dimensions. Parameters in `reduced` that have weight decay keep their optimizer states in `reduced_format`.
        Products of parameters in `quantized` are computed in `eight_bit`. `rates`: factors of the learning rate, for
        parameters that have others than 1. States of weights in fp32 beside 16-bit ones are never reduced.
        """
        rates, (in_fp32, codecs, unit_bytes) = rates or {}, formats
        without = {name for name in shapes if len(shapes[name]) < 2} if no_weight_decay is None else no_weight_decay
        groups: list[list[str]] = [[] for _ in _Group]
        for name in shapes:
            if name in codecs:
                group = _Group.CODES
            elif name in frozen:
                group = _Group.FROZEN_FP32 if name in in_fp32 else _Group.FROZEN
            elif name in in_fp32:
                group = _Group.UNDECAYED_FP32 if name in without else _Group.DECAYED_FP32
            else:
                group = _Group.UNDECAYED if name in without else _Group.REDUCED if name in reduced else _Group.DECAYED
            groups[group].append(name)
        offsets: dict[str, tuple[int, tuple[int, ...]]] = {}
        ends = [0]
        for names in groups:
            position = ends[-1]
            names.sort(key=lambda each: rates.get(each, 1.0))
            for name in names:
                offsets[name] = (position, shapes[name])
                position += -(-torch.Size(shapes[name]).numel() // ALIGNMENT) * ALIGNMENT
            ends.append(position)
        bounds = dict(zip(_Group, pairwise(ends), strict=True))
        num_reduced, num_trained = bounds[_Group.REDUCED][1], bounds[_Group.UNDECAYED_FP32][1]
        starts = [*(offsets[name][0] for name in groups[_Group.REDUCED]), num_reduced]
        reduced_ranges = zip(groups[_Group.REDUCED], pairwise(starts), strict=True)
        own = [FlatRange(*both, True, name) for name, both in reduced_ranges]
        own += [FlatRange(*bounds[group], has_decay) for group, has_decay in _DECAY.items()]
        ranges = tuple(_split_by_rate((part for part in own if part.end > part.start), offsets, rates))
        ordered = {name: offsets[name] for name in shapes}
        codes = tuple(name for name in ordered if name in quantized)
        coded = [(offsets[name][0], shapes[name], codecs[name]) for name in groups[_Group.CODES]]
        regions = tuple(_regions(bounds, coded, unit_bytes))
        num_units = regions[-1].units.stop if regions else ends[-1]
        more = codes, eight_bit, regions, unit_bytes
        return cls(ordered, num_units, num_trained, ranges, num_reduced, reduced_format, *more)

    def split(self) -> tuple[StageLayout, StageLayout]:
        """Return one layout of the frozen parameters and one of the trained parameters."""
        shapes = {name: shape for name, (_, shape) in self.offsets.items()}
        frozen = {name: shape for name, shape in shapes.items() if not self.is_trained(name)}
        trained = {name: shape for name, shape in shapes.items() if name not in frozen}
        starts = {name: offset for name, (offset, _) in self.offsets.items()}
        ranges = {name: part for part in self.ranges for name in trained if part.start <= starts[name] < part.end}
        in_fp32 = {name for name in shapes if self.dtype_of(name) is not None}
        codecs = {name: codec for name in frozen if (codec := self.codec_of(name)) is not None}
        both: dict[str, Any] = {
            "quantized": self.quantized,
            "eight_bit": self.eight_bit,
            "formats": WeightFormats(in_fp32, codecs, self.unit_bytes),
        }
        without = {name for name, part in ranges.items() if not part.has_decay}
        rates = {name: part.rate for name, part in ranges.items()}
        return (
            StageLayout.of(frozen, frozen=frozen, **both),
            StageLayout.of(trained, no_weight_decay=without, rates=rates, **both),
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

    @property
    def num_trained_units(self) -> int:
        """Length of the trained part of the flat weights."""
        return int(self.units_of(slice(0, self.num_trained)).stop)

    @property
    def first_in_fp32(self) -> int:
        """First trained element whose weight is fp32 in a 16-bit run; `num_trained` without such elements."""
        starts = [int(each.elements.start) for each in self.regions if each.dtype is not None]
        return min([self.num_trained, *starts])

    def region_of(self, element: int) -> WeightRegion:
        """Return the region of an element; the last region if no element follows."""
        return next((each for each in self.regions if element < each.elements.stop), self.regions[-1])

    def units_of(self, part: slice) -> slice:
        """Return the place in the flat weights of the elements `part`."""
        if not self.regions:
            return part
        starts = (self.region_of(each).units_of(slice(each, each)).start for each in (part.start, part.stop))
        return slice(*starts)

    def dtype_of(self, name: str) -> torch.dtype | None:
        """Format of a parameter's weight; None: the working format."""
        return self.region_of(self.offsets[name][0]).dtype if self.regions else None

    def codec_of(self, name: str) -> WeightCodec | None:
        """Format of a parameter's codes; None: values."""
        return self.region_of(self.offsets[name][0]).codec if self.regions else None

    @property
    def coded_names(self) -> tuple[str, ...]:
        """Names of the parameters that are codes."""
        return tuple(name for name in self.offsets if self.codec_of(name) is not None)

    def views(self, flat: Tensor, *, only_trained: bool = False) -> dict[str, Tensor]:
        """Name -> view of the flat weights `flat` [num_units or more] in the parameter's shape and format.

        Views of codes are their bytes, uint8. With `only_trained`, `flat` may end after the trained part
        (`num_trained_units`).
        """
        names = self.trained_names if only_trained else self.offsets
        return {name: self.weight(flat, name) for name in names}

    def weight(self, flat: Tensor, name: str) -> Tensor:
        """Return the view of a parameter in the flat weights, in its shape and format; of codes, their bytes."""
        if (codec := self.codec_of(name)) is not None:
            region = self.region_of(self.offsets[name][0])
            return flat[region.units].view(torch.uint8)[: codec.num_bytes(self.offsets[name][1])]
        return self.part_of_weights(flat, self.slice_of(name)).view(self.offsets[name][1])

    def part_of_weights(self, flat: Tensor, part: slice) -> Tensor:
        """Return the elements `part`, which have one format, of the flat weights."""
        dtype = self.region_of(part.start).dtype if self.regions else None
        own = flat[self.units_of(part)]
        return own if dtype is None else own.view(dtype)

    def trained_views(self, flat: Tensor) -> dict[str, Tensor]:
        """Name -> view of `flat` [num_trained or more], sums or gradients, in the parameter's shape, if trained."""
        return {name: flat[self.slice_of(name)].view(self.offsets[name][1]) for name in self.trained_names}

    @property
    def trained_names(self) -> tuple[str, ...]:
        """Names of the parameters that the optimizer updates, in the order of `offsets`."""
        return tuple(name for name in self.offsets if self.is_trained(name))

    def is_trained(self, name: str) -> bool:
        """Whether the optimizer updates the parameter."""
        return self.offsets[name][0] < self.num_trained

    def slice_of(self, name: str) -> slice:
        """Return the parameter's elements in the flat gradients and states; `units_of` has the place of its weights."""
        offset, shape = self.offsets[name]
        return slice(offset, offset + torch.Size(shape).numel())

    def named_ranges(self, part: slice) -> Iterator[NamedRange]:
        """Yield, in the order of `offsets`, the range of each parameter that lies in `part` of the flat buffers."""
        for name in self.offsets:
            whole = self.slice_of(name)
            start, stop = max(whole.start, part.start), min(whole.stop, part.stop)
            if start < stop:
                yield NamedRange(name, start - whole.start, slice(start, stop))


def _regions(
    bounds: Mapping[_Group, tuple[int, int]], coded: Sequence[tuple[int, tuple[int, ...], WeightCodec]], unit_bytes: int
) -> Iterator[WeightRegion]:
    """Yield the regions of groups at `bounds` (elements), then of `coded` parameters: first element, shape, codec.

    None if all weights have the working format.
    """
    in_fp32 = any(bounds[last][1] > bounds[first][0] for first, last, dtype in _FORMATS if dtype is not None)
    if not in_fp32 and not coded:
        return
    end = 0
    for first, last, dtype in _FORMATS:
        elements = slice(bounds[first][0], bounds[last][1])
        start, end = end, end + (elements.stop - elements.start) * (1 if dtype is None else FP32_UNITS)
        if elements.stop > elements.start:
            yield WeightRegion(elements, slice(start, end), dtype)
    starts = [*(each[0] for each in coded), bounds[_Group.CODES][1]]
    for elements, (_, shape, codec) in zip(map(slice, starts[:-1], starts[1:]), coded, strict=True):
        start, end = end, end + codec.num_bytes(shape) // unit_bytes
        yield WeightRegion(elements, slice(start, end), codec=codec)


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
