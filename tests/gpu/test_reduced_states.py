"""Reduced optimizer states on a GPU: its kernel, and torch without one, have the bits of the C kernel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness.reduced import FORMATS, fill, run, same, state_of

from mobius.engine.adamw_cpu import load_adamw_cpu
from mobius.engine.adamw_gpu import GPUAdamW
from mobius.engine.stage_state import StageState

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
COUNT = 5 * 2**18 + 96


def moved(state: StageState, device: torch.device) -> StageState:
    """A copy on another device."""
    (block,) = state.blocks
    parts = {name: part.to(device) for name, part in block.parts.items()}
    tensors = {"weights": state.weights.to(device), "gradients": state.gradients.to(device)}
    return replace(state, blocks=(replace(block, parts=parts),), **tensors)


@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("reduced", FORMATS)
def test_a_gpu_has_the_bits_of_the_c_kernel(reduced: str, gradient_dtype: torch.dtype, tmp_path: Path) -> None:
    kernel, fused = load_adamw_cpu(tmp_path, num_threads=2), GPUAdamW()
    assert kernel is not None
    for step in (1, 2, 1000, 100_000):
        expected = state_of(reduced, COUNT, gradient_dtype)
        fill(expected, step)
        resident, by_torch = moved(expected, CUDA), moved(expected, CUDA)
        run(expected, step, kernel)
        assert fused.supports(resident)
        run(resident, step, fused)
        run(by_torch, step, None)
        assert fused.supports(resident), "the kernel could not be compiled"
        assert same(moved(resident, torch.device("cpu")), expected), step
        assert same(moved(by_torch, torch.device("cpu")), expected), step
