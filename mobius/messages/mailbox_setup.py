"""Makes the mailboxes of all edges, tries each edge once, and has all ranks agree on whether they are used.

A message's mailboxes lie on the target's GPU where the source can write there, else in page-locked host memory that
both processes share. The counters are always in such memory, where the host can release what waits for them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mobius.errors import TransportError
from mobius.memory.streams import Event, record_current
from mobius.messages.mailboxes import CopyQueue, Inbox, Mailboxes, Outbox, Ring
from mobius.messages.meeting import Meeting, Told, read_all, read_number, read_numbers, read_told, take_together
from mobius.messages.shared_memory import SharedMemory, SharedName
from mobius.messages.transport import ring_edges

logger = logging.getLogger(__name__)

NUM_MAILBOXES = 2
"""Of each edge: one is filled while the other is emptied."""
MIN_CHUNK_BYTES = 4 * 2**20
CHUNKS_PER_MESSAGE = 8
"""Through host memory: the copy out of a mailbox runs beside the copy into it, an eighth behind."""
PATIENCE_SECONDS = 30.0
"""For the first message of every edge."""

_ARRIVED, _FREED, _COUNTERS_BYTES = 0, 128, 4096
_PAGE = 4096


class CopyEngine(Protocol):
    """One device's copies, and the memory that they work on. Raises RuntimeError where something is not allowed."""

    @property
    def device_index(self) -> int:
        """By which all ranks know the device."""

    def reaches(self, device_index: int) -> bool:
        """Whether this device can write into that one's memory."""

    def new_queue(self) -> CopyQueue:
        """A queue that nobody else uses."""

    def allocate(self, num_bytes: int) -> int:
        """Device memory that can be exported; its address."""

    def free(self, address: int) -> None:
        """Give `allocate`d memory back."""

    def export(self, address: int) -> bytes:
        """What another rank needs to open `allocate`d memory."""

    def open_exported(self, handle: bytes) -> int:
        """Map another device's memory; its address here."""

    def close_exported(self, address: int) -> None:
        """Undo `open_exported`."""

    def register(self, address: int, num_bytes: int) -> int:
        """Page-lock host memory; its address for the device."""

    def unregister(self, address: int) -> None:
        """Undo `register`, by the host's address."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a target tells the source of an edge."""

    shared: SharedName
    handle: bytes | None
    """Of the mailboxes on the target's GPU; None: they lie in the shared memory, behind the counters."""

    def told(self) -> Told:
        name = self.shared
        handle = None if self.handle is None else self.handle.hex()
        return [name.process, name.descriptor, name.num_bytes, handle]

    @classmethod
    def read(cls, told: Any) -> _Offer:
        *name, handle = told
        process, descriptor, num_bytes = read_numbers(name)
        return cls(SharedName(process, descriptor, num_bytes), None if handle is None else bytes.fromhex(handle))


def open_mailboxes(
    meeting: Meeting,
    make_engine: Callable[[], CopyEngine],
    *,
    device: torch.device,
    message_bytes: int,
    patience: float = PATIENCE_SECONDS,
) -> Mailboxes | None:
    """Mailboxes that have carried a message over every edge, or None on all ranks alike; collective.

    The first problem of any rank is logged as the reason. Takes 2 messages of memory per incoming edge for good, and
    while the edges are tried some messages more. Raises TransportError if the device does not come to rest.
    """
    return _Setup(meeting, make_engine, device, message_bytes, patience).run()


