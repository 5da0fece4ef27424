"""The transport between processes: one NCCL (or gloo) communicator per directed edge, gloo for host scalars.

Mailboxes carry the messages instead, where they are handed in and work. One communicator per edge, because
point-to-point operations of one communicator run in the order of issue: with one queue per rank, or per pair of ranks,
a looped schedule can wait in a circle.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from mobius.errors import TransportError, first_line
from mobius.memory.spans import NO_SPANS, Spans
from mobius.memory.streams import Event
from mobius.messages.mailboxes import Mailboxes
from mobius.messages.meeting import open_store
from mobius.messages.transport import ring_edges
from mobius.schedule.lanes import Lane

MEETING_TIMEOUT = timedelta(minutes=10)
MESSAGES_TIMEOUT = timedelta(hours=12)
"""Ranks wait for one another's loading, saving and disks, too. A dead rank is seen at once all the same, and one that
stands still is the watchdog's business.
"""
EXCHANGE_ELEMENTS = 2**24
"""Elements per message when two ranks exchange a large tensor: bounds the memory that the received parts take."""
MESSAGE_CTAS = 4
"""Multiprocessors that an NCCL message occupies. A receive that is posted ahead occupies them while it waits, which is
most of the time, and takes them from compute."""


def _edge_options(backend: str) -> dist.ProcessGroupNCCL.Options | None:
    """Options that give a message few multiprocessors, but at once, before the compute that is enqueued already."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = MESSAGE_CTAS
    return options


_Message: TypeAlias = dist.Work | Event
"""A message under way: `wait` makes the current stream (on a CPU: the host) wait for it, `is_completed` nobody."""


class DistributedTransport:
    """Owns the process groups of one rank of several, and the mailboxes if there are some. `close` ends them."""

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        device: torch.device,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        spans: Spans = NO_SPANS,
        mailboxes: Mailboxes | None = None,
        max_sends: int | None = None,
    ) -> None:
        """Create and warm all communicators; collective over all ranks.

        `shape` and `dtype` are those of every activation and activation gradient. `mailboxes` carry them instead of the
        communicators, where they can be opened. `max_sends` bounds the messages that are kept because they may not have
        left (limits.py); without it all that have not are kept.
        """
        self._spans, self._max_sends = spans, max_sends
        self.rank, self.num_ranks = rank, num_ranks
        self._device, self._shape, self._dtype = device, shape, dtype
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=open_store(rank, num_ranks),
            rank=rank,
            world_size=num_ranks,
            device_id=device if backend == "nccl" else None,
            timeout=MEETING_TIMEOUT,
        )
        self._scalars = dist.new_group(backend="gloo", timeout=MESSAGES_TIMEOUT)
        self._edges = {
            edge: dist.new_group(
                list(edge), backend=backend, timeout=MESSAGES_TIMEOUT, pg_options=_edge_options(backend)
            )
            for edge in ring_edges(num_ranks)
        }
        self._posted: defaultdict[int, deque[tuple[Tensor, _Message]]] = defaultdict(deque)
        self._sent: deque[tuple[Tensor, _Message]] = deque()
        # Every edge is used once, in one order: communicators connect at their first message, and not in a circle.
        token = torch.ones(8, device=device)
        for (source, target), group in self._edges.items():
            if rank == source:
                dist.send(token, target, group=group)
            elif rank == target:
                dist.recv(token, source, group=group)
        if backend == "nccl":
            torch.cuda.synchronize(device)
        self.barrier()
        self._mailboxes = mailboxes.open() if mailboxes is not None else None

    def post_receive(self, source: int) -> None:
        """Start receiving into a new buffer; it may begin once compute that is enqueued already is done."""
        buffer = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        if self._mailboxes is not None:
            work: _Message = self._mailboxes.post_receive(buffer, source)
        else:
            work = self._start(dist.irecv, buffer, source, self._edges[source, self.rank])
        self._spans.message(Lane.RECEIVE, source, work)
        self._posted[source].append((buffer, work))

    def receive(self, source: int) -> Tensor:
        buffer, work = self._posted[source].popleft()
        self._wait(work, source)
        return buffer

    def send(self, tensor: Tensor, target: int) -> None:
        """Start sending; the tensor is kept until the message has left."""
        tensor = tensor.contiguous()
        if self._mailboxes is not None:
            work: _Message = self._mailboxes.send(tensor, target)
        else:
            work = self._start(dist.isend, tensor, target, self._edges[self.rank, target])
        self._spans.message(Lane.SEND, target, work)
        while self._sent and self._sent[0][1].is_completed():
            self._sent.popleft()[1].wait()
        # The host is ahead of the GPU and sees none completed. There it does not wait here: compute does, for a message
        # that has left by then, and behind that wait its memory may be used again.
        while self._max_sends is not None and len(self._sent) >= self._max_sends:
            self._wait(self._sent.popleft()[1])
        self._sent.append((tensor, work))

    def finish_step(self) -> None:
        assert not any(self._posted.values()), "a posted receive was not used"
        while self._sent:
            self._wait(self._sent[0][1])
            self._sent.popleft()  # not before: its tensor is being read until then

    def bound_sends(self, max_sends: int) -> None:
        if self._max_sends is not None:
            self._max_sends = max_sends

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        summed = values.clone()
        with self._needing():
            dist.all_reduce(summed, group=self._scalars)
        return summed

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        """CPU tensors travel over gloo, GPU tensors over the edges between the two ranks."""
        received = torch.empty_like(tensor)
        is_host = tensor.device.type == "cpu"
        incoming = self._scalars if is_host else self._edges[peer, self.rank]
        outgoing = self._scalars if is_host else self._edges[self.rank, peer]
        for own, other in zip(
            tensor.view(-1).split(EXCHANGE_ELEMENTS), received.view(-1).split(EXCHANGE_ELEMENTS), strict=True
        ):
            works = [self._start(dist.irecv, other, peer, incoming), self._start(dist.isend, own, peer, outgoing)]
            for work in works:
                self._wait(work, peer)
        return received

    def barrier(self) -> None:
        self.sum_over_ranks(torch.zeros(1, dtype=torch.float64))

    def close(self) -> None:
        if self._mailboxes is not None:
            self._mailboxes.close()
        dist.destroy_process_group()

    def _start(self, operation: Callable[..., dist.Work | None], tensor: Tensor, peer: int, group: Any) -> dist.Work:
        with self._needing(peer):
            work = operation(tensor, peer, group=group)
        assert work is not None  # torch gives none to a rank outside of the group
        return work

    def _wait(self, work: _Message, peer: int | None = None) -> None:
        with self._needing(peer):
            work.wait()

    @contextmanager
    def _needing(self, peer: int | None = None) -> Iterator[None]:
        """Within it, torch's errors are told as the loss of `peer`, or of another rank that is not known."""
        try:
            yield
        except RuntimeError as error:
            who = "another rank" if peer is None else f"its neighbour rank {peer}"
            raise TransportError(
                f"rank {self.rank} stops: it lost {who}, whose own message (above or below) tells the cause. "
                f"What this rank saw: {first_line(error)}"
            ) from error
