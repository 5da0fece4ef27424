"""Objectives on a GPU: first losses to the bit, and losses beside those of the CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.runs import make_checkpoint
from harness.small_run import Run
from make_model import write_config

pytestmark = pytest.mark.gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = """--seq_length 64 --batch_size 8 --num_chunks 4 --num_stages 4 --num_iterations 3 --learning_rate 1e-3
    --warmup_steps 0 --save_params none --save_results auto --save_strategy no --overwrite_output_dir --dataset
    data"""
RECORDS: dict[str, list[dict[str, Any]]] = {
    "dpo": [{"prompt": f"Say {n}.", "chosen": f"It is {n}." * (n % 9 + 1), "rejected": f"No, {n}."} for n in range(32)],
    "kto": [{"prompt": f"Say {n}.", "completion": f"It is {n}.", "label": n % 3 > 0} for n in range(64)],
    "policy": [
        {"prompt": f"Say {n // 4}.", "completion": f"It is {n}.", "reward": float(n % 4 == 1)} for n in range(64)
    ],
    "reward": [{"prompt": f"Say {n}.", "chosen": f"It is {n}.", "rejected": f"No, {n + 1}."} for n in range(32)],
    "distill": [{"prompt": f"Say {n}.", "completion": f"It is {n}."} for n in range(64)],
}
FIRST = {
    "dpo": {"loss": float(torch.tensor(math.log(2))), "rewards/margins": 0.0},
    "kto": {"loss": 0.5, "kl": 0.0},
    "policy": {"ratio": 1.0, "kl": 0.0},
}
"""Numbers of the first step that are known to the bit."""


def steps(run: Run, objective: str, name: str, *options: str) -> list[dict[str, float]]:
    records = Path("data")
    records.mkdir(exist_ok=True)
    (records / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS[objective]))
    if objective == "distill":
        if not Path("teacher").exists():
            make_checkpoint(Path("teacher"), num_layers=2)
        options = (*options, "--teacher_model", "teacher", "--sft_weight", "0.5")
    run(*OPTIONS.split(), "--objective", objective, "--save_dir", name, *options)
    return [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("where", ["--resident_stages 0", "--no_offload"])
@pytest.mark.parametrize("compiled", ["on", "off"])
@pytest.mark.parametrize("objective", FIRST)
def test_first_numbers_are_exact_in_bf16(run: Run, objective: str, compiled: str, where: str) -> None:
    options = ["--dtype", "bf16", "--device", DEVICE, "--compile", compiled, *where.split()]
    first = steps(run, objective, "out", *options)[0]
    assert {name: first[name] for name in FIRST[objective]} == FIRST[objective]


WAYS = [
    *(f"--no_offload --recompute {level}" for level in ("full", "elementwise", "none")),
    "--resident_stages 0 --activation_offloading on --num_chunks 8",
    "--resident_stages 0 --tile_tokens 128",
]


@pytest.mark.parametrize("way", WAYS)
def test_the_first_loss_is_exact_where_graphs_round_differently(run: Run, way: str) -> None:
    """In layers of 7B's width, compiled graphs that save activations differ from others in their last bits."""
    write_config(Path("wide"), "7b", num_layers=4)
    options = ["--model_path", "wide", "--dtype", "bf16", "--device", DEVICE, "--seq_length", "512", *way.split()]
    first = steps(run, "dpo", "out", *options, "--num_iterations", "1")[0]
    assert {name: first[name] for name in FIRST["dpo"]} == FIRST["dpo"]


@pytest.mark.parametrize("objective", RECORDS)
def test_losses_in_fp32_are_those_of_the_cpu(run: Run, objective: str) -> None:
    """TF32 is off, so kernels differ by the order of their sums only."""
    plain, found = (
        steps(run, objective, device, "--dtype", "fp32", "--device", device, "--compile", compiled)
        for device, compiled in (("cpu", "off"), (DEVICE, "on"))
    )
    for name in ("loss", "grad_norm"):
        assert [step[name] for step in found] == pytest.approx([step[name] for step in plain], rel=1e-3, abs=1e-5)
