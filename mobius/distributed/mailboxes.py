"""Messages by copy engines: each edge has a ring of mailboxes on the receiver's GPU, and two counters.

The sender copies a message into the next mailbox and increments `arrived`. The receiver copies the message out and
increments `freed`. Both only enqueue work: streams wait for counters, the host never waits, and no multiprocessor is
occupied.

    sender's stream      freed >= i-K+1 ?  | copy into mailbox i mod K | arrived = i+1 | ...
    receiver's stream                        arrived >= i+1 ? | copy out | freed = i+1 | ...

Counters are uint32, count during the whole run, and are compared cyclically. The counters are in page-locked host
memory that both processes share, so that the host can release a waiting stream.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mobius.distributed.cuda_copies import CudaQueue
from mobius.distributed.peer_memory import PeerMemory
from mobius.distributed.rendezvous import JsonValue, parse_count, parse_value, run_steps_together
from mobius.errors import TransportError
from mobius.hardware.streams import Event, record_current
from mobius.limits import NUM_MAILBOXES
from mobius.schedule.action import Direction

logger = logging.getLogger(__name__)

FIRST_MESSAGE_TIMEOUT_SECONDS = 30.0
"""Time limit for the first message of every edge."""

_ARRIVED, _FREED, _COUNTERS_BYTES = 0, 128, 4096
_PAGE = 4096
_CYCLE = 2**32


@dataclass(slots=True)
class EdgeEnd:
    """One end of an edge: the sending end or the receiving end. Both ends map the same mailboxes and counters."""

    queue: CudaQueue
    message_bytes: int
    mailboxes: tuple[int, ...]
    """Address of each mailbox."""
    arrived: int
    """Address of the counter of messages that were copied into mailboxes."""
    freed: int
    """Address of the counter of messages that were copied out of mailboxes."""
    next_message: int = 0
    """Number of the next message, and initial value of both counters."""

    def send(self, source: int) -> Event:
        """Send the message that compute writes at `source`, which may be overwritten after the returned event."""
        mailbox = self.mailboxes[self.next_message % len(self.mailboxes)]
        self.next_message += 1
        self.queue.follow_compute()
        # For the first messages, the value is at most zero in cyclic order, so the stream does not wait.
        self.queue.wait_value(self.freed, (self.next_message - len(self.mailboxes)) % _CYCLE)
        self.queue.copy(mailbox, source, self.message_bytes)
        self.queue.write_value(self.arrived, self.next_message % _CYCLE)
        return self.queue.record()

    def post(self, target: int) -> Event:
        """Receive the next message at `target`, after compute enqueued so far; return an event after the message."""
        mailbox = self.mailboxes[self.next_message % len(self.mailboxes)]
        self.next_message += 1
        self.queue.follow_compute()
        self.queue.wait_value(self.arrived, self.next_message % _CYCLE)
        self.queue.copy(target, mailbox, self.message_bytes)
        self.queue.write_value(self.freed, self.next_message % _CYCLE)
        return self.queue.record()


class SharedMemory:
    """Host memory shared by two processes of one user, mapped here until `close`.

    It needs no file system, so it has no name and is not subject to the size limit of /dev/shm.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """Map the memory of `descriptor`, and own the descriptor from now on."""
        self.descriptor, self.num_bytes = descriptor, num_bytes
        self._mapping = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED)
        # Keep only the address: while a ctypes object on the buffer exists, the mapping cannot be closed.
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """Create zeroed memory; the first process that touches or page-locks a page allocates it, on its NUMA node."""
        descriptor = os.memfd_create("mobius", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
        return cls(descriptor, num_bytes)

    @classmethod
    def open(cls, process: int, descriptor: int, num_bytes: int) -> SharedMemory:
        """Map memory that another process has created and still has open as `descriptor`; raises OSError."""
        return cls(os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC), num_bytes)

    def write_word(self, offset: int, value: int) -> None:
        """Write a uint32 from the host."""
        ctypes.c_uint32.from_address(self.address + offset).value = value

    def close(self) -> None:
        """Unmap the memory; do not use the address afterwards."""
        self._mapping.close()
        os.close(self.descriptor)


def _read_offer(offers: Any, key: str) -> tuple[int, int, bytes]:
    """Return process and descriptor of an edge's counters, and the handle of its mailboxes."""
    process, descriptor, handle = offers[key]
    return parse_count(process), parse_count(descriptor), bytes.fromhex(handle)


