"""Checks the copies between two GPUs, which the first rank spoils as it is told.

torchrun --nproc_per_node 2 tests/harness/peer_worker.py nothing|"last byte"|"large messages"
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from mobius.distributed.cuda_copies import CudaCopyEngine, CudaQueue
from mobius.distributed.peer_check import MESSAGE_SIZES, PeerCheck
from mobius.distributed.rendezvous import join_run
from mobius.hardware.streams import Event
from mobius.process.ranks import Ranks


class SpoiltQueue(CudaQueue):
    """Another queue, but what goes to other GPUs does not all arrive."""

    def __init__(self, queue: CudaQueue, opened: set[int], spoiled: str) -> None:
        self._queue, self._opened, self._spoiled = queue, opened, spoiled

    def follow_compute(self) -> None:
        self._queue.follow_compute()

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        if target in self._opened:
            num_bytes -= self._spoiled == "last byte" or (
                self._spoiled == "large messages" and num_bytes == max(MESSAGE_SIZES)
            )
        self._queue.copy(target, source, num_bytes)

    def wait_value(self, address: int, value: int) -> None:
        self._queue.wait_value(address, value)

    def write_value(self, address: int, value: int) -> None:
        self._queue.write_value(address, value)

    def record(self) -> Event:
        return self._queue.record()


class SpoiltEngine(CudaCopyEngine):
    def __init__(self, device: torch.device, spoiled: str) -> None:
        super().__init__(device)
        self._spoiled = spoiled
        self._opened: set[int] = set()

    def new_queue(self) -> CudaQueue:
        return SpoiltQueue(super().new_queue(), self._opened, self._spoiled)

    def open_exported(self, handle: bytes) -> int:
        address = super().open_exported(handle)
        self._opened.add(address)
        return address


def main() -> None:
    ranks = Ranks.from_environment()
    spoiled = sys.argv[1] if ranks.is_first else "nothing"
    device = torch.device("cuda", ranks.local_rank)
    verdict = PeerCheck(join_run(ranks), device, make_engine=lambda device: SpoiltEngine(device, spoiled)).run()
    if verdict.problem is None and not torch.cuda.can_device_access_peer(device, 1 - ranks.local_rank):
        line = "these GPUs cannot reach each other"
    else:
        broken = "".join(f"{edge} " for edge in verdict.broken)
        line = f"rank {ranks.rank}: broken {broken}problem {verdict.problem}"
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
