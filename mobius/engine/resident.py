"""Resident stages: their whole training state stays on the compute device; no slots, no copies.

    bytes per parameter          bf16                    fp16               fp32
    weights, rest of the master  2 + 2 (split)           2 + 4              4 (both in one)
    moments                      8                       8                  8
    stored gradients             2, or 4 if wanted fp32  2, or 4            4
    sums, accumulation rounds    4                       4                  4

A stage that is updated right after its backward stores no gradients. The update reads them from the rank's fp32 sum
(`gradient_accumulator.py`), rounded in place to the dtype in which a streamed stage's gradients leave the GPU, so that
residency does not change the result. If an update must wait for other stages (clipping, tied weights, loss scaling),
gradients are cast into memory owned by the stage. With several accumulation rounds, every stage has its own sum, which
persists between rounds, and stores nothing else.

If replicas share the stage, each stores the gradients and state of its shard. The stream of `engine/reductions.py`
reduces sums, updates the stage and gathers its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mobius.engine.gradient_accumulator import GradientAccumulator, cast_gradients, round_gradients
from mobius.engine.reductions import StageSharding
from mobius.engine.stage_memory import GradientsReadyCallback, Update
from mobius.engine.stage_state import StageState, num_owned
from mobius.errors import ScheduleError
from mobius.hardware.spans import NO_SPANS, Spans
from mobius.hardware.streams import Event
from mobius.models.layout import StageLayout
from mobius.schedule.lanes import Lane


class ResidentStage:
    """StageMemory with its state on the device; updates follow compute in the same stream."""

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
        """Allocate zeroed memory on `device`, with weights in `dtype`.

        `gradient_dtype` is fp32 or, by default, the weights' dtype. Without `keeps_gradients`, the update must start
        before another stage's backward. With `has_accumulation_rounds`, a step returns to this stage after other
        stages. `accumulator` is the rank's sum, not needed if `accumulates_in_place`. With `sharding`, the stage owns
        one shard of the state, always stores that shard's gradients, and sends updated weights to the other replicas;
        `accumulator` then needs two buffers.
        """
        assert dtype != torch.float16 or keeps_gradients, "with loss scaling, updates wait for the norms of all stages"
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
        """Recorded after an update shared by replicas; None once compute waits for it."""

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
        """Make compute wait for an update shared by replicas; other updates already precede it on the same stream."""
        if self._updated is not None:
            self._updated.wait()
            self._updated = None

    def gather_updated_weights(self) -> None:
        """Make compute wait for an update shared by replicas, which includes the gather of all weights."""
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
        """Finish accumulation; without a copy, gradients stay in the rank's sum until another stage's backward."""
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
                self.state = replace(self.state, gradients=sums)  # the accumulator may alternate between two buffers
        if on_gradients_ready is not None:
            on_gradients_ready(self._stage)
        return self._square

    def _reduce(self, sharding: StageSharding, excluded: frozenset[str]) -> Tensor:
        """Start the reduction over replicas; this replica's shard is in the state at `reduction`."""
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
        raise ScheduleError(f"stage {self._stage} is resident, so its gradient sums stay on the device")

    def load_gradient_sums(self) -> None:
        raise ScheduleError(f"stage {self._stage} is resident, so its gradient sums stay on the device")

    def wait_for_gradients(self) -> None:
        """Make compute wait for a reduction over replicas; without replicas, stream order already suffices."""
        if self._reduction is not None:
            self._reduction.wait()

    def begin_update(self, update: Update) -> bool:
        """Enqueue the update after the work so far; the device checks whether the gradients are finite."""
        assert self._square is not None, f"stage {self._stage} has unfinished gradients"
        self._run(update, self._square)
        return True

    def update(self, update: Update) -> None:
        assert self._keeps_gradients, f"stage {self._stage} stores no gradients for a later update"
        self._run(update, None)

    def _run(self, update: Update, square: Tensor | None) -> None:
        """Update, unless `square` is given and not finite."""
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
            f"stage {self._stage} needs the accumulator of the rank, which is missing"
        )
        return self._optional_accumulator


def accumulates_in_place(
    gradient_dtype: torch.dtype, *, keeps_gradients: bool, has_accumulation_rounds: bool = False
) -> bool:
    """Whether a resident stage stores its gradients in the fp32 of accumulation, and so needs no shared sum."""
    return has_accumulation_rounds or (keeps_gradients and gradient_dtype == torch.float32)
