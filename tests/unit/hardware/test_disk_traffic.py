"""Counted requests: bytes count once, and time only while some request is under way."""

from __future__ import annotations

import time

import pytest

from mobius.hardware import disk_traffic
from mobius.hardware.disk_traffic import BusySpan, Traffic, rate_of


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_requests_that_overlap_are_one_span_and_pauses_are_none(clock: Clock) -> None:
    traffic = Traffic()
    with traffic.request(3):
        clock.now += 0.25
        with traffic.request(4):
            clock.now += 0.5
    clock.now += 7
    with traffic.request(5):
        clock.now += 0.125
    assert [*traffic.spans] == [BusySpan(100, 100.75, 7), BusySpan(107.75, 107.875, 5)]
    assert traffic.num_bytes == 12


def test_spans_end_where_requests_never_pause(clock: Clock) -> None:
    traffic = Traffic()
    with traffic.request(0):
        for _ in range(8):
            with traffic.request(10):
                clock.now += 0.75
    ends = [span.end for span in traffic.spans]
    assert [span.begin for span in traffic.spans] == [100, *ends[:-1]]
    assert max(end - span.begin for span, end in zip(traffic.spans, ends, strict=True)) <= 1.5
    assert sum(span.num_bytes for span in traffic.spans) == traffic.num_bytes == 80


def test_a_request_that_fails_ends_its_span(clock: Clock) -> None:
    traffic = Traffic()
    with pytest.raises(OSError, match="broken"), traffic.request(6):
        raise OSError("broken")
    clock.now += 5
    with traffic.request(1):
        clock.now += 1
    assert [(span.begin, span.end) for span in traffic.spans] == [(100, 100), (105, 106)]


def test_what_is_forgotten_still_counts(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = Traffic()
    for size in (1, 2, 4):
        with traffic.request(size):
            clock.now += 1
        clock.now += 1
    assert traffic.history() == [BusySpan(0, 0, 0), *traffic.spans]
    monkeypatch.setattr(disk_traffic, "MOST_SPANS", 2)
    short = Traffic()
    for size in (1, 2, 4):
        with short.request(size):
            clock.now += 1
    assert [span.num_bytes for span in short.history()] == [1, 2, 4]
    assert short.history()[0].begin == 0


def test_processes_that_share_a_disk_count_each_second_once() -> None:
    first = [BusySpan(10, 12, 300), BusySpan(20, 21, 100)]
    second = [BusySpan(11, 13, 300), BusySpan(20.25, 20.5, 100)]
    assert rate_of([*first, *second], since=0) == pytest.approx(800 / 4)
    assert rate_of([*first, *second], since=11) == pytest.approx(500 / 3)
    assert rate_of(first, since=30) == 0
