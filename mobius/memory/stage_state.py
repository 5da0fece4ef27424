"""The training state of one stage as flat tensors, on the host (streamed) or on the GPU (resident)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mobius.memory.layout import StageLayout
from mobius.memory.split_master import join_master, split_master

CHUNK_ELEMENTS = 2**22
"""Elements split at a time: bounds what writing a master takes beside the values to 32 MiB."""


@dataclass(frozen=True)
class Remainder:
    """What bf16 weights lack of their fp32 master (`split_master.py`); the two together are the master."""

    bits: Tensor
    """int16."""


@dataclass(frozen=True)
class StageState:
    """Flat tensors of `layout.num_elements` elements each; all on one device."""

    layout: StageLayout
    weights: Tensor
    """Working copy in the compute dtype: the master rounded."""
    gradients: Tensor
    """Streamed: as they came from the GPU, in the dtype of `weights` or fp32. Resident: fp32."""
    master: Tensor | Remainder
    """fp32, or the remainder that makes it up with bf16 weights; in an fp32 run the same tensor as `weights`."""
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The distinct tensors that hold the state."""
        master = self.master.bits if isinstance(self.master, Remainder) else self.master
        own_master = () if master is self.weights else (master,)
        return (self.weights, self.gradients, *own_master, self.exp_avg, self.exp_avg_sq)

    def read_master(self, part: slice = slice(None)) -> Tensor:
        """The fp32 master of the elements in `part`: a view where it is stored whole, else new memory."""
        if not isinstance(self.master, Remainder):
            return self.master[part]
        weights = self.weights[part]
        return join_master(weights, self.master.bits[part], out=torch.empty_like(weights, dtype=torch.float32))

    def write_master(self, part: slice, values: Tensor) -> None:
        """Set the master of the elements in `part`, and their working copy, from flat `values` of any dtype and device.

        A master that is stored split can move by one step of fp32 (`split_master.py`).
        """
        weights, master = self.weights[part], self.master
        if isinstance(master, Remainder):
            remainder = master.bits[part]
            for chunk in _chunks(values.numel()):
                whole = values[chunk].to(weights.device, torch.float32)
                split_master(whole, weights=weights[chunk], remainder=remainder[chunk])
            return
        master[part].copy_(values)
        if master is not self.weights:
            weights.copy_(master[part])

    def set_parameter(self, name: str, value: Tensor) -> None:
        """Set one parameter's master and working copy from `value` of any dtype and device."""
        offset, _ = self.layout.offsets[name]
        self.write_master(slice(offset, offset + value.numel()), value.reshape(-1))


def _chunks(num_elements: int) -> Iterator[slice]:
    for start in range(0, num_elements, CHUNK_ELEMENTS):
        yield slice(start, min(start + CHUNK_ELEMENTS, num_elements))
