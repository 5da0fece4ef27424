"""Another model as the reference scores in the memory of the trained model, which then begins as without it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.runs import make_checkpoint
from harness.small_run import Run, run, saved_inputs, workplace  # noqa: F401
from safetensors.numpy import load_file, save_file

from mobius.errors import CheckpointError

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
    scores = load_file("both/reference_scores.safetensors")["training"]
    is_known = ~np.isnan(scores)
    assert is_known.any()
    np.testing.assert_allclose(scores[is_known], np.array(expected)[is_known], rtol=1e-5)
    first, alone = steps("both")[0], steps("alone")[0]
    for side in ("logps/chosen", "logps/rejected"):
        assert first[side] == alone[side], "training begins with the weights of --model_path"
    assert first["rewards/margins"] != alone["rewards/margins"] == 0.0


def refusal(start: Run, reference: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        start(*DPO, "--reference_model", reference, "--save_dir", "refused")
    assert not Path("refused").exists()
    return str(caught.value)


def test_a_reference_of_another_kind_is_refused(run: Run, pairs: Path) -> None:  # noqa: F811
    make_checkpoint(pairs / "deep", num_layers=5)
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
