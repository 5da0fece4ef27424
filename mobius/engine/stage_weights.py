"""Weights of a stage: in a slot of the GPU while the stage computes, always on the GPU, or some in each (adapters).

A slot passes through three streams, of which the first serves only this slot; each arrow is an event:

    H2D stream      wait(free) -> copy weights in -> record(ready)
                                                        |
    compute stream                wait(ready) -> forward / backward -> gradients into the slot -> record(done)
                                                                                                     |
    D2H stream                                             wait(done) -> copy gradients to the host -> record(free)

`ready` and `free` are the slot's two events. Without gradients, `free` is recorded on the compute stream at once.
Weights are never copied back, because the GPU does not change them.

If replicas share the stage, each replica's host updates one shard of the weights. The first load after an update copies
this shard from the host and gathers the other shards from their replicas, while compute runs. It also copies the other
shards to the host, so that later loads need no gather:

    H2D stream     wait(free, gathered_to_host) -> copy own shard in -> gather the rest -> record(ready)
                                                                                               |
    weights to host                       wait(ready) -> copy the rest to the host -> record(gathered_to_host)

If weights are on disks, they are read first; then a thread starts the copy (engine/weight_loads.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from mobius.engine.decoded_weights import WeightDecoder
from mobius.engine.quantized_weights import StageQuantizer
from mobius.engine.reductions import OrderedTask, StageSharding
from mobius.engine.stage_state import StageState
from mobius.engine.update_queue import UpdateQueue
from mobius.engine.weight_loads import WeightLoads
from mobius.errors import ScheduleError
from mobius.hardware.spans import NO_SPANS, Spans
from mobius.hardware.streams import DeviceBuffer, Event, Stream, new_stream, record_current
from mobius.models.quantization import QuantizedMatrix
from mobius.schedule.lanes import Lane


class StageWeights(Protocol):
    """Weights of one stage, as compute on the device needs them."""

    @property
    def state(self) -> StageState:
        """State with the weights that are loaded: all weights, or only the frozen weights (adapters)."""

    def load(self) -> None:
        """Start copying the weights to the device, after any pending update; returns before the copy is done."""

    def is_ready(self) -> bool:
        """Whether `wait_until_updated` and `views` return without waiting."""

    def wait_until_updated(self) -> None:
        """Make the host (compute if the state is on the device) wait for the update; raise the update's error."""

    def views(self) -> dict[str, Tensor]:
        """Return views of the parameters on the device; the compute stream waits until they are loaded."""

    def release(self) -> Event:
        """Give back the memory of loaded weights; return the event that frees it, which follows all compute so far."""

    def updated(self, event: Event | None = None) -> None:
        """Note an update of the state: it is submitted or, if it runs on the device, complete at `event`.

        Called once per update; afterwards, weights that the device has are outdated.
        """

    def gather_updated(self) -> None:
        """Gather the weights that other replicas have updated into the state; collective, waits for updates."""


@dataclass(eq=False)
class _WeightSlot(DeviceBuffer):
    filling: Stream = field(kw_only=True)
    """Stream of this slot only: a copy that waits for its slot or update must not delay a copy to another slot."""
    stage: int | None = None
    gathered_to_host: Event = field(default_factory=Event)
    """Recorded after gathered weights were copied from the slot to the host; only then may they be overwritten."""
    views: dict[str, Tensor] = field(default_factory=dict)
    scales: Tensor = field(default_factory=partial(torch.empty, 0))
    """Scales of quantized weights, fp32."""


