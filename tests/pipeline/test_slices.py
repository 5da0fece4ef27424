"""Slices of sequences as microbatches: loss and gradients are those of whole sequences."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import pytest
import torch
from harness.packed_rows import LENGTH, ROWS, documents_alone, make_packed_batch
from harness.pipelines import FAMILIES, Case, Pipeline, evaluate, make_batch, make_model, plain_step
from torch import Tensor
from transformers import PreTrainedModel

from mobius.engine import sliced_layers
from mobius.engine.executor import StepBatch
from mobius.models.slice_attention import attend_slice

SETTINGS = (  # ranks, stages of each, sequences, slices, slots, rounds, whether activations wait on the host
    (1, 1, 1, 4, None, 1, False),
    (1, 3, 2, 2, 2, 1, True),
    (2, 1, 1, 3, 1, 1, True),
    (2, 3, 2, 4, 2, 2, True),
    (4, 2, 2, 3, None, 1, False),
)


@pytest.mark.grid
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_slices_are_as_near_to_the_exact_gradients_as_the_plain_model_is(
    family: str, setting: tuple[int, int, int, int, int | None, int, bool]
) -> None:
    """Sums in another order differ by roundings, so both are compared with the same step in fp64."""
    num_ranks, stages_per_rank, sequences, num_slices, num_slots, accumulation_rounds, is_stashed = setting
    model, batch = make_model(family), make_batch(sequences)
    exact = {name: g.clone() for name, g in plain_step(copy.deepcopy(model).double(), batch, sequences)[1].items()}
    loss, plain = plain_step(model, batch, sequences)
    wanted = _apart(plain, exact)
    pipeline = Pipeline(
        model,
        num_ranks,
        stages_per_rank,
        sequences * num_slices,
        num_slots,
        accumulation_rounds=accumulation_rounds,
        num_slices=num_slices,
        offloaded_activation_stages=frozenset(range(num_ranks * stages_per_rank - 1) if is_stashed else ()),
    )

    own_loss = pipeline.run(batch)

    assert float(own_loss) == pytest.approx(float(loss), rel=1e-6)
    assert _apart(pipeline.gradients, exact) < max(1e-6, 1.2 * wanted)
    for name, gradient in exact.items():
        # The bias of keys changes no attention: what is found for it is rounding alone.
        bound = 1e-5 * gradient.norm() + 1e-8
        assert (pipeline.gradients[name].double() - gradient).norm() < bound, name


@lru_cache(maxsize=3)
def alone(family: str, num_groups: int) -> tuple[PreTrainedModel, StepBatch, Tensor, dict[str, Tensor]]:
    """Model and batch, and the loss and gradients of its documents alone, which several pipelines are compared with."""
    model, batch = make_model(family, 6), make_packed_batch(ROWS, LENGTH, num_groups)
    loss, gradients = documents_alone(model, ROWS, batch)
    return model, batch, loss, gradients


@pytest.mark.grid
@pytest.mark.parametrize("num_slices", [2, 4, 5])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_documents_across_slices_give_what_each_gives_alone(family: str, num_slices: int) -> None:
    """Documents of a row that end within slices, begin in them, and span several."""
    for num_ranks, groups, num_slots in ((1, 1, None), (2, 2, 2), (3, 4, 1)):
        model, batch, expected_loss, expected = alone(family, groups)
        pipeline = Pipeline(model, num_ranks, 2, groups * num_slices, num_slots, num_slices=num_slices)

        loss, where = pipeline.run(batch), f"N={num_ranks} M={groups}"

        assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6), where
        assert _apart(pipeline.gradients, expected) < 2e-6, where


@pytest.mark.parametrize("is_stashed", [False, True])
def test_stages_without_layers_pass_slices_on(is_stashed: bool) -> None:
    """The embedding and the head are stages of their own where there are more stages than layers."""
    model, batch = make_model("llama", 4), make_batch(2)
    loss, plain = plain_step(model, batch, 2)
    for num_ranks, stages_per_rank, num_slots in ((2, 3, 2), (3, 2, None), (1, 5, 1)):
        stages = range(num_ranks * stages_per_rank - 1)
        offloaded_activation_stages = frozenset(stages if is_stashed else ())
        pipeline = Pipeline(
            model,
            num_ranks,
            stages_per_rank,
            2 * 3,
            num_slots,
            num_slices=3,
            offloaded_activation_stages=offloaded_activation_stages,
        )

        own_loss = pipeline.run(batch)

        assert float(own_loss) == pytest.approx(float(loss), rel=1e-6)
        assert _apart(pipeline.gradients, {name: each.double() for name, each in plain.items()}) < 2e-6


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.extended), "gemma3"])
def test_attention_that_is_kept_changes_no_bit_and_is_not_made_again(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_layers = 6  # one in each stage of the longest pipeline, and both kinds
    model, calls = make_model(family, num_layers), list[int]()

    def counting(*given: Any) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return attend_slice(*given)

    monkeypatch.setattr(sliced_layers, "attend_slice", counting)
    for turn, (num_ranks, stages_per_rank, sequences, num_slices, num_slots, accumulation_rounds, _) in enumerate(
        SETTINGS[2:4]
    ):
        batch, runs = make_batch(sequences), {}
        for keeps_attention, is_stashed in ((False, False), (True, False), (True, True)):
            calls.clear()
            pipeline = Pipeline(
                model,
                num_ranks,
                stages_per_rank,
                sequences * num_slices,
                num_slots,
                accumulation_rounds=accumulation_rounds,
                num_slices=num_slices,
                offloaded_activation_stages=frozenset(range(num_ranks * stages_per_rank - 1) if is_stashed else ()),
                dtype=(torch.float32, torch.bfloat16)[turn % 2],
                tile_tokens=2 if turn % 2 else None,
                keeps_attention=keeps_attention,
            )
            runs[keeps_attention, is_stashed] = pipeline.run(batch), pipeline.gradients, len(calls)

        loss, gradients, num_calls = runs.pop((False, False))
        for own_loss, own, num_own in runs.values():
            assert torch.equal(own_loss, loss)
            assert all(torch.equal(own[name], each) for name, each in gradients.items())
            assert num_own == num_layers * sequences * num_slices < num_calls


@pytest.mark.parametrize("is_packed", [False, True])
def test_an_evaluation_in_slices_gives_the_losses_of_whole_rows(is_packed: bool) -> None:
    model = make_model("qwen3", 6)
    batch = make_packed_batch(ROWS, LENGTH, 2) if is_packed else make_batch(4)
    for num_ranks, stages_per_rank in ((1, 1), (2, 2), (4, 2)):
        whole = evaluate(model, batch, Case(num_ranks, stages_per_rank, 2, 2))
        sliced = evaluate(model, batch, Case(num_ranks, stages_per_rank, 2 * 4, 2, num_slices=4))

        assert torch.allclose(sliced.losses.view(2, 4).sum(1), whole.losses, rtol=1e-5)
        assert torch.equal(sliced.num_correct.view(2, 4).sum(1), whole.num_correct)


def _apart(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Norm of all differences over that of all gradients."""
    return float(_norm(found[name].double() - each for name, each in exact.items()) / _norm(exact.values()))


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([tensor.norm() for tensor in tensors]).norm()
