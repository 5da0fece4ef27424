"""Rotary embeddings of a document are those that transformers gives it alone, in rows of any length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from harness.pipelines import CPU
from harness.tiny_families import tiny_config
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mobius.engine.documents import position_ids_and_cu_seqlens
from mobius.models.attention import DocumentLayout
from mobius.models.blocks import LayerArguments, LayerArgumentsBuilder, ModelParts
from mobius.models.config_rules import max_positions_warning
from mobius.models.family_support import checked_families, unpackable_reason
from mobius.models.rotary import RotaryLengths

ORIGINAL, LONGEST, SEQ_LENGTH = 16, 64, 96
"""Lengths at which longrope and dynamic factors change, and of the rows."""
ROWS = [(13, 17, 40), (70, 16), (64,), (65,), (95,), ()]
OWN_TABLES = ("codegen", "gptj")
"""Families without rope_parameters: their positions are in tables of their own."""
FAMILIES = [family for family in checked_families().supported if family not in OWN_TABLES]
_ONLY = {
    "phi3": ("longrope",),
    "phimoe": ("default",),
    "stablelm": tuple(name for name in ("default", *ROPE_INIT_FUNCTIONS) if name != "dynamic"),
    # Other types do not know that its layers differ in their heads.
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), ("default", "proportional")),
}
"""Types that a family's configuration takes, where these are not all."""


@cache
def num_factors(family: str) -> int:
    """Rotary factors of a head of the tiny model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    return next(len(buffer) for name, buffer in model.named_buffers() if name.endswith("inv_freq"))


def fields_of(rope_type: str, number: int) -> dict[str, Any]:
    """What a rope type needs; `number` factors."""
    original = {"original_max_position_embeddings": ORIGINAL}
    factors = {
        "short_factor": [1 + 0.1 * place for place in range(number)],
        "long_factor": [2.0 + place for place in range(number)],
    }
    fields: Mapping[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": 2.0},
        "dynamic": {"factor": 4.0},
        "yarn": {"factor": 4.0, **original},
        "longrope": {**factors, **original},
        "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original},
        "proportional": {"partial_rotary_factor": 1.0},
    }
    return {**fields[rope_type], "rope_type": rope_type}


def config_of(family: str, rope_type: str) -> PretrainedConfig:
    rope, more = tiny_config(family).rope_parameters, fields_of(rope_type, num_factors(family))
    by_kind = all(isinstance(own, dict) for own in rope.values())
    extra = {"original_max_position_embeddings": ORIGINAL} if family == "phi3" else {}
    return tiny_config(
        family,
        rope_parameters={kind: {**own, **more} for kind, own in rope.items()} if by_kind else {**rope, **more},
        max_position_embeddings=LONGEST,
        **extra,
    )


def tensors_of(embeddings: object) -> list[Tensor]:
    """Those of a layer; none where it has no positions."""
    return [each for each in tree_leaves(embeddings) if isinstance(each, Tensor)]


@cache
def alone(family: str, rope_type: str, length: int) -> Sequence[Sequence[Tensor]]:
    """Rotary embeddings of each layer, as a model of transformers that has just been made gives them to a document."""
    model, seen = AutoModelForCausalLM.from_config(config_of(family, rope_type)).eval(), list[Any]()

    def note(hidden: Tensor, *_: Any, **named: Any) -> Tensor:
        seen.append(tensors_of(named.get("position_embeddings")))
        return hidden

    for layer in model.get_submodule(model.base_model_prefix).layers:
        layer.forward = note
    with torch.no_grad():
        model(input_ids=torch.ones(1, length, dtype=torch.long), use_cache=False)
    return seen


def differences(found: LayerArguments, family: str, rope_type: str) -> Iterator[tuple[int, int, int]]:
    """Row, document and layer of each rotary embedding that is not as alone."""
    for row, lengths in enumerate(ROWS):
        first = 0
        for document, length in enumerate(lengths):
            for layer, expected in enumerate(alone(family, rope_type, length)):
                tables = tensors_of(found[layer].get("position_embeddings"))
                own = [table[row if len(table) > 1 else 0, first : first + length] for table in tables]
                if not all(map(torch.equal, own, (each[0] for each in expected))):
                    yield row, document, layer
            first += length


@pytest.mark.grid
@pytest.mark.parametrize("rope_type", ["default", *ROPE_INIT_FUNCTIONS])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_has_the_factors_of_a_model_that_was_just_loaded(family: str, rope_type: str) -> None:
    """Packed or not; lengths of both sides of where the factors change, after longer ones and before."""
    if rope_type not in _ONLY.get(family, (rope_type,)) or (family == "phi" and rope_type == "proportional"):
        pytest.skip("transformers makes no such model")
    config = config_of(family, rope_type)
    inputs = LayerArgumentsBuilder(ModelParts(config, CPU), device=CPU, dtype=torch.float32)

    unpacked = [lengths[:1] for lengths in ROWS]
    found = inputs(SEQ_LENGTH, None, unpacked)
    assert not [each for each in differences(found, family, rope_type) if each[1] == 0]
    if RotaryLengths.of(config) is None:
        assert found is inputs(SEQ_LENGTH), "one table for all rows"
    if unpackable_reason(config) is None:
        places = position_ids_and_cu_seqlens(ROWS, seq_length=SEQ_LENGTH, num_microbatches=1, max_documents=4)
        position_ids, (cu_seqlens,) = map(torch.from_numpy, places)
        found = inputs(SEQ_LENGTH, DocumentLayout(position_ids, cu_seqlens), ROWS)
        assert not [*differences(found, family, rope_type)]


def test_factors_of_the_tests_depend_on_length() -> None:
    """Else the test above would compare equal things."""
    for rope_type, bound in (("longrope", ORIGINAL), ("dynamic", LONGEST)):
        (short, *_), (long, *_) = (alone("llama", rope_type, length)[0] for length in (bound, bound + 1))
        assert not torch.equal(short, long[:, :bound])
    (one, *_), (other, *_) = (alone("llama", "dynamic", length)[0] for length in (LONGEST + 1, LONGEST + 2))
    assert not torch.equal(one, other[:, : LONGEST + 1])


def test_lengths_are_alike_between_the_bounds() -> None:
    longrope, dynamic = RotaryLengths((16,)), RotaryLengths((64,), has_own_beyond=True)

    assert [longrope.longest_alike(length, 100) for length in (1, 16, 17, 100)] == [16, 16, 100, 100]
    assert [dynamic.longest_alike(length, 100) for length in (1, 64, 65, 100)] == [64, 64, 65, 100]
    assert longrope.longest_alike(5, 10) == 10


@pytest.mark.parametrize("rope_type", ["default", *ROPE_INIT_FUNCTIONS])
def test_a_warning_of_long_rows_knows_the_scaling(rope_type: str) -> None:
    config = config_of("llama", rope_type)
    reach = {"default": 64, "proportional": 64, "longrope": 64, "llama3": 64, "yarn": 64, "linear": 64}.get(rope_type)
    if reach is None:  # dynamic factors stretch to any length
        assert max_positions_warning(config, 10**6) is None
        return

    assert max_positions_warning(config, reach) is None
    warning = max_positions_warning(config, reach + 1)
    assert warning is not None
    assert f"--seq_length {reach} or less" in warning
    assert ("without scaling" in warning) == (rope_type in ("default", "proportional"))
    assert (rope_type in warning) == (rope_type not in ("default", "proportional"))
