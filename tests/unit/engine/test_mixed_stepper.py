"""Where a stage lives changes neither its update nor what is decided about the step, to the bit on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.local_transport import LocalTransport, run_rank_threads
from torch import Tensor

from mobius.engine.optimizer_stepper import GradientScaler
from mobius.engine.tied_weights import TiedWeights

MakeRank = Callable[..., Any]
RESIDENCIES = [(), (0,), (1,), (0, 2), (0, 1, 2)]


def start() -> dict[int, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return {stage: {f"w{stage}": torch.randn(3, 50 + stage, generator=generator)} for stage in range(3)}


def gradients(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{stage}": torch.randn(3, 50 + stage, generator=generator) for stage in range(3)}


def train(make_rank: MakeRank, **options: Any) -> tuple[dict[str, Tensor], list[float]]:
    rank = make_rank(start(), **options)
    norms = [rank.step(gradients(step), step=step).grad_norm for step in range(1, 5)]
    return rank.parameters(), norms


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_residency_gives_the_same_bits(
    make_rank: MakeRank, dtype: torch.dtype, max_grad_norm: float, is_overlapped: bool
) -> None:
    deferred_updates = () if max_grad_norm == 0 and dtype != torch.float16 else None
    results = [
        train(
            make_rank,
            dtype=dtype,
            max_grad_norm=max_grad_norm,
            is_overlapped=is_overlapped,
            resident=resident,
            deferred_updates=deferred_updates,
            loss_scale=GradientScaler(is_dynamic=dtype == torch.float16),
        )
        for resident in RESIDENCIES
    ]
    parameters, norms = results[0]
    assert not any(math.isnan(norm) for norm in norms)
    for others, other_norms in results[1:]:
        assert other_norms == norms
        assert all(torch.equal(others[name], value) for name, value in parameters.items())


@pytest.mark.parametrize("resident", RESIDENCIES)
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_a_stage_that_is_not_finite_is_skipped_wherever_it_lives(
    make_rank: MakeRank, resident: tuple[int, ...], max_grad_norm: float
) -> None:
    deferred_updates = () if max_grad_norm == 0 else None
    rank = make_rank(start(), max_grad_norm=max_grad_norm, resident=resident, deferred_updates=deferred_updates)
    before = rank.parameters()
    step = gradients(1)
    step["w1"][0, 0] = math.inf
    assert rank.step(step).is_skipped

    changed = {name for name, value in rank.parameters().items() if not torch.equal(value, before[name])}
    assert changed == (set() if max_grad_norm else {"w0", "w2"})


def test_a_later_update_of_a_stage_that_keeps_no_gradients_is_a_mistake_that_is_seen(make_rank: MakeRank) -> None:
    rank = make_rank(start(), max_grad_norm=0.0, resident=(0,))
    with pytest.raises(AssertionError, match="stage 0 stores no gradients"):
        rank.memory[0].states.update(lambda *_, **__: None)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("resident", [(), (0,), (3,), (0, 3)])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_tied_matrix_stays_equal_with_one_copy_resident_and_one_streamed(
    make_rank: MakeRank, num_ranks: int, resident: tuple[int, ...], max_grad_norm: float
) -> None:
    matrix = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    stages = {0: {"embedding": matrix}, 1: {"a": torch.ones(3)}, 2: {"b": torch.ones(3)}, 3: {"head": matrix}}
    tied = TiedWeights("embedding", "head", embedding_stage=0, head_stage=3, num_ranks=num_ranks)

    def work(transport: LocalTransport) -> tuple[dict[str, Tensor], float]:
        own = {stage: values for stage, values in stages.items() if stage % num_ranks == transport.rank}
        rank = make_rank(
            own,
            transport=transport,
            num_tensors=(1, 1, 1, 1),
            tied=tied,
            dtype=torch.bfloat16,
            max_grad_norm=max_grad_norm,
            resident=resident,
            deferred_updates=(0, 3) if max_grad_norm == 0 else None,
        )
        for step in range(1, 4):
            generator = torch.Generator().manual_seed(step)
            parts = {name: torch.randn(5, 7, generator=generator) / 3 for name in ("embedding", "head")}
            outcome = rank.step(parts | {"a": torch.ones(3)}, step=step)
        return rank.parameters(), outcome.grad_norm

    results = run_rank_threads(num_ranks, work)
    parameters = {name: value for own, _ in results for name, value in own.items()}
    assert torch.equal(parameters["embedding"], parameters["head"])
    assert not torch.equal(parameters["head"], matrix.bfloat16())
    assert len({norm for _, norm in results}) == 1
