"""Decides when each stage is updated, by which factor gradients are multiplied, and which updates are skipped.

    with clipping    every stage waits for the norm over all ranks, then stages are updated in forward order; if a loss
                     or gradient is not finite, all ranks skip the step
    without          during the rest of the step, a streamed stage is updated once its gradients are on the host, and a
                     resident stage after its backward; a stage whose gradients are not finite keeps its weights

fp16 with loss scaling always works as with clipping: an overflow on one rank must skip the step on all ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from mobius.distributed.transport import Transport
from mobius.engine.adamw import FlatAdamW
from mobius.engine.optimizer_states import Update
from mobius.engine.stage_memory import StageMemory
from mobius.engine.stage_state import StageState
from mobius.engine.step_sums import StepSums
from mobius.engine.tied_weights import TiedWeights
from mobius.engine.waits import Observers
from mobius.errors import NonFiniteLossError
from mobius.models.layout import FlatRange
from mobius.schedule.lanes import WaitCause

logger = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 10


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of a step, equal on all ranks."""

    loss: float
    grad_norm: float
    is_skipped: bool
    """Whether any stage was not updated."""
    aux_loss: float | None = None
    """Router loss, not multiplied by its coefficient; None for models without a router loss."""
    numbers: tuple[float, ...] = ()
    """Further numbers of the objective, summed over the step."""


@dataclass(frozen=True)
class StepCounts:
    """Counts at the end of a step, equal on all ranks, from which another stepper can resume."""

    num_updates: int = 0
    num_skipped: int = 0
    skipped_in_a_row: int = 0
    loss_scale: float = 1.0
    good_steps: int = 0
    """Number of steps since the loss scale last changed."""


class GradientScaler:
    """Loss scale, which keeps small gradients representable in fp16, and the factor that clips gradients.

    Unless `is_dynamic`, the loss scale stays 1. A dynamic scale is halved after an overflow and doubled after many
    steps without overflow. Scales are powers of two, so scaling and unscaling are exact. The constants equal those of
    torch.amp.GradScaler, except for a smaller initial scale, because ten non-finite steps in a row stop a run.
    """

    def __init__(
        self,
        *,
        is_dynamic: bool,
        max_grad_norm: float = 0.0,
        initial: float = 2.0**14,
        growth_interval: int = 2000,
    ) -> None:
        """`max_grad_norm`: norm to which gradients are clipped; 0: no clipping."""
        self.is_dynamic, self.max_grad_norm = is_dynamic, max_grad_norm
        self._growth_interval = growth_interval
        self.good_steps = 0
        """Number of finite steps since `value` last changed."""
        self.value = initial if is_dynamic else 1.0

    def of_gradients(self, scaled_norm: float) -> tuple[float, float]:
        """Return the norm of the gradients, and the factor that unscales and clips them."""
        norm, factor = scaled_norm / self.value, 1.0 / self.value
        if self.max_grad_norm > 0:
            factor *= min(1.0, self.max_grad_norm / (norm + 1e-6))  # formula of torch.nn.utils.clip_grad_norm_
        return norm, factor

    def restore(self, value: float, good_steps: int) -> None:
        """Restore a dynamic scale from a checkpoint; a fixed scale does not change."""
        if self.is_dynamic:
            self.value, self.good_steps = value, good_steps

    def update(self, *, is_finite: bool) -> None:
        """Adjust the scale to the outcome of a step."""
        if not self.is_dynamic:
            return
        if not is_finite:
            self.value, self.good_steps = max(1.0, self.value / 2), 0
            return
        self.good_steps += 1
        if self.good_steps == self._growth_interval:
            self.value, self.good_steps = self.value * 2, 0


