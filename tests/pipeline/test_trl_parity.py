"""Twenty clipped steps have TRL's losses, numbers, norms and weights, which harness/trl_parity.py recorded.

TRL's means are over the pairs, answers or completions (ORPO's cross entropy and DAPO: over the tokens) of a batch on
one device. The record has one batch in each step, so its means are over a step, as those of Mobius are however a step
is cut.

Steps of TRL in fp64 are as far from its own in fp32 as from those of Mobius, in losses by 2e-7 (reward), 3e-7 and 5e-7
(KTO), 2e-7 and 4e-7 (RLOO), and 1e-6 (sigmoid), in weights by 1e-6 and at most 2e-6 of a tensor's largest entry. KL of
KTO, a mean of differences of sums in fp32 near 100, is 1e-5 and 2e-5 away. So both differ by rounding.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.runs import run_main, with_kernel
from harness.small_run import empty_picture
from harness.trl_parity import CASES, NUM_STEPS, entries_of, make, sampled, words_of
from safetensors.numpy import load_file

from mobius.config.cli import parse_args
from mobius.process.ranks import Ranks
from mobius.training.run import run_training

RECORDED: Mapping[str, Any] = json.loads(Path(__file__).with_name("trl_parity.json").read_text(encoding="utf-8"))
NEAR: Mapping[str, Mapping[str, float]] = {
    "loss": {"rel": 1e-6, "abs": 1e-6},
    "nll_loss": {"rel": 1e-6},
    # torch's norm in fp32 of 131,072 entries is 4e-6 too small, of the half that a replica has 2e-6.
    "grad_norm": {"rel": 1e-5},
    "logps": {"rel": 1e-6},
    # Differences of sums in fp32 near 100, whose last place is 8e-6, times beta, 0.1.
    "rewards": {"rel": 1e-6, "abs": 3e-6},
    "log_odds_ratio": {"rel": 1e-6, "abs": 1e-6},
    "margin": {"rel": 1e-6, "abs": 1e-6},
    "mean_reward": {"rel": 1e-6, "abs": 1e-6},
    # KTO's: as rewards, not times beta.
    "kl": {"rel": 1e-6, "abs": 3e-5},
}
"""Of a number whose name is here or begins so; 1e-6 of the others."""
NEAR_WEIGHTS = 1e-5
"""Share of a tensor's largest entry."""
PLAIN = "--num_stages 1 --num_chunks 1"
WAYS = {
    "three stages, streamed, four microbatches": (1, "--num_stages 3 --num_chunks 4 --resident_stages 0"),
    "two ranks, resident": (2, "--num_stages 4 --num_chunks 2 --resident_stages all"),
    "two ranks, streamed, two rounds": (2, "--num_stages 4 --num_chunks 4 --num_rounds 2 --resident_stages 0"),
    "two replicas": (2, "--num_stages 2 --num_chunks 2 --pipeline_ranks 1"),
}

Train = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.chdir(folder)
        make(folder)
    return folder


@pytest.fixture
def train(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Train a case in a copy of `made`, by one rank in this process or by several that are forked."""
    shutil.copytree(made, folder := tmp_path / "here")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(with_kernel(tmp_path / "cache")))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr("mobius.training.reporting.draw_training", empty_picture)

    def start(name: str, options: str, num_ranks: int = 1) -> Path:
        words = words_of(CASES[name], *options.split(), "--save_dir", "out", "--save_params", "none")
        if num_ranks == 1:
            run_training(parse_args(words, num_ranks=1), Ranks(0, 1, 0))
        else:
            result = run_main(num_ranks, folder, *words)
            assert result.returncode == 0, result.stdout
        return folder / "out"

    return start


def assert_as_recorded(folder: Path, name: str) -> None:
    """Numbers of all steps and the weights after them are those that TRL had."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == NUM_STEPS
    recorded = dict(RECORDED[name])
    del recorded["steps"]
    largest = recorded.pop("weights")
    weights = {name: value for path in folder.glob("model*.safetensors") for name, value in load_file(path).items()}
    for number, expected in recorded.items():
        found = [-row["odds_loss"] / 0.1 if number == "log_odds_ratio" else row[number] for row in rows]
        if number == "rewards/accuracies" and CASES[name].trainer == "dpo":
            assert found[0] == 0, "the first margins are exactly 0; those of TRL are rounding errors"
            found, expected = found[1:], expected[1:]
        # TRL tells some numbers of rollouts only at the first step.
        assert len(expected) in (1, len(found)), number
        near = NEAR.get(number.partition("/")[0], {"rel": 1e-6})
        assert found[: len(expected)] == pytest.approx(expected, **near), number
    assert weights.keys() == largest.keys()
    for tensor, of_tensor in largest.items():
        apart = float(np.abs(sampled(weights[tensor]) - entries_of(of_tensor)).max()) / of_tensor["largest"]
        assert apart <= NEAR_WEIGHTS, f"{tensor}: {apart:.2g} of the largest entry"


def test_the_recorded_steps_have_the_units_of_the_steps_here(made: Path) -> None:
    steps = json.loads((made / "steps.json").read_text())
    assert all(RECORDED[name]["steps"] == steps[case.layout] for name, case in CASES.items())
    assert len({len(step) for step in steps["packed"]}) > 1, "means over pairs differ from means over rows"


@pytest.mark.parametrize(
    "name",
    # The ways below have the sigmoid loss.
    [pytest.param(name, marks=[pytest.mark.extended] * (name in ("sigmoid", "packed"))) for name in CASES],
)
def test_twenty_steps_are_those_of_trl(name: str, train: Train) -> None:
    norms = np.array(RECORDED[name]["grad_norm"])
    assert (norms > CASES[name].max_grad_norm).any()
    assert (norms < CASES[name].max_grad_norm).any()
    assert_as_recorded(train(name, PLAIN), name)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("packed", way) for way in WAYS),
        *(pytest.param("orpo", way, marks=pytest.mark.extended) for way in WAYS if way.startswith("two")),
    ],
)
def test_twenty_steps_are_those_of_trl_however_they_are_cut(name: str, way: str, train: Train) -> None:
    num_ranks, options = WAYS[way]
    assert_as_recorded(train(name, options, num_ranks), name)
