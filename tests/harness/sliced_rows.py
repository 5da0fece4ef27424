"""Pipelines whose microbatches are slices of sequences, compared with plain models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from harness.pipelines import Pipeline, distance, make_batch, plain_step
from transformers import PreTrainedModel

SETTINGS = (  # ranks, stages of each, sequences, slices, slots, rounds, whether activations are offloaded
    (1, 1, 1, 4, None, 1, False),
    (1, 3, 2, 2, 2, 1, True),
    (2, 1, 1, 3, 1, 1, True),
    (2, 3, 2, 4, 2, 2, True),
    (4, 2, 2, 3, None, 1, False),
)
Setting = tuple[int, int, int, int, int | None, int, bool]


def sliced(model: PreTrainedModel, setting: Setting, **options: Any) -> Pipeline:
    num_ranks, stages_per_rank, sequences, num_slices, num_slots, rounds, is_offloaded = setting
    return Pipeline(
        model,
        num_ranks,
        stages_per_rank,
        sequences * num_slices,
        num_slots,
        num_rounds=rounds,
        num_slices=num_slices,
        offloaded_activation_stages=frozenset(range(num_ranks * stages_per_rank - 1) if is_offloaded else ()),
        **options,
    )


def assert_slices_are_as_near_as_the_plain_model(model: PreTrainedModel, setting: Setting, **options: Any) -> None:
    """Sums in another order differ by roundings, so both are compared with the same step in fp64."""
    sequences = setting[2]
    batch = make_batch(sequences)
    exact = {name: g.clone() for name, g in plain_step(copy.deepcopy(model).double(), batch, sequences)[1].items()}
    loss, plain = plain_step(model, batch, sequences)
    wanted = distance(plain, exact)

    own_loss, gradients = sliced(model, setting, **options).step(batch)

    assert float(own_loss) == pytest.approx(float(loss), rel=1e-6)
    assert distance(gradients, exact) < max(1e-6, 1.2 * wanted)
    for name, gradient in exact.items():
        # The bias of keys changes no attention: what is found for it is rounding alone.
        bound = 1e-5 * gradient.norm() + 1e-8
        assert (gradients[name].double() - gradient).norm() < bound, name
