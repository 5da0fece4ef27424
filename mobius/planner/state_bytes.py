"""Bytes of a stage's training state on one replica.

weights                                  all of the stage, on every replica
fp32 sums of a step, or of its rounds    all of the stage
gradients, rest of the master, moments   1/R, for the elements that this replica updates
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mobius.config.config import Dtype, OptimizerStates
from mobius.limits import NUM_STATE_BUFFERS, REDUCE_CHUNK_ELEMENTS, largest_shard

MOMENTS_BYTES = 8
"""The two fp32 moments of AdamW, per parameter."""
REDUCED_BYTES: Final[Mapping[OptimizerStates, float]] = {
    OptimizerStates.BF16: 2 + 2 + 2,
    OptimizerStates.COMPACT: 1 + 1 + 1 + 2 / 32,
}
"""Optimizer state per parameter of a layer (engine/reduced_states.py)."""
SUM_BYTES = 4
"""Gradients of a step's microbatches are added up in fp32."""
CODES_BYTES, SCALE_BYTES = 2, 4
"""A weight's 8-bit codes by row and by column next to a resident stage's weights, and a row's or column's scale."""


@dataclass(frozen=True)
class ByteSizes:
    """Bytes per parameter of each part of a stage's training state."""

    weight: int = 2
    """The working copy: 2 for bf16 and fp16, 4 for fp32."""
    gradient: int = 2
    """Summed gradient: as the weight, or 4 if gradients are fp32."""
    remainder: int = 2
    """Rest of the fp32 master weight: 2 with bf16, which is its upper half, 4 with fp16."""
    has_partial_sums: bool = False
    """Whether fp32 sums of a resident stage are stored while unfinished."""
    num_replicas: int = 1
    """Pipelines that share gradients and optimizer state."""
    reduced: int = SUM_BYTES
    """A gradient on its way to another replica: 4, or 2 in bf16."""
    has_disks: bool = False
    """Whether optimizer states of streamed stages are on disks."""
    has_gradients_on_disks: bool = False
    """Whether their gradients wait there, too."""
    has_weights_on_disks: bool = False
    """Whether their weights are there, too."""
    num_state_buffers: int = NUM_STATE_BUFFERS
    """Stages of a rank whose states may be in host memory at once, if they are on disks."""
    keeps_steps: bool = False
    """Whether each step's states and weights are kept on disks until the next one's are: in two slots."""
    layer_state: float | None = None
    """Optimizer state per parameter of a layer; None: as `per_optimizer`, which other parameters have."""

    @classmethod
    def of(
        cls,
        dtype: Dtype,
        *,
        has_fp32_gradients: bool = False,
        states: OptimizerStates = OptimizerStates.FP32,
        **more: Any,
    ) -> ByteSizes:
        """Return the sizes of a run in `dtype`, with `more` fields."""
        weight = 4 if dtype is Dtype.FP32 else 2
        remainder = {Dtype.BF16: 2, Dtype.FP16: 4, Dtype.FP32: 0}[dtype]
        gradient = 4 if has_fp32_gradients else weight
        return cls(weight, gradient, remainder, layer_state=REDUCED_BYTES.get(states), **more)

    def shard_size(self, parameters: int) -> int:
        """Parameters of a stage that this replica updates."""
        return parameters if self.num_replicas == 1 else largest_shard(parameters, self.num_replicas)

    def remote_size(self, parameters: int) -> int:
        """Parameters that the others update: so many gradients go out and come in, and so many weights come in."""
        return parameters - self.shard_size(parameters)

    def reduce_bytes(self, parameters: int) -> int:
        """Bytes of a stage's gradients that leave a rank, and as many come."""
        return self.reduced * self.remote_size(parameters)

    @property
    def received_bytes(self) -> int:
        """Bytes of GPU memory for gradients on their way; bf16 ones are cast when they go and when they come."""
        parts = 0 if self.num_replicas == 1 else 1 if self.reduced == SUM_BYTES else 2
        return parts * SUM_BYTES * REDUCE_CHUNK_ELEMENTS

    @property
    def per_optimizer(self) -> int:
        """Bytes of the moments and the rest of the master weight; fp32 weights are their own master."""
        return MOMENTS_BYTES + self.remainder

    def optimizer(self, trained: int, layers: int) -> int:
        """Return the bytes of a stage's optimizer state, for `trained` parameters, of which `layers` are of layers."""
        share, own = self.shard_size(trained), self.shard_size(layers)
        saved = 0 if self.layer_state is None else int((self.per_optimizer - self.layer_state) * own)
        return self.per_optimizer * share - saved

    def on_disks(self, trained: int, layers: int, *, frozen: int = 0) -> int:
        """Return the bytes that an update reads from disks for a streamed stage, parameters as of `optimizer`."""
        gradients = self.has_gradients_on_disks * self.gradients(trained)
        weights = self.has_weights_on_disks * self.weight * (trained + frozen) if trained else 0
        return self.has_disks * (self.optimizer(trained, layers) + gradients + weights)

    def written(self, trained: int, layers: int, *, frozen: int = 0, is_streamed: bool = True) -> int:
        """Return the bytes that a step writes to disks for a stage, for parameters as of `optimizer`."""
        if not is_streamed:
            return self.keeps_steps * (self.weight * (trained + frozen) + self.optimizer(trained, layers))
        weights = self.weight * (trained + frozen) if trained else 0  # those of frozen stages are there already
        adds_weights = self.keeps_steps and not self.has_weights_on_disks
        return self.on_disks(trained, layers, frozen=frozen) + adds_weights * weights

    def stored(self, trained: int, layers: int, *, frozen: int = 0, is_streamed: bool = True) -> int:
        """Return the bytes of a stage on disks, for parameters as of `optimizer`."""
        states = self.optimizer(trained, layers) * (self.has_disks if is_streamed else self.keeps_steps)
        gradients = is_streamed * self.has_gradients_on_disks * self.gradients(trained)
        has_weights = self.keeps_steps or (is_streamed and self.has_weights_on_disks)
        weights = has_weights * self.weight * (trained + frozen)
        return (1 + self.keeps_steps) * (states + weights) + gradients

    def gradients(self, trained: int) -> int:
        """Return the host bytes of a streamed stage's finished gradients."""
        return self.gradient * self.shard_size(trained)

    def host(
        self, trained: int, layers: int, *, frozen: int = 0, has_gradients: bool = True, has_sums: bool = False
    ) -> int:
        """Return the host bytes of a streamed stage: weights, gradients or unfinished sums, and optimizer state.

        Sums, if any, take the place of gradients, which may be in memory that stages share (not `has_gradients`);
        parameters are those of `optimizer`, whose state may be on disks, as weights may.
        """
        waiting = SUM_BYTES * trained if has_sums else has_gradients * self.gradients(trained)
        state = 0 if self.has_disks else self.optimizer(trained, layers)
        return self.weight * (trained + frozen) * (not self.has_weights_on_disks) + waiting + state

    def accumulates_in_place(self, *, keeps_gradients: bool) -> bool:
        """Whether a resident stage has its own fp32 sum and does not use the one shared by the rank's stages."""
        return self.has_partial_sums or (keeps_gradients and self.gradient == SUM_BYTES)

    def resident_gradient_bytes(self, trained: int, *, keeps_gradients: bool) -> int:
        """Return the GPU bytes of a resident stage's own gradients and sums."""
        in_place = self.accumulates_in_place(keeps_gradients=keeps_gradients)
        has_copy = self.num_replicas > 1 or (keeps_gradients and not in_place)
        gradients = self.gradient * self.shard_size(trained)
        return SUM_BYTES * trained * in_place + gradients * has_copy
