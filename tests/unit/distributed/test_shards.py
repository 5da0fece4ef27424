"""Shares of a stage divide its trained elements, each to one replica, and a tied matrix by itself."""

from __future__ import annotations

import pytest
import torch

from mobius.distributed.shards import Shards
from mobius.engine.stage_state import StageState
from mobius.limits import SHARD_ALIGNMENT
from mobius.models.layout import StageLayout

LAYOUT = StageLayout.of({"tied": (50, 32), "matrix": (33, 7), "frozen": (9, 9), "norm": (37,)}, frozen={"frozen"})


def shares_of(number: int, index: int, *, tied: tuple[str, ...] = ()) -> Shards:
    return Shards.of(LAYOUT, index, number, tied=tied)


@pytest.mark.parametrize("tied", [(), ("tied",), ("absent",)])
@pytest.mark.parametrize("number", [2, 3, 5, 64])
def test_every_trained_element_has_one_owner(number: int, tied: tuple[str, ...]) -> None:
    owners = torch.zeros(LAYOUT.num_trained, dtype=torch.int64)
    for index in range(number):
        shards = shares_of(number, index, tied=tied)
        assert shards.num_elements == sum(part.stop - part.start for part in shards.own)
        assert all(part.start % SHARD_ALIGNMENT == 0 for part in shards.own)
        for part in shards.own:
            owners[part] += 1
    assert shards.num_trained == LAYOUT.num_trained
    assert owners.eq(1).all()


def test_owners_of_a_tied_matrix_are_the_same_wherever_it_lies() -> None:
    other = StageLayout.of({"first": (11, 13), "copy": (50, 32)})
    both = []
    for layout, name in ((LAYOUT, "tied"), (other, "copy")):
        place = layout.slice_of(name)
        shards = Shards.of(layout, 1, 3, tied=("tied", "copy"))
        own = [part for part in shards.own if place.start <= part.start < place.stop]
        both.append([(part.start - place.start, min(part.stop, place.stop) - place.start) for part in own])
    assert both[0] == both[1]
    assert len(both[0]) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parameters_that_are_set_reach_the_masters_of_their_owners(dtype: torch.dtype) -> None:
    def zeros(count: int, kind: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=kind)

    values = {name: torch.randn(shape) for name, (_, shape) in LAYOUT.offsets.items()}
    masters = torch.full((LAYOUT.num_trained,), torch.nan)
    for index in range(3):
        shards = shares_of(3, index, tied=("tied",))
        state = StageState.with_buffers(
            LAYOUT, zeros(LAYOUT.num_units, dtype), zeros(shards.num_elements, dtype), zeros, shards
        )
        for name, value in values.items():
            state.set_parameter(name, value)
        assert all(torch.equal(LAYOUT.views(state.weights)[name], value.to(dtype)) for name, value in values.items())
        for own in state.owned:
            masters[own.place] = own.state.read_master()
    for name, view in LAYOUT.trained_views(masters).items():
        assert (view - values[name]).abs().max() <= 1e-6, name


def test_owned_views_are_together_every_parameter_once() -> None:
    values = torch.randn(LAYOUT.num_trained)
    views = [shares_of(3, index, tied=("tied",)).owned_views(values, LAYOUT) for index in range(3)]
    for name, whole in LAYOUT.trained_views(values).items():
        assert torch.equal(torch.cat([own[name] for own in views if name in own]), whole.flatten()), name
