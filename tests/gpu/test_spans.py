"""On a GPU: spans are the device's own times, on the clock of the host."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from mobius.hardware.spans import SpanRecorder
from mobius.schedule.action import Direction
from mobius.schedule.lanes import Lane, LaneSpan

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


def busy(seconds: float) -> None:
    """Keep the current stream busy for about that long; the host goes on."""
    torch.cuda._sleep(int(seconds * 1e9))  # type: ignore[no-untyped-call]


def measure_busy(seconds: float) -> float:
    """What `busy` really takes: the clock of the GPU is not known."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    busy(seconds)
    torch.cuda.synchronize()
    return time.perf_counter() - start


class Message:
    """A message that is through behind what its stream does, as NCCL's is; `wait` holds up the current stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = stream.record_event()

    def wait(self) -> None:
        self._event.wait()


def named(recorder: SpanRecorder) -> dict[str, LaneSpan]:
    return {span.name: span for span in recorder.collect()}


def length(span: LaneSpan) -> float:
    return span.end - span.start


def test_a_device_span_is_the_time_on_the_device_although_the_host_goes_on() -> None:
    measure_busy(0.01)
    expected = measure_busy(0.05)
    recorder = SpanRecorder(CUDA, range(1, 2))
    with recorder.step(1):
        before = time.perf_counter()
        with recorder.device_span(Lane.COMPUTE, "F0.0"):
            busy(0.05)
        with recorder.device_span(Lane.COMPUTE, "F0.1"):
            busy(0.05)
        enqueued = time.perf_counter()
        torch.cuda.synchronize()
        after = time.perf_counter()

    spans = named(recorder)
    assert enqueued - before < expected / 2, "the host was held up"
    assert length(spans["F0.0"]) == pytest.approx(expected, rel=0.05)
    assert length(spans["F0.1"]) == pytest.approx(expected, rel=0.05)
    assert spans["F0.1"].start == pytest.approx(spans["F0.0"].end, abs=0.001)
    # On the host's clock: nothing before the host asked for it, nothing after it was seen to be over.
    assert before - 0.001 <= spans["F0.0"].start
    assert spans["F0.1"].end == pytest.approx(after, abs=0.001)


def test_work_on_another_stream_from_another_thread_lies_beside_compute() -> None:
    copies = torch.cuda.Stream(CUDA)
    recorder = SpanRecorder(CUDA, range(1, 2))

    def load() -> None:
        with torch.cuda.stream(copies), recorder.device_span(Lane.LOAD, "L2"):
            busy(0.03)

    with recorder.step(1):
        with recorder.device_span(Lane.COMPUTE, "F0.0"):
            busy(0.1)
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()

    spans = named(recorder)
    assert spans["F0.0"].start < spans["L2"].start < spans["L2"].end < spans["F0.0"].end


def test_compute_is_told_without_the_wait_for_another_stream() -> None:
    copies = torch.cuda.Stream(CUDA)
    measure_busy(0.01)
    expected = measure_busy(0.02)
    recorder = SpanRecorder(CUDA, range(1, 2))
    with recorder.step(1):
        with torch.cuda.stream(copies):
            busy(0.06)
            ready = copies.record_event()
        with recorder.device_span(Lane.COMPUTE, "F0.0"):
            with recorder.device_span(Lane.WAIT, "weights"):
                ready.wait()
            busy(0.02)

    spans = named(recorder)
    assert length(spans["F0.0"]) == pytest.approx(expected, rel=0.1)
    assert spans["F0.0"].start == pytest.approx(spans["weights"].end, abs=0.001)
    assert length(spans["weights"]) > expected


def test_a_message_ends_when_it_is_through_and_holds_up_no_compute() -> None:
    network = torch.cuda.Stream(CUDA)
    measure_busy(0.01)
    expected = measure_busy(0.05)
    recorder = SpanRecorder(CUDA, range(1, 2))
    with recorder.step(1):
        for _ in range(2):
            with torch.cuda.stream(network):
                busy(0.05)
            recorder.message(Lane.SEND, 1, Direction.FORWARD, Message(network))
        with recorder.device_span(Lane.COMPUTE, "F0.0"):
            busy(0.01)

    first, second = sorted((s for s in recorder.collect() if s.lane is Lane.SEND), key=lambda s: s.start)
    compute = named(recorder)["F0.0"]
    assert length(first) == pytest.approx(expected, rel=0.1)
    assert length(second) == pytest.approx(expected, rel=0.1)
    assert second.start == first.end
    assert compute.end < first.end


def test_times_of_a_later_step_are_as_exact_as_those_of_the_first() -> None:
    recorder = SpanRecorder(CUDA, range(1, 3))
    for number in (1, 2):
        with recorder.step(number):
            with recorder.device_span(Lane.COMPUTE, f"F0.{number}"):
                busy(0.01)
            torch.cuda.synchronize()
        time.sleep(0.5)

    spans = named(recorder)
    for number in (1, 2):
        step, compute = spans[f"step {number}"], spans[f"F0.{number}"]
        assert step.start - 0.0005 <= compute.start
        assert compute.end <= step.end + 0.0005
