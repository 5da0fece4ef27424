"""Streamed stages: their training state is in host memory, and they occupy a GPU slot while they compute.

A slot cycles through three streams, the first its own; each arrow is an event:

    H2D stream      wait(free) -> copy weights in -> record(ready)
                                                        |
    compute stream                wait(ready) -> forward / backward -> gradients into the slot -> record(done)
                                                                                                     |
    D2H stream                                             wait(done) -> copy gradients to the host -> record(free)

`ready` and `free` are the slot's two events; `done` is internal to `offload`. Without gradients, `free` is recorded on
the compute stream at once. Weights are never copied back: the GPU does not change them.

Gradients of all microbatches accumulate in fp32 in one buffer per rank (`gradient_accumulator.py`). `finish_gradients`
casts them into the slot, over the trained weights, which backward no longer needs: the gradient is copied in the
weights' dtype by one flat copy and needs no extra memory. Gradients that must arrive in fp32 are copied from the
accumulator; it then has two buffers, and the slot is free right after backward.

If replicas share the stage, sums are reduced and cast on a stream between compute and D2H (`engine/reductions.py`), and
each host receives and updates its own shard of the weights. The first load after an update copies that shard from the
host and gathers the other shards from their replicas, while compute runs. These are also copied to the host, so that
later loads are ordinary:

    H2D stream     wait(free, gathered_to_host) -> copy own shard in -> gather the rest -> record(ready)
                                                                                               |
    weights to host                       wait(ready) -> copy the rest to the host -> record(gathered_to_host)

With several accumulation rounds, sums wait on the host in the memory of the finished gradients while other stages
accumulate; weights are loaded as usual.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mobius.engine.gradient_accumulator import GradientAccumulator, cast_gradients
from mobius.engine.ordered_tasks import OrderedTask
from mobius.engine.reductions import StageSharding
from mobius.engine.stage_memory import GradientsReadyCallback, Update
from mobius.engine.stage_state import StageState, num_owned
from mobius.engine.update_queue import UpdateQueue
from mobius.errors import ScheduleError
from mobius.hardware.spans import NO_SPANS, Spans
from mobius.hardware.streams import Event, Stream, new_stream, record_current
from mobius.limits import UPDATE_CHUNK_ELEMENTS
from mobius.models.layout import FlatRange
from mobius.schedule.lanes import Lane


@dataclass
class _WeightSlot:
    buffer: Tensor
    filling: Stream
    """Separate per slot: a copy that waits for its slot or its update must not delay another slot's."""
    stage: int | None = None
    ready: Event | None = None
    free: Event = field(default_factory=Event)
    gathered_to_host: Event = field(default_factory=Event)
    """Recorded after gathered weights are copied to the host; they must not be overwritten before."""
    views: dict[str, Tensor] = field(default_factory=dict)


