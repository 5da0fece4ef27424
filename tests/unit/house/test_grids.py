"""Cases that a usual run of the tests takes of a grid cover it."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from harness.grids import covering

GRID = [{"family": a, "ranks": b, "stages": c} for a, b, c in product("abcdefg", range(4), range(3))]


@pytest.mark.parametrize(("strength", "at_least", "at_most"), [(1, 7, 7), (2, 28, 36), (3, 84, 84)])
def test_every_combination_of_values_is_met(strength: int, at_least: int, at_most: int) -> None:
    chosen = covering(GRID, strength=strength)
    for names in combinations(GRID[0], strength):
        met, every = (
            {tuple(case[name] for name in names) for case in cases}
            for cases in ([GRID[number] for number in chosen], GRID)
        )
        assert met == every
    assert at_least <= len(chosen) <= at_most


def test_values_that_always_come_together_keep_all_their_cases() -> None:
    assert covering([{"case": number} for number in range(5)], strength=1) == {*range(5)}
    assert covering([], strength=2) == set()


def test_values_are_told_apart_by_what_they_show() -> None:
    assert len(covering([{"rows": [1]}, {"rows": [1]}, {"rows": [2]}], strength=1)) == 2
