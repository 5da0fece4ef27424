"""The command line and YAML files are read as people write them, and all that is wrong is told at once."""

import dataclasses
import os
import random
import subprocess
import sys
import time
import typing
from pathlib import Path

import pytest
import yaml

from mobius.config.cli import given_options, options_page, parse_args
from mobius.config.config import (
    BestMetric,
    Compile,
    Config,
    Dtype,
    EvalStrategy,
    LrSchedulerType,
    OptimConfig,
    OutputConfig,
    Packing,
    PipelineConfig,
    SaveStrategy,
    config_from,
    option_values,
    options,
    spellings,
)
from mobius.config.options import Bounds, DatasetEntry, OptionValue, dataset_options
from mobius.config.sources import to_yaml, written_options
from mobius.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "configs").glob("*.yaml"))
NINES = "9" * 5000


def write(folder: Path, text: str) -> str:
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    return str(file)


def read(folder: Path, text: str) -> Config:
    return parse_args(["--config", write(folder, text)])


def problems_of(*argv: str, num_ranks: int | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_args(argv, num_ranks=num_ranks)
    return caught.value.problems


def value_in(config: Config, name: str) -> object:
    return option_values(config)[name]


# The manual's table: name, type, default.
MANUAL = [
    ("model_path", str, "meta-llama/Llama-2-7b-hf"),
    ("dataset", DatasetEntry, (DatasetEntry("xsum"),)),
    ("save_params", str, "finetune_params.pt"),
    ("save_results", str, "test_result.txt"),
    ("save_dir", str, "save_ckpt"),
    ("use_prefetch", bool, True),
    ("use_offload", bool, True),
    ("batch_size", int, 128),
    ("num_chunks", int, 4),
    ("seq_length", int, 512),
    ("num_iterations", int, None),  # 2, unless epochs are given
    ("num_stages", int, 8),
    ("num_layers", int, None),
    ("embedding_dim", int, None),
    ("ff_dim", int, None),
    ("num_heads", int, None),
    ("cuda_visible_devices", str, None),
    ("master_port", int, 29502),
]


@pytest.mark.parametrize(("name", "value_type", "default"), MANUAL)
def test_an_option_of_the_manual_has_its_type_and_default(name: str, value_type: type, default: OptionValue) -> None:
    assert (options()[name].value_type, options()[name].default) == (value_type, default)


FOREIGN = "model_name_or_path: m\ndataset_name: d"


@pytest.mark.parametrize(
    ("is_command", "file", "is_manual"),
    [
        (False, None, True),
        (False, "seq_length: 64", True),
        (True, "seq_length: 64", True),
        (True, None, False),
        (True, FOREIGN, False),
        (False, FOREIGN, False),
    ],
)
def test_defaults_are_the_manuals_or_those_of_commands_by_the_door(
    is_command: bool, file: str | None, is_manual: bool, tmp_path: Path
) -> None:
    words = [] if file is None else ["--config", write(tmp_path, file)]
    config = parse_args([*words, "--save_dir", "out", "--batch_size", "8"], is_command=is_command)
    pipeline, output = config.pipeline, config.output
    if is_manual:
        assert (pipeline.num_stages, pipeline.num_chunks) == (8, 4)
        assert (output.params_file, output.results_file) == ("finetune_params.pt", "test_result.txt")
    else:
        assert (pipeline.num_stages, pipeline.num_chunks) == (None, None)
        assert (output.params_file, output.results_file) == (None, "out/test_result.txt")
    typed = ["--num_stages", "4", "--batch_size", "8", "--save_results", "r.txt"]
    assert parse_args([*words, *typed], is_command=is_command).output.results_file == "r.txt"
    assert given_options([*words]).isdisjoint({"num_stages", "save_params", "save_results"})


@pytest.mark.parametrize("is_command", [False, True])
def test_neither_file_beside_the_folder_need_be(is_command: bool) -> None:
    output = parse_args(["--save_params", "none", "--save_results", "none"], is_command=is_command).output
    assert (output.params_file, output.results_file) == (None, None)
    parse_args(["--no_do_train", "--do_eval", "--val_size", "2"], is_command=is_command)


def test_every_field_has_a_text_and_every_number_bounds() -> None:
    sections = [section for section in typing.get_type_hints(Config).values() if dataclasses.is_dataclass(section)]
    fields = [field.name for section in sections for field in dataclasses.fields(section)]
    assert list(options()) == fields
    assert len(set(fields)) == len(fields)
    for option in options().values():
        assert len(option.text) > 10, option.name
        assert option.text.endswith("."), option.name
    every = [*options().values(), *dataset_options().values()]
    assert [option.name for option in every if option.value_type in (int, float) and not option.bounds] == []


def test_modes_are_decided_by_options_that_there_are() -> None:
    needs = [need for option in options().values() for need in option.needs]
    assert {name for need in needs for name in need.decided_by.split()} <= options().keys()


def test_the_users_command_line_works_verbatim() -> None:
    words = (
        "--model_path=meta-llama/Llama-2-7b-hf --dataset=xsum --num_iterations=20 --batch_size=64 --num_stage=8 "
        "--use_prefetch --use_offload"
    )
    config = parse_args(words.split(), num_ranks=4)
    assert config == config_from({"num_iterations": 20, "batch_size": 64})
    assert parse_args([], num_ranks=4) == Config()


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--lr 1e-5", "learning_rate", 1e-5),
        ("--learning_r=3E-4", "learning_rate", 3e-4),
        ("--max_steps 7", "num_iterations", 7),
        ("--num_micro_batches=8", "num_chunks", 8),
        ("--batch-size 256", "batch_size", 256),
        ("--model_ some/model", "model_path", "some/model"),
        ("--model_name_or_path m", "model_path", "m"),
        ("--output_dir o", "save_dir", "o"),
        ("--cutoff_len 64", "seq_length", 64),
        ("--max_length 64", "seq_length", 64),
        ("--lora_r 4 --use_lora", "lora_rank", 4),
        ("--lr_scheduler linear", "lr_scheduler_type", LrSchedulerType.LINEAR),
        ("--predict_with_generate --val_size 9", "do_predict", True),
        ("--dataset=a=b.jsonl", "dataset", (DatasetEntry("a=b.jsonl"),)),
        ("--fp16", "dtype", Dtype.FP16),
        ("--dtype fp32", "dtype", Dtype.FP32),
        ("--no_pref", "use_prefetch", False),
        ("--no_offload --use_prefetch", "use_offload", False),
        ("--use_prefetch false", "use_prefetch", False),
        ("--use_prefetch=no", "use_prefetch", False),
        ("--no_prefetch=False", "use_prefetch", True),
        ("--bf16 True", "dtype", Dtype.BF16),
        ("--fp16 false", "dtype", Dtype.BF16),
        ("--packing true", "packing", Packing.ON),
        ("--packing False", "packing", Packing.OFF),
        ("--packing joined", "packing", Packing.JOINED),
        ("--val_size=9 --metric_for_best_model=eval_perplexity", "metric_for_best_model", BestMetric.PERPLEXITY),
        ("--seed 1 --seed 2", "seed", 2),
        ("--lr 1e-3 --learning_rate 0.001", "learning_rate", 1e-3),
        ("--preview", "preview", 3),
        ("--preview=12", "preview", 12),
        ("--preview --seed 1", "preview", 3),
        ("--num_stages auto", "num_stages", None),
        ("--preprocessing_num_workers auto", "preprocessing_num_workers", None),
        ("--val_size 500", "val_size", 500),
        (
            "--columns prompt=document,completion=summary",
            "columns",
            (("prompt", "document"), ("completion", "summary")),
        ),
        ("--columns text=a=b", "columns", (("text", "a=b"),)),
        ("--dataset a.jsonl", "dataset", (DatasetEntry("a.jsonl"),)),
        ("--dataset a b:0.3 c/d:2.0", "dataset", (DatasetEntry("a"), DatasetEntry("b", 0.3), DatasetEntry("c/d", 2))),
        ("--dataset=a.jsonl:.5", "dataset", (DatasetEntry("a.jsonl", 0.5),)),
        ("--dataset a:1e-2 b:+1.", "dataset", (DatasetEntry("a", 0.01), DatasetEntry("b"))),
        ("--dataset a:b c: d:0x1 e:1_000", "dataset", tuple(map(DatasetEntry, ("a:b", "c:", "d:0x1", "e:1_000")))),
        ("--dataset -3 :2 a:b:2", "dataset", (DatasetEntry("-3"), DatasetEntry(":2"), DatasetEntry("a:b", 2))),
        ("--dataset a b --dataset c", "dataset", (DatasetEntry("c"),)),
        ("--eval_dataset a b", "eval_dataset", (DatasetEntry("a"), DatasetEntry("b"))),
    ],
)
def test_spellings_prefixes_and_values(words: str, name: str, value: object) -> None:
    assert value_in(parse_args(words.split()), name) == value


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        *(("lr: " + text, "learning_rate", 1e-5) for text in ("1e-5", "1.0e-5", "1E-05", "0.00001", "+1e-5", "'1e-5'")),
        ("packing: on", "packing", Packing.ON),
        ("packing: off", "packing", Packing.OFF),
        ("packing: yes", "packing", Packing.ON),
        ("compile: true", "compile", Compile.ON),
        ("compile: auto", "compile", Compile.AUTO),
        ("save_strategy: no", "save_strategy", SaveStrategy.NO),
        ("eval_strategy: false", "eval_strategy", EvalStrategy.NO),
        ("resume_from_checkpoint: true", "resume_from_checkpoint", "true"),
        ("resident_stages: 3", "resident_stages", "3"),
        ("tile_tokens: 512", "tile_tokens", "512"),
        ("run_name: 2024", "run_name", "2024"),
        ("run_name: null", "run_name", None),
        ("run_name: 'null'", "run_name", "null"),
        ("dataset: 2024-01-01", "dataset", (DatasetEntry("2024-01-01"),)),
        ("dataset: '1e5'", "dataset", (DatasetEntry("1e5"),)),
        ("eval_dataset: null", "eval_dataset", None),
        ("num_chunks: auto", "num_chunks", None),
        ("use_prefetch: no", "use_prefetch", False),
        ("no_prefetch: false", "use_prefetch", True),
        ("bf16: false\nfp16: true", "dtype", Dtype.FP16),
        ("fp16:", "dtype", Dtype.BF16),
        ("use_lora: true", "finetuning_type", "lora"),
        ("seq_length: 64\nmax_length: 64", "seq_length", 64),
        ("\ufeffseed: 5", "seed", 5),
        ("columns: &c {text: x}\ndataset: [{path: a, columns: *c}]", "columns", (("text", "x"),)),
        ("columns: 'text=a'", "columns", (("text", "a"),)),
        ("", "num_layers", None),
        ("# a comment\nnum_layers:\n", "num_layers", None),
    ],
)
def test_a_file_means_what_the_same_words_mean_when_typed(tmp_path: Path, text: str, name: str, value: object) -> None:
    assert value_in(read(tmp_path, text), name) == value


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--batchsize", "4"], "`--batchsize`"),
        (["-num_stages", "4"], "`--num_stages`"),
        (["--num", "4"], "`--num`"),
        (["--batch_size", "many"], "`--batch_size many`"),
        (["--batch_size", "4.5"], "`--batch_size 4.5`"),
        (["--batch_size", "auto"], "whole number"),
        (["--batch_size"], "`--batch_size` has no value"),
        (["--batch_size", "--use_offload"], "`--batch_size` has no value"),
        (["--columns", "--seed", "1"], "`--columns` has no value"),
        (["--dtype", "int8"], "bf16, fp16, fp32"),
        (["--use_prefetch", "maybe"], "`--use_prefetch maybe`"),
        (["--use_prefetch=maybe"], "true or false"),
        (["--config"], "`--config` has no value"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--config", "7b"], "a model is given with --model_path 7b"),
        (["--config", "--"], "`--config --`"),
        (["--bf16", "--fp16"], "`--bf16` and `--fp16`"),
        (["--use_offload", "--no_offload"], "`--use_offload` and `--no_offload`"),
        (["--lr", "1e-3", "--learning_rate", "1e-4"], "`--lr` and `--learning_rate`"),
        (["--learning_rate", "-1e-4"], "`--learning_rate` is -0.0001"),
        (["--learning_rate", "nan"], "`--learning_rate` is nan"),
        (["--preview", "a.jsonl"], "`--preview a.jsonl`"),
        (["--preview", "3", "4"], "`4` belongs to no option"),
        (["--model_path", "a", "b"], "`b` belongs to no option"),
        (["--dataset=a", "b"], "`b` belongs to no option"),
        (["--datasset", "a", "b"], "`--dataset`"),
        (["--"], "`--` belongs to no option"),
        *((["--dataset", *words], "`--dataset`") for words in ([""], ["--"], ["a", "--", "b"], ["-:2"], ["---"])),
        (["--dataset", "a:0"], "'a'"),
        *((["--dataset", f"b:{weight}"], "'b'") for weight in ("nan", "-inf", "1001", "1e999", NINES)),
        (["--dataset", *["a"] * 1001], "1000 datasets"),
        (["--eval_dataset", "a", "b:0.5"], "`--eval_dataset` 'b'"),
        (["--columns", "prompt"], "'prompt'"),
        (["--columns", "a=b,a=c"], "'a' is given 2 times"),
        (["--batch_size", NINES], "`--batch_size 999"),
        (["--batch_size", "9" * 400], "`--batch_size` is 999"),
        (["--resident_stages", NINES], "`--resident_stages`"),
        (["--resident_stages", "\u0663"], "`--resident_stages`"),
        (["--profile_steps", "1-" + NINES], "`--profile_steps`"),
        (["--profile_steps", "1-999999999"], "steps 1 to 2"),
        (["--model_path", "a\0b"], "`--model_path`"),
        (["--model_path", "~nosuchuser/x"], "`--model_path` '~nosuchuser/x'"),
        (["--save_dir", "x" * 300], "`--save_dir`"),
        (["--host_memory_limit", "1e308"], "`--host_memory_limit` is 1e+308"),
        (["--batch_size", "2000000", "--seq_length", "1000000"], "2000000000000 tokens"),
        (["--num_layers", "2000000"], "below 1025"),
        (["--num_chunks", "2000000", "--batch_size", "2000000", "--seq_length", "2"], "below 10000"),
        (["--num_stages", "1024", "--num_chunks", "64", "--batch_size", "64"], "65536 forwards"),
    ],
    ids=lambda value: " ".join(value)[:30].encode("ascii", "replace").decode(),
)
def test_a_mistake_is_one_problem_that_says_what_to_change(argv: list[str], part: str) -> None:
    (problem,) = problems_of(*argv)
    assert part in problem
    assert len(problem) < 400


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("seed: 1\nbatchsize: 3\n", "`batchsize`"),
        ("batch_size: true", "`batch_size: 'true'`"),
        ("batch_size: 64.0", "whole number"),
        ("batch_size: [64]", "`batch_size: [...]`"),
        ("batch_size: {1: 2}", "`batch_size: {...}`"),
        ("batch_size:", "`batch_size: None`"),
        ("use_prefetch: 1", "true or false"),
        ("use_prefetch:", "true or false"),
        ("learning_rate: fast", "a number above 0"),
        ("learning_rate: .inf", "a number above 0"),
        ("learning_rate: nan", "above 0"),
        ("num_chunks: null", "whole number at least 1, or auto"),
        ("dtype: int8", "bf16, fp16, fp32"),
        ("seed: 1\nlr: 1e-4\nseed: 2\n", "`seed` is already set"),
        ("seq_length: 128\ncutoff_len: 256\n", "`seq_length` and `cutoff_len`"),
        ("bf16: true\nfp16: true\n", "`bf16` and `fp16`"),
        ("training:\n  seed: 1\n", "unknown key `training`"),
        ("- seed\n", "expected lines of `option: value`"),
        ("seed\n", "expected lines of `option: value`"),
        ("seed: [1\n", "not valid YAML"),
        ("logging_steps: 0", "`--logging_steps` is 0"),
        ("batch_size: !!int abc", "line 1"),
        ("dataset: !!python/object:os.system x", "line 1"),
        ("seed: &a [*a]", "line 1"),
        ("? [a]\n: b\n", "line 1"),
        ("seed: 1\n<<: {seed: 2}\n", "unknown key `<<`"),
        ("seed: 1\ndataset: a\0b\n", "#x0000"),
        ('dataset: "a\\0b"\n', "`--dataset`"),
        (f"batch_size: {NINES}", "..."),
        ("\tseed: 1\n", "'\\t'"),
        ("seed: 1\n---\nseed: 2\n", "line 2"),
        ('seed: "\\UFFFFFFFF"\n', "not valid YAML"),
        ("seed: *nothing\n", "line 1"),
        ("dataset: []", "`dataset`"),
        ("dataset:", "`dataset: None`"),
        ("dataset: [[a]]", "`dataset`"),
        ("eval_dataset: [a, null]", "`eval_dataset`"),
        ("dataset: {}", "without `path`"),
        ("dataset: [a, {weight: 2}]", "without `path`"),
        ("dataset: {path: a, weigth: 2}", "unknown key `weigth` of a dataset"),
        ("dataset: {path: a, probability: 2}", "`probability`"),
        ("dataset: {path: a, zzz: 2}", "`zzz`"),
        ("dataset: {path: a, weight: [2]}", "`weight: [...]`"),
        ("dataset: {path: a, weight: 0}", "'a': its weight is 0"),
        ("dataset: {path: a, max_samples: 0}", "its max_samples is 0"),
        ("dataset: {path: a, split:}", "`split: None`"),
        ("dataset: {path: a, path: b}", "`path` is already set"),
        ("dataset: {path: a, name: b}", "`name`"),
        ("dataset: {path: {a: b}}", "`path: {...}`"),
        ("dataset: {path: a, <<: {weight: 2}}", "unknown key `<<`"),
        ("dataset: {path: a, columns: prompt}", "`columns`"),
        ("columns: {prompt:}", "'prompt'"),
        ("columns: {}", "`columns`"),
        ("columns: [a]", "`columns: [...]`"),
        ("lr_scheduler_kwargs: {min_lr: [1]}", "'min_lr'"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_mistake_in_a_file_is_one_problem_that_names_the_file(tmp_path: Path, text: str, part: str) -> None:
    (problem,) = problems_of("--config", write(tmp_path, text))
    assert part in problem
    assert "run.yaml" in problem or problem.startswith("`--")
    assert len(problem) < 400 + len(str(tmp_path))


def test_all_problems_are_told_in_one_message_and_cause_no_others(tmp_path: Path) -> None:
    file = write(tmp_path, "learning_rat: 1\nseq_length: long\nlogging_steps: 0\n")
    words = f"--config {file} --batchsiz 3 --num_stages 6 --adam_beta1 1.5 extra"
    problems = problems_of(*words.split(), num_ranks=4)
    expected = ["learning_rat", "seq_length", "--batchsiz", "extra", "--adam_beta1", "--logging_steps", "--num_stages"]
    for part in expected:
        assert sum(part in line for line in problems) == 1, part
    assert len(problems) == len(expected)
    # 5 does not divide the default batch size, but the user did say another one, only not readably.
    for words in ("--batch_size x", "--batchsize 10", "--config nowhere.yaml"):
        assert len(problems_of(*words.split(), "--num_chunks", "5")) == 1
    assert len(problems_of("--dataset", *["a:0"] * 500)) == 5


def test_huge_numbers_take_no_time() -> None:
    start = time.perf_counter()
    (problem,) = problems_of("--batch_size", "500000000", "--num_chunks", "7", "--seq_length", "2")
    assert "use --num_chunks 5 or 8, or --batch_size 499999997 or 500000004" in problem
    problems_of("--num_iterations", "200000000", "--profile_steps", "1-200000001")
    assert time.perf_counter() - start < 20


def test_what_is_no_file_of_options_is_neither_waited_for_nor_read_to_its_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "wide.yaml").write_text("seed: 1", encoding="utf-16")
    found = {
        str(tmp_path / "pipe"): "not a file",
        "/dev/zero": "not a file",
        str(tmp_path): "Is a directory",
        str(tmp_path / "wide.yaml"): "not a UTF-8",
        "a\0b": "null",
    }
    for path, part in found.items():
        (problem,) = problems_of("--config", path)
        assert part in problem
    assert parse_args(["--config", os.devnull]) == parse_args([])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_config_loads_for_the_number_of_ranks_it_is_meant_for(file: Path) -> None:
    launch = parse_args(["--config", str(file)]).launch
    num_ranks = launch.nproc_per_node or len((launch.cuda_visible_devices or "0").split(","))
    parse_args(["--config", str(file)], num_ranks=num_ranks)


