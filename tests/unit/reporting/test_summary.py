"""The summary of a run has its settings, times with the optimizer in them, and every rank's memory."""

import re
import tracemalloc
from pathlib import Path

import pytest

from mobius.errors import CheckpointError
from mobius.planner.step_prediction import Resource, StepTimePrediction
from mobius.reporting.events import StepMetrics
from mobius.reporting.summary import RankMemory, StepTotals, closing_lines, steady_seconds, write_report

GIB = 2**30


def steps(*seconds: float) -> StepTotals:
    totals = StepTotals()
    for number, each in enumerate(seconds, start=1):
        totals.add(
            StepMetrics(
                step=number,
                epoch=0.5 * number,
                loss=5.0 - number,
                grad_norm=1.0,
                learning_rate=1e-5,
                step_seconds=each,
                tokens_per_second=1000 / each,
                num_tokens=1000,
                num_targets=600,
                num_samples=64,
                padding=0.1 * number,
                peak_gpu_memory_gib=1.0,
                reserved_gpu_memory_gib=1.0,
                peak_host_memory_gib=1.0,
                wait_seconds={"weights": 0.5, "optimizer": each / 4, "neighbours": 0.0},
                skipped_steps=1,
                loss_scale=None,
            )
        )
    return totals


def gpu_rank(rank: int) -> RankMemory:
    return RankMemory(
        rank=rank,
        device="NVIDIA L20",
        peak_allocated_bytes=12 * GIB,
        peak_reserved_bytes=13 * GIB + GIB // 2,
        persistent_bytes=3 * GIB,
        peak_host_bytes=(30 + rank) * GIB,
    )


ON_CPU = RankMemory(
    rank=0,
    device="cpu",
    peak_allocated_bytes=None,
    peak_reserved_bytes=None,
    persistent_bytes=None,
    peak_host_bytes=GIB,
)
TIMINGS = {"loading": 12.5, "training": 20.25, "saving": 3.0}


def report(path: Path, per_rank: list[RankMemory]) -> str:
    write_report(
        path, "batch_size: 64\nnum_stages: 8\n", "stage 0: layers 0-3", steps(10.0, 4.0, 6.0), per_rank, TIMINGS
    )
    return path.read_text()


def value(text: str, name: str) -> str:
    found = re.search(rf"^{re.escape(name)} +(.+)$", text, re.MULTILINE)
    assert found is not None, f"{name!r} is not in\n{text}"
    return found[1]


TOLD = {
    "seconds per step, median": "6.000 s",
    "seconds per step, mean": "6.667 s",
    "seconds per step, first": "10.000 s",
    "training, optimizer included": "20.25 s",
    "tokens per second, without padding": "150",  # 3000 tokens in 20 s
    "loading": "12.50 s",
    "saving": "3.00 s",
    "loss, first step": "4.0000",
    "loss, last step": "2.0000",
    "skipped steps": "1",
    "epochs": "1.500",
    "samples, repeated ones counted": "192",
    "padding, share of all positions": "20.0%",  # steps have equally many positions
}


def test_times_losses_and_counts_are_told_beside_settings_and_plan(tmp_path: Path) -> None:
    text = report(tmp_path / "r.txt", [gpu_rank(0)])

    assert {name: value(text, name) for name in TOLD} == TOLD
    assert "batch_size: 64\nnum_stages: 8\n" in text
    assert "stage 0: layers 0-3" in text


def test_waits_are_told_by_cause(tmp_path: Path) -> None:
    text = report(tmp_path / "r.txt", [gpu_rank(0)])

    assert value(text, "weights").split() == ["0.500", "7.5%"]  # 1.5 of 20 s
    assert value(text, "optimizer").split() == ["1.500", "25.0%"]
    assert value(text, "neighbours").split() == ["0.000", "0.0%"]


