"""Cases of tests: named ones, some of which run on demand only, and those of a grid that cover it.

That is each value of each parameter, or each pair, once at least (t-way testing).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Any
from zlib import crc32

import pytest

Combination = tuple[tuple[str, str], ...]


def covering(cases: Sequence[Mapping[str, object]], *, strength: int) -> set[int]:
    """Numbers of cases that have together every combination of `strength` parameters' values that all cases have.

    The case with most that is new comes next. Which of several that is follows from a checksum, so that values of
    different parameters do not go in step.
    """
    ordered = sorted(range(len(cases)), key=lambda number: crc32(repr(cases[number]).encode()))
    own = {number: _combinations(cases[number], strength) for number in ordered}
    missing: set[Combination] = set().union(*own.values())
    chosen: set[int] = set()
    while missing:
        best = max(ordered, key=lambda number: len(own[number] & missing))
        chosen.add(best)
        missing -= own[best]
    return chosen


def named(cases: Mapping[str, object], *, on_demand: Collection[str] = ()) -> list[Any]:
    """Each case under its name; those `on_demand` are `extended`."""
    assert set(on_demand) <= cases.keys(), "a case that there is not"
    marks = {name: [pytest.mark.extended] if name in on_demand else [] for name in cases}
    return [pytest.param(case, id=name, marks=marks[name]) for name, case in cases.items()]


def _combinations(case: Mapping[str, object], strength: int) -> set[Combination]:
    return set(combinations(sorted((name, repr(value)) for name, value in case.items()), strength))
