"""The two copies of a matrix that embedding and head share get the same update wherever they live."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.local_transport import LocalTransport, run_rank_threads
from torch import Tensor

from mobius.engine.tied_weights import TiedWeights

MakeRank = Callable[..., Any]
MATRIX = torch.tensor([[1.0, -2.0, 0.25], [0.5, 3.0, -1.5]])
EMBEDDING_GRADIENT = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]])
HEAD_GRADIENT = torch.tensor([[2.0, 4.0, -2.0], [0.0, 0.0, 0.0]])  # the sum is 3 and 4: its norm is 5
LAYER_GRADIENT = torch.tensor([12.0])  # 5 and 12 make 13
NUM_TENSORS = (1, 1, 1, 2)
"""Of each of the four stages."""


def run_ranks(
    make_rank: MakeRank,
    num_ranks: int,
    *,
    num_steps: int = 1,
    embedding_gradient: Tensor = EMBEDDING_GRADIENT,
    head_gradient: Tensor = HEAD_GRADIENT,
    **options: Any,
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Norm on every rank, parameters, and summed gradients of the last step, of a model of four stages."""
    stages: dict[int, dict[str, Tensor]] = {
        0: {"embedding": MATRIX},
        1: {"layer": torch.ones(1)},
        2: {"idle": torch.ones(1)},
        3: {"head": MATRIX, "final": torch.ones(2)},
    }
    tied = TiedWeights("embedding", "head", embedding_stage=0, head_stage=3, num_ranks=num_ranks)
    gradients = {"embedding": embedding_gradient, "head": head_gradient, "layer": LAYER_GRADIENT}

    def work(transport: LocalTransport) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        own = {stage: parameters for stage, parameters in stages.items() if stage % num_ranks == transport.rank}
        rank = make_rank(own, transport=transport, num_tensors=NUM_TENSORS, tied=tied, **options)
        for step in range(1, num_steps + 1):
            outcome = rank.step({name: value / step for name, value in gradients.items()}, step=step)
        left: dict[str, Tensor] = {}
        for state in (memory.state for memory in rank.memory.values()):
            left |= {name: view.clone() for name, view in state.layout.views(state.gradients).items()}
        return outcome.grad_norm, rank.parameters(), left

    results = run_rank_threads(num_ranks, work)
    parameters: dict[str, Tensor] = {}
    left: dict[str, Tensor] = {}
    for _, own_parameters, own_gradients in results:
        parameters |= own_parameters
        left |= own_gradients
    return [norm for norm, _, _ in results], parameters, left


# With one rank both copies are its own; with three, rank 0 owns both and the others none; with two and four,
# two ranks exchange.
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_both_copies_get_the_sum_of_both_gradients(make_rank: MakeRank, num_ranks: int, is_streamed: bool) -> None:
    # Below the limit of the norm: clipping would scale what is looked at.
    _, _, gradients = run_ranks(make_rank, num_ranks, is_streamed=is_streamed, max_grad_norm=100.0)

    assert gradients["embedding"].tolist() == [[3, 4, 0], [0, 0, 0]]
    assert torch.equal(gradients["embedding"], gradients["head"])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_the_shared_matrix_counts_once_in_the_norm(make_rank: MakeRank, num_ranks: int, is_streamed: bool) -> None:
    norms, _, _ = run_ranks(make_rank, num_ranks, is_streamed=is_streamed)

    assert norms == pytest.approx([13.0] * num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_the_copies_stay_bit_equal_over_several_steps(
    make_rank: MakeRank, num_ranks: int, dtype: torch.dtype, is_streamed: bool
) -> None:
    # Thirds have no exact sum in any format, so an order of summation that differs would show.
    _, parameters, _ = run_ranks(
        make_rank, num_ranks, num_steps=5, head_gradient=HEAD_GRADIENT / 3, dtype=dtype, is_streamed=is_streamed
    )

    assert torch.equal(parameters["embedding"], parameters["head"])
    assert not torch.equal(parameters["head"], MATRIX.to(dtype))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_update_is_that_of_one_shared_parameter(make_rank: MakeRank, num_ranks: int) -> None:
    shared, layer = torch.nn.Parameter(MATRIX.clone()), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([shared, layer], lr=0.1, weight_decay=0.0)
    for step in range(1, 4):
        shared.grad, layer.grad = (EMBEDDING_GRADIENT + HEAD_GRADIENT) / step, LAYER_GRADIENT / step
        torch.nn.utils.clip_grad_norm_([shared, layer], 1.0)
        optimizer.step()

    _, parameters, _ = run_ranks(make_rank, num_ranks, num_steps=3)

    torch.testing.assert_close(parameters["embedding"], shared.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parameters["layer"], layer.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_value_that_is_not_finite_in_one_copy_skips_the_step(make_rank: MakeRank, num_ranks: int) -> None:
    bad = HEAD_GRADIENT.clone()
    bad[1, 1] = math.nan

    norms, parameters, _ = run_ranks(make_rank, num_ranks, head_gradient=bad)

    assert all(math.isnan(norm) for norm in norms)
    assert torch.equal(parameters["embedding"], MATRIX)
    assert torch.equal(parameters["head"], MATRIX)


def test_a_sum_beyond_fp16_skips_the_step_though_both_parts_fit(make_rank: MakeRank) -> None:
    part = torch.full((2, 3), 40_000.0)  # fp16 ends at 65504

    norms, parameters, _ = run_ranks(
        make_rank, 2, embedding_gradient=part, head_gradient=part, dtype=torch.float16, is_streamed=True
    )

    assert all(math.isnan(norm) for norm in norms)
    assert torch.equal(parameters["embedding"], MATRIX.half())
