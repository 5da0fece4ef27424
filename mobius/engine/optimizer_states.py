"""Master and moments of a stage, on the host (updated by the optimizer's thread) or on the GPU (updated by the GPU).

    bytes per parameter on the GPU   bf16                    fp16               fp32
    weights, rest of the master      2 + 2 (split)           2 + 4              4 (both in one)
    moments                          8                       8                  8
    stored gradients                 2, or 4 if wanted fp32  2, or 4            4
    sums, accumulation rounds        4                       4                  4

State on the host: finished gradients are cast to the weights' dtype into an outbox on the device, usually the stage's
weight slot. One flat copy then moves them to the host, without extra memory. If gradients must arrive in fp32, they are
copied from the sum; the rank then has two buffers for sums, and the slot is free right after backward.

State on the GPU: a stage that is updated right after its backward stores no gradients. The update reads them from the
rank's fp32 sum. The gradients are rounded in place to the dtype of gradients that go to the host, so residency changes
no result. If an update must wait for other stages (clipping, tied weights, loss scaling), gradients are cast into
memory of the stage. With several accumulation rounds, every stage has a separate sum, which persists between rounds,
and stores nothing else. If replicas share the stage, each replica stores the gradients and state of its shard; the
stream of `engine/reductions.py` reduces sums, updates the stage and gathers its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from mobius.engine.gradient_sums import GradientSums, round_gradients
from mobius.engine.host_arena import whole_pages
from mobius.engine.reductions import StageSharding
from mobius.engine.slot_files import SlotFiles
from mobius.engine.stage_state import StageState
from mobius.engine.stage_weights import StageWeights
from mobius.engine.state_files import Key, StateBuffers, Visit, weights_key
from mobius.engine.update_queue import UpdateQueue
from mobius.errors import StateFileError
from mobius.hardware.spans import NO_SPANS, Spans
from mobius.hardware.streams import DeviceBuffer, Event, Stream
from mobius.limits import UPDATE_CHUNK_ELEMENTS
from mobius.models.layout import FlatRange
from mobius.schedule.lanes import Lane
from mobius.schedule.memory_layout import Part, Place, StageRegions


class Update(Protocol):
    """The optimizer's update of one stage, with the constants of its step."""

    def __call__(self, state: StageState, *, pieces: Sequence[FlatRange], found_inf: Tensor | None = None) -> None:
        """Update `pieces` of the trained part; change nothing if `found_inf` (fp32 scalar on the device) is 1."""


class OptimizerStates(Protocol):
    """Master and moments of one stage, and the gradients for their update."""

    is_on_host: bool
    """Whether finished gradients must be copied from the device to the host."""
    keeps_versions: bool
    """Whether a step's states stay on disks until the next step's states are there (engine/slot_files.py)."""

    @property
    def state(self) -> StageState:
        """Training state, on the host or the device; `finish_gradients` may replace its gradient buffer."""

    def finish_gradients(self, sums: GradientSums) -> Tensor:
        """Finish the sums in the form in which they are copied to the host or the update reads them.

        Returns squared norms as `GradientSums.finish` does.
        """

    def collect_gradients(self, sums: GradientSums, after: Event) -> bool:
        """Start copying finished gradients to the state once `after` has occurred; return whether there is a copy."""

    def wait_for_gradients(self) -> None:
        """Make the host wait for complete `state.gradients`; if they are on the device, make compute wait."""

    def discard_gradients(self) -> None:
        """Drop collected gradients, which no update will use."""

    def run_after_update(self, action: Callable[[], None]) -> None:
        """Call `action` after all updates that have begun: now, or in the optimizer's thread."""

    def is_in_memory(self, view: Tensor) -> bool:
        """Whether a view of `state`, or of a copy of it, is in memory and not on disks."""

    def state_to_fill(self) -> StageState:
        """Return a state in memory, which the caller sets: `state`, with zeros in place of tensors on disks."""

    def store(self, state: StageState) -> None:
        """Store the state that `state_to_fill` returned, after the caller has set it."""

    def begin_update(self, update: Update) -> bool:
        """Start `update` during the step, skipped if gradients are not finite; return False if that is impossible."""

    def update(self, update: Update) -> None:
        """Run `update` after the step, now or in queue order; the caller has decided that it is not skipped."""


