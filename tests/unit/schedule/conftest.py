"""Schedules that several tests of this folder look at."""

import itertools

import pytest
from harness.schedules import spec_of

from mobius.schedule.build import build_schedule
from mobius.schedule.schedule import Schedule

_MICROBATCHES = (1, 2, 3, 4, 5, 8)


@pytest.fixture(scope="session")
def all_schedules() -> list[Schedule]:
    """Every combination of ranks, stages per rank, microbatches and slots that the project promises."""
    sizes = itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4), _MICROBATCHES, (None, 1, 2, 3))
    return [build_schedule(spec_of(*size)) for size in sizes]


@pytest.fixture
def small() -> Schedule:
    """Two ranks with two stages each, two microbatches, two slots."""
    return build_schedule(spec_of(2, 2, 2, 2))
