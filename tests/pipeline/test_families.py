"""Tiny models of other families, and text parts of larger ones, give loss and gradients of the plain models."""

from __future__ import annotations

import pytest
from harness.family_checks import check_text_part, parity_of

FAMILIES = {
    "apertus": "constants among its weights",
    "cohere2": "attention beside the feed-forward part, scaled logits",
    "exaone4": "norms behind attention and feed-forward part, a kind of layer without rotary embeddings",
    "gemma2": "scores and logits with a cap",
    "glm4": "norms on both sides, rotary embeddings on half of each head",
    "granite": "scaled embeddings, residuals, scores and logits",
    "minicpm3": "projections of low rank, values narrower than keys, scaled hidden states before the head",
    "olmo": "norms without weights, outputs changed in place",
    "phi": "a bias in the head, another name of the last norm",
    "phi3": "one linear for queries, keys and values",
    "qwen3_5_text": "layers with a state instead of attention",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pipeline_equals_the_plain_model_bit_by_bit(family: str) -> None:
    assert parity_of(family) == "bit-equal"
    assert parity_of(family, num_ranks=1, stages_per_rank=3) == "bit-equal"


TEXT_PARTS = {
    "gemma3": "its head and embedding are one, two kinds of layers",
    "idefics3": "another name of the text part",
    "qwen3_vl": "positions on three axes",
    "voxtral": "sound; the head is never tied",
}


@pytest.mark.parametrize("family", TEXT_PARTS)
def test_a_text_part_by_itself_equals_the_larger_model_bit_by_bit(family: str) -> None:
    assert check_text_part(family) == {"parity": "bit-equal"}
