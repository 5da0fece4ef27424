"""Host memory in which what layers keep waits from forward to backward: a place for each stage and microbatch.

All stashed stages of a rank wait at once when its first backward begins, so none can share a place with another; the
microbatches of one round take the places of the round before. Nothing is ever full, and nothing is looked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mobius.memory.host_arena import lock_pages, map_zeros, unlock_pages


class PinnedActivationBuffer:
    """Owns the memory; where it is page-locked it must be given back by `close` before the process ends."""

    def __init__(self, region_bytes: Mapping[int, Sequence[int]], *, register: bool) -> None:
        """Take a place of so many bytes for each stage and microbatch of a round.

        `register` page-locks them for asynchronous copies. Raises HostMemoryError.
        """
        self._registered: list[Tensor] = []
        self._regions: dict[int, Sequence[Tensor]] = {}
        try:
            for stage, sizes in region_bytes.items():
                flat = map_zeros(sum(sizes), torch.uint8)
                if register and flat.numel() > 0:
                    lock_pages(flat)
                    self._registered.append(flat)
                self._regions[stage] = flat.split([*sizes])
        except BaseException:
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        """Memory of all stages."""
        return sum(region.nbytes for regions in self._regions.values() for region in regions)

    def region(self, stage: int, microbatch: int) -> Tensor:
        """The place, uint8 [bytes], of a microbatch of the step, which is that of one of another round too."""
        regions = self._regions[stage]
        return regions[microbatch % len(regions)]

    def close(self) -> None:
        """Unregister all memory; copies to and from it must have ended. Safe to call twice."""
        while self._registered:
            unlock_pages(self._registered.pop())
