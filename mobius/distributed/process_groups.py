"""Transport between processes: one NCCL (or gloo) communicator per edge, gloo for host scalars.

If mailboxes are passed in and work, they carry the messages instead. Each edge has a separate communicator, because a
communicator runs point-to-point operations in the order in which they are issued: with one queue per rank, or per pair
of ranks, a schedule could deadlock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from mobius.distributed.mailboxes import Mailboxes
from mobius.distributed.replicas import ReplicaGroup
from mobius.distributed.transport import Edge, MessageFormat, RankGroup, edges_of
from mobius.distributed.world import MESSAGES_TIMEOUT, World, nccl_options, sum_over_group, translate_peer_errors
from mobius.hardware.spans import NO_SPANS, Spans
from mobius.hardware.streams import Event
from mobius.process.ranks import Ranks
from mobius.schedule.action import Direction
from mobius.schedule.lanes import Lane

EXCHANGE_ELEMENTS = 2**24
"""Elements per message when two ranks exchange a large tensor; this limits the memory of received parts."""

_Message: TypeAlias = dist.Work | Event
"""A message in flight: `wait` makes the current stream (on a CPU, the host) wait for the message."""


class DistributedTransport:
    """Process groups and perhaps mailboxes of one rank in a pipeline of several ranks; `close` ends them."""

    def __init__(
        self,
        world: World,
        ranks: Ranks,
        *,
        device: torch.device,
        message_format: MessageFormat,
        spans: Spans = NO_SPANS,
        mailboxes: Mailboxes | None = None,
        max_pending_sends: int | None = None,
        replicas: ReplicaGroup | None = None,
        spreads_head: bool = False,
    ) -> None:
        """Create and warm up all communicators; collective on all ranks of all replicas.

        `mailboxes`, if they can be opened, carry activations and their gradients instead of the communicators.
        `max_pending_sends` limits the sent tensors that are held because they may still be in use (limits.py); None
        means no limit. `spreads_head` is as in `edges_of`.
        """
        self._spans, self._max_sends = spans, max_pending_sends
        self.rank, self.num_ranks = ranks.pipeline_rank, ranks.num_pipeline_ranks
        self._device, self._format = device, message_format
        self._world, self.replicas = world, replicas
        self.all_ranks: RankGroup = world
        self._first = ranks.replica * self.num_ranks
        """Global rank of the pipeline's first rank."""
        pipelines = [range(first, first + self.num_ranks) for first in range(0, world.num_ranks, self.num_ranks)]
        # Every process creates the groups of all pipelines in the same order. On GPUs, ranks outside a group (also a
        # gloo group) join a split of the global NCCL communicator. So each rank must be outside equally many groups.
        self._scalars = world.scalars
        if ranks.num_replicas > 1:
            groups = [dist.new_group([*each], backend="gloo", timeout=MESSAGES_TIMEOUT) for each in pipelines]
            self._scalars = groups[ranks.replica]
        edges = edges_of(self.num_ranks, spreads_head=spreads_head)
        self._edges = [_open_edges(each.start, edges, world.backend) for each in pipelines][ranks.replica]
        self._posted: defaultdict[tuple[int, Direction], deque[tuple[Tensor, _Message]]] = defaultdict(deque)
        self._sent, self._kept = (deque[tuple[Tensor, _Message]]() for _ in range(2))
        # All ranks use every edge once in the same order: a communicator connects at its first message, and connecting
        # must not wait in a cycle.
        token = torch.ones(8, device=device)
        for (source, target, _), group in self._edges.items():
            if self.rank == source:
                dist.send(token, self._first + target, group=group)
            elif self.rank == target:
                dist.recv(token, self._first + source, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.barrier()
        self._mailboxes = mailboxes.open() if mailboxes is not None else None

    def post_receive(self, source: int, direction: Direction) -> None:
        """Start receiving into a new buffer, after the compute that is enqueued so far."""
        shape, dtype = self._format
        buffer = torch.empty(shape, dtype=dtype, device=self._device)
        if self._mailboxes is not None:
            work: _Message = self._mailboxes.post_receive(buffer, source, direction)
        else:
            work = self._start(dist.irecv, buffer, source, self._edges[Edge(source, self.rank, direction)])
        self._spans.message(Lane.RECEIVE, source, direction, work)
        self._posted[source, direction].append((buffer, work))

    def receive(self, source: int, direction: Direction) -> Tensor:
        buffer, work = self._posted[source, direction].popleft()
        self._wait(work, source)
        return buffer

    def send(self, tensor: Tensor, target: int, direction: Direction, *, is_kept: bool = False) -> None:
        """Start sending; hold the tensor until the message has left, or, if `is_kept`, until the end of the step."""
        tensor = tensor.contiguous()
        if self._mailboxes is not None:
            work: _Message = self._mailboxes.send(tensor, target, direction)
        else:
            work = self._start(dist.isend, tensor, target, self._edges[Edge(self.rank, target, direction)])
        self._spans.message(Lane.SEND, target, direction, work)
        if is_kept:
            self._kept.append((tensor, work))
            return
        while self._sent and self._sent[0][1].is_completed():
            self._sent.popleft()[1].wait()
        # The host is ahead of the GPU and never sees a completed send. So compute waits for an old message, which has
        # left by then. After this wait, the memory of the message may be reused.
        while self._max_sends is not None and len(self._sent) >= self._max_sends:
            self._wait(self._sent.popleft()[1])
        self._sent.append((tensor, work))

    def finish_step(self) -> None:
        assert not any(self._posted.values()), "a posted receive was not used"
        for sent in (self._sent, self._kept):
            while sent:
                self._wait(sent[0][1])
                sent.popleft()  # only after the wait, because the message reads the tensor until then

    def limit_pending_sends(self, max_pending_sends: int) -> None:
        if self._max_sends is not None:
            self._max_sends = max_pending_sends

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        return sum_over_group(values, self._scalars, self._world.rank)

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        """Exchange CPU tensors over gloo, and GPU tensors over one edge in each direction between the two ranks."""
        received = torch.empty_like(tensor)
        is_host = tensor.device.type == "cpu"
        groups = {edge[:2]: group for edge, group in self._edges.items()}
        incoming = self._scalars if is_host else groups[peer, self.rank]
        outgoing = self._scalars if is_host else groups[self.rank, peer]
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
        self._world.close()

    def _start(self, operation: Callable[..., dist.Work | None], tensor: Tensor, peer: int, group: Any) -> dist.Work:
        with self._translate_peer_errors(peer):
            work = operation(tensor, self._first + peer, group=group)
        assert work is not None  # torch returns None only to ranks outside the group
        return work

    def _wait(self, work: _Message, peer: int | None = None) -> None:
        with self._translate_peer_errors(peer):
            work.wait()

    def _translate_peer_errors(self, peer: int | None = None) -> AbstractContextManager[None]:
        return translate_peer_errors(self._world.rank, None if peer is None else self._first + peer)


def _open_edges(first: int, edges: Sequence[Edge], backend: str) -> dict[Edge, Any]:
    """Return communicators of `edges` in the pipeline that starts at global rank `first`; all processes create them."""
    return {
        edge: dist.new_group(
            [first + edge.source, first + edge.target],
            backend=backend,
            timeout=MESSAGES_TIMEOUT,
            pg_options=nccl_options(backend),
        )
        for edge in edges
    }
