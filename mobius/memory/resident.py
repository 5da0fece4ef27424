"""Resident stages: their whole training state stays on the compute device; no slots, no copies.

    bytes per parameter          bf16                    fp16               fp32
    weights, rest of the master  2 + 2 (split)           2 + 4              4 (both in one)
    moments                      8                       8                  8
    kept gradients               2, or 4 if wanted fp32  2, or 4            4
    sums, in a step of rounds    4                       4                  4

A stage that is updated right behind its backward keeps no gradients: they are read from the rank's one fp32 sum
(`gradient_accumulator.py`), rounded where they are to the format in which a streamed stage's leave, so that residency
does not change what is trained. Where an update has to wait for others (clipping, a tied matrix, loss scaling) the
gradients are cast into memory of the stage's own. In a step of several rounds every stage has a sum of its own, which
stays from round to round, and nothing else is kept.

Where replicas share the stage, each keeps the gradients and has the state of its share. Sums are reduced, and the stage
is updated and its weights are given to all, on the stream of reductions (`sharding/reductions.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mobius.errors import ScheduleError
from mobius.memory.gradient_accumulator import GradientAccumulator, cast_gradients, round_gradients
from mobius.memory.layout import StageLayout
from mobius.memory.sharding.reductions import StageSharding
from mobius.memory.spans import NO_SPANS, Spans
from mobius.memory.stage_memory import GradientsReadyCallback, Update
from mobius.memory.stage_state import StageState, num_owned
from mobius.memory.streams import Event
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
        has_accumulation_rounds: bool = False,
        accumulator: GradientAccumulator | None = None,
        sharding: StageSharding | None = None,
        spans: Spans = NO_SPANS,
    ) -> None:
        """Take zeroed memory on `device`, weights in `dtype`.

        `gradient_dtype` is fp32 or, by default, the weights' dtype. Without `keeps_gradients` the update must begin
        before another stage's backward. A step `has_accumulation_rounds` comes back to a stage after others.
        `accumulator` is the rank's sum, not needed where `accumulates_in_place`. Where it is `sharding`, it owns a part
        of the state, keeps that part's gradients in any case, and gives the updated weights to the other replicas; then
        `accumulator` has two buffers.
        """
        assert dtype != torch.float16 or keeps_gradients, "loss scaling waits for every norm"
        self._stage, self._spans = stage, spans
        self._gradient_dtype, self._keeps_gradients = gradient_dtype or dtype, keeps_gradients
        self._is_in_place = accumulates_in_place(
            self._gradient_dtype, keeps_gradients=keeps_gradients, has_accumulation_rounds=has_accumulation_rounds
        )
        self._optional_accumulator = (
            GradientAccumulator(layout.num_trained, device=device) if self._is_in_place else accumulator
        )

        def zeros(num_elements: int, kind: torch.dtype) -> Tensor:
            return torch.zeros(num_elements, dtype=kind, device=device)

        weights = zeros(layout.num_elements, dtype)
        self._sharding, shards = sharding, None if sharding is None else sharding.shards
        self._has_copy = (keeps_gradients and not self._is_in_place) or sharding is not None
        count = num_owned(layout, shards)
        gradients = zeros(count, self._gradient_dtype) if self._has_copy else self._accumulator.finished_sum(layout)
        self.state = StageState.with_buffers(layout, weights, gradients, zeros, shards)
        self._weights = layout.views(weights)
        self._square: Tensor | None = None
        self._reduction: Event | None = None
        self._updated: Event | None = None
        """Point behind the update that other replicas take part in, until compute waits for it."""

    @property
    def frozen_state(self) -> StageState:
        return self.state

    @property
    def reduction(self) -> Event | None:
        return self._reduction

    def load(self) -> None:
        raise ScheduleError(f"stage {self._stage} is resident and cannot be loaded")

    def is_ready(self) -> bool:
        return self._updated is None

    def wait_until_updated(self) -> None:
        """Make compute wait for an update that replicas share; others follow compute on the device."""
        if self._updated is not None:
            self._updated.wait()
            self._updated = None

    def gather_updated_weights(self) -> None:
        """Make compute wait for an update that replicas share, which has brought all weights."""
        self.wait_until_updated()

    def run_after_update(self, action: Callable[[], None]) -> None:
        self.wait_until_updated()
        action()

    def weights(self) -> dict[str, Tensor]:
        self.wait_until_updated()
        return self._weights

    def gradients(self) -> dict[str, Tensor]:
        return self._accumulator.views(self._stage, self.state.layout)

    def finish_gradients(
        self, *, excluded: frozenset[str], on_gradients_ready: GradientsReadyCallback | None = None
    ) -> Tensor:
        """End accumulation; what is not kept stays in the rank's sum until another stage's backward begins."""
        layout = self.state.layout
        if self._sharding is not None:
            self._square = self._reduce(self._sharding, excluded)
        else:
            self._square = self._accumulator.finish_with_norm(self._stage, layout, excluded=excluded)
            sums = self._accumulator.finished_sum(layout)
            if self._has_copy:
                self._square = cast_gradients(sums, self.state.gradients, self._square)
            else:
                if self._gradient_dtype != torch.float32:
                    self._square = round_gradients(sums, self._gradient_dtype, self._square)
                self.state = replace(self.state, gradients=sums)  # the sum may have two buffers, in turns
        if on_gradients_ready is not None:
            on_gradients_ready(self._stage)
        return self._square

    def _reduce(self, sharding: StageSharding, excluded: frozenset[str]) -> Tensor:
        """Begin to sum over the replicas; the own part is in the state behind `reduction`."""
        layout = self.state.layout
        self._accumulator.finish(self._stage, layout)
        sums, target = self._accumulator.finished_sum(layout), self.state.gradients
        square = sharding.reduce_scatter(self._stage, layout, sums, target, excluded=excluded)
        self._reduction = sharding.reductions.record()
        self._accumulator.keep_until(self._reduction)
        return square

    def offload(self, on_gradients_ready: GradientsReadyCallback | None = None) -> None:
        raise ScheduleError(f"stage {self._stage} is resident and cannot be offloaded")

    def offload_gradient_sums(self) -> None:
        raise ScheduleError(f"stage {self._stage} is resident, and its sums stay")

    def load_gradient_sums(self) -> None:
        raise ScheduleError(f"stage {self._stage} is resident, and its sums stay")

    def wait_for_gradients(self) -> None:
        """Make compute wait for a reduction; others precede it: the optimizer runs on the device, behind backward."""
        if self._reduction is not None:
            self._reduction.wait()

    def begin_update(self, update: Update) -> bool:
        """Run it behind the work enqueued so far; whether the gradients are finite is looked at on the device."""
        assert self._square is not None, f"stage {self._stage} is not sealed"
        self._run(update, self._square)
        return True

    def update(self, update: Update) -> None:
        assert self._keeps_gradients, f"the gradients of stage {self._stage} are lost before its update"
        self._run(update, None)

    def _run(self, update: Update, square: Tensor | None) -> None:
        """Update unless `square`, if it is looked at, is not finite."""
        if self._sharding is None:
            self._update(update, square)
            return
        reductions = self._sharding.reductions
        with reductions.after():
            self._update(update, square)
            reductions.replicas.all_gather(self.state.weights, self._sharding.shards.segments)
        self._updated = reductions.record()

    def _update(self, update: Update, square: Tensor | None) -> None:
        found_inf = None if square is None else (~torch.isfinite(square)).float()
        with self._spans.device_span(Lane.OPTIMIZER, f"U{self._stage}"):
            update(pieces=self.state.layout.ranges, found_inf=found_inf)

    @property
    def _accumulator(self) -> GradientAccumulator:
        assert self._optional_accumulator is not None, (
            f"stage {self._stage} adds up in the rank's sum, and there is none"
        )
        return self._optional_accumulator


def accumulates_in_place(
    gradient_dtype: torch.dtype, *, keeps_gradients: bool, has_accumulation_rounds: bool = False
) -> bool:
    """Whether a resident stage keeps its gradients in fp32, the format in which they are added up: it needs no sum."""
    return has_accumulation_rounds or (keeps_gradients and gradient_dtype == torch.float32)
