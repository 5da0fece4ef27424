"""Messages by copy engines: a ring of mailboxes per directed edge, kept in order by two counters in shared memory.

The sender copies a message into the next mailbox chunk by chunk and counts the chunks that have arrived; the receiver
copies them out and counts the mailboxes that are free again. Both only enqueue: streams wait for counters, the host
waits for nothing, and no multiprocessor is occupied.

    sender's stream      freed >= i-K+1 ?  | copy into mailbox i mod K, chunk c | arrived = i*C+c+1 | ...
    receiver's stream                        arrived >= i*C+c+1 ? | copy out    | ... | freed = i+1

Counters are uint32 and go on over the whole run; comparisons are cyclic. Where mailboxes lie, and who makes the memory,
is mailbox_setup.py's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mobius.memory.streams import Event

_CYCLE = 2**32


class CopyQueue(Protocol):
    """An ordered queue of copies, waits and counters' writes; nothing here makes the host wait."""

    def follow_compute(self) -> None:
        """Begin what comes next only when the compute enqueued so far is done."""

    def wait_value(self, address: int, value: int) -> None:
        """Go on only when the uint32 at `address` is not before `value`, cyclically."""

    def write_value(self, address: int, value: int) -> None:
        """Write a uint32 when all before it is done and can be seen by everybody."""

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy between two addresses."""

    def record(self) -> Event:
        """The point behind all of the queue so far."""


@dataclass(frozen=True, slots=True)
class Ring:
    """One edge's mailboxes and counters as one of its ends sees them; both ends agree about the numbers."""

    message_bytes: int
    chunk_bytes: int
    mailboxes: tuple[int, ...]
    """Address of each; a few MiB of chunks let both copies of a message run at the same time, where both take long."""
    arrived: int
    """Address of the count of chunks that lie in mailboxes."""
    freed: int
    """Address of the count of messages that were copied out."""

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Offset and bytes of every chunk of a message."""
        starts = range(0, self.message_bytes, self.chunk_bytes)
        return tuple((start, min(self.chunk_bytes, self.message_bytes - start)) for start in starts)


class Outbox:
    """The sending end of an edge. Owns the number of the next message."""

    def __init__(self, ring: Ring, queue: CopyQueue, *, first: int = 0) -> None:
        """`first` numbers the first message; both counters must stand there."""
        self._ring, self._queue, self._chunks, self._next = ring, queue, ring.chunks, first

    def send(self, source: int) -> Event:
        """Send the message that compute has just made at `source`; the event says when it may be changed."""
        ring, queue, number = self._ring, self._queue, self._next
        self._next += 1
        mailbox = ring.mailboxes[number % len(ring.mailboxes)]
        queue.follow_compute()
        # For the first messages it waits for a number before zero, which is no wait.
        queue.wait_value(ring.freed, (number - len(ring.mailboxes) + 1) % _CYCLE)
        for index, (offset, num_bytes) in enumerate(self._chunks, start=number * len(self._chunks) + 1):
            queue.copy(mailbox + offset, source + offset, num_bytes)
            queue.write_value(ring.arrived, index % _CYCLE)
        return queue.record()


class Inbox:
    """The receiving end of an edge. Owns the number of the next message."""

    def __init__(self, ring: Ring, queue: CopyQueue, *, first: int = 0) -> None:
        """`first` numbers the first message; both counters must stand there."""
        self._ring, self._queue, self._chunks, self._next = ring, queue, ring.chunks, first

    def post(self, target: int) -> Event:
        """Receive the next message into `target`, where compute may still work; the event says when it is there."""
        ring, queue, number = self._ring, self._queue, self._next
        self._next += 1
        mailbox = ring.mailboxes[number % len(ring.mailboxes)]
        queue.follow_compute()
        for index, (offset, num_bytes) in enumerate(self._chunks, start=number * len(self._chunks) + 1):
            queue.wait_value(ring.arrived, index % _CYCLE)
            queue.copy(target + offset, mailbox + offset, num_bytes)
        queue.write_value(ring.freed, (number + 1) % _CYCLE)
        return queue.record()


@dataclass(frozen=True, slots=True)
class CopiedMessage:
    """A message under way; it fits where a process group's work does."""

    event: Event

    def wait(self) -> None:
        """Make the current stream wait for it."""
        self.event.wait()

    def is_completed(self) -> bool:
        """Whether it is through; nobody waits."""
        return self.event.query()


class Mailboxes:
    """This rank's ends of all its edges. All messages have one size."""

    def __init__(
        self,
        *,
        inboxes: Mapping[int, Inbox],
        outboxes: Mapping[int, Outbox],
        message_bytes: int,
        release: Callable[[], None],
    ) -> None:
        """`inboxes` by source rank, `outboxes` by target rank; `release` gives the memory back, on all ranks."""
        self._inboxes, self._outboxes, self._release = inboxes, outboxes, release
        self._message_bytes = message_bytes

    def post_receive(self, buffer: Tensor, source: int) -> CopiedMessage:
        """Announce the next message of `source`; the caller keeps `buffer` until it has waited for the message."""
        assert buffer.nbytes == self._message_bytes
        assert buffer.is_contiguous()
        return CopiedMessage(self._inboxes[source].post(buffer.data_ptr()))

    def send(self, tensor: Tensor, target: int) -> CopiedMessage:
        """Start sending; the caller keeps `tensor` until the message has left."""
        assert tensor.nbytes == self._message_bytes
        assert tensor.is_contiguous()
        return CopiedMessage(self._outboxes[target].send(tensor.data_ptr()))

    def close(self) -> None:
        """Give all memory back when every message has been received; collective over all ranks."""
        self._release()
