"""A run of two processes leaves one trace of both, on one clock, and a profile of each."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest
from harness.runs import make_checkpoint, make_dataset, run_main
from harness.schedules import spec_of
from harness.traces import read_trace

from mobius.reporting.trace import Trace
from mobius.schedule.build import build_schedule
from mobius.schedule.lanes import Lane, LaneSpan

STEPS = 4
TRACED = [2, 3, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the run left in --save_dir."""
    place = tmp_path_factory.mktemp("run")
    make_checkpoint(place / "model", num_layers=4)
    make_dataset(place / "data.jsonl")
    arguments = f"""--model_path model --dataset data.jsonl --fp32 --num_stages 4 --num_chunks 3 --batch_size 6
        --seq_length 24 --num_iterations {STEPS} --save_dir out --trace --profile_steps 2-3""".split()
    result = run_main(2, place, *arguments)
    assert result.returncode == 0, result.stdout
    assert f"trace of steps {TRACED[0]} to {TRACED[-1]}" in result.stdout
    return place / "out"


@pytest.fixture(scope="module")
def trace(folder: Path) -> Trace:
    return read_trace(folder / "trace.json")


def of_lane(spans: tuple[LaneSpan, ...], lane: Lane) -> list[LaneSpan]:
    return sorted((span for span in spans if span.lane is lane), key=lambda span: (span.start, span.end))


def test_each_traced_step_has_every_action_of_the_schedule_once_in_its_order(trace: Trace) -> None:
    schedule = build_schedule(spec_of(2, 2, 3, 2))
    assert trace.steps == TRACED
    for rank, actions in enumerate(schedule.actions):
        expected = [str(action) for action in actions if action.kind not in ("load", "offload")]
        for step in TRACED:
            names = [s.name for s in of_lane(trace.spans[rank], Lane.COMPUTE) if s.step == step]
            assert names == expected


def test_loads_offloads_and_updates_are_there_for_every_stage(trace: Trace) -> None:
    for rank in (0, 1):
        own = range(rank, 4, 2)
        spans = trace.spans[rank]
        assert {s.name for s in of_lane(spans, Lane.LOAD)} == {f"L{stage}" for stage in own}
        assert {s.name for s in of_lane(spans, Lane.OFFLOAD)} == {f"O{stage}" for stage in own}
        updates = [s.name for s in of_lane(spans, Lane.OPTIMIZER)]
        assert set(updates) == {f"U{stage}" for stage in own}
        # An update of the step before may begin in the first that is traced.
        assert {updates.count(name) for name in updates} <= {len(TRACED), len(TRACED) + 1}


def test_spans_of_a_lane_take_turns(trace: Trace) -> None:
    # Not loads: on a CPU the main thread and the optimizer's copy at the same time; on a GPU they share a stream.
    # Times are rounded to nanoseconds when they are written.
    for spans in trace.spans:
        for lane in set(Lane) - {Lane.LOAD}:
            own = of_lane(spans, lane)
            overlaps = [(a.name, b.name) for a, b in pairwise(own) if b.start < a.end - 1e-6 and a.peer == b.peer]
            assert overlaps == [], lane


def test_the_ranks_share_a_clock_so_that_no_message_arrives_before_it_is_sent(trace: Trace) -> None:
    starts = {(s.step, s.name): s.start for spans in trace.spans for s in of_lane(spans, Lane.COMPUTE)}
    for step in TRACED:
        for microbatch in range(3):
            forward = [starts[step, f"F{stage}.{microbatch}"] for stage in range(4)]
            backward = [starts[step, f"B{stage}.{microbatch}"] for stage in reversed(range(4))]
            assert forward + backward == sorted(forward + backward)


def test_messages_are_named_after_their_actions(trace: Trace) -> None:
    sent = {s.name for s in of_lane(trace.spans[0], Lane.SEND)}
    assert {"F0.0 to 1", "F2.2 to 1", "B2.1 to 1"} <= sent
    assert {s.name for s in of_lane(trace.spans[1], Lane.RECEIVE)} == {"from 0"}


def test_the_picture_is_beside_the_trace_and_nothing_of_the_making_is_left(folder: Path) -> None:
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in folder.iterdir() if "rank" in path.name or "partial" in path.name] == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_profile_names_the_actions_of_its_rank_as_the_grid_does(folder: Path, rank: int) -> None:
    with gzip.open(folder / "profile" / f"rank{rank}.json.gz", "rt") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]

    assert names.count(f"F{rank}.0") == 2, "once in each of the two profiled steps"
    assert f"F{1 - rank}.0" not in names
