"""Shards of a stage's trained elements: one replica owns each element's reduced gradient and optimizer state.

    weights        | all of the stage, on every replica                                       |
    replica 0      | gradients, master, moments  |
    replica 1                                    | gradients, master, moments                 |

Between a stage's last backward and its update, gradients are reduce-scattered to their owners. After the update,
weights are all-gathered: for a resident stage at once, for a streamed stage with its next load. A tied matrix, which
has a copy in another stage, is sharded separately, so that a replica owns the same elements of both copies.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from mobius.limits import largest_shard
from mobius.models.layout import ALIGNMENT, StageLayout

Segment = tuple[slice, ...]
"""A contiguous range of trained elements, as one part per replica; a part may be empty."""


@dataclass(frozen=True)
class Shards:
    """Shards of a stage's trained elements for all replicas, and the index of this replica."""

    segments: tuple[Segment, ...]
    index: int

    @classmethod
    def of(cls, layout: StageLayout, index: int, num_replicas: int, *, tied: Collection[str] = ()) -> Shards:
        """Cut shards of nearly equal size.

        Parameters in `tied`, in a reduced format, or with fp32 weights in a 16-bit run are sharded separately.
        """
        bounds = {0, layout.num_reduced, layout.first_in_fp32, layout.num_trained}
        for name in tied:
            if name in layout.offsets and layout.is_trained(name):
                part = layout.slice_of(name)
                bounds |= {part.start, -(-part.stop // ALIGNMENT) * ALIGNMENT}
        ordered = sorted(bounds)
        segments = (cut(*both, num_replicas) for both in pairwise(ordered))
        return cls(tuple(segments), index)

    def part(self, start: int, stop: int, group: int = 1) -> Shards:
        """Return shards of only the segments in [start, stop), with offsets (index - start) / `group`."""
        inside = [each for each in self.segments if start <= each[0].start and each[-1].stop <= stop]

        def place(part: slice) -> slice:
            return slice((part.start - start) // group, (part.stop - start) // group)

        return Shards(tuple(tuple(map(place, segment)) for segment in inside), self.index)

    def of_weights(self, layout: StageLayout) -> Shards:
        """Return the shards of the flat weights (`StageLayout.units_of`)."""
        return Shards(tuple(tuple(map(layout.units_of, segment)) for segment in self.segments), self.index)

    @property
    def own(self) -> tuple[slice, ...]:
        """Non-empty parts of the trained elements that this replica owns, ascending."""
        return self.of_owner(self.index)

    def of_owner(self, index: int) -> tuple[slice, ...]:
        """Return the non-empty parts that replica `index` owns, ascending."""
        parts = (segment[index] for segment in self.segments)
        return tuple(part for part in parts if part.stop > part.start)

    @property
    def others(self) -> tuple[slice, ...]:
        """Non-empty parts that the other replicas own, ascending for each replica."""
        return tuple(
            part for index in range(len(self.segments[0])) if index != self.index for part in self.of_owner(index)
        )

    @property
    def num_trained(self) -> int:
        """Number of elements that all replicas own together."""
        return int(self.segments[-1][-1].stop)

    @property
    def num_elements(self) -> int:
        """Number of elements that this replica owns."""
        return sum(part.stop - part.start for part in self.own)

    def places(self) -> tuple[tuple[slice, slice], ...]:
        """Return each part in `own`, and the slice of this part in tensors that hold only `own` elements."""
        found, end = [], 0
        for part in self.own:
            start, end = end, end + part.stop - part.start
            found.append((part, slice(start, end)))
        return tuple(found)

    def copy_owned(self, values: Tensor, target: Tensor, *, non_blocking: bool = False) -> None:
        """Copy the `own` parts of `values` [num_trained] into `target` [num_elements] of any dtype and device."""
        for part, place in self.places():
            target[place].copy_(values[part], non_blocking=non_blocking)

    def owned_views(self, values: Tensor, layout: StageLayout) -> dict[str, Tensor]:
        """Return name -> flat view in `values` [num_trained] of the parameter's elements in `own`; omit empty views."""
        return {each.name: values[each.place] for own in self.own for each in layout.named_ranges(own)}


def cut(start: int, end: int, num_replicas: int) -> Segment:
    """Cut [start, end) into one part per replica; all parts are equal, except the last parts."""
    length = largest_shard(end - start, num_replicas)
    bounds = [min(start + index * length, end) for index in range(num_replicas + 1)]
    return tuple(slice(*both) for both in pairwise(bounds))
