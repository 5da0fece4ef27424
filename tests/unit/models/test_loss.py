"""The chunked loss is the plain one, in value and every gradient, without ever making all logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mobius.models.loss import LossHead, TokenLosses, shift_labels
from mobius.models.structure import ScalingKind, ScalingStep, ScalingSteps

BATCH, LENGTH, HIDDEN, VOCAB = 3, 7, 16, 40
NUM_TARGETS = 50  # of the whole step: more than these sequences have


def capped(softcap: float | None) -> ScalingSteps:
    """The steps softcap * tanh(logits / softcap)."""
    if softcap is None:
        return ()
    return (
        ScalingStep(ScalingKind.DIVIDE, softcap),
        ScalingStep(ScalingKind.TANH),
        ScalingStep(ScalingKind.MULTIPLY, softcap),
    )


@dataclass
class Head:
    """A head with weight and bias that notes how many tokens it was asked for at a time."""

    sizes: list[int] = field(default_factory=list)

    def __call__(self, case: Case, hidden: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        self.sizes.append(hidden.shape[0])

        def backward(gradient: Tensor) -> Tensor:
            case.gradients["weight"] += gradient.T @ hidden
            case.gradients["bias"] += gradient.sum(0)
            return gradient @ case.weights["weight"]

        return F.linear(hidden, case.weights["weight"], case.weights["bias"]), backward


@dataclass(frozen=True)
class Case:
    """Inputs of one loss; `gradients` collects."""

    weights: dict[str, Tensor]
    hidden: Tensor
    labels: Tensor
    gradients: dict[str, Tensor]

    @classmethod
    def make(cls, dtype: torch.dtype = torch.float64) -> Case:
        """In double precision the only difference left is a wrong formula; accumulators as in a run."""
        generator = torch.Generator().manual_seed(5)
        weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=dtype)
        bias = torch.randn(VOCAB, generator=generator, dtype=dtype)
        hidden = torch.randn(BATCH, LENGTH, HIDDEN, generator=generator, dtype=dtype)
        labels = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
        labels[0, :5] = -100
        labels[2] = -100
        weights = {"weight": weight, "bias": bias}
        return cls(weights, hidden, labels, {name: torch.zeros_like(value) for name, value in weights.items()})

    def run(
        self,
        head: Head,
        *,
        chunk_tokens: int,
        loss_scale: float = 1.0,
        softcap: float | None = None,
        compiled: bool = False,
    ) -> tuple[Tensor, Tensor]:
        losses = TokenLosses(capped(softcap), compiled=compiled)
        loss_head = LossHead(losses, self.hidden, _no_logits, partial(head, self), chunk_tokens=chunk_tokens)
        return loss_head.cross_entropy(self.labels, divisor=NUM_TARGETS, loss_scale=loss_scale)

    def expected(self, softcap: float | None = None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Loss, gradient of hidden and of the weights by autograd on the full logits."""
        hidden = self.hidden.clone().requires_grad_()
        weight, bias = (self.weights[name].clone().requires_grad_() for name in ("weight", "bias"))
        logits = hidden @ weight.T + bias
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        picked = logits.log_softmax(-1).gather(-1, self.labels.clamp(min=0)[..., None])[..., 0]
        loss = -(picked * (self.labels != -100)).sum() / NUM_TARGETS
        loss.backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        assert bias.grad is not None
        return loss.detach(), hidden.grad, {"weight": weight.grad, "bias": bias.grad}


def _no_logits(hidden: Tensor) -> Tensor:
    raise AssertionError("training takes logits with their backward")


def test_labels_are_shifted_to_the_position_that_predicts_them() -> None:
    labels = torch.tensor([[5, 6, 7], [-100, 8, -100]])

    assert shift_labels(labels).tolist() == [[6, 7, -100], [8, -100, -100]]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 7, 20, 21, 1000])
def test_the_chunked_loss_equals_the_plain_one_and_so_does_every_gradient(
    chunk_tokens: int, softcap: float | None
) -> None:
    case = Case.make()
    expected_loss, expected_hidden, expected_weights = case.expected(softcap)

    loss, hidden_gradient = case.run(Head(), chunk_tokens=chunk_tokens, softcap=softcap)

    # The logits are widened to fp32 before the softmax, in which the bits of fp64 end.
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(hidden_gradient, expected_hidden, rtol=1e-5, atol=1e-7)
    for name, expected in expected_weights.items():
        torch.testing.assert_close(case.gradients[name], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("softcap", [pytest.param(None, marks=pytest.mark.extended), 2.0])
def test_the_compiled_loss_equals_the_plain_one_and_so_does_every_gradient(softcap: float | None) -> None:
    case = Case.make()
    expected_loss, expected_hidden, expected_weights = case.expected(softcap)

    loss, hidden_gradient = case.run(Head(), chunk_tokens=7, softcap=softcap, compiled=True, loss_scale=1.0)

    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(hidden_gradient, expected_hidden, rtol=1e-4, atol=1e-7)
    for name, expected in expected_weights.items():
        torch.testing.assert_close(case.gradients[name], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 8, 21, 64])
