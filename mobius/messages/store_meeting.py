"""How ranks tell each other small things before they have process groups: through torchrun's key-value store.

What they tell is the callers' business. A store has no time-out that runs while nobody asks, so that long work may lie
between two meetings, unlike inside an NCCL process group.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from mobius.errors import TransportError
from mobius.messages.meeting import Told, told_text, told_value
from mobius.ranks import Ranks

TIMEOUT = timedelta(minutes=10)
"""For one answer of the slowest rank."""
_PREFIX = "mobius"


class StoreMeeting:
    """A `Meeting` (meeting.py) by way of a store; every rank makes the same calls in the same order."""

    def __init__(self, store: Store, *, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        # A process may meet more than once, and must not read what was told at an earlier meeting.
        meeting = store.add(f"{_PREFIX}/{rank}", 1)
        self._store, self._num_gathered = PrefixStore(f"{_PREFIX}/{meeting}", store), 0

    def gather(self, value: Told) -> list[Any]:
        number = self._num_gathered
        self._num_gathered += 1
        self._store.set(f"{number}/{self.rank}", told_text(value))
        values = []
        for rank in range(self.num_ranks):
            try:
                text = self._store.get(f"{number}/{rank}")
            except RuntimeError as error:
                raise TransportError(
                    f"rank {self.rank} stops: rank {rank} did not answer, and its own message tells why"
                ) from error
            values.append(told_value(text, by=rank))
        return values


def meet_at_store(ranks: Ranks) -> StoreMeeting:
    """Connect to the store that the launcher's MASTER_ADDR and MASTER_PORT name; raises TransportError.

    Process groups that are made later use the same store, under other keys.
    """
    try:
        store, _, _ = next(rendezvous("env://", ranks.rank, ranks.num_ranks, timeout=TIMEOUT))
    except (RuntimeError, ValueError) as error:
        raise TransportError(f"rank {ranks.rank} cannot meet the others, start with torchrun: {error}") from error
    store.set_timeout(TIMEOUT)
    return StoreMeeting(store, rank=ranks.rank, num_ranks=ranks.num_ranks)
