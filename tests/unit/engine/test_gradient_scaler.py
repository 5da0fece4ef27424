"""fp16's loss scale comes down at once and goes up slowly; other formats have none."""

import pytest

from mobius.engine.optimizer_stepper import GradientScaler


def test_every_overflow_halves_it() -> None:
    scale = GradientScaler(is_dynamic=True, initial=2.0**14)
    values = []
    for _ in range(3):
        scale.update(is_finite=False)
        values.append(scale.value)

    assert values == [8192.0, 4096.0, 2048.0]


def test_it_doubles_after_a_whole_interval_without_an_overflow_and_counts_anew() -> None:
    scale = GradientScaler(is_dynamic=True, initial=8.0, growth_interval=3)
    values = []
    for _ in range(7):
        scale.update(is_finite=True)
        values.append(scale.value)

    assert values == [8, 8, 16, 16, 16, 32, 32]


def test_an_overflow_begins_the_interval_anew() -> None:
    scale = GradientScaler(is_dynamic=True, initial=8.0, growth_interval=3)
    for is_finite in (True, True, False, True, True):
        scale.update(is_finite=is_finite)
    assert scale.value == 4

    scale.update(is_finite=True)
    assert scale.value == 8


def test_it_never_falls_below_one() -> None:
    scale = GradientScaler(is_dynamic=True, initial=2.0)
    for _ in range(5):
        scale.update(is_finite=False)

    assert scale.value == 1.0


@pytest.mark.parametrize("is_finite", [True, False])
def test_without_fp16_it_is_one_whatever_happens(is_finite: bool) -> None:
    scale = GradientScaler(is_dynamic=False, growth_interval=1)
    for _ in range(3):
        scale.update(is_finite=is_finite)

    assert scale.value == 1.0


def test_by_default_it_reaches_one_only_after_more_overflows_than_stop_a_run() -> None:
    scale = GradientScaler(is_dynamic=True)
    for _ in range(10):
        scale.update(is_finite=False)

    assert scale.value > 1
