"""Two loads that share a link: four ranks on two GPUs, so that every two of them have one PCIe link between them.

What runs is the executor with its slots and copies; compute is a kernel of fixed length. `pytest -m gpu -s` shows the
times.
"""

from __future__ import annotations

import pytest
import torch
from harness.plan_requests import TWO_PER_ROOT_COMPLEX
from harness.shared_links import LOAD_BYTES, NUM_MICROBATCHES, host_states, load_seconds, run_on

from mobius.hardware.topology import best_order

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

PARAMETERS = LOAD_BYTES
"""Of a stage, in bf16: twice what `load_seconds` loads, some 5 ms at PCIe 5."""
PLACES = [torch.device("cuda", index) for index in (0, 0, 1, 1)]
"""Four cards of which each two share a link, as behind one root complex."""


@pytest.fixture(autouse=True)
def _any_kernels() -> None:
    torch.use_deterministic_algorithms(False)


def test_in_the_order_of_the_root_complexes_compute_waits_less_for_weights() -> None:
    alone = 2 * load_seconds(PLACES[0])
    print(f"\na load alone {1e3 * alone:.2f} ms")
    order = best_order(TWO_PER_ROOT_COMPLEX, num_microbatches=NUM_MICROBATCHES)
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
