"""Options of long runs: what fits together, and words that YAML reads as something else."""

from pathlib import Path

import pytest

from mobius.config.cli import parse_args
from mobius.config.config import EvalStrategy, SaveStrategy
from mobius.config.validation import resolve_epochs
from mobius.errors import ConfigError

BEST = ["--load_best_model_at_end", "--eval_strategy", "steps"]
JUDGED = ["--val_size", "10", "--num_iterations", "100"]


def test_words_that_yaml_reads_as_booleans_are_words(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("save_strategy: no\neval_strategy: no\nresume_from_checkpoint: true\nmax_run_time: 0.1\n")
    config = parse_args(["--config", str(file)])
    assert (config.saving.save_strategy, config.evaluation.eval_strategy) == (SaveStrategy.NO, EvalStrategy.NO)
    assert (config.saving.resume_from_checkpoint, config.saving.max_run_time) == ("true", 0.1)
    assert not config.saving.is_on


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
