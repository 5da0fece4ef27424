"""Results of two runs, compared: numbers of their steps, weights, and the states in their checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

EXACT = ("step", "epoch", "loss", "grad_norm", "learning_rate", "num_tokens", "num_samples", "skipped_steps")


def steps_of(folder: Path) -> list[dict[str, float]]:
    """Every step's numbers that do not depend on the machine."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in EXACT} for row in rows]


def evaluations_of(folder: Path) -> list[tuple[int, float, float]]:
    """Step, loss and accuracy of each evaluation."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [
        (entry["step"], entry["eval_loss"], entry["eval_token_accuracy"]) for entry in history if "eval_loss" in entry
    ]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model or a checkpoint."""
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def manifest_of(checkpoint: Path) -> dict[str, object]:
    """Counts, position and metric of a checkpoint."""
    manifest = json.loads((checkpoint / "checkpoint.json").read_text())
    return {name: manifest[name] for name in ("step", "training", "data", "metric", "has_optimizer")}


def assert_equal_tensors(folder: Path, other: Path) -> None:
    """Every tensor of both folders is there in both, with the same bits."""
    expected, found = tensors_of(folder), tensors_of(other)
    assert expected.keys() == found.keys() != set()
    different = [
        name
        for name, value in expected.items()
        if not torch.equal(value.reshape(-1).view(torch.uint8), found[name].reshape(-1).view(torch.uint8))
    ]
    assert different == []


def assert_goes_on_exactly(whole: Path, resumed: Path, *, step: int) -> None:
    """The run in `resumed`, which began behind `step`, is the rest of the one in `whole`, to the bit."""
    expected, found = steps_of(whole), steps_of(resumed)
    assert [row["step"] for row in expected] == list(range(1, len(expected) + 1))
    assert found[-(len(expected) - step) :] == expected[step:]
    assert evaluations_of(resumed) == evaluations_of(whole)
    assert_equal_tensors(whole, resumed)
    common = [path.name for path in whole.glob("checkpoint-*") if (resumed / path.name).exists()]
    assert [name for name in common if int(name.partition("-")[2]) > step]
    for name in common:
        assert_equal_tensors(whole / name, resumed / name)
        assert manifest_of(whole / name) == manifest_of(resumed / name)
