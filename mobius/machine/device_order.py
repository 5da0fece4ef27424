"""Has all ranks agree on which GPU each gets: the first decides by the topology (mapping.py) and tells the others.

Ranks keep the GPUs that the user listed, rank r one of the first N of them; only their order among the ranks changes,
so nothing in the environment does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mobius.config.config import Config
from mobius.machine.load_probe import add_measurement, measure_in_process
from mobius.machine.mapping import choose_order
from mobius.machine.read_topology import read_topology
from mobius.machine.topology import Topology
from mobius.messages.meeting import Meeting, read_numbers, read_told
from mobius.ranks import cache_folder, visible_devices

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


def agree_on_order(
    meeting: Meeting, survey: Callable[[int], Topology], *, listed: str | None, num_microbatches: int
) -> tuple[int, ...]:
    """`order[rank]` is the index of the rank's GPU among the visible ones; collective, the same on all ranks.

    `survey` tells the topology of the first so many GPUs; only the first rank calls it, before anybody has a context on
    a GPU. `listed` is CUDA_VISIBLE_DEVICES, where an order that is not ascending is the user's own and stays.
    """
    order: tuple[int, ...] | None = None
    if meeting.rank == 0:
        num_gpus = meeting.num_ranks
        topology = survey(num_gpus)
        choice = choose_order(
            topology,
            num_microbatches=num_microbatches,
            names=device_names(listed, num_gpus),
            is_given=is_given_order(listed, topology),
        )
        if choice.line is not None:
            logger.info("%s", choice.line)
        order = choice.order
    return read_told(meeting.gather(order)[0], partial(_read_order, num_ranks=meeting.num_ranks), by=0)


def _read_order(told: Any, *, num_ranks: int) -> tuple[int, ...]:
    order = read_numbers(told)
    if sorted(order) != list(range(num_ranks)):
        raise ValueError(f"{order} is no order of {num_ranks} GPUs")
    return order


def device_names(listed: str | None, num_gpus: int) -> Sequence[str]:
    """What the user calls the first `num_gpus` visible devices; without a list, their numbers."""
    names = _names(listed)[:num_gpus]
    return names if len(names) == num_gpus else [str(index) for index in range(num_gpus)]


def is_given_order(listed: str | None, topology: Topology) -> bool:
    """Whether the list is an order and not only a choice of devices: not where it ascends.

    UUIDs ascend where the PCI addresses of their devices do.
    """
    names = _names(listed)[: len(topology.gpus)]
    if all(name.isdecimal() for name in names):
        numbers = [int(name) for name in names]
        return numbers != sorted(numbers)
    addresses = [gpu.address for gpu in topology.gpus if gpu.address is not None]
    return addresses != sorted(addresses)


def _names(listed: str | None) -> list[str]:
    return [name.strip() for name in listed.split(",") if name.strip()] if listed else []