class WeightSlotPool:
    """Weight slots of one device, and the stream of gradient offloads."""

    def __init__(
        self, num_elements: int, *, num_slots: int, dtype: torch.dtype, device: torch.device, is_shared: bool = False
    ) -> None:
        """Allocate `num_slots` slots of `num_elements` weights each; `is_shared`: replicas share stages."""
        self.device = device
        self._slots = [
            _WeightSlot(torch.empty(num_elements, dtype=dtype, device=device), new_stream(device))
            for _ in range(num_slots)
        ]
        self._free = deque(self._slots)
        """In the order in which they become free on the device: a load waits for the first."""
        self.to_host = new_stream(device)
        self.sums_to_device = new_stream(device)
        self.weights_to_host = new_stream(device) if is_shared else Stream()

    def take(self, stage: int) -> _WeightSlot:
        """Assign a free slot to `stage`. Raises ScheduleError if none is free, i.e. the schedule needs more slots."""
        if not self._free:
            held = [slot.stage for slot in self._slots]
            raise ScheduleError(f"stage {stage} cannot be loaded while all {len(held)} slots hold stages {held}")
        slot = self._free.popleft()
        slot.stage = stage
        return slot

    def release(self, slot: _WeightSlot) -> None:
        """Let another stage take the slot, after its `free` event."""
        slot.stage, slot.views = None, {}
        self._free.append(slot)

    def slot_of(self, stage: int) -> _WeightSlot:
        """Return the slot of `stage`. Raises ScheduleError if it has none."""
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
        pool: WeightSlotPool,
        accumulator: GradientAccumulator,
        *,
        host_sums: Tensor | None = None,
        updates: UpdateQueue | None = None,
        sharding: StageSharding | None = None,
        spans: Spans = NO_SPANS,
    ) -> None:
        """Take the buffers of the stage.

        `accumulator` needs two buffers if gradients leave in fp32, if sums move to `host_sums` (the gradients' memory),
        or with `sharding`, which a sharded state requires. With `updates`, the optimizer's thread updates the stage
        during the rest of the step and the next one; a load waits for that without blocking the caller.
        """
        assert (state.shards is None) == (sharding is None), "a sharded state and sharding require each other"
        self.state, self._sharding = state, sharding
        self._reduction: Event | None = None
        self._has_all_shards = True
        """Whether the host has the other replicas' updates, or a requested load brings them."""
        self._all_shards_event = Event()
        """Recorded after a load has copied the other replicas' updates to the host."""
        self._gather_task: OrderedTask | None = None
        """Gather of the current load; None once its start was waited for."""
        self._stage, self._pool, self._accumulator, self._host_sums = stage, pool, accumulator, host_sums
        self._updates, self._spans = updates, spans
        self._leaves_in_fp32 = state.gradients.dtype == torch.float32 != state.weights.dtype
        self._square: Tensor | None = None
        """Set between finishing and offloading the gradients."""
        self._arrival: Event | None = None
        """Event after which the latest gradients, and their squared norm before any cast, are on the host."""
        self._host_square = torch.zeros((), pin_memory=pool.device.type == "cuda")

    @property
    def frozen_state(self) -> StageState:
        return self.state

    def _leaving(self, slot: _WeightSlot) -> Tensor:
        """Return the slot memory of outgoing gradients, over weights that are no longer needed."""
        return slot.buffer[: num_owned(self.state.layout, self.state.shards)]

    def load(self) -> None:
        slot = self._pool.take(self._stage)
        slot.views = self.state.layout.views(slot.buffer)
        begin: Callable[[], None] = partial(self._fill, slot)
        if self._sharding is not None and not self._has_all_shards:
            self._has_all_shards = True
            self._gather_task = self._sharding.reductions.gathers.add(partial(self._gather, slot, self._sharding))
            begin = self._gather_task.allow_start
        if self._updates is None:
            begin()
        else:
            self._updates.run_after_update(self._stage, begin)

    def _fill(self, slot: _WeightSlot) -> None:
        with slot.filling.run():
            for point in (slot.free, slot.gathered_to_host, self._all_shards_event):
                point.wait()
            with self._spans.device_span(Lane.LOAD, f"L{self._stage}"):
                slot.buffer[: self.state.layout.num_elements].copy_(self.state.weights, non_blocking=True)
            slot.ready = slot.filling.record()

    def _gather(self, slot: _WeightSlot, sharding: StageSharding) -> None:
        """Fill the slot with the own shard from the host and other shards from replicas, and copy these to the host."""
        weights, layout, shards = self.state.weights, self.state.layout, sharding.shards
        frozen = slice(layout.num_trained, layout.num_elements)
        with slot.filling.run():
            for point in (slot.free, slot.gathered_to_host):
                point.wait()
            with self._spans.device_span(Lane.LOAD, f"L{self._stage}"):
                for part in (*shards.own, frozen):
                    slot.buffer[part].copy_(weights[part], non_blocking=True)
            with self._spans.device_span(Lane.GATHER, f"G{self._stage}"):
                sharding.reductions.replicas.all_gather_for_load(slot.buffer, shards.segments)
            slot.ready = ready = slot.filling.record()
        with self._pool.weights_to_host.run():
            ready.wait()
            for part in shards.others:
                weights[part].copy_(slot.buffer[part], non_blocking=True)
            self._all_shards_event = slot.gathered_to_host = self._pool.weights_to_host.record()

    def is_ready(self) -> bool:
        if self._gather_task is not None:
            return False
        is_updated = self._updates is None or not self._updates.is_under_way(self._stage)
        return is_updated and self._pool.slot_of(self._stage).ready is None

    def wait_until_updated(self) -> None:
        """Make the host wait for the update, and for the start of a load that depends on it."""
        if self._updates is not None:
            self._updates.wait(self._stage)
        if self._gather_task is not None:
            self._gather_task.wait()
            self._gather_task = None

    def gather_updated_weights(self) -> None:
        self.wait_until_updated()
        if self._sharding is not None and not self._has_all_shards:
            self._sharding.reductions.replicas.all_gather_on_host(self.state.weights, self._sharding.shards.segments)
            self._has_all_shards = True
        self._all_shards_event.synchronize()

    def run_after_update(self, action: Callable[[], None]) -> None:
        if self._updates is None:
            action()
        else:
            self._updates.run_after_update(self._stage, action)

    def weights(self) -> dict[str, Tensor]:
        """Return views of the slot; at the first call after a load, the compute stream waits for it."""
        self.wait_until_updated()
        slot = self._pool.slot_of(self._stage)
        if slot.ready is not None:
            slot.ready.wait()
            slot.ready = None
        return slot.views

    def gradients(self) -> dict[str, Tensor]:
        return self._accumulator.views(self._stage, self.state.layout)

    def finish_gradients(
        self, *, excluded: frozenset[str], on_gradients_ready: GradientsReadyCallback | None = None
    ) -> Tensor:
        slot, layout = self._pool.slot_of(self._stage), self.state.layout
        if self._sharding is not None:
            square = self._reduce(self._sharding, slot, excluded)
        else:
            square = self._accumulator.finish_with_norm(self._stage, layout, excluded=excluded)
            if not self._leaves_in_fp32:
                square = cast_gradients(self._accumulator.finished_sum(layout), self._leaving(slot), square)
                self._accumulator.release()
        slot.views = {}
        self._square = square
        return square

    def _reduce(self, sharding: StageSharding, slot: _WeightSlot, excluded: frozenset[str]) -> Tensor:
        """Start the reduction over replicas; outgoing gradients are ready at `reduction`."""
        layout = self.state.layout
        self._accumulator.finish(self._stage, layout)
        target = None if self._leaves_in_fp32 else self._leaving(slot)
        sums, free = self._accumulator.finished_sum(layout), slot.gathered_to_host
        square = sharding.reduce_scatter(self._stage, layout, sums, target, excluded=excluded, free=free)
        self._reduction = sharding.reductions.record()
        self._accumulator.keep_until(self._reduction)
        return square

    @property
    def reduction(self) -> Event | None:
        return self._reduction

    def offload(self, on_gradients_ready: GradientsReadyCallback | None = None) -> None:
        slot, square = self._pool.slot_of(self._stage), self._square
        self._pool.release(slot)
        self._square = None
        done = slot.free = record_current(self._pool.device)
        if square is None:
            return
        to_host, shards = self._pool.to_host, self.state.shards
        source = self._accumulator.finished_sum(self.state.layout) if self._leaves_in_fp32 else self._leaving(slot)
        with to_host.run():
            (self._reduction or done).wait()
            with self._spans.device_span(Lane.OFFLOAD, f"O{self._stage}"):
                self._host_square.copy_(square, non_blocking=True)
                if shards is not None and self._leaves_in_fp32:
                    shards.copy_owned(source, self.state.gradients, non_blocking=True)
                else:
                    self.state.gradients.copy_(source, non_blocking=True)
            self._arrival = arrival = to_host.record()
        to_host.record_use(square)
        if self._leaves_in_fp32:
            self._accumulator.keep_until(arrival)
        else:
            slot.free = arrival
        if on_gradients_ready is not None:
            on_gradients_ready(self._stage)

    def offload_gradient_sums(self) -> None:
        assert self._host_sums is not None, f"no host memory is allocated for the gradient sums of stage {self._stage}"
        span = self._spans.device_span(Lane.OFFLOAD, f"OS{self._stage}")
        self._arrival = self._accumulator.offload(
            self._stage, self.state.layout, self._host_sums, self._pool.to_host, span=span
        )

    def load_gradient_sums(self) -> None:
        assert self._host_sums is not None, f"no host memory is allocated for the gradient sums of stage {self._stage}"
        assert self._arrival is not None, f"stage {self._stage} has not offloaded its gradient sums"
        span = self._spans.device_span(Lane.LOAD, f"LS{self._stage}")
        self._accumulator.load(
            self._stage,
            self.state.layout,
            self._host_sums,
            self._pool.sums_to_device,
            after=self._arrival,
            span=span,
        )

    def wait_for_gradients(self) -> None:
        assert self._arrival is not None, f"stage {self._stage} has not offloaded its gradients"
        self._arrival.synchronize()

    def begin_update(self, update: Update) -> bool:
        """Return False without an update queue: the host would block for the gradients in the middle of the step."""
        if self._updates is None:
            return False
        self._submit(update, looks_at_norm=True)
        return True

    def update(self, update: Update) -> None:
        self._submit(update, looks_at_norm=False)

    def _submit(self, update: Update, *, looks_at_norm: bool) -> None:
        arrival = self._arrival
        assert arrival is not None, f"stage {self._stage} has not offloaded its gradients"

        def run(part: Sequence[FlatRange]) -> None:
            arrival.synchronize()  # sync: once per stage and step, off the compute path
            if looks_at_norm and not math.isfinite(float(self._host_square)):
                return
            with self._spans.host_span(Lane.OPTIMIZER, f"U{self._stage}"):
                update(pieces=part)

        pieces: list[Callable[[], None]] = [
            partial(run, part) for part in self.state.layout.pieces(UPDATE_CHUNK_ELEMENTS)
        ]
        self._has_all_shards = self._sharding is None
        if self._updates is None:
            for piece in pieces:
                piece()
        else:
            self._updates.submit(self._stage, pieces, can_begin=arrival.is_completed)
