"""Host memory for offloaded activations, with one fixed region per stage and microbatch.

When a rank's first backward starts, all its offloaded stages are stored, so stages share no region. The microbatches of
an accumulation round reuse the regions of the previous round. Fixed regions need no allocator and cannot run out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mobius.engine.host_arena import lock_pages, map_zeros, unlock_pages


class PinnedActivationBuffer:
    """Host buffer of activations; if it is page-locked, call `close` before the process ends."""

    def __init__(self, region_bytes: Mapping[int, Sequence[int]], *, register: bool) -> None:
        """Allocate a region of the given bytes for each stage and microbatch of an accumulation round.

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
        """Return the region, uint8 [bytes], of a microbatch of the step; accumulation rounds share regions."""
        regions = self._regions[stage]
        return regions[microbatch % len(regions)]

    def close(self) -> None:
        """Unregister all memory; copies to and from it must have ended. Safe to call twice."""
        while self._registered:
            unlock_pages(self._registered.pop())
