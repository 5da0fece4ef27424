"""AdamW on a flat buffer is torch's AdamW on its parameters, one by one."""

import pytest
import torch
from torch import Tensor

from mobius.engine.adamw import AdamWSettings, FlatAdamW
from mobius.engine.host_arena import HostArena
from mobius.engine.stage_state import StageState
from mobius.models.layout import StageLayout

SHAPES = {"norm": (37,), "up": (9, 40), "bias": (130,), "down": (40, 9)}
SETTINGS = AdamWSettings(beta1=0.8, beta2=0.95, epsilon=1e-6, weight_decay=0.3)
RATES = (1e-2, 2e-2, 5e-3, 0.0, 1e-2)


def make_state(dtype: torch.dtype, gradient_dtype: torch.dtype | None = None) -> StageState:
    """A streamed stage with random parameters; its gradients have the dtype of its weights if none is given."""
    layouts = {0: StageLayout.of(SHAPES)}
    state = HostArena(layouts, dtype=dtype, register=False, gradient_dtype=gradient_dtype).states[0]
    for name, value in random_tensors(seed=0).items():
        state.set_parameter(name, value)
    return state


def random_tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def set_gradients(state: StageState, gradients: dict[str, Tensor]) -> None:
    for name, view in state.layout.views(state.gradients).items():
        view.copy_(gradients[name])


def torch_adamw(dtype: torch.dtype, factor: float) -> dict[str, Tensor]:
    """The parameters after torch.optim.AdamW took the same steps on each of them, without decay for vectors."""
    parameters = {name: torch.nn.Parameter(value) for name, value in random_tensors(seed=0).items()}
    groups = [
        {"params": [p for p in parameters.values() if p.ndim == 2], "weight_decay": 0.3},
        {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-6, foreach=False, fused=False)
    for step, rate in enumerate(RATES, start=1):
        for name, gradient in random_tensors(seed=step).items():
            parameters[name].grad = gradient.to(dtype).float() * factor
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def flat_adamw(state: StageState, factor: float) -> None:
    adamw = FlatAdamW(SETTINGS)
    for step, rate in enumerate(RATES, start=1):
        set_gradients(state, random_tensors(seed=step))
        adamw.update(state, step=step, learning_rate=rate, gradient_factor=factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_several_steps_equal_torch_adamw_on_each_parameter(dtype: torch.dtype, factor: float) -> None:
    state = make_state(dtype)

    flat_adamw(state, factor)

    for name, expected in torch_adamw(dtype, factor).items():
        torch.testing.assert_close(state.layout.views(state.read_master())[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_that_travel_in_fp32_are_not_rounded(dtype: torch.dtype) -> None:
    state = make_state(dtype, torch.float32)

    flat_adamw(state, 0.25)

    for name, expected in torch_adamw(torch.float32, 0.25).items():
        torch.testing.assert_close(state.layout.views(state.read_master())[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [7, 100, 128, 400])
def test_cutting_the_update_into_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr("mobius.engine.adamw.HOST_CHUNK_ELEMENTS", chunk)
    state = make_state(torch.bfloat16)

    flat_adamw(state, 1.0)

    for name, expected in torch_adamw(torch.bfloat16, 1.0).items():
        torch.testing.assert_close(state.layout.views(state.read_master())[name], expected, rtol=1e-5, atol=1e-6)


def test_the_working_copy_is_the_rounded_master() -> None:
    state = make_state(torch.bfloat16)

    flat_adamw(state, 1.0)

    assert torch.equal(state.weights, state.read_master().to(torch.bfloat16))
    assert not torch.equal(state.weights.float(), state.read_master()), "the master must keep what bf16 cannot"


def test_steps_too_small_for_bf16_add_up_in_the_master() -> None:
    state = make_state(torch.bfloat16)
    state.set_parameter("norm", torch.ones(37))
    set_gradients(state, {name: torch.ones(shape) for name, shape in SHAPES.items()})
    adamw = FlatAdamW(AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0))

    # With a constant gradient of 1 every step is the learning rate; bf16 cannot tell 1 - 1e-3 from 1.
    for step in range(1, 11):
        adamw.update(state, step=step, learning_rate=1e-3, gradient_factor=1.0)

    assert state.layout.views(state.read_master())["norm"].tolist() == pytest.approx([0.99] * 37, rel=1e-5)
    assert state.layout.views(state.weights)["norm"].tolist() == [0.98828125] * 37  # the nearest bf16 number


def test_without_gradients_matrices_decay_and_vectors_stay() -> None:
    state, before = make_state(torch.float32), random_tensors(seed=0)

    FlatAdamW(SETTINGS).update(state, step=1, learning_rate=0.1, gradient_factor=1.0)

    after = state.layout.views(state.read_master())
    for name in ("norm", "bias"):
        assert torch.equal(after[name], before[name])
    for name in ("up", "down"):
        torch.testing.assert_close(after[name], before[name] * (1 - 0.1 * 0.3))


def test_padding_stays_zero() -> None:
    state = make_state(torch.float32)

    flat_adamw(state, 1.0)

    for view in state.layout.views(state.read_master()).values():
        view.zero_()
    assert state.read_master().count_nonzero() == 0


def test_gradients_are_left_as_they_came() -> None:
    state = make_state(torch.bfloat16)
    set_gradients(state, random_tensors(seed=1))
    before = state.gradients.clone()

    FlatAdamW(SETTINGS).update(state, step=1, learning_rate=0.1, gradient_factor=0.5)

    assert torch.equal(state.gradients, before)


def test_a_resident_stage_is_updated_alike() -> None:
    resident = StageState.on_device(StageLayout.of(SHAPES), torch.device("cpu"), torch.float32)
    for name, value in random_tensors(seed=0).items():
        resident.set_parameter(name, value)
    streamed = make_state(torch.float32)

    flat_adamw(resident, 0.5)
    flat_adamw(streamed, 0.5)

    assert torch.equal(resident.read_master(), streamed.read_master())
