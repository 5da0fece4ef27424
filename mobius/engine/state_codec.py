"""Formats of a trained weight's optimizer state, in memory and in checkpoints.

A codec names the tensors, called parts, that hold the fp32 master and AdamW's two moments next to flat weights. Each
part has one value for each trained weight, or for each group of them; a checkpoint stores it as PARAMETER.PART, in the
parameter's shape or, of groups, flat.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import ClassVar, Final

import torch
from torch import Tensor

from mobius.engine.split_master import join_master, split_master

CHUNK_ELEMENTS = 2**22
"""Elements split at a time: bounds the extra memory of writing a master to 32 MiB."""
HOST_CHUNK_ELEMENTS = 2**18
"""On a CPU: fits the cache and needs no new pages (430 million elements a second and core on a cloud VM, 2026-11-24;
150 with `CHUNK_ELEMENTS`)."""

GROUP = 32
"""Consecutive weights that share a value of some parts; a parameter is padded to a multiple of it."""

Parts = Mapping[str, Tensor]
"""Stored tensors by part, for the same weights."""
Allocate = Callable[[Tensor], Tensor]
"""Returns fp32 memory for as many elements as its argument has, on its device."""


def new_fp32(like: Tensor) -> Tensor:
    """Return new fp32 memory in the shape of `like`."""
    return torch.empty_like(like, dtype=torch.float32)


class StateCodec:
    """fp32 moments next to fp32 weights, which are their own master; base of the other formats."""

    name: ClassVar = "fp32"
    """The word of `--optimizer_states`."""
    parts: ClassVar[Mapping[str, torch.dtype]] = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    """Dtype by part, in the order of a checkpoint's files."""
    per_group: ClassVar[Collection[str]] = frozenset()
    """Parts with one value for each group of weights."""

    def length(self, part: str, num_weights: int) -> int:
        """Return the number of values of `part` for so many weights."""
        return -(-num_weights // GROUP) if part in self.per_group else num_weights

    def bytes_of(self, num_weights: int) -> int:
        """Return the bytes of all parts for so many weights."""
        return sum(self.length(part, num_weights) * dtype.itemsize for part, dtype in self.parts.items())

    def part_of(self, parts: Parts, weights: slice) -> dict[str, Tensor]:
        """Return views of `parts` for some of their weights, which are whole groups if some part has groups."""
        groups = slice(weights.start // GROUP, -(-weights.stop // GROUP))
        return {name: tensor[groups if name in self.per_group else weights] for name, tensor in parts.items()}

    @staticmethod
    def chunk_elements(device: torch.device) -> int:
        """Return how many weights are converted at a time."""
        return HOST_CHUNK_ELEMENTS if device.type == "cpu" else CHUNK_ELEMENTS

    def decode_moments(self, parts: Parts) -> tuple[Tensor, Tensor]:
        """Return both moments in fp32: the stored tensors themselves where they are fp32."""
        return parts["exp_avg"], parts["exp_avg_sq"]

    def encode_moments(self, moments: tuple[Tensor, Tensor], parts: Parts, noise: Tensor | None = None) -> None:
        """Store both moments, fp32; `noise`, a word for each, rounds stochastically where the format does."""
        for name, values in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            if parts[name] is not values:
                parts[name].copy_(values)

    def decode_master(self, weights: Tensor, parts: Parts, allocate: Allocate = new_fp32) -> Tensor:
        """Return the fp32 master: the stored tensor itself where there is one, else memory of `allocate`."""
        return weights

    def encode_master(self, master: Tensor, weights: Tensor, parts: Parts, noise: Tensor | None = None) -> None:
        """Store `master`, of any dtype and device, and round it to `weights`; `noise` as in `encode_moments`."""
        if master is not weights:
            weights.copy_(master)


class SplitMaster(StateCodec):
    """bf16 weights and the 16 bits that they lack of their master (`split_master.py`)."""

    parts: ClassVar = {**StateCodec.parts, "master_low": torch.int16}

    def decode_master(self, weights: Tensor, parts: Parts, allocate: Allocate = new_fp32) -> Tensor:
        """Join weights and remainder."""
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
    """fp16 weights, which are not the high half of fp32, and a master of their own."""

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
"""Codec of a run by the dtype of its weights."""
