"""Formats of a trained weight's optimizer state, in memory and in checkpoints.

A codec names the tensors, called parts, that hold the fp32 master and AdamW's two moments next to flat weights. Each
part has one value for each trained weight; a checkpoint stores it as PARAMETER.PART in the parameter's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Final

import torch
from torch import Tensor

from mobius.engine.split_master import join_master, split_master

CHUNK_ELEMENTS = 2**22
"""Elements split at a time: bounds the extra memory of writing a master to 32 MiB."""
HOST_CHUNK_ELEMENTS = 2**18
"""On a CPU: fits the cache and needs no new pages (430 million elements a second and core on a cloud VM, 2026-11-24;
150 with `CHUNK_ELEMENTS`)."""

Parts = Mapping[str, Tensor]
"""Stored tensors by part, all of one length."""
Allocate = Callable[[Tensor], Tensor]
"""Returns fp32 memory for as many elements as its argument has, on its device."""


def new_fp32(like: Tensor) -> Tensor:
    """Return new fp32 memory in the shape of `like`."""
    return torch.empty_like(like, dtype=torch.float32)


class StateCodec:
    """fp32 moments next to fp32 weights, which are their own master; base of the other formats."""

    parts: ClassVar[Mapping[str, torch.dtype]] = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    """Dtype by part, in the order of a checkpoint's files."""

    def decode_moments(self, parts: Parts) -> tuple[Tensor, Tensor]:
        """Return both moments in fp32: the stored tensors themselves where they are fp32."""
        return parts["exp_avg"], parts["exp_avg_sq"]

    def encode_moments(self, moments: tuple[Tensor, Tensor], parts: Parts) -> None:
        """Store what `decode_moments` returned and an update has changed."""

    def decode_master(self, weights: Tensor, parts: Parts, allocate: Allocate = new_fp32) -> Tensor:
        """Return the fp32 master: the stored tensor itself where there is one, else memory of `allocate`."""
        return weights

    def encode_master(self, master: Tensor, weights: Tensor, parts: Parts) -> None:
        """Store `master`, of any dtype and device, and round it to `weights`."""
        if master is not weights:
            weights.copy_(master)


class SplitMaster(StateCodec):
    """bf16 weights and the 16 bits that they lack of their master (`split_master.py`)."""

    parts: ClassVar = {**StateCodec.parts, "master_low": torch.int16}

    def decode_master(self, weights: Tensor, parts: Parts, allocate: Allocate = new_fp32) -> Tensor:
        """Join weights and remainder."""
        return join_master(weights, parts["master_low"], out=allocate(weights))

    def encode_master(self, master: Tensor, weights: Tensor, parts: Parts) -> None:
        """Split `master`, which may move by one fp32 step; the remainder of a bf16 `master` is zero."""
        remainder = parts["master_low"]
        if master.dtype == weights.dtype:
            weights.copy_(master)
            remainder.zero_()
            return
        size = HOST_CHUNK_ELEMENTS if weights.device.type == "cpu" else CHUNK_ELEMENTS
        for chunk, rounded, rest in zip(*(each.split(size) for each in (master, weights, remainder)), strict=True):
            split_master(chunk.to(weights.device, torch.float32), weights=rounded, remainder=rest)


class SeparateMaster(StateCodec):
    """fp16 weights, which are not the high half of fp32, and a master of their own."""

    parts: ClassVar = {**StateCodec.parts, "master": torch.float32}

    def decode_master(self, weights: Tensor, parts: Parts, allocate: Allocate = new_fp32) -> Tensor:
        """Return the stored master."""
        return parts["master"]

    def encode_master(self, master: Tensor, weights: Tensor, parts: Parts) -> None:
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
