"""Places on the host: none is another's, and the bytes are those that were asked for."""

from __future__ import annotations

import torch

from mobius.memory.activation_home import ActivationHome


def make_home() -> ActivationHome:
    return ActivationHome({0: (96, 64), 3: (48, 32)}, register=False)


def test_each_stage_and_microbatch_has_a_place_of_its_own() -> None:
    home = make_home()
    numbers = {(0, 0): 1, (0, 1): 2, (3, 0): 3, (3, 1): 4}

    for (stage, microbatch), number in numbers.items():
        place = home.place(stage, microbatch)
        assert place.shape == ({(0, 0): 96, (0, 1): 64, (3, 0): 48, (3, 1): 32}[stage, microbatch],)
        place.fill_(number)

    for (stage, microbatch), number in numbers.items():
        place = home.place(stage, microbatch)
        assert torch.equal(place, torch.full_like(place, number))


def test_microbatches_of_the_next_round_take_the_places_of_this_one() -> None:
    home = make_home()

    assert home.place(0, 3).data_ptr() == home.place(0, 1).data_ptr()
    assert home.place(0, 2).data_ptr() == home.place(0, 0).data_ptr()


def test_its_bytes_are_those_of_all_places() -> None:
    assert make_home().num_bytes == 96 + 64 + 48 + 32