class WeightSlotPool:
    """Weight slots of one device, and the streams of copies to the host."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_scales: int = 0,
        is_shared: bool = False,
        loads: WeightLoads | None = None,
    ) -> None:
        """Allocate a slot for each of `sizes` (numbers of weights); `is_shared`: whether replicas share stages.

        `num_scales`: largest number of scales of a stage whose weights are quantized in its slot. `loads` reads
        weights that are on disks.
        """
        self.device, self.loads = device, loads
        self._slots = [
            _WeightSlot(
                torch.empty(size, dtype=dtype, device=device),
                filling=new_stream(device),
                scales=torch.empty(num_scales, device=device),
            )
            for size in sizes
        ]
        self._free = deque(self._slots)
        """Free slots, in the order in which the device stops using them; a load waits for the first."""
        self.to_host = new_stream(device)
        self.sums_to_device = new_stream(device)
        self.weights_to_host = new_stream(device) if is_shared else Stream()

    def take(self, stage: int, num_elements: int) -> _WeightSlot:
        """Assign to `stage` the smallest free slot (of equal ones, the first) with room for `num_elements` weights.

        Raises ScheduleError if no such slot is free, because the schedule needs more slots.
        """
        large = [slot for slot in self._free if slot.values.numel() >= num_elements]
        if not large:
            raise ScheduleError(
                f"stage {stage} cannot be loaded while all {len(self._slots)} slots hold stages {self.held}"
            )
        slot = min(large, key=lambda each: each.values.numel())
        self._free.remove(slot)
        slot.stage = stage
        return slot

    def give_back(self, slot: _WeightSlot) -> None:
        """Let another stage take the slot, after its `free` event."""
        slot.stage, slot.views = None, {}
        self._free.append(slot)

    @property
    def held(self) -> list[int | None]:
        """Stage in each slot; None for a free slot."""
        return [slot.stage for slot in self._slots]


class SlotWeights:
    """StageWeights in host memory or on disks, which are in a slot while the stage computes."""

    def __init__(
        self,
        stage: int,
        state: StageState,
        pool: WeightSlotPool,
        updates: UpdateQueue,
        *,
        sharding: StageSharding | None = None,
        decoder: WeightDecoder | None = None,
        spans: Spans = NO_SPANS,
    ) -> None:
        """A load waits for the stage's update in `updates` without blocking the caller. `decoder` decodes codes."""
        self._decoder, self._num_loads = decoder, 0
        self.state, self._quantizer = state, StageQuantizer.of(state.layout)
        self._stage, self._pool, self._updates, self._sharding, self._spans = stage, pool, updates, sharding, spans
        self._taken: _WeightSlot | None = None
        self._has_all_shards = True
        """Whether the host has the shards that other replicas updated, or a load that gathers them is requested."""
        self._all_shards_event = Event()
        """Recorded after a load has copied the shards of other replicas to the host."""
        self._gather_task: OrderedTask | None = None
        """Task that gathers shards for the current load; None once the host has waited for the task."""
        self._reading: Future[None] | None = None
        """Done when the current load has read the disks and begun its copy; None once the host has waited for that."""

    def load(self) -> None:
        self._taken = slot = self._pool.take(self._stage, self.state.layout.num_units)
        self._num_loads += 1
        slot.views = self.state.layout.views(slot.values)
        begin: Callable[[], object] = partial(self._fill, slot, self.state.weights)
        if self._pool.loads is not None:
            self._reading = Future()
            begin = partial(self._pool.loads.load, self._stage, partial(self._fill, slot), self._reading)
        if self._sharding is not None and not self._has_all_shards:
            self._has_all_shards = True
            self._gather_task = self._sharding.reductions.gathers.add(partial(self._gather, slot, self._sharding))
            begin = self._gather_task.allow_start
        self._updates.run_after_update(self._stage, begin)

    def _fill(self, slot: _WeightSlot, weights: Tensor) -> Event:
        """Start copying `weights` (or their raw bytes, perhaps padded) into the slot; return the event at the end."""
        own = self.state.weights
        with slot.filling.run():
            for point in (slot.free, slot.gathered_to_host, self._all_shards_event):
                point.wait()
            with self._spans.device_span(Lane.LOAD, f"L{self._stage}"):
                slot.values[: len(own)].copy_(weights.view(own.dtype)[: len(own)], non_blocking=True)
            return self._filled(slot)

    def _gather(self, slot: _WeightSlot, sharding: StageSharding) -> None:
        """Copy this replica's shard to the slot, gather the other shards, and copy the other shards to the host."""
        weights, layout, shards = self.state.weights, self.state.layout, sharding.weights
        frozen = slice(layout.num_trained_units, layout.num_units)
        with slot.filling.run():
            for point in (slot.free, slot.gathered_to_host):
                point.wait()
            with self._spans.device_span(Lane.LOAD, f"L{self._stage}"):
                for part in (*shards.own, frozen):
                    slot.values[part].copy_(weights[part], non_blocking=True)
            with self._spans.device_span(Lane.GATHER, f"G{self._stage}"):
                sharding.reductions.replicas.all_gather_for_load(slot.values, shards.segments)
            ready = self._filled(slot)
        with self._pool.weights_to_host.run():
            ready.wait()
            for part in shards.others:
                weights[part].copy_(slot.values[part], non_blocking=True)
            self._all_shards_event = slot.gathered_to_host = self._pool.weights_to_host.record()

    def _filled(self, slot: _WeightSlot) -> Event:
        """End filling and return the event; called within the slot's stream, after all weights are enqueued."""
        slot.ready = ready = slot.filling.record()
        return ready

    def is_ready(self) -> bool:
        if self._gather_task is not None or self._reading is not None or self._updates.is_under_way(self._stage):
            return False
        return self._slot.ready is None

    def wait_until_updated(self) -> None:
        """Make the host wait for the update, and for the start of a gather that depends on the update."""
        self._updates.wait(self._stage)
        if self._gather_task is not None:
            self._gather_task.wait()
            self._gather_task = None

    def views(self) -> dict[str, Tensor]:
        """Return views of the slot; at the first call after a load, the compute stream waits for the load."""
        self.wait_until_updated()
        self._wait_until_read()
        slot = self._slot
        if slot.ready is not None:
            slot.ready.wait()
            slot.ready = None
            if self._quantizer is not None:
                slot.gathered_to_host.wait()
                slot.views = self._quantizer.quantize_in_place(slot.values, slot.scales)
        if self._decoder is not None:
            return self._decoder.views((self._stage, self._num_loads), self.state.layout, slot.views)
        return slot.views

    def _wait_until_read(self) -> None:
        """Make the host wait until the copy of weights from disks has started. Raises StateFileError."""
        if self._reading is not None:
            self._reading.result()
            self._reading = None

    def give_up(self) -> DeviceBuffer:
        """Return the slot for gradients, which overwrite the weights; the views of the weights become invalid."""
        slot = self._slot
        slot.views, slot.free = {}, slot.gathered_to_host
        return slot

    def release(self) -> Event:
        self._wait_until_read()  # `views` waits, too, but compute may not have used frozen weights
        slot = self._slot
        self._taken = None
        self._pool.give_back(slot)
        slot.free = record_current(self._pool.device)
        return slot.free

    def updated(self, event: Event | None = None) -> None:
        self._has_all_shards = self._sharding is None

    def gather_updated(self) -> None:
        self.wait_until_updated()
        if self._sharding is not None and not self._has_all_shards:
            self._sharding.reductions.replicas.all_gather_on_host(self.state.weights, self._sharding.weights.segments)
            self._has_all_shards = True
        self._all_shards_event.synchronize()

    @property
    def _slot(self) -> _WeightSlot:
        if self._taken is None:
            raise ScheduleError(f"stage {self._stage} is used while the slots hold stages {self._pool.held}")
        return self._taken


