"""Decides when each stage is updated: the norm over all ranks, clipping, skipping, then AdamW stage by stage."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from mobius.errors import NonFiniteLossError
from mobius.memory.stage_memory import StageMemory
from mobius.memory.stage_state import StageState
from mobius.memory.update_queue import UpdateQueue
from mobius.optim.adamw import FlatAdamW
from mobius.optim.grad_scaler import LossScale
from mobius.optim.tied import TiedPair
from mobius.runtime.executor import StepSums
from mobius.runtime.transport import Transport
from mobius.runtime.waits import WaitCause, WaitClock

logger = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 10


@dataclass(frozen=True)
class StepOutcome:
    """What all ranks agree on after a step."""

    loss: float
    grad_norm: float
    is_skipped: bool


class Stepper:
    """Owns the count of updates and of skipped steps; every rank decides alike from the same summed numbers."""

    def __init__(
        self,
        adamw: FlatAdamW,
        *,
        memory: StageMemory,
        transport: Transport,
        clock: WaitClock,
        loss_scale: LossScale,
        num_stages: int,
        max_grad_norm: float,
        tied: TiedPair | None,
        updates: UpdateQueue | None = None,
    ) -> None:
        """With `updates`, stages on the host are updated there, in forward order, while the next step runs."""
        self._updates = updates
        self._adamw, self._memory, self._transport, self._clock, self._tied = adamw, memory, transport, clock, tied
        self._num_stages, self._max_grad_norm = num_stages, max_grad_norm
        self.loss_scale = loss_scale
        self.num_updates = 0
        self.num_skipped = 0
        self._skipped_in_a_row = 0

    def apply(self, sums: StepSums, *, step: int, learning_rate: float) -> StepOutcome:
        """Update all stages of this rank from their gradients; collective over all ranks.

        A non-finite loss or gradient skips the update on all ranks. Raises NonFiniteLossError after
        `MAX_SKIPPED_IN_A_ROW` skipped steps in a row.
        """
        tied_square = self._tied.sum_gradients(self._memory, self._transport) if self._tied else None
        # sync: once per step, and only where a tied matrix is on the GPU
        loss, squares = self._sum_over_ranks(sums, None if tied_square is None else float(tied_square))
        is_finite = math.isfinite(loss) and all(map(math.isfinite, squares))
        grad_norm = math.sqrt(sum(squares)) / self.loss_scale.value if is_finite else math.nan
        factor = 1.0 / self.loss_scale.value
        if self._max_grad_norm > 0:
            factor *= min(1.0, self._max_grad_norm / (grad_norm + 1e-6))  # torch.nn.utils.clip_grad_norm_'s formula
        self.loss_scale.update(is_finite=is_finite)
        if is_finite:
            self._skipped_in_a_row = 0
            with self._clock.blocking(WaitCause.OPTIMIZER):
                self._update(learning_rate, factor)
        else:
            self._skip(step, loss, squares)
        return StepOutcome(loss, grad_norm, is_skipped=not is_finite)

    def _sum_over_ranks(self, sums: StepSums, tied_square: float | None) -> tuple[float, list[float]]:
        """Loss and squared norm per stage, the same on all ranks."""
        on_device = torch.stack([sums.loss, *sums.squared_norms.values()])
        values = on_device.tolist()  # sync: once per step, after the last backward
        own = torch.zeros(1 + self._num_stages, dtype=torch.float64)
        own[0] = values[0]
        for stage, square in zip(sums.squared_norms, values[1:], strict=True):
            own[1 + stage] = square
        if tied_square is not None:
            own[1] += tied_square
        with self._clock.blocking(WaitCause.NEIGHBOURS):
            summed = self._transport.sum_over_ranks(own).tolist()
        return summed[0], summed[1:]

    def _update(self, learning_rate: float, factor: float) -> None:
        self.num_updates += 1
        for stage, state in sorted(self._memory.states.items()):
            update = partial(self._update_stage, stage, state, self.num_updates, learning_rate, factor)
            if self._updates is not None and state.master.device.type == "cpu":
                self._updates.submit(stage, update)
            else:
                update()

    def _update_stage(self, stage: int, state: StageState, step: int, learning_rate: float, factor: float) -> None:
        self._memory.wait_for_gradients(stage)
        self._adamw.update(state, step=step, learning_rate=learning_rate, gradient_factor=factor)

    def drain(self) -> None:
        """Wait for all updates: before the parameters are read, and at the end."""
        if self._updates is not None:
            with self._clock.blocking(WaitCause.OPTIMIZER):
                self._updates.drain()

    def _skip(self, step: int, loss: float, squares: Sequence[float]) -> None:
        for stage in self._memory.states:
            self._memory.wait_for_gradients(stage)
        self.num_skipped += 1
        self._skipped_in_a_row += 1
        stages = [stage for stage, square in enumerate(squares) if not math.isfinite(square)]
        where = f"gradients of stage(s) {', '.join(map(str, stages))}" if stages else "the loss only"
        if self._transport.rank == 0:
            logger.warning("step %d is skipped: not finite: %s (loss %s)", step, where, loss)
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteLossError(
                f"{self._skipped_in_a_row} steps in a row, the last of them step {step}, had non-finite values: "
                f"{where} (loss {loss}). Lower --learning_rate, use --bf16 or --fp32, or look at the data of these "
                "steps."
            )
