"""trace.json opens in Chrome's and Perfetto's viewers and reads back as what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.traces import read_trace

from mobius.errors import ConfigError
from mobius.reporting.trace import (
    Trace,
    TraceFacts,
    merge_parts,
    parse_action_name,
    write_part,
    write_trace,
)
from mobius.schedule.lanes import Lane, LaneSpan

FACTS = TraceFacts(num_ranks=2, num_stages=4, num_microbatches=1, num_slots=2, device="cpu")
# perf_counter counts from the machine's start.
BOOT = 987_654.0


def span(lane: str, name: str, start: float, end: float, *, step: int = 4, peer: int | None = None) -> LaneSpan:
    """Times in milliseconds of the trace."""
    return LaneSpan(Lane(lane), name, step, BOOT + start / 1000, BOOT + end / 1000, peer)


def small_trace() -> Trace:
    first = (
        span("step", "step 4", 0, 100),
        span("wait", "weights", 0, 10),
        span("load", "L0", 1, 9.5),
        span("compute", "F0.0", 10, 30),
        span("send", "F0.0 to 1", 30, 33, peer=1),
        span("receive", "from 1", 12, 70, peer=1),
        span("compute", "B0.0", 70, 95),
        span("offload", "O0", 95, 99),
        span("optimizer", "U0", 99, 120),
        span("step", "step 5", 100, 210, step=5),
        span("compute", "F0.0", 130, 150, step=5),
        span("step", "step 6", 210, 300, step=6),
    )
    second = (span("step", "step 4", 1, 101), span("compute", "F1.0", 33, 50), span("step", "step 5", 101, 212, step=5))
    return Trace(FACTS, (first, second))


def test_the_file_reads_back_as_what_was_measured(tmp_path: Path) -> None:
    trace = small_trace()

    write_trace(tmp_path / "trace.json", trace)
    back = read_trace(tmp_path / "trace.json")

    assert back.facts == trace.facts
    for spans, read in zip(trace.spans, back.spans, strict=True):
        assert [(s.lane, s.name, s.step, s.peer) for s in read] == [(s.lane, s.name, s.step, s.peer) for s in spans]
        for one, other in zip(spans, read, strict=True):
            # Microseconds from the first span on: a nanosecond is the file's grain.
            assert other.start == pytest.approx(one.start - BOOT, abs=2e-9)
            assert other.end == pytest.approx(one.end - BOOT, abs=3e-9)


def test_events_are_complete_ones_in_microseconds_with_what_they_are_about(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", small_trace())
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    complete = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"M", "X"}
    by_name = {(event["pid"], event["name"]): event for event in reversed(complete)}
    forward = by_name[0, "F0.0"]
    assert (forward["ts"], forward["dur"]) == (pytest.approx(10_000, abs=0.01), pytest.approx(20_000, abs=0.01))
    assert forward["args"] == {"step": 4, "stage": 0, "microbatch": 0}
    assert by_name[0, "L0"]["args"] == {"step": 4, "stage": 0}
    assert by_name[0, "F0.0 to 1"]["args"] == {"step": 4, "stage": 0, "microbatch": 0, "peer": 1}
    assert by_name[0, "weights"]["args"] == {"step": 4}
    assert by_name[1, "F1.0"]["args"]["stage"] == 1


def test_every_rank_and_every_lane_of_it_is_named_in_the_order_of_the_picture(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", small_trace())
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "rank 0 (cpu)", 1: "rank 1 (cpu)"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = {(e["pid"], e["tid"]): e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert [threads[key] for key in sorted(order, key=lambda key: (key[0], order[key]))] == [
        "step", "compute", "wait", "load", "offload", "send to 1", "receive from 1", "optimizer",
        "step", "compute",
    ]  # fmt: skip
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == set(threads)


def test_messages_over_different_edges_have_lanes_of_their_own(tmp_path: Path) -> None:
    spans = (span("send", "F0.0 to 1", 0, 5, peer=1), span("send", "B0.0 to 3", 2, 7, peer=3))
    write_trace(tmp_path / "trace.json", Trace(FACTS, (spans, ())))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    assert len({event["tid"] for event in events if event["ph"] == "X"}) == 2


def test_the_parts_of_all_ranks_become_one_trace_and_are_gone(tmp_path: Path) -> None:
    trace = small_trace()
    for rank in (1, 0):
        write_part(tmp_path, rank, trace.spans[rank])

    assert merge_parts(tmp_path, FACTS) == trace
    assert list(tmp_path.iterdir()) == []


def test_the_step_shown_is_the_second_or_the_only_one() -> None:
    trace = small_trace()
    assert trace.steps == [4, 5, 6]
    assert trace.choose_step(None) == 5
    assert trace.choose_step(6) == 6
    only = Trace(FACTS, ((span("step", "step 9", 0, 1, step=9),), ()))
    assert only.choose_step(None) == 9


@pytest.mark.parametrize(("step", "told"), [(3, "has steps 4, 5, 6, not step 3"), (7, "not step 7")])
def test_a_step_that_was_not_recorded_is_refused(step: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        small_trace().choose_step(step)


def test_a_trace_without_steps_shows_none() -> None:
    with pytest.raises(ConfigError, match="has no steps"):
        Trace(FACTS, ((), ())).choose_step(None)


def test_what_crosses_the_border_of_a_step_is_cut_there() -> None:
    trace = small_trace()

    start, end = trace.window(5)
    assert (start - BOOT, end - BOOT) == (pytest.approx(0.100), pytest.approx(0.212))
    (update,) = [span for span in trace.within(0, 5) if span.name == "U0"]
    assert (update.start, update.end) == (start, pytest.approx(BOOT + 0.120))
    assert "B0.0" not in {span.name for span in trace.within(0, 5)}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("F4.1", ("F", 4, 1)),
        ("B12.30", ("B", 12, 30)),
        ("H8.1", ("H", 8, 1)),
        ("L4", ("L", 4, None)),
        ("OA4.1", ("OA", 4, 1)),
        ("PA4.1", ("PA", 4, 1)),
        ("U0", ("U", 0, None)),
        ("from 1", None),
    ],
)
def test_a_name_of_the_grid_is_taken_apart(name: str, parts: tuple[str, int, int | None] | None) -> None:
    action = parse_action_name(name)
    assert (None if action is None else (action.letter, action.stage, action.microbatch)) == parts
