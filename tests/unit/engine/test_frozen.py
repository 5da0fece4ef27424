"""Frozen parameters have weights only, are loaded with the others, and keep their bits whatever is trained."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from harness.rank_memory import allocate_memory

from mobius.engine.adamw import AdamWSettings, FlatAdamW
from mobius.engine.stage_memory import StageMemory
from mobius.models.layout import StageLayout

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = {"base": (16, 16), "low": (4, 32), "norm": (5,), "bias": (130,)}
FROZEN = frozenset({"base", "bias"})
TRAINED, ALL = 128 + 128, 256 + 128 + 128 + 256
"""Elements with their padding."""
FORMATS = [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP16, FP16)]
"""Of weights and of gradients."""


def make_stage(dtype: torch.dtype, gradient_dtype: torch.dtype, *, is_resident: bool) -> StageMemory:
    """A stage whose parameters are numbers around one, each its own."""
    memory, _ = allocate_memory(
        {3: StageLayout.of(SHAPES, frozen=FROZEN)},
        resident={3} if is_resident else (),
        num_slots=1,
        dtype=dtype,
        gradient_dtype=gradient_dtype,
        deferred_updates={3},
        device=CPU,
    )
    for name, value in values().items():
        memory[3].state.set_parameter(name, value)
    return memory[3]


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: 1 + torch.rand(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("is_resident", [False, True])
@pytest.mark.parametrize(("dtype", "gradient_dtype"), FORMATS)
def test_only_weights_are_taken_for_what_is_frozen(
    dtype: torch.dtype, gradient_dtype: torch.dtype, is_resident: bool
) -> None:
    state = make_stage(dtype, gradient_dtype, is_resident=is_resident).state
    rest_of_master = {FP32: 0, BF16: 2, FP16: 4}[dtype]
    per_trained = gradient_dtype.itemsize + rest_of_master + 8
    num_bytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in state.tensors}.values())
    assert num_bytes == ALL * dtype.itemsize + TRAINED * per_trained


@pytest.mark.parametrize("is_resident", [False, True])
@pytest.mark.parametrize(("dtype", "gradient_dtype"), FORMATS)
def test_a_step_reads_frozen_weights_and_leaves_their_bits_alone(
    dtype: torch.dtype, gradient_dtype: torch.dtype, is_resident: bool
) -> None:
    stage = make_stage(dtype, gradient_dtype, is_resident=is_resident)
    adamw = FlatAdamW(AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.1))
    expected = {name: value.to(dtype) for name, value in values().items()}
    for step in (1, 2):
        if not is_resident:
            stage.weights.load()
        weights = stage.weights.views()
        assert list(weights) == list(SHAPES)
        assert all(torch.equal(weights[name], expected[name]) for name in FROZEN)
        assert set(stage.sums.views()) == SHAPES.keys() - FROZEN
        for view in stage.sums.views().values():
            view.add_(2.0)
        squares = stage.finish_gradients()
        assert squares.tolist() == pytest.approx([128 * 4.0, 5 * 4.0])
        if not is_resident:
            frozen = stage.state.layout.views(stage.weights._slot.values)  # type: ignore[attr-defined]
            assert all(torch.equal(frozen[name], expected[name]) for name in FROZEN), "sealing writes over trained ones"
            stage.offload()
        stage.states.wait_for_gradients()
        assert stage.state.gradients.numel() == TRAINED
        stage.states.update(partial(adamw.update, step=step, learning_rate=0.1, gradient_factor=1.0))
    after = stage.state.layout.views(stage.state.weights)
    assert all(torch.equal(after[name], expected[name]) for name in FROZEN)
    for name in SHAPES.keys() - FROZEN:
        assert not torch.equal(after[name], expected[name]), f"{name} is trained"
    assert stage.state.read_master().numel() == TRAINED


def test_frozen_parameters_are_set_and_cannot_move_the_master_of_others() -> None:
    state = make_stage(BF16, BF16, is_resident=False).state
    before = state.read_master()
    state.set_parameter("bias", torch.full((130,), 3.0, dtype=torch.float64))
    assert bool((state.layout.views(state.weights)["bias"] == 3).all())
    assert torch.equal(state.read_master(), before)


@pytest.mark.parametrize("is_resident", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_a_stage_with_nothing_to_train_goes_through_a_step(dtype: torch.dtype, is_resident: bool) -> None:
    memory, _ = allocate_memory(
        {0: StageLayout.of({"base": (4, 4)}, frozen={"base"})},
        resident={0} if is_resident else (),
        num_slots=1,
        dtype=dtype,
        gradient_dtype=dtype,
        deferred_updates={0},
        device=CPU,
    )
    if not is_resident:
        memory[0].weights.load()
    assert memory[0].finish_gradients().tolist() == []
    if not is_resident:
        memory[0].offload()
    memory[0].states.wait_for_gradients()
