"""The command line takes what users type, and tells all that is wrong at once."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mobius.config.cli import given_options, parse_args
from mobius.config.config import BestMetric, Config, DatasetEntry, Dtype, Packing
from mobius.config.options import options, spellings
from mobius.config.yaml_file import to_yaml
from mobius.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def problems_of(*argv: str, num_ranks: int | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_args(argv, num_ranks=num_ranks)
    return caught.value.problems


def test_the_users_command_line_works_verbatim() -> None:
    config = parse_args(
        [
            "--model_path=meta-llama/Llama-2-7b-hf", "--dataset=xsum", "--num_iterations=20", "--batch_size=64",
            "--num_stage=8", "--use_prefetch", "--use_offload",
        ],
        num_ranks=4,
    )  # fmt: skip
    assert (config.model.model_path, config.data.dataset) == ("meta-llama/Llama-2-7b-hf", (DatasetEntry("xsum"),))
    assert (config.optim.num_iterations, config.pipeline.batch_size, config.pipeline.num_stages) == (20, 64, 8)
    assert config.pipeline.use_prefetch
    assert config.pipeline.use_offload


def test_no_options_give_the_defaults() -> None:
    assert parse_args([], num_ranks=4) == Config()


@pytest.mark.parametrize("offload", ["--use_offload", "--no_offload"])
@pytest.mark.parametrize("prefetch", ["--use_prefetch", "--no_prefetch"])
def test_offload_and_prefetch_combine_freely(offload: str, prefetch: str) -> None:
    pipeline = parse_args([offload, prefetch], num_ranks=4).pipeline
    assert (pipeline.use_offload, pipeline.use_prefetch) == ("use" in offload, "use" in prefetch)


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--lr", "1e-5"], "learning_rate", 1e-5),
        (["--learning_r=3E-4"], "learning_rate", 3e-4),
        (["--max_steps", "7"], "num_iterations", 7),
        (["--num_micro_batches=8"], "num_chunks", 8),
        (["--batch-size", "256"], "batch_size", 256),
        (["--model_", "some/model"], "model_path", "some/model"),
        (["--dataset=a=b.jsonl"], "dataset", (DatasetEntry("a=b.jsonl"),)),
        (["--fp16"], "dtype", Dtype.FP16),
        (["--dtype", "fp32"], "dtype", Dtype.FP32),
        (["--no_pref"], "use_prefetch", False),
        (["--use_prefetch", "false"], "use_prefetch", False),
        (["--no_prefetch=False"], "use_prefetch", True),
        (["--bf16", "True"], "dtype", Dtype.BF16),
        (["--fp16", "false"], "dtype", Dtype.BF16),
        (["--packing", "true"], "packing", Packing.ON),
        (["--packing", "False"], "packing", Packing.OFF),
        (["--val_size=9", "--metric_for_best_model=eval_perplexity"], "metric_for_best_model", BestMetric.PERPLEXITY),
        (["--overwrite_output_dir"], "overwrite_output_dir", True),
        (["--seed", "1", "--seed", "2"], "seed", 2),
        (["--lr", "1e-3", "--learning_rate", "0.001"], "learning_rate", 1e-3),
        (["--preview"], "preview", 3),
        (["--preview", "12"], "preview", 12),
        (["--preview=12"], "preview", 12),
        (["--preview", "--seed", "1"], "preview", 3),
        (["--preprocessing_num_workers", "auto"], "preprocessing_num_workers", None),
        (["--num_train_epochs", "0.5"], "num_train_epochs", 0.5),
        (["--val_size", "500"], "val_size", 500),
        (["--packing", "joined"], "packing", Packing.JOINED),
        (["--default_system", "Be brief."], "default_system", "Be brief."),
        (["--mask_history", "--no_train_on_prompt"], "mask_history", True),
    ],
)
def test_spellings_prefixes_and_values(argv: list[str], name: str, value: object) -> None:
    config = parse_args(argv)
    assert getattr(getattr(config, options()[name].section), name) == value


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--batchsize", "4"], ["unknown option `--batchsize`", "`--batch_size`"]),
        (["-num_stages", "4"], ["unknown option `-num_stages`", "`--num_stages`"]),
        (["--num", "4"], ["`--num`", "--num_stages", "--num_chunks", "write more"]),
        (["--batch_size", "many"], ["`--batch_size many`", "whole number"]),
        (["--batch_size", "4.5"], ["`--batch_size 4.5`", "whole number"]),
        (["--batch_size"], ["`--batch_size` has no value"]),
        (["--batch_size", "--use_offload"], ["`--batch_size` has no value"]),
        (["--dtype", "int8"], ["bf16, fp16, fp32"]),
        (["--use_prefetch", "yes"], ["`yes`", "--no_prefetch"]),
        (["--use_prefetch=yes"], ["`--use_prefetch=yes`", "takes no value"]),
        (["--dataset="], ["`--dataset `", "text"]),
        (["--config"], ["`--config` has no value"]),
        (["--config", "nowhere.yaml"], ["nowhere.yaml", "cannot be read", "No such file"]),
        (["--bf16", "--fp16"], ["`--bf16` and `--fp16`", "keep one"]),
        (["--use_offload", "--no_offload"], ["`--use_offload` and `--no_offload`"]),
        (["--lr", "1e-3", "--learning_rate", "1e-4"], ["`--lr` and `--learning_rate`"]),
        (["--learning_rate", "-1e-4"], ["`--learning_rate` is -0.0001", "above 0"]),
        (["--learning_rate", "nan"], ["`--learning_rate` is nan"]),
        (["--dataset", "--"], ["`--dataset --`", "text"]),
        (["--dataset", "a", "--", "b"], ["`--dataset a -- b`", "text"]),
        (["--dataset", "-:2"], ["`--dataset -:2`", "text"]),
        (["--preview="], ["`--preview `", "whole number"]),
        (["--preview", "a.jsonl"], ["`--preview a.jsonl`", "whole number at least 1"]),
        (["--preview", "3", "4"], ["`4` belongs to no option"]),
        (["--num_iterations", "5", "--num_train_epochs", "1"], ["`--num_iterations` 5", "`--num_train_epochs` 1"]),
        (["--packing", "of"], ["auto, on, off, joined"]),
        (["--columns", "--seed", "1"], ["`--columns` has no value", "text such as prompt=document"]),
        (["--dataset=---"], ["`--dataset ---`", "text"]),
        (["--dataset", "-"], ["`--dataset -`", "text"]),
        (["--batch_size", "--"], ["`--batch_size --`", "whole number"]),
        (["--config", "--"], ["`--config --`", "cannot be read"]),
        (["--"], ["`--` belongs to no option"]),
        (["--use_prefetch", "--"], ["`--` belongs to no option"]),
        (["--batch_size", "9" * 400], ["`--batch_size` is 999", "...", "at least 1 and below 2147483648"]),
        (["--batch_size", "9" * 5000], ["`--batch_size 999", "...", "whole number"]),
        (["--seed", "9" * 400], ["`--seed` is 999", "below 4294967296"]),
        (["--batch_size", "-" + "9" * 400], ["`--batch_size` is -999", "at least 1"]),
        (["--resident_stages", "9" * 5000], ["`--resident_stages`", "a number from 0 on"]),
        (["--resident_stages", "\u0663"], ["`--resident_stages`", "a number from 0 on"]),
        (["--profile_steps", "1-" + "9" * 5000], ["`--profile_steps`", "such as 3 or 3-4"]),
        (["--profile_steps", "1-999999999"], ["steps 1 to 2"]),
        (["--cuda_visible_devices", "\u0663"], ["`--cuda_visible_devices`", "such as 0,2,1,3"]),
        (["--cuda_visible_devices", "9" * 5000], ["`--cuda_visible_devices`", "such as 0,2,1,3"]),
        (["--cuda_visible_devices", "GPU-\ud800"], ["`--cuda_visible_devices`", "such as 0,2,1,3"]),
        (["--dataset", "a\0b"], ["`--dataset`", "NUL"]),
        (["--model_path", "a\0b"], ["`--model_path`", "NUL"]),
        (["--model_path", "~nosuchuser/x"], ["`--model_path` '~nosuchuser/x'", "user", "./"]),
        (["--dataset", "~nosuchuser"], ["`--dataset` '~nosuchuser'", "user", "./"]),
        (["--plan", "\ud800"], ["`--plan`", "half of a character"]),
        (["--save_dir", "x" * 300], ["`--save_dir`", "300", "255"]),
        (["--model", "数" * 100], ["`--model_path`", "300", "255"]),
        (["--dataset", "x/" * 2100], ["`--dataset`", "4200", "4095"]),
        (["--host_memory_limit", "1e308"], ["`--host_memory_limit` is 1e+308", "above 0 and below"]),
        (["--batch_size", "x" * 5000], ["..."]),
        (["x" * 5000], ["..."]),
        (["--" + "x" * 5000], ["unknown option `--xxx", "..."]),
    ],
    ids=lambda value: " ".join(value)[:30].encode("ascii", "replace").decode(),
)
def test_a_mistake_is_one_problem_that_says_what_to_change(argv: list[str], parts: list[str]) -> None:
    (problem,) = problems_of(*argv)
    for part in parts:
        assert part in problem
    assert len(problem) < 400


def test_a_file_name_of_other_bytes_than_utf_8_is_a_file_name(tmp_path: Path) -> None:
    """Python hands such bytes over as half characters, which the same bytes come from again."""
    name = os.fsdecode(b"data-\xff.jsonl")
    config = parse_args(["--dataset", name])
    assert config.data.dataset == (DatasetEntry(name),)
    file = tmp_path / "resolved.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    assert parse_args(["--config", str(file)]) == config


def test_a_huge_number_is_judged_at_once() -> None:
    start = time.perf_counter()
    (problem,) = problems_of("--batch_size", "500000000", "--num_chunks", "7", "--seq_length", "2")
    assert "use --num_chunks 5 or 8, or --batch_size 499999997 or 500000004" in problem
    (problem,) = problems_of("--batch_size", "1000000000000", "--num_chunks", "7")
    assert "below 2147483648" in problem
    (problem,) = problems_of("--num_iterations", "200000000", "--profile_steps", "1-200000001")
    assert "steps 1 to 200000000" in problem
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--batch_size", "2000000", "--seq_length", "1000000"], ["2000000000000 tokens", "at most 1073741824"]),
        (["--num_layers", "2000000"], ["`--num_layers` is 2000000", "below 1025"]),
        (["--num_stages", "2000000"], ["`--num_stages` is 2000000", "below 1025"]),
        (["--num_chunks", "2000000", "--batch_size", "2000000", "--seq_length", "2"], ["below 10000"]),
        (["--dry_run", "--num_ranks", "2000000"], ["`--num_ranks` is 2000000", "below 257"]),
        (["--nproc_per_node", "2000000"], ["`--nproc_per_node` is 2000000", "below 257"]),
        (["--preprocessing_num_workers", "2000000"], ["below 4096"]),
        (
            ["--num_stages", "1024", "--num_chunks", "64", "--batch_size", "64"],
            ["`--num_stages` 1024 of `--num_chunks` 64 are 65536 forwards", "at most 32768"],
        ),
        (
            ["--batch_size", "8", "--num_chunks", "8", "--seq_length", "65536", "--num_slices", "1024"],
            ["`--num_stages` 8 of `--num_chunks` 8 of `--num_slices` 1024 are 65536 forwards", "at most 32768"],
        ),
    ],
)
def test_what_no_machine_can_hold_is_refused_before_anything_is_made(argv: list[str], parts: list[str]) -> None:
    (problem,) = problems_of(*argv)
    for part in parts:
        assert part in problem


def test_what_is_typed_replaces_its_alternative_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("num_iterations: 100\nval_size: 0.1\n", encoding="utf-8")
    config = parse_args(["--config", str(file), "--num_train_epochs", "2", "--eval_dataset", "held.jsonl"])
    assert (config.optim.num_iterations, config.optim.num_train_epochs, config.data.val_size) == (None, 2.0, 0.0)
    assert "num_iterations" not in given_options(["--config", str(file), "--num_train_epochs", "2"])
    file.write_text("num_train_epochs: 2\neval_dataset: a\n", encoding="utf-8")
    config = parse_args(["--config", str(file), "--num_iterations", "5", "--val_size", "0"])
    assert (config.optim.num_iterations, config.optim.num_train_epochs) == (5, None)
    assert config.data.eval_dataset == (DatasetEntry("a"),)
    file.write_text("num_train_epochs: 2\nnum_iterations: 5\n", encoding="utf-8")
    assert "remove one of them" in problems_of("--config", str(file))[0]


def test_a_preview_is_not_measured_by_the_number_of_ranks() -> None:
    assert parse_args(["--preview", "--num_stages", "6"], num_ranks=4).data.preview == 3


def test_all_problems_are_told_in_one_message(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("learning_rat: 1\nseq_length: long\nlogging_steps: 0\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        parse_args(
            ["--config", str(file), "--batchsiz", "3", "--num_stages", "6", "--adam_beta1", "1.5", "extra"], num_ranks=4
        )
    lines = str(caught.value).splitlines()
    expected = ["learning_rat", "seq_length", "--batchsiz", "extra", "--adam_beta1", "--logging_steps", "--num_stages"]
    for part in expected:
        assert sum(part in line for line in lines) == 1, part
    assert len(lines) == len(expected) + 1
    assert lines[-1] == "Run with `--help` to see all options."


def test_a_mistake_causes_no_second_problem() -> None:
    # 5 does not divide the default batch size, but the user did say another one, only not readably.
    assert len(problems_of("--batch_size", "x", "--num_chunks", "5")) == 1
    assert len(problems_of("--batchsize", "10", "--num_chunks", "5")) == 1
    assert len(problems_of("--config", "nowhere.yaml", "--num_chunks", "5")) == 1


def test_short_model_names_are_completed_unless_a_folder_has_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_args(["--model", "llama-2-7b-hf"]).model.model_path == "meta-llama/Llama-2-7b-hf"
    assert parse_args(["--model", "Llama-2-13b-hf"]).model.model_path == "meta-llama/Llama-2-13b-hf"
    assert parse_args(["--model", "gpt-oss"]).model.model_path == "gpt-oss"
    (tmp_path / "llama-2-7b-hf").mkdir()
    assert parse_args(["--model", "llama-2-7b-hf"]).model.model_path == "llama-2-7b-hf"


def test_help_shows_every_option_with_its_default_and_aliases(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # one line per option, so that no text is broken up
    with pytest.raises(SystemExit) as caught:
        parse_args(["--batch_size", "x", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for option in options().values():
        assert option.text in text, option.name
    for name in spellings():
        assert f"--{name}" in text
    assert "default: 128" in text
    assert "--dataset WORD [WORD ...] " in text
    assert "default: xsum]" in text
    assert "--preview [INT] " in text
    for title in ("Model:", "Data:", "Pipeline and memory:", "Optimizer:", "Output:", "Launch"):
        assert f"\n{title}" in text


def test_help_is_printed_by_the_first_rank_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        parse_args(["-h"])
    assert capsys.readouterr().out == ""


def test_the_front_end_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, mobius.config.cli, mobius.config.launch, mobius.log\n"
        "assert not {'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_resolved_yaml_reads_back_unchanged(tmp_path: Path) -> None:
    config = parse_args(
        ["--lr", "1e-5", "--no_offload", "--fp32", "--gpu_memory_limit", "24", "--cuda_visible_devices", "0,2,1,3",
         "--dataset", "数据/a: b #c.jsonl", "--seed", "7", "--model", "123"]
    )  # fmt: skip
    file = tmp_path / "resolved.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    assert parse_args(["--config", str(file)]) == config
    assert all(f"{name}: " in file.read_text(encoding="utf-8") for name in options())
