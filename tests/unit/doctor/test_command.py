"""The command's report: its table has the numbers of plans, its exit code and JSON say what is wrong."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mobius.commands import run_command
from mobius.config.cli import parse_args
from mobius.doctor import command, fits, machine
from mobius.doctor.apart import Problem
from mobius.doctor.fits import Row, plan_rows, rows_to_plan
from mobius.doctor.machine import Disk, HostSpeed
from mobius.planner import forecast
from mobius.planner.forecast import run_dry
from mobius.process.ranks import Ranks

BOX = ["--card", "RTX4090", "--num_ranks", "4", "--host_memory_limit", "119"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes seconds: its own tests measure it."""
    monkeypatch.setattr(machine, "measure_host", lambda: HostSpeed(1e9, 170e9, 6))
    monkeypatch.setattr(machine, "measure_disk", lambda folder: Disk(str(folder), 1e9, 1e9, 2**40))
    monkeypatch.setattr(fits, "SIZES", {"1B": "Llama-3.2-1B"})


def planned(row: Row, caplog: pytest.LogCaptureFixture) -> str | None:
    """Tokens per second as `mobius plan` prints them for the row's words; None if it does not fit."""
    program, name, *words = shlex.split(row.command)
    assert (program, name) == ("mobius", "plan")
    caplog.set_level("INFO")
    caplog.clear()
    fits_here = run_dry(parse_args(["--dry_run", *words]), Ranks(0, 1, 0))
    match = re.search(r"tokens: ([\d,.]+) tokens/s", "\n".join(record.getMessage() for record in caplog.records))
    return match[1] if match and fits_here else None


def test_a_row_has_the_number_that_its_command_prints(caplog: pytest.LogCaptureFixture) -> None:
    small = shlex.split("--num_ranks 2 --num_stages 4 --num_chunks 4 --batch_size 4 --seq_length 512")
    row = plan_rows(rows_to_plan(["--card", "RTX4090", "--host_memory_limit", "64", *small], 2)["1B", "full"])
    assert row.fits
    (line,) = fits.describe([row])
    assert f"{planned(row, caplog)} tokens/s" in line
    assert line.endswith(row.command)


@pytest.mark.extended
@pytest.mark.parametrize("way", fits.TRIED)
@pytest.mark.parametrize("size", ["1B", "3B", "8B", "14B", "32B", "70B"])
@pytest.mark.parametrize("box", [BOX, ["--card", "H100", "--num_ranks", "1", "--host_memory_limit", "200"]])
def test_every_row_has_the_number_that_its_command_prints(
    size: str, way: str, box: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    row = plan_rows(rows_to_plan(box, int(box[3]))[size, way])
    number = planned(row, caplog)
    assert row.fits == (number is not None)
    assert (f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else None) == number


@pytest.mark.extended
def test_a_row_of_the_page_has_the_numbers_of_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    box = "--card RTX4090 --num_ranks 4 --num_stages auto --num_chunks auto --batch_size 32 --seq_length 2048"
    monkeypatch.setattr(fits, "WAYS", {"fp32": "", "LoRA": "--use_lora"})
    expected = []
    for way, more in fits.WAYS.items():
        found = [
            forecast.forecast(f"{box} --model_path 14b --host_memory_limit {gib} {more}".split())
            for gib in (59, 119, 238, 476)
        ]
        cells = [f"{each.tokens_per_second:,.0f}" if each.fits else "-" for each in found]
        expected.append(f"| 14b | {way} | {' | '.join(cells)} |")
    assert [*fits.page_rows(["14b"])] == expected


@pytest.mark.parametrize(
    ("num_ranks", "stages", "chunks"), [(1, 8, 4), (3, 6, 8), (4, 8, 16), (8, 16, 32), (16, 16, 32)]
)
def test_rows_cut_a_model_for_any_number_of_gpus(num_ranks: int, stages: int, chunks: int) -> None:
    rows = rows_to_plan(["--card", "L4", "--num_ranks", str(num_ranks)], num_ranks)["1B", "full"]
    expected = ("--num_stages", str(stages), "--num_chunks", str(chunks))
    assert [choice[0].words[2:6] for choice in rows] == [expected] * 2


def test_typed_options_replace_those_of_the_table() -> None:
    ((row,), *_) = rows_to_plan([*BOX, "--batch_size", "6", "--num_stages", "4"], 4)["1B", "LoRA"]
    options = dict(zip(row.words[::2], row.words[1::2], strict=False))
    assert (options["--batch_size"], options["--num_stages"], options["--num_chunks"]) == ("6", "4", "6")
    assert row.words.count("--batch_size") == 1


def test_a_model_that_does_not_fit_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "solve", None)  # a bound tells it without a plan
    row = plan_rows(rows_to_plan([*BOX[:-1], "9"], 4)["1B", "full"])
    assert row.fits is False
    assert re.fullmatch(r"needs \d+\.\d GiB of host memory", row.reason)
    (line,) = fits.describe([row])
    assert f"no: {row.reason}" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without GPUs")
