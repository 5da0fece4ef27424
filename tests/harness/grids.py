"""Cases of a grid that cover it: each value of each parameter, or each pair, once at least (t-way testing)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from zlib import crc32

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


def _combinations(case: Mapping[str, object], strength: int) -> set[Combination]:
    return set(combinations(sorted((name, repr(value)) for name, value in case.items()), strength))
