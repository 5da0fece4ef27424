"""Stages whose whole state stays on the compute device: no slots, no copies.

    bytes per parameter          bf16                    fp16               fp32
    weights, rest of the master  2 + 2 (split)           2 + 4              4 (both in one)
    moments                      8                       8                  8
    kept gradients               2, or 4 if wanted fp32  2, or 4            4

A stage that is updated right behind its backward keeps no gradients: they are read from the rank's one fp32 sum
(`gradient_sum.py`), rounded where they are to the format in which a streamed stage's leave, so that residency does not
change what is trained. Where an update has to wait for others (clipping, a tied matrix, loss scaling) the gradients are
cast into memory of the stage's own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from mobius.errors import ScheduleError
from mobius.memory.gradient_sum import GradientSum
from mobius.memory.layout import StageLayout
from mobius.memory.norms import cast_gradients, squared_norm
from mobius.memory.stage_memory import Departure
from mobius.memory.stage_state import StageState

ROUNDED_ELEMENTS = 2**24
"""Gradients rounded at a time: bounds what it takes beside them to 32 MiB."""


class ResidentStages:
    """Owns weights, master and moments of this rank's resident stages on one device, and gradients that are kept."""

    def __init__(
        self,
        layouts: Mapping[int, StageLayout],
        *,
        dtype: torch.dtype,
        device: torch.device,
        waiting: Collection[int] | None = None,
        gradient_dtype: torch.dtype | None = None,
        gradient_sum: GradientSum | None = None,
    ) -> None:
        """Take zeroed memory on `device` for `layouts` (stage -> layout), weights in `dtype`.

        `waiting` are the stages whose gradients are kept for a later update, by default all. `gradient_dtype` is fp32
        or, by default, the weights' dtype. `gradient_sum` is shared with the rank's streamed stages; without it there
        is one of its own, if any is needed.
        """
        self._device = device
        self._waiting = frozenset(layouts if waiting is None else waiting)
        assert dtype != torch.float16 or self._waiting.issuperset(layouts), "loss scaling waits for every norm"
        self._gradient_dtype = gradient_dtype or dtype
        if gradient_sum is None and not self._adds_in_place(layouts):
            gradient_sum = GradientSum(max(layout.num_trained for layout in layouts.values()), device=device)
        self._sum = gradient_sum
        self._states = {stage: self._allocate(stage, layout, dtype) for stage, layout in layouts.items()}
        self._weights = {stage: state.layout.views(state.weights) for stage, state in self._states.items()}
        self._own_gradients = {
            stage: state.layout.trained_views(state.gradients)
            for stage, state in self._states.items()
            if self._adds_in_place((stage,))
        }
        self._accumulating: set[int] = set()

    @property
    def states(self) -> Mapping[int, StageState]:
        """Live: sealing a stage that does not wait may put another buffer in the place of its gradients."""
        return self._states

    def is_resident(self, stage: int) -> bool:
        return True

    def keeps_gradients(self, stage: int) -> bool:
        """Only those of stages that wait for their update."""
        return stage in self._waiting

    def load(self, stage: int) -> None:
        raise ScheduleError(f"stage {stage} is resident and cannot be loaded")

    def offload(self, stage: int) -> Departure | None:
        raise ScheduleError(f"stage {stage} is resident and cannot be offloaded")

    def wait_until_updated(self, stage: int) -> None:
        """Nothing to wait for: updates and compute follow one another on the device."""

    def is_ready(self, stage: int) -> bool:
        return True

    def weights(self, stage: int) -> dict[str, Tensor]:
        return self._weights[stage]

    def gradients(self, stage: int) -> dict[str, Tensor]:
        """fp32 views; cleared at the first call after the last sealing."""
        if stage not in self._own_gradients:
            assert self._sum is not None
            return self._sum.views(stage, self._states[stage].layout)
        if stage not in self._accumulating:
            self._accumulating.add(stage)
            self._states[stage].gradients.zero_()
        return self._own_gradients[stage]

    def seal_gradients(self, stage: int, *, excluded: frozenset[str]) -> Tensor:
        """End accumulation: the gradients take the form in which the update reads them, on the device.

        What is not kept stays in the rank's sum until another stage's backward begins.
        """
        views = self.gradients(stage)
        square = squared_norm((view for name, view in views.items() if name not in excluded), self._device)
        if stage in self._own_gradients:
            self._accumulating.discard(stage)
            return square
        assert self._sum is not None
        state, total = self._states[stage], self._sum.flat(self._states[stage].layout)
        if stage in self._waiting:
            square = cast_gradients(total, state.gradients, square)
        else:
            if self._gradient_dtype != torch.float32:
                for part in total.split(ROUNDED_ELEMENTS):
                    part.copy_(part.to(self._gradient_dtype))
            self._states[stage] = replace(state, gradients=total)  # the sum may have two buffers, in turns
        self._sum.end()
        return square

    def wait_for_gradients(self, stage: int) -> None:
        """Nothing to wait for: the optimizer runs on the same device, behind backward."""

    def have_gradients_arrived(self, stage: int) -> bool:
        """They never leave."""
        return True

    def _adds_in_place(self, stages: Collection[int]) -> bool:
        """Whether all of `stages` keep their gradients in fp32, the format in which they are added up."""
        return self._gradient_dtype == torch.float32 and self._waiting.issuperset(stages)

    def _allocate(self, stage: int, layout: StageLayout, dtype: torch.dtype) -> StageState:
        def zeros(num_elements: int, kind: torch.dtype) -> Tensor:
            return torch.zeros(num_elements, dtype=kind, device=self._device)

        weights = zeros(layout.num_elements, dtype)
        if stage in self._waiting:
            gradients = zeros(layout.num_trained, self._gradient_dtype)
        else:
            assert self._sum is not None
            gradients = self._sum.flat(layout)
        return StageState.around(layout, weights, gradients, zeros)
