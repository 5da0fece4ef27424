"""One stage's memory as executor and stepper see it: weights, gradient sums and optimizer state.

    kind       weights (`stage_weights.py`)     sums (`gradient_sums.py`)         states (`optimizer_states.py`)
    streamed   in a slot while they compute     on the device, between rounds     on the host
                                                on the host
    resident   on the device                    on the device                     on the device
    adapters   frozen weights in a slot,        on the device                     on the device
               trained weights on the device

    weights.load -> weights.views -> forward -> offload
    weights.load -> weights.views, sums.views -> backward -> finish_gradients -> offload -> states.update

Resident stages are neither loaded nor offloaded. Streamed stages do this before the last accumulation round:

    weights.load -> weights.views, sums.load, sums.views -> backward -> sums.offload
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mobius.engine.gradient_sums import GradientSums
from mobius.engine.optimizer_states import DiskStates, OptimizerStates
from mobius.engine.stage_state import StageState
from mobius.engine.stage_weights import StageWeights
from mobius.schedule.memory_layout import StageRegions

PART_BYTES = 2**24
"""Bytes of a tensor in memory that are copied or written at a time."""
GradientsReadyCallback = Callable[[int], None]
"""Called with a stage during the step, once its gradients are finished and their copy, if any, has started."""


@dataclass
class StageMemory:
    """Memory of one stage: weights and sums on the compute device, and the state that the optimizer updates.

    Each kind of stage has other classes for these three parts.
    """

    regions: StageRegions
    """Places of the stage's parts, and whether the stage's update waits."""
    weights: StageWeights
    sums: GradientSums
    states: OptimizerStates

    @property
    def stage(self) -> int:
        return self.regions.stage

    @property
    def state(self) -> StageState:
        """Training state, on the host or the device; `finish_gradients` may replace its gradient buffer."""
        return self.states.state

    def parts(self, view: Tensor) -> Iterator[Tensor]:
        """Yield the elements of a view of `state`, in memory or on disks, flat and in order, some MiB at a time.

        Elements on disks are read part by part; a part is valid until the next part is requested. Raises
        StateFileError.
        """
        if self.states.is_in_memory(view):
            return parts_of(view)
        assert isinstance(self.states, DiskStates), "other states are in memory"
        return self.states.parts(view)

    def in_memory(self, view: Tensor) -> Tensor:
        """Return `view`, a view of `state`, or a copy of it if it is on disks. Raises StateFileError."""
        if self.states.is_in_memory(view):
            return view
        copy = torch.empty(view.shape, dtype=view.dtype)
        copy_parts(self.parts(view), copy.view(-1))
        return copy

    def finish_gradients(self, on_gradients_ready: GradientsReadyCallback | None = None) -> Tensor:
        """Finish accumulation and return the squared norms as `GradientSums.finish` does.

        Calls `on_gradients_ready` if the gradients stay on the device.
        """
        squares = self.states.finish_gradients(self.sums)
        if on_gradients_ready is not None and not self.states.is_on_host:
            on_gradients_ready(self.stage)
        return squares

    def offload(self, on_gradients_ready: GradientsReadyCallback | None = None) -> None:
        """Free the stage's slot on the device; returns at once.

        If finished gradients go to the host, starts copying them, and then calls `on_gradients_ready`.
        """
        done = self.weights.release()
        if self.states.collect_gradients(self.sums, done) and on_gradients_ready is not None:
            on_gradients_ready(self.stage)


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements of a tensor, flat and in order, some MiB at a time."""
    return iter(tensor.reshape(-1).split(PART_BYTES // tensor.element_size()))


def copy_parts(parts: Iterable[Tensor], target: Tensor) -> None:
    """Copy parts, one after the other, to a flat tensor with as many elements."""
    position = 0
    for part in parts:
        target[position : position + len(part)] = part
        position += len(part)
