"""Replicas of pipelines as rank-threads of one process: boards in place of process groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

import torch
from harness.local_transport import TIMEOUT_SECONDS, LocalHub, LocalTransport, run_threads
from torch import Tensor

from mobius.distributed.shards import Segment, Shards
from mobius.errors import TransportError

T = TypeVar("T")


class Board:
    """A meeting of the members of a place, where each sees what the others have brought."""

    def __init__(self, num_members: int) -> None:
        self._brought: list[Tensor] = [torch.empty(0)] * num_members
        self.meeting = threading.Barrier(num_members)

    def show(self, index: int, values: Tensor) -> list[Tensor]:
        """Copies of what all members have brought, in their order."""
        self._brought[index] = values
        self._meet()
        seen = [each.clone() for each in self._brought]
        self._meet()
        return seen

    def _meet(self) -> None:
        try:
            self.meeting.wait(TIMEOUT_SECONDS)
        except threading.BrokenBarrierError as error:
            raise TransportError("a replica's thread failed") from error


class LocalReplicas:
    """One rank-thread's counterparts."""

    def __init__(self, index: int, boards: Sequence[Board], num_replicas: int) -> None:
        self.index, self.num_replicas = index, num_replicas
        self._device, self._gathers, self._host, self._saving = boards

    def reduce_scatter(self, values: Tensor, segments: Sequence[Segment]) -> None:
        seen = self._device.show(self.index, values)
        values.fill_(torch.nan)  # what others own is not to be read
        for segment in segments:
            own = segment[self.index]
            values[own] = torch.stack([each[own] for each in seen]).sum(0)

    def sum_over_replicas(self, value: Tensor) -> Tensor:
        return torch.stack(self._device.show(self.index, value)).sum()

    def all_gather(self, values: Tensor, segments: Sequence[Segment]) -> None:
        self._take_all(self._device, values, segments)

    def all_gather_for_load(self, values: Tensor, segments: Sequence[Segment]) -> None:
        self._take_all(self._gathers, values, segments)

    def all_gather_on_host(self, values: Tensor, segments: Sequence[Segment]) -> None:
        self._take_all(self._host, values, segments)

    def gather_to_first(self, own: Tensor, shards: Shards) -> Tensor | None:
        seen = self._saving.show(self.index, own)
        whole = torch.empty(shards.num_trained, dtype=own.dtype)
        for owner, values in enumerate(seen):
            parts = shards.of_owner(owner)
            for part, value in zip(parts, values.split([part.stop - part.start for part in parts]), strict=True):
                whole[part] = value
        return None if self.index else whole

    def _take_all(self, board: Board, values: Tensor, segments: Sequence[Segment]) -> None:
        for owner, seen in enumerate(board.show(self.index, values)):
            for segment in segments:
                values[segment[owner]] = seen[segment[owner]]


def run_replica_threads(
    num_replicas: int, num_pipeline_ranks: int, work: Callable[[int, LocalTransport], T]
) -> list[T]:
    """Run `work(rank of all, transport)` in one thread per rank; results by rank, the first error is raised."""
    world = LocalHub(num_replicas * num_pipeline_ranks)
    pipelines = [LocalHub(num_pipeline_ranks) for _ in range(num_replicas)]
    boards = [[Board(num_replicas) for _ in range(4)] for _ in range(num_pipeline_ranks)]

    def run(rank: int) -> T:
        replica, place = divmod(rank, num_pipeline_ranks)
        transport = pipelines[replica].transport(place)
        if num_replicas > 1:
            transport.all_ranks = world.transport(rank)
            transport.replicas = LocalReplicas(replica, boards[place], num_replicas)
        return work(rank, transport)

    def stop() -> None:
        for hub in (world, *pipelines):
            hub.has_failed.set()
            hub.meeting.abort()
        for board in chain(*boards):
            board.meeting.abort()

    return run_threads(num_replicas * num_pipeline_ranks, run, stop)
