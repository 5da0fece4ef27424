"""Sums of gradients to their owners, and weights from them, between ranks of one place in different replicas.

On GPUs NCCL does both; on hosts messages of gloo, added up in the order of the replicas, so that results repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mobius.memory.shares import Replicas, Segment, Shares
from mobius.messages.world import MESSAGES_TIMEOUT, World, needing_others

CHUNK_ELEMENTS = 2**22
"""Elements that a host sends or receives at a time: 16 MiB from each replica."""


def meet_replicas(world: World, *, index: int, num_replicas: int, device: torch.device) -> Replicas:
    """This rank's counterparts; collective over all processes, which make `num_replicas` pipelines."""
    num_places = world.num_ranks // num_replicas

    def groups(backend: str) -> list[Any]:
        """A group for each place; every process makes the groups of all, in one order."""
        return [
            dist.new_group([*range(place, world.num_ranks, num_places)], backend=backend, timeout=MESSAGES_TIMEOUT)
            for place in range(num_places)
        ]

    place = world.rank % num_places
    peers = [*range(place, world.num_ranks, num_places)]
    host, saving = (_HostGroup(groups("gloo")[place], index, peers) for _ in range(2))
    if device.type != "cuda":
        return DistributedReplicas(_HostGroup(groups("gloo")[place], index, peers), host, saving)
    return DistributedReplicas(_DeviceGroup(groups("nccl")[place], index, peers), host, saving)


class _Group:
    """A process group of one place, and torch's numbers of its members."""

    def __init__(self, group: Any, index: int, peers: Sequence[int]) -> None:
        self.group, self.index, self.peers = group, index, peers

    @property
    def num_replicas(self) -> int:
        return len(self.peers)

    def needing(self) -> Any:
        return needing_others(self.peers[self.index])


class _HostGroup(_Group):
    """Members exchange messages, as every step needs all of them; each sum is taken in the order of replicas."""

    def reduce(self, values: Tensor, segments: Sequence[Segment]) -> None:
        for segment in segments:
            for parts in self._chunks(values, segment):
                own = parts[self.index]
                received = {peer: torch.empty_like(own) for peer in self._others() if own.numel()}
                self._exchange({peer: parts[peer] for peer in self._others()}, received)
                if own.numel():
                    ordered = [own if peer == self.index else received[peer] for peer in range(self.num_replicas)]
                    total = ordered[0] + ordered[1]
                    for other in ordered[2:]:
                        total += other
                    own.copy_(total)

    def total(self, value: Tensor) -> Tensor:
        own = value.reshape(1)
        received = {peer: torch.empty_like(own) for peer in self._others()}
        self._exchange(dict.fromkeys(received, own), received)
        ordered = [own if peer == self.index else received[peer] for peer in range(self.num_replicas)]
        return torch.stack(ordered).sum()

    def spread(self, values: Tensor, segments: Sequence[Segment]) -> None:
        for segment in segments:
            for parts in self._chunks(values, segment):
                own = parts[self.index]
                self._exchange(dict.fromkeys(self._others(), own), {peer: parts[peer] for peer in self._others()})

    def collect(self, own: Tensor, shares: Shares) -> Tensor | None:
        if self.index > 0:
            for start in range(0, own.numel(), CHUNK_ELEMENTS):
                self._exchange({0: own[start : start + CHUNK_ELEMENTS]}, {})
            return None
        whole = torch.empty(shares.num_trained, dtype=own.dtype)
        for part, place in shares.places():
            whole[part] = own[place]
        for peer in self._others():
            parts = shares.of_owner(peer)
            received = torch.empty(sum(part.stop - part.start for part in parts), dtype=own.dtype)
            for start in range(0, received.numel(), CHUNK_ELEMENTS):
                self._exchange({}, {peer: received[start : start + CHUNK_ELEMENTS]})
            for part, values in zip(parts, received.split([part.stop - part.start for part in parts]), strict=True):
                whole[part] = values
        return whole

    def _others(self) -> list[int]:
        return [peer for peer in range(self.num_replicas) if peer != self.index]

    def _chunks(self, values: Tensor, segment: Segment) -> list[list[Tensor]]:
        """Parts of all members, so many elements of each at a time."""
        longest = max(part.stop - part.start for part in segment)
        return [
            [values[part][start : start + CHUNK_ELEMENTS] for part in segment]
            for start in range(0, longest, CHUNK_ELEMENTS)
        ]

    def _exchange(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        """Send and receive at once; empty tensors do not travel."""

        def start(operation: Callable[..., dist.Work | None], tensor: Tensor, peer: int) -> dist.Work:
            work = operation(tensor.view(torch.uint8), self.peers[peer], group=self.group)
            assert work is not None  # torch gives none to a rank outside of the group
            return work

        with self.needing():
            works = [start(dist.irecv, tensor, peer) for peer, tensor in incoming.items() if tensor.numel()]
            works += [start(dist.isend, tensor, peer) for peer, tensor in outgoing.items() if tensor.numel()]
            for work in works:
                work.wait()


class _DeviceGroup(_Group):
    """Members are GPUs; NCCL adds in an order that follows from the machines and the length."""

    def reduce(self, values: Tensor, segments: Sequence[Segment]) -> None:
        with self.needing():
            for segment in segments:
                if _is_even(segment):
                    whole = values[segment[0].start : segment[-1].stop]
                    dist.reduce_scatter_tensor(values[segment[self.index]], whole, group=self.group)
                    continue
                for owner, part in enumerate(segment):
                    if part.stop > part.start:
                        dist.reduce(values[part], self.peers[owner], group=self.group)

    def total(self, value: Tensor) -> Tensor:
        summed = value.clone()
        with self.needing():
            dist.all_reduce(summed, group=self.group)
        return summed

    def spread(self, values: Tensor, segments: Sequence[Segment]) -> None:
        with self.needing():
            for segment in segments:
                if _is_even(segment):
                    whole = values[segment[0].start : segment[-1].stop]
                    dist.all_gather_into_tensor(whole, values[segment[self.index]], group=self.group)
                    continue
                for owner, part in enumerate(segment):
                    if part.stop > part.start:
                        dist.broadcast(values[part], self.peers[owner], group=self.group)


class DistributedReplicas:
    """Replicas over process groups: one for each of the threads that use them."""

    def __init__(self, device: _HostGroup | _DeviceGroup, host: _HostGroup, saving: _HostGroup) -> None:
        self._device, self._host, self._saving = device, host, saving
        self.index, self.num_replicas = host.index, host.num_replicas

    def reduce(self, values: Tensor, segments: Sequence[Segment]) -> None:
        self._device.reduce(values, segments)

    def total(self, value: Tensor) -> Tensor:
        return self._device.total(value)

    def spread(self, values: Tensor, segments: Sequence[Segment]) -> None:
        self._device.spread(values, segments)

    def spread_on_host(self, values: Tensor, segments: Sequence[Segment]) -> None:
        self._host.spread(values, segments)

    def collect(self, own: Tensor, shares: Shares) -> Tensor | None:
        return self._saving.collect(own, shares)


def _is_even(segment: Segment) -> bool:
    """Whether all parts of a segment are equally long, and not empty."""
    lengths = {part.stop - part.start for part in segment}
    return len(lengths) == 1 and 0 not in lengths
