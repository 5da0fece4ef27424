"""Formats of a trained weight's optimizer state, in memory and in checkpoints.

A codec names the tensors, called parts, that are stored next to flat weights: AdamW's two moments, and the bits of the
fp32 master that the weights lack. A part has one value for each trained weight or for each group of weights. A
checkpoint stores a part as PARAMETER.PART, in the parameter's shape, or flat if the values are for groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import ClassVar, Final

import torch
from torch import Tensor

from mobius.engine.split_master import join_master, split_master

CHUNK_ELEMENTS = 2**22
"""Number of elements that are split at a time; limits the extra memory of writing a master to 32 MiB."""
HOST_CHUNK_ELEMENTS = 2**18
"""`CHUNK_ELEMENTS` on a CPU: a chunk fits the cache and needs no new pages. One core of a cloud VM (2026-11-24)
processed 430 million elements per second, and 150 million with chunks of 2^22 elements."""

GROUP = 32
"""Number of consecutive weights that share a value in some parts; each parameter is padded to a multiple of it."""

Parts = Mapping[str, Tensor]
"""Stored tensors by part, all for the same weights."""
Allocate = Callable[[Tensor], Tensor]
"""Function that returns fp32 memory with as many elements as its argument, on the same device."""


def new_fp32(like: Tensor) -> Tensor:
    """Return new fp32 memory in the shape of `like`."""
    return torch.empty_like(like, dtype=torch.float32)


class StateCodec:
    """fp32 moments next to fp32 weights, which are their own master; base of the other formats."""

    name: ClassVar = "fp32"
    """Value of `--optimizer_states`."""
    parts: ClassVar[Mapping[str, torch.dtype]] = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    """Dtype by part, in the order of a checkpoint's files."""
    per_group: ClassVar[Collection[str]] = frozenset()
    """Parts with one value for each group of weights."""

    def length(self, part: str, num_weights: int) -> int:
        """Return the number of values of `part` for `num_weights` weights."""
        return -(-num_weights // GROUP) if part in self.per_group else num_weights

    def bytes_of(self, num_weights: int) -> int:
        """Return the bytes of all parts for `num_weights` weights."""
        return sum(self.length(part, num_weights) * dtype.itemsize for part, dtype in self.parts.items())

    def part_of(self, parts: Parts, weights: slice) -> dict[str, Tensor]:
        """Return views of `parts` for the range `weights`, which must be whole groups if a part has groups."""
        groups = slice(weights.start // GROUP, -(-weights.stop // GROUP))
        return {name: tensor[groups if name in self.per_group else weights] for name, tensor in parts.items()}

    @staticmethod
    def chunk_elements(device: torch.device) -> int:
        """Return the number of weights that are converted at a time."""
        return HOST_CHUNK_ELEMENTS if device.type == "cpu" else CHUNK_ELEMENTS

    def decode_moments(self, parts: Parts) -> tuple[Tensor, Tensor]:
        """Return both moments in fp32; if the stored tensors are fp32, returns these tensors."""
        return parts["exp_avg"], parts["exp_avg_sq"]

    def encode_moments(self, moments: tuple[Tensor, Tensor], parts: Parts, noise: Tensor | None = None) -> None:
        """Store both fp32 moments. `noise`, one word per element, is for formats that round stochastically."""
        for name, values in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            if parts[name] is not values:
                parts[name].copy_(values)

    def decode_master(self, weights: Tensor, parts: Parts, allocate: Allocate = new_fp32) -> Tensor:
        """Return the fp32 master: the stored tensor if there is one, else new memory from `allocate`."""
        return weights

    def encode_master(self, master: Tensor, weights: Tensor, parts: Parts, noise: Tensor | None = None) -> None:
        """Store `master`, of any dtype and device, and round it to `weights`; `noise` as in `encode_moments`."""
        if master is not weights:
            weights.copy_(master)


MASTER: Final = "master"
"""Beginning of the names of parts that complete the master."""


class SplitMaster(StateCodec):
    """bf16 weights, and 16-bit remainders that complete their masters (`split_master.py`)."""

    parts: ClassVar = {**StateCodec.parts, "master_low": torch.int16}

    def decode_master(self, weights: Tensor, parts: Parts, allocate: Allocate = new_fp32) -> Tensor:
        """Return the master, joined from weights and remainder."""
        return join_master(weights, parts["master_low"], out=allocate(weights))

    def encode_master(self, master: Tensor, weights: Tensor, parts: Parts, noise: Tensor | None = None) -> None:
        """Split `master`, which may move by one fp32 step; the remainder of a bf16 `master` is zero."""
        remainder = parts["master_low"]
        if master.dtype == weights.dtype:
            weights.copy_(master)
            remainder.zero_()
            return
        size = self.chunk_elements(weights.device)
        for chunk, rounded, rest in zip(*(each.split(size) for each in (master, weights, remainder)), strict=True):
            split_master(chunk.to(weights.device, torch.float32), weights=rounded, remainder=rest)


class SeparateMaster(StateCodec):
    """fp16 weights and a complete fp32 master, because an fp16 number is not the high half of an fp32 number."""

    parts: ClassVar = {**StateCodec.parts, "master": torch.float32}

    def decode_master(self, weights: Tensor, parts: Parts, allocate: Allocate = new_fp32) -> Tensor:
        """Return the stored master."""
        return parts["master"]

    def encode_master(self, master: Tensor, weights: Tensor, parts: Parts, noise: Tensor | None = None) -> None:
        """Store `master` and round it to `weights`."""
        if master is not parts["master"]:
            parts["master"].copy_(master)
        weights.copy_(parts["master"])


CODECS: Final[Mapping[torch.dtype, StateCodec]] = {
    torch.float32: StateCodec(),
    torch.bfloat16: SplitMaster(),
    torch.float16: SeparateMaster(),
}
"""Dtype of a run's weights -> codec."""
