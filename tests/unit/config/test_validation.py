"""Values that do not fit together are told with the nearest ones that do."""

import itertools
from pathlib import Path

import pytest

from mobius.config.cli import parse_args
from mobius.config.config import (
    Config,
    DatasetEntry,
    Device,
    EvalStrategy,
    LrSchedulerType,
    OptimConfig,
    Packing,
    Recompute,
)
from mobius.config.lr_schedules import SCHEDULE_ARGUMENTS, Argument
from mobius.config.options import OptionValue, config_from
from mobius.config.validation import find_problems, resolve_epochs, validate
from mobius.config.yaml_file import to_yaml
from mobius.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "num_ranks", "parts"),
    [
        ({"num_stages": 6}, 4, ["`--num_stages` 6", "ranks, 4", "use --num_stages 4 or 8,"]),
        ({"num_stages": 3}, 4, ["use --num_stages 4,"]),
        ({"batch_size": 64, "num_chunks": 5}, 4, ["--num_chunks 4 or 8, or --batch_size 60 or 65"]),
        ({"batch_size": 2, "num_chunks": 4}, 4, ["--num_chunks 2, or --batch_size 4"]),
        ({"embedding_dim": 100, "num_heads": 8}, 4, ["--embedding_dim 96 or 104"]),
        ({"warmup_steps": 3.0, "num_iterations": 2}, 4, ["`--warmup_steps` 3", "`--num_iterations` 2"]),
        ({"warmup_steps": 1.5, "num_iterations": 9}, 4, ["whole number of steps"]),
        ({"gpu_memory_limit": 24.0, "device": Device.CPU}, 4, ["no effect with `--device cpu`"]),
        ({"save_dir": "out", "save_params": "./out"}, 4, ["`--save_params` and `--save_dir`"]),
        ({"cuda_visible_devices": "0,x"}, 4, ["'0,x'", "0,2,1,3"]),
        ({"cuda_visible_devices": "0,0"}, 4, ["different GPUs"]),
        ({"profile_steps": "4-3", "num_iterations": 9}, 4, ["'4-3'", "such as 3 or 3-4"]),
        ({"profile_steps": "0-1"}, 4, ["'0-1'", "from 1 on"]),
        ({"profile_steps": "0-9"}, 4, ["'0-9'", "from 1 on"]),
        ({"warmup_steps": 3.5}, 4, ["`--warmup_steps` is 3.5", "whole number of steps"]),
        ({"profile_steps": "all"}, 4, ["'all'"]),
        ({"profile_steps": "2-3", "num_iterations": 2}, 4, ["2-3 is more", "steps 1 to 2", "--num_iterations"]),
        ({"tile_tokens": "some"}, 4, ["`--tile_tokens`", "'some'", "auto, off, or a number from 1"]),
        ({"tile_tokens": "0"}, 4, ["'0'", "from 1 on"]),
        (
            {"tile_tokens": "512", "use_offload": False, "recompute": Recompute.NONE},
            4,
            ["`--tile_tokens` 512", "none is"],
        ),
        ({"resident_stages": "some"}, 4, ["'some'", "auto, all, or a number from 0"]),
        ({"resident_stages": "-1"}, 4, ["'-1'", "from 0 on"]),
        ({"resident_stages": "2", "use_offload": False}, 4, ["`--resident_stages` 2", "`--no_offload`", "remove one"]),
        ({"recompute": Recompute.NONE, "resident_stages": "7"}, 4, ["`--recompute none`", "--no_offload"]),
        ({"recompute": Recompute.ELEMENTWISE}, 4, ["`--recompute elementwise`", "--no_offload"]),
        ({"num_iterations": 5, "num_train_epochs": 0.5}, 4, ["`--num_iterations` 5", "`--num_train_epochs` 0.5"]),
        ({"num_train_epochs": 0.0}, 4, ["`--num_train_epochs` is 0", "above 0"]),
        ({"num_train_epochs": -1.0}, 4, ["`--num_train_epochs` is -1", "above 0"]),
        ({"num_train_epochs": 10_001.0}, 4, ["`--num_train_epochs` is 10001", "above 0 and below 10001"]),
        ({"num_train_epochs": 2.0, "warmup_steps": 1.5}, 4, ["whole number of steps"]),
        ({"num_train_epochs": 2.0, "profile_steps": "x"}, 4, ["such as 3 or 3-4"]),
        ({"val_size": 1.5}, 4, ["`--val_size` is 1.5", "whole number of samples", "below 1"]),
        ({"val_size": -1.0}, 4, ["`--val_size` is -1", "at least 0"]),
        ({"val_size": 0.1, "eval_dataset": (DatasetEntry("a"),)}, 4, ["`--val_size` 0.1", "`--eval_dataset`"]),
        ({"train_on_prompt": True, "mask_history": True}, 4, ["`--train_on_prompt`", "`--mask_history`", "remove one"]),
        ({"preview": 3, "dry_run": True}, 4, ["`--preview`", "`--dry_run`", "remove one"]),
        ({"preview": 0}, 4, ["`--preview` is 0", "at least 1"]),
        ({"preview": 5000}, 4, ["`--preview` is 5000", "below 1001"]),
        ({"preprocessing_num_workers": 0}, 4, ["at least 1"]),
        ({"master_port": 70000}, 4, ["below 65536"]),
        ({"report_to": "tensorboard,mlflow"}, 4, ["mlflow", "none, or", "tensorboard, swanlab, wandb"]),
        ({"report_to": "none,wandb"}, 4, ["none,wandb", "tensorboard, swanlab, wandb"]),
        ({"seq_length": 1}, 4, ["at least 2"]),
        ({"adam_beta2": 1.0}, 4, ["at least 0 and below 1"]),
        ({"max_grad_norm": -1.0}, 4, ["at least 0"]),
        ({"num_heads": 0}, 4, ["at least 1"]),
    ],
)
def test_a_broken_rule_names_what_would_be_valid(
    values: dict[str, OptionValue], num_ranks: int, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(config_from(values), num_ranks)
    (problem,) = caught.value.problems
    for part in parts:
        assert part in problem


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_the_defaults_are_valid(num_ranks: int) -> None:
    validate(Config(), num_ranks)


@pytest.mark.parametrize(
    "values",
    [
        {"cuda_visible_devices": "0, 2,1,3"},
        {"cuda_visible_devices": "GPU-8a1,MIG-77"},
        {"max_grad_norm": 0.0, "weight_decay": 0.0, "warmup_steps": 0.0},
        {"use_prefetch": True, "use_offload": False},
        {"num_stages": 32, "num_layers": 32},
        {"warmup_steps": 2.0, "num_iterations": 2},
        {"profile_steps": "2", "num_iterations": 2},
        {"profile_steps": "1 - 2", "num_iterations": 2},
        {"num_train_epochs": 0.01, "warmup_steps": 500.0, "profile_steps": "100-102"},
        {"val_size": 1.0},
        {"val_size": 0.999},
        {"val_size": 500.0},
        {"val_size": 0.0, "eval_dataset": (DatasetEntry("a"),), "eval_strategy": EvalStrategy.EPOCH},
        {"default_system": "~nobody/" + "x" * 5000},
        {"packing": Packing.JOINED, "train_on_prompt": True},
        {"resident_stages": "0"},
        {"resident_stages": "all", "use_offload": False},
        {"resident_stages": "all", "recompute": Recompute.NONE},
    ],
)
def test_values_at_the_edge_are_allowed(values: dict[str, OptionValue]) -> None:
    assert find_problems(config_from(values)) == []


def test_the_number_of_ranks_is_only_judged_where_it_is_known() -> None:
    config = config_from({"num_stages": 6})
    assert find_problems(config) == []
    assert len(find_problems(config, num_ranks=4)) == 1


def test_the_steps_of_epochs_are_judged_once_they_are_known() -> None:
    config = config_from({"num_train_epochs": 0.5, "warmup_steps": 8.0, "profile_steps": "9-10"})
    assert find_problems(config) == []
    assert resolve_epochs(config, 10).optim.num_steps == 10
    with pytest.raises(ConfigError) as caught:
        resolve_epochs(config, 7)
    warmup, profile = caught.value.problems
    assert warmup == "`--warmup_steps` 8 is more than the 7 steps of `--num_train_epochs` 0.5; use at most 7"
    assert profile == "`--profile_steps` 9-10 is more than the run has; use steps 1 to 7, or more `--num_train_epochs`"


def test_a_share_of_warm_up_is_one_of_the_steps_that_epochs_make() -> None:
    config = resolve_epochs(config_from({"num_train_epochs": 3.0, "warmup_steps": 0.1}), 200)
    assert config.optim.num_warmup_steps == 20


def test_a_run_of_epochs_is_written_down_as_it_was_asked_for(tmp_path: Path) -> None:
    """Its number of steps would not end it in the same rows."""
    config = config_from({"num_train_epochs": 2.5})
    text = to_yaml(resolve_epochs(config, 240))
    (tmp_path / "training_args.yaml").write_text(text)
    assert text == to_yaml(config)
    assert parse_args(["--config", str(tmp_path / "training_args.yaml")]) == config


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--batch_size 16 --num_chunks 4", r"shared by 3 replicas of 4 microbatches each.*multiple of 12; .* 12 or 24"),
        ("--batch_size 16 --num_chunks auto", r"shared by 3 replicas: .*multiple of 3; .* 15 or 18"),
    ],
)
def test_a_batch_that_replicas_cannot_share_is_refused_with_the_arithmetic(words: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        parse_args([*words.split(), "--num_stages", "4"], num_ranks=6, num_nodes=3)
    parse_args([*words.split(), "--num_stages", "4"], num_ranks=8, num_nodes=4)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--nnodes 2 --rdzv_endpoint a:1", "needs `--node_rank`"),
        ("--nnodes 2 --node_rank 1", "needs `--rdzv_endpoint`"),
        ("--nnodes 2 --node_rank 2 --rdzv_endpoint a:1", "numbered from 0, and there are 2"),
        ("--nnodes 2 --node_rank 1 --rdzv_endpoint node0", "write HOST:PORT"),
    ],
)
def test_nodes_need_a_number_and_a_place_to_meet(words: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        parse_args(words.split())


BEST = ["--load_best_model_at_end", "--eval_strategy", "steps"]
JUDGED = ["--val_size", "10", "--num_iterations", "100"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--eval_strategy", "steps"], ["nothing to evaluate on", "--eval_dataset", "--val_size"]),
        (["--do_predict"], ["nothing to evaluate on"]),
        (["--no_do_train"], ["leaves nothing to do"]),
        ([*JUDGED, "--load_best_model_at_end"], ["--eval_strategy steps or epoch"]),
        (["--eval_strategy", "no", *JUDGED, "--early_stopping_patience", "2"], ["--eval_strategy steps or epoch"]),
        (
            [*JUDGED, *BEST, "--eval_steps", "30", "--save_steps", "50"],
            ["multiple of --eval_steps"],
        ),
        (
            [*JUDGED, *BEST, "--num_iterations", "25", "--eval_steps", "0.1", "--save_steps", "0.2"],
            ["of `--num_iterations` 25", "`--save_steps` 0.2 are 5", "`--eval_steps` 0.1 are 3"],
        ),
        ([*JUDGED, *BEST, "--eval_steps", "30", "--save_steps", "0.5"], ["`--save_steps` 0.5 are 50"]),
        (["--save_steps", "1.5"], ["whole number of steps"]),
        ([*JUDGED, "--eval_steps", "2.5"], ["whole number of steps"]),
        (["--save_total_limit", "-1"], ["at least 0"]),
        (["--resume_changes", "learning_rate"], ["no effect without `--resume_from_checkpoint`"]),
        (["--resume_from_checkpoint", "c", "--resume_changes", "seed,rate"], ["'rate'", "no option"]),
        (["--val_size", "10", "--no_do_train", "--do_eval", "--resume_from_checkpoint", "c"], ["--model_path"]),
    ],
)
def test_what_does_not_fit_together_is_told(options: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(options)
    assert len(caught.value.problems) == 1
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        ["--eval_strategy", "steps", "--eval_steps", "25", "--save_steps", "50", "--load_best_model_at_end"],
        [*BEST, "--eval_steps", "0.1", "--save_steps", "0.2"],
        [*BEST, "--eval_steps", "25", "--save_steps", "0.5"],
        ["--eval_strategy", "epoch", "--save_strategy", "epoch", "--load_best_model_at_end"],
        ["--eval_strategy", "steps", "--eval_steps", "0.1", "--early_stopping_patience", "3"],
    ],
)
def test_what_fits_together_is_taken(options: list[str]) -> None:
    parse_args([*JUDGED, *options])