class _Setup:
    def __init__(
        self,
        meeting: Meeting,
        make_engine: Callable[[], CopyEngine],
        device: torch.device,
        message_bytes: int,
        patience: float,
    ) -> None:
        self._meeting, self._make_engine, self._device = meeting, make_engine, device
        self._message_bytes, self._patience = message_bytes, patience
        edges = ring_edges(meeting.num_ranks)
        self._sources = [source for source, target in edges if target == meeting.rank]
        self._targets = [target for source, target in edges if source == meeting.rank]
        self._engine: CopyEngine
        self._own, self._opened = ExitStack(), ExitStack()
        self._counters: list[tuple[SharedMemory, Ring]] = []
        self._queues: list[CopyQueue] = []
        self._inboxes: dict[int, Inbox] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._probe: Tensor
        self._received: dict[int, tuple[Tensor, Event]] = {}
        self._num_peer_edges = 0

    def run(self) -> Mailboxes | None:
        steps = (self._start, self._reach, self._offer, self._accept, self._post, self._send)
        problem = take_together(self._meeting, steps).problem
        if problem is not None:
            logger.info("messages travel over NCCL: %s", problem)
            self._give_up()
            return None
        self._received.clear()
        del self._probe
        num_edges = len(ring_edges(self._meeting.num_ranks))
        logger.info(
            "messages travel by copy engines: %d of %d edges from GPU to GPU, the others through host memory",
            self._num_peer_edges,
            num_edges,
        )
        return Mailboxes(
            inboxes=self._inboxes,
            outboxes=self._outboxes,
            message_bytes=self._message_bytes,
            release=self._close,
        )

    def _start(self, answers: Sequence[Any]) -> int:
        self._engine = self._make_engine()
        return self._engine.device_index

    def _reach(self, answers: Sequence[Any]) -> Told:
        """The ranks whose devices this rank's device reaches."""
        device_indices = read_all(answers, read_number)
        return [target for target in self._targets if self._engine.reaches(device_indices[target])]

    def _offer(self, answers: Sequence[Any]) -> Told:
        """Make the memory of the incoming edges; an offer for each source, by its number."""
        reached = read_all(answers, read_numbers)
        self._num_peer_edges = sum(len(targets) for targets in reached)
        offers = {}
        for source in self._sources:
            is_peer = self._meeting.rank in reached[source]
            shared = SharedMemory.create(self._shared_bytes(is_peer=is_peer))
            self._own.callback(shared.close)
            address, handle, mailboxes = self._register(shared, self._own), None, None
            if is_peer:
                mailboxes = self._engine.allocate(NUM_MAILBOXES * self._mailbox_bytes)
                self._own.callback(self._engine.free, mailboxes)
                handle = self._engine.export(mailboxes)
            self._inboxes[source] = Inbox(self._ring(shared, address, mailboxes), self._new_queue())
            offers[str(source)] = _Offer(shared.name, handle).told()
        return offers

    def _accept(self, answers: Sequence[Any]) -> None:
        """Open the memory of the outgoing edges, which their targets have made."""
        own = str(self._meeting.rank)
        for target in self._targets:
            offer = read_told(answers[target], lambda told: _Offer.read(told[own]), by=target)
            if offer.shared.num_bytes != self._shared_bytes(is_peer=offer.handle is not None):
                raise RuntimeError(f"rank {target} offers {offer.shared.num_bytes} bytes for messages of another size")
            shared = SharedMemory.open(offer.shared)
            self._opened.callback(shared.close)
            address, mailboxes = self._register(shared, self._opened), None
            if offer.handle is not None:
                mailboxes = self._engine.open_exported(offer.handle)
                self._opened.callback(self._engine.close_exported, mailboxes)
            self._outboxes[target] = Outbox(self._ring(shared, address, mailboxes), self._new_queue())

    def _post(self, answers: Sequence[Any]) -> None:
        """Post a receive on every edge before anybody sends, and see that compute goes on beside it."""
        # Memory is taken and kernels are loaded now: with a waiting receive either could wait for an idle device.
        self._probe = self._make_probe(self._meeting.rank)
        buffers = {source: torch.zeros_like(self._probe) for source in self._sources}
        torch.equal(self._make_probe(self._meeting.rank), self._probe)
        torch.zeros(8, device=self._device).add_(1)
        record_current(self._device).synchronize()  # sync: once, before training
        for source, buffer in buffers.items():
            self._received[source] = (buffer, self._inboxes[source].post(buffer.data_ptr()))
        torch.zeros(8, device=self._device).add_(1)
        if not self._comes(record_current(self._device)):
            raise RuntimeError("a receive that waits for its message holds up compute")

    def _send(self, answers: Sequence[Any]) -> None:
        """Send a message over every edge, and compare what came with what was sent."""
        sent = [(target, outbox.send(self._probe.data_ptr())) for target, outbox in self._outboxes.items()]
        for target, event in sent:
            if not self._comes(event):
                raise RuntimeError(f"a message to rank {target} did not leave within {self._patience:g} s")
        for source, (_, event) in self._received.items():
            if not self._comes(event):
                raise RuntimeError(f"no message from rank {source} within {self._patience:g} s")
        for source, (buffer, _) in self._received.items():
            if not torch.equal(buffer, self._make_probe(source)):
                raise RuntimeError(f"a message from rank {source} arrived with other contents")

    def _give_up(self) -> None:
        """Let posted receives pass, come to rest, and give everything back."""
        for shared, ring in self._counters:
            shared.write_word(_ARRIVED, len(ring.chunks))
        if not all(self._comes(queue.record()) for queue in self._queues):
            raise TransportError(
                f"rank {self._meeting.rank} stops: its GPU still waits for a message that was called off"
            )
        self._close()

    def _close(self) -> None:
        for queue in self._queues:
            queue.record().synchronize()  # sync: once, at the end
        self._opened.close()
        self._meeting.gather(None)  # nobody has this rank's memory open any more
        self._own.close()

    @property
    def _mailbox_bytes(self) -> int:
        return -(-self._message_bytes // _PAGE) * _PAGE

    def _shared_bytes(self, *, is_peer: bool) -> int:
        """Of an edge's memory on the host: the counters, and behind them mailboxes that are not on the target's GPU."""
        return _COUNTERS_BYTES + (0 if is_peer else NUM_MAILBOXES * self._mailbox_bytes)

    def _register(self, shared: SharedMemory, stack: ExitStack) -> int:
        address = self._engine.register(shared.address, shared.num_bytes)
        stack.callback(self._engine.unregister, shared.address)
        return address

    def _ring(self, shared: SharedMemory, address: int, mailboxes: int | None) -> Ring:
        """The edge's ring; `mailboxes` is where they are on the target's GPU, None in shared memory."""
        chunk = self._message_bytes
        if mailboxes is None:
            mailboxes = address + _COUNTERS_BYTES
            eighth = -(-self._message_bytes // (CHUNKS_PER_MESSAGE * _PAGE)) * _PAGE
            chunk = max(MIN_CHUNK_BYTES, eighth)
        ring = Ring(
            message_bytes=self._message_bytes,
            chunk_bytes=chunk,
            mailboxes=tuple(mailboxes + i * self._mailbox_bytes for i in range(NUM_MAILBOXES)),
            arrived=address + _ARRIVED,
            freed=address + _FREED,
        )
        self._counters.append((shared, ring))
        return ring

    def _new_queue(self) -> CopyQueue:
        queue = self._engine.new_queue()
        self._queues.append(queue)
        return queue

    def _make_probe(self, rank: int) -> Tensor:
        """uint8 [message_bytes]; every word is another one, and no two ranks' are the same."""
        num_words = -(-self._message_bytes // 4)
        words = torch.arange(num_words, dtype=torch.int32, device=self._device)
        return words.add_(1 + rank).view(torch.uint8)[: self._message_bytes]

    def _comes(self, event: Event) -> bool:
        """Whether the event comes within the patience; looks again and again."""
        end = time.monotonic() + self._patience
        while not event.query():
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True
