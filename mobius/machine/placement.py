"""Where ranks go, as a run puts it together: the GPU of each, and the way that messages between them take.

The parts are runtime's (device_order.py, load_probe.py, peer_check.py); this joins them to the configuration, the
environment and the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from mobius.config.config import Config
from mobius.machine.device_order import agree_on_order, device_names
from mobius.machine.load_probe import add_measurement, measure_in_process
from mobius.machine.read_topology import read_topology
from mobius.machine.topology import Topology
from mobius.messages.mailbox_setup import CopyEngine
from mobius.messages.meeting import Meeting
from mobius.messages.peer_check import SIZES, PeerVerdict, check_peer_copies
from mobius.ranks import allows_peer_copies, cache_folder, forbid_peer_copies, visible_devices

logger = logging.getLogger(__name__)

_MIN_RANKS = 3
"""One rank, or two, are the same in any order."""
_USUAL_CHUNKS = 2
"""Microbatches per rank where `--num_chunks auto` is still to be chosen, for which the devices must be known."""


def order_devices(config: Config, meeting: Meeting) -> tuple[int, ...]:
    """The index of every rank's GPU; collective. Makes no context on any GPU."""
    pipeline = config.pipeline
    if not pipeline.cross_mapping or meeting.num_ranks < _MIN_RANKS:
        return tuple(range(meeting.num_ranks))

    def survey(num_gpus: int) -> Topology:
        topology = read_topology(num_gpus)
        return add_measurement(topology, cache_folder(), measure_in_process) if pipeline.probe_topology else topology

    num_microbatches = pipeline.num_chunks or _USUAL_CHUNKS * meeting.num_ranks
    return agree_on_order(meeting, survey, listed=visible_devices(), num_microbatches=num_microbatches)


def send_by_host_if_broken(
    meeting: Meeting,
    make_engine: Callable[[], CopyEngine],
    *,
    device: torch.device,
    order: Sequence[int] | None = None,
    sizes: Sequence[int] = SIZES,
) -> None:
    """Try the copies between neighbours' GPUs, and switch them off on all ranks if any arrives wrong; collective.

    Before NCCL starts: it reads the switch once. Nothing is tried where the user has switched them off.
    """
    if not allows_peer_copies():
        return
    verdict = check_peer_copies(meeting, make_engine, device=device, sizes=sizes)
    if verdict.broken:
        forbid_peer_copies()
    line = _line(verdict, order or range(meeting.num_ranks))
    if line is not None and meeting.rank == 0:
        (logger.warning if verdict.broken else logger.info)("%s", line)


def _line(verdict: PeerVerdict, order: Sequence[int]) -> str | None:
    if verdict.problem is not None:
        return f"copies from GPU to GPU were not checked: {verdict.problem}"
    if not verdict.broken:
        return None
    names = device_names(visible_devices(), len(order))
    pairs = ", ".join(f"GPU {names[order[source]]} to GPU {names[order[target]]}" for source, target in verdict.broken)
    return (
        f"copies from {pairs} arrive with other contents than were sent: all messages between GPUs go through host "
        "memory, as with NCCL_P2P_DISABLE=1"
    )