def test_every_rank_has_its_peak_and_persistent_memory(tmp_path: Path) -> None:
    text = report(tmp_path / "r.txt", [gpu_rank(1), gpu_rank(0)])

    rows = [re.split(r" {2,}", line) for line in text.splitlines() if "NVIDIA L20" in line]
    assert rows == [
        ["0", "NVIDIA L20", "12.00 GiB", "13.50 GiB", "3.00 GiB", "30.00 GiB"],
        ["1", "NVIDIA L20", "12.00 GiB", "13.50 GiB", "3.00 GiB", "31.00 GiB"],
    ]
    assert "host memory of all ranks together: 61.00 GiB" in text


def test_a_rank_without_a_gpu_has_no_gpu_memory(tmp_path: Path) -> None:
    text = report(tmp_path / "r.txt", [ON_CPU])

    assert re.search(r"^0 +cpu +- +- +- +1\.00 GiB$", text, re.MULTILINE)


def test_an_older_summary_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("old")

    assert "old" not in report(tmp_path / "r.txt", [gpu_rank(0)])
    assert [path.name for path in tmp_path.iterdir()] == ["r.txt"]


def test_a_place_that_cannot_be_written_is_an_error_for_the_user(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot write .*absent"):
        report(tmp_path / "absent" / "r.txt", [gpu_rank(0)])


def test_a_forecast_is_laid_beside_the_steady_steps(tmp_path: Path) -> None:
    path = tmp_path / "result.txt"
    step_time_prediction = StepTimePrediction(5.4, (), (), (), (), Resource.COMPUTE, 0.09, "estimated (4 x L20)")
    write_report(
        path, "batch_size: 64\n", "stage 0", steps(10.0, 4.0, 6.0), [gpu_rank(0)], TIMINGS, step_time_prediction
    )
    text = path.read_text()
    assert value(text, "seconds per step, predicted") == "5.400 s, limited by compute"
    assert value(text, "prediction off by") == "-10.0% of a steady step, estimated (4 x L20)"
    assert "predicted" not in report(tmp_path / "other.txt", [gpu_rank(0)])


def test_the_closing_lines_tell_what_was_trained_where_time_went_and_the_peaks() -> None:
    timings = {"loading": 12.5, "training": 20.0, "saving": 7.5}

    trained, time, memory = closing_lines(steps(10.0, 4.0, 6.0), [gpu_rank(0), gpu_rank(1)], timings, 0.415)

    assert trained == (
        "trained 3 steps, 1.500 epochs done: 192 samples, 3,000 tokens without padding, in 0:00:20 "
        "(150 tokens/s, 42 % MFU)"
    )
    assert time == (
        "time: loading 12.5 s (31 %), training 20.0 s (50 %), saving 7.5 s (19 %); in steps, computation waited for "
        "weights 8 %, optimizer 25 %, neighbours 0 %, activations 0 %"
    )
    assert memory == "memory: at most 12.00 GiB on the fullest GPU, 61.00 GiB of host memory of all ranks together"


def test_without_a_gpu_the_closing_lines_tell_neither_its_memory_nor_mfu() -> None:
    lines = closing_lines(steps(10.0), [ON_CPU], TIMINGS)

    assert "MFU" not in lines[0]
    assert lines[2] == "memory: at most 1.00 GiB of host memory of all ranks together"


def test_the_mfu_is_in_the_summary_where_it_is_known(tmp_path: Path) -> None:
    path = tmp_path / "r.txt"
    write_report(path, "", "", steps(10.0, 4.0, 6.0), [gpu_rank(0)], TIMINGS, None, 0.4152)

    assert value(path.read_text(), "MFU of steady steps, by the data sheet") == "41.5%"
    assert "MFU" not in report(path, [gpu_rank(0)])


def test_a_step_that_was_counted_takes_next_to_no_memory() -> None:
    """A week has 600,000 of them at one in a second."""
    steps(*[1.0] * 10)
    tracemalloc.start()
    totals = steps(*[1.0] * 2000)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert len(totals) == 2000
    assert num_bytes < 2000 * 100


def test_the_first_two_steps_do_not_count_if_there_are_others() -> None:
    assert steady_seconds([9.0, 5.0, 2.4, 2.6]) == 2.5
    assert steady_seconds([9.0, 5.0]) == 7.0
