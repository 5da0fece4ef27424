"""The answer before the run: what a dry run prints and saves, and that a run trains by it."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness.plan_requests import TWO_PER_ROOT_COMPLEX
from harness.runs import ROOT, make_checkpoint, make_dataset, run_main

from mobius.config.cli import given_options, parse_args
from mobius.distributed import device_order
from mobius.errors import CheckpointError, ConfigError, PlanError
from mobius.models import families
from mobius.planner import this_machine
from mobius.planner.forecast import run_dry
from mobius.planner.plan_file import apply_saved_plan
from mobius.process.ranks import Ranks

SMALL = [
    *("--model_path", "model", "--dtype", "fp32", "--num_stages", "4"),
    *("--num_chunks", "2", "--batch_size", "4", "--seq_length", "16"),
]
LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
NODE = [
    "--model_path",
    "large",
    "--card",
    "H200",
    "--num_ranks",
    "4",
    "--host_memory_limit",
    "400",
    "--batch_size",
    "64",
]

ONE_WAY = ["--compute_order", "breadth_first", "--recompute", "full", "--activation_offloading", "off"]
"""Leaves the planner next to nothing to search."""


@pytest.fixture
def large(workplace: Path) -> Path:
    """The configuration of Llama-2-7B's shape, without weights."""
    folder = workplace / "large"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_7B))
    return workplace


def dry(*arguments: str) -> bool:
    words = ["--dry_run", "--plan_output", "plan.json", *arguments]
    return run_dry(parse_args(words, num_ranks=1), Ranks(0, 1, 0))


