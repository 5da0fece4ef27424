"""Finds GPUs whose copies into each other's memory arrive with other contents, before training trusts them.

Some machines do that without an error: consumer cards, and boxes whose PCIe access control sends such copies astray.
Each rank writes patterns into its ring neighbours' GPUs as NCCL and mailboxes do, from process to process, and the
neighbour compares. What follows is the caller's business, and so are the copies (a `CopyEngine`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mobius.errors import TransportError
from mobius.memory.streams import Event
from mobius.messages.mailbox_setup import CopyEngine
from mobius.messages.mailboxes import CopyQueue
from mobius.messages.meeting import Meeting, Told, read_all, read_number, read_numbers, read_told, take_together
from mobius.messages.transport import ring_edges

logger = logging.getLogger(__name__)

SIZES = (4 * 2**10, 2**20, 64 * 2**20)
"""Bytes of the messages: one page, one chunk, and more than buffers on the way can hide."""
PATIENCE_SECONDS = 20.0
_FILLING = 0xA5


@dataclass(frozen=True)
class PeerVerdict:
    """What all ranks found together; the same on each of them."""

    checked: tuple[tuple[int, int], ...] = ()
    """Edges (source rank, target rank) over which every pattern was sent from GPU to GPU."""
    broken: tuple[tuple[int, int], ...] = ()
    """Those of them over which something arrived with other contents."""
    problem: str | None = None
    """Why nothing could be checked."""


def check_peer_copies(
    meeting: Meeting,
    make_engine: Callable[[], CopyEngine],
    *,
    device: torch.device,
    sizes: Sequence[int] = SIZES,
    patience: float = PATIENCE_SECONDS,
) -> PeerVerdict:
    """Send a message of each of `sizes` over every edge on which GPUs reach each other; collective.

    Takes up to four messages of GPU memory, and gives it back. Raises TransportError if a copy does not end.
    """
    return _Check(meeting, make_engine, device, sizes, patience).run()


def _read_handles(told: Any) -> dict[str, bytes]:
    return {source: bytes.fromhex(handle) for source, handle in told.items()}


def _read_edges(told: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    checked, broken = told
    return read_numbers(checked), read_numbers(broken)


class _Check:
    def __init__(
        self,
        meeting: Meeting,
        make_engine: Callable[[], CopyEngine],
        device: torch.device,
        sizes: Sequence[int],
        patience: float,
    ) -> None:
        self._meeting, self._make_engine, self._device = meeting, make_engine, device
        self._sizes, self._patience = sizes, patience
        edges = ring_edges(meeting.num_ranks)
        self._sources = [source for source, target in edges if target == meeting.rank]
        self._targets = [target for source, target in edges if source == meeting.rank]
        self._engine: CopyEngine
        self._queue: CopyQueue
        self._own, self._opened = ExitStack(), ExitStack()
        self._incoming: dict[int, int] = {}
        self._outgoing: dict[int, int] = {}
        self._broken: set[int] = set()

    def run(self) -> PeerVerdict:
        """Step by step, all ranks at once; what fails on one of them calls everything off on all."""
        steps: list[Callable[[list[Any]], Told]] = [self._start, self._reach, self._offer, self._accept]
        for number, size in enumerate(self._sizes):
            steps += [partial(step, number, size) for step in (self._overwrite, self._send, self._compare)]
        steps.append(lambda _: [sorted(self._incoming), sorted(self._broken)])
        outcome = take_together(self._meeting, steps)
        self._close()
        if outcome.problem is not None:
            return PeerVerdict(problem=outcome.problem)
        answers = read_all(outcome.answers, _read_edges)
        return PeerVerdict(
            checked=tuple((source, rank) for rank, (sources, _) in enumerate(answers) for source in sources),
            broken=tuple((source, rank) for rank, (_, sources) in enumerate(answers) for source in sources),
        )

    def _start(self, answers: Sequence[Any]) -> int:
        self._engine = self._make_engine()
        self._queue = self._engine.new_queue()
        return self._engine.device_index

    def _reach(self, answers: Sequence[Any]) -> Told:
        """The ranks whose devices this rank's device reaches."""
        device_indices = read_all(answers, read_number)
        return [target for target in self._targets if self._engine.reaches(device_indices[target])]

    def _offer(self, answers: Sequence[Any]) -> Told:
        """Make the memory that others write into; its handle for each source, by the source's number."""
        reached = read_all(answers, read_numbers)
        handles = {}
        for source in self._sources:
            if self._meeting.rank in reached[source]:
                address = self._engine.allocate(max(self._sizes))
                self._own.callback(self._engine.free, address)
                self._incoming[source] = address
                handles[str(source)] = self._engine.export(address).hex()
        return handles

    def _accept(self, answers: Sequence[Any]) -> None:
        """Open the memory that this rank writes into."""
        own = str(self._meeting.rank)
        for target in self._targets:
            handles = read_told(answers[target], _read_handles, by=target)
            if own in handles:
                self._outgoing[target] = self._engine.open_exported(handles[own])
                self._opened.callback(self._engine.close_exported, self._outgoing[target])

    def _overwrite(self, number: int, size: int, answers: Sequence[Any]) -> None:
        """Fill the memory that others write into, so that nothing old can pass for a message."""
        filling = torch.full((size,), _FILLING, dtype=torch.uint8, device=self._device)
        for address in self._incoming.values():
            self._copy(address, filling.data_ptr(), size)
        self._rest()

    def _send(self, number: int, size: int, answers: Sequence[Any]) -> None:
        """One message over every edge, all at once."""
        pattern = self._make_pattern(self._meeting.rank, number, size)
        for address in self._outgoing.values():
            self._copy(address, pattern.data_ptr(), size)
        self._rest()

    def _compare(self, number: int, size: int, answers: Sequence[Any]) -> None:
        for source, address in self._incoming.items():
            received = torch.full((size,), _FILLING, dtype=torch.uint8, device=self._device)
            self._copy(received.data_ptr(), address, size)
            self._rest()
            if not torch.equal(received, self._make_pattern(source, number, size)):  # sync: a few, before training
                self._broken.add(source)

    def _copy(self, target: int, source: int, num_bytes: int) -> None:
        self._queue.follow_compute()
        self._queue.copy(target, source, num_bytes)

    def _rest(self) -> None:
        """Wait for all copies; looks again and again, because one that never ends must not hold this rank up."""
        event: Event = self._queue.record()
        end = time.monotonic() + self._patience
        while not event.query():
            if time.monotonic() > end:
                raise TransportError(
                    f"rank {self._meeting.rank} stops: a copy from GPU to GPU did not end within {self._patience:g} s. "
                    "Set NCCL_P2P_DISABLE=1 in the environment, so that messages go through host memory."
                )
            time.sleep(0.0002)

    def _make_pattern(self, rank: int, number: int, size: int) -> Tensor:
        """uint8 [size]; every word is another one, and no two ranks' or messages' are the same."""
        words = torch.arange(-(-size // 4), dtype=torch.int32, device=self._device)
        return words.mul_(2 * number + 1).add_(1 + rank).view(torch.uint8)[:size]

    def _close(self) -> None:
        self._opened.close()
        self._meeting.gather(None)  # nobody has this rank's memory open any more
        self._own.close()
