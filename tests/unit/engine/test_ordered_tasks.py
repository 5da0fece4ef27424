"""Work runs in the order of its turns, in whatever thread and order it may begin."""

from __future__ import annotations

import threading

import pytest

from mobius.engine.reductions import OrderedTasks


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_work_runs_in_the_order_of_turns(order: tuple[int, ...]) -> None:
    turns, done = OrderedTasks(), list[int]()
    taken = [turns.add(lambda number=number: done.append(number)) for number in range(3)]
    for count, number in enumerate(order, start=1):
        taken[number].allow_start()
        begun = set(order[:count])
        assert done == [number for number in range(3) if begun >= set(range(number + 1))]
    for task in taken:
        task.wait()


def test_what_waits_runs_in_the_thread_that_is_at_work() -> None:
    """The one that lets it begin goes on at once, though another one's work takes long."""
    turns, gate, threads = OrderedTasks(), threading.Event(), list[str]()

    def work() -> None:
        threads.append(threading.current_thread().name)
        assert gate.wait(60)

    first, second = turns.add(work), turns.add(work)
    other = threading.Thread(target=first.allow_start, name="other")
    other.start()
    second.allow_start()
    gate.set()
    second.wait()
    other.join()
    assert threads == ["other", "other"]


def test_work_that_fails_is_told_to_whom_waits_for_it_and_the_others_run() -> None:
    turns, done = OrderedTasks(), list[str]()

    def fail() -> None:
        raise ValueError("lost a replica")

    first, second = turns.add(fail), turns.add(lambda: done.append("second"))
    second.allow_start()
    first.allow_start()
    second.wait()
    assert done == ["second"]
    with pytest.raises(ValueError, match="lost a replica"):
        first.wait()
