"""Another model as the reference scores in the memory of the trained model, which then begins as without it."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.runs import make_checkpoint
from harness.small_run import Run, run, saved_inputs, workplace  # noqa: F401
from safetensors.numpy import load_file, save_file

from mobius.errors import CheckpointError, ConfigError
from mobius.planner.solver import PlanResult

PAIRS = [{"prompt": f"Say {n}.", "chosen": f"It is {n}.", "rejected": f"No, {n + 1}, I think."} for n in range(12)]
DPO = ["--objective", "dpo", "--dataset", "pairs.jsonl", "--seq_length", "64", "--num_iterations", "3"]
NO_FILES = ["--save_params", "none", "--save_results", "auto"]


@pytest.fixture
def pairs(workplace: Path) -> Path:  # noqa: F811
    (workplace / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    shutil.copytree(workplace / "model", workplace / "other")
    for path in Path("other").glob("*.safetensors"):
        changed = {name: value + np.float32(0.01) for name, value in load_file(path).items()}
        save_file(changed, path, metadata={"format": "pt"})
    return workplace


def steps(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("where", ["--resident_stages 0", "--no_offload", "--use_lora"])
def test_the_reference_scores_and_leaves(run: Run, pairs: Path, where: str) -> None:  # noqa: F811
    options = [*DPO, *where.split(), *NO_FILES]
    run(*options, "--save_dir", "alone")
    run(*options, "--save_dir", "both", "--reference_model", "other")
    run(
        "--no_do_train",
        "--do_eval",
        "--save_scores",
        "--eval_dataset",
        "pairs.jsonl",
        *DPO[:6],
        "--model_path",
        "other",
    )
    lines = Path("out/scores.jsonl").read_text().splitlines()
    expected = [score for line in lines for score in json.loads(line)["logps"]]
    scores = load_file("both/reference.scores")["training"]
    is_known = ~np.isnan(scores)
    assert is_known.any()
    np.testing.assert_allclose(scores[is_known], np.array(expected)[is_known], rtol=1e-5)
    first, alone = steps("both")[0], steps("alone")[0]
    for side in ("logps/chosen", "logps/rejected"):
        assert first[side] == alone[side], "training begins with the weights of --model_path"
    assert first["rewards/margins"] != alone["rewards/margins"] == 0.0


def test_a_resumed_run_reads_the_scores_even_in_another_folder(run: Run, pairs: Path) -> None:  # noqa: F811
    options = [*DPO, *NO_FILES, "--reference_model", "other", "--save_strategy", "steps", "--save_steps", "2"]
    run(*options, "--save_dir", "whole")
    expected = steps("whole")[-1]["loss"]
    run(*options, "--resume_from_checkpoint", "whole/checkpoint-2", "--save_dir", "moved")
    assert [step["loss"] for step in steps("moved")] == [expected]
    Path("whole/reference.scores").rename("away")
    with pytest.raises(CheckpointError, match="log-probabilities before step 1 cannot be read"):
        run(*options, "--resume_from_checkpoint", "whole/checkpoint-2", "--save_dir", "again")
    with pytest.raises(ConfigError, match=r"`--objective` is orpo, checkpoint-2 has dpo"):
        run(*DPO, "--objective", "orpo", "--resume_from_checkpoint", "whole/checkpoint-2", "--save_dir", "moved")


def test_a_second_run_reads_the_scores_of_the_first(
    run: Run,  # noqa: F811
    pairs: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def log_of(*options: str) -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            run(*DPO, *NO_FILES, *options)
        return caplog.text

    monkeypatch.setattr(PlanResult, "pass_seconds", 10.0)
    first = log_of("--save_dir", "first")
    # The first two of three steps have all pairs.
    assert re.search(r"reference [\d,]{3,} tokens to score before step 1: 20\.0 s as predicted\n", first)
    assert "sequences scored in" in first
    again = log_of("--save_dir", "again", "--beta", "0.3")
    assert "sequences scored in" not in again
    assert "scores of other rows" not in again
    assert steps("again")[0]["rewards/margins"] == 0.0
    other = log_of("--save_dir", "other_rows", "--batch_size", "6", "--num_iterations", "2")
    assert "scores of other rows (4 rows of a step" in other
    assert steps("other_rows")[0]["loss"] == pytest.approx(np.log(2), rel=1e-4)
    assert "sequences scored in" in log_of("--save_dir", "held", "--val_size", "2", "--do_eval")
    weights = next(Path("model").resolve().glob("*.safetensors"))
    weights.touch()
    assert "sequences scored in" in log_of("--save_dir", "touched")


def test_scores_of_other_words_are_not_read(
    run: Run,  # noqa: F811
    pairs: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where a fingerprint of a few samples' tokens would be the same."""
    monkeypatch.setattr("mobius.training.data._LOOKED_AT", 1)
    with caplog.at_level(logging.INFO):
        run(*DPO, *NO_FILES, "--save_dir", "first")
        text = Path("pairs.jsonl").read_text()
        Path("pairs.jsonl").write_text(text.replace('"It is 4."', '"It is 5."'))
        caplog.clear()
        run(*DPO, *NO_FILES, "--save_dir", "changed")
    assert "sequences scored in" in caplog.text


def refusal(start: Run, reference: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        start(*DPO, "--reference_model", reference, "--save_dir", "refused")
    assert not Path("refused").exists()
    return str(caught.value)


def test_a_reference_of_another_kind_is_refused(run: Run, pairs: Path) -> None:  # noqa: F811
    make_checkpoint(pairs / "deep", num_layers=5)
    assert "--reference_model none: not found" in refusal(run, "none")
    assert "`num_hidden_layers` (5 instead of 4)" in refusal(run, "deep")
    for path in Path("other").glob("*.safetensors*"):
        path.unlink()
    assert "holds no weights" in refusal(run, "other")
    shutil.copytree("model", "words")
    tokenizer = Path("words/tokenizer.json")
    changed = json.loads(tokenizer.read_text())
    vocabulary = changed["model"]["vocab"]
    one, two = list(vocabulary)[1000:1002]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    tokenizer.write_text(json.dumps(changed))
    assert "other tokens than the tokenizer of --model_path" in refusal(run, "words")