@dataclass(kw_only=True)
class Mailboxes(PeerMemory):
    """The ends of all edges of this rank. It allocates nothing before `open`."""

    message_bytes: int
    """Size of every message in bytes."""
    timeout_seconds: float = FIRST_MESSAGE_TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        super().__post_init__()
        self._mailbox_bytes = -(-self.message_bytes // _PAGE) * _PAGE
        self._counters: list[SharedMemory] = []
        self._inboxes: dict[tuple[int, Direction], EdgeEnd] = {}
        self._outboxes: dict[tuple[int, Direction], EdgeEnd] = {}
        self._probe: Tensor
        self._received: list[tuple[int, Tensor, Event]] = []

    def post_receive(self, buffer: Tensor, source: int, direction: Direction) -> Event:
        """Start receiving from `source`; the caller keeps `buffer` until it has waited for the message."""
        assert buffer.nbytes == self.message_bytes
        assert buffer.is_contiguous()
        return self._inboxes[source, direction].post(buffer.data_ptr())

    def send(self, tensor: Tensor, target: int, direction: Direction) -> Event:
        """Start sending; the caller keeps `tensor` until the message has left."""
        assert tensor.nbytes == self.message_bytes
        assert tensor.is_contiguous()
        return self._outboxes[target, direction].send(tensor.data_ptr())

    def close(self) -> None:
        """Free all memory after every message has been received; collective on all ranks."""
        for event in self._ends_of_queues():
            event.synchronize()  # sync: once, at the end
        super().close()

    def open(self) -> Mailboxes | None:
        """Return these mailboxes after a test message over every edge, or None on all ranks; collective.

        Logs the problem of the lowest rank with a problem. Each incoming edge permanently uses memory of 2 messages,
        and some more during the test. Raises TransportError if the device remains blocked after a failure.
        """
        steps = (self.start, self.reachable_targets, self._offer, self._accept, self._post, self._send)
        _, problem = run_steps_together(self.rendezvous, steps)
        if problem is not None:
            self._call_off()
            logger.info("messages travel over NCCL: %s", problem)
            return None
        logger.debug("messages travel by copy engines from GPU to GPU")
        self._received.clear()
        del self._probe
        return self

    def reachable_targets(self, gathered: Sequence[Any]) -> list[int]:
        """Return all targets; raises RuntimeError if this rank's device cannot access the device of a target."""
        reached = super().reachable_targets(gathered)
        missing = [target for target in self.targets if target not in reached]
        if missing:
            raise RuntimeError(f"its GPU cannot write to the GPU of rank {missing[0]}")
        return reached

    def _offer(self, gathered: Sequence[Any]) -> JsonValue:
        """Create the memory of the incoming edges; return one offer per edge, by source and direction."""
        offers: dict[str, JsonValue] = {}
        for source, _, direction in self.incoming:
            shared = SharedMemory.create(_COUNTERS_BYTES)
            counters = self._register(shared, self.own)
            mailboxes, handle = self.make_memory(NUM_MAILBOXES * self._mailbox_bytes)
            self._inboxes[source, direction] = self._end(counters, mailboxes)
            offers[f"{source} {direction}"] = [os.getpid(), shared.descriptor, handle]
        return offers

    def _accept(self, gathered: Sequence[Any]) -> None:
        """Open the memory of the outgoing edges, which the targets have created."""
        for source, target, direction in self.outgoing:
            read = partial(_read_offer, key=f"{source} {direction}")
            process, descriptor, handle = parse_value(gathered[target], read, by=target)
            counters = self._register(SharedMemory.open(process, descriptor, _COUNTERS_BYTES), self.opened)
            self._outboxes[target, direction] = self._end(counters, self.open_memory(handle))

    def _register(self, shared: SharedMemory, held: ExitStack) -> int:
        """Map an edge's counters for the device until `held` is closed; return their device address."""
        self._counters.append(shared)
        held.callback(shared.close)
        address = self.engine.register(shared.address, _COUNTERS_BYTES)
        held.callback(self.engine.unregister, shared.address)
        return address

    def _post(self, gathered: Sequence[Any]) -> None:
        """Post a receive on every edge before any send, and check that compute continues meanwhile."""
        # Allocate memory and load kernels now: during a pending receive, both could wait for an idle device.
        self._probe = self.pattern(self.rendezvous.rank, self.message_bytes)
        buffers = [torch.zeros_like(self._probe) for _ in self._inboxes]
        torch.equal(self.pattern(self.rendezvous.rank, self.message_bytes), self._probe)
        torch.zeros(8, device=self.device).add_(1)
        record_current(self.device).synchronize()  # sync: once, before training
        for ((source, _), inbox), buffer in zip(self._inboxes.items(), buffers, strict=True):
            self._received.append((source, buffer, inbox.post(buffer.data_ptr())))
        torch.zeros(8, device=self.device).add_(1)
        if not self.completes_in_time(record_current(self.device)):
            raise RuntimeError("a receive that waits for its message blocks compute")

    def _send(self, gathered: Sequence[Any]) -> None:
        """Send a message over every edge, and compare the received contents with the sent contents."""
        sent = [(target, outbox.send(self._probe.data_ptr())) for (target, _), outbox in self._outboxes.items()]
        for target, event in sent:
            if not self.completes_in_time(event):
                raise RuntimeError(f"a message to rank {target} did not leave within {self.timeout_seconds:g} s")
        for source, _, event in self._received:
            if not self.completes_in_time(event):
                raise RuntimeError(f"no message from rank {source} within {self.timeout_seconds:g} s")
        for source, buffer, _ in self._received:
            if not torch.equal(buffer, self.pattern(source, self.message_bytes)):
                raise RuntimeError(f"a message from rank {source} arrived with wrong contents")

    def _call_off(self) -> None:
        """Release pending receives, wait for the queues, and free everything."""
        for shared in self._counters:
            shared.write_word(_ARRIVED, 1)
        if not all(map(self.completes_in_time, self._ends_of_queues())):
            raise TransportError(f"rank {self.rendezvous.rank} stops: its GPU still waits for a cancelled message")
        self.close()

    def _ends_of_queues(self) -> list[Event]:
        return [end.queue.record() for end in (*self._inboxes.values(), *self._outboxes.values())]

    def _end(self, counters: int, mailboxes: int) -> EdgeEnd:
        """Return an end of an edge; `counters` and `mailboxes` are device addresses."""
        addresses = tuple(mailboxes + number * self._mailbox_bytes for number in range(NUM_MAILBOXES))
        queue = self.engine.new_queue()
        return EdgeEnd(queue, self.message_bytes, addresses, arrived=counters + _ARRIVED, freed=counters + _FREED)
