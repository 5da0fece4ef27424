"""Host memory in which inputs of layers wait from forward to backward: a place for each stage, microbatch and layer.

All stashed stages of a rank wait at once when its first backward begins, so none can share a place with another; the
microbatches of one round take the places of the round before. Nothing is ever full, and nothing is looked for.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mobius.memory.host_arena import lock_pages, map_zeros, unlock_pages


class ActivationHome:
    """Owns the memory; where it is page-locked it must be given back by `close` before the process ends."""

    def __init__(
        self,
        num_layers: Mapping[int, int],
        *,
        round_size: int,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        register: bool,
    ) -> None:
        """Take `round_size` places of the inputs [B, L, H], `shape`, of so many layers for each stage.

        `register` page-locks them for asynchronous copies. Raises HostMemoryError.
        """
        self._round_size = round_size
        self._registered: list[Tensor] = []
        self._places: dict[int, Tensor] = {}
        try:
            for stage, layers in num_layers.items():
                flat = map_zeros(round_size * layers * torch.Size(shape).numel(), dtype)
                if register and flat.numel() > 0:
                    lock_pages(flat)
                    self._registered.append(flat)
                self._places[stage] = flat.view(round_size, layers, *shape)
        except BaseException:
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        """Memory of all stages."""
        return sum(places.nbytes for places in self._places.values())

    def place(self, stage: int, microbatch: int) -> Tensor:
        """The place [layers, B, L, H] of a microbatch of the step, which is that of one of another round too."""
        return self._places[stage][microbatch % self._round_size]

    def close(self) -> None:
        """Unregister all memory; copies to and from it must have ended. Safe to call twice."""
        while self._registered:
            unlock_pages(self._registered.pop())
