"""Device memory that neighbours in the ring copy into: what mailboxes and the check of copies both stand on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mobius.memory.streams import Event
from mobius.messages.meeting import Meeting, Told, read_all, read_number
from mobius.messages.transport import ring_edges


class CopyQueue(Protocol):
    """An ordered queue of copies, waits and counters' writes; nothing here makes the host wait."""

    def follow_compute(self) -> None:
        """Begin what comes next only when the compute enqueued so far is done."""

    def wait_value(self, address: int, value: int) -> None:
        """Go on only when the uint32 at `address` is not before `value`, cyclically."""

    def write_value(self, address: int, value: int) -> None:
        """Write a uint32 when all before it is done and can be seen by everybody."""

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy between two addresses of devices or page-locked host memory."""

    def record(self) -> Event:
        """The point behind all of the queue so far."""


class CopyEngine(Protocol):
    """One device's copies, and the memory that they work on. Raises RuntimeError where something is not allowed."""

    device_index: int
    """The number by which all ranks know the device."""

    def reaches(self, device_index: int) -> bool:
        """Whether this device can write into that one's memory."""

    def new_queue(self) -> CopyQueue:
        """A queue that nobody else uses."""

    def allocate(self, num_bytes: int) -> int:
        """Device memory that can be exported; its address."""

    def free(self, address: int) -> None:
        """Give `allocate`d memory back; no other rank may have it open."""

    def export(self, address: int) -> bytes:
        """The handle by which another rank opens `allocate`d memory."""

    def open_exported(self, handle: bytes) -> int:
        """Map another device's memory; its address here."""

    def close_exported(self, address: int) -> None:
        """Undo `open_exported`."""

    def register(self, address: int, num_bytes: int) -> int:
        """Page-lock host memory; its address for the device."""

    def unregister(self, address: int) -> None:
        """Undo `register`, by the host's address."""


@dataclass
class Neighbours:
    """This rank's neighbours in the ring, and the memory that they and this rank hold open of each other.

    Methods that take `answers` are steps for `take_together`, in this order: `start`, `reach`.
    """

    meeting: Meeting
    make_engine: Callable[[], CopyEngine]
    device: torch.device
    patience: float
    """Seconds for each event that is waited for."""

    def __post_init__(self) -> None:
        edges = ring_edges(self.meeting.num_ranks)
        self.sources = [source for source, target in edges if target == self.meeting.rank]
        self.targets = [target for source, target in edges if source == self.meeting.rank]
        self.engine: CopyEngine
        self.own, self.opened = ExitStack(), ExitStack()

    def start(self, answers: Sequence[Any]) -> int:
        """Make the engine; its device's number."""
        self.engine = self.make_engine()
        return self.engine.device_index

    def reach(self, answers: Sequence[Any]) -> list[int]:
        """The targets whose devices this rank's device reaches."""
        device_indices = read_all(answers, read_number)
        return [target for target in self.targets if self.engine.reaches(device_indices[target])]

    def make_memory(self, num_bytes: int) -> tuple[int, Told]:
        """Device memory for a neighbour to write into: its address here, and the handle as it is told."""
        address = self.engine.allocate(num_bytes)
        self.own.callback(self.engine.free, address)
        return address, self.engine.export(address).hex()

    def open_memory(self, handle: bytes) -> int:
        """Open what a neighbour made; its address here."""
        address = self.engine.open_exported(handle)
        self.opened.callback(self.engine.close_exported, address)
        return address

    def comes(self, event: Event) -> bool:
        """Whether the event comes within the patience; looks again and again, so that nothing holds this rank up."""
        end = time.monotonic() + self.patience
        while not event.query():
            if time.monotonic() > end:
                return False
            time.sleep(0.0002)
        return True

    def pattern(self, rank: int, num_bytes: int, number: int = 0) -> Tensor:
        """uint8 [num_bytes]; every word is another one, and no two ranks' or numbers' are the same."""
        words = torch.arange(-(-num_bytes // 4), dtype=torch.int32, device=self.device)
        return words.mul_(2 * number + 1).add_(1 + rank).view(torch.uint8)[:num_bytes]

    def close(self) -> None:
        """Give all memory back, on all ranks; nothing may be copying any more."""
        self.opened.close()
        self.meeting.gather(None)  # nobody has this rank's memory open any more
        self.own.close()
