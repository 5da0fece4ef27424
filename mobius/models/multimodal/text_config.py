"""Extracts the text part's configuration from that of a multimodal model (images, sound).

The result is a config.json of a text-only model, which transformers loads with the text part's weights.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

PATH = Path(__file__).with_name("checked.json")

EQUIVALENT_FAMILIES: Mapping[str, str] = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
"""Text parts without a causal language model -> family with the same computation for text alone, where positions on
all three axes are equal. `scripts/check_families` compares them."""

_OF_THE_WHOLE = ("bos_token_id", "eos_token_id", "pad_token_id")
_OF_THREE_AXES = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class TextConfig:
    """The text part of a multimodal model."""

    full_model_type: str
    """Family of the multimodal model."""
    fields: dict[str, Any]
    """config.json of the text part as a model of its own."""
    ignored_configs: tuple[str, ...]
    """Names of the other parts' configurations, for example `vision_config`."""


@functools.cache
def checked_text_parts() -> Mapping[str, Mapping[str, str]]:
    """Multimodal family -> check result: family of its `text` part, and `parity`, or why it is `refused`.

    `scripts/check_families` writes the file.
    """
    return cast(Mapping[str, Mapping[str, str]], json.loads(PATH.read_text(encoding="utf-8")))


def is_text_config_supported(family: object) -> bool:
    """Whether Mobius trains the text part of models of this family."""
    return isinstance(family, str) and "parity" in checked_text_parts().get(family, {})


def supported_text_config(fields: Mapping[str, Any]) -> TextConfig | None:
    """The text part described by a config.json's `fields`; None for text models and for unchecked families.

    Raises any error of the family's configuration class for wrong values.
    """
    whole = fields.get("model_type")
    if not is_text_config_supported(whole) or whole not in CONFIG_MAPPING:
        return None
    return extract_text_config(fields)


def extract_text_config(fields: Mapping[str, Any]) -> TextConfig | None:
    """The text part of a multimodal model, checked or not; None if it is not a causal language model."""
    kind = cast(type[PretrainedConfig], CONFIG_MAPPING[fields["model_type"]])
    config = kind.from_dict(copy.deepcopy(dict(fields)))
    text = config.get_text_config(decoder=True)
    family = EQUIVALENT_FAMILIES.get(text.model_type, text.model_type)
    if text is config or family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    made = _as_family(text.to_dict(), family)
    own = fields.get("text_config")
    given = own if isinstance(own, dict) else {}
    made.update({name: fields[name] for name in _OF_THE_WHOLE if name in fields and name not in given})
    # transformers reads the outer model's field; separate stored matrices are detected in the checkpoint.
    made["tie_word_embeddings"] = bool(
        getattr(config, "tie_word_embeddings", False) or given.get("tie_word_embeddings", False)
    )
    made["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    others = [
        name for name in getattr(kind, "sub_configs", {}) if name != "text_config" and getattr(config, name, None)
    ]
    return TextConfig(str(fields["model_type"]), made, tuple(others))


def _as_family(fields: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The fields that `family` declares, without settings for positions on several axes."""
    kind = cast(Any, CONFIG_MAPPING[family])
    declared = {field.name for field in dataclasses.fields(kind)}
    general = {field.name for field in dataclasses.fields(cast(Any, PretrainedConfig))}
    made = {name: value for name, value in fields.items() if name in declared - general}
    rope = made.get("rope_parameters")
    if (
        isinstance(rope, dict)
        and any(name in rope for name in _OF_THREE_AXES)
        and family in EQUIVALENT_FAMILIES.values()
    ):
        kept = {name: value for name, value in rope.items() if name not in (*_OF_THREE_AXES, "type")}
        made["rope_parameters"] = kept | {"rope_type": "default"} if kept.get("rope_type") == "mrope" else kept
    return {"model_type": family, **made}