def test_shares_of_epochs_are_compared_once_their_steps_are_known() -> None:
    shares = ["--eval_steps", "0.1", "--save_steps", "0.2"]
    config = parse_args([*BEST, *shares, "--val_size", "10", "--num_train_epochs", "2"])
    assert resolve_epochs(config, 100).optim.num_steps == 100
    with pytest.raises(ConfigError, match=r"of the 25 steps of `--num_train_epochs` 2 `--save_steps` 0.2 are 5"):
        resolve_epochs(config, 25)


def test_changes_are_a_list_of_names() -> None:
    config = parse_args(["--resume_from_checkpoint", "c", "--resume_changes", "learning_rate, num_iterations"])
    assert config.saving.changes == ("learning_rate", "num_iterations")


def test_who_only_judges_needs_no_dataset_to_train_on() -> None:
    judged = ["--eval_dataset", "test.jsonl", "--do_predict"]
    data = parse_args(["--no_do_train", *judged]).data
    assert data.dataset == data.eval_dataset
    for others in (["--no_do_train", "--dataset", "xsum", *judged], judged):
        assert parse_args(others).data.dataset[0].name == "xsum"


def test_a_decay_is_compared_with_the_steps_that_epochs_make() -> None:
    words = "--lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs num_decay_steps=50 --num_train_epochs 1"
    config = parse_args(words.split())
    assert resolve_epochs(config, 51).optim.schedule_arguments == {"num_decay_steps": 50}
    with pytest.raises(ConfigError, match="num_decay_steps is 50; of 40 steps .* at most 39"):
        resolve_epochs(config, 40)


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        ("cosine", {"min_lr": "1e-6"}, ["'min_lr' has no effect with `--lr_scheduler_type cosine`", "num_cycles"]),
        ("linear", {"power": "2"}, ["'power' has no effect", "takes none", "polynomial"]),
        ("cosine_with_min_lr", {}, ["needs min_lr or min_lr_rate"]),
        ("cosine_with_min_lr", {"min_lr": "1e-6", "min_lr_rate": "0.1"}, ["not both"]),
        ("cosine_with_min_lr", {"min_lr": "1"}, ["min_lr is 1, not below `--learning_rate` 0.0003"]),
        ("cosine_with_min_lr", {"min_lr": "-1"}, ["min_lr is '-1'", "at least 0"]),
        ("cosine_with_min_lr", {"min_lr_rate": "much"}, ["min_lr_rate is 'much'", "number"]),
        ("cosine_with_restarts", {"num_cycles": "1.5"}, ["num_cycles is '1.5'", "whole number"]),
        ("warmup_stable_decay", {}, ["needs num_decay_steps"]),
        ("warmup_stable_decay", {"num_decay_steps": "10"}, ["num_decay_steps is 10", "at most 7"]),
        ("warmup_stable_decay", {"num_decay_steps": "2", "decay_type": "steep"}, ["'steep'", "1-sqrt"]),
        ("polynomial", {"lr_end": "nan"}, ["lr_end is 'nan'"]),
    ],
)
def test_arguments_that_a_course_does_not_take_are_refused(
    kind: str, arguments: dict[str, str], words: list[str]
) -> None:
    config = OptimConfig(
        learning_rate=3e-4,
        lr_scheduler_type=LrSchedulerType(kind),
        lr_scheduler_kwargs=tuple(arguments.items()) or None,
        num_iterations=10,
        warmup_steps=4,
    )
    (problem,) = find_problems(Config(optim=config))
    for word in words:
        assert word in problem


def test_a_polynomial_that_would_end_above_its_peak_is_refused() -> None:
    config = OptimConfig(learning_rate=1e-8, lr_scheduler_type=LrSchedulerType.POLYNOMIAL)
    (problem,) = find_problems(Config(optim=config))
    assert "lr_end is 1e-07, not below `--learning_rate` 1e-08" in problem


def test_every_argument_says_what_it_may_be() -> None:
    arguments = set(itertools.chain.from_iterable(each.values() for each in SCHEDULE_ARGUMENTS.values()))
    assert all("number" in str(each) or "one of" in str(each) for each in arguments)
    with pytest.raises(ValueError, match="inf"):
        Argument().read("inf")
