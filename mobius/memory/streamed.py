"""Streamed stages: their training state is in host memory, and they take a GPU slot while they compute.

A slot goes round between three streams, the first its own; each arrow is an event:

    H2D stream      wait(free) -> copy weights in -> record(ready)
                                                        |
    compute stream                wait(ready) -> forward / backward -> gradients into the slot -> record(done)
                                                                                                     |
    D2H stream                                                    wait(done) -> copy gradients home -> record(free)

`ready` and `free` are the slot's two events; `done` is only a hand-over inside `offload`. Without gradients `free` is
recorded on the compute stream at once. Weights are never copied back: the GPU does not change them.

Gradients of all microbatches accumulate in fp32 in one buffer per rank (`gradient_sum.py`). Sealing casts them into the
slot, over the trained weights, which backward no longer needs: a gradient leaves in the weights' dtype by one flat copy
and costs no memory of its own. Gradients that are to arrive in fp32 leave from the accumulator; then there are two of
them, and the slot is free as soon as backward is done.

Where replicas share the stage, sums are reduced and cast on a stream between compute and D2H (`shared/reductions.py`),
and each host receives and updates its own share of the weights. The first load behind an update brings that share, and
the others' from the other replicas, under compute. Those go home too, so that later loads are as ever:

    H2D stream     wait(free, kept) -> copy the own share in -> gather the others' -> record(ready)
                                                                                        |
    weights home                                                   wait(ready) -> copy the others' home -> record(kept)

In a step of several rounds, sums of the rounds before are on the host while other stages add theirs up, where the
gradients will lie in the end; weights come and go as ever.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mobius.errors import ScheduleError
from mobius.limits import PIECE_ELEMENTS
from mobius.memory.gradient_sum import GradientSum, cast_gradients
from mobius.memory.layout import FlatRange
from mobius.memory.shared.reductions import Shared
from mobius.memory.shared.turns import Turn
from mobius.memory.spans import NO_SPANS, Spans
from mobius.memory.stage_memory import GradientListener, Update
from mobius.memory.stage_state import StageState, num_owned
from mobius.memory.streams import Event, Stream, new_stream, record_current
from mobius.memory.update_queue import UpdateQueue
from mobius.schedule.lanes import Lane


@dataclass
class _Slot:
    buffer: Tensor
    filling: Stream
    """Its own stream: a copy that waits for its slot or its update must not hold up another slot's."""
    stage: int | None = None
    ready: Event | None = None
    free: Event = field(default_factory=Event)
    kept: Event = field(default_factory=Event)
    """Behind the copy of weights that were gathered here; nothing may lie over them before."""
    views: dict[str, Tensor] = field(default_factory=dict)


class SlotPool:
    """Owns the weight slots of one device, and the stream on which gradients leave."""

    def __init__(
        self, num_elements: int, *, num_slots: int, dtype: torch.dtype, device: torch.device, is_shared: bool = False
    ) -> None:
        """Take memory for `num_slots` stages of at most `num_elements` weights each, some `is_shared` by replicas."""
        self.device = device
        self._slots = [
            _Slot(torch.empty(num_elements, dtype=dtype, device=device), new_stream(device)) for _ in range(num_slots)
        ]
        self._free = deque(self._slots)
        """In the order in which they become free on the device: a load waits for the first."""
        self.to_host = new_stream(device)
        self.sums_to_device = new_stream(device)
        self.weights_home = new_stream(device) if is_shared else Stream()

    def take(self, stage: int) -> _Slot:
        """A free slot, now `stage`'s. Raises ScheduleError if none is free, i.e. the schedule needs more slots."""
        if not self._free:
            held = [slot.stage for slot in self._slots]
            raise ScheduleError(f"stage {stage} is to be loaded while all {len(held)} slots hold stages {held}")
        slot = self._free.popleft()
        slot.stage = stage
        return slot

    def give_back(self, slot: _Slot) -> None:
        """Let another stage take the slot, behind its `free`."""
        slot.stage, slot.views = None, {}
        self._free.append(slot)

    def slot_of(self, stage: int) -> _Slot:
        """The slot that `stage` took. Raises ScheduleError if it has none."""
        held = [slot.stage for slot in self._slots]
        if stage not in held:
            raise ScheduleError(f"stage {stage} is used while the slots hold stages {held}")
        return self._slots[held.index(stage)]


