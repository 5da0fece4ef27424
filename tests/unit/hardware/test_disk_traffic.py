"""Counted requests: bytes count once, and time only while some request is under way."""

from __future__ import annotations

import time

import pytest

from mobius.hardware import disk_traffic
from mobius.hardware.disk_traffic import BusySpan, Traffic, moved_by_kind


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
    assert moved_by_kind([*first, *second], [], since=0).ravel() == pytest.approx([800, 0, 4, *[0] * 6])
    assert moved_by_kind([], [*first, *second], since=11).ravel() == pytest.approx([0, 0, 0, 0, 500, 3, 0, 0, 0])
    assert not moved_by_kind(first, first, since=30).any()


def test_bytes_and_seconds_are_told_apart_by_whether_both_ways_were_under_way() -> None:
    reads = [BusySpan(10, 14, 400), BusySpan(20, 21, 70)]
    writes = [BusySpan(12, 16, 200), BusySpan(13, 14, 80), BusySpan(30, 30, 0)]
    alone, written, both = moved_by_kind(reads, writes, since=0).tolist()
    assert alone == pytest.approx([270, 0, 3])
    assert written == pytest.approx([0, 100, 2])
    assert both == pytest.approx([200, 180, 2])
