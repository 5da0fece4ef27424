"""The update that is compiled for GPUs makes the C kernel's, eagerly and compiled (here for the CPU)."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._inductor import metrics
from torch._inductor.utils import run_and_get_code

from mobius.memory.host_arena import HostArena
from mobius.memory.layout import StageLayout
from mobius.memory.split_master import join_master, split_master
from mobius.memory.stage_state import Remainder, StageState
from mobius.models.compiled import CompiledFunction
from mobius.optim.fused_update import Constants, FusedUpdate, update_split
from mobius.optim.kernel import AdamWKernel, load_kernel

COUNT = 20_011
Update = Callable[..., None]
SETTINGS = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.1, "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> AdamWKernel:
    loaded = load_kernel(tmp_path_factory.mktemp("kernel"), num_threads=2)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def compiled() -> CompiledFunction[..., None]:
    return CompiledFunction(update_split, name="updates", dynamic=True)


@pytest.fixture(params=["eager", "compiled"])
def run(request: pytest.FixtureRequest, compiled: CompiledFunction[..., None]) -> Update:
    return update_split if request.param == "eager" else compiled


def state_of(gradient_dtype: torch.dtype, *, step: int, count: int = COUNT) -> StageState:
    """A bf16 stage as it is before step `step`, with random values of very different sizes."""
    layouts = {0: StageLayout.of({"matrix": (count, 1)})}
    state = HostArena(layouts, dtype=torch.bfloat16, register=False, gradient_dtype=gradient_dtype).states[0]
    generator = torch.Generator().manual_seed(step)
    count = state.layout.num_elements
    state.write_master(slice(None), torch.randn(count, generator=generator))
    scale = 10.0 ** torch.randint(-6, 2, (count,), generator=generator)
    state.gradients.copy_(torch.randn(count, generator=generator) * scale)
    if step > 1:
        state.exp_avg.copy_(torch.randn(count, generator=generator) * scale)
        state.exp_avg_sq.copy_((state.exp_avg.abs() + torch.rand(count, generator=generator) * scale) ** 2)
    return state


def constants(step: int, factor: float, found_inf: float = 0.0) -> Constants:
    values = {
        "gradient_factor": factor,
        "decay": 1.0 - SETTINGS["learning_rate"] * SETTINGS["weight_decay"],
        "beta2": SETTINGS["beta2"],
        "one_minus_beta1": 1.0 - SETTINGS["beta1"],
        "one_minus_beta2": 1.0 - SETTINGS["beta2"],
        "step_size": SETTINGS["learning_rate"] / (1.0 - SETTINGS["beta1"] ** step),
        "root_correction": (1.0 - SETTINGS["beta2"] ** step) ** 0.5,
        "epsilon": SETTINGS["epsilon"],
        "found_inf": found_inf,
    }
    return Constants(**{name: torch.tensor(value, dtype=torch.float32) for name, value in values.items()})


def update(run: Update, state: StageState, given: Constants) -> None:
    assert isinstance(state.master, Remainder)
    bits = state.weights.view(torch.int16)
    with torch.no_grad():
        run(bits, state.master.bits, state.exp_avg, state.exp_avg_sq, state.gradients, given)


@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("step", [1, 2, 1000])
def test_a_step_is_that_of_the_c_kernel_to_the_stated_bound(
    kernel: AdamWKernel, run: Update, gradient_dtype: torch.dtype, step: int
) -> None:
    state, other = (state_of(gradient_dtype, step=step) for _ in range(2))
    before = state.read_master()
    kernel.update(other, slice(0, other.layout.num_elements), gradient_factor=0.25, step=step, **SETTINGS)
    update(run, state, constants(step, 0.25))

    largest = torch.maximum(other.exp_avg.abs(), (0.25 * state.gradients.float()).abs())
    assert ((state.exp_avg - other.exp_avg).abs() <= 2.0**-22 * largest).all()
    assert ((state.exp_avg_sq - other.exp_avg_sq).abs() <= 2.0**-22 * largest.square().maximum(other.exp_avg_sq)).all()
    master, expected = state.read_master(), other.read_master()
    moved = (expected - before).abs() + 1e-3 * 0.1 * before.abs()
    bound = 2.0**-23 * torch.maximum(expected.abs(), before.abs()) + 2.0**-20 * moved
    assert ((master - expected).abs() <= bound).all()
    assert torch.equal(state.weights, master.bfloat16()), "the working copy is the rounded master"
    assert not torch.equal(master, before)


def test_a_value_that_is_not_finite_changes_nothing_where_it_was_found(run: Update) -> None:
    state, other = (state_of(torch.bfloat16, step=2) for _ in range(2))
    update(run, state, constants(2, 1.0, found_inf=1.0))
    for mine, theirs in zip(state.tensors, other.tensors, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_not_hidden(run: Update, value: float) -> None:
    state = state_of(torch.bfloat16, step=1, count=128)
    state.gradients[5] = value
    update(run, state, constants(1, 1.0))
    assert not state.weights[5].isfinite()
    assert not state.read_master()[5].isfinite()
    assert state.weights[:5].isfinite().all()


def test_every_lower_half_is_split_as_split_master_does(run: Update) -> None:
    """All 65536 lower halves of some upper ones with both signs, through an update that changes nothing."""
    upper = torch.tensor([0, 1, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F], dtype=torch.int64)
    both = torch.cat([upper, upper + 0x8000])
    bits = (both[:, None] << 16 | torch.arange(2**16)).reshape(-1)
    master = torch.where(bits < 2**31, bits, bits - 2**32).to(torch.int32).view(torch.float32)
    weights, remainder = _split(master)
    expected, kept = weights.clone(), remainder.clone()
    still = constants(1, 0.0)._replace(decay=torch.ones(()), step_size=torch.zeros(()))
    zeros = torch.zeros_like(master)
    with torch.no_grad():
        run(weights.view(torch.int16), remainder, zeros, zeros.clone(), torch.zeros_like(weights), still)

    joined, before = (
        join_master(w, r, out=torch.empty_like(master)) for w, r in ((weights, remainder), (expected, kept))
    )
    # Compiled for the CPU, numbers below the smallest normal one may be taken for zero.
    normal = before.abs() >= torch.finfo(torch.float32).tiny
    assert torch.equal(joined[normal], before[normal])
    assert torch.equal(weights[normal], expected[normal])
    assert torch.equal(remainder[normal], kept[normal])


def _split(master: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.empty_like(master, dtype=torch.bfloat16)
    remainder = torch.empty_like(master, dtype=torch.int16)
    split_master(master.clone(), weights=weights, remainder=remainder)
    return weights, remainder


def test_stages_of_all_sizes_share_a_graph(compiled: CompiledFunction[..., None]) -> None:
    update(compiled, state_of(torch.bfloat16, step=1), constants(1, 1.0))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for count in (128, 1000, 5_000, 70_001):
        update(compiled, state_of(torch.bfloat16, step=1, count=count), constants(1, 1.0))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    assert not compiled.is_broken


def test_all_of_it_is_one_kernel_that_takes_no_memory() -> None:
    metrics.reset()
    arrays = [torch.zeros(4096, dtype=dtype) for dtype in (torch.int16, torch.int16, torch.float32, torch.float32)]
    fresh = torch.compile(lambda *given: update_split(*given), dynamic=True)
    with torch.no_grad():
        _, (code,) = run_and_get_code(fresh, *arrays, torch.ones(4096, dtype=torch.bfloat16), constants(1, 1.0))
    assert metrics.generated_kernel_count == 1
    assert "= empty_strided_cpu(" not in code


def test_states_on_the_host_are_left_to_the_c_kernel(tmp_path: Path) -> None:
    assert not FusedUpdate().supports(state_of(torch.bfloat16, step=1, count=128))
