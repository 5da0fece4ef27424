"""A forecast has the numbers that a dry run prints, and its command is one that trains."""

import json
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from mobius.config.cli import given_options, parse_args
from mobius.errors import ConfigError, PlanError
from mobius.planner.forecast import forecast, run_dry
from mobius.planner.training_command import training_command
from mobius.process.ranks import Ranks
from mobius.schedule.lanes import Lane

ROOT = Path(__file__).resolve().parents[3]
WORDS = shlex.split(
    "--model_path 3b --card RTX4090 --num_ranks 2 --num_stages 8 --num_chunks 4 --batch_size 8 --seq_length 512"
)


def test_its_numbers_are_those_of_a_dry_run(caplog: pytest.LogCaptureFixture) -> None:
    words = [*WORDS, "--host_memory_limit", "100", "--verbose"]
    found = forecast(words)
    facts = json.loads(json.dumps(found.to_json()))
    caplog.set_level("INFO")
    caplog.clear()
    assert run_dry(parse_args(["--dry_run", *words]), Ranks(0, 1, 0), words=words, is_command=True)
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert facts["fits"] is True
    seconds, rate, mfu = re.search(
        r"step +([\d.]+) s for 8 rows of 512 tokens: ([\d,]+) tokens/s, (\d+) % MFU \(estimated by data sheets\)$",
        text,
        re.MULTILINE,
    ).groups()  # type: ignore[union-attr]
    assert float(seconds) == pytest.approx(facts["step_seconds"], rel=5e-3)
    assert float(rate.replace(",", "")) == pytest.approx(facts["tokens_per_second"], rel=5e-3)
    assert len(seconds.replace(".", "").lstrip("0")) == 3, "a prediction by data sheets has three digits"
    assert mfu == f"{100 * facts['mfu']:.0f}"
    host = facts["host_memory"]
    assert host["available"] == 100 << 30
    assert host["total"] == sum(host["parts"].values())
    assert f"host memory  {host['total'] / 2**30:.1f} GiB of 100.0 GiB" in text
    fullest = max(sum(parts.values()) for parts in facts["gpu_memory"]["ranks"])
    assert f"GPU memory   {fullest / 2**30:.1f} GiB of {facts['gpu_memory']['available'] / 2**30:.1f} GiB" in text
    for line in facts["details"].splitlines():
        assert line in text


def test_in_python_it_answers_in_ten_lines() -> None:
    lines = repr(forecast([*WORDS, "--host_memory_limit", "100"])).splitlines()
    assert lines[0] == "<Forecast of 3b (the shape of meta-llama/Llama-3.2-3B) on 2 x RTX4090"
    heads = ["the run fits", "step", "GPU memory", "host memory", "plan", "limited by", "run"]
    assert [line.strip().partition("  ")[0] for line in lines[1:]] == heads
    assert lines[-1].startswith("  run          mobius train --model_path meta-llama/Llama-3.2-3B ")
    short = repr(forecast([*WORDS, "--host_memory_limit", "20"])).splitlines()
    assert short[1].startswith("the run does not fit: ")
    assert "Each of these alone fits:" in short
    assert len(short) <= 16


def test_the_command_for_words_of_main_has_its_defaults() -> None:
    words = ["--model_path", "assets/tiny-llama", "--dataset", "a.jsonl", "--num_stages", "8"]
    said = " ".join(words)

    def command(*more: str, is_command: bool) -> str:
        own = training_command([*words, *more], "x", is_shape=False, num_processes=2, is_command=is_command)
        return own.replace(said, "...")

    assert command(is_command=True) == "mobius train ... --nproc_per_node 2"
    assert command(is_command=False) == "mobius train ... --num_chunks 4 --nproc_per_node 2"
    with_file = command("--config", "configs/quickstart.yaml", is_command=False)
    assert with_file == "mobius train ... --config configs/quickstart.yaml --nproc_per_node 2"


@pytest.mark.parametrize(
    ("started", "expected"),
    [
        (["python", "-m", "mobius", "plan"], "python -m mobius train"),
        ([".venv/bin/python", "main.py", "--dry_run"], ".venv/bin/python -m mobius train"),
        (["/x/python", "/x/bin/torchrun", "main.py", "--dry_run"], ".venv/bin/python -m mobius train"),
        (["/x/python", "/x/bin/mobius", "plan"], "mobius train"),
    ],
)
def test_the_command_starts_as_the_plan_was_started(
    monkeypatch: pytest.MonkeyPatch, started: list[str], expected: str
) -> None:
    monkeypatch.setattr(sys, "orig_argv", started)
    monkeypatch.setattr(sys, "executable", str(Path.cwd() / ".venv/bin/python"))
    assert training_command([], "7b", is_shape=True, num_processes=2).startswith(f"{expected} --")


