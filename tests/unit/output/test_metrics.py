"""A step is told in a line of fixed columns and in a line of valid JSON, whatever its numbers are."""

import json
import math
import re
import resource
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mobius.output.metrics import JsonLines, StepMetrics, filter_lines, step_line

STEP = StepMetrics(
    step=7,
    epoch=0.5,
    loss=2.34567,
    grad_norm=1.5,
    learning_rate=1e-5,
    step_seconds=10.024,
    tokens_per_second=3268.8,
    num_tokens=32767,
    num_targets=30000,
    num_samples=64,
    padding=0.25,
    peak_gpu_memory_gib=12.344,
    reserved_gpu_memory_gib=13.0,
    peak_host_memory_gib=101.5,
    wait_seconds={"weights": 0.25, "optimizer": 0.5, "neighbours": 0.125},
    skipped_steps=0,
    loss_scale=None,
)


def test_the_line_tells_all_columns_with_units() -> None:
    assert step_line(STEP, 150) == (
        "step   7/150 | epoch  0.500 | loss  2.3457 | grad norm    1.500 | lr 1.00e-05 |   10.02 s | "
        "   3,269 tokens/s |   64 samples,  32,767 tokens, 25.0 % padding | "
        "waits weights  0.25, optimizer  0.50, neighbours  0.12 s | GPU  12.34 GiB | host 101.50 GiB"
    )


def test_a_loss_over_routers_stands_behind_the_loss() -> None:
    assert "| loss  2.3457 | aux loss  2.0312 | grad norm" in step_line(replace(STEP, aux_loss=2.03125), 150)
    assert "aux" not in step_line(STEP, 150)


def test_columns_stay_in_place_over_the_steps_of_a_run() -> None:
    first = step_line(replace(STEP, step=1, loss=11.2, grad_norm=512.25, step_seconds=120.5), 150)
    last = step_line(replace(STEP, step=150, loss=0.5, grad_norm=0.031, tokens_per_second=123456.0), 150)

    assert [i for i, c in enumerate(first) if c == "|"] == [i for i, c in enumerate(last) if c == "|"]


def test_without_a_gpu_the_line_tells_none() -> None:
    assert "GPU" not in step_line(replace(STEP, peak_gpu_memory_gib=None, reserved_gpu_memory_gib=None), 150)


def test_skipped_steps_and_the_loss_scale_are_told_when_there_are_any() -> None:
    line = step_line(replace(STEP, grad_norm=math.nan, loss_scale=65536.0, skipped_steps=2), 150)

    assert "grad norm      nan" in line
    assert line.endswith("| loss scale 65536 | 2 skipped")


def test_the_time_left_ends_the_line_if_it_is_known() -> None:
    assert step_line(STEP, 150, 3725.4) == step_line(STEP, 150) + " | 1:02:05 left"
    assert step_line(STEP, 150, 90_061.0).endswith("| 1 day, 1:01:01 left")


def test_the_log_has_a_complete_line_after_each_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(JsonLines(path)) as log:
        log.append(asdict(STEP))
        (line,) = path.read_text().splitlines()
        log.append(asdict(replace(STEP, step=8)))

    record = json.loads(line)
    assert record["loss"] == 2.34567
    assert record["wait_seconds"] == {"weights": 0.25, "optimizer": 0.5, "neighbours": 0.125}
    assert record["loss_scale"] is None
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [7, 8]


def test_the_log_is_continued_not_overwritten(tmp_path: Path) -> None:
    for step in (1, 2):
        with closing(JsonLines(tmp_path / "metrics.jsonl")) as log:
            log.append(asdict(replace(STEP, step=step)))

    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_numbers_that_json_does_not_have_stay_readable(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    with closing(JsonLines(tmp_path / "metrics.jsonl")) as log:
        log.append(asdict(replace(STEP, loss=math.nan, grad_norm=math.inf, wait_seconds={"weights": -math.inf})))

    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert math.isnan(float(record["loss"]))
    assert float(record["grad_norm"]) == math.inf
    assert float(record["wait_seconds"]["weights"]) == -math.inf


@contextmanager
def no_file_longer_than(num_bytes: int) -> Iterator[None]:
    """A disk that is full: the system writes up to `num_bytes` of a file and refuses the rest."""
    old_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, old_limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limits)


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_full_disk_is_told_once_and_no_line_is_lost_when_space_returns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(JsonLines(path)) as log:
        log.append(asdict(replace(STEP, step=1)))
        with no_file_longer_than(path.stat().st_size + 20):
            for step in (2, 3):
                log.append(asdict(replace(STEP, step=step)))
                assert steps_in(path) == [1], "half a line is none"
        log.append(asdict(replace(STEP, step=4)))
        assert steps_in(path) == [1, 2, 3, 4]

    (record,) = caplog.records
    assert re.search(r"cannot write .*metrics\.jsonl.*File too large.*the run goes on", record.getMessage())


def test_lines_that_could_not_be_written_to_the_end_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with no_file_longer_than(10), closing(JsonLines(tmp_path / "metrics.jsonl")) as log:
        for step in (1, 2):
            log.append(asdict(replace(STEP, step=step)))

    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert re.search(r"metrics\.jsonl lacks the last 2 lines", caplog.records[-1].getMessage())


def test_a_log_that_cannot_be_opened_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "absent" / "metrics.jsonl"
    with closing(JsonLines(path)) as log:
        log.append(asdict(replace(STEP, step=1)))
        path.parent.mkdir()
        log.append(asdict(replace(STEP, step=2)))

    assert steps_in(path) == [1, 2]
    assert len(caplog.records) == 1


def early(line: Mapping[str, object]) -> bool:
    return line["step"] in (1, 2)


def test_a_file_of_lines_is_cut_to_those_that_are_wanted_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n[1]\n{"step": 2}\n{"step": 3}\n{"step": 2}')

    assert filter_lines(path, early) == 4

    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_file_of_which_nothing_is_to_be_cut_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    before = path.stat()

    assert filter_lines(path, early) == 0
    assert filter_lines(tmp_path / "absent.jsonl", early) == 0

    assert path.stat().st_ino == before.st_ino


def test_a_cut_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' * 100 + '{"step": 3}\n')
    before = path.read_text()

    with no_file_longer_than(50), pytest.raises(OSError, match="File too large"):
        filter_lines(path, early)

    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]
