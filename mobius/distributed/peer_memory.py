"""Device memory into which neighbouring ranks copy: the basis of mailboxes and of the copy check."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from mobius.distributed.cuda_copies import CudaCopyEngine
from mobius.distributed.rendezvous import JsonValue, Rendezvous, parse_count, parse_values
from mobius.distributed.transport import edges_of
from mobius.hardware.streams import Event


@dataclass
class PeerMemory:
    """This rank's neighbours in the ring, and device memory that neighbours open in each other's processes.

    Methods with `gathered` are steps for `run_steps_together`: first `start`, then `reachable_targets`.
    """

    rendezvous: Rendezvous
    device: torch.device
    _: KW_ONLY
    make_engine: Callable[[torch.device], CudaCopyEngine] = CudaCopyEngine
    spreads_head: bool = False
    """Whether the ranks share the head; then the last rank has edges with all other ranks."""
    timeout_seconds: float
    """Maximum wait for an event, in seconds."""

    def __post_init__(self) -> None:
        edges = edges_of(self.rendezvous.num_ranks, spreads_head=self.spreads_head)
        self.incoming = [edge for edge in edges if edge.target == self.rendezvous.rank]
        self.outgoing = [edge for edge in edges if edge.source == self.rendezvous.rank]
        self.sources = [*dict.fromkeys(edge.source for edge in self.incoming)]
        self.targets = [*dict.fromkeys(edge.target for edge in self.outgoing)]
        self.engine: CudaCopyEngine
        self.own, self.opened = ExitStack(), ExitStack()

    def start(self, gathered: Sequence[Any]) -> int:
        """Create the engine; return its device index."""
        self.engine = self.make_engine(self.device)
        return self.engine.device_index

    def reachable_targets(self, gathered: Sequence[Any]) -> list[int]:
        """Return the targets whose devices this rank's device can access."""
        device_indices = parse_values(gathered, parse_count)
        return [target for target in self.targets if self.engine.can_access_peer(device_indices[target])]

    def make_memory(self, num_bytes: int) -> tuple[int, JsonValue]:
        """Allocate device memory into which a neighbour writes; return its address, and its handle as JSON."""
        address = self.engine.allocate(num_bytes)
        self.own.callback(self.engine.free, address)
        return address, self.engine.export(address).hex()

    def open_memory(self, handle: bytes) -> int:
        """Open a neighbour's memory; return its address in this process."""
        address = self.engine.open_exported(handle)
        self.opened.callback(self.engine.close_exported, address)
        return address

    def completes_in_time(self, event: Event) -> bool:
        """Return whether the event completes before the time limit; polls, so that this rank does not hang."""
        end = time.monotonic() + self.timeout_seconds
        while not event.is_completed():
            if time.monotonic() > end:
                return False
            time.sleep(0.0002)
        return True

    def pattern(self, rank: int, num_bytes: int, number: int = 0) -> Tensor:
        """Return uint8 [num_bytes] in which all words differ; patterns of other ranks and numbers also differ."""
        words = torch.arange(-(-num_bytes // 4), dtype=torch.int32, device=self.device)
        return words.mul_(2 * number + 1).add_(1 + rank).view(torch.uint8)[:num_bytes]

    def close(self) -> None:
        """Free all memory, on all ranks; no copy may be running."""
        self.opened.close()
        self.rendezvous.gather(None)  # afterwards, no other rank has this rank's memory open
        self.own.close()
