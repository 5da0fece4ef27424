"""What all tests share."""

from __future__ import annotations

import gc
import logging
from itertools import groupby

import pytest
from harness.forked import library_environment
from harness.grids import covering

gc.disable()  # until all tests are collected: collections of what is imported took half of that time
with library_environment():
    import datasets  # noqa: F401
    import transformers  # noqa: F401
    from harness import runs

pytest_plugins = ["harness.workers"]


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not ask for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `extended` the cases of each grid beyond those that cover it; these are the same in every run.

    Cases that run on demand in any case do not count.
    """
    cases = [item for item in items if isinstance(item, pytest.Function) and item.get_closest_marker("grid")]
    for _, same in groupby(cases, key=lambda case: (case.parent, case.originalname)):
        whole = list(same)
        grid = [case for case in whole if case.get_closest_marker("extended") is None]
        marker = whole[0].get_closest_marker("grid")
        strength = 1 if marker is None else marker.kwargs.get("strength", 1)
        chosen = covering([case.callspec.params for case in grid], strength=strength)
        for number, case in enumerate(grid):
            if number not in chosen:
                case.add_marker("extended")


@pytest.hookimpl(tryfirst=True)  # before pytest adds its own handlers
def pytest_runtest_setup() -> None:
    """Forget the levels and handlers that a command which ran in this process left: they would hide records."""
    root = logging.getLogger()
    root.handlers = [handler for handler in root.handlers if not type(handler).__module__.startswith("mobius.")]
    root.setLevel(logging.WARNING)
    logging.getLogger("mobius").setLevel(logging.NOTSET)


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each process of a run two threads, however many processes share the CPUs.

    torch adds up some products in another order with another number of threads.
    """
    usual = runs.environment
    monkeypatch.setattr(runs, "environment", lambda cache: usual(cache) | {"OMP_NUM_THREADS": "2"})


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections, each of which took a quarter of a second with it.

    A test makes few cycles, and many objects that live for a moment: collections that are rare find as much.
    """
    trace = logging.getLogger("torch.__trace")  # of compilers; pytest would ask for it, as it does not propagate
    trace.handlers.clear()
    trace.propagate = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()