class ResidentWeights:
    """StageWeights that stay on the device, as the state does; codes of quantized weights are next to the weights."""

    def __init__(self, stage: int, state: StageState, decoder: WeightDecoder | None = None) -> None:
        """`decoder` decodes codes among the weights."""
        self._decoder = decoder
        self.state, self._quantizer = state, StageQuantizer.of(state.layout)
        self._stage, self._views = stage, state.layout.views(state.weights)
        self._matrices = dict[str, QuantizedMatrix]()
        self._quantized_version: int | None = None
        """Version of the weights that the codes represent; None: no codes yet, or an update has outdated them."""
        if self._quantizer is not None:
            self._matrices = self._quantizer.allocate(state.weights.device)
            self._views = self._quantizer.views(state.weights, self._matrices)
        self._updated: Event | None = None
        """Recorded after an update on another stream; None once compute waits for the update."""

    def load(self) -> None:
        raise ScheduleError(f"stage {self._stage} is resident and cannot be loaded")

    def is_ready(self) -> bool:
        return self._updated is None

    def wait_until_updated(self) -> None:
        """Make compute wait for an update if replicas share it; other updates are earlier on the compute stream."""
        if self._updated is not None:
            self._updated.wait()
            self._updated = None

    def views(self) -> dict[str, Tensor]:
        self.wait_until_updated()
        # Reading weights from files increases the tensor's version; updates by the optimizer's kernels do not.
        if self._quantizer is not None and self._quantized_version != (version := self.state.weights._version):
            self._quantizer.quantize(self.state.weights, self._matrices)
            self._quantized_version = version
        if self._decoder is not None:
            key = self._stage, "resident", self.state.weights._version
            return self._decoder.views(key, self.state.layout, self._views)
        return self._views

    def release(self) -> Event:
        raise ScheduleError(f"stage {self._stage} is resident and cannot be offloaded")

    def updated(self, event: Event | None = None) -> None:
        self._updated, self._quantized_version = event, None

    def gather_updated(self) -> None:
        """Make compute wait for an update if replicas share it; such an update includes the gather of all weights."""
        self.wait_until_updated()


class FrozenAndTrainedWeights:
    """StageWeights with adapters: frozen weights are in a slot while they compute, trained weights on the device."""

    def __init__(self, frozen: SlotWeights, trained: ResidentWeights) -> None:
        self._frozen, self._trained = frozen, trained
        self.state, self.load, self.release = frozen.state, frozen.load, frozen.release
        self.wait_until_updated, self.updated = trained.wait_until_updated, trained.updated
        self.gather_updated = trained.gather_updated

    def is_ready(self) -> bool:
        return self._frozen.is_ready() and self._trained.is_ready()

    def views(self) -> dict[str, Tensor]:
        return self._frozen.views() | self._trained.views()
