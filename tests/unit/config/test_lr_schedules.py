"""Arguments of a course of the learning rate are taken by transformers' names, and refused where they do nothing."""

import itertools
from pathlib import Path

import pytest

from mobius.config.cli import parse_args
from mobius.config.config import Config, OptimConfig
from mobius.config.lr_schedules import SCHEDULE_ARGUMENTS, Argument, LrSchedulerType
from mobius.config.validation import find_problems, resolve_epochs
from mobius.config.yaml_file import to_yaml
from mobius.errors import ConfigError

KIND = LrSchedulerType.COSINE_WITH_MIN_LR


def test_arguments_are_typed_as_pairs_and_written_as_a_mapping(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"lr_scheduler_type: {KIND}\nlr_scheduler_kwargs:\n  min_lr: 1e-6\n  num_cycles: 1\n")

    typed = parse_args(["--lr_scheduler_type", KIND, "--lr_scheduler_kwargs", "min_lr=1e-6, num_cycles=1"])

    assert typed.optim.schedule_arguments == {"min_lr": 1e-6, "num_cycles": 1.0}
    assert parse_args(["--config", str(file)]) == typed
    file.write_text(to_yaml(typed))
    assert parse_args(["--config", str(file)]) == typed


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("lr_scheduler_kwargs: {}", "1 to "),
        ("lr_scheduler_kwargs: {min_lr: true}", "`min_lr: true`"),
        ("lr_scheduler_kwargs: {min_lr: [1]}", "`min_lr: [...]`"),
        ("lr_scheduler_kwargs: min_lr", "'min_lr' is no pair NAME=NUMBER"),
        ("lr_scheduler_kwargs: 3", "text such as min_lr=1e-6 is needed"),
        ("min_lr: 1e-6", "--lr_scheduler_kwargs min_lr=1e-6"),
    ],
)
def test_what_is_no_pair_is_refused(tmp_path: Path, yaml: str, words: str) -> None:
    (tmp_path / "run.yaml").write_text(yaml)
    with pytest.raises(ConfigError) as caught:
        parse_args(["--config", str(tmp_path / "run.yaml")])
    assert words in str(caught.value)


def test_the_name_of_other_trainers_for_the_course_is_taken() -> None:
    assert parse_args(["--lr_scheduler", "linear"]).optim.lr_scheduler_type is LrSchedulerType.LINEAR


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
