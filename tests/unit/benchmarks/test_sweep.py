"""benchmarks/sweep.py: one thing is changed at a time from what auto chose, and a run that fails is never the best."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sweep
import sweep_results
import sweep_settings
from launch import RunResult
from sweep_results import Result
from sweep_settings import Options


def result(options: Options, seconds: float | None, stages: int = 8, chunks: int = 4) -> Result:
    plan = {
        "num_stages": options.num_stages or stages,
        "num_chunks": options.num_chunks or chunks,
        "resident": [2, 1],
        "kept": [0, 0],
        "slots": [2, 2],
        "step_seconds": 1.0,
        "basis": "estimated",
        "gpu_gib": 5.0,
        "host_gib": 10.0,
    }
    return Result(
        options, [seconds] if seconds is not None else [], plan, 5.0, 8.0, "failed" if seconds is None else None
    )


def test_each_part_starts_from_the_fastest_before_and_failed_runs_do_not_count() -> None:
    asked = []

    def measure(options: Options) -> Result:
        asked.append(options)
        if options.num_stages == 4:
            return result(options, None)
        stages, chunks = {10: 1.0, 8: 1.1}.get(options.num_stages or 0, 1.5), {4: 0.2, 8: 0.1}
        return result(options, stages + chunks.get(options.num_chunks or 0, 0.5) - 0.01 * (options.resident or 0))

    auto = result(Options(), 1.3)
    found = list(sweep.sweep(measure, auto, num_layers=8, batch_size=16, num_ranks=2))

    assert asked == [
        Options(10, 4),
        *(Options(10, chunks) for chunks in (2, 8)),
        *(Options(10, 8, resident) for resident in (2, 5, 3, 1)),
        *(Options(stages, 8) for stages in (4, 2)),
        Options(10, 8, 0),
    ]
    best = auto
    for each in found:
        best = sweep_results.faster(best, each)
    assert best.options == Options(10, 8, 5)


def test_what_is_swept_is_possible() -> None:
    assert sweep.stage_numbers(32, 4, chosen=36) == [32, 16, 8]
    assert sweep.stage_numbers(32, 4, chosen=16) == [36, 32, 8]
    assert sweep.stage_numbers(2, 4, chosen=4) == []
    assert set(sweep.chunk_numbers(64, 4, chosen=8)) == {4, 16}
    assert all(64 % number == 0 for number in sweep.chunk_numbers(64, 4, chosen=4))
    assert sweep.residencies(3, [2, 2]) == [2, 3, 1, 0]


def test_options_leave_what_is_not_given_to_auto() -> None:
    assert Options(8, None, 2).words() == ["--num_stages", "8", "--num_chunks", "auto", "--resident_stages", "2"]


def test_a_result_is_the_median_between_the_first_and_the_last_step_and_a_failure_has_its_last_lines() -> None:
    steps = [
        {
            "step_seconds": seconds,
            "reserved_gpu_memory_gib": 3.0,
            "peak_host_memory_gib": 4.0,
            "wait_seconds": {"weights": seconds / 10},
        }
        for seconds in (9.0, 8.0, 1.0, 3.0, 2.0)
    ]
    told = {"steps": steps, "plan": {}, "start_host_gib": {"imports": 0.5}, "start": {"imports": 7.0}}
    run = RunResult(output=told, problem=None, log_end="", machine_bytes=2**29, seconds=1.0)
    result = sweep_results.result_of(Options(), run)
    assert (result.step_seconds, result.host_gib, result.start_host_gib) == (3.0, 4.0, {"imports": 0.5})
    assert (result.all_step_seconds, result.start_seconds) == ([9.0, 8.0, 1.0, 3.0, 2.0], {"imports": 7.0})
    assert (result.wait_seconds, result.machine_gib) == ({"weights": 0.3}, 0.5)
    failed = RunResult(output=None, problem="failed", log_end="a\nb\nc", machine_bytes=0, seconds=1.0)
    assert sweep_results.result_of(Options(), failed).problem == "failed: b c"


def test_a_prediction_is_laid_beside_what_was_measured() -> None:
    assert sweep_results.beside(5.5, 5.0) == "5.5 / 5 (+10.0%)"
    assert sweep_results.beside(None, 5.0) == "-"


def test_the_settings_cover_what_is_to_be_predicted() -> None:
    assert len(sweep_settings.CHOICE) == 8
    assert len(sweep_settings.PREDICTION) >= 12
    assert {setting.size for setting in sweep_settings.PREDICTION} == {"1b", "7b", "13b"}
    limits = [setting.limit for setting in sweep_settings.PREDICTION if setting.limit is not None]
    lengths = [setting.seq_length for setting in sweep_settings.PREDICTION]
    assert (min(limits), max(limits), min(lengths), max(lengths)) == (8, 64, 128, 4096)


def test_a_report_of_runs_that_are_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sweep.main(["report", "--output", str(tmp_path / "rows.jsonl")])
    assert "rows.jsonl is no file; name the one" in capsys.readouterr().err


@pytest.mark.extended
def test_a_whole_run_of_the_smallest_model_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rows.jsonl"
    trial = ["--size", "tiny", "--gpus", "1", "--no_limit", "--steps", "1", "--runs", "2", "--output", str(output)]
    small = ["--device", "cpu", "--fp32", "--batch_size", "4", "--seq_length", "16", "--compile", "off"]

    sweep.main(["choice", "13b", *trial, "--", *small])

    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["problem"] for row in rows] == [None, None], capsys.readouterr().out
    assert rows[0]["plan"]["num_stages"] == 4
    assert rows[1]["options"]["num_stages"] == 6
    table = "| tiny 64x128 no limit | 4 / "
    assert table in capsys.readouterr().out

    sweep.main(["report", "--output", str(output)])

    told = capsys.readouterr().out
    assert table in told
    assert told.count("| tiny 64x128 no limit | ") == 3  # of choice, and a prediction for each run
