"""Resident stages: their whole training state stays on the compute device; no slots, no copies.

    bytes per parameter          bf16                    fp16               fp32
    weights, rest of the master  2 + 2 (split)           2 + 4              4 (both in one)
    moments                      8                       8                  8
    kept gradients               2, or 4 if wanted fp32  2, or 4            4
    sums, in a step of rounds    4                       4                  4

A stage that is updated right behind its backward keeps no gradients: they are read from the rank's one fp32 sum
(`gradient_sum.py`), rounded where they are to the format in which a streamed stage's leave, so that residency does not
change what is trained. Where an update has to wait for others (clipping, a tied matrix, loss scaling) the gradients
are cast into memory of the stage's own. In a step of several rounds every stage has a sum of its own, which stays from
round to round, and nothing else is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mobius.errors import ScheduleError
from mobius.memory.gradient_sum import GradientSum, cast_gradients, round_gradients, shared_by
from mobius.memory.layout import StageLayout
from mobius.memory.shares import Replicas, Shares
from mobius.memory.spans import NO_SPANS, Spans
from mobius.memory.stage_memory import GradientListener, Update
from mobius.memory.stage_state import StageState, num_owned
from mobius.schedule.lanes import Lane


class ResidentStage:
    """A StageMemory that owns its state on the device, where updates follow compute in the same stream."""

    def __init__(
        self,
        stage: int,
        layout: StageLayout,
        *,
        dtype: torch.dtype,
        device: torch.device,
        gradient_dtype: torch.dtype | None = None,
        keeps_gradients: bool = True,
        in_rounds: bool = False,
        total: GradientSum | None = None,
        shares: Shares | None = None,
        replicas: Replicas | None = None,
        spans: Spans = NO_SPANS,
    ) -> None:
        """Take zeroed memory on `device`, weights in `dtype`.

        `gradient_dtype` is fp32 or, by default, the weights' dtype. Without `keeps_gradients` the update must begin
        before another stage's backward. A step `in_rounds` comes back to a stage after others. `total` is the rank's
        sum, not needed where `adds_in_place`. With `shares` it owns a part of the state, keeps that part's gradients in
        any case, and gives the updated weights to the other `replicas`.
        """
        assert dtype != torch.float16 or keeps_gradients, "loss scaling waits for every norm"
        self._stage, self._spans = stage, spans
        self._gradient_dtype, self._keeps_gradients = gradient_dtype or dtype, keeps_gradients
        self._is_in_place = adds_in_place(self._gradient_dtype, keeps_gradients=keeps_gradients, in_rounds=in_rounds)
        self._sum = GradientSum(layout.num_trained, device=device) if self._is_in_place else total

        def zeros(num_elements: int, kind: torch.dtype) -> Tensor:
            return torch.zeros(num_elements, dtype=kind, device=device)

        weights = zeros(layout.num_elements, dtype)
        self._shared = shared_by(shares, replicas)
        self._has_copy = (keeps_gradients and not self._is_in_place) or self._shared is not None
        count = num_owned(layout, shares)
        gradients = zeros(count, self._gradient_dtype) if self._has_copy else self._total.flat(layout)
        self.state = StageState.around(layout, weights, gradients, zeros, shares)
        self._weights = layout.views(weights)
        self._square: Tensor | None = None

    @property
    def frozen_state(self) -> StageState:
        return self.state

    def load(self) -> None:
        raise ScheduleError(f"stage {self._stage} is resident and cannot be loaded")

    def is_ready(self) -> bool:
        return True

    def wait_until_updated(self) -> None:
        """Nothing to wait for: updates and compute follow one another on the device."""

    def when_updated(self, action: Callable[[], None]) -> None:
        action()

    def weights(self) -> dict[str, Tensor]:
        return self._weights

    def gradients(self) -> dict[str, Tensor]:
        return self._total.views(self._stage, self.state.layout)

    def seal_gradients(self, *, excluded: frozenset[str], listener: GradientListener | None = None) -> Tensor:
        """End accumulation; what is not kept stays in the rank's sum until another stage's backward begins."""
        layout = self.state.layout
        self._square = self._total.seal(self._stage, layout, excluded=excluded, shares=self._shared)
        sums = self._total.flat(layout)
        if self._has_copy:
            self._square = cast_gradients(sums, self.state.gradients, self._square, self.state.shares)
            if self._shared is not None:
                self._square = self._shared[1].total(self._square)
        else:
            if self._gradient_dtype != torch.float32:
                self._square = round_gradients(sums, self._gradient_dtype, self._square)
            self.state = replace(self.state, gradients=sums)  # the sum may have two buffers, in turns
        if listener is not None:
            listener(self._stage)
        return self._square

    def offload(self, listener: GradientListener | None = None) -> None:
        raise ScheduleError(f"stage {self._stage} is resident and cannot be offloaded")

    def offload_sums(self) -> None:
        raise ScheduleError(f"stage {self._stage} is resident, and its sums stay")

    def load_sums(self) -> None:
        raise ScheduleError(f"stage {self._stage} is resident, and its sums stay")

    def wait_for_gradients(self) -> None:
        """Nothing to wait for: the optimizer runs on the same device, behind backward."""

    def begin_update(self, update: Update) -> bool:
        """Run it behind the work enqueued so far; whether the gradients are finite is looked at on the device."""
        assert self._square is not None, f"stage {self._stage} is not sealed"
        self._run(update, (~torch.isfinite(self._square)).float())
        return True

    def update(self, update: Update) -> None:
        assert self._keeps_gradients, f"the gradients of stage {self._stage} are lost before its update"
        self._run(update, None)

    def _run(self, update: Update, found_inf: Tensor | None) -> None:
        with self._spans.device_span(Lane.OPTIMIZER, f"U{self._stage}"):
            update(pieces=self.state.layout.ranges, found_inf=found_inf)
            if self._shared is not None:
                shares, replicas = self._shared
                replicas.spread(self.state.weights, shares.segments)

    @property
    def _total(self) -> GradientSum:
        assert self._sum is not None, f"stage {self._stage} adds up in the rank's sum, and there is none"
        return self._sum


def adds_in_place(gradient_dtype: torch.dtype, *, keeps_gradients: bool, in_rounds: bool = False) -> bool:
    """Whether a resident stage keeps its gradients in fp32, the format in which they are added up: it needs no sum."""
    return in_rounds or (keeps_gradients and gradient_dtype == torch.float32)
