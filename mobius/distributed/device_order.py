"""Assigns GPUs to ranks: rank 0 decides by the topology and sends the order to the other ranks.

Ranks use the first N GPUs that the user listed. Only their order among the ranks changes, not the environment.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from mobius.config.config import Config
from mobius.distributed.rendezvous import Rendezvous, parse_counts, parse_value
from mobius.hardware.topology import Gpu, choose_order, read_topology
from mobius.process.ranks import device_list, visible_devices

logger = logging.getLogger(__name__)

_MIN_RANKS = 3
"""With one or two ranks, the order makes no difference."""
_USUAL_CHUNKS = 2
"""Assumed microbatches per rank for `--num_chunks auto`, which is resolved after the devices are known."""


def order_devices(config: Config, num_ranks: int, rendezvous: Rendezvous | None) -> tuple[int, ...]:
    """Return the index of each rank's GPU among the visible GPUs; collective, with the same result on all ranks.

    Only rank 0 inspects the machine, without creating a context on a GPU. A list in CUDA_VISIBLE_DEVICES that does not
    ascend is the user's order and is used unchanged. Without `rendezvous`, this process decides alone.
    """
    pipeline = config.pipeline
    if not pipeline.cross_mapping or num_ranks < _MIN_RANKS:
        return tuple(range(num_ranks))
    order: list[int] | None = None
    if rendezvous is None or rendezvous.rank == 0:
        gpus, listed = read_topology(num_ranks), visible_devices()
        chosen, line = choose_order(
            gpus,
            num_microbatches=pipeline.num_chunks or _USUAL_CHUNKS * num_ranks,
            names=device_names(listed, num_ranks),
            is_given=is_given_order(listed, gpus),
        )
        if line is not None:
            logger.info("%s", line)
        order = list(chosen)
    gathered = [order] if rendezvous is None else rendezvous.gather(order)
    return parse_value(gathered[0], partial(_read_order, num_ranks=num_ranks), by=0)


def _read_order(value: Any, *, num_ranks: int) -> tuple[int, ...]:
    order = parse_counts(value)
    if sorted(order) != list(range(num_ranks)):
        raise ValueError(f"{order} is not an order of {num_ranks} GPUs")
    return order


def device_names(listed: str | None, num_gpus: int) -> Sequence[str]:
    """Names that the user listed for the first `num_gpus` visible devices; without a list, their indices."""
    names = device_list(listed)[:num_gpus]
    return names if len(names) == num_gpus else [str(index) for index in range(num_gpus)]


def is_given_order(listed: str | None, gpus: Sequence[Gpu]) -> bool:
    """Whether the list sets an order. An ascending list only chooses devices.

    Numbers are compared as numbers, UUIDs by the PCI addresses of their devices.
    """
    names = device_list(listed)[: len(gpus)]
    if all(name.isdecimal() for name in names):
        numbers = [int(name) for name in names]
        return numbers != sorted(numbers)
    addresses = [gpu.address for gpu in gpus if gpu.address is not None]
    return addresses != sorted(addresses)
