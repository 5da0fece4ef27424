"""Cross mapping: which rank gets which GPU, so that ranks that load at nearly the same time load over different links.

root complex A: GPU 0, GPU 1      rank 0 1 2 3        rank 0 1 2 3
root complex B: GPU 2, GPU 3      GPU  0 1 2 3  ->    GPU  0 2 1 3     neighbours share nothing
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mobius.hardware.topology import Ancestor, Link, Topology

MAX_EXACT_GPUS = 8
"""All orders of 8 GPUs are compared, in less than 0.2 s of one CPU core; more GPUs are placed greedily."""

_CONTENTION_PERCENT: Final = {
    Ancestor.PIX: 100,
    Ancestor.PXB: 100,
    Ancestor.PHB: 50,
    Ancestor.NODE: 10,
    Ancestor.SYS: 0,
}
"""Percent that two loads at once are taken to be slower than alone. 100 is the arithmetic of one uplink for both; 50
and 10 are judgements. Only which of two orders is better follows from them."""
_P2P_STEPS: Final = {Ancestor.PIX: 1, Ancestor.PXB: 1, Ancestor.PHB: 2, Ancestor.NODE: 3, Ancestor.SYS: 4}
_HOST_STEPS: Final = 5
_STEP: Final = 1000
"""Larger than the number of NVLinks of a ring, which only breaks ties between orders with equal steps."""
_MOST_NVLINKS: Final = 36


@dataclass(frozen=True)
class DeviceOrder:
    """Index of each rank's device among the listed ones, and a log line for the user, if any."""

    order: tuple[int, ...]
    line: str | None


def contention_percent(link: Link) -> int:
    """Percent by which loads of the two GPUs slow each other down, by what their ways have in common."""
    return _CONTENTION_PERCENT[link.ancestor] if link.ancestor is not None else 0


def _link_cost(link: Link) -> int:
    if link.num_nvlinks:
        return _MOST_NVLINKS - min(link.num_nvlinks, _MOST_NVLINKS)
    if link.has_p2p and link.ancestor is not None:
        return _P2P_STEPS[link.ancestor] * _STEP
    return _HOST_STEPS * _STEP


