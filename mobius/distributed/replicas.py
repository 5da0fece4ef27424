"""Gradient reduce-scatter and weight all-gather between the ranks of one pipeline position in all replicas.

Each replica sends its parts to all other replicas and receives theirs, over NCCL between GPUs and gloo between hosts.
Sums are computed here, in fp32 and in replica order, so that results are bit-reproducible and independent of NCCL's
algorithms; with `reduce_dtype` bf16, messages are rounded. The traffic equals that of NCCL's own reduce-scatter and
all-gather: (R-1)/R of a stage in each direction.

Why replicas cannot deadlock:

- NCCL matches operations of one communicator by order. So each use has its own communicator, with the same order on all
  replicas: reductions follow the schedule's order of finished gradients, gathers its order of loads
  (`engine/reductions.py`). Between reductions and gathers there is no fixed order, because a gather may start in the
  optimizer's thread.
- All replicas play one schedule. Its check plays a pipeline's actions one by one, in some order. Everything that a
  reduction or gather waits for on any replica, including messages of the pipeline, comes earlier in this order. So the
  first reduction or gather that is not done waits only for its counterparts, and nothing keeps replicas from reaching
  them.
- A waiting NCCL kernel occupies NCCL_MAX_CTAS multiprocessors. Four edges, the reduction and the gather may wait at
  once and occupy 24, fewer than such a GPU has, so compute kernels end on the rest. Their streams have separate
  hardware queues (`ranks.set_cuda_max_connections`), so none blocks another.
- The first use of a communicator connects it, which may wait for the device. This happens at start-up, one communicator
  after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mobius.distributed.shards import Segment, Shards, cut
from mobius.distributed.world import MESSAGES_TIMEOUT, nccl_options, translate_peer_errors
from mobius.limits import REDUCE_CHUNK_ELEMENTS, SHARD_ALIGNMENT
from mobius.process.ranks import Ranks

HOST_CHUNK_ELEMENTS = 2**22
"""Elements that a host receives from each replica at a time: 16 MiB."""
PACK_BYTES = 16
"""NCCL moves this many bytes at a time if addresses are multiples of this number, else single elements: bytes here."""


class _Connection:
    """Process group of one position, used by one thread at a time; all members make the same calls in one order."""

    def __init__(self, ranks: Ranks, backend: str, chunk_elements: int) -> None:
        """Create the group; collective over all processes, which create the groups of all positions.

        Tensors are sent in chunks of at most `chunk_elements`, which begin at addresses aligned for NCCL.
        """
        self.index, self._chunk = ranks.replica, max(chunk_elements // PACK_BYTES, 1) * PACK_BYTES
        self.others = [peer for peer in range(ranks.num_replicas) if peer != ranks.replica]
        """The indices of the other replicas."""
        for place in range(ranks.num_pipeline_ranks):
            peers = [*range(place, ranks.num_ranks, ranks.num_pipeline_ranks)]
            options = nccl_options(backend)
            group = dist.new_group(peers, backend=backend, timeout=MESSAGES_TIMEOUT, pg_options=options)
            if place == ranks.pipeline_rank:
                self._group, self._peers = group, peers

    def chunks(self, values: Tensor, segment: Segment) -> Iterable[list[Tensor]]:
        """Yield the parts of all members, chunk by chunk."""
        longest = max(part.stop - part.start for part in segment)
        for start in range(0, longest, self._chunk):
            yield [values[part][start : start + self._chunk] for part in segment]

    def in_order(self, own: Tensor, received: Mapping[int, Tensor]) -> list[Tensor]:
        """Return the tensors of all members, by replica."""
        return [own if peer == self.index else received[peer] for peer in range(len(self._peers))]

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Send and receive at once, by replica; empty tensors are skipped.

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
        """Send each member's part of `values` to all."""
        for segment in segments:
            for parts in self.chunks(values, segment):
                own = parts[self.index]
                self.exchange(dict.fromkeys(self.others, own), {peer: parts[peer] for peer in self.others})


