"""What all tests share."""

from __future__ import annotations

import gc
from itertools import groupby

import pytest
from harness.grids import covering


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not ask for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `extended` the cases of each grid beyond those that cover it; these are the same in every run."""
    cases = [item for item in items if isinstance(item, pytest.Function) and item.get_closest_marker("grid")]
    for _, same in groupby(cases, key=lambda case: (case.parent, case.originalname)):
        grid = list(same)
        marker = grid[0].get_closest_marker("grid")
        strength = 1 if marker is None else marker.kwargs.get("strength", 1)
        chosen = covering([case.callspec.params for case in grid], strength=strength)
        for number, case in enumerate(grid):
            if number not in chosen:
                case.add_marker("extended")


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections, each of which took a quarter of a second with it."""
    gc.collect()
    gc.freeze()
