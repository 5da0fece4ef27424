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

from mobius.reporting.events import RunStarted, StepMetrics, detail_line, format_digits, format_time_left, step_line
from mobius.reporting.json_lines import JsonLines, filter_lines

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
        "step   7/150  loss  2.3457  norm 1.500  lr 1.00e-05  10.0 s   3,269 tok/s  12.3 GiB"
    )
    assert step_line(replace(STEP, peak_gpu_memory_gib=None), 150).endswith("   102 GiB"), "the host's"
    assert step_line(STEP, 150, 3725.4) == step_line(STEP, 150) + "   1h02m left"


def test_the_line_fits_a_terminal_and_its_columns_stay_in_place() -> None:
    first = replace(STEP, step=1, loss=11.25, grad_norm=512.25, step_seconds=120.5, tokens_per_second=99_999.0)
    last = replace(STEP, step=9999, loss=0.5, grad_norm=0.031, step_seconds=0.25, tokens_per_second=7.0)
    lines = [step_line(metrics, 9999, left) for metrics, left in ((first, 359_000.0), (last, 0.0))]

    assert max(map(len, lines)) <= 100
    for word in ("loss", "norm", "lr", " s ", "tok/s", "GiB", "left"):
        assert len({line.index(word) for line in lines}) == 1, lines


@pytest.mark.parametrize(("margin", "shown"), [(0.01234, " 0.012"), (-0.01234, "-0.012"), (12.34, "12.340")])
def test_the_line_of_a_preference_objective_has_margin_and_accuracy(margin: float, shown: str) -> None:
    numbers = {"rewards/margins": margin, "rewards/accuracies": 0.625, "logps/chosen": -20.0}
    line = step_line(replace(STEP, numbers=numbers), 9999, 359_000.0)
    plain = step_line(STEP, 9999, 359_000.0)

    assert f"loss  2.3457  margin {shown}  accuracy 0.62  norm 1.500" in line
    assert len(line) == len(plain) + 30
    assert line.split("  norm")[1] == plain.split("  norm")[1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((1.0567, "1.057"), (12.345, "12.35"), (12345.6, "12346"), (0.8912, "0.891"), (0.0, "0"), (math.nan, "nan")),
        *((0.00012, "1.2e-04"), (0.0312, "0.031"), (math.inf, "inf")),
    ],
)
def test_numbers_are_rounded_never_cut(value: float, text: str) -> None:
    assert format_digits(value, 4) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4.6, "5s"), (725.0, "12m05s"), (7500.0, "2h05m"), (359_000.0, "99h43m"), (360_000.0, "4d04h")],
)
def test_the_time_left_is_short(seconds: float, text: str) -> None:
    assert format_time_left(seconds) == text


def test_the_details_have_what_the_line_leaves_out() -> None:
    line = detail_line(replace(STEP, aux_loss=2.03125, loss_scale=65536.0, skipped_steps=2))

    for part in (
        *("epoch 0.500", "64 samples, 32,767 tokens, 25.0 % padding", "weights 0.25, optimizer 0.50, neighbours 0.12"),
        *("GPU 12.34 GiB, 13.00 reserved", "host 101.50 GiB", "router loss 2.0312", "loss scale 65536", "2 skipped"),
    ):
        assert part in line
    assert "GPU" not in detail_line(replace(STEP, peak_gpu_memory_gib=None, reserved_gpu_memory_gib=None))


START = RunStarted(
    name="first",
    num_parameters=100,
    num_trained=100,
    dtype="bf16",
    device="NVIDIA L20",
    num_ranks=4,
    num_replicas=1,
    num_steps=25,
    num_epochs=0.186,
    batch_size=64,
    seq_length=512,
    num_microbatches=8,
    microbatch_rows=8,
    plan="8 stages on 4 rank(s), 8 microbatches",
    planned_gpu_bytes=12 * 2**30,
    gpu_bytes=24 * 2**30,
    planned_host_bytes=60 * 2**30,
    predicted_step_seconds=1.25,
    bottleneck="compute",
    startup_seconds={"imports": 2.0, "data": 0.5, "connections": 0.01},
)


def test_a_start_is_a_short_table() -> None:
    rows = dict(line.split(maxsplit=1) for line in START.line.splitlines())

    assert list(rows) == ["training", "plan", "memory", "step", "start-up"]
    assert rows["training"].startswith("25 steps of 64 rows x 512 tokens")
    assert "12.0 GiB of 24.0 GiB" in rows["memory"]
    assert "60.0 GiB" in rows["memory"]
    assert rows["step"].startswith("1.250 s")
    assert rows["start-up"] == "2.5 s: imports 2.0, data 0.5"


def test_a_start_on_cpus_has_no_rows_about_gpus_and_one_with_replicas_names_them() -> None:
    on_cpu = replace(START, planned_gpu_bytes=None, gpu_bytes=None, predicted_step_seconds=None, num_replicas=2).line

    assert "GPU" not in on_cpu.replace("NVIDIA", "")
    assert "predicted" not in on_cpu
    assert "2 replicas" in on_cpu


def test_the_log_has_a_complete_line_after_each_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(JsonLines(path)) as log:
        log.append(asdict(STEP))
        (line,) = path.read_text().splitlines()
    with closing(JsonLines(path)) as log:  # which is continued, not overwritten
        log.append(asdict(replace(STEP, step=8)))

    record = json.loads(line)
    assert record["loss"] == 2.34567
    assert record["wait_seconds"] == {"weights": 0.25, "optimizer": 0.5, "neighbours": 0.125}
    assert record["loss_scale"] is None
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [7, 8]


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
