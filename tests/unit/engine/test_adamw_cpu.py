"""The C kernel makes torch's AdamW update, to the last bit but one, and hides no value that is not finite."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from mobius.engine import adamw_cpu as kernel_module
from mobius.engine.adamw import AdamWSettings, FlatAdamW, UpdateArguments
from mobius.engine.adamw_cpu import CPUAdamW, load_adamw_cpu
from mobius.engine.host_arena import HostArena
from mobius.engine.split_master import split_master
from mobius.engine.stage_state import StageState
from mobius.engine.state_codec import SplitMaster
from mobius.models.layout import StageLayout

COUNT = 100_003  # a prime: no vector width divides it


def state_of(
    dtype: torch.dtype, *, step: int, gradient_dtype: torch.dtype | None = None, count: int = COUNT
) -> StageState:
    """A stage as it is before step `step`, with random values of very different sizes."""
    layouts = {0: StageLayout.of({"matrix": (count, 1)})}
    state = HostArena(layouts, dtype=dtype, register=False, gradient_dtype=gradient_dtype).states[0]
    generator = torch.Generator().manual_seed(step)
    count = state.layout.num_units
    state.write_master(slice(None), torch.randn(count, generator=generator))
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


FORMATS = [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize("step", [1, 2, 1000])
@pytest.mark.parametrize(("dtype", "gradient_dtype"), FORMATS)
def test_one_step_differs_from_torch_by_one_ulp_at_most(
    kernel: CPUAdamW, dtype: torch.dtype, gradient_dtype: torch.dtype | None, step: int
) -> None:
    state, other = (state_of(dtype, step=step, gradient_dtype=gradient_dtype) for _ in range(2))
    assert kernel.supports(state)
    expected = other.read_master()
    settings = AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.1)
    FlatAdamW(settings, kernel).update(state, step=step, learning_rate=1e-3, gradient_factor=0.25)

    adamw(
        [expected],
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
    # A split master may lie one ulp nearer to zero.
    scale = torch.maximum(expected.abs(), torch.tensor(1e-3))
    num_ulps = 2 if dtype == torch.bfloat16 else 1
    master = state.read_master()
    assert ((master - expected).abs() <= num_ulps * scale * 2.0**-23).all()
    assert ((master - expected).abs() > scale * 2.0**-23).sum() <= COUNT / 2**15
    assert (ulps(state.exp_avg_sq, other.exp_avg_sq) <= 1).all()
    moved = torch.maximum(state.exp_avg.abs(), (other.gradients.float() * 0.25).abs())
    assert ((state.exp_avg - other.exp_avg).abs() <= moved * 2.0**-23).all()
    assert torch.equal(state.weights.float(), master.to(dtype).float()), "the working copy is the rounded master"


@pytest.mark.parametrize(("dtype", "gradient_dtype"), FORMATS)
@pytest.mark.parametrize("count", [1, 63, 64, 1000, 32768, 32769, 3 * 32768 + 77])
def test_every_element_is_updated_once_however_blocks_divide_the_count(
    kernel: CPUAdamW, dtype: torch.dtype, gradient_dtype: torch.dtype | None, count: int
) -> None:
    state = state_of(dtype, step=1, gradient_dtype=gradient_dtype, count=2 * count)
    before = state.exp_avg.clone()
    part = slice(count // 2, count // 2 + count)
    numbers = UpdateArguments(
        step=1, learning_rate=1e-3, gradient_factor=2.0, beta1=0.5, beta2=0.999, epsilon=1e-8, weight_decay=0.0
    )
    kernel.update(state, part, numbers.constants())

    before[part] = state.gradients[part].float()  # 2 g (1 - 0.5), exactly
    assert torch.equal(state.exp_avg, before)


@pytest.mark.parametrize(("dtype", "gradient_dtype"), FORMATS)
def test_the_number_of_threads_changes_no_bit(
    kernels: Path, dtype: torch.dtype, gradient_dtype: torch.dtype | None
) -> None:
    settings = AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.1)
    states = []
    for num_threads in (1, 2, 5):
        states.append(state_of(dtype, step=2, gradient_dtype=gradient_dtype))
        adamw = FlatAdamW(settings, load_adamw_cpu(kernels, num_threads=num_threads))
        adamw.update(states[-1], step=2, learning_rate=1e-3, gradient_factor=0.25)

    for state in states[1:]:
        for tensor, first in zip(state.tensors, states[0].tensors, strict=True):
            assert torch.equal(tensor, first)


# Of these weights the kernel and split_master.py must make the same: zero, denormal, odd, even, largest, infinite, NaN.
WEIGHT_BITS = (0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x4049, 0x7F7E, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF)


@pytest.mark.parametrize("sign", [0, -(2**15)])
@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_joins_and_splits_every_remainder_as_split_master_does(
    kernel: CPUAdamW, gradient_dtype: torch.dtype, sign: int
) -> None:
    """Without a gradient and with a rate of zero an update is nothing but joining and splitting."""
    count = len(WEIGHT_BITS) * 2**16
    layouts = {0: StageLayout.of({"matrix": (count, 1)})}
    state = HostArena(layouts, dtype=torch.bfloat16, register=False, gradient_dtype=gradient_dtype).states[0]
    remainder = state.parts["master_low"]
    weight_bits = torch.tensor([bits + sign for bits in WEIGHT_BITS], dtype=torch.int16)
    state.weights.view(torch.int16).copy_(weight_bits.repeat_interleave(2**16))
    remainder.copy_(torch.arange(-(2**15), 2**15).to(torch.int16).repeat(len(WEIGHT_BITS)))
    before = state.read_master()
    weights, expected = torch.empty_like(state.weights), torch.empty_like(remainder)
    split_master(before, weights=weights, remainder=expected)

    settings = AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0)
    FlatAdamW(settings, kernel).update(state, step=1, learning_rate=0.0, gradient_factor=1.0)

    is_nan = before.isnan()
    assert torch.equal(state.weights.view(torch.int16)[~is_nan], weights.view(torch.int16)[~is_nan])
    assert torch.equal(remainder[~is_nan], expected[~is_nan])
    assert is_nan.sum() >= 2 * 2**16
    assert state.weights[is_nan].isnan().all(), "a NaN became a number"
    assert state.read_master()[is_nan].isnan().all()


def test_bf16_rounds_to_nearest_even_and_keeps_what_is_not_finite(kernel: CPUAdamW) -> None:
    state = state_of(torch.bfloat16, step=1)
    state.gradients.zero_()
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.00390625, 1.01171875, 3.4e38, -0.0, 1e-40])
    state.write_master(slice(0, len(special)), special)
    settings = AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0)
    FlatAdamW(settings, kernel).update(state, step=1, learning_rate=1e-3, gradient_factor=1.0)

    expected = special.to(torch.bfloat16)
    actual = state.weights[: len(special)]
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual[1:], expected[1:])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("dtype", "gradient_dtype"), FORMATS)
def test_a_gradient_that_is_not_finite_is_seen_in_the_parameter(
    kernel: CPUAdamW, dtype: torch.dtype, gradient_dtype: torch.dtype | None, value: float
) -> None:
    state = state_of(dtype, step=1, gradient_dtype=gradient_dtype)
    state.gradients[5] = value
    settings = AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0)
    FlatAdamW(settings, kernel).update(state, step=1, learning_rate=1e-3, gradient_factor=1.0)

    assert not state.read_master()[5].isfinite()
    assert not state.weights[5].isfinite()
    assert state.read_master()[:5].isfinite().all()


def test_states_without_a_variant_are_left_to_torch(kernel: CPUAdamW) -> None:
    layout = {0: StageLayout.of({"matrix": (4, 4)})}
    half = HostArena(layout, dtype=torch.float16, register=False).states[0]

    assert not kernel.supports(half)  # a whole master beside fp16 weights

    class OtherMoments(SplitMaster):
        """A format that the kernel does not know."""

    split = state_of(torch.bfloat16, step=1, count=16)
    assert kernel.supports(split)
    assert not kernel.supports(replace(split, blocks=(replace(split.blocks[0], codec=OtherMoments()),)))


def test_a_resident_stage_on_the_host_is_updated_by_the_kernel(kernel: CPUAdamW) -> None:
    layout, cpu = StageLayout.of({"matrix": (4, 4)}), torch.device("cpu")
    for gradients in (None, torch.zeros(layout.num_trained)):
        assert kernel.supports(StageState.on_device(layout, cpu, torch.bfloat16, gradients))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_changes_where_something_was_found_that_is_not_finite(kernel: CPUAdamW, dtype: torch.dtype) -> None:
    state, before = state_of(dtype, step=1), state_of(dtype, step=1)
    for each in (state, before):
        each.gradients[7] = float("nan")
    settings = AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.1)
    found = torch.ones(())
    FlatAdamW(settings, kernel).update(state, step=1, learning_rate=1e-3, gradient_factor=1.0, found_inf=found)

    for mine, theirs in zip(state.tensors, before.tensors, strict=True):
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())


def test_the_kernel_is_built_once(kernels: Path) -> None:
    (library,) = kernels.iterdir()
    built = library.stat().st_mtime_ns
    assert load_adamw_cpu(kernels, num_threads=1) is not None
    assert library.stat().st_mtime_ns == built
    assert list(kernels.iterdir()) == [library]


def test_without_a_compiler_there_is_no_kernel_and_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with caplog.at_level("INFO"):
        assert load_adamw_cpu(tmp_path, num_threads=1) is None
    assert "no C compiler (`cc`)" in caplog.text


def test_a_source_that_does_not_compile_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.c"
    broken.write_text("int main( {")
    monkeypatch.setattr(kernel_module, "SOURCE", broken)
    with caplog.at_level("INFO"):
        assert load_adamw_cpu(tmp_path / "cache", num_threads=1) is None
    assert "could not be built" in caplog.text
    assert list((tmp_path / "cache").iterdir()) == []
