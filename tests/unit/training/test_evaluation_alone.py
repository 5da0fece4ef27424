"""A run that trains nothing: it evaluates or answers with the weights that it is given, and leaves that alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from mobius.config.earlier_results import has_results
from mobius.errors import CheckpointError
from mobius.reporting import run_log

Run = Callable[..., None]
JUDGES = ["--no_do_train", "--val_size", "4", "--save_dir", "judged"]


def test_an_evaluation_is_not_refused_for_the_report_of_a_training(run: Run, workplace: Path) -> None:
    Path("test_result.txt").write_text("of a training")

    run(*JUDGES, "--do_eval")

    assert (workplace / "judged" / "eval_results.json").is_file()
    assert Path("test_result.txt").read_text() == "of a training"


def test_an_evaluation_whose_results_cannot_be_written_fails_and_may_start_again(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> AbstractContextManager[Path]:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run_log, "atomic_write", full)
        with pytest.raises(CheckpointError) as raised:
            run(*JUDGES, "--do_eval")

    assert str(raised.value) == (
        "--save_dir judged: the results cannot be written (No space left on device). Free some space, or choose "
        "another folder, and start again."
    )
    assert not has_results(workplace / "judged")
    run(*JUDGES, "--do_eval")
    assert has_results(workplace / "judged")


def test_answers_alone_are_generated_without_a_session_of_training(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: object, **__: object) -> None:
        pytest.fail("memory for stages is taken")

    monkeypatch.setattr("mobius.training.run.open_session", opened)
    run(*JUDGES, "--do_predict", "--max_new_tokens", "2")

    assert len((workplace / "judged" / "generated_predictions.jsonl").read_text().splitlines()) == 4
    results, scores = (
        json.loads((workplace / "judged" / f"{name}_results.json").read_text()) for name in ("all", "predict")
    )
    assert results == scores
    assert not list(workplace.glob("judged.*"))
    assert has_results(workplace / "judged"), "--overwrite_output_dir may replace it"
