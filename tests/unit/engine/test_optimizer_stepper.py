"""A step is applied or skipped by all ranks alike, with one norm over all of them."""

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.local_transport import LocalTransport, run_rank_threads
from torch import Tensor

from mobius.engine.optimizer_stepper import GradientScaler, StepOutcome
from mobius.errors import NonFiniteLossError

MakeRank = Callable[..., Any]
NAN, INF = float("nan"), float("inf")
NUM_TENSORS = (1, 2)
"""Of each stage of `start`."""


def start() -> dict[int, dict[str, Tensor]]:
    """Two stages with a matrix each, the second with a norm as well."""
    return {
        0: {"a": torch.tensor([[1.0, -2.0], [0.5, 3.0]])},
        1: {"b": torch.tensor([[2.0, 4.0]]), "norm": torch.ones(3)},
    }


def gradients(seed: int, size: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (2, 2), "b": (1, 2), "norm": (3,)}
    return {name: size * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def torch_training(steps: list[dict[str, Tensor]], max_grad_norm: float) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters and norms after clip_grad_norm_ and torch.optim.AdamW."""
    parameters = {name: torch.nn.Parameter(value) for stage in start().values() for name, value in stage.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1, weight_decay=0.0)
    norms = []
    for step in steps:
        for name, gradient in step.items():
            parameters[name].grad = gradient.clone()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), max_grad_norm or INF)))
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}, norms


@pytest.mark.parametrize("max_grad_norm", [1.0, 100.0, 0.0], ids=["clipped", "below the limit", "switched off"])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_steps_equal_torch_clipping_and_adamw(make_rank: MakeRank, max_grad_norm: float, is_streamed: bool) -> None:
    rank = make_rank(start(), max_grad_norm=max_grad_norm, is_streamed=is_streamed)
    # Sizes differ, because AdamW does not notice a factor that all its gradients share.
    steps = [gradients(1, 5.0), gradients(2, 0.1), gradients(3, 20.0)]

    norms = [rank.step(step, step=number).grad_norm for number, step in enumerate(steps, start=1)]

    expected, expected_norms = torch_training(steps, max_grad_norm)
    assert norms == pytest.approx(expected_norms, rel=1e-6)
    for name, value in rank.parameters().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_the_norm_of_three_and_four_is_five_and_they_are_scaled_to_the_limit(make_rank: MakeRank) -> None:
    rank = make_rank(start(), max_grad_norm=1.0)

    outcome = rank.step({"a": torch.tensor([[3.0, 0], [0, 0]]), "b": torch.tensor([[0, -4.0]])})

    assert outcome.grad_norm == pytest.approx(5.0)
    # After one step AdamW's first moment is a tenth of the gradient that it was given.
    state = rank.memory[1].state
    assert state.layout.views(state.exp_avg)["b"].tolist() == [pytest.approx([0.0, -0.1 * 4 / 5], rel=1e-5)]


@pytest.mark.parametrize("number", range(1, 9))
def test_the_norm_is_rounded_once_whatever_stages_the_tensors_are_in(make_rank: MakeRank, number: int) -> None:
    step = gradients(number)
    one_stage = {0: {name: value for own in start().values() for name, value in own.items()}}

    norms = [make_rank(stages).step(step).grad_norm for stages in (start(), one_stage)]

    assert norms == [math.sqrt(math.fsum(float(value.norm().square()) for value in step.values()))] * 2


def test_all_ranks_have_the_loss_and_the_norm_of_all_ranks(make_rank: MakeRank) -> None:
    def work(transport: LocalTransport) -> StepOutcome:
        own = {transport.rank: start()[transport.rank]}
        rank = make_rank(own, transport=transport, num_tensors=NUM_TENSORS)
        step = {"a": torch.tensor([[3.0, 0], [0, 0]]), "b": torch.tensor([[0, -4.0]])}
        outcome: StepOutcome = rank.step(step, loss=(0.0, 2.5)[transport.rank])
        return outcome

    first, second = run_rank_threads(2, work)

    assert first == second
    assert first.loss == 2.5
    assert first.grad_norm == pytest.approx(5.0)


def test_ranks_clip_as_one_rank_does(make_rank: MakeRank) -> None:
    steps = [gradients(1, 5.0), gradients(2, 0.1)]

    def work(transport: LocalTransport) -> dict[str, Tensor]:
        rank = make_rank({transport.rank: start()[transport.rank]}, transport=transport, num_tensors=NUM_TENSORS)
        for number, step in enumerate(steps, start=1):
            rank.step(step, step=number)
        parameters: dict[str, Tensor] = rank.parameters()
        return parameters

    first, second = run_rank_threads(2, work)

    for name, expected in torch_training(steps, 1.0)[0].items():
        torch.testing.assert_close((first | second)[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("bad_gradient", "bad_loss", "message"),
    [
        (NAN, 1.0, "gradients of stage(s) 1"),
        (INF, 1.0, "gradients of stage(s) 1"),
        (1.0, NAN, "only the loss"),
    ],
)
def test_what_one_rank_finds_not_finite_makes_all_skip(
    make_rank: MakeRank, caplog: pytest.LogCaptureFixture, bad_gradient: float, bad_loss: float, message: str
) -> None:
    def work(transport: LocalTransport) -> tuple[StepOutcome, Any]:
        rank = make_rank({transport.rank: start()[transport.rank]}, transport=transport, num_tensors=NUM_TENSORS)
        step = gradients(1)
        step["b"][0, 1] = bad_gradient
        return rank.step(step, step=7, loss=bad_loss if transport.rank == 1 else 0.0), rank

    with caplog.at_level(logging.WARNING, logger="mobius"):
        results = run_rank_threads(2, work)

    for number, (outcome, rank) in enumerate(results):
        assert outcome.is_skipped
        assert math.isnan(outcome.grad_norm)
        assert (rank.stepper.num_updates, rank.stepper.num_skipped) == (0, 1)
        for name, value in rank.parameters().items():
            assert torch.equal(value, start()[number][name])
        assert rank.memory[number].state.exp_avg.count_nonzero() == 0
    (record,) = caplog.records
    assert "step 7 is skipped" in record.getMessage()
    assert message in record.getMessage()


@pytest.mark.parametrize("way", ["resident", "streamed", "overlapped"])
def test_without_clipping_only_the_stage_that_is_not_finite_keeps_its_weights(
    make_rank: MakeRank, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    rank = make_rank(start(), max_grad_norm=0.0, is_streamed=way != "resident", is_overlapped=way == "overlapped")
    step = gradients(1)
    step["b"][0, 1] = NAN

    with caplog.at_level(logging.WARNING, logger="mobius"):
        outcome = rank.step(step, step=7)

    assert outcome.is_skipped
    assert (rank.stepper.num_updates, rank.stepper.num_skipped) == (1, 1)
    expected, _ = torch_training([gradients(1)], 0.0)
    torch.testing.assert_close(rank.parameters()["a"], expected["a"], rtol=1e-5, atol=1e-6)
    for name in ("b", "norm"):
        assert torch.equal(rank.parameters()[name], start()[1][name])
    (record,) = caplog.records
    assert "step 7 does not update these stages: not finite: gradients of stage(s) 1 " in record.getMessage()


def test_without_clipping_a_loss_that_is_not_finite_is_told_and_finite_gradients_are_used(
    make_rank: MakeRank, caplog: pytest.LogCaptureFixture
) -> None:
    rank = make_rank(start(), max_grad_norm=0.0)
    with caplog.at_level(logging.WARNING, logger="mobius"):
        outcome = rank.step(gradients(1), step=7, loss=INF)
    assert not outcome.is_skipped
    assert rank.stepper.num_updates == 1
    (record,) = caplog.records
    assert "step 7 is applied anyway: not finite: only the loss" in record.getMessage()


@pytest.mark.parametrize("way", ["resident", "streamed", "overlapped"])
def test_without_clipping_a_step_in_which_nothing_is_finite_does_not_count_for_the_bias_correction(
    make_rank: MakeRank, way: str
) -> None:
    rank = make_rank(start(), max_grad_norm=0.0, is_streamed=way != "resident", is_overlapped=way == "overlapped")
    rank.step({"a": torch.full((2, 2), NAN), "b": torch.full((1, 2), INF)}, step=1)
    steps = [gradients(1), gradients(2)]

    for number, step in enumerate(steps, start=2):
        rank.step(step, step=number)

    for name, expected in torch_training(steps, 0.0)[0].items():
        torch.testing.assert_close(rank.parameters()[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overlapped_updates_are_the_same_to_the_bit(
    make_rank: MakeRank, max_grad_norm: float, dtype: torch.dtype
) -> None:
    results = []
    for is_overlapped in (False, True):
        rank = make_rank(
            start(), max_grad_norm=max_grad_norm, dtype=dtype, is_streamed=True, is_overlapped=is_overlapped
        )
        for number in range(1, 11):
            rank.step(gradients(number, 10.0 / number), step=number, learning_rate=0.1 / number)
        results.append(rank.parameters())
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_without_clipping_a_stage_is_updated_before_the_step_has_ended(make_rank: MakeRank) -> None:
    rank = make_rank(start(), max_grad_norm=0.0, is_streamed=True, is_overlapped=True)
    rank.stepper.begin_step(0.1)
    memory = rank.memory
    memory[1].weights.load()
    memory[1].sums.views()["b"].add_(torch.tensor([[3.0, -4.0]]))
    memory[1].finish_gradients()

    memory[1].offload(rank.stepper.on_gradients_ready)
    memory[1].weights.wait_until_updated()
    rank.stepper.drain()

    assert rank.parameters()["b"].tolist() == [pytest.approx([1.9, 4.1])]


def test_a_skipped_step_does_not_count_for_the_bias_correction(make_rank: MakeRank) -> None:
    rank = make_rank(start())
    rank.step({"a": torch.full((2, 2), NAN)}, step=1)
    steps = [gradients(1), gradients(2)]

    for number, step in enumerate(steps, start=2):
        rank.step(step, step=number)

    for name, expected in torch_training(steps, 1.0)[0].items():
        torch.testing.assert_close(rank.parameters()[name], expected, rtol=1e-5, atol=1e-6)


def test_gradients_of_a_skipped_step_do_not_reach_the_next_one(make_rank: MakeRank) -> None:
    rank = make_rank(start(), is_streamed=True)
    rank.step({"a": torch.full((2, 2), INF)}, step=1)

    outcome = rank.step({"b": torch.tensor([[3.0, 4.0]])}, step=2)

    assert not outcome.is_skipped
    assert outcome.grad_norm == pytest.approx(5.0)


def test_ten_skipped_steps_in_a_row_stop_all_ranks_and_tell_step_and_stage(make_rank: MakeRank) -> None:
    def work(transport: LocalTransport) -> str:
        rank = make_rank({transport.rank: start()[transport.rank]}, transport=transport, num_tensors=NUM_TENSORS)
        bad = {"b": torch.full((1, 2), NAN)}
        for step in range(21, 30):
            assert rank.step(bad, step=step).is_skipped
        with pytest.raises(NonFiniteLossError) as caught:
            rank.step(bad, step=30)
        return str(caught.value)

    messages = run_rank_threads(2, work)

    for message in messages:
        assert "10 steps in a row" in message
        assert "step 30" in message
        assert "gradients of stage(s) 1 " in message
        assert "--learning_rate" in message


def test_a_good_step_begins_the_count_of_skipped_ones_anew(make_rank: MakeRank) -> None:
    rank = make_rank(start())
    bad = {"a": torch.full((2, 2), NAN)}
    for step in range(1, 10):
        rank.step(bad, step=step)
    rank.step(gradients(1), step=10)

    for step in range(11, 20):
        assert rank.step(bad, step=step).is_skipped
    assert (rank.stepper.num_updates, rank.stepper.num_skipped) == (1, 18)


def test_scaled_gradients_are_unscaled_before_clipping_and_update(make_rank: MakeRank) -> None:
    scale = GradientScaler(is_dynamic=True, initial=1024.0)
    rank = make_rank(start(), loss_scale=scale, max_grad_norm=1.0)
    steps = [gradients(1, 5.0), gradients(2, 0.1)]

    scaled = [{name: 1024 * value for name, value in step.items()} for step in steps]
    norms = [rank.step(step, step=number).grad_norm for number, step in enumerate(scaled, start=1)]

    expected, expected_norms = torch_training(steps, 1.0)
    assert norms == pytest.approx(expected_norms, rel=1e-6)
    for name, value in rank.parameters().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_an_overflow_of_fp16_gradients_skips_the_step_and_halves_the_scale(make_rank: MakeRank) -> None:
    scale = GradientScaler(is_dynamic=True, initial=1024.0)
    rank = make_rank(start(), loss_scale=scale, dtype=torch.float16, is_streamed=True)

    outcome = rank.step({"a": torch.full((2, 2), 70_000.0)})  # finite in the fp32 accumulator, not in fp16

    assert outcome.is_skipped
    assert scale.value == 512.0
    assert torch.equal(rank.parameters()["a"], start()[0]["a"].half())


def test_the_step_that_grows_the_scale_is_unscaled_by_the_one_it_was_run_with(make_rank: MakeRank) -> None:
    scale = GradientScaler(is_dynamic=True, initial=4.0, growth_interval=1)
    rank = make_rank(start(), loss_scale=scale, max_grad_norm=0.0)

    outcome = rank.step({"b": torch.tensor([[12.0, 16.0]])})

    assert outcome.grad_norm == pytest.approx(5.0)
    state = rank.memory[1].state
    assert state.layout.views(state.exp_avg)["b"].tolist() == [pytest.approx([0.3, 0.4])]
    assert scale.value == 8.0
