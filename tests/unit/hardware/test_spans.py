"""Spans say when work ran, for the chosen steps only, whichever thread did it."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from mobius.hardware.spans import NO_SPANS, SpanRecorder, compute_without_waits, messages_in_turn
from mobius.schedule.action import Direction
from mobius.schedule.lanes import Lane, LaneSpan

CPU = torch.device("cpu")
COMPUTE, WAIT, SEND, RECEIVE, UPDATE = (
    Lane.COMPUTE,
    Lane.WAIT,
    Lane.SEND,
    Lane.RECEIVE,
    Lane.OPTIMIZER,
)
FORWARD = Direction.FORWARD


class Message:
    """Counts who waits for it."""

    num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


def span(lane: Lane, start: float, end: float, *, name: str = "", peer: int | None = None) -> LaneSpan:
    return LaneSpan(lane, name, 1, start, end, peer)


def times(spans: list[LaneSpan], lane: Lane) -> list[tuple[float, float]]:
    return [(span.start, span.end) for span in spans if span.lane is lane]


@pytest.mark.parametrize("kind", ["device_span", "host_span"])
def test_a_span_lies_where_its_work_ran(kind: str) -> None:
    recorder = SpanRecorder(CPU, range(1, 2))
    with recorder.step(1):
        before = time.perf_counter()
        with getattr(recorder, kind)(Lane.LOAD, "L4"):
            entered = time.perf_counter()
            time.sleep(0.02)
            left = time.perf_counter()
        after = time.perf_counter()

    load = next(span for span in recorder.collect() if span.name == "L4")
    assert before <= load.start <= entered
    assert left <= load.end <= after
    assert (load.lane, load.step, load.peer) == (Lane.LOAD, 1, None)


def test_only_the_chosen_steps_are_recorded_and_what_begins_before_the_next() -> None:
    recorder = SpanRecorder(CPU, range(2, 4))
    for number in range(1, 6):
        with recorder.step(number), recorder.device_span(COMPUTE, f"F0.{number}"):
            pass
        # An update may begin while the main thread is between two steps.
        with recorder.host_span(UPDATE, f"behind {number}"):
            pass

    names = {span.name: span.step for span in recorder.collect()}
    assert names == {"step 2": 2, "F0.2": 2, "behind 2": 2, "step 3": 3, "F0.3": 3, "behind 3": 3}


def test_a_step_contains_what_ran_in_it() -> None:
    recorder = SpanRecorder(CPU, range(1, 3))
    for number in (1, 2):
        with recorder.step(number), recorder.device_span(COMPUTE, f"F0.{number}"):
            time.sleep(0.002)

    first, inside, second, _ = recorder.collect()
    assert (first.name, inside.name, second.name) == ("step 1", "F0.1", "step 2")
    assert first.start <= inside.start < inside.end <= first.end <= second.start


def test_an_update_that_outlasts_its_step_is_recorded_whole_with_the_step_it_began_in() -> None:
    recorder = SpanRecorder(CPU, range(1, 2))
    step_is_over = threading.Event()
    began = threading.Event()

    def update() -> None:
        with recorder.host_span(UPDATE, "U0"):
            began.set()
            assert step_is_over.wait(10)

    thread = threading.Thread(target=update)
    with recorder.step(1):
        thread.start()
        assert began.wait(10)
    step_is_over.set()
    thread.join()

    step, late = recorder.collect()
    assert (late.name, late.step) == ("U0", 1)
    assert late.end >= step.end


def test_threads_record_at_the_same_time_without_losing_a_span() -> None:
    recorder = SpanRecorder(CPU, range(1, 2))

    def work(thread: int) -> None:
        for number in range(200):
            with recorder.host_span(UPDATE, f"{thread}.{number}"):
                pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    with recorder.step(1):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    names = [span.name for span in recorder.collect() if span.lane is UPDATE]
    assert sorted(names) == sorted(f"{thread}.{number}" for thread in range(4) for number in range(200))


def test_a_message_is_named_after_the_action_that_sends_it() -> None:
    recorder = SpanRecorder(CPU, range(1, 2))
    with recorder.step(1):
        recorder.message(RECEIVE, 3, FORWARD, Message())
        with recorder.device_span(COMPUTE, "F0.1"):
            recorder.message(SEND, 1, FORWARD, Message())
        recorder.message(SEND, 1, FORWARD, Message())

    messages = [(span.lane, span.name, span.peer) for span in recorder.collect() if span.peer is not None]
    assert messages == [(RECEIVE, "from 3", 3), (SEND, "F0.1 to 1", 1), (SEND, "to 1", 1)]


def test_what_is_not_recorded_is_not_waited_for_and_costs_no_memory() -> None:
    message = Message()
    recorder = SpanRecorder(CPU, range(7, 8))
    for spans in (NO_SPANS, recorder):
        spans.message(SEND, 1, FORWARD, message)
        with spans.device_span(COMPUTE, "F0.0"), spans.host_span(UPDATE, "U0"):
            pass
    with recorder.step(6):
        recorder.message(SEND, 1, FORWARD, message)

    assert message.num_waits == 0
    assert recorder.collect() == []
    assert NO_SPANS.device_span(COMPUTE, "a") is NO_SPANS.host_span(UPDATE, "b"), "nothing new is made"


def test_compute_begins_when_the_waits_at_its_head_are_over() -> None:
    spans = [
        span(COMPUTE, 0.0, 10.0, name="waits for message and weights"),
        span(WAIT, 0.0, 3.0),
        span(WAIT, 3.0, 4.0),
        span(COMPUTE, 10.0, 12.0, name="waits for nothing"),
        span(WAIT, 12.0, 20.0, name="between actions"),
        span(COMPUTE, 20.0, 21.0),
        span(Lane.LOAD, 0.0, 5.0),
    ]

    told = compute_without_waits(spans)

    assert times(told, COMPUTE) == [(4.0, 10.0), (10.0, 12.0), (20.0, 21.0)]
    assert times(told, Lane.LOAD) == [(0.0, 5.0)]
    assert times(told, WAIT) == times(spans, WAIT)


def test_compute_without_waits_is_what_an_action_shows_that_blocks_the_host() -> None:
    recorder = SpanRecorder(CPU, range(1, 2))
    with recorder.step(1), recorder.device_span(COMPUTE, "F1.0"):
        with recorder.device_span(WAIT, "neighbours"):
            time.sleep(0.02)
            waited = time.perf_counter()
        time.sleep(0.01)
        worked = time.perf_counter()

    spans = {span.name: span for span in recorder.collect()}
    assert waited <= spans["neighbours"].end <= spans["F1.0"].start <= worked - 0.01
    assert worked <= spans["F1.0"].end


def test_messages_to_one_rank_travel_one_after_the_other_and_those_of_others_do_not_wait() -> None:
    spans = [
        span(SEND, 0.0, 4.0, peer=1),
        span(SEND, 1.0, 6.0, peer=1),
        span(SEND, 1.0, 3.0, peer=2),
        span(RECEIVE, 1.0, 2.0, peer=1),
        span(SEND, 7.0, 8.0, peer=1),
    ]

    told = messages_in_turn(spans)

    found = [(s.lane, s.peer, s.start, s.end) for s in told]
    assert [each[2:] for each in found if each[:2] == (SEND, 1)] == [(0.0, 4.0), (4.0, 6.0), (7.0, 8.0)]
    assert [each[2:] for each in found if each[:2] != (SEND, 1)] == [(1.0, 2.0), (1.0, 3.0)]


def test_a_gradient_that_overtakes_an_activation_keeps_its_time() -> None:
    told = messages_in_turn([span(SEND, 0.0, 6.0, peer=1), span(SEND, 1.0, 3.0, peer=1)])

    assert [(s.start, s.end) for s in told] == [(1.0, 3.0), (3.0, 6.0)]
