"""Trainer: runs the optimizer steps and yields the metrics of each step, on any device and process group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Protocol

from torch import Tensor

from mobius.config.config import OptimConfig
from mobius.distributed.transport import Transport, all_gather_numbers
from mobius.engine.executor import Executor
from mobius.engine.lr_schedule import learning_rate_at
from mobius.engine.optimizer_stepper import OptimizerStepper, StepCounts, StepOutcome
from mobius.engine.step_inputs import StepBatch
from mobius.engine.waits import Observers
from mobius.hardware.devices import MemoryMeter
from mobius.reporting.events import StepMetrics
from mobius.reporting.recordings import StepHook
from mobius.schedule.lanes import WaitCause
from mobius.units import GIB

CompleteRows = Callable[[StepBatch], StepBatch]
"""Function that adds values to the rows of the next step that depend on the weights before this step; collective."""


class StepGather(Protocol):
    """Further numbers that ranks gather at the end of each step, in addition to the step's metrics."""

    def local(self) -> Sequence[float]:
        """Return this rank's numbers; all ranks return equally many."""

    def gathered(self, table: Tensor) -> None:
        """Receive the numbers of all ranks as a float64 table [ranks, numbers of a rank]."""


class Trainer:
    """Runs the optimizer steps; all ranks run the same loop."""

    def __init__(
        self,
        config: OptimConfig,
        *,
        executor: Executor,
        stepper: OptimizerStepper,
        batches: Iterator[StepBatch],
        transport: Transport,
        observers: Observers,
        meter: MemoryMeter,
        step_hooks: Sequence[StepHook] = (),
        num_steps_done: int = 0,
    ) -> None:
        """`batches` begin after `num_steps_done` steps. Each step runs in the contexts that `step_hooks` return.

        The trainer reports each part of a step to the activity of `observers`. The first step may compile.
        """
        self._watches, self._activity, self._is_first = step_hooks, observers.activity, True
        self._config = config
        self._executor, self._stepper, self._batches = executor, stepper, batches
        self._objective = executor.objective
        self._transport, self._clock, self._meter = transport, observers.clock, meter
        self._step = num_steps_done
        self.step_gather: StepGather | None = None
        """The training loop sets it to gather further numbers."""
        self.complete_rows: CompleteRows | None = None
        """The run sets it if the objective needs such values."""
        self._step_end = 0.0
        self._next_batch: StepBatch | None = None

    @property
    def counts(self) -> StepCounts:
        """Optimizer counts of all steps so far; equal on all ranks."""
        return self._stepper.counts

    @property
    def num_steps_done(self) -> int:
        """Number of steps of the run so far, including the steps before the checkpoint that the run resumed from."""
        return self._step

    def train(self) -> Iterator[StepMetrics]:
        """Run all remaining steps and yield the metrics of each."""
        self._transport.all_ranks.barrier()
        self._step_end = time.perf_counter()
        while self._step < self._config.num_steps:
            with ExitStack() as stack:
                for watch in self._watches:
                    stack.enter_context(watch(self._step + 1))
                stack.enter_context(self._activity.warming_up() if self._is_first else nullcontext())
                metrics = self.train_step()
            self._is_first = False
            yield metrics

    def restart_step_timer(self) -> None:
        """Start timing the next step now, so that its time does not include an evaluation."""
        self._step_end = time.perf_counter()

    def drain(self) -> None:
        """Wait for all updates; needed before parameters are read."""
        self._stepper.drain()

    def train_step(self) -> StepMetrics:
        """Run one optimizer step: all microbatches go through all stages, then AdamW updates the parameters."""
        self._activity.start_step(self._step + 1)
        self._activity.start_action("the batch")
        batch = self._next_batch or next(self._batches)
        if self.complete_rows is not None:
            batch = self.complete_rows(batch)
        learning_rate = learning_rate_at(self._step, self._config)
        self._stepper.begin_step(learning_rate)
        sums = self._executor.run(
            batch, loss_scale=self._stepper.scaler.value, on_gradients_ready=self._stepper.on_gradients_ready
        )
        self._step += 1
        is_last = self._step == self._config.num_steps
        self._activity.start_action("the next batch")
        self._next_batch = None if is_last else next(self._batches)  # prepared while the device works
        self._activity.start_action("the update")
        outcome = self._stepper.apply(sums, step=self._step)
        if is_last:
            self._stepper.drain()
        return self._measure(batch, outcome, learning_rate)

    def _measure(self, batch: StepBatch, outcome: StepOutcome, learning_rate: float) -> StepMetrics:
        self._activity.start_action("the numbers of all ranks")
        memory, waits = self._meter.read(), self._clock.collect()
        own = [memory.peak_allocated, memory.peak_reserved, memory.peak_host, *(waits[cause] for cause in WaitCause)]
        further = () if self.step_gather is None else self.step_gather.local()
        both = all_gather_numbers(self._transport.all_ranks, [*own, *further])
        if self.step_gather is not None:
            self.step_gather.gathered(both[:, len(own) :])
        table = both[:, : len(own)]
        worst = table.amax(0).tolist()
        previous, self._step_end = self._step_end, time.perf_counter()
        seconds = self._step_end - previous
        has_gpu = self._meter.has_gpu
        return StepMetrics(
            step=self._step,
            epoch=batch.epoch,
            loss=outcome.loss,
            aux_loss=outcome.aux_loss,
            numbers=self._objective.numbers(outcome.numbers),
            grad_norm=outcome.grad_norm,
            learning_rate=learning_rate,
            step_seconds=seconds,
            tokens_per_second=batch.num_tokens / seconds,
            num_tokens=batch.num_tokens,
            num_targets=batch.num_targets,
            num_samples=batch.num_samples,
            padding=1 - batch.num_tokens / (batch.num_replicas * batch.input_ids.numel()),
            peak_gpu_memory_gib=worst[0] / GIB if has_gpu else None,
            reserved_gpu_memory_gib=worst[1] / GIB if has_gpu else None,
            peak_host_memory_gib=float(table[:, 2].sum()) / GIB,
            wait_seconds={cause.value: worst[3 + index] for index, cause in enumerate(WaitCause)},
            skipped_steps=self._stepper.num_skipped,
            loss_scale=self._stepper.scaler.value if self._stepper.scaler.is_dynamic else None,
        )
