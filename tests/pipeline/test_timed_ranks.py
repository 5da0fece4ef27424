"""The ranks that tests/gpu/test_shared_links.py uses, on a CPU, where nothing shares a link."""

from __future__ import annotations

import pytest
import torch
from harness.shared_links import NUM_MICROBATCHES, host_states, run_on

SECONDS = 0.002
STAGES_PER_RANK = 3


@pytest.mark.parametrize("num_slots", [1, 2])
def test_every_stage_sees_its_own_weights_and_takes_its_time(num_slots: int) -> None:
    cpu = torch.device("cpu")
    states = host_states(4 * STAGES_PER_RANK, 2**12, page_locked=False)
    run = run_on([cpu] * 4, states, num_slots=num_slots, seconds=SECONDS)

    assert run.is_exact
    # A rank's forwards and backwards, which take twice as long, one after the other.
    assert run.step_seconds > 3 * SECONDS * STAGES_PER_RANK * NUM_MICROBATCHES
    assert run.weights_wait < run.step_seconds
