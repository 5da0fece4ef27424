"""A CPU without instructions for the default format computes in fp32, and who insists is warned."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import yaml

from mobius.config.cli import given_options, parse_args
from mobius.config.config import Config, Dtype
from mobius.hardware import cpu_dtype
from mobius.hardware.cpu_dtype import cpu_flags, resolve_cpu_dtype, resolve_dtype
from mobius.planner.forecast import run_dry
from mobius.process.ranks import Ranks
from mobius.training.run import run_training

OLD = frozenset({"avx2", "avx512f"})
SMALL = """--model_path model --dataset data.jsonl --device cpu --num_stages 2 --num_chunks 2
    --batch_size 4 --seq_length 16 --num_iterations 1 --save_dir out"""


def settled(flags: frozenset[str], *argv: str) -> Dtype:
    config = parse_args(argv, num_ranks=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_dtype, "cpu_flags", lambda: flags)
        return resolve_cpu_dtype(config, given=given_options(argv)).model.dtype


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "mobius")
    return caplog


def test_the_default_is_fp32_where_the_cpu_has_no_instructions_for_bf16_and_a_line_says_so(
    log: pytest.LogCaptureFixture,
) -> None:
    assert settled(OLD) is Dtype.FP32
    assert log.messages == ["computing in fp32: this CPU has no instructions for bf16 (--dtype bf16 forces it)"]


@pytest.mark.parametrize("flag", ["avx512_bf16", "amx_bf16", "bf16"])
def test_the_default_stays_bf16_where_the_cpu_has_instructions_for_it(log: pytest.LogCaptureFixture, flag: str) -> None:
    assert settled(frozenset({flag})) is Dtype.BF16
    assert log.messages == []


@pytest.mark.parametrize(
    ("option", "dtype"), [("--bf16", Dtype.BF16), ("--fp16", Dtype.FP16), ("--optimizer_states=bf16", Dtype.BF16)]
)
def test_a_format_that_was_asked_for_stays_with_a_warning(
    log: pytest.LogCaptureFixture, option: str, dtype: Dtype
) -> None:
    assert settled(OLD, option) is dtype
    (message,) = log.messages
    assert message.startswith(f"--dtype {dtype}: this CPU has no instructions for it")


def test_a_format_in_a_yaml_file_is_asked_for(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("dtype: bf16\n")
    assert settled(OLD, "--config", str(file)) is Dtype.BF16
    assert settled(OLD, "--config", str(file), "--fp32") is Dtype.FP32


def test_only_the_first_rank_tells_and_all_come_to_the_same(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_dtype, "cpu_flags", lambda: OLD)
    found = [resolve_cpu_dtype(Config(), given=given, is_first=False).model.dtype for given in ((), ("dtype",), None)]
    assert found == [Dtype.FP32, Dtype.BF16, Dtype.BF16]
    assert log.messages == []


def test_on_gpus_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_dtype, "has_gpus", lambda *_: True)
    monkeypatch.setattr(cpu_dtype, "resolve_cpu_dtype", None)
    assert resolve_dtype(Config(), Ranks(0, 1, 0), given=()) == Config()


def test_the_flags_are_those_that_all_cpus_have(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    file = tmp_path / "proc/cpuinfo"
    assert cpu_flags(tmp_path) == frozenset()
    file.write_text(
        "processor\t: 0\nflags\t\t: fpu avx2 amx_bf16\nbugs\t\t: x\n\nprocessor\t: 1\nflags\t\t: fpu avx2\n"
    )
    assert cpu_flags(tmp_path) == {"fpu", "avx2"}
    file.write_text("processor\t: 0\nFeatures\t: fp asimd bf16\nCPU part\t: 0xd40\n")
    assert cpu_flags(tmp_path) == {"fp", "asimd", "bf16"}
    file.write_text("nothing of this kind\n")
    assert cpu_flags(tmp_path) == frozenset()


@pytest.mark.usefixtures("workplace")
def test_runs_and_dry_runs_settle_alike_and_leave_what_they_took(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_dtype, "cpu_flags", lambda: OLD)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    argv = SMALL.split()
    dry = [*argv, "--dry_run", "--num_ranks", "1", "--plan_output", "plan.json"]
    assert run_dry(parse_args(dry, num_ranks=1), Ranks(0, 1, 0), given=given_options(dry))
    assert json.loads(Path("plan.json").read_text())["model"]["dtype"] == "fp32"

    argv += ["--plan", "plan.json"]
    run_training(parse_args(argv, num_ranks=1), Ranks(0, 1, 0), given=given_options(argv))
    assert yaml.safe_load(Path("out/training_args.yaml").read_text())["dtype"] == "fp32"
    assert json.loads(Path("out/config.json").read_text())["dtype"] == "float32"
    assert sum("no instructions for bf16" in message for message in log.messages) == 2
