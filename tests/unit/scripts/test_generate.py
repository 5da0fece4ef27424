"""scripts/generate.py: what counts as right, the loss of the dataset's answers, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from generate import main
from harness.runs import make_checkpoint


def test_it_prints_answers_the_share_that_is_right_and_the_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path / "model", num_layers=1)
    data = tmp_path / "numbers.jsonl"
    records = [{"prompt": f"{word} in digits:", "completion": f" {n}"} for n, word in enumerate(("zero", "one", "two"))]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))

    code = main([str(tmp_path / "model"), str(data), "--first", "1", "--shown", "1", "--max_new_tokens", "2"])

    printed = capsys.readouterr().out.splitlines()
    assert code == 0
    assert printed[:2] == ["prompt  | one in digits:", "dataset | 1"]
    assert printed[-2] == "0 of 2 answers are right (0.0%)"
    # Random weights of a small model: near the logarithm of 4096 tokens.
    assert float(printed[-1].split()[5]) == pytest.approx(8.318, abs=0.2)