class HostStates:
    """OptimizerStates in host memory; the optimizer's thread updates them during the rest of this step and the next.

    An update gets the state from `_acquire` before each piece, and calls `_release` after the last piece.
    """

    is_on_host = True
    keeps_versions = False

    def __init__(
        self,
        regions: StageRegions,
        state: StageState,
        weights: StageWeights,
        updates: UpdateQueue,
        *,
        device: torch.device,
        to_host: Stream,
        outbox: Callable[[], DeviceBuffer] | None,
        spans: Spans = NO_SPANS,
    ) -> None:
        """`outbox` returns the memory into which gradients are cast, and from which the stream `to_host` copies them.

        Without `outbox`, gradients are copied in fp32 from the sum, and sums need two buffers.
        """
        self.state = state
        self._stage, self._weights, self._updates, self._spans = regions.stage, weights, updates, spans
        self._to_host, self._outbox = to_host, outbox
        self._leaving: tuple[DeviceBuffer, Tensor] | None = None
        """Finished gradients and their squared norms, until `collect_gradients`."""
        self._arrival: Event | None = None
        """Event after which the latest gradients, and the squared norms from before their cast, are on the host."""
        self._host_squares = torch.zeros(len(state.layout.trained_names), pin_memory=device.type == "cuda")

    def finish_gradients(self, sums: GradientSums) -> Tensor:
        target = None if self._outbox is None else self._outbox()
        squares = sums.finish(target)
        self._leaving = sums.finished if target is None else target, squares
        return squares

    def collect_gradients(self, sums: GradientSums, after: Event) -> bool:
        if self._leaving is None:
            return False
        (buffer, squares), self._leaving = self._leaving, None
        target, shards = self.state.gradients, self.state.shards
        with self._to_host.run():
            (sums.reduction or after).wait()
            with self._spans.device_span(Lane.OFFLOAD, f"O{self._stage}"):
                self._host_squares.copy_(squares, non_blocking=True)
                if shards is not None and self._outbox is None:
                    shards.copy_owned(buffer.values, target, non_blocking=True)
                else:
                    target.copy_(buffer.values[: len(target)], non_blocking=True)
            self._arrival = buffer.free = self._to_host.record()
        self._to_host.record_use(squares)
        return True

    def wait_for_gradients(self) -> None:
        self._gradients_arrival().synchronize()

    def discard_gradients(self) -> None:
        """Do nothing: the gradients of the next step overwrite these gradients."""

    def run_after_update(self, action: Callable[[], None]) -> None:
        self._updates.run_after_update(self._stage, action)

    def is_in_memory(self, view: Tensor) -> bool:
        return True

    def state_to_fill(self) -> StageState:
        return self.state

    def store(self, state: StageState) -> None:
        assert state is self.state, "it is changed in place"

    def begin_update(self, update: Update) -> bool:
        """Return False without an optimizer thread: otherwise the host would wait for gradients during the step."""
        if self._updates.has_thread:
            self._submit(update, looks_at_norm=True)
        return self._updates.has_thread

    def update(self, update: Update) -> None:
        self._submit(update, looks_at_norm=False)

    def _submit(self, update: Update, *, looks_at_norm: bool) -> None:
        arrival, ranges = self._gradients_arrival(), self.state.layout.pieces(UPDATE_CHUNK_ELEMENTS)

        def run(part: Sequence[FlatRange]) -> None:
            state = self._acquire(arrival)
            if not looks_at_norm or self._host_squares.isfinite().all():
                with self._spans.host_span(Lane.OPTIMIZER, f"U{self._stage}"):
                    update(state, pieces=part)
            if part is ranges[-1]:
                self._release()

        pieces = [partial(run, part) for part in ranges]
        self._updates.submit(self._stage, pieces, can_begin=lambda: arrival.is_completed() and self._is_here())
        self._weights.updated()

    def _acquire(self, arrival: Event) -> StageState:
        """Return the state for a piece of an update, after waiting for its gradients; called by the updating thread."""
        arrival.synchronize()  # sync: once per stage and step, off the compute path
        return self.state

    def _is_here(self) -> bool:
        """Whether `_acquire` would not wait for the state."""
        return True

    def _release(self) -> None:
        """End an update; called after its last piece."""

    def _gradients_arrival(self) -> Event:
        assert self._arrival is not None, f"stage {self._stage} has not offloaded its gradients"
        return self._arrival


