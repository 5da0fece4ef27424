"""Sums of gradients to their owners, and weights from them, between ranks of one place in different replicas.

Each replica sends every other one its part and takes theirs, over NCCL between GPUs and over gloo between hosts. Sums
are added up here, in fp32 and in the order of replicas, so that results repeat to the bit and no algorithm of NCCL's
has a say in them; in `reduce_dtype` bf16 what travels is rounded. As many bytes travel as in NCCL's own reduce-scatter
and all-gather: (R - 1)/R of a stage, each way.

Why no replicas wait for each other in a circle:

- NCCL pairs what is enqueued to one communicator by its order. So each use has its own, in an order that is the same
  on all replicas: reductions follow the order in which the schedule seals stages, gathers that in which it loads them
  (`memory/sharding/ordered_tasks.py`). Between the two there is no such order: a gather may begin in the optimizer's
  thread.
- All replicas play one schedule. Take the order in which its check plays the actions of a pipeline one by one. All that
  a reduction or a gather waits for on any replica, messages of the pipeline too, comes before it there. So the first
  one that is not done waits only for counterparts, and nothing keeps these from reaching it.
- A kernel of NCCL that waits occupies NCCL_MAX_CTAS multiprocessors. Those of four edges, the reduction and the gather,
  which may be there at once, take 24 of them, fewer than a GPU of this kind has, and kernels of compute end by
  themselves. Their streams have queues of their own (`ranks.set_cuda_max_connections`): none stands behind another.
- A first use connects, which may wait for the device. It is here, at the meeting, one connection after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mobius.limits import REDUCE_CHUNK_ELEMENTS, SHARD_ALIGNMENT
from mobius.memory.shards import ReplicaGroup, Segment, Shards, cut
from mobius.messages.world import MESSAGES_TIMEOUT, World, nccl_options, translate_peer_errors

HOST_CHUNK_ELEMENTS = 2**22
"""Elements that a host receives from each replica at a time: 16 MiB."""
PACK_BYTES = 16
"""NCCL moves so many bytes at a time between addresses that are multiples of it, and else byte by byte, which is what
an element is to it here.
"""


def create_replica_group(
    world: World,
    *,
    index: int,
    num_replicas: int,
    device: torch.device,
    reduce_dtype: torch.dtype = torch.float32,
) -> ReplicaGroup:
    """This rank's counterparts; collective over all processes, which make `num_replicas` pipelines.

    Gradients travel between GPUs, or what computes instead, in `reduce_dtype`, which is fp32 or bf16.
    """
    num_pipeline_ranks = world.num_ranks // num_replicas
    place = world.rank % num_pipeline_ranks
    places = [[*range(each, world.num_ranks, num_pipeline_ranks)] for each in range(num_pipeline_ranks)]

    def connection(backend: str, chunk_elements: int) -> _Connection:
        """One of this place's; every process makes those of all places, in one order (as in distributed.py)."""
        groups = [
            dist.new_group(peers, backend=backend, timeout=MESSAGES_TIMEOUT, pg_options=nccl_options(backend))
            for peers in places
        ]
        return _Connection(groups[place], index, places[place], chunk_elements=chunk_elements)

    hosts = partial(connection, "gloo", HOST_CHUNK_ELEMENTS)
    devices = hosts
    if device.type == "cuda":
        devices = partial(connection, "nccl", REDUCE_CHUNK_ELEMENTS // (num_replicas - 1))
    replicas = DistributedReplicaGroup(devices(), devices(), hosts(), hosts(), reduce_dtype=reduce_dtype)
    replicas.connect(device)
    return replicas


class _Connection:
    """A process group of one place, used by one thread at a time; all members make the same calls in one order."""

    def __init__(self, group: Any, index: int, peers: Sequence[int], *, chunk_elements: int) -> None:
        """`peers` are torch's numbers of the members, by replica; `index` is this one's replica.

        Tensors travel in parts of at most `chunk_elements`, which begin where the tensor's address lets NCCL be fast.
        """
        self._group, self.index, self._peers = group, index, peers
        self._chunk = max(chunk_elements // PACK_BYTES, 1) * PACK_BYTES

    @property
    def num_replicas(self) -> int:
        """Members."""
        return len(self._peers)

    def others(self) -> list[int]:
        """The other replicas."""
        return [peer for peer in range(self.num_replicas) if peer != self.index]

    def chunks(self, values: Tensor, segment: Segment) -> Iterable[list[Tensor]]:
        """Parts of all members, so many elements of each at a time."""
        longest = max(part.stop - part.start for part in segment)
        for start in range(0, longest, self._chunk):
            yield [values[part][start : start + self._chunk] for part in segment]

    def in_order(self, own: Tensor, received: Mapping[int, Tensor]) -> list[Tensor]:
        """Tensors of all members, by replica."""
        return [own if peer == self.index else received[peer] for peer in range(self.num_replicas)]

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Send and receive at once, by replica; empty tensors do not travel.

        Blocks, or makes the current stream wait.
        """

        def operations(operation: Any, tensors: Mapping[int, Tensor]) -> list[dist.P2POp]:
            return [
                dist.P2POp(operation, tensor.view(torch.uint8), self._peers[peer], self._group)
                for peer, tensor in tensors.items()
                if tensor.numel()
            ]

        both = operations(dist.irecv, incoming) + operations(dist.isend, outgoing)
        if not both:
            return
        with translate_peer_errors(self._peers[self.index]):
            for work in dist.batch_isend_irecv(both):
                work.wait()

    def all_gather(self, values: Tensor, segments: Sequence[Segment]) -> None:
        """Give each member's part of `values` to all."""
        for segment in segments:
            for parts in self.chunks(values, segment):
                others, own = self.others(), parts[self.index]
                self.exchange(dict.fromkeys(others, own), {peer: parts[peer] for peer in others})


class DistributedReplicaGroup:
    """Replicas over process groups: one for each use, each of which has its own order."""

    def __init__(
        self,
        reducing: _Connection,
        gathering: _Connection,
        spreading: _Connection,
        saving: _Connection,
        *,
        reduce_dtype: torch.dtype,
    ) -> None:
        """The first two are between devices, the others between hosts."""
        self._reducing, self._gathering, self._spreading, self._saving = reducing, gathering, spreading, saving
        self._reduce_dtype = reduce_dtype
        self.index, self.num_replicas = reducing.index, reducing.num_replicas

    def connect(self, device: torch.device) -> None:
        """Use each connection between devices once; collective."""
        length = self.num_replicas * SHARD_ALIGNMENT
        for connection in (self._reducing, self._gathering):
            connection.all_gather(torch.ones(length, device=device), [cut(0, length, self.num_replicas)])
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def reduce_scatter(self, values: Tensor, segments: Sequence[Segment]) -> None:
        for segment in segments:
            for parts in self._reducing.chunks(values, segment):
                self._reduce_chunk(parts)

    def _reduce_chunk(self, parts: Sequence[Tensor]) -> None:
        """Sum the own one of all members' `parts`; what it takes for that is free behind it, before the next one."""
        connection = self._reducing
        own = parts[connection.index]
        like = partial(torch.empty_like, own, dtype=self._reduce_dtype)
        received = {peer: like() for peer in connection.others()}
        # fp32 parts leave from where they are.
        outgoing = {peer: parts[peer].to(self._reduce_dtype) for peer in connection.others()}
        connection.exchange(outgoing, received)
        total, *rest = connection.in_order(own, received)
        total = total.float()  # the same tensor in fp32, be it the own part or a received one
        for other in rest:
            total += other
        if total is not own:
            own.copy_(total)

    def sum_over_replicas(self, value: Tensor) -> Tensor:
        connection, own = self._reducing, value.reshape(1)
        received = {peer: torch.empty_like(own) for peer in connection.others()}
        connection.exchange(dict.fromkeys(received, own), received)
        return torch.stack(connection.in_order(own, received)).sum()

    def all_gather(self, values: Tensor, segments: Sequence[Segment]) -> None:
        self._reducing.all_gather(values, segments)

    def all_gather_for_load(self, values: Tensor, segments: Sequence[Segment]) -> None:
        self._gathering.all_gather(values, segments)

    def all_gather_on_host(self, values: Tensor, segments: Sequence[Segment]) -> None:
        self._spreading.all_gather(values, segments)

    def gather_to_first(self, own: Tensor, shards: Shards) -> Tensor | None:
        saving = self._saving
        if self.index > 0:
            for values in own.split(HOST_CHUNK_ELEMENTS):
                saving.exchange({0: values}, {})
            return None
        whole = torch.empty(shards.num_trained, dtype=own.dtype)
        for part, place in shards.places():
            whole[part] = own[place]
        for peer in saving.others():
            parts = shards.of_owner(peer)
            lengths = [part.stop - part.start for part in parts]
            received = torch.empty(sum(lengths), dtype=own.dtype)
            for values in received.split(HOST_CHUNK_ELEMENTS):
                saving.exchange({}, {peer: values})
            for part, values in zip(parts, received.split(lengths), strict=True):
                whole[part] = values
        return whole
