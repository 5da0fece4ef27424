"""Before the first update the loss of DPO is ln 2 and margins are 0, to the bit, however a step is computed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness.small_run import Run, run, saved_inputs, workplace  # noqa: F401

LN_2 = float(-torch.nn.functional.logsigmoid(torch.zeros(())))
WAYS = [
    "--resident_stages 0",
    "--no_offload --recompute none",
    "--no_offload --recompute elementwise",
    "--compute_order depth_first --no_offload",
    "--num_chunks 8 --num_rounds 4",
    "--packing off",
    "--use_lora",
    "--dtype bf16",
    "--dtype bf16 --no_offload --recompute none --packing off",
    "--dtype bf16 --optimizer_states compact --tile_tokens 32",
    "--dtype fp16",
    "--dtype bf16 --matmul_dtype int8",
    "--num_stages 6 --num_chunks 4 --activation_offloading on",
]


@pytest.mark.parametrize("way", WAYS)
def test_the_first_loss_is_ln_2(run: Run, workplace: Path, way: str) -> None:  # noqa: F811
    pairs = [
        {"prompt": f"Say {n}.", "chosen": f"It is {n}." * (n % 3 + 1), "rejected": f"No, {n + 1}."} for n in range(30)
    ]
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    options = ["--objective", "dpo", "--dataset", "pairs.jsonl", "--seq_length", "96", "--batch_size", "8"]
    run(*options, "--num_iterations", "2", "--save_strategy", "no", *way.split())
    first, second = (json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines())
    numbers = [first[f"rewards/{name}"] for name in ("chosen", "rejected", "margins", "accuracies")]
    assert numbers == [0.0] * 4
    assert first["loss"] == pytest.approx(LN_2, rel=2e-7), "a sum over microbatches rounds the mean"
    assert second["rewards/margins"] != 0.0
