"""Copies the state of one rank's stages and writes the copies while training goes on.

    training   ... | backward 3, update 3 | backward 2, update 2 ...      an update waits until its stage is copied
    copying    copy 3 | copy 2 | copy 1 ...                               a copy waits for a free buffer
    writing             write 3 ........ | write 2 ......... | ...

A stage has the state of step k from its update in step k until its next update begins. If each stage has a buffer, an
update waits at most for a copy in memory. With fewer buffers it may wait for the disk. Without buffers a stage is
written directly from its memory, or in parts from disks. A checkpoint never mixes the states of two steps.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import torch
from torch import Tensor

from mobius.checkpoint.saved_stage import SavedStage
from mobius.engine.host_arena import lock_pages, map_zeros, unlock_pages
from mobius.engine.stage_memory import copy_parts
from mobius.hardware.streams import Event, new_stream, record_current
from mobius.process.activity import Activity

COPY_CHUNK_BYTES = 2**24
"""Bytes that one thread copies at a time."""
MAX_WRITER_THREADS = 3
"""Maximum number of threads that write: while one waits for the disk, another computes checksums."""

Write = Callable[[int, Mapping[str, Tensor]], None]
"""Function that writes a stage's tensors, given by their saved names, to the disk. Several threads call it, each for a
different stage. Tensors that are on disks have no values (`StageMemory.parts`)."""


@dataclass
class SaveOutcome:
    """Outcome of saving one rank's stages."""

    num_bytes: int = 0
    seconds: float = 0.0
    """Time from the beginning until everything is written or the save has failed."""
    writing_seconds: float = 0.0
    waited_seconds: float = 0.0
    """Time that updates waited, added up over stages; training waited at most this long."""
    error: BaseException | None = None


