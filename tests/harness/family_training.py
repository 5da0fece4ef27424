"""Some steps of a family's small checkpoint by a run and by transformers alone, on one device."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import torch
from harness.forked import ROOT, Ranks
from harness.losses import Losses
from harness.runs import TOKENIZER, environment
from harness.tiny_families import tiny_config
from transformers import AutoModelForCausalLM

VOCAB = 4096 + 64
"""Tokens of the quickstart's tokenizer, and those that transformers gives to some families' tokenizers."""
SPREAD = 0.08
"""Standard deviation of what is added to all weights: with those of a fresh model, whose logits are near zero, a wrong
scaling or mask would change the loss too little to be seen."""


def make_family_checkpoint(folder: Path, family: str, *, width: int) -> None:
    """Save a model of `family` of this hidden size with all its features on, and the quickstart's tokenizer beside it.

    Heads are 32 wide and windows 64 tokens; values are drawn with a seed, norms and biases included.
    """
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "moe_intermediate_size": width // 2}
    shape |= {"num_attention_heads": width // 32}
    lengths = {"max_position_embeddings": 1024, "original_max_position_embeddings": 1024, "sliding_window": 64}
    wanted = {**shape, **lengths, "num_key_value_heads": width // 64, "head_dim": 32, "vocab_size": VOCAB}
    own = tiny_config(family)
    config = tiny_config(family, **{name: value for name, value in wanted.items() if hasattr(own, name)})
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * SPREAD)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)


def losses_beside_transformers(folder: Path, family: str, options: str, *, width: int = 256) -> Losses:
    """Train a small checkpoint of `family` on the example data by main.py and by scripts/plain_training.py.

    `options` are main.py's; both get all of them, run in bf16 with fp32 masters, and see the same batches. Prints how
    long each of them took.
    """
    make_family_checkpoint(folder / "model", family, width=width)
    data = ROOT / "assets" / "docstrings" / "train.jsonl"
    shared = f"--model_path model --dataset {data} --bf16 {options}".split()
    outputs = ["--save_dir", "out", "--save_params", "p.pt", "--save_results", "r.txt", "--save_strategy", "no"]
    for module, words in (("plain_training", ["--output", "plain.json", *shared]), ("main", [*shared, *outputs])):
        variables, start = environment(folder / "cache"), time.perf_counter()
        ranks = Ranks(module, "main", words, num_ranks=1, folder=folder, environment=variables)
        assert ranks.wait() == 0, f"{module}: {ranks.output()[-3000:]}"
        told = [line for line in ranks.output().splitlines() if line.startswith("time:")]
        print(f"{module}: {time.perf_counter() - start:.0f} s", *told)
    steps = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return Losses([step["loss"] for step in steps], json.loads((folder / "plain.json").read_text()))
