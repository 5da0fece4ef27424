"""Places on the host: none is another's, and the bytes are those that were asked for."""

from __future__ import annotations

import torch

from mobius.engine.host_arena import PinnedActivationBuffer


def make_home() -> PinnedActivationBuffer:
    return PinnedActivationBuffer({0: (96, 64), 3: (48, 32)}, register=False)


def test_each_stage_and_microbatch_has_a_place_of_its_own() -> None:
    activation_buffer = make_home()
    numbers = {(0, 0): 1, (0, 1): 2, (3, 0): 3, (3, 1): 4}

    for (stage, microbatch), number in numbers.items():
        region = activation_buffer.region(stage, microbatch)
        assert region.shape == ({(0, 0): 96, (0, 1): 64, (3, 0): 48, (3, 1): 32}[stage, microbatch],)
        region.fill_(number)

    for (stage, microbatch), number in numbers.items():
        region = activation_buffer.region(stage, microbatch)
        assert torch.equal(region, torch.full_like(region, number))


def test_microbatches_of_the_next_round_take_the_places_of_this_one() -> None:
    activation_buffer = make_home()

    assert activation_buffer.region(0, 3).data_ptr() == activation_buffer.region(0, 1).data_ptr()
    assert activation_buffer.region(0, 2).data_ptr() == activation_buffer.region(0, 0).data_ptr()


def test_its_bytes_are_those_of_all_places() -> None:
    assert make_home().num_bytes == 96 + 64 + 48 + 32
