"""Detects GPUs whose peer-to-peer copies arrive with wrong contents, before training uses them.

Such copies fail without an error on some consumer GPUs, and on hosts whose PCIe access control misroutes them. Each
rank writes patterns into the GPUs of its ring neighbours, from process to process, like NCCL and mailboxes. The
neighbours compare. A node with several pipelines is checked as one ring: the result applies to all pipelines, although
some pairs of GPUs in different pipelines are not tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mobius.distributed.cuda_copies import CudaQueue
from mobius.distributed.device_order import device_names
from mobius.distributed.peer_memory import PeerMemory
from mobius.distributed.rendezvous import JsonValue, parse_counts, parse_value, parse_values, run_steps_together
from mobius.errors import TransportError
from mobius.process.ranks import allows_peer_copies, forbid_peer_copies, visible_devices

logger = logging.getLogger(__name__)

MESSAGE_SIZES = (4 * 2**10, 2**20, 64 * 2**20)
"""Sizes of the messages in bytes: one page, 1 MiB, and a size that does not fit into buffers along the path."""
COPY_TIMEOUT_SECONDS = 20.0
_FILLING = 0xA5


@dataclass(frozen=True)
class PeerCheckResult:
    """Result of the check, which is the same on all ranks."""

    broken: tuple[tuple[int, int], ...] = ()
    """Edges (source rank, target rank) over which a message arrived with wrong contents."""
    problem: str | None = None
    """Reason why the check could not run."""


def _read_handles(handles: Any) -> dict[str, bytes]:
    return {source: bytes.fromhex(handle) for source, handle in handles.items()}


@dataclass(kw_only=True)
class PeerCheck(PeerMemory):
    """Check of the copies between GPUs that can access each other. Raises TransportError if a copy does not end."""

    timeout_seconds: float = COPY_TIMEOUT_SECONDS
    sizes: Sequence[int] = MESSAGE_SIZES

    def __post_init__(self) -> None:
        super().__post_init__()
        self._queue: CudaQueue
        self._incoming: dict[int, int] = {}
        self._outgoing: dict[int, int] = {}
        self._broken: set[int] = set()

    def disable_peer_copies_if_broken(self, order: Sequence[int]) -> None:
        """Try the copies, and disable them on all ranks if a message arrives with wrong contents; collective.

        Call it before NCCL starts, because NCCL reads this setting only once. If the user has disabled such copies,
        nothing is tried. `order[rank]` is the index of a rank's GPU.
        """
        if not allows_peer_copies():
            return
        verdict = self.run()
        if verdict.broken:
            forbid_peer_copies()
        if self.rendezvous.rank != 0:
            return
        if verdict.problem is not None:
            logger.info("copies from GPU to GPU were not checked: %s", verdict.problem)
        elif verdict.broken:
            names = device_names(visible_devices(), self.rendezvous.num_ranks)
            shown = [names[index] for index in order]
            logger.warning(
                "copies from %s arrive with wrong contents: all messages between GPUs go through host memory, as with "
                "NCCL_P2P_DISABLE=1",
                ", ".join(f"GPU {shown[source]} to GPU {shown[target]}" for source, target in verdict.broken),
            )

    def run(self) -> PeerCheckResult:
        """Send one message of each size over every edge; collective.

        The check uses GPU memory for up to four messages, and frees it. A problem on one rank cancels the check on all
        ranks.
        """
        steps: list[Callable[[list[Any]], JsonValue]] = [self.start, self.reachable_targets, self._offer, self._accept]
        for number, size in enumerate(self.sizes):
            steps += [partial(step, number, size) for step in (self._overwrite, self._send, self._compare)]
        steps.append(lambda _: sorted(self._broken))
        gathered, problem = run_steps_together(self.rendezvous, steps)
        self.close()
        if problem is not None:
            return PeerCheckResult(problem=problem)
        broken = parse_values(gathered, parse_counts)
        return PeerCheckResult(tuple((source, rank) for rank, sources in enumerate(broken) for source in sources))

    def _offer(self, gathered: Sequence[Any]) -> JsonValue:
        """Allocate the memory into which neighbours write; return a handle for each source, by the source's rank."""
        self._queue = self.engine.new_queue()
        reached = parse_values(gathered, parse_counts)
        handles = {}
        for source in self.sources:
            if self.rendezvous.rank in reached[source]:
                self._incoming[source], handles[str(source)] = self.make_memory(max(self.sizes))
        return handles

    def _accept(self, gathered: Sequence[Any]) -> None:
        """Open the memory into which this rank writes."""
        own = str(self.rendezvous.rank)
        for target in self.targets:
            handles = parse_value(gathered[target], _read_handles, by=target)
            if own in handles:
                self._outgoing[target] = self.open_memory(handles[own])

    def _overwrite(self, number: int, size: int, gathered: Sequence[Any]) -> None:
        """Overwrite the memory into which neighbours write, so that old contents cannot look like a message."""
        filling = torch.full((size,), _FILLING, dtype=torch.uint8, device=self.device)
        self._copy(self._incoming.values(), filling.data_ptr(), size)

    def _send(self, number: int, size: int, gathered: Sequence[Any]) -> None:
        """Send one message over every edge, all at the same time."""
        pattern = self.pattern(self.rendezvous.rank, size, number)
        self._copy(self._outgoing.values(), pattern.data_ptr(), size)

    def _compare(self, number: int, size: int, gathered: Sequence[Any]) -> None:
        for source, address in self._incoming.items():
            received = torch.full((size,), _FILLING, dtype=torch.uint8, device=self.device)
            self._copy([received.data_ptr()], address, size)
            if not torch.equal(received, self.pattern(source, size, number)):  # sync: a few, before training
                self._broken.add(source)

    def _copy(self, targets: Iterable[int], source: int, num_bytes: int) -> None:
        """Copy to each of the addresses in `targets`, and wait until all copies are done."""
        for target in targets:
            self._queue.follow_compute()
            self._queue.copy(target, source, num_bytes)
        if not self.completes_in_time(self._queue.record()):
            raise TransportError(
                f"rank {self.rendezvous.rank} stops: a copy from GPU to GPU did not end within "
                f"{self.timeout_seconds:g} s. "
                "Set NCCL_P2P_DISABLE=1 in the environment, so that messages go through host memory."
            )
