"""All processes of a run: creates torch's process groups, and sums small numbers across all processes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from mobius.distributed.rendezvous import TIMEOUT, open_store
from mobius.errors import TransportError, first_line
from mobius.process.ranks import Ranks

MESSAGES_TIMEOUT = timedelta(hours=12)
"""Time limit of messages: long, because a rank also waits while another rank loads, saves or uses disks. A dead rank is
noticed at once; the watchdog finds a rank that hangs."""
NCCL_MAX_CTAS = 4
"""Multiprocessors per NCCL message. A posted receive occupies them while it waits, which is most of the time. Compute
cannot use them meanwhile."""


class World:
    """torch's default process group and a gloo group for host scalars; `close` ends all groups."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        """Connect to all other processes; collective. Raises TransportError."""
        self.rank, self.num_ranks = ranks.rank, ranks.num_ranks
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        store = open_store(ranks)
        # A process may connect more than once, and must not read addresses of an earlier connection.
        store = PrefixStore(f"world/{store.add(f'world/{ranks.rank}', 1)}", store)
        try:
            dist.init_process_group(
                self.backend,
                store=store,
                rank=ranks.rank,
                world_size=ranks.num_ranks,
                device_id=device if self.backend == "nccl" else None,
                timeout=TIMEOUT,
            )
            self.scalars = dist.new_group(backend="gloo", timeout=MESSAGES_TIMEOUT)
        except RuntimeError as error:
            raise TransportError(
                f"rank {ranks.rank} on {socket.gethostname()} has joined the launcher's store, but "
                f"cannot connect to the other ranks: {first_line(error)}. With several nodes, set GLOO_SOCKET_IFNAME "
                "(for GPUs also NCCL_SOCKET_IFNAME) on every node to the network interface that connects the nodes "
                "(`ip address` lists interfaces)."
            ) from error

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sum a small CPU tensor (float64) across all processes; blocks."""
        return sum_over_group(values, self.scalars, self.rank)

    def barrier(self) -> None:
        """Wait for all processes."""
        self.sum_over_ranks(torch.zeros(1, dtype=torch.float64))

    def close(self) -> None:
        """End the connections after a successful run."""
        dist.destroy_process_group()


def sum_over_group(values: Tensor, group: Any, rank: int) -> Tensor:
    """Return the sum of a CPU tensor across a gloo group that contains process `rank`; raises TransportError."""
    total = values.clone()
    with translate_peer_errors(rank):
        dist.all_reduce(total, group=group)
    return total


def nccl_options(backend: str) -> dist.ProcessGroupNCCL.Options | None:
    """Return options for few multiprocessors per message, and priority over enqueued compute."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = NCCL_MAX_CTAS
    return options


@contextmanager
def translate_peer_errors(rank: int, peer: int | None = None) -> Iterator[None]:
    """Context that turns torch's errors into a TransportError: `peer` (None: an unknown rank) is lost."""
    try:
        yield
    except RuntimeError as error:
        who = "another rank" if peer is None else f"its neighbour rank {peer}"
        raise TransportError(
            f"rank {rank} stops: it lost {who}, whose message (above or below) gives the cause. "
            f"Error on this rank: {first_line(error)}"
        ) from error