def test_fine_tune_holds_the_values_of_the_readme() -> None:
    config = parse_args(["--config", str(ROOT / "configs/fine_tune.yaml")], num_ranks=4)
    expected = {
        "batch_size": 64, "num_chunks": 4, "num_stages": 8, "seq_length": 128, "num_iterations": 2, "num_layers": 32,
        "model_path": "meta-llama/Llama-2-7b-hf", "dataset": (DatasetEntry("xsum"),), "save_results": "test_result.txt",
        "save_dir": "save_ckpt", "use_prefetch": True, "use_offload": True, "cuda_visible_devices": "0,2,1,3",
        "master_port": 29502,
    }  # fmt: skip
    assert expected.items() <= option_values(config).items()


def test_the_command_line_goes_before_the_file_and_the_file_before_the_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "model: a\nbatch_size: 32\nuse_offload: false\n")
    config = parse_args(["--config", file, "--batch_size", "8", "--use_offload", "--model_path", "b"])
    assert (config.pipeline.batch_size, config.pipeline.use_offload, config.model.model_path) == (8, True, "b")
    assert config.data.seq_length == 512


def test_a_conflict_names_the_file_of_a_value_that_was_not_typed(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("num_stages: 6\n")
    file = ["--config", str(tmp_path / "mine.yaml")]
    with pytest.raises(
        ConfigError, match=rf"`--num_stages` 6: .*\({tmp_path}/mine.yaml sets --num_stages\)"
    ) as of_file:
        parse_args(file, num_ranks=4)
    assert "--num_stages 8" in of_file.value.advice
    with pytest.raises(ConfigError, match="`--num_stages` 7: ") as told:
        parse_args([*file, "--num_stages", "7"], num_ranks=4)
    assert "mine.yaml" not in str(told.value)


def test_what_is_typed_replaces_its_alternative_in_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "num_iterations: 100\nval_size: 0.1\n")
    config = parse_args(["--config", file, "--num_train_epochs", "2", "--eval_dataset", "held.jsonl"])
    assert (config.optim.num_iterations, config.optim.num_train_epochs, config.data.val_size) == (None, 2.0, 0.0)
    assert "num_iterations" not in given_options(["--config", file, "--num_train_epochs", "2"])
    write(tmp_path, "num_train_epochs: 2\neval_dataset: a\n")
    config = parse_args(["--config", file, "--num_iterations", "5", "--val_size", "0"])
    assert (config.optim.num_iterations, config.optim.num_train_epochs) == (5, None)
    assert config.data.eval_dataset == (DatasetEntry("a"),)


