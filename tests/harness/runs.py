"""Small checkpoints and data on disk, whole runs of main.py as a user starts them, and what two runs left, compared."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness.forked import HANG_SECONDS, ROOT, Ranks
from launch import free_port
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, get_scheduler

from mobius.engine.adamw_cpu import load_adamw_cpu

TOKENIZER = ROOT / "assets" / "tiny-llama"
VOCAB = 4096


EXPERTS: Mapping[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
"""Fields of a tiny mixture of experts, such as qwen3_moe."""


def make_checkpoint(
    folder: Path,
    *,
    num_layers: int = 4,
    is_tied: bool = False,
    family: str = "llama",
    vocab_size: int | None = None,
    **fields: Any,
) -> PreTrainedModel:
    """Save a tiny model with random weights as a sharded Hugging Face folder with the quickstart tokenizer.

    `fields` are further ones of its configuration.
    """
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        family,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        # transformers gives each Gemma tokenizer a token of its own.
        vocab_size=vocab_size or VOCAB + 64 * (family == "gemma3_text"),
        tie_word_embeddings=is_tied,
        **fields,
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


@functools.cache
def kernel_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder with AdamW's C kernel, compiled once in this process; empty where there is no compiler."""
    folder = tempfile.TemporaryDirectory()
    load_adamw_cpu(Path(folder.name), num_threads=1)
    return folder


def with_kernel(cache: Path) -> Path:
    """`cache` with AdamW's C kernel in it, so that its run does not compile that anew."""
    for kernel in Path(kernel_folder().name).iterdir():
        (cache / "mobius").mkdir(parents=True, exist_ok=True)
        shutil.copy(kernel, cache / "mobius")
    return cache


def rounding() -> dict[str, str]:
    """Variables by which libraries choose instructions and orders of sums, as the tests have them; else one thread."""
    names = "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "OMP_NUM_THREADS"
    return {"OMP_NUM_THREADS": "1"} | {name: os.environ[name] for name in names if name in os.environ}


def environment(cache: Path) -> dict[str, str]:
    """The test's environment without a network's help and with its own cache."""
    return {**os.environ, **rounding(), "XDG_CACHE_HOME": str(with_kernel(cache)), "HF_HUB_OFFLINE": "1"}


def torchrun_main(num_ranks: int, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run main.py under torchrun in `folder`, where its results then are; output and errors come back as one text."""
    return subprocess.run(
        command(num_ranks, arguments),
        cwd=folder,
        env=environment(folder / "cache"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def run_main(
    num_ranks: int, folder: Path, *arguments: str, num_nodes: int = 1, draws: bool = False
) -> subprocess.CompletedProcess[str]:
    """The same by processes that are forked instead of started, which spares each of them its imports."""
    ranks = Ranks(
        "main",
        "main",
        ["--device", "cpu", *arguments],
        num_ranks=num_ranks,
        folder=folder,
        environment=environment(folder / "cache"),
        num_nodes=num_nodes,
        draws=draws,
    )
    code = ranks.wait()
    return subprocess.CompletedProcess([], code, ranks.output())


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


def plain_training(
    model: nn.Module,
    steps: Sequence[Sequence[tuple[Tensor, Tensor]]],
    *,
    learning_rate: float,
    decay: float,
    clip: float,
    num_warmup_steps: int | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    """Losses of `model`, which transformers and torch alone train in place; a step is pairs of tokens and labels.

    The rate is constant unless there are `num_warmup_steps`, then it falls as a cosine. Default of `optimizer`: AdamW.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, vectors = ([each for each in trained if (each.ndim >= 2) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = optimizer or torch.optim.AdamW(groups, lr=learning_rate)
    scheduler = get_scheduler(
        "constant" if num_warmup_steps is None else "cosine",
        optimizer,
        num_warmup_steps=num_warmup_steps,
        num_training_steps=len(steps) + 1,
    )
    optimizer.step()  # without gradients: only the rate moves on, away from zero
    scheduler.step()
    losses = []
    for parts in steps:
        num_targets = sum(int((labels[:, 1:] != -100).sum()) for _, labels in parts)
        total = 0.0
        for tokens, labels in parts:
            loss = model(input_ids=tokens, labels=labels, num_items_in_batch=num_targets).loss
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