def test_no_more_than_the_chunk_is_given_to_the_head_at_a_time(chunk_tokens: int) -> None:
    head = Head()

    Case.make().run(head, chunk_tokens=chunk_tokens)

    assert max(head.sizes) == min(chunk_tokens, BATCH * LENGTH)
    assert sum(head.sizes) == BATCH * LENGTH, "each token's logits are made once: no recomputation"


def test_ignored_positions_have_no_gradient_and_do_not_move_the_loss() -> None:
    case = Case.make()
    loss, hidden_gradient = case.run(Head(), chunk_tokens=4)
    ignored = case.labels == -100
    assert not hidden_gradient[ignored].any()
    assert hidden_gradient[~ignored].any(dim=-1).all()

    case.hidden[ignored] += 100.0

    assert torch.equal(case.run(Head(), chunk_tokens=4)[0], loss)


def test_a_microbatch_without_a_target_has_loss_and_gradients_of_zero() -> None:
    case = Case.make()
    case.labels.fill_(-100)

    loss, hidden_gradient = case.run(Head(), chunk_tokens=4)

    assert loss == 0
    assert not hidden_gradient.any()
    assert not case.gradients["weight"].any()


def test_the_loss_scale_multiplies_gradients_and_not_the_loss() -> None:
    plain, scaled = Case.make(), Case.make()
    loss, hidden_gradient = plain.run(Head(), chunk_tokens=4)

    scaled_loss, scaled_gradient = scaled.run(Head(), chunk_tokens=4, loss_scale=1024.0)

    assert torch.equal(scaled_loss, loss)
    assert torch.equal(scaled_gradient, hidden_gradient * 1024)  # exact: a power of two
    assert torch.equal(scaled.gradients["weight"], plain.gradients["weight"] * 1024)


def test_bf16_weights_accumulate_in_fp32() -> None:
    case = Case.make(torch.bfloat16)
    accumulators = {name: torch.zeros(value.shape) for name, value in case.weights.items()}
    exact = Case.make(torch.bfloat16)
    expected = Case(
        {name: value.double() for name, value in exact.weights.items()}, exact.hidden.double(), exact.labels, {}
    ).expected()

    case = Case(case.weights, case.hidden, case.labels, accumulators)
    loss, hidden_gradient = case.run(Head(), chunk_tokens=1)

    assert loss.dtype == torch.float32
    assert hidden_gradient.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(expected[0].item(), rel=2e-2)
    error = (accumulators["weight"].double() - expected[2]["weight"]).abs().max()
    assert error <= 2e-2 * expected[2]["weight"].abs().max()


@pytest.mark.grid
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    ("chunk_tokens", "compiled"),
    [(4, False), (21, False), (100, False), pytest.param(7, True, marks=pytest.mark.extended)],
)
def test_an_evaluation_sums_the_losses_and_counts_the_hits_chunk_by_chunk(
    chunk_tokens: int, compiled: bool, softcap: float | None
) -> None:
    """Ignored positions count neither, and all logits never exist."""
    case, sizes = Case.make(torch.float32), list[int]()

    def logits_of(hidden: Tensor) -> Tensor:
        sizes.append(hidden.shape[0])
        return F.linear(hidden, case.weights["weight"], case.weights["bias"])

    logits = F.linear(case.hidden, case.weights["weight"], case.weights["bias"])
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    labels = case.labels.clone()
    labels[0, 5:], labels[1, ::2] = logits[0].argmax(-1)[4:6], logits[1].argmax(-1).roll(1)[::2]
    targets = labels[:, 1:]
    expected = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), targets.reshape(-1), reduction="sum")
    hits = int(((logits[:, :-1].argmax(-1) == targets) & (targets != -100)).sum())
    losses = TokenLosses(capped(softcap), compiled=compiled)
    head = LossHead(losses, case.hidden, logits_of, chunk_tokens=chunk_tokens)
    total, found = head.evaluate(shift_labels(labels))
    assert (total.dtype, found.dtype) == (torch.float32, torch.int64)
    assert not total.requires_grad
    assert float(total) == pytest.approx(float(expected), rel=1e-6)
    assert 5 <= hits == int(found) < int((targets != -100).sum())
    assert max(sizes) <= chunk_tokens
    no_targets = torch.full_like(labels, -100)
    nothing, no_hits = head.evaluate(no_targets)
    assert (float(nothing), int(no_hits)) == (0.0, 0)
