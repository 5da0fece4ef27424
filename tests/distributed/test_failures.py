"""A run that loses a rank ends quickly and says why."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.forked import HANG_SECONDS, Ranks
from harness.runs import environment, make_checkpoint, make_dataset

ENDLESS = """--model_path model --dataset data.jsonl --fp32 --num_stages 4 --num_chunks 2 --batch_size 4 --seq_length 16
    --num_iterations 100000 --save_dir out"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run whose ranks are killed in a step before the first save: only its records are there."""
    make_checkpoint(tmp_path / "model")
    make_dataset(tmp_path / "data.jsonl")
    yield tmp_path
    assert (tmp_path / "out" / "metrics.jsonl").read_text().count("\n") >= 5
    assert {path.suffix for path in (tmp_path / "out").iterdir()} <= {".jsonl", ".yaml", ".json"}
    assert not (tmp_path / "out" / "config.json").exists()
    assert not (tmp_path / "finetune_params.pt").exists()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_ends_within_a_minute_when_the_other_one_dies_and_nobody_else_looks(place: Path, victim: int) -> None:
    arguments = ["--device", "cpu", *ENDLESS.split()]
    ranks = Ranks("main", "main", arguments, num_ranks=2, folder=place, environment=environment(place / "cache"))
    while " 5/100000" not in ranks.output():
        assert all(process.is_alive() for process in ranks.processes), ranks.output()
        time.sleep(0.05)

    ranks.processes[victim].kill()
    start = time.monotonic()
    survivor = ranks.processes[1 - victim]
    survivor.join(HANG_SECONDS)

    assert time.monotonic() - start < 60
    assert survivor.exitcode == 1
    assert f"rank {1 - victim} stops: it lost" in ranks.output()