class StreamedStage:
    """A StageMemory whose state is on the host and is updated there."""

    def __init__(
        self,
        stage: int,
        state: StageState,
        pool: SlotPool,
        total: GradientSum,
        *,
        host_sums: Tensor | None = None,
        updates: UpdateQueue | None = None,
        shared: Shared | None = None,
        spans: Spans = NO_SPANS,
    ) -> None:
        """`total` has two buffers if gradients leave in fp32, or sums go to `host_sums`, the memory of the gradients.

        With `updates` the stage is updated there, under the rest of the step and the next one, and a load waits for
        that without stopping the caller. `shared` tells how a state with shares is, and then `total` has two buffers.
        """
        assert (state.shares is None) == (shared is None), "a stage is shared with somebody"
        self.state, self._shared = state, shared
        self._reduction: Event | None = None
        self._is_whole = True
        """Whether the host has the others' updates, or a load that was asked for brings them."""
        self._whole = Event()
        """Point behind which it has those that a load has brought."""
        self._turn: Turn | None = None
        """The gather of the load, until somebody has waited for its start."""
        self._stage, self._pool, self._sum, self._host_sums = stage, pool, total, host_sums
        self._updates, self._spans = updates, spans
        self._leaves_in_fp32 = state.gradients.dtype == torch.float32 != state.weights.dtype
        self._square: Tensor | None = None
        """From sealing to offloading."""
        self._arrival: Event | None = None
        """Point at which the gradients sent last, and their squared norm from before any cast, are on the host."""
        self._host_square = torch.zeros((), pin_memory=pool.device.type == "cuda")

    @property
    def frozen_state(self) -> StageState:
        return self.state

    def _leaving(self, slot: _Slot) -> Tensor:
        """Place of gradients that leave from the slot, over weights that are no longer needed."""
        return slot.buffer[: num_owned(self.state.layout, self.state.shares)]

    def load(self) -> None:
        slot = self._pool.take(self._stage)
        slot.views = self.state.layout.views(slot.buffer)
        begin: Callable[[], None] = partial(self._fill, slot)
        if self._shared is not None and not self._is_whole:
            self._is_whole = True
            self._turn = self._shared.reductions.gathers.take(partial(self._gather, slot, self._shared))
            begin = self._turn.begin
        if self._updates is None:
            begin()
        else:
            self._updates.when_updated(self._stage, begin)

    def _fill(self, slot: _Slot) -> None:
        with slot.filling.run():
            for point in (slot.free, slot.kept, self._whole):
                point.wait()
            with self._spans.device_span(Lane.LOAD, f"L{self._stage}"):
                slot.buffer[: self.state.layout.num_elements].copy_(self.state.weights, non_blocking=True)
            slot.ready = slot.filling.record()

    def _gather(self, slot: _Slot, shared: Shared) -> None:
        """Fill the slot with the own share from the host, and the others' from the replicas; those go home, too."""
        weights, layout, shares = self.state.weights, self.state.layout, shared.shares
        frozen = slice(layout.num_trained, layout.num_elements)
        with slot.filling.run():
            for point in (slot.free, slot.kept):
                point.wait()
            with self._spans.device_span(Lane.LOAD, f"L{self._stage}"):
                for part in (*shares.own, frozen):
                    slot.buffer[part].copy_(weights[part], non_blocking=True)
            with self._spans.device_span(Lane.GATHER, f"G{self._stage}"):
                shared.reductions.replicas.gather(slot.buffer, shares.segments)
            slot.ready = ready = slot.filling.record()
        with self._pool.weights_home.run():
            ready.wait()
            for part in shares.others:
                weights[part].copy_(slot.buffer[part], non_blocking=True)
            self._whole = slot.kept = self._pool.weights_home.record()

    def is_ready(self) -> bool:
        if self._turn is not None:
            return False
        is_updated = self._updates is None or not self._updates.is_under_way(self._stage)
        return is_updated and self._pool.slot_of(self._stage).ready is None

    def wait_until_updated(self) -> None:
        """Make the host wait for the update, and for the start of a load that waits for it."""
        if self._updates is not None:
            self._updates.wait(self._stage)
        if self._turn is not None:
            self._turn.wait()
            self._turn = None

    def complete_weights(self) -> None:
        self.wait_until_updated()
        if self._shared is not None and not self._is_whole:
            self._shared.reductions.replicas.spread_on_host(self.state.weights, self._shared.shares.segments)
            self._is_whole = True
        self._whole.synchronize()

    def when_updated(self, action: Callable[[], None]) -> None:
        if self._updates is None:
            action()
        else:
            self._updates.when_updated(self._stage, action)

    def weights(self) -> dict[str, Tensor]:
        """Views of the slot; at the first call after a load, the compute stream waits for it."""
        self.wait_until_updated()
        slot = self._pool.slot_of(self._stage)
        if slot.ready is not None:
            slot.ready.wait()
            slot.ready = None
        return slot.views

    def gradients(self) -> dict[str, Tensor]:
        return self._sum.views(self._stage, self.state.layout)

    def seal_gradients(self, *, excluded: frozenset[str], listener: GradientListener | None = None) -> Tensor:
        slot, layout = self._pool.slot_of(self._stage), self.state.layout
        if self._shared is not None:
            square = self._reduce(self._shared, slot, excluded)
        else:
            square = self._sum.seal(self._stage, layout, excluded=excluded)
            if not self._leaves_in_fp32:
                square = cast_gradients(self._sum.flat(layout), self._leaving(slot), square)
                self._sum.release()
        slot.views = {}
        self._square = square
        return square

    def _reduce(self, shared: Shared, slot: _Slot, excluded: frozenset[str]) -> Tensor:
        """Begin to sum over the replicas; what leaves is there behind `reduction`."""
        layout = self.state.layout
        self._sum.end(self._stage, layout)
        target = None if self._leaves_in_fp32 else self._leaving(slot)
        sums, free = self._sum.flat(layout), slot.kept
        square = shared.reduce(self._stage, layout, sums, target, excluded=excluded, free=free)
        self._reduction = shared.reductions.record()
        self._sum.keep_until(self._reduction)
        return square

    @property
    def reduction(self) -> Event | None:
        return self._reduction

    def offload(self, listener: GradientListener | None = None) -> None:
        slot, square = self._pool.slot_of(self._stage), self._square
        self._pool.give_back(slot)
        self._square = None
        done = slot.free = record_current(self._pool.device)
        if square is None:
            return
        to_host, shares = self._pool.to_host, self.state.shares
        source = self._sum.flat(self.state.layout) if self._leaves_in_fp32 else self._leaving(slot)
        with to_host.run():
            (self._reduction or done).wait()
            with self._spans.device_span(Lane.OFFLOAD, f"O{self._stage}"):
                self._host_square.copy_(square, non_blocking=True)
                if shares is not None and self._leaves_in_fp32:
                    shares.take(source, self.state.gradients, non_blocking=True)
                else:
                    self.state.gradients.copy_(source, non_blocking=True)
            self._arrival = arrival = to_host.record()
        to_host.keep(square)
        if self._leaves_in_fp32:
            self._sum.keep_until(arrival)
        else:
            slot.free = arrival
        if listener is not None:
            listener(self._stage)

    def offload_sums(self) -> None:
        assert self._host_sums is not None, f"there is no room for the sums of stage {self._stage}"
        span = self._spans.device_span(Lane.OFFLOAD, f"OS{self._stage}")
        self._arrival = self._sum.offload(
            self._stage, self.state.layout, self._host_sums, self._pool.to_host, span=span
        )

    def load_sums(self) -> None:
        assert self._host_sums is not None, f"there is no room for the sums of stage {self._stage}"
        assert self._arrival is not None, f"stage {self._stage} has sent no sums"
        span = self._spans.device_span(Lane.LOAD, f"LS{self._stage}")
        self._sum.load(
            self._stage,
            self.state.layout,
            self._host_sums,
            self._pool.sums_to_device,
            behind=self._arrival,
            span=span,
        )

    def wait_for_gradients(self) -> None:
        assert self._arrival is not None, f"stage {self._stage} has sent no gradients"
        self._arrival.synchronize()

    def begin_update(self, update: Update) -> bool:
        """Only where updates queue: the host would have to wait for the gradients in the middle of the step."""
        if self._updates is None:
            return False
        self._submit(update, looks_at_norm=True)
        return True

    def update(self, update: Update) -> None:
        self._submit(update, looks_at_norm=False)

    def _submit(self, update: Update, *, looks_at_norm: bool) -> None:
        arrival = self._arrival
        assert arrival is not None, f"stage {self._stage} has sent no gradients"

        def run(part: Sequence[FlatRange]) -> None:
            arrival.synchronize()  # sync: once per stage and step, off the compute path
            if looks_at_norm and not math.isfinite(float(self._host_square)):
                return
            with self._spans.host_span(Lane.OPTIMIZER, f"U{self._stage}"):
                update(pieces=part)

        pieces: list[Callable[[], None]] = [partial(run, part) for part in self.state.layout.pieces(PIECE_ELEMENTS)]
        self._is_whole = self._shared is None
        if self._updates is None:
            for piece in pieces:
                piece()
        else:
            self._updates.submit(self._stage, pieces, can_begin=arrival.is_completed)