class ReplicaGroup:
    """Ranks with the same stages in all replicas; all make the same calls in the same order.

    Tensors hold a stage's trained elements, [layout.num_trained] or more. Each use has its own process group.
    """

    def __init__(self, ranks: Ranks, device: torch.device, *, reduce_dtype: torch.dtype = torch.float32) -> None:
        """Connect; collective over all processes. Gradients travel between devices in `reduce_dtype`, fp32 or bf16."""
        self.index, self.num_replicas, self._reduce_dtype = ranks.replica, ranks.num_replicas, reduce_dtype
        backend, chunk_elements = "gloo", HOST_CHUNK_ELEMENTS
        if device.type == "cuda":
            backend, chunk_elements = "nccl", REDUCE_CHUNK_ELEMENTS // (self.num_replicas - 1)
        self._reducing = _Connection(ranks, backend, chunk_elements)
        self._gathering = _Connection(ranks, backend, chunk_elements)
        self._spreading = _Connection(ranks, "gloo", HOST_CHUNK_ELEMENTS)
        self._saving = _Connection(ranks, "gloo", HOST_CHUNK_ELEMENTS)
        length = self.num_replicas * SHARD_ALIGNMENT
        for connection in (self._reducing, self._gathering):  # the first use connects
            connection.all_gather(torch.ones(length, device=device), [cut(0, length, self.num_replicas)])
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def reduce_scatter(self, values: Tensor, segments: Sequence[Segment]) -> None:
        """Sum fp32 `values` on the compute device to their owners; elements of other owners become undefined.

        Blocks, or makes the current stream wait. Adds in the order of the replicas.
        """
        for segment in segments:
            for parts in self._reducing.chunks(values, segment):
                self._reduce_chunk(parts)

    def _reduce_chunk(self, parts: Sequence[Tensor]) -> None:
        """Sum this replica's part over all members; frees its temporary memory before the next chunk."""
        connection, own = self._reducing, parts[self.index]
        received = {peer: torch.empty_like(own, dtype=self._reduce_dtype) for peer in connection.others}
        # fp32 parts are sent without a copy.
        outgoing = {peer: parts[peer].to(self._reduce_dtype) for peer in connection.others}
        connection.exchange(outgoing, received)
        total, *rest = connection.in_order(own, received)
        total = total.float()  # no copy if it is fp32 already
        for other in rest:
            total += other
        if total is not own:
            own.copy_(total)

    def sum_over_replicas(self, own: Tensor) -> Tensor:
        """Return the sum of a short fp32 vector on the compute device; waits as `reduce_scatter` does."""
        connection = self._reducing
        received = {peer: torch.empty_like(own) for peer in connection.others}
        connection.exchange(dict.fromkeys(received, own), received)
        return torch.stack(connection.in_order(own, received)).sum(0)

    def all_gather(self, values: Tensor, segments: Sequence[Segment]) -> None:
        """Send each owner's part of `values` on the compute device to all; waits as `reduce_scatter` does."""
        self._reducing.all_gather(values, segments)

    def all_gather_for_load(self, values: Tensor, segments: Sequence[Segment]) -> None:
        """Do `all_gather` in a separate order, concurrent with the reductions; called by one thread at a time."""
        self._gathering.all_gather(values, segments)

    def all_gather_on_host(self, values: Tensor, segments: Sequence[Segment]) -> None:
        """Send each owner's part of `values` in host memory to all; blocks."""
        self._spreading.all_gather(values, segments)

    def gather_to_first(self, own: Tensor, shards: Shards) -> Tensor | None:
        """Return all parts [num_trained] on the host of the first replica, None on other replicas; blocks.

        `own` is this replica's part in host memory. Must not share a thread with the other methods.
        """
        saving = self._saving
        if self.index > 0:
            for values in own.split(HOST_CHUNK_ELEMENTS):
                saving.exchange({0: values}, {})
            return None
        whole = torch.empty(shards.num_trained, dtype=own.dtype)
        for part, place in shards.places():
            whole[part] = own[place]
        for peer in saving.others:
            parts = shards.of_owner(peer)
            lengths = [part.stop - part.start for part in parts]
            received = torch.empty(sum(lengths), dtype=own.dtype)
            for values in received.split(HOST_CHUNK_ELEMENTS):
                saving.exchange({}, {peer: values})
            for part, values in zip(parts, received.split(lengths), strict=True):
                whole[part] = values
        return whole