def test_a_gpu_that_torch_does_not_see_fits_nothing() -> None:
    words = shlex.split(
        "--num_ranks 2 --num_stages 4 --num_chunks 4 --batch_size 4 --seq_length 512 --host_memory_limit 64"
    )
    assert plan_rows(rows_to_plan(words, 2)["1B", "full"]).reason == "torch sees no GPU"


def test_a_row_that_is_late_is_no_refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        command, "run_apart", lambda works, **_: {name: Problem("late", is_late=True) for name in works}
    )
    assert command.run(BOX) == 1  # the driver does not answer either
    assert capsys.readouterr().out.count("not planned in time") == 2


def test_rows_are_planned_however_long_the_checks_may_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is what was asked for: on few or busy cores it comes later, and whole."""
    monkeypatch.setattr(command, "SECONDS", 0.0)
    monkeypatch.setattr(command, "LEAST_SECONDS", 0.5)
    monkeypatch.setattr(command, "SPEED_SECONDS", 0.1)
    monkeypatch.setattr(fits, "plan_rows", lambda tries: time.sleep(1) or replace(tries[0][0], fits=True))
    command.run(BOX)
    assert "not planned" not in capsys.readouterr().out


def test_the_load_is_read_before_this_command_adds_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The order in which works begin: each writes its name to a file, as each has a process of its own."""
    begun = tmp_path / "begun"

    def noted(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def work(*arguments: Any) -> Any:
            with begun.open("a") as file:
                file.write(f"{name}\n")
            return own(*arguments)

        return work

    for name in ("read_host", "measure_host", "read_software"):
        monkeypatch.setattr(machine, name, noted(name, getattr(machine, name)))
    monkeypatch.setattr(fits, "plan_rows", noted("plan_rows", lambda tries: replace(tries[0][0], fits=True)))
    command.run(BOX)
    first, second, *others = begun.read_text().split()
    assert (first, second) == ("read_host", "measure_host")
    assert {*others} == {"read_software", "plan_rows"}


def test_json_is_one_object_with_checks_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(["--json", *BOX[:-2], "--num_stages", "4", "--num_chunks", "4", "--batch_size", "4"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {each["name"] for each in report["checks"]} >= {"GPUs", "peer copies", "NCCL", "/dev/shm", "ulimit", "disk"}
    assert {each["status"] for each in report["checks"]} <= {"ok", "slow"}
    full, lora = report["models"]
    assert (full["model"], full["way"], lora["way"]) == ("1B", "full", "LoRA")
    assert shlex.split(full["command"])[2:] == full["words"]
    assert "--host_memory_limit" in full["words"]  # of this machine


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without GPUs")
def test_without_a_gpu_it_says_how_to_ask_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run([]) == 0
    text = capsys.readouterr().out
    assert "No GPU was found. What would fit with one: mobius doctor --card RTX4090 --num_ranks 2" in text
    assert "mobius plan" not in text


def test_something_wrong_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "measure_disk", lambda folder: Disk(str(folder), None, None, 0))
    assert command.run(["--folder", str(tmp_path)]) == 1
    assert re.search(rf"^wrong  disk +{tmp_path}$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--card", "RTX4091", "--num_ranks", "2"], "did you mean RTX4090?"),
        (["--folder", "/nowhere"], "--folder /nowhere"),
        (["--card", "L4", "--num_ranks", "-2"], "num_ranks"),
        (["--cards", "L4"], "cards"),
        (["--model_path", "7b", "--use_lora"], "--finetuning_type, --model_path: doctor plans a fixed list of models"),
    ],
)
def test_mistyped_words_are_one_message(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("doctor", words) > 0
    captured = capsys.readouterr()
    assert text in captured.err + captured.out
    assert "Traceback" not in captured.err


@pytest.mark.extended
@pytest.mark.skipif(os.getloadavg()[0] > (os.cpu_count() or 1), reason="this machine is busy")
def test_the_whole_command_ends_in_time() -> None:
    words = [sys.executable, "-m", "mobius", "doctor", "--json", *BOX]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    report = json.loads(done.stdout)
    assert len(report["models"]) == 12
    assert report["seconds"] < 20
