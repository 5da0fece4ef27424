"""scripts/generate.py: what counts as right, the loss of the dataset's answers, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from generate import main, mean_loss
from harness.runs import make_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from mobius.training.evaluation.prediction import PromptAndLabel


def test_the_loss_is_a_mean_over_the_tokens_of_all_answers() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, initializer_range=0.3, **shape)).eval()
    rows = [([5, 6], [7]), ([8], [9, 10, 11])]

    logs = []
    with torch.no_grad():
        for prompt, answer in rows:
            shares = model(torch.tensor([prompt + answer])).logits[0].softmax(-1)
            logs += [-float(shares[len(prompt) + place - 1, token].log()) for place, token in enumerate(answer)]

    samples = [PromptAndLabel(*(np.array(part, dtype=np.int32) for part in row)) for row in rows]
    assert mean_loss(model, samples) == pytest.approx(sum(logs) / 4, rel=1e-5)


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
