"""Rotary factors that depend on length: a row, packed or not, gives what transformers gives its documents alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.packed_rows import documents_alone, make_packed_batch
from harness.pipelines import Pipeline, Step, assert_near, assert_same_bits, model_of
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config, PretrainedConfig

from mobius.engine.step_inputs import StepBatch

ORIGINAL, LENGTH = 16, 48
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": ORIGINAL,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
MODELS: Mapping[str, Callable[[], PretrainedConfig]] = {
    "phi3, longrope": lambda: Phi3Config(
        **SHAPE,
        max_position_embeddings=64,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=_LONGROPE,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "llama, dynamic": lambda: LlamaConfig(**SHAPE, max_position_embeddings=ORIGINAL, rope_parameters=_DYNAMIC),
    "gemma3, one kind of layer dynamic": lambda: Gemma3TextConfig(
        **SHAPE,
        head_dim=16,
        sliding_window=4,
        max_position_embeddings=ORIGINAL,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": _DYNAMIC,
        },
    ),
}
ROWS = [(13, 20), (48,), (16, 17, 9), (30, 5)]
ALONE = [(13,), (48,), (16,), (30,)]
WAYS: Mapping[str, dict[str, Any]] = {
    "two ranks": {},
    "everything saved": {"num_slots": None, "keeps_graphs": True},
    "tiles": {"tile_tokens": 16},
    "slices": {"num_slices": 4, "num_microbatches": 8},
}


def pipeline(name: str, way: str) -> Pipeline:
    given: dict[str, Any] = {"num_ranks": 2, "stages_per_rank": 2, "num_microbatches": 2, "num_slots": 1}
    return Pipeline(model_of(MODELS[name]()), **given | WAYS[way])


def batch_of(rows: Sequence[tuple[int, ...]], pipe: Pipeline, *, is_packed: bool) -> StepBatch:
    batch = make_packed_batch(rows, LENGTH, pipe.num_microbatches // pipe.num_slices)
    return batch if is_packed else replace(batch, documents=None)


@pytest.mark.grid
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_a_row_gives_what_its_documents_give_alone(name: str, way: str, is_packed: bool) -> None:
    pipe, rows = pipeline(name, way), ROWS if is_packed else ALONE
    batch = batch_of(rows, pipe, is_packed=is_packed)

    found, expected = pipe.step(batch), documents_alone(pipe.model, rows, batch)

    assert_near(found, expected, loss=1e-6, gradients=2e-6)


@pytest.mark.parametrize("length", [13, 16, 17, 40])
@pytest.mark.parametrize("name", MODELS)
def test_a_document_that_fills_its_row_has_the_bits_of_transformers(name: str, length: int) -> None:
    pipe = replace(pipeline(name, "two ranks"), num_microbatches=1)
    packed = make_packed_batch([(length,)], length, 1)
    batch = replace(packed, documents=None)
    expected: Step = documents_alone(pipe.model, [(length,)], batch)

    assert_same_bits(pipe.step(batch), expected)


@pytest.mark.parametrize("num_slices", [1, 4])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_an_evaluation_gives_what_documents_give_alone(name: str, is_packed: bool, num_slices: int) -> None:
    rows = ROWS if is_packed else ALONE
    model, batch = model_of(MODELS[name]()), make_packed_batch(rows, LENGTH, 2)
    given = batch if is_packed else replace(batch, documents=None)
    with torch.no_grad():
        pipe = Pipeline(model, 2, 2, 2 * num_slices, 1, num_slices=num_slices)
        found = pipe.evaluate(given).losses.sum() / batch.num_targets

    torch.testing.assert_close(found, documents_alone(model, rows, batch)[0], rtol=1e-6, atol=0)
