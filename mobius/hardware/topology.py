"""Assigns GPUs to ranks: ranks that load at nearly the same time should load through different links.

pci0000:16 ─ 0000:16:01.0 ─ 0000:17:00.0 ┬ 0000:18:00.0 ─ GPU 0     0 and 1: one switch above both, PIX
host bridge   root port      switch      └ 0000:18:01.0 ─ GPU 1
           └ 0000:16:03.0 ─────────────────────────────── GPU 2     0 and 2: one host bridge, PHB

root complex A: GPU 0, GPU 1      rank 0 1 2 3        rank 0 1 2 3
root complex B: GPU 2, GPU 3      GPU  0 1 2 3  ->    GPU  0 2 1 3     neighbours share nothing

GPUs have torch's indices (after CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER). Their bridges come from the kernel's tree
under /sys. No GPU gets a context.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations, permutations, takewhile
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from mobius.hardware.numa import gpu_addresses

MAX_EXACT_GPUS = 8
"""Up to this number, all orders are compared, in less than 0.2 s on one core; for more GPUs, pairs are exchanged."""
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


class Ancestor(StrEnum):
    """Nearest component that the paths of two GPUs to the CPU share, named as in `nvidia-smi topo -m`."""

    PIX = "PIX"
    """They share one PCIe switch (or one board)."""
    PXB = "PXB"
    """They share several PCIe bridges below the host bridge."""
    PHB = "PHB"
    """They share a host bridge: the same root complex, but different root ports."""
    NODE = "NODE"
    """They share the NUMA node, but have different host bridges."""
    SYS = "SYS"
    """They share only the link between NUMA nodes."""


_CONTENTION_PERCENT: Final = {
    Ancestor.PIX: 100,
    Ancestor.PXB: 100,
    Ancestor.PHB: 50,
    Ancestor.NODE: 10,
    Ancestor.SYS: 0,
}
"""Assumed percent by which two loads at once are slower than one load alone. 100 follows from one uplink for both GPUs;
50 and 10 are guesses. The numbers are used only to compare orders."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as CUDA counts it."""

    index: int
    name: str = ""
    address: str | None = None
    """PCI address in the kernel's format, for example `0000:17:00.0`."""
    numa_node: int | None = None
    bridges: tuple[str, ...] = ()
    """Path from the CPU to the GPU: the host bridge (`pci0000:16`), the root port, and bridges of switches."""


def read_topology(num_gpus: int, root: Path = Path("/")) -> list[Gpu]:
    """Read torch's first `num_gpus` GPUs, without facts that the machine does not report. `root` is for tests."""
    return [_read_gpu(index, root) for index in range(num_gpus)]


def _read_gpu(index: int, root: Path) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    gpu = Gpu(index, name=str(properties.name))
    try:
        (address,) = gpu_addresses([index])
    except ValueError:
        return gpu
    device = root / "sys/bus/pci/devices" / address
    node = -1  # the kernel writes -1 for no node
    with contextlib.suppress(OSError, ValueError):
        node = int((device / "numa_node").read_text())
    # Folders from the host bridge down to the device, without the device; none if the kernel does not show the device.
    parts = device.resolve().parts if device.exists() else ()
    hosts = [place for place, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)]
    bridges = parts[hosts[-1] : -1] if hosts else ()
    return replace(gpu, address=address, numa_node=node if node >= 0 else None, bridges=bridges)


def common_ancestor(one: Gpu, other: Gpu) -> Ancestor | None:
    """Nearest component that the paths of two GPUs share, by their bridges and nodes; None if a path is unknown.

    A switch is an upstream port with a downstream port for each device, so two devices at one switch share all bridges
    except the last. If the machine reports no nodes, one node is assumed.
    """
    if not one.bridges or not other.bridges:
        return None
    pairs = zip(one.bridges, other.bridges, strict=False)
    num_common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    if num_common == 0:
        return Ancestor.NODE if one.numa_node == other.numa_node else Ancestor.SYS
    if num_common == 1:
        return Ancestor.PHB
    is_one_switch = max(len(one.bridges), len(other.bridges)) - num_common <= 1
    return Ancestor.PIX if is_one_switch else Ancestor.PXB


