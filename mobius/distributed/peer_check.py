"""Detects GPUs whose peer-to-peer copies arrive with wrong contents, before training uses them.

On some machines such copies fail without an error: consumer GPUs, and hosts whose PCIe access control misroutes them.
Each rank writes patterns into its ring neighbours' GPUs as NCCL and mailboxes do, from process to process, and the
neighbour compares. A node with several pipelines is one ring: the result applies to all of them, although not every
pair of GPUs of different pipelines is tried.
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
"""Bytes of the messages: one page, 1 MiB, and more than buffers on the way can hide."""
COPY_TIMEOUT_SECONDS = 20.0
_FILLING = 0xA5


@dataclass(frozen=True)
class PeerCheckResult:
    """The result that all ranks found together; the same on each of them."""

    broken: tuple[tuple[int, int], ...] = ()
    """Edges (source rank, target rank) over which a message arrived with wrong contents."""
    problem: str | None = None
    """Reason why nothing could be checked."""


def _read_handles(handles: Any) -> dict[str, bytes]:
    return {source: bytes.fromhex(handle) for source, handle in handles.items()}


@dataclass(kw_only=True)
class PeerCheck(PeerMemory):
    """One check of the copies between GPUs that reach each other; it raises TransportError if a copy does not end."""

    timeout_seconds: float = COPY_TIMEOUT_SECONDS
    sizes: Sequence[int] = MESSAGE_SIZES

    def __post_init__(self) -> None:
        super().__post_init__()
        self._queue: CudaQueue
        self._incoming: dict[int, int] = {}
        self._outgoing: dict[int, int] = {}
        self._broken: set[int] = set()

    def disable_peer_copies_if_broken(self, order: Sequence[int]) -> None:
        """Try the copies, and switch them off on all ranks if any arrives wrong; collective.

        Call it before NCCL starts, which reads the switch once. Nothing is tried if the user has switched them off.
        `order[rank]` is the index of a rank's GPU.
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
                "copies from %s arrive with other contents than were sent: all messages between GPUs go through host "
                "memory, as with NCCL_P2P_DISABLE=1",
                ", ".join(f"GPU {shown[source]} to GPU {shown[target]}" for source, target in verdict.broken),
            )

    def run(self) -> PeerCheckResult:
        """Send a message of each of the sizes over every edge; collective.

        Takes up to four messages of GPU memory, and gives it back. A problem on one rank cancels the check on all.
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
        """Allocate the memory that neighbours write into; return its handle for each source, by the source's number."""
        self._queue = self.engine.new_queue()
        reached = parse_values(gathered, parse_counts)
        handles = {}
        for source in self.sources:
            if self.rendezvous.rank in reached[source]:
                self._incoming[source], handles[str(source)] = self.make_memory(max(self.sizes))
        return handles

    def _accept(self, gathered: Sequence[Any]) -> None:
        """Open the memory that this rank writes into."""
        own = str(self.rendezvous.rank)
        for target in self.targets:
            handles = parse_value(gathered[target], _read_handles, by=target)
            if own in handles:
                self._outgoing[target] = self.open_memory(handles[own])

    def _overwrite(self, number: int, size: int, gathered: Sequence[Any]) -> None:
        """Overwrite the memory that neighbours write into, so that no old contents can pass for a message."""
        filling = torch.full((size,), _FILLING, dtype=torch.uint8, device=self.device)
        self._copy(self._incoming.values(), filling.data_ptr(), size)

    def _send(self, number: int, size: int, gathered: Sequence[Any]) -> None:
        """Send one message over every edge, all at once."""
        pattern = self.pattern(self.rendezvous.rank, size, number)
        self._copy(self._outgoing.values(), pattern.data_ptr(), size)

    def _compare(self, number: int, size: int, gathered: Sequence[Any]) -> None:
        for source, address in self._incoming.items():
            received = torch.full((size,), _FILLING, dtype=torch.uint8, device=self.device)
            self._copy([received.data_ptr()], address, size)
            if not torch.equal(received, self.pattern(source, size, number)):  # sync: a few, before training
                self._broken.add(source)

    def _copy(self, targets: Iterable[int], source: int, num_bytes: int) -> None:
        """Copy to each of the addresses, and wait until that is done."""
        for target in targets:
            self._queue.follow_compute()
            self._queue.copy(target, source, num_bytes)
        if not self.completes_in_time(self._queue.record()):
            raise TransportError(
                f"rank {self.rendezvous.rank} stops: a copy from GPU to GPU did not end within "
                f"{self.timeout_seconds:g} s. "
                "Set NCCL_P2P_DISABLE=1 in the environment, so that messages go through host memory."
            )
