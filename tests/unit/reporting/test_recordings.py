"""Recordings hold what was asked for; by default there are none."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness.local_transport import LocalTransport, run_rank_threads
from harness.traces import read_trace

from mobius.config.config import Config, config_from
from mobius.config.options import OptionValue
from mobius.hardware.spans import NO_SPANS
from mobius.reporting.recordings import Recordings, StepProfiler, traced_steps
from mobius.reporting.trace import TraceFacts
from mobius.schedule.lanes import Lane

CPU = torch.device("cpu")


def recordings(folder: Path, rank: int = 0, **values: OptionValue) -> Recordings:
    return Recordings(config_from(values), rank=rank, device=CPU, folder=folder)


@pytest.mark.parametrize(
    ("num_iterations", "expected"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [2, 3, 4]), (5, [3, 4, 5]), (6, [3, 4, 5]), (10_000, [3, 4, 5])],
)
def test_steps_3_to_5_are_traced_or_the_last_three_of_a_shorter_run(num_iterations: int, expected: list[int]) -> None:
    assert list(traced_steps(num_iterations)) == expected


def test_each_option_has_a_watch_of_its_own_and_by_default_there_is_none(tmp_path: Path) -> None:
    none = Recordings(Config(), rank=0, device=CPU, folder=tmp_path)
    assert none.spans is NO_SPANS
    assert none.step_hooks == ()
    assert len(recordings(tmp_path, trace=True).step_hooks) == 1
    assert len(recordings(tmp_path, profile_steps="1").step_hooks) == 1
    assert len(recordings(tmp_path, trace=True, profile_steps="1-2").step_hooks) == 2
    assert recordings(tmp_path, profile_steps="1").spans is NO_SPANS


def test_all_ranks_come_together_in_one_trace_and_one_picture(tmp_path: Path) -> None:
    facts = TraceFacts(num_ranks=2, num_stages=2, num_microbatches=1, num_slots=None, device="cpu")

    def work(transport: LocalTransport) -> None:
        own = recordings(tmp_path, transport.rank, trace=True, num_iterations=2)
        for number in (1, 2):
            (watch,) = own.step_hooks
            with watch(number), own.spans.device_span(Lane.COMPUTE, f"F{transport.rank}.0"):
                time.sleep(0.001)
        own.write(facts, transport)

    run_rank_threads(2, work)

    assert {path.name for path in tmp_path.iterdir()} == {"trace.json", "timeline.png"}
    trace = read_trace(tmp_path / "trace.json")
    assert trace.steps == [1, 2]
    assert [{span.name for span in spans} for spans in trace.spans] == [
        {"step 1", "step 2", "F0.0"},
        {"step 1", "step 2", "F1.0"},
    ]


def test_without_a_trace_nothing_is_written(tmp_path: Path) -> None:
    facts = TraceFacts(num_ranks=1, num_stages=1, num_microbatches=1, num_slots=None, device="cpu")

    run_rank_threads(1, lambda transport: recordings(tmp_path, profile_steps="1").write(facts, transport))

    assert list(tmp_path.iterdir()) == []


def test_a_recorded_run_has_the_numbers_of_a_plain_one_and_the_files_beside_them(
    run: Callable[..., None], workplace: Path
) -> None:
    numbers = []
    for options in ([], ["--trace", "--profile_steps", "2", "--overwrite_output_dir"]):
        run("--learning_rate", "1e-3", *options)
        rows = [json.loads(line) for line in (workplace / "out" / "metrics.jsonl").read_text().splitlines()]
        numbers.append([(row["loss"], row["grad_norm"]) for row in rows])

    assert numbers[0] == numbers[1]
    assert (workplace / "out" / "profile" / "rank0.json.gz").stat().st_size > 0
    assert (workplace / "out" / "timeline.png").exists()
    trace = read_trace(workplace / "out" / "trace.json")
    assert trace.steps == [1, 2, 3]
    assert {span.name for span in trace.spans[0]} >= {"D0", "F0.0", "F1.1", "B0.1", "L1", "O0", "U0", "U1"}


def play(profiler: StepProfiler, steps: range) -> None:
    """Steps that each do one addition, marked with the number of the step."""
    for number in steps:
        with profiler.step(number), torch.profiler.record_function(f"my step {number}"):
            torch.ones(8) + number


def names_in(path: Path) -> set[str]:
    with gzip.open(path, "rt") as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


def test_the_profile_holds_the_operations_of_its_steps_only_and_is_written_right_behind_the_last(
    tmp_path: Path,
) -> None:
    path = tmp_path / "profile" / "rank0.json.gz"
    profiler = StepProfiler(torch.device("cpu"), range(2, 4), path)

    play(profiler, range(1, 3))
    assert not path.exists()
    play(profiler, range(3, 4))

    names = names_in(path)
    play(profiler, range(4, 6))
    assert {name for name in names if name.startswith("my step")} == {"my step 2", "my step 3"}
    assert "aten::add" in names


def test_steps_before_the_first_cost_no_profiler_and_leave_nothing(tmp_path: Path) -> None:
    profiler = StepProfiler(torch.device("cpu"), range(9, 10), tmp_path / "rank0.json.gz")

    with profiler.step(1):
        assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    assert list(tmp_path.iterdir()) == []


def test_a_profile_that_cannot_be_written_is_told_and_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()

    play(StepProfiler(torch.device("cpu"), range(1, 2), tmp_path / "file" / "rank0.json.gz"), range(1, 3))

    (message,) = caplog.messages
    assert message.startswith(f"--profile_steps: cannot write {tmp_path / 'file' / 'rank0.json.gz'}")
