"""KV cache of one layer over the slices of its sequences, with fp32 sums of the gradients of keys and values.

forward     slice 0 puts    slice 1 puts    slice 2 puts        a query attends to its own and all earlier keys
            k0 v0           k0 v0 k1 v1     k0 v0 k1 v1 k2 v2
backward    slice 2 adds to the sums of 0, 1 and 2, then takes those of 2: no later slice is left to add to them;
            slice 1 adds to 0 and 1, then takes 1; slice 0 adds to 0 and takes 0: all sums are zero again
"""

from __future__ import annotations

import torch
from torch import Tensor


class SequenceKVCache:
    """Keys and values [B, Hk, S, D] and their gradient sums, allocated once and reused for every sequence.

    Holds 2 x B x Hk x S x D elements in the working dtype, and as many in fp32.
    """

    def __init__(self, shape: tuple[int, int, int, int], *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.key, self.value = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        self._sums = tuple(torch.zeros(shape, dtype=torch.float32, device=device) for _ in range(2))

    @property
    def length(self) -> int:
        return self.shape[2]

    def put(self, start: int, key: Tensor, value: Tensor) -> None:
        """Copy the keys and values [B, Hk, T, D] of a slice into the cache; recomputation may repeat it."""
        end = start + key.shape[2]
        assert end <= self.length, f"a slice up to {end} in a sequence of {self.length}"
        self.key[:, :, start:end].copy_(key)
        self.value[:, :, start:end].copy_(value)

    def key_value_views(self, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
        """Views of cached keys and values, [b, Hk, K, D]."""
        return self.key[rows, :, keys], self.value[rows, :, keys]

    def gradient_sum_views(self, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
        """Views of the fp32 gradient sums of keys and values, [b, Hk, K, D], to add to in place."""
        of_key, of_value = self._sums
        return of_key[rows, :, keys], of_value[rows, :, keys]

    def take_gradients(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the gradient sums [B, Hk, T, D] of keys and values, rounded to the working dtype, and zero them."""
        taken = []
        for gradient_sum_views in self.gradient_sum_views(slice(None), slice(start, end)):
            taken.append(gradient_sum_views.to(self.key.dtype, copy=True))
            gradient_sum_views.zero_()
        return taken[0], taken[1]
