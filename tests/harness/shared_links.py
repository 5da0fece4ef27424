"""Ranks that share GPUs and so their links: real executor, slots and copies, with a kernel of fixed length for compute.

Ranks are threads of one process. Their kernels of one block each run side by side on one GPU, so that only the link is
shared; on a CPU they are pauses.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from harness.local_transport import LocalTransport, run_rank_threads
from harness.schedules import spec_of
from torch import Tensor

from mobius.engine.executor import Executor, PlayedStage
from mobius.engine.gradient_sums import GradientAccumulator, GradientSums
from mobius.engine.optimizer_states import HostStates
from mobius.engine.stage_memory import StageMemory
from mobius.engine.stage_messages import StageMessages
from mobius.engine.stage_state import StageState
from mobius.engine.stage_weights import SlotWeights, WeightSlotPool
from mobius.engine.step_inputs import StepBatch
from mobius.engine.update_queue import UpdateQueue
from mobius.engine.waits import Observers, WaitClock
from mobius.models.layout import StageLayout
from mobius.schedule.action import Direction
from mobius.schedule.build import build_schedule
from mobius.schedule.partition import StageCut

NUM_MICROBATCHES = 4
WARM_STEPS, STEPS = 1, 3
NAME = "weight"
LOAD_BYTES = 128 * 2**20
"""About 5 ms at PCIe 4 x16."""
_WARM_LOADS = 8
"""Idle cards take their link to a lower speed and need some traffic before it is back."""


@dataclass(frozen=True)
class LinkRun:
    """Of the measured steps."""

    weights_wait: float
    """Per step, of the worst rank."""
    step_seconds: float
    """Median."""
    is_exact: bool
    """Whether every forward and backward saw the weights of its own stage."""


class Busy:
    """Keeps the current stream of a device busy for a given time, the host goes on; on a CPU it pauses."""

    def __init__(self, device: torch.device) -> None:
        self._cycles_per_second = 0.0
        if device.type == "cuda":
            for _ in range(3):  # the clock rises under load
                start = time.perf_counter()
                with torch.cuda.device(device):
                    torch.cuda._sleep(10**8)  # type: ignore[no-untyped-call]
                torch.cuda.synchronize(device)
                self._cycles_per_second = 10**8 / (time.perf_counter() - start)

    def __call__(self, seconds: float) -> None:
        if self._cycles_per_second:
            torch.cuda._sleep(int(seconds * self._cycles_per_second))  # type: ignore[no-untyped-call]
        else:
            time.sleep(seconds)


@dataclass
class TimedStage:
    """A stage whose forward takes `seconds` and whose backward twice that; it looks at its weights."""

    cut: StageCut
    seconds: float
    busy: Busy
    seen: list[Tensor] = field(default_factory=list)

    def forward(
        self, weights: Mapping[str, Tensor], inputs: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, list[Tensor]]:
        self._work(weights, self.seconds)
        return inputs, [inputs]

    def save_input(self, inputs: Tensor) -> list[Tensor]:
        return [inputs]

    def finish_forward(
        self, weights: Mapping[str, Tensor], kept: Sequence[Tensor], context: object
    ) -> tuple[Tensor, list[Tensor]]:
        return self.forward(weights, kept[0])

    def loss(
        self, weights: object, gradients: object, hidden: Tensor, labels: object, **_: Any
    ) -> tuple[float, Tensor]:
        return 0.0, hidden

    def backward(
        self, weights: Mapping[str, Tensor], gradients: object, kept: Sequence[Tensor], gradient: Tensor, *_: object
    ) -> Tensor:
        self._work(weights, 2 * self.seconds)
        return gradient

    def embedding_backward(self, *_: object) -> None:
        """There is no embedding."""

    def is_exact(self) -> bool:
        return bool(self.seen) and all(bool((values == self.cut.stage).all()) for values in self.seen)

    def _work(self, weights: Mapping[str, Tensor], seconds: float) -> None:
        flat = weights[NAME].flatten()
        self.busy(seconds)
        self.seen.append(flat[:: max(1, flat.numel() - 1)].clone())  # the first and the last, after the work


class FreeMessages:
    """LocalTransport whose messages only say when: nothing is copied, so that links carry weights and gradients alone.

    What arrives is a tensor of the receiver's own, of the same shape.
    """

    def __init__(self, inner: LocalTransport, device: torch.device) -> None:
        self._inner, self._device = inner, device
        self.rank, self.num_ranks = inner.rank, inner.num_ranks

    def post_receive(self, source: int, direction: Direction) -> None:
        """Nothing to announce."""

    def send(self, tensor: Tensor, target: int, direction: Direction) -> None:
        event = torch.cuda.current_stream().record_event() if tensor.is_cuda else None
        message = (event, tensor.to("meta"))
        self._inner.send(message, target, direction)  # type: ignore[arg-type] # the queues take anything

    def receive(self, source: int, direction: Direction) -> Tensor:
        event, shape = self._inner.receive(source, direction)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)  # type: ignore[arg-type]
        return torch.empty_like(shape, device=self._device)

    def finish_step(self) -> None:
        """Nothing is held back."""

    def barrier(self) -> None:
        self._inner.barrier()


def load_seconds(device: torch.device) -> float:
    """Seconds of a load of LOAD_BYTES from page-locked memory, by events, after some that wake the link."""
    host = torch.ones(LOAD_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device=device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(device):
        for _ in range(_WARM_LOADS):
            begin.record()
            target.copy_(host, non_blocking=True)
            end.record()
        end.synchronize()
    return begin.elapsed_time(end) / 1000


def host_states(num_stages: int, parameters: int, *, page_locked: bool) -> list[StageState]:
    """Of each stage the bf16 weights, all of them its number, and room for gradients; nobody updates these stages."""
    layout = StageLayout.of({NAME: (parameters, 1)})
    states = list[StageState]()
    for stage in range(num_stages):
        weights, gradients = (
            torch.full((layout.num_elements,), stage, dtype=torch.bfloat16, pin_memory=page_locked) for _ in range(2)
        )
        states.append(StageState(layout, weights, gradients, ()))
    return states


def run_on(devices: Sequence[torch.device], states: Sequence[StageState], *, num_slots: int, seconds: float) -> LinkRun:
    """Some steps with one rank per entry of `devices`, which may name a device twice.

    `states` are those of all stages, each of which takes `seconds` to forward one microbatch.
    """
    num_ranks = len(devices)
    schedule = build_schedule(spec_of(num_ranks, len(states) // num_ranks, NUM_MICROBATCHES, num_slots))
    spans = [StageCut(n, n, n + 1, n == 0, n == schedule.spec.num_stages - 1) for n in range(schedule.spec.num_stages)]
    busy = {device: Busy(device) for device in devices}
    tokens = torch.zeros(NUM_MICROBATCHES, 2**13, dtype=torch.int64, pin_memory=devices[0].type == "cuda")
    batch = StepBatch(tokens, tokens, tokens.numel(), tokens.numel(), len(tokens))

    def work(transport: LocalTransport) -> tuple[list[float], list[float], bool]:
        rank = transport.rank
        device, own = devices[rank], spans[rank::num_ranks]
        stages = {span.stage: TimedStage(span, seconds, busy[device]) for span in own}
        clock = WaitClock(device)
        with _own_stream(device):
            own_states = {stage: states[stage] for stage in stages}
            total = GradientAccumulator(own_states[rank].layout.num_trained, device=device)
            length = own_states[rank].layout.num_elements
            pool = WeightSlotPool([length] * num_slots, dtype=torch.bfloat16, device=device)
            memory = {stage: _streamed(stage, state, pool, total) for stage, state in own_states.items()}
            executor = Executor(
                schedule,
                stages={
                    number: PlayedStage(stage, stage, memory[number])  # type: ignore[arg-type] # as much as is used
                    for number, stage in stages.items()
                },
                layer_inputs=lambda seq_length, documents, rows: (),
                messages=StageMessages(schedule, FreeMessages(transport, device), Observers(clock)),  # type: ignore[arg-type]
                device=device,
            )
            times, waits = [], []
            for _ in range(WARM_STEPS + STEPS):
                transport.barrier()
                start = time.perf_counter()
                executor.run(batch)
                _synchronize(device)
                transport.barrier()
                times.append(time.perf_counter() - start)
                waits.append(clock.collect()["weights"])
        is_exact = all(stage.is_exact() for stage in stages.values())
        return waits[WARM_STEPS:], times[WARM_STEPS:], is_exact

    results = run_rank_threads(num_ranks, work)
    return LinkRun(
        weights_wait=max(statistics.mean(waits) for waits, _, _ in results),
        step_seconds=statistics.median(results[0][1]),
        is_exact=all(is_exact for _, _, is_exact in results),
    )


def _streamed(stage: int, state: StageState, pool: WeightSlotPool, total: GradientAccumulator) -> StageMemory:
    updates, sums = UpdateQueue(has_thread=False), GradientSums(stage, state.layout, total)
    slot = SlotWeights(stage, state, pool, updates)
    states = HostStates(stage, state, slot, updates, device=pool.device, to_host=pool.to_host, outbox=slot.give_up)
    return StageMemory(stage, slot, sums, states)


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Within it this thread computes on a stream of its own."""
    if device.type == "cpu":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def _synchronize(device: torch.device) -> None:
    """Wait for copies too, so that the next step's loads begin in their order."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
