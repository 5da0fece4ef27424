"""The training state of one stage as flat tensors, on the host (streamed) or on the GPU (resident)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mobius.memory.layout import StageLayout


@dataclass(frozen=True)
class StageState:
    """Flat tensors of `layout.num_elements` elements each; all on one device."""

    layout: StageLayout
    weights: Tensor
    """Working copy in the compute dtype."""
    gradients: Tensor
    """Streamed: the dtype of `weights`, as it came from the GPU. Resident: fp32."""
    master: Tensor
    """fp32; the same tensor as `weights` in an fp32 run."""
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def set_parameter(self, name: str, value: Tensor) -> None:
        """Set one parameter's master and working copy from `value` of any dtype and device."""
        offset, shape = self.layout.offsets[name]
        part = slice(offset, offset + value.numel())
        self.master[part].view(shape).copy_(value)
        if self.weights is not self.master:
            self.weights[part].copy_(self.master[part])