class DiskStates(HostStates):
    """HostStates whose master and moments are on disks, except during an update.

    The weights are on disks, too, or in memory. If versions of states are kept, weights are written with the states.
    """

    def __init__(
        self,
        buffers: StateBuffers,
        regions: StageRegions,
        state: StageState,
        weights: StageWeights,
        updates: UpdateQueue,
        *,
        device: torch.device,
        to_host: Stream,
        outbox: Callable[[], DeviceBuffer] | None,
        spans: Spans = NO_SPANS,
    ) -> None:
        """`regions` lists the parts on disks; their tensors in `state` have only shapes. The rest as in `HostStates`.

        If gradients arrive in a buffer, an update must begin at once, unless the gradients wait on the disks.
        """
        super().__init__(regions, state, weights, updates, device=device, to_host=to_host, outbox=outbox, spans=spans)
        self._buffers, self._on_disks = buffers, regions.has_on_disks
        self._visit: Visit | None = None
        self._has_gradients = regions.place_of(Part.GRADIENTS) is not Place.BUFFER
        self._waits = regions.gradients_wait_on_disks
        self._keys = dict[int, Key]()
        """Identity of a storage on disks -> key in the files."""
        if self._on_disks(Part.WEIGHTS):
            self._keys[_storage(state.weights)] = weights_key(regions.stage)
        if self._on_disks(Part.STATES):
            parts = (part for block in state.blocks for part in block.parts.values())
            self._keys |= {_storage(part): regions.stage for part in parts}
        self.keeps_versions = buffers.files.version is not None

    def collect_gradients(self, sums: GradientSums, after: Event) -> bool:
        if self._leaving is None or self._has_gradients:
            return super().collect_gradients(sums, after)
        if self._waits:
            self._updates.wait(self._stage)  # after a skipped step, the write of its gradients may still run
        self._visit = visit = self._buffers.visit(self._stage, reads=not self._waits)
        self.state = replace(self.state, gradients=self._gradients_in(visit.room()))
        super().collect_gradients(sums, after)
        if self._waits:
            arrival = self._gradients_arrival()

            def write() -> None:
                arrival.synchronize()  # sync: once per stage and step, in the optimizer's thread
                self._buffers.end_with_gradients(visit)

            self._updates.submit(self._stage, [write], can_begin=arrival.is_completed)
        return True

    def _gradients_in(self, room: Tensor) -> Tensor:
        own = self.state.gradients
        return room[self._buffers.gradient_start :][: own.nbytes].view(own.dtype)

    def discard_gradients(self) -> None:
        if self._waits:
            self._updates.wait(self._stage)  # wait until gradients are written: the files may be closed next
        elif not self._has_gradients and self._visit is not None:
            self._buffers.drop(self._visit)

    def state_to_fill(self) -> StageState:
        # Use a buffer: at the start of a run no update holds a buffer, and the plan has no other memory for this.
        self._visit = self._buffers.visit(self._stage, reads=False)
        room = self._visit.room().zero_()
        return self._with_weights(self.state.with_parts(room), room[self._buffers.weights_start :])

    def is_in_memory(self, view: Tensor) -> bool:
        return _storage(view) not in self._keys

    def parts(self, view: Tensor) -> Iterator[Tensor]:
        """Yield the elements of a view of `state` that is on disks, as `StageMemory.parts` does."""
        if not view.is_contiguous():  # a piece of experts with gaps: read everything from its first to its last element
            strides, last = (
                view.stride(),
                sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True)),
            )
            between = torch.cat([part.clone() for part in self.parts(view.as_strided((last + 1,), (1,)))])
            yield between.as_strided(view.shape, strides).flatten()
            return
        start = int(view.storage_offset()) * view.element_size()
        for part in self._buffers.files.parts(self._keys[_storage(view)], start, start + view.nbytes):
            yield part.view(view.dtype)

    def write_frozen(self, files: SlotFiles) -> None:
        """Write the weights of a stage that has no trained weights to both slots."""
        visit = self._buffers.visit(self._stage)  # reads the weights if they are on disks
        room, own = visit.buffer(), self.state.weights
        pages = room[self._buffers.weights_start :] if self._on_disks(Part.WEIGHTS) else whole_pages(own)
        files.write_unchanging(weights_key(self._stage), pages)
        self._buffers.drop(visit)

    def _with_weights(self, state: StageState, buffer: Tensor) -> StageState:
        """Return the state with its weights in `buffer`, if they are on disks."""
        if not self._on_disks(Part.WEIGHTS):
            return state
        own = state.weights
        return replace(state, weights=buffer[: own.nbytes].view(own.dtype))

    def store(self, state: StageState) -> None:
        self._release()
        for key in (self._stage, weights_key(self._stage)):
            self._buffers.files.wait_until_written(key)
        self._visit = None

    def _submit(self, update: Update, *, looks_at_norm: bool) -> None:
        if self._waits:
            self._updates.wait(self._stage)  # wait until gradients have arrived and are written
        if (self._has_gradients or self._waits) and self.state.layout.num_trained:
            self._visit = self._buffers.visit(self._stage)
        super()._submit(update, looks_at_norm=looks_at_norm)

    def _acquire(self, arrival: Event) -> StageState:
        super()._acquire(arrival)
        assert self._visit is not None
        try:
            buffer = self._visit.buffer()
            self._buffers.files.wait_until_written(weights_key(self._stage))
        except StateFileError:
            self._buffers.drop(self._visit)  # another stage may wait for this visit's buffer
            raise
        state = self.state if self._has_gradients else replace(self.state, gradients=self._gradients_in(buffer))
        return self._with_weights(state.with_parts(buffer), buffer[self._buffers.weights_start :])

    def _is_here(self) -> bool:
        return self._visit is None or self._visit.is_read

    def _release(self) -> None:
        assert self._visit is not None
        self._buffers.end(self._visit)
        if (version := self._visit.version) is not None and not self._on_disks(Part.WEIGHTS):
            self._buffers.files.write(weights_key(self._stage), whole_pages(self.state.weights), version)


