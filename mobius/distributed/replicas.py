"""Gradient reduce-scatter and weight all-gather between the ranks at one pipeline position in all replicas.

Each replica sends parts to all other replicas and receives their parts, over NCCL between GPUs and gloo between hosts.
Sums are computed here, in fp32 and in the order of the replicas. So results are bit-reproducible and do not depend on
NCCL's algorithms; with `reduce_dtype` bf16, messages are rounded. NCCL's reduce-scatter and all-gather would send the
same number of bytes: (R-1)/R of a stage in each direction.

Why replicas cannot deadlock:

- NCCL matches operations of one communicator by order. So each use has a separate communicator, with the same order on
  all replicas: reductions are in the order in which the schedule finishes gradients, gathers in the order of its loads
  (`engine/reductions.py`). Reductions and gathers have no fixed order relative to each other, because a gather may
  start in the optimizer's thread.
- All replicas play one schedule. Its check plays a pipeline's actions one by one, in some order. Everything for which a
  reduction or gather waits on any replica, including messages of the pipeline, comes earlier in this order. So the
  first unfinished reduction or gather waits only for the same operation on other replicas, which all can reach it.
- A waiting NCCL kernel occupies NCCL_MAX_CTAS multiprocessors. Four edges, the reduction and the gather may wait at the
  same time. They occupy 24 multiprocessors, fewer than such a GPU has, so compute kernels can run on the others. The
  streams have separate hardware queues (`ranks.set_cuda_max_connections`), so no stream blocks another.
- A communicator connects at its first use, and then may wait for the device. This happens at start-up, one communicator
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
"""Number of fp32 elements (16 MiB) that a host receives from each replica at a time."""
PACK_BYTES = 16
"""NCCL moves 16 bytes at a time if addresses are multiples of 16, else single elements, which are bytes here."""


class _Connection:
    """Process group of one position, used by one thread at a time; members make the same calls in the same order."""

    def __init__(self, ranks: Ranks, backend: str, chunk_elements: int) -> None:
        """Create the group; collective on all processes, because each process creates the groups of all positions.

        Tensors are sent in chunks of at most `chunk_elements`, which begin at addresses aligned for NCCL.
        """
        self.index, self._chunk = ranks.replica, max(chunk_elements // PACK_BYTES, 1) * PACK_BYTES
        self.others = [peer for peer in range(ranks.num_replicas) if peer != ranks.replica]
        """Indices of the other replicas."""
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
        """Return this replica's tensor `own` and the `received` tensors, in the order of the replicas."""
        return [own if peer == self.index else received[peer] for peer in range(len(self._peers))]

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Send and receive at the same time; both maps are replica -> tensor, and empty tensors are skipped.

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
        """Send each member's part of `values` to all members."""
        for segment in segments:
            for parts in self.chunks(values, segment):
                own = parts[self.index]
                self.exchange(dict.fromkeys(self.others, own), {peer: parts[peer] for peer in self.others})


class ReplicaGroup:
    """Ranks with the same stages in all replicas; they make the same calls in the same order.

    Tensors hold a stage's trained elements, [layout.num_trained] or more. Each use has a separate process group.
    """

    def __init__(self, ranks: Ranks, device: torch.device, *, reduce_dtype: torch.dtype = torch.float32) -> None:
        """Connect; collective on all processes. Gradients are sent between devices in `reduce_dtype`, fp32 or bf16."""
        self.index, self.num_replicas, self._reduce_dtype = ranks.replica, ranks.num_replicas, reduce_dtype
        backend, chunk_elements = "gloo", HOST_CHUNK_ELEMENTS
        if device.type == "cuda":
            backend, chunk_elements = "nccl", REDUCE_CHUNK_ELEMENTS // (self.num_replicas - 1)
        self._reducing = _Connection(ranks, backend, chunk_elements)
        self._gathering = _Connection(ranks, backend, chunk_elements)
        self._spreading = _Connection(ranks, "gloo", HOST_CHUNK_ELEMENTS)
        self._saving = _Connection(ranks, "gloo", HOST_CHUNK_ELEMENTS)
        length = self.num_replicas * SHARD_ALIGNMENT
        for connection in (self._reducing, self._gathering):  # use each once now, because the first use connects
            connection.all_gather(torch.ones(length, device=device), [cut(0, length, self.num_replicas)])
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def reduce_scatter(self, values: Tensor, segments: Sequence[Segment]) -> None:
        """Sum fp32 `values` of all replicas, on the compute device, in replica order; each owner gets its sums.

        Elements of other owners become undefined. Blocks, or makes the current stream wait.
        """
        for segment in segments:
            for parts in self._reducing.chunks(values, segment):
                self._reduce_chunk(parts)

    def _reduce_chunk(self, parts: Sequence[Tensor]) -> None:
        """Sum this replica's part across all members; frees temporary memory before the next chunk."""
        connection, own = self._reducing, parts[self.index]
        received = {peer: torch.empty_like(own, dtype=self._reduce_dtype) for peer in connection.others}
        # fp32 parts are sent without a copy.
        outgoing = {peer: parts[peer].to(self._reduce_dtype) for peer in connection.others}
        connection.exchange(outgoing, received)
        total, *rest = connection.in_order(own, received)
        total = total.float()  # no copy if `total` is fp32
        for other in rest:
            total += other
        if total is not own:
            own.copy_(total)

    def sum_over_replicas(self, own: Tensor) -> Tensor:
        """Return the sum across replicas of a short fp32 vector on the compute device; waits like `reduce_scatter`."""
        connection = self._reducing
        received = {peer: torch.empty_like(own) for peer in connection.others}
        connection.exchange(dict.fromkeys(received, own), received)
        return torch.stack(connection.in_order(own, received)).sum(0)

    def all_gather(self, values: Tensor, segments: Sequence[Segment]) -> None:
        """Send each owner's part of `values`, on the compute device, to all replicas; waits like `reduce_scatter`."""
        self._reducing.all_gather(values, segments)

    def all_gather_for_load(self, values: Tensor, segments: Sequence[Segment]) -> None:
        """Run `all_gather` concurrently with reductions, in a separate order; called by one thread at a time."""
        self._gathering.all_gather(values, segments)

    def all_gather_on_host(self, values: Tensor, segments: Sequence[Segment]) -> None:
        """Send each owner's part of `values`, in host memory, to all replicas; blocks."""
        self._spreading.all_gather(values, segments)

    def gather_to_first(self, own: Tensor, shards: Shards) -> Tensor | None:
        """Return all parts [num_trained] on the host of the first replica, or None on other replicas; blocks.

        `own` is this replica's part in host memory. Call it in another thread than the other methods.
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
