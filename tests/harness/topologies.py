"""Machines as topologies, built from the sizes of their groups."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations

from mobius.hardware.topology import Ancestor, Gpu, Link, Topology


def make_box(
    num_gpus: int,
    *groups: tuple[int, Ancestor],
    nvlinks: int = 0,
    bridged: Collection[tuple[int, int]] | None = None,
    has_p2p: bool = False,
) -> Topology:
    """GPUs in groups of neighbours, smallest first: `(2, PHB)` puts 0 and 1 under one root complex; else SYS.

    `nvlinks` join every pair, or those `bridged`, which can then reach each other.
    """
    links = []
    for one, other in combinations(range(num_gpus), 2):
        ancestors = (ancestor for size, ancestor in groups if one // size == other // size)
        count = nvlinks if bridged is None or (one, other) in bridged else 0
        links.append(Link(one, other, next(ancestors, Ancestor.SYS), count, has_p2p or count > 0))
    gpus = (Gpu(index, address=f"0000:{index + 1:x}1:00.0") for index in range(num_gpus))
    return Topology(tuple(gpus), tuple(links))


TWO_PER_ROOT_COMPLEX = make_box(4, (2, Ancestor.PHB), has_p2p=True)
FLAT_VIRTUAL_MACHINE = make_box(4, (4, Ancestor.PHB))
TWO_SOCKETS = make_box(4, (2, Ancestor.NODE), has_p2p=True)
BRIDGED_PAIRS = make_box(4, (4, Ancestor.NODE), nvlinks=4, bridged={(0, 1), (2, 3)})
ONE_SWITCH = make_box(4, (4, Ancestor.PIX), has_p2p=True)
SWITCHES_ON_TWO_SOCKETS = make_box(8, (2, Ancestor.PIX), (4, Ancestor.PXB), has_p2p=True)
NVSWITCH_ON_TWO_SOCKETS = make_box(8, (4, Ancestor.NODE), nvlinks=18)
NVSWITCH_IN_PAIRS = make_box(8, (2, Ancestor.PXB), nvlinks=12)
