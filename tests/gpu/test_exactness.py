"""On GPUs with deterministic kernels: what overlaps, and what is kept or recomputed, changes no bit of a result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.runs import exact_results

pytestmark = pytest.mark.gpu

OPTIONS = """--device cuda --bf16 --num_stages 8 --num_chunks 2 --batch_size 4 --seq_length 16 --num_iterations 10
    --learning_rate 1e-3"""
STREAMED = [
    f"--resident_stages 0 --{overlap} --{prefetch}"
    for overlap in ("no_overlap_optimizer", "overlap_optimizer")
    for prefetch in ("no_prefetch", "use_prefetch")
]
RESIDENT = [f"--no_offload --recompute {recompute}" for recompute in ("full", "elementwise", "none")]


@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("clip", ["0.5", "0"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ten_steps_end_in_the_same_bits_with_every_overlap_on_and_off(
    tmp_path: Path, num_ranks: int, clip: str, compiled: str
) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    # Compiled, a forward with gradients is another graph than one without, and may round otherwise.
    recompute = "full" if compiled == "on" else "auto"
    options = f"{OPTIONS} --max_grad_norm {clip} --compile {compiled} --recompute {recompute}"
    results = exact_results(num_ranks, tmp_path, options, [*STREAMED, *(RESIDENT if compiled == "off" else [])])
    assert all(results[variant] == results[STREAMED[0]] for variant in STREAMED), results
    if compiled == "off":
        assert all(results[variant] == results[RESIDENT[0]] for variant in RESIDENT), results
