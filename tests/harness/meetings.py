"""Several ranks of a meeting, in threads that share a store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import HashStore

from mobius.distributed.rendezvous import Rendezvous
from mobius.errors import MobiusError

T = TypeVar("T")


def together(work: Callable[[int, Rendezvous], T], num_ranks: int = 3) -> list[T | BaseException]:
    """Everybody's result, or error."""
    store, results = HashStore(), dict[int, T | BaseException]()
    store.set_timeout(timedelta(seconds=60))

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, Rendezvous(store, rank=rank, num_ranks=num_ranks))
        except MobiusError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(num_ranks)]
