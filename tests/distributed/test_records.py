"""What several ranks leave of a run: the first one's records, each once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.runs import make_checkpoint, make_dataset, run_main
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerState


def test_the_first_of_two_ranks_leaves_state_log_curves_and_card(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    make_dataset(tmp_path / "data.jsonl")
    options = """--model_path model --dataset data.jsonl --fp32 --num_stages 4 --num_chunks 2 --batch_size 4
        --seq_length 16 --num_iterations 5 --logging_steps 2 --save_dir out --report_to tensorboard"""

    result = run_main(2, tmp_path, *options.split(), draws=True)

    assert result.returncode == 0, result.stdout
    out = tmp_path / "out"
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    losses = {row["step"]: row["loss"] for row in rows}
    shown = {1: losses[1], 2: losses[2], 4: (losses[3] + losses[4]) / 2, 5: losses[5]}
    state = TrainerState.load_from_json(str(out / "trainer_state.json"))
    assert {entry["step"]: entry["loss"] for entry in state.log_history if "loss" in entry} == shown
    lines = [json.loads(line) for line in (out / "trainer_log.jsonl").read_text().splitlines()]
    assert {line["current_steps"]: line["loss"] for line in lines} == shown
    (events,) = (out / "runs").iterdir()
    curves = EventAccumulator(str(events))
    curves.Reload()
    assert {event.step: pytest.approx(event.value) for event in curves.Scalars("train/loss")} == shown
    assert (out / "training_loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "README.md").read_text().startswith("---\nlibrary_name: transformers\n")
    assert result.stdout.count("trained 5 steps, ") == 1
    assert "training_loss.png is not written" not in result.stdout
    assert "warning" not in result.stdout
