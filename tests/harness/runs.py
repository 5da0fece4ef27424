"""Small checkpoints and data on disk, and whole runs of main.py as a user starts them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from benchmark_launch import free_port
from benchmark_service import Service
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "assets" / "tiny-llama"
VOCAB = 4096


def make_checkpoint(folder: Path, *, num_layers: int = 4, is_tied: bool = False) -> PreTrainedModel:
    """Save a tiny Llama with random weights as a sharded Hugging Face folder with the quickstart tokenizer."""
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        tie_word_embeddings=is_tied,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="300KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    return model


def make_dataset(path: Path, num_records: int = 24) -> Path:
    """Write prompt/completion records of different lengths as JSON lines."""
    records = [
        {"prompt": f"Count to {number}.", "completion": " ".join(str(i) for i in range(number + 1))}
        for number in range(num_records)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def command(num_ranks: int, arguments: Sequence[str]) -> list[str]:
    """The command line of a run with `num_ranks` CPU processes."""
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(num_ranks), "--master_port", str(free_port())]
    return [sys.executable, *(launcher if num_ranks > 1 else []), str(ROOT / "main.py"), "--device", "cpu", *arguments]


def environment(cache: Path) -> dict[str, str]:
    """The test's environment without a network's help and with its own cache."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1"}


def run_main(num_ranks: int, folder: Path, *arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run main.py in `folder`, where its results then are; output and errors come back as one text."""
    return subprocess.run(
        command(num_ranks, arguments),
        cwd=folder,
        env=environment(folder / "cache"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )


def exact_ranks(num_ranks: int, cache: Path) -> Service:
    """Processes for `exact_results`, which start with its first call; use it with `with`."""
    worker = Path(__file__).with_name("exact_worker.py")
    return Service(num_ranks=num_ranks, environment=environment(cache), worker=worker)


def exact_results(
    ranks: Service, folder: Path, options: str, variants: Sequence[str], *, num_layers: int = 8
) -> dict[str, object]:
    """Train with each variant of `options` under deterministic kernels; equal results are equal to the bit."""
    make_checkpoint(folder / "model", num_layers=num_layers, is_tied=True)
    result = ranks.run([str(folder / "model"), options, *variants], timeout_seconds=280)
    assert result.problem is None, result.log_end
    results: dict[str, object] = result.output
    return results
