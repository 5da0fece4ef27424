"""Prompt tuning and P-tuning: loss, gradients and steps are those of peft with transformers, one document at a time."""

from __future__ import annotations

from typing import Any

import pytest
from harness.adapted_models import GivenValues
from harness.pipelines import VOCAB, Pipeline
from harness.prompted_models import (
    P_TUNING,
    PROMPT,
    batch_with_places,
    prompted,
    random_documents,
    step_by_peft,
    values_of,
)

from mobius.config.config import AdapterConfig

PACKED = [[7, 2, 5], [26], [3, 11, 6], [9, 9]]
ALONE = [[12]] * 6
KINDS = {"prompt": PROMPT, "p_tuning": P_TUNING}
CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {  # ranks, stages of each, microbatches, slots, saves graphs
    "one stage": ((1, 1, 2, None), {}),
    "resident, graphs": ((2, 1, 2, None, True), {}),
    "streamed": ((2, 2, 2, 1), {}),
    "streamed, more microbatches": ((1, 3, 6, 2), {}),
    "three ranks": ((3, 1, 2, 1), {}),
    "slices": ((2, 1, 4, 1), {"num_slices": 2}),
    "tiles": ((1, 2, 2, 1), {"tile_tokens": 7}),
}


def check(family: str, config: AdapterConfig, cases: dict[str, tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    model = prompted(family, config)
    source = GivenValues(values_of(model))
    for lengths, is_packed in ((ALONE, False), (PACKED, True)):
        documents = random_documents(lengths, VOCAB)
        expected = None
        for case, (sizes, options) in cases.items():
            groups = sizes[2] // options.get("num_slices", 1)
            if len(lengths) % groups:
                continue
            length = 15 if not is_packed else 30
            length += length % options.get("num_slices", 1) and 1
            batch = batch_with_places(
                documents, seq_length=length, num_microbatches=groups, is_packed=is_packed or length == 16
            )
            expected = expected or step_by_peft(model, documents, batch.num_targets)
            base = model.base_model
            found = Pipeline(base, *sizes, adapters=config, source=source, **options).step(batch)
            where = family, case, is_packed
            assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-6), where
            assert found[1].keys() == expected[1].keys(), where
            for name, gradient in expected[1].items():
                assert (found[1][name] - gradient).abs().max() <= 5e-6 * gradient.abs().max(), (where, name)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_peft(kind: str) -> None:
    check("llama", KINDS[kind], CASES)


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "family", ["llama-tied", "qwen2", "qwen3", "mistral", "gemma3", "gemma2", "granite", "phi3", "qwen3_moe"]
)
def test_other_families_loss_and_gradients_are_those_of_peft(family: str, kind: str) -> None:
    check(family, KINDS[kind], {case: CASES[case] for case in ("streamed", "three ranks", "slices")})
