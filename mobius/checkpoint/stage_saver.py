"""Takes the state of one rank's stages aside and writes it, while training goes on.

    training   ... | backward 3, update 3 | backward 2, update 2 ...      an update waits until its stage is copied
    copying    copy 3 | copy 2 | copy 1 ...                               a copy waits for a free buffer
    writing             write 3 ........ | write 2 ......... | ...

A stage's state is that of step k from its update of that step on, until its next update begins. With a buffer for each
stage an update waits for a copy of memory at the most. With fewer it waits for the disk in the end, and without any
a stage is written from where it is: the state of a step is never half of another's.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor

from mobius.activity import Activity
from mobius.checkpoint.saved_stage import SavedStage
from mobius.engine.host_arena import lock_pages, map_zeros, unlock_pages
from mobius.hardware.streams import Event, new_stream, record_current

COPY_CHUNK_BYTES = 2**24
"""Bytes that one thread copies at a time."""
MAX_WRITER_THREADS = 3
"""Threads that write: while one waits for the disk, another one sums up and hands over."""

Write = Callable[[int, Mapping[str, Tensor]], None]
"""Writes a stage's tensors, by the names they are saved under, to the disk; several threads call it, each for another
stage."""


@dataclass
class SaveOutcome:
    """How saving one rank's stages went."""

    num_bytes: int = 0
    seconds: float = 0.0
    """From the beginning until all is written, or has failed."""
    writing_seconds: float = 0.0
    waited_seconds: float = 0.0
    """Longest time that updates were kept waiting, added up; what training stood still is not more."""
    error: BaseException | None = None


