"""Scores of samples are the log-probabilities that the plain model gives to each of them alone, packed or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.small_run import Run, run, saved_inputs, workplace  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer


def scores(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "scores.jsonl").read_text(encoding="utf-8").splitlines()]


def plain(records: list[dict[str, str]]) -> list[tuple[float, int]]:
    """Log-probability of each completion alone, and the number of its tokens."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained("model"), AutoTokenizer.from_pretrained("model")
    found = []
    for record in records:
        prompt = tokenizer(record["prompt"], add_special_tokens=False).input_ids
        target = [*tokenizer(record["completion"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        whole = torch.tensor([prompt + target])
        with torch.no_grad():
            logits = model(input_ids=whole).logits[0, :-1].log_softmax(-1)
        logps = logits.gather(-1, whole[0, 1:].unsqueeze(-1)).squeeze(-1)
        found.append((logps[-len(target) :].sum().item(), len(target)))
    return found


@pytest.mark.parametrize("packing", ["on", "off"])
def test_each_sample_has_the_score_of_the_plain_model(run: Run, workplace: Path, packing: str) -> None:  # noqa: F811
    records = [{"prompt": f"Say {n}.", "completion": " ".join("abc"[: n % 3 + 1]) * (n % 4 + 1)} for n in range(9)]
    Path("held.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = ["--no_do_train", "--do_eval", "--save_scores", "--eval_dataset", "held.jsonl", "--packing", packing]
    run(*options, "--seq_length", "64", "--save_dir", "scored")
    found = scores("scored")
    assert [line["sample"] for line in found] == list(range(9))
    for line, (logp, number) in zip(found, plain(records), strict=True):
        assert line["logps"] == [pytest.approx(logp, rel=1e-5)]
        assert line["num_targets"] == [number]