class AsyncStageSaver:
    """Saves this rank's stages, one save at a time; `before_update` delays updates of stages not copied yet."""

    def __init__(
        self,
        stages: Mapping[int, SavedStage],
        *,
        order: Sequence[int],
        has_optimizer: bool,
        staging_bytes: int,
        device: torch.device,
        num_threads: int,
        activity: Activity | None = None,
        in_order: bool = False,
    ) -> None:
        """Take the stages of this rank; `order` is the order of their updates.

        `activity` records each stage, and updates that wait. With `in_order`, stages are copied and written in this
        order, one at a time, as replicas that gather them must do. Copies take at most `staging_bytes` of host memory,
        or, with stages on a GPU, as much as the largest stage if that is more; `num_threads` threads copy.
        """
        self._stages, self._has_optimizer, self._in_order = stages, has_optimizer, in_order
        sizes = {stage: size for stage in order if (size := _num_bytes(self._flat(stage)))}  # 0: no state
        self.num_bytes = sum(sizes.values())
        self._device, self._activity = device, activity or Activity()
        on_gpu = [stage for stage in sizes if self._is_on_gpu(stage)]
        staging_bytes = max(staging_bytes, max(sizes.values()) if on_gpu else 0)
        self.staging_buffers = buffers = StagingBuffers(sizes, staging_bytes, pinned=on_gpu)
        # Copies from a GPU are only enqueued and come first: else, training would also wait for copies of host memory.
        gpu_first = buffers.has_buffer_per_stage and not in_order
        self._order = sorted(sizes, key=lambda stage: gpu_first and stage not in on_gpu)
        self._stream = new_stream(device)
        self._copiers = ThreadPoolExecutor(num_threads, thread_name_prefix="copying")
        self._save: _AsyncSave | None = None

    def begin(self, write: Write, *, on_written: Callable[[], None] = lambda: None) -> None:
        """Start saving the state after all updates so far; `wait` must have ended the previous save.

        `on_written` is called after the last stage, in a thread that writes; it is never called without stages. If it
        raises an exception, the save fails.
        """
        assert self._save is None, "one save at a time"
        self._save = save = _AsyncSave(self._order, self.staging_buffers, on_written, self._in_order)
        for stage in self._order:
            memory = self._stages[stage].memory
            memory.states.run_after_update(lambda stage=stage: save.mark_updated(stage, record_current(self._device)))  # type: ignore[misc]
        num_writers = 1 if self._in_order else min(MAX_WRITER_THREADS, len(self.staging_buffers.buffers))
        writing = partial(self._write, write=write)
        for name, run in [("saving: copies", self._copy), *[("saving: writes", writing)] * num_writers]:
            thread = threading.Thread(target=self._guarded, args=(run, save), name=name, daemon=True)
            save.threads.append(thread)
            thread.start()

    def before_update(self, stage: int) -> None:
        """Wait until the state of `stage` may change; on a GPU the current stream may wait instead of the host."""
        if (save := self._save) is None:
            return
        # The optimizer's thread and the main thread both call this, but one after the other and for different stages.
        self._activity.start_task("updates", f"the wait for the copy of stage {stage}")
        save.wait_until_copied(stage)
        self._activity.end_task("updates")

    @property
    def error(self) -> BaseException | None:
        """Error of the save in progress, if it has failed."""
        return None if self._save is None else self._save.outcome.error

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._save is None or not any(thread.is_alive() for thread in self._save.threads)

    def wait(self) -> SaveOutcome | None:
        """Wait until everything is written or the save has failed; None if no save has begun since the last call."""
        if (save := self._save) is None:
            return None
        for thread in save.threads:
            thread.join()
        if save.has_failed:  # wait for running copies: their buffers will be reused or released
            self._stream.record().synchronize()
        self._save = None
        return save.outcome

    def close(self) -> None:
        """End threads and release memory; no save may be in progress."""
        self._copiers.shutdown()
        self.staging_buffers.close()

    def _flat(self, stage: int) -> dict[str, Tensor]:
        return self._stages[stage].flat_tensors(has_optimizer=self._has_optimizer)

    def _is_on_gpu(self, stage: int) -> bool:
        return self._stages[stage].memory.state.weights.device.type == "cuda"

    def _guarded(self, run: Callable[[_AsyncSave], None], save: _AsyncSave) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            run(save)
        except BaseException as error:
            save.fail(error)

    def _copy(self, save: _AsyncSave) -> None:
        while (taken := save.take_stage()) is not None:
            stage, number = taken
            source, buffer = self._flat(stage), self.staging_buffers.buffers[number]
            self._activity.start_task("copies", f"stage {stage}")
            if buffer is None:
                save.add_copy((stage, number, source), is_copied=False)  # the stage's update waits for the write
                continue
            target = _split_buffer(buffer, source)
            if self._is_on_gpu(stage):
                with self._stream.run():
                    save.events[stage].wait()
                    for kind, tensor in source.items():
                        target[kind].copy_(tensor, non_blocking=True)
                    save.events[stage] = self._stream.record()
            else:
                self._copy_host(stage, source, target)
            save.add_copy((stage, number, target))
            self._activity.end_task("copies")

    def _copy_host(self, stage: int, source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
        """Copy a stage: tensors on disks are read; several threads, without Python's lock, copy the other tensors."""
        memory = self._stages[stage].memory
        in_memory = {kind: tensor for kind, tensor in source.items() if memory.states.is_in_memory(tensor)}
        for kind in source.keys() - in_memory:
            copy_parts(memory.parts(source[kind]), target[kind])
        parts = [
            (to.data_ptr() + start, tensor.data_ptr() + start, min(COPY_CHUNK_BYTES, tensor.nbytes - start))
            for tensor, to in ((tensor, target[kind]) for kind, tensor in in_memory.items())
            for start in range(0, tensor.nbytes, COPY_CHUNK_BYTES)
        ]
        for _ in self._copiers.map(lambda part: ctypes.memmove(*part), parts):
            pass

    def _write(self, save: _AsyncSave, write: Write) -> None:
        while (copy := save.next_copy()) is not None:
            stage, number, flat = copy
            start, worker = time.monotonic(), f"writer of stage {stage}"
            self._activity.start_task(worker, "its files")
            try:
                save.events[stage].synchronize()  # wait until the copy from the GPU has arrived
                saved = self._stages[stage]
                write(stage, saved.named_tensors(saved.gather_from_replicas(flat)))
            finally:
                self._activity.end_task(worker)
            save.mark_written(stage, number, _num_bytes(flat), time.monotonic() - start)


class _Phase(Enum):
    UPDATING = auto()
    """The stage's update of the saved step is not done."""
    READY = auto()
    COPYING = auto()
    """The stage is being copied, or written directly from its memory."""
    COPIED = auto()
    """The copy is complete. A copy from a GPU may be only enqueued; later work in the GPU's streams can wait for it."""
    WRITTEN = auto()


_Copy = tuple[int, int, dict[str, Tensor]]
"""Stage, number of the buffer that holds its copy, and the copy."""


class _AsyncSave:
    """State of one save, which training, copying and writing threads share."""

    def __init__(
        self, order: Sequence[int], buffers: StagingBuffers, on_written: Callable[[], None], in_order: bool
    ) -> None:
        self.threads: list[threading.Thread] = []
        self.outcome = SaveOutcome()
        self.events: dict[int, Event] = {}
        """Event at the end of a stage's update, and later of its copy, in the GPU's streams."""
        self._order, self._buffers, self._on_written, self._in_order = order, buffers, on_written, in_order
        self._changed = threading.Condition()
        self._phases = dict.fromkeys(order, _Phase.UPDATING)
        self._free = set(buffers.buffers)
        self._urgent: list[int] = []
        """Stages whose next update is waiting."""
        self._copies: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._start = time.monotonic()

    @property
    def has_failed(self) -> bool:
        return self.outcome.error is not None

    def mark_updated(self, stage: int, event: Event) -> None:
        """Mark a stage as updated; `event` follows the update in the compute stream."""
        with self._changed:
            self.events[stage], self._phases[stage] = event, _Phase.READY
            self._changed.notify_all()

    def wait_until_copied(self, stage: int) -> None:
        with self._changed:
            start = time.monotonic()
            # In phase UPDATING, the update that calls this belongs to the saved step, so it need not wait.
            while not self.has_failed and self._phases.get(stage) in (_Phase.READY, _Phase.COPYING):
                if stage not in self._urgent:
                    self._urgent.append(stage)
                self._changed.wait()
            if self._phases.get(stage) is _Phase.COPIED:
                self.events[stage].wait()
            self.outcome.waited_seconds += time.monotonic() - start

    def take_stage(self) -> tuple[int, int] | None:
        """Wait for a stage that can be copied and a free buffer for it, and return both; None at the end.

        Stages for which an update waits come first.
        """
        with self._changed:
            while not self.has_failed:
                waiting = [s for s in self._order if self._phases[s] in (_Phase.UPDATING, _Phase.READY)]
                if not waiting:
                    break
                ready = [s for s in waiting[: 1 if self._in_order else None] if self._phases[s] is _Phase.READY]
                for stage in (*(stage for stage in self._urgent if stage in ready), *ready):
                    if usable := self._free & self._buffers.numbers_for(stage):
                        self._free.remove(number := min(usable))
                        self._phases[stage] = _Phase.COPYING
                        return stage, number
                self._changed.wait()
        return None

    def add_copy(self, copy: _Copy, *, is_copied: bool = True) -> None:
        """Queue `copy` for a thread that writes; if `is_copied`, the stage may be updated meanwhile."""
        if is_copied:
            with self._changed:
                self._phases[copy[0]] = _Phase.COPIED
                self._changed.notify_all()
        self._copies.put(copy)

    def next_copy(self) -> _Copy | None:
        copy = None if self.has_failed else self._copies.get()
        if copy is None:
            self._copies.put(None)  # so that the next writing thread ends, too
        return copy

    def mark_written(self, stage: int, number: int, num_bytes: int, seconds: float) -> None:
        """Free buffer `number`; after the last stage, end the save."""
        with self._changed:
            self._phases[stage] = _Phase.WRITTEN
            self._free.add(number)
            self.outcome.num_bytes += num_bytes
            self.outcome.writing_seconds += seconds
            self.outcome.seconds = time.monotonic() - self._start
            self._changed.notify_all()
            is_last = set(self._phases.values()) == {_Phase.WRITTEN}
        if is_last:
            self._on_written()
            self._copies.put(None)

    def fail(self, error: BaseException) -> None:
        """End the save with an error; no thread waits for it any more."""
        with self._changed:
            self.outcome.error = self.outcome.error or error
            self.outcome.seconds = time.monotonic() - self._start
            self._changed.notify_all()
        self._copies.put(None)


class StagingBuffers:
    """Host memory for copies: a buffer for each stage, or fewer buffers for all stages if the bytes do not suffice."""

    def __init__(self, stage_bytes: Mapping[int, int], num_bytes: int, *, pinned: Collection[int]) -> None:
        """Allocate the memory; `stage_bytes`: the size of each stage's copy, `pinned`: the stages on a GPU.

        The memory is allocated now and not during training: while CUDA page-locks memory nothing else can be enqueued,
        and two GPUs that wait for each other's messages would wait forever. If `num_bytes` are too few for the largest
        stage, there is a single buffer without memory; the stage that gets it is written without a copy. Raises
        HostMemoryError.
        """
        self.has_buffer_per_stage = sum(stage_bytes.values()) <= num_bytes
        """Whether every stage has a separate buffer, whose number is the stage's."""
        sizes, locked = dict(stage_bytes), set(pinned)
        if not self.has_buffer_per_stage:
            largest = max(stage_bytes.values())
            sizes = dict.fromkeys(range(num_bytes // largest), largest)
            locked = set(sizes) if pinned else set()
        self.num_bytes = sum(sizes.values())
        self.buffers: dict[int, Tensor | None] = {}
        """Buffer by number: uint8, as long as a stage's copy or longer; None without memory."""
        self._locked: list[Tensor] = []
        for number, size in sizes.items():
            self.buffers[number] = buffer = map_zeros(size, torch.uint8)
            if number in locked:
                lock_pages(buffer)
                self._locked.append(buffer)
        if stage_bytes and not sizes:
            self.buffers[0] = None

    def numbers_for(self, stage: int) -> Set[int]:
        """Numbers of the buffers that can hold the copy of `stage`."""
        return {stage} if self.has_buffer_per_stage else self.buffers.keys()

    def close(self) -> None:
        """Release page-locked memory; no copies may be in flight."""
        while self._locked:
            unlock_pages(self._locked.pop())
        self.buffers = {}


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _split_buffer(buffer: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with the formats and lengths of `like`, one after the other in `buffer`; widest formats first."""
    found, start = {}, 0
    for kind, tensor in sorted(like.items(), key=lambda pair: -pair[1].element_size()):
        found[kind] = buffer[start : start + tensor.nbytes].view(tensor.dtype)
        start += tensor.nbytes
    return found
