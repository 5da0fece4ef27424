"""What the GPU's kernel is given, with a stand-in for it in torch; the kernel itself is tested on GPUs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mobius.engine import adamw_gpu
from mobius.engine.adamw import UpdateArguments
from mobius.engine.adamw_cpu import load_adamw_cpu
from mobius.engine.adamw_gpu import GPUAdamW
from mobius.engine.host_arena import HostArena
from mobius.engine.split_master import join_master, split_master
from mobius.engine.stage_state import StageState
from mobius.models.layout import StageLayout

MODULE = "mobius.engine.triton_adamw"
KERNELS = ("adamw_split", "adamw_bf16_states", "adamw_compact")
SETTINGS = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.1, "learning_rate": 1e-3}
CONSTANTS = UpdateArguments(gradient_factor=1.0, step=1, **SETTINGS).constants()


class StandIn:
    """Launched as Triton's kernels are, on CPU tensors."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Tensor | float, block: int, enable_fp_fusion: bool, **constants: float) -> None:
            weights, remainder, exp_avg, exp_avg_sq, gradient, found_inf, count = arguments
            assert all(type(value) is float for value in constants.values())
            c = SimpleNamespace(**{name: torch.tensor(value) for name, value in constants.items()})
            assert not enable_fp_fusion
            assert grid == (-(-count // block),)
            assert all(array.numel() == count for array in (weights, remainder, exp_avg, exp_avg_sq, gradient))
            self.counts.append(int(count))
            if found_inf != 0:
                return
            weights = weights.view(torch.bfloat16)
            master = join_master(weights, remainder, out=torch.empty_like(exp_avg))
            scaled = gradient.float() * c.gradient_factor
            exp_avg += (scaled - exp_avg) * c.one_minus_beta1
            exp_avg_sq.copy_(exp_avg_sq * c.beta2 + c.one_minus_beta2 * scaled * scaled)
            root = torch.sqrt(exp_avg_sq.double()).float()  # rounded once; torch's vectorized one is not
            divisor = root / c.root_correction + c.epsilon
            split_master(master * c.decay - c.step_size * exp_avg / divisor, weights=weights, remainder=remainder)

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(BLOCK=1024, **dict.fromkeys(KERNELS, stand_in)))
    return stand_in


@pytest.fixture
def fused(kernel: StandIn, monkeypatch: pytest.MonkeyPatch) -> GPUAdamW:
    """One that takes states on the CPU."""
    fused = GPUAdamW()
    monkeypatch.setattr(fused, "supports", lambda state: fused._is_there())
    return fused


def make_state(gradient_dtype: torch.dtype = torch.bfloat16, count: int = 5000) -> StageState:
    """Random, the same at every call."""
    layouts = {0: StageLayout.of({"matrix": (count, 1)})}
    state = HostArena(layouts, dtype=torch.bfloat16, register=False, gradient_dtype=gradient_dtype).states[0]
    generator = torch.Generator().manual_seed(0)
    state.write_master(slice(None), torch.randn(state.layout.num_units, generator=generator))
    for tensor in (state.gradients, state.exp_avg, state.exp_avg_sq):
        tensor.copy_(torch.rand(state.layout.num_units, generator=generator))
    return state


@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_is_given_what_the_c_kernel_is(fused: GPUAdamW, kernels: Path, gradient_dtype: torch.dtype) -> None:
    expected, state = make_state(gradient_dtype), make_state(gradient_dtype)
    c_kernel = load_adamw_cpu(kernels, num_threads=1)
    assert c_kernel is not None
    part = slice(128, 3000)
    constants = UpdateArguments(gradient_factor=0.25, step=7, **SETTINGS).constants()
    c_kernel.update(expected, part, constants)
    assert fused.supports(state)
    fused.update(state, part, constants, found_inf=None)
    for mine, theirs in zip(state.tensors, expected.tensors, strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(state.weights, make_state().weights)


def test_a_long_array_goes_in_several_launches(
    fused: GPUAdamW, kernel: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = make_state(), make_state()
    for state, longest in ((whole, 10_000), (cut, 2048)):
        monkeypatch.setattr(adamw_gpu, "MAX_ELEMENTS", longest)
        assert fused.supports(state)
        fused.update(state, slice(0, 5000), CONSTANTS, found_inf=None)
    assert kernel.counts == [5000, 2048, 2048, 904]
    assert torch.equal(whole.weights, cut.weights)


def test_warming_up_and_what_is_not_finite_change_nothing(fused: GPUAdamW, kernel: StandIn) -> None:
    state, before = make_state(), make_state()
    assert fused.supports(state)
    fused.warm_up(state, CONSTANTS)
    fused.update(state, slice(0, 5000), CONSTANTS, found_inf=torch.ones(()))
    assert len(kernel.counts) == 2
    for mine, theirs in zip(state.tensors, before.tensors, strict=True):
        assert torch.equal(mine, theirs)


def test_a_kernel_that_cannot_be_compiled_is_given_up_with_a_line(
    fused: GPUAdamW, kernel: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: StandIn, grid: tuple[int]) -> Callable[..., None]:
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(StandIn, "__getitem__", fail)
    state = make_state()
    assert fused.supports(state)
    with caplog.at_level(logging.WARNING):
        fused.warm_up(state, CONSTANTS)
    assert not fused.supports(state)
    assert [record.getMessage() for record in caplog.records] == [
        "GPU AdamW uses torch, which is slower: the Triton kernel cannot be used: no compiler"
    ]


def test_without_triton_there_is_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    fused = GPUAdamW()
    with caplog.at_level(logging.WARNING):
        assert not fused._is_there()
        assert not fused._is_there()
    assert len(caplog.records) == 1


def test_states_on_the_host_are_left_to_the_c_kernel() -> None:
    assert not GPUAdamW().supports(make_state())