class OptimizerStepper:
    """Counts updates and skipped steps; every rank makes the same decision from the same reduced numbers."""

    def __init__(
        self,
        adamw: FlatAdamW,
        *,
        memory: Mapping[int, StageMemory],
        transport: Transport,
        observers: Observers,
        scaler: GradientScaler,
        num_tensors: Sequence[int],
        waits_for_norm: bool,
        tied: TiedWeights | None,
        before_update: Callable[[int], None] | None = None,
    ) -> None:
        """`memory` has this rank's stages; a stage's memory decides where and in which pieces the stage is updated.

        `num_tensors`: number of trained tensors in each stage of the model, also in stages of other ranks.
        `waits_for_norm`: whether updates wait for the norm; then all updates of a step are skipped or none
        (`MemoryRules`). `before_update` is called with a stage just before its state changes, in the updating thread,
        perhaps several times.
        """
        self._before_update, self._clock, self._activity = before_update, observers.clock, observers.activity
        self._adamw, self._memory, self._transport, self._tied = adamw, memory, transport, tied
        self._num_stages = len(num_tensors)
        self._places = [slice(*both) for both in pairwise(accumulate(num_tensors, initial=1))]
        """Range of each stage's squares in the numbers that are summed over the ranks. The first number is the loss."""
        self.scaler = scaler
        self.num_updates = 0
        self.num_skipped = 0
        self._skipped_in_a_row = 0
        self._is_stage_by_stage = not waits_for_norm
        self._tied_stages = frozenset() if tied is None else frozenset((tied.embedding_stage, tied.head_stage))
        self._learning_rate = 0.0
        self._begun: set[int] = set()

    def begin_step(self, learning_rate: float) -> None:
        """Set the learning rate of the next step's updates; updates of the previous step continue."""
        self._learning_rate = learning_rate
        self._begun.clear()

    def on_gradients_ready(self, stage: int) -> None:
        """Update the stage during the rest of the step, unless its update waits for gradients of other stages."""
        memory = self._memory[stage]
        if memory.regions.update_waits:
            return
        if memory.states.begin_update(self._update_of(stage, self.num_updates + 1)):
            self._begun.add(stage)

    def apply(self, sums: StepSums, *, step: int) -> StepOutcome:
        """Update the stages of this rank whose update has not begun; collective over all ranks.

        Raises NonFiniteLossError after `MAX_SKIPPED_IN_A_ROW` non-finite steps in a row.
        """
        tied_square = self._tied.sum_gradients(self._memory, self._transport, sums.loss.device) if self._tied else None
        # sync: once per step, and only if a tied matrix is on the GPU
        loss, squares, aux_loss, numbers = self._sum_over_ranks(
            sums, None if tied_square is None else float(tied_square)
        )
        bad = frozenset(stage for stage, own in enumerate(squares) if not all(map(math.isfinite, own)))
        skipped = self._skipped_stages(loss, bad)
        is_finite = math.isfinite(loss) and not bad
        # fsum rounds only once, at the end, so the norm has the same bits for every number of stages and ranks.
        norm = math.sqrt(math.fsum(chain.from_iterable(squares))) if is_finite else math.nan
        grad_norm, factor = self.scaler.of_gradients(norm)
        self.scaler.update(is_finite=is_finite)
        if len(skipped) < self._num_stages:
            self.num_updates += 1
            with self._clock.blocking(WaitCause.OPTIMIZER):
                for stage, memory in sorted(self._memory.items()):
                    if stage not in self._begun | skipped:
                        self._activity.start_action(f"the update of stage {stage}")
                        memory.states.update(self._update_of(stage, self.num_updates, factor))
        for stage in skipped - self._begun & self._memory.keys():
            # a version must contain every stage, so a skipped stage is written unchanged
            if self._memory[stage].states.keeps_versions:
                self._memory[stage].states.update(_keep)
        if is_finite:
            self._skipped_in_a_row = 0
        else:
            self._report(step, loss, sorted(bad))
        return StepOutcome(loss, grad_norm, len(skipped) > 0, None if sums.router_loss is None else aux_loss, numbers)

    def _skipped_stages(self, loss: float, bad: frozenset[int]) -> frozenset[int]:
        """Return the stages that keep their weights: with clipping all or none, else `bad` (gradients not finite)."""
        if not self._is_stage_by_stage:
            return frozenset(range(self._num_stages)) if bad or not math.isfinite(loss) else frozenset()
        # The two copies of a tied matrix stay equal only if both of their stages are updated or neither.
        return bad | self._tied_stages if bad & self._tied_stages else bad

    def _sum_over_ranks(
        self, sums: StepSums, tied_square: float | None
    ) -> tuple[float, list[list[float]], float, tuple[float, ...]]:
        """Return loss, squared norms of each stage's tensors, router loss, further numbers; the same on all ranks.

        A square is 0 on all ranks except one, so the sum does not depend on the order of the ranks.
        """
        router = self._places[-1].stop
        further = slice(router + 1, router + len(sums.numbers))
        places = [slice(0, 1), further, *(self._places[stage] for stage in sums.squared_norms)]
        on_device = [*sums.numbers.split([1, len(sums.numbers) - 1]), *sums.squared_norms.values()]
        if sums.router_loss is not None:
            places, on_device = [*places, slice(router, router + 1)], [*on_device, sums.router_loss.reshape(1)]
        together = torch.cat(on_device)
        # sync: once per step, after the last backward
        with self._activity.waiting("the device"):
            numbers = together.cpu().split([len(each) for each in on_device])
        own = torch.zeros(further.stop, dtype=torch.float64)
        for place, value in zip(places, numbers, strict=True):
            own[place] = value
        replicas = self._transport.replicas
        if replicas is not None and replicas.index > 0:
            own[1:router] = 0  # norms are over all replicas, so only the first replica reports them
        if tied_square is not None:
            own[1] += tied_square  # own[1] is the square of the embedding, which was 0 so far
        with self._clock.blocking(WaitCause.NEIGHBOURS), self._activity.waiting("the sums of all ranks"):
            summed = self._transport.all_ranks.sum_over_ranks(own).tolist()
        return summed[0], [summed[place] for place in self._places], summed[router], tuple(summed[further])

    def _update_of(self, stage: int, step: int, factor: float = 1.0) -> Update:
        """Return the update of `stage` with this step's learning rate."""
        rate = self._learning_rate

        def update(state: StageState, *, pieces: Sequence[FlatRange], found_inf: Tensor | None = None) -> None:
            if self._before_update is not None:
                self._before_update(stage)
            self._adamw.update(
                state, step=step, learning_rate=rate, gradient_factor=factor, pieces=pieces, found_inf=found_inf
            )

        return update

    @property
    def counts(self) -> StepCounts:
        """Counts of the steps so far."""
        scale = self.scaler
        return StepCounts(self.num_updates, self.num_skipped, self._skipped_in_a_row, scale.value, scale.good_steps)

    def restore(self, counts: StepCounts) -> None:
        """Resume from the `counts` of another stepper; call before the first step."""
        self.num_updates, self.num_skipped = counts.num_updates, counts.num_skipped
        self._skipped_in_a_row = counts.skipped_in_a_row
        self.scaler.restore(counts.loss_scale, counts.good_steps)

    def drain(self) -> None:
        """Wait for all updates, also updates of replicas; collective. Call before reading parameters and at the end."""
        with self._clock.blocking(WaitCause.OPTIMIZER):
            for stage, memory in self._memory.items():
                with self._activity.waiting(f"the update of stage {stage}"):
                    memory.weights.gather_updated()

    def _report(self, step: int, loss: float, stages: Sequence[int]) -> None:
        """Count a step whose loss or gradients (of `stages`) are not finite; warn, or raise after too many in a row."""
        for memory in self._memory.values():
            memory.states.wait_for_gradients()
        self.num_skipped += 1
        self._skipped_in_a_row += 1
        where = f"gradients of stage(s) {', '.join(map(str, stages))}" if stages else "only the loss"
        if self._transport.all_ranks.rank == 0:
            each = "does not update these stages" if stages else "is applied anyway"
            outcome = each if self._is_stage_by_stage else "is skipped"
            logger.warning("step %d %s: not finite: %s (loss %s)", step, outcome, where, loss)
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteLossError(
                f"{self._skipped_in_a_row} steps in a row, the last of them step {step}, had non-finite values: "
                f"{where} (loss {loss}). Lower --learning_rate, use --bf16 or --fp32, or inspect the data of these "
                "steps."
            )


def _keep(state: StageState, *, pieces: Sequence[FlatRange], found_inf: Tensor | None = None) -> None:
    """Update nothing."""
