"""Dropout of adapters' inputs, whose random numbers are hashes, so that each forward of a step drops the same elements.

    key of a token      hash of seed, step, row of the batch, place in the row    int64 [rows, L], made on the host
    key in a layer      hash of the token's key and the layer's number
    element's bits      hash of the key in the layer, the linear's name, and the feature

Words of 32 bits are in int64, and no product leaves its range: compilers of C++ assume that integers do not overflow.
So recomputation, stages, ranks, microbatches and slices drop the same elements, and a resumed run goes on with its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mobius.models.compiled import KeywordArguments

DROPOUT_KEYS: Final = "dropout_keys"
"""Argument of a layer with the tokens' keys, int64 [B, L]; without it, nothing is dropped."""
_WORD: Final = 0xFFFFFFFF
_ROUNDS: Final = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32))
"""Shifts and factors of the hash lowbias32 by Chris Wellons (public domain); the factors' low 32 bits count."""


def token_keys(shape: tuple[int, int], *, seed: int, step: int) -> npt.NDArray[np.int64]:
    """Return the keys of the tokens of a whole batch [rows, L] in a step."""
    rows, length = shape
    keys = _hash(torch.arange(rows) + zlib.crc32(f"{seed} {step}".encode()))
    return _hash(keys.unsqueeze(1) + torch.arange(length)).numpy()


def linear_key(name: str) -> int:
    """Return the key of a linear layer, by its name within the model's layer."""
    return zlib.crc32(name.encode())


def drop(inputs: Tensor, keys: Tensor, key: int, probability: float) -> Tensor:
    """Set elements of `inputs` [..., features] to 0 with `probability`, and scale the others up.

    `keys` are those of the tokens in this layer, one for each row of `inputs`; `key` is the linear's.
    """
    features = _hash(torch.arange(inputs.shape[-1], device=inputs.device) + key)
    words = _hash(keys.reshape(*inputs.shape[:-1], 1) + features)
    return torch.where(words >= round(probability * 2**32), inputs * (1 / (1 - probability)), 0)


class DropoutArguments(Sequence[KeywordArguments]):
    """Arguments of a model's layers, with the keys of the tokens in each layer."""

    def __init__(self, arguments: Sequence[KeywordArguments], keys: Tensor) -> None:
        """`keys` as `token_keys`, for the tokens of a microbatch."""
        self._arguments, self._keys = arguments, keys

    def __len__(self) -> int:
        return len(self._arguments)

    @overload
    def __getitem__(self, index: int) -> KeywordArguments: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[KeywordArguments]: ...

    def __getitem__(self, index: int | slice) -> KeywordArguments | Sequence[KeywordArguments]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        keys = _hash(self._keys + zlib.crc32(f"layer {index}".encode()))
        return KeywordArguments(dict(self._arguments[index]) | {DROPOUT_KEYS: keys})


class ForwardWithKeys:
    """Forward of a layer, which gives the keys of its tokens to the linear layers with dropout."""

    def __init__(self, layer: nn.Module, linears: Sequence[Any]) -> None:
        """`linears` have an attribute `dropout_keys`, which is None outside of this call."""
        self._forward, self._linears = layer.forward, linears

    def __call__(self, hidden: Tensor, *given: Any, dropout_keys: Tensor | None = None, **arguments: Any) -> Any:
        for linear in self._linears:
            linear.dropout_keys = dropout_keys
        try:
            return self._forward(hidden, *given, **arguments)
        finally:
            for linear in self._linears:
                linear.dropout_keys = None


def _hash(words: Tensor) -> Tensor:
    """Return the hashes of the low 32 bits of int64 words."""
    words = words & _WORD
    for shift, factor in _ROUNDS:
        words = ((words ^ (words >> shift)) * factor) & _WORD
    return words ^ (words >> 16)
