"""What is recorded is what was asked for, and by default nothing is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness.local_transport import LocalTransport, run_rank_threads

from mobius.config.config import Config
from mobius.config.options import OptionValue, config_from
from mobius.memory.spans import NO_SPANS
from mobius.output.recordings import Recordings, traced_steps
from mobius.output.trace import TraceFacts, read_trace
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


def test_by_default_nothing_is_recorded(tmp_path: Path) -> None:
    none = Recordings(Config(), rank=0, device=CPU, folder=tmp_path)

    assert none.spans is NO_SPANS
    assert none.step_hooks == ()


def test_each_option_has_a_watch_of_its_own(tmp_path: Path) -> None:
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
