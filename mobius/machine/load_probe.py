"""Measures which GPUs slow each other's loads down: every pair loads at once, against each of them alone.

Trees of bridges are flat or wrong in virtual machines; a copy that takes twice as long beside another is not. The
measuring runs in a process of its own, `python -m mobius.machine.load_probe NUM_GPUS`, because it needs a context on
every GPU, which would stay in the memory of other ranks' GPUs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mobius.atomic_files import atomic_write
from mobius.errors import CheckpointError
from mobius.machine.numa import gpu_addresses, read_gpu_locations
from mobius.machine.topology import Topology
from mobius.ranks import cache_folder
from mobius.regular_files import read_text

logger = logging.getLogger(__name__)

LOAD_BYTES = 128 * 2**20
"""About 5 ms at PCIe 4 x16: long beside the start of a copy, short beside a run."""
NUM_WARM_LOADS = 8
"""Idle cards take their link to a lower speed and need some traffic before it is back."""
NUM_LOADS = 5
"""Loads of each kind; their median counts."""
PROBE_TIMEOUT_SECONDS = 180.0

TimeLoads = Callable[[Sequence[int]], Sequence[float]]
"""GPUs that load at the same time -> seconds that each of them took for the same number of bytes."""
Slowdowns = dict[tuple[int, int], float]


def measure_slowdowns(num_gpus: int, time_loads: TimeLoads) -> Slowdowns:
    """The time of a load beside the other's over its time alone for each pair (first, second), the larger of the two.

    N + N(N - 1)/2 measurements.
    """

    def median_times(*gpus: int) -> NDArray[np.float64]:
        return np.median([time_loads(gpus) for _ in range(NUM_LOADS)], axis=0)

    alone = np.concatenate([median_times(gpu) for gpu in range(num_gpus)])
    return {pair: float(max(median_times(*pair) / alone[list(pair)])) for pair in combinations(range(num_gpus), 2)}


def add_measured_slowdowns(topology: Topology) -> Topology:
    """The topology with slowdowns measured of these very GPUs, now or in an earlier run; unchanged if that fails."""
    if not topology.links:
        return topology
    file = _cache_file(topology)
    if file is not None and file.exists():
        with contextlib.suppress(CheckpointError, ValueError, KeyError):
            known = _with_kept(topology, Topology.from_json(read_text(file)))
            logger.debug("shared links as measured before (%s; remove the file to measure again)", file)
            return known
        logger.info("%s cannot be read: shared links are measured again", file)
    try:
        slowdowns = measure_in_subprocess(len(topology.gpus))
        topology = topology.with_slowdowns(slowdowns)
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        reason = str(error).strip().splitlines()
        logger.warning("--probe_topology: shared links could not be measured: %s", reason[-1] if reason else error)
        return topology
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(file, has_many_writers=True) as temporary:
                temporary.write_text(topology.to_json())
        except OSError as error:
            logger.info("the measured shared links are not kept for the next run: %s", error)
    one, other = max(slowdowns, key=lambda pair: slowdowns[pair])
    logger.debug("shared links measured: at most x%.2f, GPU %d beside GPU %d", slowdowns[one, other], one, other)
    return topology


def _cache_file(topology: Topology) -> Path | None:
    """The file of these GPUs in these slots; None if they cannot be told from others."""
    if any(gpu.uuid is None or gpu.address is None for gpu in topology.gpus):
        return None
    names = "\n".join(sorted(f"{gpu.uuid} {gpu.address}" for gpu in topology.gpus))
    return cache_folder() / f"shared_links-{hashlib.sha256(names.encode()).hexdigest()[:16]}.json"


def _with_kept(topology: Topology, kept: Topology) -> Topology:
    """The topology with the slowdowns of `kept`, whose GPUs may be numbered otherwise (CUDA_VISIBLE_DEVICES).

    Raises KeyError or ValueError if it does not have all of them.
    """
    if not kept.is_measured:
        raise ValueError("no measurement")
    places = {gpu.uuid: gpu.index for gpu in kept.gpus}
    order = [places[gpu.uuid] for gpu in topology.gpus]
    links = (
        replace(link, slowdown=kept.link(order[link.first], order[link.second]).slowdown) for link in topology.links
    )
    return replace(topology, links=tuple(links))


def measure_in_subprocess(num_gpus: int) -> Slowdowns:
    """Let a process of its own measure; raises OSError, ValueError or SubprocessError if it comes to nothing."""
    command = [sys.executable, "-m", "mobius.machine.load_probe", str(num_gpus)]
    folder = Path(__file__).resolve().parents[2]
    result = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=PROBE_TIMEOUT_SECONDS, check=False
    )
    if result.returncode != 0:
        raise ValueError(result.stderr.strip() or f"the measuring process ended with exit code {result.returncode}")
    return {(a, b): value for a, b, value in json.loads(result.stdout.strip().rpartition("\n")[2])}


class PinnedLoads:
    """Page-locked host memory and GPU memory of LOAD_BYTES for each of `gpus`; `time` copies."""

    def __init__(self, gpus: Sequence[int]) -> None:
        """Take the memory, the host's near each GPU, and wake the links."""
        self._places = []
        for gpu in gpus:
            device = torch.device("cuda", gpu)
            with _near_gpu(gpu):
                host = torch.ones(LOAD_BYTES, dtype=torch.uint8, pin_memory=True)
            self._places.append((host, torch.empty_like(host, device=device), torch.cuda.Stream(device)))
        for _ in range(NUM_WARM_LOADS):
            self.time(range(len(gpus)))

    def time(self, places: Sequence[int]) -> list[float]:
        """Load on the GPUs at those places of the list, all at once; seconds of each, by events on its own stream."""
        spans = []
        for place in places:
            host, target, stream = self._places[place]
            with torch.cuda.stream(stream):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                target.copy_(host, non_blocking=True)
                end.record()
            spans.append((begin, end))
        for _, end in spans:
            end.synchronize()
        return [begin.elapsed_time(end) / 1000 for begin, end in spans]


@contextlib.contextmanager
def _near_gpu(gpu: int) -> Iterator[None]:
    """Within it this thread runs, and so takes memory, on the GPU's NUMA node, if the machine tells which that is."""
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError, ValueError):
        os.sched_setaffinity(0, read_gpu_locations(gpu_addresses([gpu]), Path("/"))[0].cpus & before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def main(argv: Sequence[str]) -> None:
    """Measure and write one line of JSON, [[first, second, slowdown], ...]."""
    num_gpus = int(argv[1])
    slowdowns = measure_slowdowns(num_gpus, PinnedLoads(range(num_gpus)).time)
    sys.stdout.write(json.dumps([[a, b, value] for (a, b), value in slowdowns.items()]) + "\n")


if __name__ == "__main__":
    main(sys.argv)