def test_a_dry_run_with_the_manuals_numbers_says_that_auto_may_be_faster(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    def said(*words: str) -> str:
        caplog.clear()
        typed = ["--dry_run", "--model_path", "0.5b", "--card", "RTX4090", "--num_ranks", "2", *words]
        assert run_dry(parse_args(typed), Ranks(0, 1, 0), given=given_options(typed), words=typed)
        return caplog.text

    assert "the manual's defaults; --num_stages auto --num_chunks auto may be faster" in said()
    assert "the manual's defaults; --num_chunks auto may be faster" in said("--num_stages", "8")
    assert "the manual's defaults" not in said("--num_stages", "8", "--num_chunks", "4")


def test_its_timeline_is_one_step_of_each_rank_in_which_computes_do_not_overlap() -> None:
    facts = forecast(WORDS).to_json()
    assert len(facts["timeline"]) == facts["num_ranks"] == 2
    for spans in facts["timeline"]:
        computes = sorted((start, end) for lane, _, start, end in spans if lane == Lane.COMPUTE)
        assert len(computes) >= 2 * 4 * 4 - 1  # forward and backward of 4 stages and 4 microbatches, the last in one
        assert all(end <= start + 2e-5 for (_, end), (start, _) in pairwise(computes))
        assert all(0 <= start <= end <= facts["step_seconds"] + 1e-5 for _, _, start, end in spans)


def test_its_command_has_the_options_without_those_of_planning() -> None:
    words = ["--model_path", "3b", "--card", "RTX4090", "--num_ranks", "2", "--num_stages", "8", "--num_chunks=4"]
    found = forecast([*words, "--batch_size", "8", "--plan_output=plan.json", "--no_prefetch"])
    expected = "mobius train --model_path meta-llama/Llama-3.2-3B --num_stages 8 --num_chunks=4 --batch_size 8"
    assert found.command == f"{expected} --no_prefetch --dataset DATASET --nproc_per_node 2"


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("7b", "meta-llama/Llama-2-7b-hf"),
        ("Qwen3-8B", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("1b", "MODEL"),  # a shape of our own
        ("30b", "MODEL"),
        ("assets/tiny-llama", "assets/tiny-llama"),
    ],
)
def test_its_command_names_a_model_that_can_be_trained_or_leaves_a_blank(typed: str, named: str) -> None:
    words = ["--model_path", typed, "--dataset", "data.jsonl"]
    more = [] if "/" in typed else [f"--model_path={typed}"]  # the last one counts
    command = training_command(words + more, typed, is_shape="assets" not in typed, num_processes=2)
    assert command == f"mobius train --model_path {named} --dataset data.jsonl --nproc_per_node 2"


def test_its_command_trains_as_it_stands(tmp_path: Path) -> None:
    """The options of what is planned are those of a run, disks and replicas included."""
    (tmp_path / "data.jsonl").write_text('{"text": "One sentence that is learned."}\n' * 8)
    disks = ["--offload_states_to", str(tmp_path / "states"), "--disk_rate", "7,2", "--max_disk_writes", "1"]
    sizes = [
        "--num_stages",
        "2",
        "--num_chunks",
        "1",
        "--batch_size",
        "2",
        "--seq_length",
        "32",
        "--num_iterations",
        "1",
    ]
    words = ["--model_path", "assets/tiny-llama", "--dataset", str(tmp_path / "data.jsonl"), *sizes, *disks]
    found = forecast([*words, "--card", "RTX4090", "--num_ranks", "1", "--save_dir", str(tmp_path / "result")])
    own = shlex.split(found.command)
    assert own[:2] == ["mobius", "train"]
    ended = subprocess.run([sys.executable, "-m", *own, "--device", "cpu"], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "result" / "config.json").is_file()


def test_a_run_that_does_not_fit_says_why_and_what_fits(tmp_path: Path) -> None:
    found = forecast([*WORDS, "--host_memory_limit", "20"])
    facts = found.to_json()
    assert facts["fits"] is False
    assert "GiB of host memory" in facts["problem"]
    assert facts["remedies"]
    options = next(iter(facts["remedies"]))
    assert forecast([*WORDS, "--host_memory_limit", "20", *shlex.split(options)]).fits
    with pytest.raises(PlanError, match="does not fit"):
        found.save(tmp_path / "plan.json")
    assert not (tmp_path / "plan.json").exists()
    assert options in found._repr_html_()

    none = forecast([*WORDS, "--gpu_memory_limit", "1"])
    assert none.found is None
    assert "of GPU memory" in str(none.problem)
    assert none.to_json()["fits"] is False
    assert "does not fit" in none.describe()


def test_a_draft_is_a_plan_too() -> None:
    words = [*WORDS, "--num_chunks", "auto"]
    draft = forecast(words, is_draft=True)
    assert draft.fits
    assert draft.step_seconds is not None
    assert draft.step_seconds >= (forecast(words).step_seconds or 0) * 0.98


@pytest.mark.skipif(torch.cuda.is_available(), reason="plans for the GPU that is here")
def test_without_a_card_it_plans_for_this_machine_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    facts = forecast([*WORDS[:2], "--num_stages", "4", "--num_ranks", "2", "--num_chunks", "4", "--batch_size", "8"])
    assert facts.step_seconds is None
    assert facts.to_json()["gpu"] is None
    assert facts.available is not None
    assert caplog.messages[0].startswith("no GPU is here: planned for this CPU; for GPUs give, say, --card ")


def test_wrong_options_are_errors() -> None:
    with pytest.raises(ConfigError, match="did you mean `--batch_size`"):
        forecast(["--batchsize", "3"])
    with pytest.raises(PlanError, match="RTX4090"):
        forecast([*WORDS[:2], "--card", "RTX9999", "--num_ranks", "1"])
