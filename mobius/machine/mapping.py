"""Cross mapping: which rank gets which GPU, so that ranks that load at nearly the same time load over different links.

It knows the topology as data and the schedule as two numbers; it neither measures nor sets a device.

    root complex A: GPU 0, GPU 1      rank 0 1 2 3        rank 0 1 2 3
    root complex B: GPU 2, GPU 3      GPU  0 1 2 3  ->    GPU  0 2 1 3     neighbours share nothing
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from mobius.machine.topology import Ancestor, Link, Topology

MAX_EXACT_GPUS = 8
"""Looking at the orders of 8 took up to 0.2 s (random topologies, one CPU core); more GPUs are placed greedily."""

_SHARES: Final = {Ancestor.PIX: 100, Ancestor.PXB: 100, Ancestor.PHB: 50, Ancestor.NODE: 10, Ancestor.SYS: 0}
"""Percent that two loads at once are taken to be slower than alone. 100 is the arithmetic of one uplink for both; 50
and 10 are judgements. Only which of two orders is better follows from them, and what was measured goes before them."""
_SHARE_STEP: Final = 25
"""A measured share is rounded to this many percent: noise must not decide between GPUs that are alike."""
_P2P_STEPS: Final = {Ancestor.PIX: 1, Ancestor.PXB: 1, Ancestor.PHB: 2, Ancestor.NODE: 3, Ancestor.SYS: 4}
_HOST_STEPS: Final = 5
_STEP: Final = 1000
"""More than all NVLinks of a ring together, which only decide between orders with equal steps."""
_MOST_NVLINKS: Final = 36


@dataclass(frozen=True, order=True)
class Score:
    """How good an order is: less is better, and a field counts only where all before it are equal.

    overlap: over all pairs of ranks, how much their GPUs share (in percent, see `share`) times how long both load at
    once. By the looped schedule each rank starts its next load P microbatches after the last, P = max(microbatches,
    ranks), and rank r starts r microbatches after rank 0. Two ranks d apart therefore start d and P - d microbatches
    from each other; a load of length L overlaps the other's by max(0, L - d) + max(0, L - (P - d)). L depends on the
    machine, so every length up to P counts alike, and the mean over L is ((P - d)^2 + d^2) / 2P: most between
    neighbours, and between the ends of the ring where P = N. Backward is the mirror image and gives the same.

    slow_links: over all neighbours in the ring, 0 for NVLink (more links first), then P2P through one switch (1), one
    host bridge (2), one node (3) or between nodes (4), and 5 for messages through host memory; in thousandths.

    displacement: the ranks' distances from the order in which the devices are listed; `order` itself decides the rest.
    """

    overlap: int
    slow_links: int
    displacement: int
    order: tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """Which device each rank gets, by its index among the listed ones, and what the user should know of it."""

    order: tuple[int, ...]
    line: str | None


def share(link: Link) -> int:
    """Percent by which loads of the two GPUs slow each other down: measured, else by what their ways have in common."""
    if link.slowdown is not None:
        return max(0, round((link.slowdown - 1) * 100 / _SHARE_STEP) * _SHARE_STEP)
    return _SHARES[link.ancestor] if link.ancestor is not None else 0


class _Costs:
    """The parts of a score as sums over pairs, none of them negative."""

    def __init__(self, topology: Topology, num_microbatches: int) -> None:
        self.num_gpus = len(topology.gpus)
        self._period = max(num_microbatches, self.num_gpus)
        indices = range(self.num_gpus)
        self._shares = [[0 if i == j else share(topology.link(i, j)) for j in indices] for i in indices]
        self._links = [[0 if i == j else _link_cost(topology.link(i, j)) for j in indices] for i in indices]

    def added(self, order: Sequence[int], gpu: int) -> tuple[int, int, int]:
        """What placing `gpu` behind `order` adds to overlap, slow links and displacement."""
        rank = len(order)
        overlap = sum(self._shares[other][gpu] * self._weight(rank - place) for place, other in enumerate(order))
        slow_links = self._links[order[-1]][gpu] if order else 0
        if rank == self.num_gpus - 1 and rank > 1:
            slow_links += self._links[gpu][order[0]]
        return overlap, slow_links, abs(rank - gpu)

    def score(self, order: Sequence[int]) -> Score:
        total = (0, 0, 0)
        for rank, gpu in enumerate(order):
            total = _sum(total, self.added(order[:rank], gpu))
        return Score(*total, tuple(order))

    def twins(self) -> list[int]:
        """For each GPU, the lowest one that it could change places with, itself if there is none."""
        rows = (self._shares, self._links)
        indices = range(self.num_gpus)

        def alike(one: int, other: int) -> bool:
            return all(row[one][k] == row[other][k] for row in rows for k in indices if k not in (one, other))

        return [next(other for other in indices if other == gpu or alike(other, gpu)) for gpu in indices]

    def _weight(self, distance: int) -> int:
        return (self._period - distance) ** 2 + distance**2


def _link_cost(link: Link) -> int:
    if link.num_nvlinks:
        return _MOST_NVLINKS - min(link.num_nvlinks, _MOST_NVLINKS)
    if link.has_p2p and link.ancestor is not None:
        return _P2P_STEPS[link.ancestor] * _STEP
    return _HOST_STEPS * _STEP


def _sum(one: tuple[int, int, int], other: tuple[int, int, int]) -> tuple[int, int, int]:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def score_order(topology: Topology, order: Sequence[int], *, num_microbatches: int) -> Score:
    """What an order costs; `order[rank]` is the index of the rank's GPU."""
    assert sorted(order) == list(range(len(topology.gpus)))
    return _Costs(topology, num_microbatches).score(order)


