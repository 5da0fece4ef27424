"""A run that trains nothing: it evaluates or answers with the weights that it is given, and leaves that alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Run = Callable[..., None]
JUDGES = ["--no_do_train", "--val_size", "4", "--save_dir", "judged"]


def test_an_evaluation_is_not_refused_for_the_report_of_a_training(run: Run, workplace: Path) -> None:
    Path("test_result.txt").write_text("of a training")

    run(*JUDGES, "--do_eval")

    assert (workplace / "judged" / "eval_results.json").is_file()
    assert Path("test_result.txt").read_text() == "of a training"
