"""Messages by copy engines: a ring of mailboxes per directed edge, on the target's GPU, kept in order by two counters.

The sender copies a message into the next mailbox and counts it as arrived; the receiver copies it out and counts the
mailbox as free again. Both only enqueue: streams wait for counters, the host waits for nothing, and no multiprocessor
is occupied.

    sender's stream      freed >= i-K+1 ?  | copy into mailbox i mod K | arrived = i+1 | ...
    receiver's stream                        arrived >= i+1 ? | copy out | freed = i+1 | ...

Counters are uint32 and go on over the whole run; comparisons are cyclic. They lie in page-locked host memory that both
processes share, where the host can release what waits for them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mobius.errors import TransportError
from mobius.limits import NUM_MAILBOXES
from mobius.memory.streams import Event, record_current
from mobius.messages.cuda_copies import CudaQueue
from mobius.messages.peer_memory import PeerMemory
from mobius.messages.rendezvous import JsonValue, parse_count, parse_value, run_steps_together
from mobius.messages.shared_memory import SharedMemory

logger = logging.getLogger(__name__)

FIRST_MESSAGE_TIMEOUT_SECONDS = 30.0
"""Time that the first message of every edge may take."""

_ARRIVED, _FREED, _COUNTERS_BYTES = 0, 128, 4096
_PAGE = 4096
_CYCLE = 2**32


@dataclass(frozen=True, slots=True)
class Ring:
    """One edge's mailboxes and counters as one of its ends sees them; both ends agree about the numbers."""

    message_bytes: int
    mailboxes: tuple[int, ...]
    """Address of each."""
    arrived: int
    """Address of the count of messages that were copied into mailboxes."""
    freed: int
    """Address of the count of messages that were copied out."""


@dataclass(slots=True)
class Outbox:
    """The sending end of an edge."""

    ring: Ring
    queue: CudaQueue
    next_message: int = 0
    """Number of the next message; both counters stand there at first."""

    def send(self, source: int) -> Event:
        """Send the message that compute has just made at `source`; the event says when it may be changed."""
        ring, queue, number = self.ring, self.queue, self.next_message
        self.next_message += 1
        queue.follow_compute()
        # For the first messages it waits for a number before zero, which is no wait.
        queue.wait_value(ring.freed, (number - len(ring.mailboxes) + 1) % _CYCLE)
        queue.copy(ring.mailboxes[number % len(ring.mailboxes)], source, ring.message_bytes)
        queue.write_value(ring.arrived, (number + 1) % _CYCLE)
        return queue.record()


@dataclass(slots=True)
class Inbox:
    """The receiving end of an edge."""

    ring: Ring
    queue: CudaQueue
    next_message: int = 0
    """Number of the next message; both counters stand there at first."""

    def post(self, target: int) -> Event:
        """Receive the next message into `target`, where compute may still work; the event says when it is there."""
        ring, queue, number = self.ring, self.queue, self.next_message
        self.next_message += 1
        queue.follow_compute()
        queue.wait_value(ring.arrived, (number + 1) % _CYCLE)
        queue.copy(target, ring.mailboxes[number % len(ring.mailboxes)], ring.message_bytes)
        queue.write_value(ring.freed, (number + 1) % _CYCLE)
        return queue.record()


def _read_offer(told: Any) -> tuple[int, int, bytes]:
    """Process and descriptor of an edge's counters, and the handle of its mailboxes."""
    process, descriptor, handle = told
    return parse_count(process), parse_count(descriptor), bytes.fromhex(handle)


