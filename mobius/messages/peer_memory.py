"""Device memory that neighbours in the ring copy into: what mailboxes and the check of copies both stand on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from mobius.memory.streams import Event
from mobius.messages.cuda_copies import CudaCopyEngine
from mobius.messages.rendezvous import JsonValue, Rendezvous, parse_count, parse_values
from mobius.messages.transport import ring_edges


@dataclass
class PeerMemory:
    """This rank's neighbours in the ring, and the memory that they and this rank hold open of each other.

    Methods that take `gathered` are steps for `run_steps_together`, in this order: `start`, `reachable_targets`.
    """

    rendezvous: Rendezvous
    device: torch.device
    _: KW_ONLY
    make_engine: Callable[[torch.device], CudaCopyEngine] = CudaCopyEngine
    timeout_seconds: float
    """Seconds for each event that is waited for."""

    def __post_init__(self) -> None:
        edges = ring_edges(self.rendezvous.num_ranks)
        self.sources = [source for source, target in edges if target == self.rendezvous.rank]
        self.targets = [target for source, target in edges if source == self.rendezvous.rank]
        self.engine: CudaCopyEngine
        self.own, self.opened = ExitStack(), ExitStack()

    def start(self, gathered: Sequence[Any]) -> int:
        """Make the engine; its device's number."""
        self.engine = self.make_engine(self.device)
        return self.engine.device_index

    def reachable_targets(self, gathered: Sequence[Any]) -> list[int]:
        """The targets whose devices this rank's device reaches."""
        device_indices = parse_values(gathered, parse_count)
        return [target for target in self.targets if self.engine.can_access_peer(device_indices[target])]

    def make_memory(self, num_bytes: int) -> tuple[int, JsonValue]:
        """Device memory for a neighbour to write into: its address here, and the handle as it is told."""
        address = self.engine.allocate(num_bytes)
        self.own.callback(self.engine.free, address)
        return address, self.engine.export(address).hex()

    def open_memory(self, handle: bytes) -> int:
        """Open what a neighbour made; its address here."""
        address = self.engine.open_exported(handle)
        self.opened.callback(self.engine.close_exported, address)
        return address

    def completes_in_time(self, event: Event) -> bool:
        """Whether the event comes within the patience; looks again and again, so that nothing holds this rank up."""
        end = time.monotonic() + self.timeout_seconds
        while not event.is_completed():
            if time.monotonic() > end:
                return False
            time.sleep(0.0002)
        return True

    def pattern(self, rank: int, num_bytes: int, number: int = 0) -> Tensor:
        """uint8 [num_bytes]; every word is another one, and no two ranks' or numbers' are the same."""
        words = torch.arange(-(-num_bytes // 4), dtype=torch.int32, device=self.device)
        return words.mul_(2 * number + 1).add_(1 + rank).view(torch.uint8)[:num_bytes]

    def close(self) -> None:
        """Give all memory back, on all ranks; nothing may be copying any more."""
        self.opened.close()
        self.rendezvous.gather(None)  # nobody has this rank's memory open any more
        self.own.close()