def score_orders(topology: Topology, num_microbatches: int, orders: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return the costs, int64 [orders, 3], of orders of equal length, which may be incomplete.

    Lower is better, and costs are compared lexicographically:

    overlap: over all pairs of ranks, how much their GPUs share (percent, see `contention_percent`) times how long both
    load at once. By the looped schedule each rank starts its next load P microbatches after the last, P =
    max(microbatches, ranks), and rank r starts r microbatches after rank 0. Two ranks d apart therefore start d and P -
    d microbatches from each other; a load of length L overlaps the other's by max(0, L - d) + max(0, L - (P - d)). L
    depends on the machine, so every length up to P has equal weight, and the mean over L is ((P - d)^2 + d^2) / 2P:
    most between neighbours, and between the ends of the ring where P = N. Backward is the mirror image and gives the
    same.

    slow links: over all neighbours in the ring, 0 for NVLink (more links first), then P2P through one switch (1), one
    host bridge (2), one node (3) or between nodes (4), and 5 for messages through host memory; in thousandths.

    displacement: the ranks' distances from the order in which the devices are listed.
    """
    num_gpus = len(topology.gpus)
    period = max(num_microbatches, num_gpus)
    shares, costs = np.zeros((2, num_gpus, num_gpus), dtype=np.int64)
    for link in topology.links:
        ends = [link.first, link.second], [link.second, link.first]
        shares[ends], costs[ends] = contention_percent(link), _link_cost(link)
    columns = np.array(orders, dtype=np.int64).T
    length = len(columns)
    scores = np.zeros((3, len(orders)), dtype=np.int64)
    for one, other in combinations(range(length), 2):
        weight = (period - (other - one)) ** 2 + (other - one) ** 2
        scores[0] += weight * shares[columns[one], columns[other]]
    # Two ranks, or an order that is not closed yet, have no edge from the last to the first.
    for rank in range(length if length == num_gpus > 2 else length - 1):
        scores[1] += costs[columns[rank], columns[(rank + 1) % length]]
    scores[2] = np.abs(columns - np.arange(length)[:, None]).sum(axis=0)
    return scores.T


def best_order(topology: Topology, *, num_microbatches: int) -> tuple[int, ...]:
    """Return the order with the least cost, `order[rank]` being the index of the rank's GPU; exact for up to 8 GPUs.

    Ties go to the lexicographically smallest order.
    """

    def best_of(orders: Sequence[tuple[int, ...]]) -> tuple[list[int], tuple[int, ...]]:
        """Return the least cost and the first order that has it."""
        scores = score_orders(topology, num_microbatches, orders)
        best = int(np.lexsort(scores.T[::-1])[0])  # stable: the first of equals
        return scores[best].tolist(), orders[best]

    indices = range(len(topology.gpus))
    if len(indices) <= MAX_EXACT_GPUS:
        return best_of(list(permutations(indices)))[1]
    order: tuple[int, ...] = ()
    while len(order) < len(indices):  # rank by rank the GPU that adds least
        order = best_of([(*order, gpu) for gpu in indices if gpu not in order])[1]
    best = best_of([tuple(indices), order])
    while True:  # exchange two ranks' GPUs as long as the score falls
        swapped = best_of([_swap(best[1], one, other) for one, other in combinations(indices, 2)])
        if swapped >= best:
            return best[1]
        best = swapped


def _swap(order: tuple[int, ...], one: int, other: int) -> tuple[int, ...]:
    changed = list(order)
    changed[one], changed[other] = changed[other], changed[one]
    return tuple(changed)


def choose_order(topology: Topology, *, num_microbatches: int, names: Sequence[str], is_given: bool) -> DeviceOrder:
    """Return the order of a run and its log line, if any.

    `names` are the user's names of the devices as listed. `is_given`: the user chose the order of the list, which is
    used unchanged; the line says so if a better one is known.
    """
    num_gpus = len(topology.gpus)
    own = tuple(range(num_gpus))
    if num_gpus < 3:
        return DeviceOrder(own, None)  # one or two ranks are the same in any order
    listed = ",".join(names)
    if topology.unknown_reason is not None:
        return DeviceOrder(own, f"devices in their own order {listed}: {topology.unknown_reason}")
    best = best_order(topology, num_microbatches=num_microbatches)
    score, own_score = score_orders(topology, num_microbatches, [best, own])[:, :2].tolist()
    if score >= own_score:
        return DeviceOrder(own, _why_no_change(topology, listed))
    shown = ",".join(names[gpu] for gpu in best)
    why = "more neighbouring ranks are on fast links" if score[0] == own_score[0] else _why(topology, best, own)
    if is_given:
        return DeviceOrder(own, f"devices in the given order {listed}; {shown} is better: {why}")
    guess = "" if num_gpus <= MAX_EXACT_GPUS else f" (not every order of {num_gpus} devices was looked at)"
    return DeviceOrder(best, f"devices in the order {shown}: {why}{guess}")


def _why(topology: Topology, best: Sequence[int], listed: Sequence[int]) -> str:
    """Why loads wait less for each other in the order `best`."""
    after, before = (_neighbour_shares(topology, order) for order in (best, listed))
    if not after:
        is_near = max(before) >= _CONTENTION_PERCENT[Ancestor.PHB]
        return f"neighbouring ranks load {'over different root complexes' if is_near else 'from different NUMA nodes'}"
    if len(after) < len(before):
        return f"{len(after)} instead of {len(before)} pairs of neighbouring ranks load over one root complex or node"
    return "ranks whose loads share a link load farther from each other in time"


def _neighbour_shares(topology: Topology, order: Sequence[int]) -> list[int]:
    """Contention of the ring neighbours whose GPUs share a part of the way to host memory."""
    ring = dict.fromkeys((rank, (rank + 1) % len(order)) for rank in range(len(order)))
    shares = (contention_percent(topology.link(order[a], order[b])) for a, b in ring)
    return [percent for percent in shares if percent]


def _why_no_change(topology: Topology, listed: str) -> str | None:
    """Log line if all pairs look the same, which may be wrong in a virtual machine."""
    is_flat = len({(contention_percent(link), _link_cost(link)) for link in topology.links}) == 1
    is_plain = topology.links[0].ancestor not in (Ancestor.PIX, Ancestor.PXB) and not topology.links[0].num_nvlinks
    if not is_flat or not is_plain:
        return None
    return f"devices in their own order {listed}: the machine reports equal sharing for all pairs"