@dataclass(kw_only=True)
class Mailboxes(PeerMemory):
    """This rank's ends of all its edges; nothing is taken before `open`."""

    message_bytes: int
    """Size of all messages."""
    timeout_seconds: float = FIRST_MESSAGE_TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        super().__post_init__()
        self._mailbox_bytes = -(-self.message_bytes // _PAGE) * _PAGE
        self._counters: list[SharedMemory] = []
        self._inboxes: dict[int, Inbox] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._probe: Tensor
        self._received: dict[int, tuple[Tensor, Event]] = {}

    def post_receive(self, buffer: Tensor, source: int) -> Event:
        """Announce the next message of `source`; the caller keeps `buffer` until it has waited for the message."""
        assert buffer.nbytes == self.message_bytes
        assert buffer.is_contiguous()
        return self._inboxes[source].post(buffer.data_ptr())

    def send(self, tensor: Tensor, target: int) -> Event:
        """Start sending; the caller keeps `tensor` until the message has left."""
        assert tensor.nbytes == self.message_bytes
        assert tensor.is_contiguous()
        return self._outboxes[target].send(tensor.data_ptr())

    def close(self) -> None:
        """Give all memory back when every message has been received; collective over all ranks."""
        for event in self._ends_of_queues():
            event.synchronize()  # sync: once, at the end
        super().close()

    def open(self) -> Mailboxes | None:
        """These mailboxes when they have carried a message over every edge, or None on all ranks alike; collective.

        The first problem of any rank is logged as the reason. Takes 2 messages of memory per incoming edge for good,
        and while the edges are tried some messages more. Raises TransportError if the device does not come to rest.
        """
        steps = (self.start, self.reachable_targets, self._offer, self._accept, self._post, self._send)
        problem = run_steps_together(self.rendezvous, steps).problem
        if problem is not None:
            self._call_off()
            logger.info("messages travel over NCCL: %s", problem)
            return None
        logger.debug("messages travel by copy engines from GPU to GPU")
        self._received.clear()
        del self._probe
        return self

    def reachable_targets(self, gathered: Sequence[Any]) -> list[int]:
        """All targets: one that the device does not reach is a problem."""
        reached = super().reachable_targets(gathered)
        missing = [target for target in self.targets if target not in reached]
        if missing:
            raise RuntimeError(f"its GPU cannot write into that of rank {missing[0]}")
        return reached

    def _offer(self, gathered: Sequence[Any]) -> JsonValue:
        """Make the memory of the incoming edges; an offer for each source, by its number."""
        offers: dict[str, JsonValue] = {}
        for source in self.sources:
            shared = SharedMemory.create(_COUNTERS_BYTES)
            counters = self._register(shared, self.own)
            mailboxes, handle = self.make_memory(NUM_MAILBOXES * self._mailbox_bytes)
            self._inboxes[source] = Inbox(self._ring(counters, mailboxes), self.engine.new_queue())
            offers[str(source)] = [os.getpid(), shared.descriptor, handle]
        return offers

    def _accept(self, gathered: Sequence[Any]) -> None:
        """Open the memory of the outgoing edges, which their targets have made."""
        own = str(self.rendezvous.rank)
        for target in self.targets:
            process, descriptor, handle = parse_value(gathered[target], lambda told: _read_offer(told[own]), by=target)
            counters = self._register(SharedMemory.open(process, descriptor, _COUNTERS_BYTES), self.opened)
            self._outboxes[target] = Outbox(self._ring(counters, self.open_memory(handle)), self.engine.new_queue())

    def _register(self, shared: SharedMemory, held: ExitStack) -> int:
        """Let the device use an edge's counters until `held` is closed; their address for it."""
        self._counters.append(shared)
        held.callback(shared.close)
        address = self.engine.register(shared.address, _COUNTERS_BYTES)
        held.callback(self.engine.unregister, shared.address)
        return address

    def _post(self, gathered: Sequence[Any]) -> None:
        """Post a receive on every edge before anybody sends, and see that compute goes on beside it."""
        # Memory is taken and kernels are loaded now: with a waiting receive either could wait for an idle device.
        self._probe = self.pattern(self.rendezvous.rank, self.message_bytes)
        buffers = {source: torch.zeros_like(self._probe) for source in self.sources}
        torch.equal(self.pattern(self.rendezvous.rank, self.message_bytes), self._probe)
        torch.zeros(8, device=self.device).add_(1)
        record_current(self.device).synchronize()  # sync: once, before training
        for source, buffer in buffers.items():
            self._received[source] = (buffer, self._inboxes[source].post(buffer.data_ptr()))
        torch.zeros(8, device=self.device).add_(1)
        if not self.completes_in_time(record_current(self.device)):
            raise RuntimeError("a receive that waits for its message holds up compute")

    def _send(self, gathered: Sequence[Any]) -> None:
        """Send a message over every edge, and compare what came with what was sent."""
        sent = [(target, outbox.send(self._probe.data_ptr())) for target, outbox in self._outboxes.items()]
        for target, event in sent:
            if not self.completes_in_time(event):
                raise RuntimeError(f"a message to rank {target} did not leave within {self.timeout_seconds:g} s")
        for source, (_, event) in self._received.items():
            if not self.completes_in_time(event):
                raise RuntimeError(f"no message from rank {source} within {self.timeout_seconds:g} s")
        for source, (buffer, _) in self._received.items():
            if not torch.equal(buffer, self.pattern(source, self.message_bytes)):
                raise RuntimeError(f"a message from rank {source} arrived with other contents")

    def _call_off(self) -> None:
        """Let posted receives pass, come to rest, and give everything back."""
        for shared in self._counters:
            shared.write_word(_ARRIVED, 1)
        if not all(map(self.completes_in_time, self._ends_of_queues())):
            raise TransportError(
                f"rank {self.rendezvous.rank} stops: its GPU still waits for a message that was called off"
            )
        self.close()

    def _ends_of_queues(self) -> list[Event]:
        ends: list[Inbox | Outbox] = [*self._inboxes.values(), *self._outboxes.values()]
        return [end.queue.record() for end in ends]

    def _ring(self, counters: int, mailboxes: int) -> Ring:
        """The edge's ring; `counters` and `mailboxes` are the device's addresses of both."""
        return Ring(
            message_bytes=self.message_bytes,
            mailboxes=tuple(mailboxes + i * self._mailbox_bytes for i in range(NUM_MAILBOXES)),
            arrived=counters + _ARRIVED,
            freed=counters + _FREED,
        )
