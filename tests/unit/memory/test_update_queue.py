"""Updates run in order beside the main thread, and who needs a stage's weights gets the updated ones."""

import threading
from collections.abc import Callable

import pytest
import torch

from mobius.memory.host_arena import HostArena
from mobius.memory.layout import StageLayout
from mobius.memory.update_queue import UpdateQueue
from mobius.memory.weight_slots import WeightSlots

CPU = torch.device("cpu")


def held(gate: threading.Event, update: Callable[[], None]) -> Callable[[], None]:
    """An update that begins when `gate` opens."""

    def run() -> None:
        assert gate.wait(10)
        update()

    return run


def test_submitting_returns_at_once_and_of_those_that_wait_the_lowest_stage_goes_first() -> None:
    queue, gate, order = UpdateQueue(), threading.Event(), list[int]()
    begun = threading.Event()
    queue.submit(5, held(gate, lambda: order.append(5)), can_begin=lambda: bool(begun.set()) or True)
    assert begun.wait(10)
    for stage in (2, 0, 1):
        queue.submit(stage, lambda stage=stage: order.append(stage))  # type: ignore[misc]
    assert order == []
    gate.set()
    queue.drain()
    assert order == [5, 0, 1, 2]


def test_an_update_that_cannot_begin_lets_others_go_first_and_runs_when_it_is_alone() -> None:
    queue, gate, order = UpdateQueue(), threading.Event(), list[int]()
    queue.submit(5, held(gate, lambda: order.append(5)))
    queue.submit(0, lambda: order.append(0), can_begin=lambda: False)
    queue.submit(3, lambda: order.append(3))
    gate.set()
    queue.drain()
    assert order in ([5, 3, 0], [3, 5, 0]), "5 need not have begun when 3 came"


def test_what_follows_an_update_has_run_when_the_wait_is_over() -> None:
    queue, gate, events = UpdateQueue(), threading.Event(), list[str]()
    queue.submit(0, held(gate, lambda: events.append("update")))
    queue.when_updated(0, lambda: events.append("load"))
    assert events == []
    gate.set()
    queue.wait(0)
    assert events == ["update", "load"]


def test_a_stage_without_an_update_is_not_waited_for() -> None:
    queue, events = UpdateQueue(), list[str]()
    queue.when_updated(3, lambda: events.append("load"))
    queue.wait(3)
    assert events == ["load"]


def test_a_failure_surfaces_where_the_stage_is_needed_with_its_name() -> None:
    queue = UpdateQueue()

    def fail() -> None:
        raise ValueError("no such number")

    queue.submit(4, fail)
    with pytest.raises(ValueError, match="no such number") as caught:
        queue.wait(4)
    assert caught.value.__notes__ == ["while stage 4 was updated"]


def test_a_load_that_comes_early_copies_the_updated_weights_and_not_the_old_ones() -> None:
    states = HostArena({0: StageLayout.of({"weight": (4, 32)})}, dtype=torch.bfloat16, register=False).states
    queue, gate = UpdateQueue(), threading.Event()
    slots = WeightSlots(states, num_slots=1, device=CPU, updates=queue)
    queue.submit(0, held(gate, lambda: states[0].weights.fill_(7)))  # type: ignore[func-returns-value]
    slots.load(0)
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    assert (slots.weights(0)["weight"] == 7).all()
    opener.join()
