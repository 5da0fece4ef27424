"""Whole runs of sequences in slices stay by the runs of whole sequences; what waits on the host changes no bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.runs import assert_equal_tensors

Run = Callable[..., None]

USUAL = "--num_chunks 2 --num_stages 4 --learning_rate 1e-3 --save_params none --num_iterations 20 --max_grad_norm 0.5"


def losses(folder: str) -> list[float]:
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [step["loss"] for step in map(json.loads, lines)]


@pytest.mark.parametrize(
    "options",
    ["--packing on", "--packing off --num_rounds 2 --resident_stages 1"],
)
@pytest.mark.extended  # half a minute each
def test_twenty_steps_in_slices_stay_within_rounding_of_whole_sequences(run: Run, options: str) -> None:
    words = f"{USUAL} {options}".split()
    run(*words, "--save_dir", "whole", "--save_results", "whole.txt")
    sliced = ["--num_slices", "4", "--activation_offloading", "on", "--tile_tokens", "3"]
    run(*words, *sliced, "--save_dir", "sliced", "--save_results", "sliced.txt")

    assert len(losses("whole")) == 20
    assert losses("sliced") == pytest.approx(losses("whole"), rel=1e-5)
    assert losses("whole")[-1] < losses("whole")[0]


def test_stashes_change_no_bit_of_a_run(run: Run) -> None:
    words = f"{USUAL} --num_iterations 4".replace("--num_iterations 20 ", "").split()
    for name in ("off", "on"):
        run(*words, "--activation_offloading", name, "--save_dir", name, "--save_results", f"{name}.txt")

    assert losses("on") == losses("off")
    assert_equal_tensors(Path("on"), Path("off"))


def test_attention_that_is_kept_changes_no_bit_of_a_run(run: Run) -> None:
    words = f"{USUAL} --num_iterations 4 --num_slices 4 --packing on".replace("--num_iterations 20 ", "").split()
    for name, stashes in (("full", "off"), ("linear", "on")):
        words += ["--activation_offloading", stashes]
        run(*words, "--recompute", name, "--save_dir", name, "--save_results", f"{name}.txt")

    assert losses("linear") == losses("full")
    assert_equal_tensors(Path("linear"), Path("full"))
