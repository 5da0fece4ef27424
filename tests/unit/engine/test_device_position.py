"""A device's place is told by what it has done of what its host has given it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mobius.engine import waits
from mobius.engine.waits import DevicePosition
from mobius.schedule.action import Action, ActionKind


class Device:
    """Points of one stream, of which so many are reached."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_recorded = self.num_reached = 0
        device = self

        class Event:
            def record(self, stream: object) -> None:
                device.num_recorded += 1
                self.number = device.num_recorded

            def query(self) -> bool:
                return self.number <= device.num_reached

        cuda = SimpleNamespace(Event=Event, current_stream=lambda index: None)
        monkeypatch.setattr(waits, "torch", SimpleNamespace(cuda=cuda))


ACTIONS = [
    Action(ActionKind.FORWARD_FIRST, 0, 0),
    Action(ActionKind.OFFLOAD, 0),
    Action(ActionKind.BACKWARD_FIRST, 0, 0),
]


def play(position: DevicePosition) -> None:
    position.begins()
    for index in range(len(ACTIONS)):
        position.enqueued(index)
    position.ends()


def test_it_is_told_at_each_point(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    position = DevicePosition(ACTIONS, torch.device("cuda", 0))
    assert str(position) == "idle"
    play(position)
    told = []
    for number in range(4):
        device.num_reached = number
        told.append(str(position))
    # Compute waits for the sums of replicas behind its last action.
    assert told == [f"at {ACTIONS[0]}", f"at {ACTIONS[2]}", "at the reduction over replicas", "idle"]
    play(position)
    play(position)
    assert str(position) == "at one of 2 passes"
