"""A copy engine of the host: queues are threads, device memory is host memory that other processes can open."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import threading
import time
from collections.abc import Callable

from mobius.distributed.cuda_copies import CudaCopyEngine, CudaQueue
from mobius.distributed.mailboxes import SharedMemory
from mobius.hardware.streams import Event

WORD = ctypes.c_uint32


class HostEvent(Event):
    """A point in a queue; with no streams to wait, `wait` holds the host up."""

    def __init__(self) -> None:
        self._reached = threading.Event()

    def reach(self) -> None:
        self._reached.set()

    def wait(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        assert self._reached.wait(60), "a message never came"

    def is_completed(self) -> bool:
        return self._reached.is_set()


class HostQueue(CudaQueue):
    """Runs what it is given on a thread of its own, in order."""

    def __init__(self, *, corrupts: bool) -> None:
        self._corrupts = corrupts
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.get()()

    def follow_compute(self) -> None:
        """Compute on a CPU is done when it returns."""

    def wait_value(self, address: int, value: int) -> None:
        def wait() -> None:
            while (WORD.from_address(address).value - value) % 2**32 >= 2**31:
                time.sleep(0.0001)

        self._work.put(wait)

    def write_value(self, address: int, value: int) -> None:
        def write() -> None:
            WORD.from_address(address).value = value

        self._work.put(write)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self._work.put(lambda: ctypes.memmove(target, source, num_bytes - self._corrupts))

    def record(self) -> HostEvent:
        event = HostEvent()
        self._work.put(event.reach)
        return event


class HostCopyEngine(CudaCopyEngine):
    """One "device" of this process; `peers` are those it reaches. Notes what is held, so that a leak is seen."""

    def __init__(self, device_index: int, *, peers: frozenset[int] = frozenset(), corrupts: bool = False) -> None:
        self.device_index, self._peers, self._corrupts = device_index, peers, corrupts
        self._allocated: dict[int, SharedMemory] = {}
        self._registered: dict[int, int] = {}
        self._opened: dict[int, SharedMemory] = {}

    @property
    def num_held(self) -> int:
        return len(self._allocated) + len(self._registered) + len(self._opened)

    @property
    def allocated_bytes(self) -> list[int]:
        """Of each piece of device memory."""
        return [memory.num_bytes for memory in self._allocated.values()]

    def can_access_peer(self, device_index: int) -> bool:
        return device_index in self._peers

    def new_queue(self) -> CudaQueue:
        return HostQueue(corrupts=self._corrupts)

    def allocate(self, num_bytes: int) -> int:
        memory = SharedMemory.create(num_bytes)
        self._allocated[memory.address] = memory
        return memory.address

    def free(self, address: int) -> None:
        self._allocated.pop(address).close()

    def export(self, address: int) -> bytes:
        memory = self._allocated[address]
        return json.dumps([os.getpid(), memory.descriptor, memory.num_bytes]).encode()

    def open_exported(self, handle: bytes) -> int:
        memory = SharedMemory.open(*json.loads(handle))
        self._opened[memory.address] = memory
        return memory.address

    def close_exported(self, address: int) -> None:
        self._opened.pop(address).close()

    def register(self, address: int, num_bytes: int) -> int:
        assert address % 4096 == 0
        self._registered[address] = num_bytes
        return address

    def unregister(self, address: int) -> None:
        del self._registered[address]