def told(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def test_a_plan_is_printed_with_bytes_by_category_a_predicted_step_and_whether_it_fits(
    large: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "mobius")
    sizes = ["--num_stages", "32", "--num_chunks", "8", "--gpu_memory_limit", "12", "--max_grad_norm", "0"]
    assert dry(*NODE, *sizes, "--verbose")
    text = told(caplog)
    for part in ("32 stages on 4 rank(s), 8 microbatches", "embedding, 0", "31, head", "limited by", "bubble"):
        assert part in text
    assert "GPU memory in GiB, 12 of H200 may be used" in text
    for category in ("weights", "gradients", "optimizer", "inputs", "kept", "messages", "work", "libraries"):
        assert category in text
    assert "estimated: 4 x H200" in text
    (next_best,) = [line for line in text.splitlines() if line.startswith("next best")]
    assert re.fullmatch(r"next best: .*, depth-first, \+\d.* % per step, \d+\.\d GiB of host memory", next_best)
    assert len(text.splitlines()) < 44  # stages that are alike share a line
    caplog.clear()
    caplog.set_level("INFO", "mobius")
    assert dry(*NODE, *sizes)
    _, *verdict = told(caplog).splitlines()
    assert verdict[0] == "the run fits"
    heads = ["the", "step", "GPU", "host", "plan", "limited", "saved", "run", "more"]
    assert [line.split()[0] for line in verdict] == heads
    assert " of 12.0 GiB on each H200" in verdict[2]
    assert " of 400.0 GiB" in verdict[3]
    assert {*verdict[:6]} <= {*text.splitlines()}
    saved = json.loads((large / "plan.json").read_text())
    assert (saved["version"], saved["num_ranks"], len(saved["cuts"])) == (3, 4, 32)
    assert not (large / "save_ckpt").exists()


@pytest.mark.parametrize(("packing", "is_told"), [("auto", True), ("on", True), ("off", False), ("joined", False)])
def test_where_rows_may_hold_several_documents_it_is_said_that_they_are_planned_as_one(
    workplace: Path, caplog: pytest.LogCaptureFixture, packing: str, is_told: bool
) -> None:
    caplog.set_level("INFO", "mobius")
    assert dry(*SMALL, "--num_ranks", "2", "--card", "L20", "--packing", packing, "--verbose")
    assert ("rows are planned as full, one document each" in told(caplog)) == is_told


def test_this_machine_s_memory_counts_unless_the_plan_is_for_another_one(
    workplace: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "available_host_bytes", lambda: 2**28)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    caplog.set_level("INFO", "mobius")
    elsewhere = [*SMALL, "--num_ranks", "2", "--card", "L20"]

    assert dry(*elsewhere)
    assert "state yours with --host_memory_limit GIB" in told(caplog)
    caplog.clear()
    assert not dry(*elsewhere, "--host_memory_limit", "0.01")
    assert "GiB of 10.2 MiB" in told(caplog)
    caplog.clear()
    assert not dry(*SMALL, "--num_ranks", "2")
    assert "need 1.3 GiB of host memory" in told(caplog)
    assert "256.0 MiB is available" in told(caplog)


def test_a_model_of_the_hub_that_cannot_be_had_is_planned_for_by_its_known_shape(
    large: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Path:
        raise OSError("you have no access to it")

    monkeypatch.setattr(families, "_fetch", refuse)
    caplog.set_level("INFO", "mobius")
    plan = [*NODE[2:], "--num_stages", "16", "--num_chunks", "4", "--resident_stages", "0", *ONE_WAY]

    assert dry("--config", str(ROOT / "configs/fine_tune.yaml"), *plan, "--plan_output", "of_hub.json")
    assert "meta-llama/Llama-2-7b-hf is not available here: planning for its known shape" in told(caplog)
    caplog.clear()
    assert dry("--model_path", "large", *plan, "--seq_length", "128", "--plan_output", "of_folder.json")
    assert "is not available here" not in told(caplog)
    assert Path("of_hub.json").read_text() == Path("of_folder.json").read_text()

    index = {"metadata": {"total_size": 2**30}, "weight_map": {"model.norm.weight": "1.safetensors"}}
    (large / "large" / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(families, "_fetch", lambda *_: large / "large")
    assert dry("--config", str(ROOT / "configs/fine_tune.yaml"), *plan, "--plan_output", "by_index.json")
    assert "1.0 GiB of weights are not downloaded by a dry run" in told(caplog)
    assert Path("by_index.json").read_text() == Path("of_folder.json").read_text()
    monkeypatch.setattr(families, "_fetch", refuse)

    with pytest.raises(ConfigError, match="--num_layers 40 is more than the 32 layers"):
        dry("--model_path", "llama-2-7b-hf", "--num_layers", "40", *plan)
    with pytest.raises(CheckpointError, match="not found.*no access"):
        dry("--model_path", "somebody/Llama-2-7b-hf", *plan)


def test_a_shape_is_a_model_for_plans_only_and_a_folder_of_its_name_goes_first(
    workplace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mobius")
    small = [*SMALL[2:], "--num_ranks", "2", "--card", "L20"]
    assert dry("--model_path", "1b", "--num_layers", "4", *small)
    assert "plan of 1b (the shape of a Llama of 20 layers): 3.33e+08 parameters" in told(
        caplog
    )  # 2 x 32000 x 2048 + 4 x 50.6e6
    with pytest.raises(CheckpointError, match="1b: this is a shape to plan for .*, and there is no folder .*/1b"):
        families.locate_model("1b")

    Path("1b").symlink_to("model")
    caplog.clear()
    assert dry("--model_path", "1b", *small)
    assert "plan of 1b: 2.99e+05 parameters" in told(caplog)
    assert families.locate_model("1b") == Path("1b")


@pytest.mark.parametrize(
    ("listed", "options", "expected"),
    [
        pytest.param(None, [], "0, 2, 1, 3", marks=pytest.mark.extended),
        ("4,5,6,7", [], "4, 6, 5, 7"),
        pytest.param("4,5,6,7", ["--no_cross_mapping"], "4, 5, 6, 7", marks=pytest.mark.extended),
    ],
)
def test_the_gpus_of_the_ranks_are_told_where_they_are_here(
    large: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    listed: str | None,
    options: list[str],
    expected: str,
) -> None:
    if listed is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA L20")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=48 * 2**30))
    monkeypatch.setattr(device_order, "read_topology", lambda num_gpus: TWO_PER_ROOT_COMPLEX)
    caplog.set_level("INFO")
    fixed = ["--num_stages", "16", "--num_chunks", "4", "--resident_stages", "0", *ONE_WAY]
    here = [argument for argument in NODE if argument not in ("--card", "H200")]
    assert dry(*here, *fixed, *options, "--verbose")
    assert f"GPUs of ranks 0 to 3: {expected}\n" in told(caplog)
    caplog.clear()
    assert dry(*NODE, *fixed, *options, "--verbose")
    assert "GPUs of ranks" not in told(caplog)


@pytest.mark.parametrize(
    "arguments", [["--num_stages", "4", "--num_chunks", "1"], ["--num_stages", "16", "--gpu_memory_limit", "2"]]
)
def test_what_does_not_fit_is_told_with_the_arithmetic_and_leaves_no_plan(
    large: Path, caplog: pytest.LogCaptureFixture, arguments: Sequence[str]
) -> None:
    assert not dry(*NODE[:3], "RTX4090", *NODE[4:], "--num_layers", "16", "--seq_length", "2048", *arguments)
    text = told(caplog)
    assert "does not fit: rank" in text
    assert re.search(r" inputs \d", text)
    assert "these alone fits:" in text or "To fit: " in text
    assert not (large / "plan.json").exists()


def test_layers_that_are_not_compiled_take_what_they_need(workplace: Path, caplog: pytest.LogCaptureFixture) -> None:
    streamed = ["--model_path", "7b", *NODE[2:6], "--batch_size", "64", "--seq_length", "512"]
    streamed += ["--num_stages", "32", "--num_chunks", "4", "--resident_stages", "0", *ONE_WAY]
    streamed += ["--num_rounds", "1", "--tile_tokens", "off"]

    assert dry(*streamed, "--gpu_memory_limit", "7.1")
    assert not dry(*streamed, "--gpu_memory_limit", "7.1", "--compile", "off")
    assert "= 7.23 GiB), 7.1 GiB is available" in told(caplog)


def test_fp32_has_bytes_but_no_predicted_step(large: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    words = ["--dry_run", *NODE, "--seq_length", "128", "--num_stages", "32", "--num_chunks", "8", "--dtype", "fp32"]
    words += ["--verbose"]
    before = set(large.rglob("*"))
    assert run_dry(parse_args(words, num_ranks=1), Ranks(0, 1, 0))
    assert set(large.rglob("*")) == before, "a plan is saved only where that is asked for"
    assert "GPU memory in GiB" in told(caplog)
    assert "no step is predicted: the cards' rates are for formats of two bytes" in told(caplog)
    assert "tokens/s" not in told(caplog)


def test_too_little_host_memory_is_told_with_what_fits_and_leaves_no_plan(
    large: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mobius")
    short = ["--num_layers", "8", "--num_stages", "8", "--num_chunks", "8", "--host_memory_limit", "24"]
    short += ["--resident_stages", "0", *ONE_WAY]
    assert not dry(*NODE, *short)
    text = told(caplog)
    assert re.search(r"the run does not fit: \d+\.\d GiB of host memory are missing", text.splitlines()[1])
    assert not (large / "plan.json").exists()
    assert "--plan " not in text

    (options,) = re.findall(r"^  (--freeze \S+) +\d", text, re.MULTILINE)
    assert dry(*NODE, *short, *options.split())
    assert (large / "plan.json").exists()


def test_a_card_that_is_not_known_is_refused_with_those_that_are(large: Path) -> None:
    with pytest.raises(PlanError, match="'H2000' is not known.*Known are"):
        dry(*NODE, "--card", "H2000")


def test_stages_that_do_not_fit_the_planned_ranks_are_refused(workplace: Path) -> None:
    with pytest.raises(ConfigError, match="`--num_stages` 4: not a multiple of the number of ranks, 3"):
        dry(*SMALL, "--num_ranks", "3")


@pytest.mark.parametrize("arguments", [["--card", "H200"], ["--num_ranks", "4"], ["--dry_run", "--plan", "plan.json"]])
def test_what_only_a_dry_run_or_only_a_run_takes_is_refused_elsewhere(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="dry_run"):
        parse_args(arguments, num_ranks=1)


def test_a_plans_numbers_take_the_place_of_defaults_but_not_of_what_is_given(workplace: Path) -> None:
    dry(*SMALL, "--num_ranks", "1", "--resident_stages", "1")
    taken = ["--model_path", "model", "--dtype", "fp32", "--plan", "plan.json"]

    def adopted(*arguments: str) -> object:
        argv = [*taken, *arguments]
        return apply_saved_plan(parse_args(argv, num_ranks=1), given=given_options(argv))

    config, _ = apply_saved_plan(parse_args(taken, num_ranks=1), given=given_options(taken))
    pipeline = config.pipeline
    assert (pipeline.num_stages, pipeline.num_chunks, pipeline.batch_size, config.data.seq_length) == (4, 2, 4, 16)
    adopted("--num_stages", "4", "--resident_stages", "1")  # says the same
    adopted("--num_stages", "auto")  # the plan is an answer to that
    for arguments, problem in (
        (("--num_stages", "2"), "--num_stages 2, the plan has 4"),
        (("--num_stages", "8"), "--num_stages 8, the plan has 4"),  # the default, but typed
        (
            ("--seq_length", "32", "--batch_size", "8"),
            "--batch_size 8, the plan has 4; --seq_length 32, the plan has 16",
        ),
        (("--resident_stages", "0"), "--resident_stages 0, the plan has 1 on each rank"),
        (("--no_offload",), "--no_offload, the plan streams 3 stages"),
        (("--no_prefetch",), "--no_prefetch, the plan has 2 slots"),
        (
            ("--activation_offloading", "on"),
            "--activation_offloading on, the plan offloads activations of 0 of 3 stages",
        ),
        (("--recompute", "none"), "--recompute none, the plan keeps activations of 0 stages"),
        (("--dtype", "bf16"), "--dtype bf16, the plan has fp32"),
    ):
        with pytest.raises(PlanError, match="contradicts other options") as caught:
            adopted(*arguments)
        assert problem in str(caught.value)


def test_a_dry_run_and_then_two_ranks_that_train_by_its_plan(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    make_dataset(tmp_path / "data.jsonl")
    result = run_main(1, tmp_path, "--dry_run", *SMALL, "--num_ranks", "2", "--plan_output", "plans/p.json")
    assert result.returncode == 0, result.stdout
    assert "the run fits" in result.stdout

    trains = ["--model_path", "model", "--dtype", "fp32", "--dataset", "data.jsonl", "--num_iterations", "1"]
    result = run_main(2, tmp_path, *trains, "--plan", "plans/p.json")
    assert result.returncode == 0, result.stdout
    assert "plan read from plans/p.json: 4 stages, 2 chunks" in result.stdout
    assert (tmp_path / "save_ckpt" / "plan.json").read_text() == (tmp_path / "plans" / "p.json").read_text()

    result = run_main(1, tmp_path, *trains, "--plan", "plans/p.json", "--overwrite_output_dir")
    assert result.returncode == 1
    assert "is for 2 rank(s), 1 are started" in result.stdout


def test_a_plan_of_a_step_that_no_machine_holds_is_refused_before_anything_is_made(workplace: Path) -> None:
    assert dry(*SMALL, "--num_ranks", "1")
    fields = json.loads(Path("plan.json").read_text())
    Path("plan.json").write_text(json.dumps({**fields, "batch_size": 2 * 10**9}))
    argv = ["--model_path", "model", "--dtype", "fp32", "--plan", "plan.json"]

    with pytest.raises(PlanError, match=r"--plan plan\.json is broken: `--batch_size`"):
        apply_saved_plan(parse_args(argv, num_ranks=1), given=given_options(argv))


@pytest.mark.parametrize(("length", "is_beyond"), [("2048", False), ("2112", True)])
def test_rows_longer_than_the_model_was_made_for_are_told(
    workplace: Path, caplog: pytest.LogCaptureFixture, length: str, is_beyond: bool
) -> None:
    assert dry(
        "--model_path", "model", *NODE[2:6], "--batch_size", "8", "--num_stages", "4", *ONE_WAY, "--seq_length", length
    )
    assert ("--seq_length 2112 is more than the 2048 positions" in told(caplog)) == is_beyond