def _storage(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage; works for tensors without memory, too."""
    return int(tensor.untyped_storage()._cdata)


class DeviceStates:
    """OptimizerStates on the device; updates run on the compute stream or, with replicas, on the reduction stream."""

    is_on_host = keeps_versions = False

    def __init__(
        self,
        stage: int,
        state: StageState,
        weights: StageWeights,
        *,
        gradient_dtype: torch.dtype,
        has_target: bool,
        keeps_gradients: bool,
        sharding: StageSharding | None = None,
        spans: Spans = NO_SPANS,
    ) -> None:
        """Gradients are cast to `gradient_dtype`: into `state.gradients` if `has_target`, else in place in the sum.

        Without `keeps_gradients`, the update must start before the backward of another stage.
        """
        self.state = state
        self._stage, self._weights, self._sharding, self._spans = stage, weights, sharding, spans
        self._gradient_dtype, self._keeps_gradients = gradient_dtype, keeps_gradients
        self._target = DeviceBuffer(state.gradients) if has_target else None
        self._squares: Tensor | None = None
        self._reduction: Event | None = None

    def finish_gradients(self, sums: GradientSums) -> Tensor:
        squares = sums.finish(self._target)
        if self._target is None:
            values = sums.finished.values[: self.state.layout.num_trained]
            if self._gradient_dtype != torch.float32:
                squares = round_gradients(values, self._gradient_dtype, squares)
            self.state = replace(self.state, gradients=values)  # the sum's buffer may differ from the last step's
        self._squares, self._reduction = squares, sums.reduction
        return squares

    def collect_gradients(self, sums: GradientSums, after: Event) -> bool:
        return False

    def wait_for_gradients(self) -> None:
        """Make compute wait for a reduction over replicas; without replicas, stream order suffices."""
        if self._reduction is not None:
            self._reduction.wait()

    def discard_gradients(self) -> None:
        """Do nothing: the gradients of the next step overwrite these gradients."""

    def run_after_update(self, action: Callable[[], None]) -> None:
        """Call `action` now; updates may still be running, but stream order protects the state."""
        self._weights.wait_until_updated()
        action()

    def is_in_memory(self, view: Tensor) -> bool:
        return True

    def state_to_fill(self) -> StageState:
        return self.state

    def store(self, state: StageState) -> None:
        assert state is self.state, "it is changed in place"

    def begin_update(self, update: Update) -> bool:
        """Enqueue the update; the device then skips it if the gradients are not finite."""
        assert self._squares is not None, f"stage {self._stage} has unfinished gradients"
        self._run(update, self._squares)
        return True

    def update(self, update: Update) -> None:
        assert self._keeps_gradients, f"stage {self._stage} stores no gradients for a later update"
        self._run(update, None)

    def _run(self, update: Update, squares: Tensor | None) -> None:
        """Update, unless `squares` are given and one of them is not finite."""
        if self._sharding is None:
            self._update(update, squares)
            self._weights.updated()
            return
        reductions = self._sharding.reductions
        with reductions.after():
            self._update(update, squares)
            reductions.replicas.all_gather(self.state.weights, self._sharding.weights.segments)
        self._weights.updated(reductions.record())

    def _update(self, update: Update, squares: Tensor | None) -> None:
        found_inf = None if squares is None else (~squares.isfinite().all()).float()
        with self._spans.device_span(Lane.OPTIMIZER, f"U{self._stage}"):
            update(self.state, pieces=self.state.layout.ranges, found_inf=found_inf)
