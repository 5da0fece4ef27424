"""The C kernel makes torch's AdamW update, to the last bit but one, and hides no value that is not finite."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from mobius.memory.host_arena import HostArena
from mobius.memory.layout import StageLayout
from mobius.memory.resident import ResidentStages
from mobius.memory.stage_state import StageState
from mobius.optim import kernel as kernel_module
from mobius.optim.adamw import AdamWSettings, FlatAdamW
from mobius.optim.kernel import AdamWKernel, load_kernel

COUNT = 100_003  # a prime: no vector width divides it


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> AdamWKernel:
    loaded = load_kernel(tmp_path_factory.mktemp("kernel"), num_threads=2)
    assert loaded is not None
    return loaded


def state_of(dtype: torch.dtype, *, step: int) -> StageState:
    """A stage as it is before step `step`, with random values of very different sizes."""
    state = HostArena({0: StageLayout.of({"matrix": (COUNT, 1)})}, dtype=dtype, register=False).states[0]
    generator = torch.Generator().manual_seed(step)
    count = state.layout.num_elements
    state.master.copy_(torch.randn(count, generator=generator))
    state.weights.copy_(state.master)
    scale = 10.0 ** torch.randint(-6, 2, (count,), generator=generator)
    state.gradients.copy_(torch.randn(count, generator=generator) * scale)
    if step > 1:
        state.exp_avg.copy_(torch.randn(count, generator=generator) * scale)
        state.exp_avg_sq.copy_((state.exp_avg.abs() + torch.rand(count, generator=generator) * scale) ** 2)
    return state


def ulps(actual: Tensor, expected: Tensor) -> Tensor:
    """How many fp32 numbers lie between two fp32 tensors, element by element."""

    def ordered(values: Tensor) -> Tensor:
        bits = values.view(torch.int32).long()
        return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return (ordered(actual) - ordered(expected)).abs()


@pytest.mark.parametrize("step", [1, 2, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_step_differs_from_torch_by_one_ulp_at_most(kernel: AdamWKernel, dtype: torch.dtype, step: int) -> None:
    state, other = state_of(dtype, step=step), state_of(dtype, step=step)
    assert kernel.supports(state)
    settings = AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.1)
    FlatAdamW(settings, kernel).update(state, step=step, learning_rate=1e-3, gradient_factor=0.25)

    adamw(
        [other.master],
        [other.gradients.float() * 0.25],
        [other.exp_avg],
        [other.exp_avg_sq],
        [],
        [torch.tensor(float(step - 1))],
        fused=True,
        amsgrad=False,
        beta1=0.9,
        beta2=0.999,
        lr=1e-3,
        weight_decay=0.1,
        eps=1e-8,
        maximize=False,
    )
    # Where master and update nearly cancel, one ulp of either is many of the small difference: measured on the larger.
    scale = torch.maximum(other.master.abs(), torch.tensor(1e-3))
    assert ((state.master - other.master).abs() <= scale * 2.0**-23).all()
    assert (ulps(state.exp_avg_sq, other.exp_avg_sq) <= 1).all()
    moved = torch.maximum(state.exp_avg.abs(), (other.gradients.float() * 0.25).abs())
    assert ((state.exp_avg - other.exp_avg).abs() <= moved * 2.0**-23).all()
    assert torch.equal(state.weights.float(), state.master.to(dtype).float()), "the working copy is the rounded master"


def test_bf16_rounds_to_nearest_even_and_keeps_what_is_not_finite(kernel: AdamWKernel) -> None:
    state = state_of(torch.bfloat16, step=1)
    state.gradients.zero_()
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.00390625, 1.01171875, 3.4e38, -0.0, 1e-40])
    state.master[: len(special)] = special
    settings = AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0)
    FlatAdamW(settings, kernel).update(state, step=1, learning_rate=1e-3, gradient_factor=1.0)

    expected = special.to(torch.bfloat16)
    actual = state.weights[: len(special)]
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual[1:], expected[1:])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_seen_in_the_parameter(kernel: AdamWKernel, value: float) -> None:
    state = state_of(torch.bfloat16, step=1)
    state.gradients[5] = value
    settings = AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0)
    FlatAdamW(settings, kernel).update(state, step=1, learning_rate=1e-3, gradient_factor=1.0)

    assert not state.master[5].isfinite()
    assert not state.weights[5].isfinite()
    assert state.master[:5].isfinite().all()


def test_states_without_a_variant_are_left_to_torch(kernel: AdamWKernel) -> None:
    layout = {0: StageLayout.of({"matrix": (4, 4)})}
    resident = ResidentStages(layout, dtype=torch.bfloat16, device=torch.device("cpu")).states[0]
    half = HostArena(layout, dtype=torch.float16, register=False).states[0]

    assert not kernel.supports(resident)  # fp32 gradients beside bf16 weights
    assert not kernel.supports(half)


def test_the_kernel_is_built_once(tmp_path: Path) -> None:
    assert load_kernel(tmp_path, num_threads=1) is not None
    (library,) = tmp_path.iterdir()
    built = library.stat().st_mtime_ns
    assert load_kernel(tmp_path, num_threads=1) is not None
    assert library.stat().st_mtime_ns == built
    assert list(tmp_path.iterdir()) == [library]


def test_without_a_compiler_there_is_no_kernel_and_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with caplog.at_level("INFO"):
        assert load_kernel(tmp_path, num_threads=1) is None
    assert "no C compiler (`cc`)" in caplog.text


def test_a_source_that_does_not_compile_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.c"
    broken.write_text("int main( {")
    monkeypatch.setattr(kernel_module, "SOURCE", broken)
    with caplog.at_level("INFO"):
        assert load_kernel(tmp_path / "cache", num_threads=1) is None
    assert "could not be built" in caplog.text
    assert list((tmp_path / "cache").iterdir()) == []
