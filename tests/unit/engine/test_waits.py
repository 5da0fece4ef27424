"""Waits are counted per cause and per step; on a CPU by the host's clock."""

from __future__ import annotations

import time

import pytest
import torch

from mobius.engine.waits import WaitClock
from mobius.schedule.lanes import WaitCause


def test_waits_are_summed_by_cause() -> None:
    clock = WaitClock(torch.device("cpu"))
    for _ in range(2):
        with clock.waiting(WaitCause.NEIGHBOURS):
            time.sleep(0.02)
    with clock.blocking(WaitCause.OPTIMIZER):
        time.sleep(0.01)

    seconds = clock.collect()

    assert set(seconds) == {"weights", "optimizer", "neighbours", "activations"}
    assert seconds[WaitCause.NEIGHBOURS] >= 0.04
    assert seconds[WaitCause.OPTIMIZER] >= 0.01
    assert seconds[WaitCause.WEIGHTS] == 0


def test_collecting_starts_anew() -> None:
    clock = WaitClock(torch.device("cpu"))
    with clock.waiting(WaitCause.WEIGHTS):
        time.sleep(0.001)
    assert clock.collect()[WaitCause.WEIGHTS] > 0

    assert clock.collect() == {cause.value: 0.0 for cause in WaitCause}


def test_an_error_while_waiting_is_not_swallowed() -> None:
    clock = WaitClock(torch.device("cpu"))

    with pytest.raises(KeyError, match="lost"), clock.waiting(WaitCause.NEIGHBOURS):
        raise KeyError("lost")
