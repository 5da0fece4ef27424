"""Two loads that share a link: four ranks on two GPUs, so that every two of them have one PCIe link between them.

What runs is the executor with its slots and copies; compute is a kernel of fixed length. `pytest -m gpu -s` shows the
times.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
from harness.shared_links import NUM_MICROBATCHES, host_states, run_on

from mobius.machine.cross_mapping import best_order
from mobius.machine.load_probe import LOAD_BYTES, PinnedLoads, measure_slowdowns
from mobius.machine.topology import Gpu, Link, Topology

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

PARAMETERS = LOAD_BYTES
"""Of a stage, in bf16: twice what the probe loads, some 5 ms at PCIe 5."""
PLACES = [torch.device("cuda", index) for index in (0, 0, 1, 1)]
"""Four cards of which each two share a link, as behind one root complex."""


@pytest.fixture(autouse=True)
def _any_kernels() -> None:
    torch.use_deterministic_algorithms(False)


def test_in_the_order_that_was_measured_compute_waits_less_for_weights() -> None:
    loads = PinnedLoads([place.index for place in PLACES])

    def seconds(places: Sequence[int]) -> list[float]:
        """Until all have loaded: a GPU's two copies take turns, and events tell each one's turn, not what it waited."""
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        start = time.perf_counter()
        loads.time(places)
        return [time.perf_counter() - start] * len(places)

    slowdowns = measure_slowdowns(4, seconds)
    alone = 2 * loads.time([0])[0]
    print(f"\na load alone {1e3 * alone:.2f} ms; beside another:", {k: round(v, 2) for k, v in slowdowns.items()})
    assert slowdowns[0, 1] > 1.6
    assert slowdowns[2, 3] > 1.6

    links = tuple(Link(first, second) for first, second in combinations(range(4), 2))
    topology = Topology(tuple(Gpu(index) for index in range(4)), links).with_slowdowns(slowdowns)
    order = best_order(topology, num_microbatches=NUM_MICROBATCHES)
    assert order == (0, 2, 1, 3)

    states = host_states(3 * len(PLACES), PARAMETERS, page_locked=True)
    for num_slots in (1, 2):
        listed, crossed = (
            run_on([PLACES[place] for place in places], states, num_slots=num_slots, seconds=alone / 2)
            for places in (range(4), order)
        )
        for name, run in (("0,1,2,3", listed), ("0,2,1,3", crossed)):
            print(
                f"{num_slots} slot(s), order {name}: compute waits for weights {1e3 * run.weights_wait:.1f} ms per "
                f"step, which takes {1e3 * run.step_seconds:.1f} ms"
            )
        assert listed.is_exact
        assert crossed.is_exact
        if num_slots == 1:
            assert crossed.weights_wait < 0.9 * listed.weights_wait
            assert crossed.step_seconds < listed.step_seconds
