"""GPU slots for streamed stages, and the only code that touches copy streams.

A slot goes round between three streams, the first its own; each arrow is an event:

    H2D stream      wait(free) -> copy weights in -> record(ready)
                                                        |
    compute stream                wait(ready) -> forward / backward -> gradients into the slot -> record(done)
                                                                                                     |
    D2H stream                                                    wait(done) -> copy gradients home -> record(free)

`ready` and `free` are the slot's two events; `done` is only a hand-over inside `offload`. Without gradients `free` is
recorded on the compute stream at once. Weights are never copied back: the GPU does not change them.

Gradients of all microbatches accumulate in fp32 in one buffer per rank (`gradient_sum.py`). Sealing casts them into the
slot, over the weights, which backward no longer needs: a gradient leaves in the weights' dtype by one flat copy and
costs no memory of its own. Gradients that are to arrive in fp32 leave from the accumulator; then there are two of them,
and the slot is free as soon as backward is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mobius.errors import ScheduleError
from mobius.memory.gradient_sum import GradientSum
from mobius.memory.norms import cast_gradients, squared_norm
from mobius.memory.spans import NO_SPANS, Spans, TraceLane
from mobius.memory.stage_memory import Departure
from mobius.memory.stage_state import StageState
from mobius.memory.streams import Event, Stream, new_stream, record_current
from mobius.memory.update_queue import UpdateQueue


@dataclass
class _Slot:
    buffer: Tensor
    filling: Stream
    """Of its own: a copy that waits for its slot or its update must not hold up another slot's."""
    stage: int | None = None
    is_sealed: bool = False
    ready: Event | None = None
    free: Event | None = None
    views: dict[str, Tensor] = field(default_factory=dict)


