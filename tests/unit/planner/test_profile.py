"""A profile survives its file to the last bit, and no broken file is believed."""

import json
from typing import Any

import pytest

from mobius.planner.gpu_specs import GPU_SPECS, estimate_profile
from mobius.planner.profile import Profile, ProfileError
from mobius.schedule.partition import ModelShape


@pytest.fixture
def profile(llama_7b: ModelShape) -> Profile:
    return estimate_profile(GPU_SPECS["H200"], llama_7b, microbatch_tokens=8192, seq_length=512, num_ranks=4)


def test_a_profile_is_the_same_after_its_file(profile: Profile) -> None:
    assert Profile.from_json(profile.to_json()) == profile


def change(profile: Profile, path: str, value: Any) -> str:
    fields = json.loads(profile.to_json())
    *way, last = path.split(".")
    place = fields
    for name in way:
        place = place[int(name)] if isinstance(place, list) else place[name]
    place[last] = value
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", 0),
        ("source", "guessed"),
        ("loss", -1.0),
        ("loss", "1"),
        ("loss", True),
        ("loss", float("nan")),
        ("num_ranks", None),
        ("cpu_adamw", 0.0),
        ("copies.down", 0.0),
        ("copies.sideways", 1.0),
        ("copies", {}),
        ("messages.bandwidth", 0.0),
        ("layer_kinds.0.forward", "fast"),
        ("layer_kinds", []),
        ("kind_of_layer", [7]),
        ("kind_of_layer", []),
        ("basis", 3),
        ("unknown", 1),
    ],
)
def test_a_field_that_cannot_be_is_found(profile: Profile, path: str, value: Any) -> None:
    with pytest.raises(ProfileError):
        Profile.from_json(change(profile, path, value))