class AsyncStageSaver:
    """Saves this rank's stages, one save at a time; `before_update` keeps what is not copied yet from changing."""

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
        """`order`: own stages as their updates come; `activity` is told of each stage, and of updates that wait.

        `in_order`: stages are copied and written in that order, one at a time, as replicas that gather them must.

        Copies take at most `staging_bytes` of host memory, but at least the largest stage's of those on a GPU;
        `num_threads` make them.
        """
        self._stages, self._has_optimizer = stages, has_optimizer
        sizes = {stage: size for stage in order if (size := _num_bytes(self._flat(stage)))}  # some only pass on
        self.num_bytes = sum(sizes.values())
        self._device, self._activity = device, activity or Activity()
        on_gpu = [stage for stage in sizes if self._is_on_gpu(stage)]
        staging_bytes = max(staging_bytes, max(sizes.values()) if on_gpu else 0)
        self.staging_buffers = StagingBuffers(sizes, staging_bytes, pinned=on_gpu) if sizes else None
        # A GPU's copies are only enqueued; behind those of the host training would wait for that.
        has_buffer_per_stage = self.staging_buffers is not None and self.staging_buffers.has_buffer_per_stage
        self._in_order = in_order
        self._order = tuple(
            sorted(sizes, key=lambda stage: not in_order and has_buffer_per_stage and stage not in on_gpu)
        )
        self._stream = new_stream(device)
        self._copiers = ThreadPoolExecutor(num_threads, thread_name_prefix="copying")
        self._save: _AsyncSave | None = None

    def begin(self, write: Write, *, on_written: Callable[[], None] = lambda: None) -> None:
        """Start saving the state behind all updates so far; the save before must have been waited for.

        `on_written` is called behind the last stage, in a thread that writes; it is not without stages. What it raises
        makes the save fail.
        """
        assert self._save is None, "one save at a time"
        self._save = save = _AsyncSave(self._order, on_written, self._in_order)
        for stage in self._order:
            memory = self._stages[stage].memory
            memory.run_after_update(lambda stage=stage: save.mark_updated(stage, record_current(self._device)))  # type: ignore[misc]
        num_writers = min(
            MAX_WRITER_THREADS,
            1 if self.staging_buffers is None or self._in_order else self.staging_buffers.num_buffers,
        )
        works = [("saving: copies", self._copy), *[("saving: writes", self._write)] * num_writers]
        for name, run in works:
            thread = threading.Thread(target=self._guarded, args=(run, save, write), name=name, daemon=True)
            save.threads.append(thread)
            thread.start()

    def before_update(self, stage: int) -> None:
        """Return when the state of `stage` may change; on a GPU its current stream waits where the host need not."""
        if (save := self._save) is None:
            return
        # The optimizer's thread and the main one may both be here, but for different stages one after the other.
        self._activity.start_task("updates", f"the wait for the copy of stage {stage}")
        save.wait_until_copied(stage)
        self._activity.end_task("updates")

    @property
    def is_saving(self) -> bool:
        """Whether a save has begun and `wait` was not called since."""
        return self._save is not None

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._save is None or not any(thread.is_alive() for thread in self._save.threads)

    def wait(self) -> SaveOutcome:
        """Return when all is written, or saving has failed."""
        save = self._save
        assert save is not None, "no save has begun"
        for thread in save.threads:
            thread.join()
        if save.has_failed:  # some copies may be on their way to buffers that are used again, or given back
            self._stream.record().synchronize()
        if self.staging_buffers is not None:
            self.staging_buffers.release_all()
        self._save = None
        return save.outcome

    def close(self) -> None:
        """End threads and give memory back; no save may be under way."""
        self._copiers.shutdown()
        if self.staging_buffers is not None:
            self.staging_buffers.close()

    def _flat(self, stage: int) -> dict[str, Tensor]:
        return self._stages[stage].flat_tensors(has_optimizer=self._has_optimizer)

    def _guarded(self, run: Callable[[_AsyncSave, Write], None], save: _AsyncSave, write: Write) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            run(save, write)
        except BaseException as error:
            save.fail(error)

    def _copy(self, save: _AsyncSave, write: Write) -> None:
        while (wanted := save.next_stages()) and self.staging_buffers is not None:
            number = self.staging_buffers.acquire(wanted, is_cancelled=lambda: save.has_failed)
            if number is None:
                return
            # With a buffer of its own the stage is known; else the most urgent one goes first, as it is by now.
            stage = number if self.staging_buffers.has_buffer_per_stage else save.next_stages()[0]
            source = self._flat(stage)
            begun = save.mark_copying(stage)
            self._activity.start_task("copies", f"stage {stage}")
            if not self.staging_buffers.has_memory:
                save.write_in_place((stage, number, source))
                continue
            target = _split_buffer(self.staging_buffers.buffer(number), source)
            if self._is_on_gpu(stage):
                with self._stream.run():
                    begun.wait()
                    for kind, tensor in source.items():
                        target[kind].copy_(tensor, non_blocking=True)
                    copied = self._stream.record()
                save.mark_copy_enqueued(stage, copied, (stage, number, target))
            else:
                self._copy_host(source, target)
                save.mark_copied(stage, (stage, number, target))
            self._activity.end_task("copies")

    def _is_on_gpu(self, stage: int) -> bool:
        return self._stages[stage].memory.state.weights.device.type == "cuda"

    def _copy_host(self, source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
        """Copy by several threads, none of which holds Python's lock meanwhile."""
        parts = [
            (to.data_ptr() + start, tensor.data_ptr() + start, min(COPY_CHUNK_BYTES, tensor.nbytes - start))
            for tensor, to in ((tensor, target[kind]) for kind, tensor in source.items())
            for start in range(0, tensor.nbytes, COPY_CHUNK_BYTES)
        ]
        for _ in self._copiers.map(lambda part: ctypes.memmove(*part), parts):
            pass

    def _write(self, save: _AsyncSave, write: Write) -> None:
        while (given := save.next_copy()) is not None:
            stage, number, flat = given
            start, worker = time.monotonic(), f"writer of stage {stage}"
            self._activity.start_task(worker, "its files")
            try:
                save.wait_for_copy(stage)
                saved = self._stages[stage]
                write(stage, saved.named_tensors(saved.gather_from_replicas(flat)))
            finally:
                self._activity.end_task(worker)
                assert self.staging_buffers is not None
                self.staging_buffers.release(number)
            save.mark_written(stage, _num_bytes(flat), time.monotonic() - start)


class _Phase(Enum):
    UPDATING = auto()
    """The update of the saved step is not done."""
    READY = auto()
    COPYING = auto()
    COPY_ENQUEUED = auto()
    """A copy from the GPU is enqueued: what comes later in its streams may wait for it."""
    COPIED = auto()
    WRITTEN = auto()


_Copy = tuple[int, int, dict[str, Tensor]]
"""A stage, the number of the buffer that holds its copy, and the copy."""


@dataclass
class _AsyncSave:
    """State of one save, which training, copying and writing threads share."""

    order: Sequence[int]
    on_written: Callable[[], None]
    in_order: bool = False
    threads: list[threading.Thread] = field(default_factory=list)
    outcome: SaveOutcome = field(default_factory=SaveOutcome)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._phases = dict.fromkeys(self.order, _Phase.UPDATING)
        self._events: dict[int, Event] = {}
        self._urgent: list[int] = []
        self._copies: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._start = time.monotonic()
        if not self.order:
            self._copies.put(None)

    @property
    def has_failed(self) -> bool:
        return self.outcome.error is not None

    def mark_updated(self, stage: int, event: Event) -> None:
        """`event` lies behind the update in the compute stream."""
        with self._changed:
            self._events[stage], self._phases[stage] = event, _Phase.READY
            self._changed.notify_all()

    def wait_until_copied(self, stage: int) -> None:
        with self._changed:
            start = time.monotonic()
            # While it is UPDATING, the update that asks is the saved step's own, or a piece of it.
            while not self.has_failed and self._phases.get(stage) in (_Phase.READY, _Phase.COPYING):
                if stage not in self._urgent:
                    self._urgent.append(stage)
                self._changed.wait()
            if self._phases.get(stage) is _Phase.COPY_ENQUEUED:
                self._events[stage].wait()
            self.outcome.waited_seconds += time.monotonic() - start

    def next_stages(self) -> list[int]:
        """Stages that can be copied, those first for which an update waits; waits for one. Empty at the end."""
        with self._changed:
            while not self.has_failed:
                waiting = [s for s in self.order if self._phases[s] in (_Phase.UPDATING, _Phase.READY)]
                ready = [s for s in waiting[: 1 if self.in_order else None] if self._phases[s] is _Phase.READY]
                if ready:
                    return [*(stage for stage in self._urgent if stage in ready), *ready]
                if _Phase.UPDATING not in self._phases.values():
                    break
                self._changed.wait()
        return []

    def mark_copying(self, stage: int) -> Event:
        with self._changed:
            self._phases[stage] = _Phase.COPYING
            return self._events[stage]

    def mark_copy_enqueued(self, stage: int, copied: Event, copy: _Copy) -> None:
        """`copy` is complete behind `copied`."""
        with self._changed:
            self._events[stage], self._phases[stage] = copied, _Phase.COPY_ENQUEUED
            self._changed.notify_all()
        self._copies.put(copy)

    def mark_copied(self, stage: int, copy: _Copy) -> None:
        with self._changed:
            self._phases[stage] = _Phase.COPIED
            self._changed.notify_all()
        self._copies.put(copy)

    def write_in_place(self, state: _Copy) -> None:
        """The stage may not change before it is written."""
        self._copies.put(state)

    def next_copy(self) -> _Copy | None:
        copy = None if self.has_failed else self._copies.get()
        if copy is None:
            self._copies.put(None)  # for the next thread that writes
        return copy

    def wait_for_copy(self, stage: int) -> None:
        """Return when what is on its way from a GPU is there."""
        if self._phases[stage] is _Phase.COPY_ENQUEUED:
            self._events[stage].synchronize()
            with self._changed:
                self._phases[stage] = _Phase.COPIED

    def mark_written(self, stage: int, num_bytes: int, seconds: float) -> None:
        with self._changed:
            self._phases[stage] = _Phase.WRITTEN
            self.outcome.num_bytes += num_bytes
            self.outcome.writing_seconds += seconds
            self.outcome.seconds = time.monotonic() - self._start
            self._changed.notify_all()
            is_last = set(self._phases.values()) == {_Phase.WRITTEN}
        if is_last:
            self.on_written()
            self._copies.put(None)

    def fail(self, error: BaseException) -> None:
        """End the save: nobody waits for it any more."""
        with self._changed:
            if self.outcome.error is None:
                self.outcome.error = error
            self.outcome.seconds = time.monotonic() - self._start
            self._changed.notify_all()
        self._copies.put(None)


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


class StagingBuffers:
    """Host memory for copies: one buffer for each stage or, if `num_bytes` are not enough for that, some to share."""

    def __init__(self, stage_bytes: Mapping[int, int], num_bytes: int, *, pinned: Collection[int]) -> None:
        """Take the memory; `stage_bytes` is what each stage's copy takes, `pinned` the stages that a GPU copies.

        It is taken here and not beside training: while CUDA page-locks memory nothing else can be enqueued, and two
        GPUs that wait for each other's messages would wait for good. Where `num_bytes` are too few for the largest
        stage there is a single buffer without memory: a turn to write a stage from where it is. Raises HostMemoryError.
        """
        self._has_buffer_per_stage = sum(stage_bytes.values()) <= num_bytes
        largest = max(stage_bytes.values())
        self.has_memory = largest <= num_bytes
        sizes, locked = dict(stage_bytes), set(pinned)
        if not self._has_buffer_per_stage:
            sizes = dict.fromkeys(range(num_bytes // largest), largest) if self.has_memory else {0: 0}
            locked = set(sizes) if pinned else set()
        self.num_bytes = sum(sizes.values())
        self._free = threading.Condition()
        self._buffers: dict[int, Tensor] = {}
        self._locked: list[Tensor] = []
        self._taken: set[int] = set()
        for number, size in sizes.items():
            self._buffers[number] = buffer = map_zeros(size, torch.uint8)
            if number in locked and size:
                lock_pages(buffer)
                self._locked.append(buffer)

    @property
    def num_buffers(self) -> int:
        """Copies that can be there at once."""
        return len(self._buffers)

    @property
    def has_buffer_per_stage(self) -> bool:
        """Whether every stage has a buffer of its own."""
        return self._has_buffer_per_stage

    def acquire(self, stages: Collection[int], *, is_cancelled: Callable[[], bool]) -> int | None:
        """Number of a free buffer that takes one of `stages`; waits for it. None once `is_cancelled` says yes."""
        with self._free:
            while not is_cancelled():
                ready = self._buffers.keys() - self._taken
                if usable := (ready & set(stages) if self._has_buffer_per_stage else ready):
                    number = next((stage for stage in stages if stage in usable), min(usable))
                    self._taken.add(number)
                    return number
                self._free.wait(0.1)
        return None

    def buffer(self, number: int) -> Tensor:
        """uint8, as long as the stage's copy or longer."""
        return self._buffers[number]

    def release(self, number: int) -> None:
        """Let another copy use the buffer."""
        with self._free:
            self._taken.discard(number)
            self._free.notify_all()

    def release_all(self) -> None:
        """Let all buffers be used; nobody may be copying or writing any more."""
        with self._free:
            self._taken.clear()

    def close(self) -> None:
        """Give page-locked memory back; nothing may be copying any more."""
        while self._locked:
            unlock_pages(self._locked.pop())
        self._buffers = {}


def _split_buffer(buffer: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the formats and lengths of `like`, one behind the other in `buffer`; the widest formats first."""
    found, start = {}, 0
    for kind, tensor in sorted(like.items(), key=lambda pair: -pair[1].element_size()):
        found[kind] = buffer[start : start + tensor.nbytes].view(tensor.dtype)
        start += tensor.nbytes
    return found
