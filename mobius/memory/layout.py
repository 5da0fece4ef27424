"""The layout of a stage's flat buffer: parameter name -> slice. It owns no memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 128
"""Elements; 256 bytes in bf16, so that every view is aligned for vectorized kernels and compiled graphs can rely on
it.
"""


@dataclass(frozen=True)
class FlatRange:
    """A contiguous run of parameters that share one weight decay."""

    start: int
    end: int
    has_decay: bool


@dataclass(frozen=True)
class StageLayout:
    """Offsets of a stage's parameters in one flat buffer; the same for weights, gradients, master and moments."""

    offsets: Mapping[str, tuple[int, tuple[int, ...]]]
    """Name -> (offset in elements, shape), in the stage's own order of parameters."""
    num_elements: int
    """Length of the flat buffer, padding included."""
    num_parameters: int
    """Elements that belong to parameters."""
    ranges: tuple[FlatRange, ...]
    """Matrices (decayed) first, then vectors: norms and biases are not decayed."""

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> StageLayout:
        """Lay out `shapes` (name -> shape)."""
        offsets: dict[str, tuple[int, tuple[int, ...]]] = {}
        ranges = []
        position = 0
        for has_decay in (True, False):
            start = position
            for name, shape in shapes.items():
                if (len(shape) >= 2) == has_decay:
                    offsets[name] = (position, shape)
                    position += -(-torch.Size(shape).numel() // ALIGNMENT) * ALIGNMENT
            if position > start:
                ranges.append(FlatRange(start, position, has_decay))
        in_order = {name: offsets[name] for name in shapes}
        num_parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
        return cls(in_order, position, num_parameters, tuple(ranges))

    def pieces(self, max_elements: int) -> tuple[tuple[FlatRange, ...], ...]:
        """`ranges` in as few groups as their order allows, each of at most `max_elements`."""
        groups: list[list[FlatRange]] = []
        room = 0
        for whole in self.ranges:
            start = whole.start
            while start < whole.end:
                if room == 0:
                    groups.append([])
                    room = max_elements
                end = min(start + room, whole.end)
                groups[-1].append(FlatRange(start, end, whole.has_decay))
                room -= end - start
                start = end
        return tuple(tuple(group) for group in groups)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Name -> view of `flat` [num_elements or more] in the parameter's shape."""
        return {
            name: flat[offset : offset + torch.Size(shape).numel()].view(shape)
            for name, (offset, shape) in self.offsets.items()
        }
