"""A text part's weights are found by the prefix that their names have; nothing is guessed where that is not clear."""

from __future__ import annotations

import pytest

from mobius.models.weights import text_weight_names

OTHERS = ("model.vision_tower.embed.weight", "visual.blocks.0.norm.weight", "mtp.norm.weight")


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.language_model.", "lm_head."),
        ("language_model.model.", "language_model.lm_head."),
        ("language_model.model.", "lm_head."),
        ("model.text_model.", "lm_head."),
    ],
)
def test_names_of_the_text_part_lose_its_prefix_and_others_stay(prefix: str, head: str) -> None:
    own = [f"{prefix}{name}" for name in ("embed_tokens.weight", "layers.0.mlp.up_proj.weight", "norm.weight")]

    renamed = text_weight_names([*own, f"{head}weight", *OTHERS])

    expected = {
        f"{prefix}embed_tokens.weight": "model.embed_tokens.weight",
        f"{prefix}layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
        f"{prefix}norm.weight": "model.norm.weight",
    }
    assert renamed == expected | ({} if head == "lm_head." else {f"{head}weight": "lm_head.weight"})


@pytest.mark.parametrize(
    "stored",
    [
        ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "visual.norm.weight"),
        ("embed_tokens.weight", "norm.weight"),
        ("decoder.embed_tokens.weight", "decoder.norm.weight"),
        ("a.language_model.embed_tokens.weight", "b.language_model.embed_tokens.weight"),
        ("model.language_model.embed_tokens.weight", "model.language_model.norm.weight", "model.norm.weight"),
    ],
    ids=["a text model", "no prefix", "no text part", "two of them", "a name given twice"],
)
def test_other_names_stay_as_they_are(stored: tuple[str, ...]) -> None:
    assert text_weight_names(stored) == {}
