"""Updates run in order beside the main thread, and who needs a stage's weights gets the updated ones."""

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from harness.rank_memory import allocate_memory

from mobius.engine.stage_memory import StageMemory
from mobius.engine.update_queue import UpdateQueue
from mobius.models.layout import StageLayout

CPU = torch.device("cpu")


def held(
    gate: threading.Event, update: Callable[[], object], begun: threading.Event | None = None
) -> list[Callable[[], None]]:
    """An update of one piece that tells when it has begun and goes on when `gate` opens."""

    def run() -> None:
        if begun is not None:
            begun.set()
        assert gate.wait(10)
        update()

    return [run]


def noted(order: list[str], *names: str) -> list[Callable[[], None]]:
    """An update whose pieces write their names."""
    return [partial(order.append, name) for name in names]


def drain(queue: UpdateQueue) -> None:
    """Wait for all updates."""
    for stage in range(10):
        queue.wait(stage)


def streamed(queue: UpdateQueue) -> StageMemory:
    """A streamed stage 0 with a slot, which is updated in `queue`."""
    memory, _ = allocate_memory(
        {0: StageLayout.of({"weight": (4, 32)})},
        resident=(),
        num_slots=1,
        dtype=torch.bfloat16,
        gradient_dtype=torch.bfloat16,
        deferred_updates=(),
        device=CPU,
        updates=queue,
    )
    return memory[0]


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


@pytest.fixture
def busy(gate: threading.Event) -> UpdateQueue:
    """A queue whose thread is in stage 9's update until `gate` opens."""
    queue, begun = UpdateQueue(), threading.Event()
    queue.submit(9, held(gate, lambda: None, begun))
    assert begun.wait(10)
    return queue


def test_its_thread_is_prepared_before_the_first_update() -> None:
    order: list[tuple[str, int]] = []

    def note(name: str) -> None:
        order.append((name, threading.get_ident()))

    queue = UpdateQueue(prepare=partial(note, "prepared"))
    for stage in (1, 2):
        queue.submit(stage, [partial(note, f"updated {stage}")])
    drain(queue)
    names, threads = zip(*order, strict=True)
    assert names == ("prepared", "updated 1", "updated 2")
    assert len(set(threads)) == 1
    assert threading.get_ident() not in threads


def test_submitting_returns_at_once_and_of_those_that_wait_the_lowest_stage_goes_first(
    busy: UpdateQueue, gate: threading.Event
) -> None:
    order: list[str] = []
    for stage in (2, 0, 1):
        busy.submit(stage, noted(order, str(stage)))
    assert order == []
    gate.set()
    drain(busy)
    assert order == ["0", "1", "2"]


def test_an_update_that_cannot_begin_lets_others_go_first_and_runs_when_it_is_alone(
    busy: UpdateQueue, gate: threading.Event
) -> None:
    order: list[str] = []
    busy.submit(0, noted(order, "0"), can_begin=lambda: False)
    busy.submit(3, noted(order, "3"))
    gate.set()
    drain(busy)
    assert order == ["3", "0"]


def test_where_none_can_begin_the_one_submitted_first_is_waited_for_and_not_the_lowest() -> None:
    queue, arrived, order = (
        UpdateQueue(),
        {2: threading.Event(), 1: threading.Event(), 0: threading.Event()},
        list[int](),
    )

    def update(stage: int) -> None:
        assert arrived[stage].wait(10)
        order.append(stage)

    queue.submit(3, held(arrived[2], lambda: None))  # the thread is busy while the others are submitted
    for stage in (2, 1, 0):
        queue.submit(stage, [partial(update, stage)], can_begin=arrived[stage].is_set)
    arrived[2].set()
    queue.wait(2)
    assert order == [2], "before the lower ones, whose gradients are still to come"
    arrived[1].set()
    queue.wait(1)
    arrived[0].set()
    drain(queue)
    assert order == [2, 1, 0]


def test_a_lower_stage_comes_between_the_pieces_of_a_higher_one(busy: UpdateQueue, gate: threading.Event) -> None:
    order: list[str] = []

    def first_piece() -> None:
        order.append("4a")
        busy.submit(1, noted(order, "1a", "1b"))

    busy.submit(4, [first_piece, *noted(order, "4b", "4c")])
    gate.set()
    drain(busy)
    drain(busy)  # of the update that came while the first drained
    assert order == ["4a", "1a", "1b", "4b", "4c"]


def test_a_failed_piece_ends_its_update_and_no_other(busy: UpdateQueue, gate: threading.Event) -> None:
    order: list[str] = []

    def fail() -> None:
        raise ValueError("no such number")

    busy.submit(1, [fail, *noted(order, "1b")])
    busy.submit(2, noted(order, "2a", "2b"))
    gate.set()
    busy.wait(2)
    with pytest.raises(ValueError, match="no such number"):
        busy.wait(1)
    assert order == ["2a", "2b"]


def test_what_follows_an_update_has_run_when_the_wait_is_over() -> None:
    queue, gate, events = UpdateQueue(), threading.Event(), list[str]()
    queue.submit(0, held(gate, lambda: events.append("update")))
    queue.run_after_update(0, lambda: events.append("load"))
    assert events == []
    gate.set()
    queue.wait(0)
    assert events == ["update", "load"]


def test_a_stage_without_an_update_is_not_waited_for() -> None:
    queue, events = UpdateQueue(), list[str]()
    queue.run_after_update(3, lambda: events.append("load"))
    queue.wait(3)
    assert events == ["load"]


def test_a_failure_surfaces_where_the_stage_is_needed_with_its_name() -> None:
    queue = UpdateQueue()

    def fail() -> None:
        raise ValueError("no such number")

    queue.submit(4, [fail])
    with pytest.raises(ValueError, match="no such number") as caught:
        queue.wait(4)
    assert caught.value.__notes__ == ["while stage 4 was updated"]


def test_a_load_that_comes_early_copies_the_updated_weights_and_not_the_old_ones() -> None:
    queue, gate = UpdateQueue(), threading.Event()
    stage = streamed(queue)
    queue.submit(0, held(gate, lambda: stage.state.weights.fill_(7)))
    stage.weights.load()
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    assert (stage.weights.views()["weight"] == 7).all()
    opener.join()


def test_a_stage_is_ready_once_its_weights_were_waited_for_and_until_something_changes() -> None:
    queue, gate = UpdateQueue(), threading.Event()
    stage = streamed(queue)
    stage.weights.load()
    assert not stage.weights.is_ready()  # the copy is not waited for yet
    stage.weights.views()
    assert stage.weights.is_ready()

    queue.submit(0, held(gate, lambda: None))
    assert not stage.weights.is_ready()
    gate.set()
    stage.weights.wait_until_updated()
    assert stage.weights.is_ready()