class WeightSlots:
    """Owns `num_slots` weight buffers and the copy streams of one device."""

    def __init__(
        self,
        states: Mapping[int, StageState],
        *,
        num_slots: int,
        device: torch.device,
        gradient_sum: GradientSum | None = None,
        updates: UpdateQueue | None = None,
        spans: Spans = NO_SPANS,
    ) -> None:
        """Allocate for the largest of `states` (host states of this rank's streamed stages).

        `gradient_sum` is shared with the rank's resident stages, and has two buffers if gradients leave in fp32;
        without it there is one of its own. With `updates`, a load waits for the stage's update without stopping the
        caller.
        """
        self._states = dict(states)
        self._updates, self._spans = updates, spans
        self._device = device
        length = max(state.layout.num_elements for state in states.values())
        dtype = next(iter(states.values())).weights.dtype
        self._leaves_in_fp32 = next(iter(states.values())).gradients.dtype == torch.float32 != dtype
        self._slots = [
            _Slot(torch.empty(length, dtype=dtype, device=device), new_stream(device)) for _ in range(num_slots)
        ]
        num_buffers = 2 if self._leaves_in_fp32 else 1
        self._sum = gradient_sum or GradientSum(length, device=device, num_buffers=num_buffers)
        self._to_host = new_stream(device)
        self._squares: dict[int, Tensor] = {}
        self._departures: dict[int, Departure] = {}
        is_cuda = device.type == "cuda"
        self._host_squares = {stage: torch.zeros((), pin_memory=is_cuda) for stage in states}

    @property
    def states(self) -> Mapping[int, StageState]:
        return self._states

    def is_resident(self, stage: int) -> bool:
        return False

    def keeps_gradients(self, stage: int) -> bool:
        """They are on the host until the stage's next ones arrive."""
        return True

    def load(self, stage: int) -> None:
        """Start copying `stage`'s weights into a free slot, at once or behind its update; returns before it is done.

        Raises ScheduleError if no slot is free, i.e. the schedule exceeds the number of slots.
        """
        slot = next((slot for slot in self._slots if slot.stage is None), None)
        if slot is None:
            held = [slot.stage for slot in self._slots]
            raise ScheduleError(f"stage {stage} is to be loaded while all {len(held)} slots hold stages {held}")
        slot.stage, slot.is_sealed = stage, False
        slot.views = self._states[stage].layout.views(slot.buffer)
        if self._updates is None:
            self._fill(slot, stage)
        else:
            self._updates.when_updated(stage, lambda: self._fill(slot, stage))

    def _fill(self, slot: _Slot, stage: int) -> None:
        state = self._states[stage]
        with slot.filling.run():
            if slot.free is not None:
                slot.free.wait()
            with self._spans.device_span(TraceLane.LOAD, f"L{stage}"):
                slot.buffer[: state.layout.num_elements].copy_(state.weights, non_blocking=True)
            slot.ready = slot.filling.record()

    def wait_until_updated(self, stage: int) -> None:
        """Make the host wait for the stage's update, and for the start of a load that waits for it."""
        if self._updates is not None:
            self._updates.wait(stage)

    def is_ready(self, stage: int) -> bool:
        is_updated = self._updates is None or not self._updates.is_under_way(stage)
        return is_updated and self._slot_of(stage).ready is None

    def weights(self, stage: int) -> dict[str, Tensor]:
        """Views of the slot that holds `stage`; at the first call after a load, the compute stream waits for it."""
        self.wait_until_updated(stage)
        slot = self._slot_of(stage)
        if slot.ready is not None:
            slot.ready.wait()
            slot.ready = None
        return slot.views

    def gradients(self, stage: int) -> dict[str, Tensor]:
        """fp32 views of the rank's sum; it is cleared when another stage's accumulation begins."""
        return self._sum.views(stage, self._states[stage].layout)

    def seal_gradients(self, stage: int, *, excluded: frozenset[str]) -> Tensor:
        """End accumulation and return the gradients' squared norm, computed in fp32 before any cast.

        Gradients that leave in the weights' dtype are cast into the slot. A value that the cast makes infinite (fp16)
        makes the norm NaN, so it is seen with the other non-finite ones.
        """
        slot, views = self._slot_of(stage), self.gradients(stage)
        square = squared_norm((view for name, view in views.items() if name not in excluded), self._device)
        layout = self._states[stage].layout
        if not self._leaves_in_fp32:
            square = cast_gradients(self._sum.flat(layout), slot.buffer[: layout.num_elements], square)
        slot.is_sealed, slot.views = True, {}
        self._sum.end()
        self._squares[stage] = square
        return square

    def offload(self, stage: int) -> Departure | None:
        """Free `stage`'s slot; if its gradients are sealed, start copying them to the host.

        Returns before the copy is done.
        """
        slot = self._slot_of(stage)
        slot.stage, slot.views = None, {}
        done = slot.free = record_current(self._device)
        if not slot.is_sealed:
            return None
        state, square, on_host = self._states[stage], self._squares.pop(stage), self._host_squares[stage]
        source = self._sum.flat(state.layout) if self._leaves_in_fp32 else slot.buffer
        with self._to_host.run():
            done.wait()
            with self._spans.device_span(TraceLane.OFFLOAD, f"O{stage}"):
                on_host.copy_(square, non_blocking=True)
                state.gradients.copy_(source[: state.layout.num_elements], non_blocking=True)
            arrival = self._to_host.record()
        self._to_host.keep(square)
        if self._leaves_in_fp32:
            self._sum.keep_until(arrival)
        else:
            slot.free = arrival
        departure = self._departures[stage] = Departure(arrival, on_host)
        return departure

    def wait_for_gradients(self, stage: int) -> None:
        """Make the host wait until `stage`'s gradients of this step are in host memory."""
        self._departures[stage].wait()

    def have_gradients_arrived(self, stage: int) -> bool:
        """Whether they are in host memory already."""
        return self._departures[stage].has_arrived()

    def _slot_of(self, stage: int) -> _Slot:
        slot = next((slot for slot in self._slots if slot.stage == stage), None)
        if slot is None:
            raise ScheduleError(
                f"stage {stage} is used while the slots hold stages {[slot.stage for slot in self._slots]}"
            )
        return slot
