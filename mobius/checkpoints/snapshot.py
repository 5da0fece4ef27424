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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor

from mobius.activity import Activity
from mobius.checkpoints.copy_room import CopyRoom, divided
from mobius.checkpoints.saved_stage import SavedStage
from mobius.memory.streams import Event, new_stream, record_current

COPIED_AT_ONCE = 2**24
"""Bytes that one thread copies at a time."""
MOST_WRITERS = 3
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


class Snapshots:
    """Saves this rank's stages, one save at a time; `before_update` keeps what is not copied yet from changing."""

    def __init__(
        self,
        stages: Mapping[int, SavedStage],
        *,
        order: Sequence[int],
        has_optimizer: bool,
        room_bytes: int,
        device: torch.device,
        num_threads: int,
        activity: Activity | None = None,
        in_order: bool = False,
    ) -> None:
        """`order`: own stages as their updates come; `activity` is told of each stage, and of updates that wait.

        `in_order`: stages are copied and written in that order, one at a time, as replicas that gather them must.

        Copies take at most `room_bytes` of host memory, but at least the largest stage's of those on a GPU;
        `num_threads` make them.
        """
        self._stages, self._has_optimizer = stages, has_optimizer
        sizes = {stage: size for stage in order if (size := _num_bytes(self._flat(stage)))}  # some only pass on
        self.num_bytes = sum(sizes.values())
        self._device, self._activity = device, activity or Activity()
        on_gpu = [stage for stage in sizes if self._is_on_gpu(stage)]
        room_bytes = max(room_bytes, max(sizes.values()) if on_gpu else 0)
        self.room = CopyRoom(sizes, room_bytes, pinned=on_gpu) if sizes else None
        # A GPU's copies are only enqueued; behind those of the host training would wait for that.
        has_all = self.room is not None and self.room.has_all
        self._in_order = in_order
        self._order = tuple(sorted(sizes, key=lambda stage: not in_order and has_all and stage not in on_gpu))
        self._stream = new_stream(device)
        self._copiers = ThreadPoolExecutor(num_threads, thread_name_prefix="copying")
        self._save: _Save | None = None

    def begin(self, write: Write, *, written: Callable[[], None] = lambda: None) -> None:
        """Start saving the state behind all updates so far; the save before must have been waited for.

        `written` is called behind the last stage, in a thread that writes; it is not without stages. What it raises
        makes the save fail.
        """
        assert self._save is None, "one save at a time"
        self._save = save = _Save(self._order, written, self._in_order)
        for stage in self._order:
            memory = self._stages[stage].memory
            memory.when_updated(lambda stage=stage: save.is_updated(stage, record_current(self._device)))  # type: ignore[misc]
        num_writers = min(MOST_WRITERS, 1 if self.room is None or self._in_order else self.room.num_buffers)
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
        self._activity.works("updates", f"the wait for the copy of stage {stage}")
        save.let_go(stage)
        self._activity.rests("updates")

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
        if self.room is not None:
            self.room.give_all_back()
        self._save = None
        return save.outcome

    def close(self) -> None:
        """End threads and give memory back; no save may be under way."""
        self._copiers.shutdown()
        if self.room is not None:
            self.room.close()

    def _flat(self, stage: int) -> dict[str, Tensor]:
        return self._stages[stage].flat_tensors(has_optimizer=self._has_optimizer)

    def _guarded(self, run: Callable[[_Save, Write], None], save: _Save, write: Write) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            run(save, write)
        except BaseException as error:
            save.fail(error)

    def _copy(self, save: _Save, write: Write) -> None:
        while (wanted := save.next_stages()) and self.room is not None:
            number = self.room.take(wanted, gives_up=lambda: save.has_failed)
            if number is None:
                return
            # With a buffer of its own the stage is known; else the most urgent one goes first, as it is by now.
            stage = number if self.room.has_all else save.next_stages()[0]
            source = self._flat(stage)
            begun = save.begins(stage)
            self._activity.works("copies", f"stage {stage}")
            if not self.room.has_memory:
                save.is_written_in_place((stage, number, source))
                continue
            target = divided(self.room.buffer(number), source)
            if self._is_on_gpu(stage):
                with self._stream.run():
                    begun.wait()
                    for kind, tensor in source.items():
                        target[kind].copy_(tensor, non_blocking=True)
                    copied = self._stream.record()
                save.is_on_its_way(stage, copied, (stage, number, target))
            else:
                self._copy_host(source, target)
                save.is_copied(stage, (stage, number, target))
            self._activity.rests("copies")

    def _is_on_gpu(self, stage: int) -> bool:
        return self._stages[stage].memory.state.weights.device.type == "cuda"

    def _copy_host(self, source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
        """Copy by several threads, none of which holds Python's lock meanwhile."""
        parts = [
            (to.data_ptr() + start, tensor.data_ptr() + start, min(COPIED_AT_ONCE, tensor.nbytes - start))
            for tensor, to in ((tensor, target[kind]) for kind, tensor in source.items())
            for start in range(0, tensor.nbytes, COPIED_AT_ONCE)
        ]
        for _ in self._copiers.map(lambda part: ctypes.memmove(*part), parts):
            pass

    def _write(self, save: _Save, write: Write) -> None:
        while (given := save.next_copy()) is not None:
            stage, number, flat = given
            start, worker = time.monotonic(), f"writer of stage {stage}"
            self._activity.works(worker, "its files")
            try:
                save.wait_for_copy(stage)
                saved = self._stages[stage]
                write(stage, saved.named(saved.gathered(flat)))
            finally:
                self._activity.rests(worker)
                assert self.room is not None
                self.room.give_back(number)
            save.is_written(stage, _num_bytes(flat), time.monotonic() - start)


class _Phase(Enum):
    UPDATING = auto()
    """The update of the saved step is not done."""
    READY = auto()
    COPYING = auto()
    ON_ITS_WAY = auto()
    """A copy from the GPU is enqueued: what comes later in its streams may wait for it."""
    COPIED = auto()
    WRITTEN = auto()


_Copy = tuple[int, int, dict[str, Tensor]]
"""A stage, the number of the buffer that holds its copy, and the copy."""


@dataclass
class _Save:
    """State of one save, which training, copying and writing threads share."""

    order: Sequence[int]
    written: Callable[[], None]
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

    def is_updated(self, stage: int, event: Event) -> None:
        """`event` lies behind the update in the compute stream."""
        with self._changed:
            self._events[stage], self._phases[stage] = event, _Phase.READY
            self._changed.notify_all()

    def let_go(self, stage: int) -> None:
        with self._changed:
            start = time.monotonic()
            # While it is UPDATING, the update that asks is the saved step's own, or a piece of it.
            while not self.has_failed and self._phases.get(stage) in (_Phase.READY, _Phase.COPYING):
                if stage not in self._urgent:
                    self._urgent.append(stage)
                self._changed.wait()
            if self._phases.get(stage) is _Phase.ON_ITS_WAY:
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

    def begins(self, stage: int) -> Event:
        with self._changed:
            self._phases[stage] = _Phase.COPYING
            return self._events[stage]

    def is_on_its_way(self, stage: int, copied: Event, copy: _Copy) -> None:
        """`copy` is complete behind `copied`."""
        with self._changed:
            self._events[stage], self._phases[stage] = copied, _Phase.ON_ITS_WAY
            self._changed.notify_all()
        self._copies.put(copy)

    def is_copied(self, stage: int, copy: _Copy) -> None:
        with self._changed:
            self._phases[stage] = _Phase.COPIED
            self._changed.notify_all()
        self._copies.put(copy)

    def is_written_in_place(self, state: _Copy) -> None:
        """The stage may not change before it is written."""
        self._copies.put(state)

    def next_copy(self) -> _Copy | None:
        copy = None if self.has_failed else self._copies.get()
        if copy is None:
            self._copies.put(None)  # for the next thread that writes
        return copy

    def wait_for_copy(self, stage: int) -> None:
        """Return when what is on its way from a GPU is there."""
        if self._phases[stage] is _Phase.ON_ITS_WAY:
            self._events[stage].synchronize()
            with self._changed:
                self._phases[stage] = _Phase.COPIED

    def is_written(self, stage: int, num_bytes: int, seconds: float) -> None:
        with self._changed:
            self._phases[stage] = _Phase.WRITTEN
            self.outcome.num_bytes += num_bytes
            self.outcome.writing_seconds += seconds
            self.outcome.seconds = time.monotonic() - self._start
            self._changed.notify_all()
            is_last = set(self._phases.values()) == {_Phase.WRITTEN}
        if is_last:
            self.written()
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
