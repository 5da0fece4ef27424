"""The training state of one stage as flat tensors, on the host (streamed) or on the GPU (resident)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mobius.memory.layout import StageLayout
from mobius.memory.split_master import join_master, split_master

CHUNK_ELEMENTS = 2**22
"""Elements split at a time: bounds what writing a master takes beside the values to 32 MiB."""


@dataclass(frozen=True)
class Remainder:
    """Rest that bf16 weights lack of their fp32 master (`split_master.py`); the two together are the master."""

    bits: Tensor
    """int16."""


@dataclass(frozen=True)
class StageState:
    """Flat tensors of one stage, all on one device: `layout.num_elements` weights, the others `layout.num_trained`."""

    layout: StageLayout
    weights: Tensor
    """Working copy in the compute dtype: the master rounded, and frozen parameters, which have no master."""
    gradients: Tensor
    """Streamed: as they came from the GPU, in the dtype of `weights` or fp32. Resident: in one of these or fp32."""
    master: Tensor | Remainder
    """fp32, or the remainder that makes it up with bf16 weights; in an fp32 run the same tensor as `weights`."""
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @classmethod
    def around(
        cls, layout: StageLayout, weights: Tensor, gradients: Tensor, zeros: Callable[[int, torch.dtype], Tensor]
    ) -> StageState:
        """State with `weights` and `gradients`; `zeros` (length, dtype) makes what else their format needs."""
        count = layout.num_trained
        master: Tensor | Remainder
        if weights.dtype == torch.float32:
            master = weights
        elif weights.dtype == torch.bfloat16:
            master = Remainder(zeros(count, torch.int16))
        else:  # fp16 is no high half of fp32
            master = zeros(count, torch.float32)
        return cls(layout, weights, gradients, master, zeros(count, torch.float32), zeros(count, torch.float32))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The distinct tensors that hold the state."""
        master = self.master.bits if isinstance(self.master, Remainder) else self.master
        own_master = () if master is self.weights else (master,)
        return (self.weights, self.gradients, *own_master, self.exp_avg, self.exp_avg_sq)

    def read_master(self, part: slice = slice(None)) -> Tensor:
        """The fp32 master of the trained elements in `part`: a view where it is stored whole, else new memory."""
        trained = slice(0, self.layout.num_trained)
        if not isinstance(self.master, Remainder):
            return self.master[trained][part]
        weights = self.weights[trained][part]
        return join_master(weights, self.master.bits[part], out=torch.empty_like(weights, dtype=torch.float32))

    def write_master(self, part: slice, values: Tensor) -> None:
        """Set the master of the trained elements in `part`, and their working copy, from flat `values`.

        These are of any dtype and device. A master that is stored split can move by one step of fp32
        (`split_master.py`).
        """
        trained = slice(0, self.layout.num_trained)
        weights, master = self.weights[trained][part], self.master
        if isinstance(master, Remainder):
            chunks = (tensor.split(CHUNK_ELEMENTS) for tensor in (values, weights, master.bits[part]))
            for chunk, rounded, remainder in zip(*chunks, strict=True):
                split_master(chunk.to(weights.device, torch.float32), weights=rounded, remainder=remainder)
            return
        master[trained][part].copy_(values)
        if master is not self.weights:
            weights.copy_(master[part])

    def set_parameter(self, name: str, value: Tensor) -> None:
        """Set one parameter's working copy, and its master if it is trained, from `value` of any dtype and device."""
        part = self.layout.slice_of(name)
        if self.layout.is_trained(name):
            self.write_master(part, value.reshape(-1))
        else:
            # In chunks: torch makes a copy in the value's dtype of all that comes from a GPU at once.
            chunks = (tensor.split(CHUNK_ELEMENTS) for tensor in (value.reshape(-1), self.weights[part]))
            for chunk, weights in zip(*chunks, strict=True):
                weights.copy_(chunk)
