"""Prompts and prefixes: loss, gradients and steps are those of peft with transformers, one document at a time."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from harness.adapted_models import GivenValues
from harness.pipelines import VOCAB, Pipeline
from harness.prompted_models import (
    P_TUNING,
    P_TUNING_BY_LSTM,
    PREFIX,
    PROMPT,
    batch_with_places,
    prompted,
    random_documents,
    step_by_peft,
    values_of,
)
from harness.tiny_families import tiny_config

from mobius.config.config import AdapterConfig
from mobius.errors import CheckpointError
from mobius.models.block_autograd import recomputed_backward
from mobius.models.blocks import LayerArgumentsBuilder, ModelParts
from mobius.models.family_support import checked_families, unpackable_reason
from mobius.models.prompts import exported_prompt, is_prompt_parameter

CPU = torch.device("cpu")
PACKED = [[7, 2, 5], [26], [3, 11, 6], [9, 9]]
ALONE = [[12]] * 6
KINDS = {"prompt": PROMPT, "p_tuning": P_TUNING, "p_tuning, lstm": P_TUNING_BY_LSTM, "prefix": PREFIX}
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
        if is_packed and unpackable_reason(model.base_model.config):
            continue
        documents = random_documents(lengths, VOCAB, is_first_predicted=config is not PREFIX)
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


@pytest.mark.parametrize("config", [P_TUNING, P_TUNING_BY_LSTM], ids=["mlp", "lstm"])
def test_saved_vectors_are_those_that_the_encoder_makes_in_peft(config: AdapterConfig) -> None:
    model = prompted("llama", config)
    values = {name: value for name, value in values_of(model).items() if is_prompt_parameter(name)}
    torch.testing.assert_close(
        exported_prompt(values), model.get_prompt_embedding_to_save("default"), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("compiler", ["none", pytest.param("inductor", marks=pytest.mark.extended)])
def test_a_compiled_layer_has_the_gradients_of_its_prefix(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler == "none":  # graphs run as they were traced
        monkeypatch.setattr(torch._inductor, "compile", lambda graph, _: graph)
    model = prompted("llama", PREFIX, num_layers=1)
    values = values_of(model)
    generator = torch.Generator().manual_seed(4)
    inputs, gradient = torch.randn(2, 1, 8, 32, generator=generator)
    found = []
    for compiled in (False, True):
        parts = ModelParts(model.config, CPU, compiled=compiled, adapters=PREFIX)
        layer, arguments = parts.layers[0], LayerArgumentsBuilder(parts, device=CPU, dtype=torch.float32)(8)
        sums = {"model.layers.0.prefix": torch.zeros_like(values["model.layers.0.prefix"])}
        (back,) = recomputed_backward(layer, values, (inputs,), arguments[0], sums, gradient)
        assert not compiled or (layer.graphs is not None and not layer.graphs._is_broken)
        found.append({**sums, "inputs": back})
    for name, expected in found[0].items():
        assert expected.any()
        assert (found[1][name] - expected).abs().max() <= 1e-5 * expected.abs().max(), name


@pytest.mark.extended
@pytest.mark.parametrize("family", checked_families().supported)
def test_a_prefix_of_any_family_is_that_of_peft_or_refused_by_name(family: str) -> None:
    try:
        ModelParts(tiny_config(family), CPU, adapters=PREFIX)
    except CheckpointError as error:
        told = str(error)
    else:
        check(family, PREFIX, {"streamed": CASES["streamed"]})
        return
    assert re.match(r"--finetuning_type prefix: layers of the family .* so a prefix would not be peft's", told)


def test_layers_whose_prefix_would_not_be_that_of_peft_are_refused() -> None:
    refused = {
        "deepseek_v2": "have keys and values of other shapes",
        "qwen3_next": "carry a state from token to token",
        "cohere_compass_text": "get no cache of keys and values, or no positions",
    }
    for family, reason in refused.items():
        with pytest.raises(CheckpointError, match=f"the family {family!r} {reason}.*Use --finetuning_type prompt"):
            ModelParts(tiny_config(family), CPU, adapters=PREFIX)
    config = tiny_config("qwen3_moe")
    config.output_router_logits = True
    with pytest.raises(CheckpointError, match="its router loss would count virtual tokens.*Set it to false"):
        ModelParts(config, CPU, adapters=PREFIX)
