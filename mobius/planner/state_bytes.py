"""Bytes of a stage's training state, of which each of several replicas keeps a share: what the engine takes for it.

weights                                  all of the stage, on every replica
fp32 sums of a step, or of its rounds    all of the stage
gradients, rest of the master, moments   an R-th, that of the elements that this replica updates
"""

from __future__ import annotations

from dataclasses import dataclass

from mobius.config.config import Dtype
from mobius.limits import largest_shard

MOMENTS_BYTES = 8
"""The two fp32 moments of AdamW, per parameter."""
SUM_BYTES = 4
"""Gradients of a step's microbatches are added up in fp32."""


@dataclass(frozen=True)
class ByteSizes:
    """Bytes per parameter of each part of a stage's training state, and of stages of so many parameters."""

    weight: int
    """The working copy: 2 for bf16 and fp16, 4 for fp32."""
    gradient: int
    """Once summed: as much as the weight, or 4 where gradients are kept in fp32."""
    remainder: int
    """Kept to have an fp32 master: 2 beside bf16, whose bits are half of it, 4 beside fp16."""
    has_accumulation_rounds: bool = False
    """Whether sums in fp32 wait for another round: on the host where gradients lie later, or in a resident stage."""
    num_replicas: int = 1
    """Pipelines that share gradients and optimizer state."""

    @classmethod
    def of(
        cls,
        dtype: Dtype,
        *,
        has_fp32_gradients: bool = False,
        has_accumulation_rounds: bool = False,
        num_replicas: int = 1,
    ) -> ByteSizes:
        """The sizes of a run in `dtype`, in which summed gradients are in the same format or in fp32."""
        weight = 4 if dtype is Dtype.FP32 else 2
        remainder = {Dtype.BF16: 2, Dtype.FP16: 4, Dtype.FP32: 0}[dtype]
        return cls(weight, 4 if has_fp32_gradients else weight, remainder, has_accumulation_rounds, num_replicas)

    @property
    def per_optimizer(self) -> int:
        """Bytes that make an fp32 master of the weights, and the moments; in an fp32 run the weights are the master."""
        return MOMENTS_BYTES + self.remainder

    def optimizer(self, trained: int) -> int:
        """Bytes of the optimizer state of a stage with so many trained parameters, wherever it is."""
        return self.per_optimizer * largest_shard(trained, self.num_replicas)

    def host(self, trained: int, *, frozen: int = 0) -> int:
        """Host bytes of a streamed stage: weights, gradients or sums, remainder and moments; frozen ones are weights.

        Gradients lie within the sums, where there are any.
        """
        gradients = self.gradient * largest_shard(trained, self.num_replicas)
        waiting = SUM_BYTES * trained if self.has_accumulation_rounds else gradients
        return self.weight * (trained + frozen) + waiting + self.optimizer(trained)

    def resident(self, trained: int, *, keeps_gradients: bool) -> int:
        """GPU bytes of a resident stage: weights, remainder and moments, and gradients or sums kept."""
        return (
            self.weight * trained
            + self.optimizer(trained)
            + self.resident_gradient_bytes(trained, keeps_gradients=keeps_gradients)
        )

    def accumulates_in_place(self, *, keeps_gradients: bool) -> bool:
        """Whether a resident stage has an fp32 sum of its own, and needs none that the stages of a rank share."""
        return self.has_accumulation_rounds or (keeps_gradients and self.gradient == SUM_BYTES)

    def resident_gradient_bytes(self, trained: int, *, keeps_gradients: bool) -> int:
        """GPU bytes of a resident stage's own gradients or sums; a share of the gradients is kept beside the sum."""
        in_place = self.accumulates_in_place(keeps_gradients=keeps_gradients)
        has_copy = self.num_replicas > 1 or (keeps_gradients and not in_place)
        gradients = self.gradient * largest_shard(trained, self.num_replicas)
        return SUM_BYTES * trained * in_place + gradients * has_copy