def choose_order(
    gpus: Sequence[Gpu], *, num_microbatches: int, names: Sequence[str], is_given: bool
) -> tuple[tuple[int, ...], str | None]:
    """Return the index in `gpus` of each rank's GPU, and a log line for the user, or None.

    `names` are the user's names of the GPUs, in the same order. If `is_given`, the user chose this order. It is then
    used unchanged, and the line names a better order if there is one.
    """
    own = tuple(range(len(gpus)))
    if len(gpus) < 3:
        return own, None  # for one or two ranks, all orders cost the same
    listed = ",".join(names)
    if unseen := [gpu for gpu in gpus if not gpu.bridges]:
        what = "the PCI address of" if unseen[0].address is None else "the path to"
        return own, f"devices in their own order {listed}: the machine does not report {what} GPU {unseen[0].index}"
    best = best_order(gpus, num_microbatches=num_microbatches)
    score, own_score = score_orders(gpus, num_microbatches, [best, own])[:, 0]
    if score >= own_score:
        # Virtual machines usually report a flat tree, which may be wrong.
        is_flat = len({common_ancestor(*pair) for pair in combinations(gpus, 2)} | {Ancestor.PIX, Ancestor.PXB}) == 3
        line = f"devices in their own order {listed}: the machine reports equal sharing for all pairs"
        return own, line if is_flat else None
    shown, why = ",".join(names[gpu] for gpu in best), _why(gpus, best)
    if is_given:
        return own, f"devices in the given order {listed}; {shown} is better: {why}"
    guess = "" if len(gpus) <= MAX_EXACT_GPUS else f" (not all orders of {len(gpus)} devices were compared)"
    return best, f"devices in the order {shown}: {why}{guess}"


def best_order(gpus: Sequence[Gpu], *, num_microbatches: int) -> tuple[int, ...]:
    """Return the order with the lowest cost; `order[rank]` is the index of the rank's GPU. Exact for up to 8 GPUs.

    Among orders with equal costs, it is the lexicographically smallest.
    """

    def best_of(orders: Sequence[tuple[int, ...]]) -> tuple[list[int], tuple[int, ...]]:
        """Return the lowest cost and the first order with this cost."""
        scores = score_orders(gpus, num_microbatches, orders)
        best = int(np.lexsort(scores.T[::-1])[0])  # stable: the first of equal orders
        return scores[best].tolist(), orders[best]

    own = tuple(range(len(gpus)))
    if len(gpus) <= MAX_EXACT_GPUS:
        return best_of(list(permutations(own)))[1]
    best = best_of([own])
    while True:  # exchange the GPUs of two ranks as long as this lowers the cost
        exchanged = best_of([_exchange(best[1], one, other) for one, other in combinations(own, 2)])
        if exchanged >= best:
            return best[1]
        best = exchanged


def _exchange(order: tuple[int, ...], one: int, other: int) -> tuple[int, ...]:
    changed = list(order)
    changed[one], changed[other] = changed[other], changed[one]
    return tuple(changed)


def score_orders(gpus: Sequence[Gpu], num_microbatches: int, orders: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return the costs of orders, int64 [orders, 2]; lower is better, and the first cost counts before the second.

    overlap: the sum over all pairs of ranks of the contention of their GPUs (percent) times the time in which both
    load. In the looped schedule, each rank starts its next load P microbatches after its previous load, P =
    max(microbatches, ranks), and rank r starts r microbatches after rank 0. So loads of two ranks at distance d start d
    and P - d microbatches after each other, and a load of length L overlaps the other rank's loads by max(0, L - d) +
    max(0, L - (P - d)). L depends on the machine, so all lengths up to P have the same weight, and the mean over L is
    ((P - d)^2 + d^2) / 2P. The mean is largest between neighbours, and between the ends of the ring if P equals the
    number of ranks. Backward is the mirror image and has the same cost.

    displacement: the sum of the ranks' distances from the listed order of devices.
    """
    period = max(num_microbatches, len(gpus))
    shares = np.array([[_contention(one, other) for other in gpus] for one in gpus])
    columns = np.array(orders).T
    overlap = sum(
        ((period - (other - one)) ** 2 + (other - one) ** 2) * shares[columns[one], columns[other]]
        for one, other in combinations(range(len(gpus)), 2)
    )
    displacement = np.abs(columns - np.arange(len(gpus))[:, None]).sum(axis=0)
    return np.stack([overlap, displacement], axis=1)


def _contention(one: Gpu, other: Gpu) -> int:
    """Percent by which loads of the two GPUs slow each other down; 0 if the machine reports no path."""
    ancestor = common_ancestor(one, other)
    return 0 if ancestor is None else _CONTENTION_PERCENT[ancestor]


def _why(gpus: Sequence[Gpu], best: Sequence[int]) -> str:
    """Reason why loads wait less for each other in the order `best` than in the listed order."""
    after, before = (_neighbour_shares(gpus, order) for order in (best, range(len(gpus))))
    if not after:
        is_near = max(before) >= _CONTENTION_PERCENT[Ancestor.PHB]
        return f"neighbouring ranks load {'over different root complexes' if is_near else 'from different NUMA nodes'}"
    if len(after) < len(before):
        return f"{len(after)} instead of {len(before)} pairs of neighbouring ranks load over one root complex or node"
    return "ranks that share a link start their loads at more distant times"


def _neighbour_shares(gpus: Sequence[Gpu], order: Sequence[int]) -> list[int]:
    """Contention of neighbours in the ring, if their GPUs share a part of the path to host memory."""
    ring = zip(order, [*order[1:], order[0]], strict=True)
    return [percent for one, other in ring if (percent := _contention(gpus[one], gpus[other]))]