def test_short_model_names_are_completed_unless_a_folder_has_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_args(["--model", "Llama-2-13b-hf"]).model.model_path == "meta-llama/Llama-2-13b-hf"
    assert parse_args(["--model", "gpt-oss"]).model.model_path == "gpt-oss"
    (tmp_path / "llama-2-7b-hf").mkdir()
    assert parse_args(["--model", "llama-2-7b-hf"]).model.model_path == "llama-2-7b-hf"


def test_a_file_whose_name_ends_like_a_weight_is_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "night:2").touch()
    config = parse_args(["--dataset", "night:2", "night:2:3", "~/night:2"])
    assert [(entry.name, entry.weight) for entry in config.data.dataset] == [
        *(("night:2", 1.0), ("night:2", 3.0), ("~/night:2", 1.0))
    ]
    text = to_yaml(config)
    (tmp_path / "night:2").unlink()
    assert read(tmp_path, text) == config


def test_help_shows_every_option_with_its_default_and_aliases_on_the_first_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # so that no text is broken up
    with pytest.raises(SystemExit) as caught:
        parse_args(["--batch_size", "x", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for part in (*(option.text for option in options().values()), *(f"--{name}" for name in spellings())):
        assert part in text
    for part in ("  --batch_size  [a whole number at least 1; default: 128]", "default: xsum]", "\nOptimizer:"):
        assert part in text
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        parse_args(["-h"])
    assert capsys.readouterr().out == ""


def test_the_page_of_options_is_made_from_the_table() -> None:
    page = (ROOT / "docs/user/options.md").read_text(encoding="utf-8")
    assert page == options_page(), "run: python -m mobius.config.cli > docs/user/options.md"


def test_the_front_end_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, mobius.config.cli, mobius.config.launch, mobius.process.log\n"
        "assert not {'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_yaml_takes_a_name_a_list_and_mappings(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        """
dataset:
  - a.jsonl
  - b.parquet:0.3
  - path: c:2
    weight: 2
    max_samples: 100
    columns: {prompt: document, completion: "my, = summary"}
    split: validation
    subset: en
  - {name: d, columns: "prompt=x, completion = y"}
  - dataset: e
    max_samples:
eval_dataset:
  path: f
  split: test
""",
    )
    assert config.data.dataset == (
        DatasetEntry("a.jsonl"),
        DatasetEntry("b.parquet", 0.3),
        DatasetEntry("c:2", 2.0, 100, (("prompt", "document"), ("completion", "my, = summary")), "validation", "en"),
        DatasetEntry("d", columns=(("prompt", "x"), ("completion", "y"))),
        DatasetEntry("e"),
    )
    assert config.data.eval_dataset == (DatasetEntry("f", split="test"),)
    assert read(tmp_path, to_yaml(config)) == config


@pytest.mark.parametrize(
    "words",
    [
        "--lr 1e-5 --no_offload --fp32 --gpu_memory_limit 24 --cuda_visible_devices 0,2,1,3 --model 123 --seed 7",
        "--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs min_lr=1e-6,num_cycles=1",
        "--num_stages auto --num_chunks auto --num_train_epochs 2.5",
        "--dataset 数据/a.jsonl " + os.fsdecode(b"data-\xff.jsonl"),
    ],
)
def test_the_resolved_yaml_reads_back_unchanged(tmp_path: Path, words: str) -> None:
    config = parse_args(words.split())
    text = to_yaml(config)
    assert read(tmp_path, text) == config
    assert yaml.safe_load(text) == written_options(config)
    assert all(f"{name}: " in text or f"{name}:\n" in text for name in options())
    assert config_from(option_values(config)) == config


PIECES = ("a", "b.jsonl", "x/y", ":", "0.5", "3", "=", ",", " ", "#", "é模型", "'", '"', "- ", "\n", "null", "yes", "~")


def drawn_text(rng: random.Random) -> str:
    while True:
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 4)))
        if text.strip().strip("-") and not text.startswith("~"):
            return text


def drawn_dataset(rng: random.Random, *, is_weighted: bool) -> DatasetEntry:
    entry = DatasetEntry(drawn_text(rng))
    changes: dict[str, object] = {
        "max_samples": rng.randint(1, 10**9),
        "columns": tuple({drawn_text(rng): drawn_text(rng) for _ in range(rng.randint(1, 3))}.items()),
        "split": drawn_text(rng),
        "subset": drawn_text(rng),
        **({"weight": rng.choice([rng.uniform(0, 9), 1e-7, 987.654321])} if is_weighted else {}),
    }
    chosen = rng.sample(sorted(changes), rng.choice([0, 0, 1, 3]))
    return DatasetEntry(entry.name, **{name: changes[name] for name in chosen if name in changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(40))
def test_drawn_datasets_read_back_unchanged(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    evaluated = rng.choice([None, (drawn_dataset(rng, is_weighted=False),)])
    config = config_from(
        {
            "dataset": tuple(drawn_dataset(rng, is_weighted=True) for _ in range(rng.randint(1, 3))),
            "eval_dataset": evaluated,
            "eval_strategy": EvalStrategy.NO if evaluated is None else EvalStrategy.EPOCH,
            "columns": rng.choice([None, ((drawn_text(rng), drawn_text(rng)),)]),
            "default_system": rng.choice([None, drawn_text(rng)]),
            "preprocessing_num_workers": rng.choice([None, 3]),
        }
    )
    assert read(tmp_path, to_yaml(config)) == config
    assert yaml.safe_load(to_yaml(config)) == written_options(config)


@pytest.mark.parametrize(
    ("entries", "line"),
    [
        ([DatasetEntry("a.jsonl")], "dataset: a.jsonl\n"),
        ([DatasetEntry("a", 0.5), DatasetEntry("b")], "dataset:\n- path: a\n  weight: 0.5\n- b\n"),
        ([DatasetEntry("a:2")], "dataset:\n- path: a:2\n"),
    ],
)
def test_a_mapping_is_written_only_where_it_is_needed(entries: list[DatasetEntry], line: str) -> None:
    assert line in to_yaml(config_from({"dataset": tuple(entries)}))


@pytest.mark.parametrize(
    ("section", "name", "expected"),
    [
        *(
            (OptimConfig(warmup_steps=warmup, num_iterations=steps), "num_warmup_steps", expected)
            for warmup, steps, expected in [(0.0, 9, 0), (0.03, 100, 3), (0.03, 2, 1), (0.07, 100, 7), (20.0, 100, 20)]
        ),
        (OptimConfig(), "num_steps", 2),
        (OptimConfig(num_iterations=7, num_train_epochs=0.5), "num_steps", 7),
        (OutputConfig(), "profiled_steps", range(0)),
        (OutputConfig(profile_steps=" 7 - 8 "), "profiled_steps", range(7, 9)),
        (OutputConfig(profile_steps="5-3"), "profiled_steps", range(5, 4)),
        (PipelineConfig(use_prefetch=False), "num_slots", 1),
        (PipelineConfig(resident_stages="all"), "num_resident_stages", None),
        (PipelineConfig(resident_stages="12"), "num_resident_stages", 12),
        (PipelineConfig(tile_tokens="off"), "num_tile_tokens", None),
        (PipelineConfig(tile_tokens="512"), "num_tile_tokens", 512),
    ],
)
def test_derived_values(section: object, name: str, expected: object) -> None:
    assert getattr(section, name) == expected


def test_bounds_exclude_what_they_say() -> None:
    bounds = Bounds(minimum=0, below=1)
    assert [bounds.allow(value) for value in (-0.1, 0, 0.5, 1, float("nan"), float("inf"))] == [
        *(False, True, True, False, False, False)
    ]
    assert not Bounds(above=0).allow(0)
    assert str(bounds) == "at least 0 and below 1"
    assert [Bounds(share_of="steps").allow(value) for value in (0.3, 1.0, 1.5, 2.0)] == [True, True, False, True]