def best_order(topology: Topology, *, num_microbatches: int) -> tuple[int, ...]:
    """The order with the least score; exact for up to 8 GPUs."""
    costs = _Costs(topology, num_microbatches)
    if costs.num_gpus <= MAX_EXACT_GPUS:
        return _search(costs)
    return _improve(costs, _place_greedily(costs))


def _search(costs: _Costs) -> tuple[int, ...]:
    """Depth first in the order of indices, leaving out what is no better than the best so far.

    Of GPUs that could change places the lower index comes first: the other way round gives the same overlap and links
    and is no nearer to the identity.
    """
    twins = costs.twins()
    best: tuple[int, int, int] | None = None
    best_found: tuple[int, ...] = ()

    def extend(order: tuple[int, ...], total: tuple[int, int, int]) -> None:
        nonlocal best, best_found
        if best is not None and total >= best:
            return  # costs only grow, and of equal orders the one found first has the lower indices in front
        if len(order) == costs.num_gpus:
            best, best_found = total, order
            return
        tried = set()
        for gpu in range(costs.num_gpus):
            if gpu not in order and twins[gpu] not in tried:
                tried.add(twins[gpu])
                extend((*order, gpu), _sum(total, costs.added(order, gpu)))

    extend((), (0, 0, 0))
    return best_found


def _place_greedily(costs: _Costs) -> tuple[int, ...]:
    """Rank by rank the GPU that adds least."""
    order: tuple[int, ...] = ()
    while len(order) < costs.num_gpus:
        rest = [gpu for gpu in range(costs.num_gpus) if gpu not in order]
        order = (*order, min(rest, key=lambda gpu: (costs.added(order, gpu), gpu)))
    return order


def _improve(costs: _Costs, order: tuple[int, ...]) -> tuple[int, ...]:
    """Exchange two ranks' GPUs as long as the score falls."""
    best = min(costs.score(order), costs.score(range(costs.num_gpus)))
    while True:
        swapped = [costs.score(_swap(best.order, i, j)) for i, j in combinations(range(costs.num_gpus), 2)]
        if min(swapped) >= best:
            return best.order
        best = min(swapped)


def _swap(order: tuple[int, ...], i: int, j: int) -> tuple[int, ...]:
    changed = list(order)
    changed[i], changed[j] = changed[j], changed[i]
    return tuple(changed)


def choose_order(topology: Topology, *, num_microbatches: int, names: Sequence[str], is_given: bool) -> Choice:
    """The order of a run, and the line that tells it if there is something to tell.

    `names` are the user's names of the devices as listed. `is_given`: the list is an order that the user chose, which
    is kept; the line says so if a better one is known.
    """
    num_gpus = len(topology.gpus)
    own = tuple(range(num_gpus))
    if num_gpus < 3:
        return Choice(own, None)  # one or two ranks are the same in any order
    reason = topology.unknown
    if reason is not None:
        return Choice(own, f"devices in their own order {','.join(names)}: {reason} (--probe_topology measures)")
    costs = _Costs(topology, num_microbatches)
    best, listed = costs.score(best_order(topology, num_microbatches=num_microbatches)), costs.score(own)
    is_better = (best.overlap, best.slow_links) < (listed.overlap, listed.slow_links)
    if not is_better:
        return Choice(own, _why_no_change(topology, names))
    shown = ",".join(names[gpu] for gpu in best.order)
    why = _why(topology, best, listed)
    if is_given:
        return Choice(own, f"devices in the given order {','.join(names)}; {shown} is better: {why}")
    guess = "" if num_gpus <= MAX_EXACT_GPUS else f" (not every order of {num_gpus} devices was looked at)"
    return Choice(best.order, f"devices in the order {shown}: {why}{guess}")


def _why(topology: Topology, best: Score, listed: Score) -> str:
    if best.overlap == listed.overlap:
        return "more neighbouring ranks are on fast links"
    after, before = (_neighbour_shares(topology, score.order) for score in (best, listed))
    if not after:
        if topology.is_measured:
            return "no neighbouring ranks slow each other's loads down"
        is_near = max(before) >= _SHARES[Ancestor.PHB]
        return f"neighbouring ranks load {'over different root complexes' if is_near else 'from different NUMA nodes'}"
    what = "slow each other's loads down" if topology.is_measured else "load over one root complex or node"
    if len(after) < len(before):
        return f"{len(after)} instead of {len(before)} pairs of neighbouring ranks {what}"
    return "ranks whose loads share a link load farther from each other in time"


def _neighbour_shares(topology: Topology, order: Sequence[int]) -> list[int]:
    """Of the neighbours in the ring, the shares of those whose GPUs share something on the way to host memory."""
    ring = dict.fromkeys((rank, (rank + 1) % len(order)) for rank in range(len(order)))
    shares = (share(topology.link(order[a], order[b])) for a, b in ring)
    return [percent for percent in shares if percent]


def _why_no_change(topology: Topology, names: Sequence[str]) -> str | None:
    """A line where all pairs are told to be alike, which may be hearsay: virtual machines show such trees."""
    is_flat = len({(share(link), _link_cost(link)) for link in topology.links}) == 1
    is_plain = topology.links[0].ancestor not in (Ancestor.PIX, Ancestor.PXB) and not topology.links[0].num_nvlinks
    if topology.is_measured or not is_flat or not is_plain:
        return None
    listed = ",".join(names)
    return f"devices in their own order {listed}: no two are told to share more than others (--probe_topology measures)"
