"""Families that are trained, text parts of multimodal models, and families without slices or packing.

`scripts/check_families` compares families with transformers and writes the results. A family is supported if loss and
every gradient of its tiny model, split into stages, are bit-equal to transformers'.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES_PATH = Path(__file__).with_name("families.json")
TEXT_PARTS_PATH = Path(__file__).with_name("text_parts.json")


@dataclass(frozen=True)
class CheckedFamilies:
    """Contents of the file."""

    transformers: str
    """Version of transformers in the comparison."""
    supported: Mapping[str, Mapping[str, str]]
    """Family -> check -> "yes", or why it fails."""
    refused: Mapping[str, str]
    """Family -> reason, which follows "the family"."""

    def unsupported_reason(self, family: str) -> str | None:
        """Reason (a clause) why `family` cannot be trained, or None if it can."""
        if family in self.supported:
            return None
        if family in self.refused:
            return f"it {self.refused[family]}"
        return f"it was not compared with transformers {self.transformers}, by which supported families are found"

    def untileable_reason(self, family: str) -> str | None:
        """Reason why layers of a supported family cannot run in tiles, or None if they can."""
        found = self.supported.get(family, {}).get("tiles", "yes")
        return None if found == "yes" else found

    @property
    def names(self) -> str:
        """The supported families as a list in words."""
        return ", ".join(self.supported)


@functools.cache
def checked_families() -> CheckedFamilies:
    """Read the file."""
    fields = json.loads(FAMILIES_PATH.read_text(encoding="utf-8"))
    return CheckedFamilies(fields["transformers"], fields["supported"], fields["refused"])


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
    return cast(Mapping[str, Mapping[str, str]], json.loads(TEXT_PARTS_PATH.read_text(encoding="utf-8")))


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
        plain = {name: value for name, value in rope.items() if name not in (*_OF_THREE_AXES, "type")}
        made["rope_parameters"] = plain | {"rope_type": "default"} if plain.get("rope_type") == "mrope" else plain
    return {"model_type": family, **made}


_WHOLE = "Its rows have to be computed whole: choose a --seq_length that fits, or a family without this, such as"
_EXAMPLES = "llama, mistral, qwen3 or gemma3_text"

_SLICEABLE_KINDS = {"full_attention", "sliding_attention"}
_WINDOWS_IN_MASKS = ("qwen2_moe",)
"""Families whose code passes windows to attention in masks only."""
_WITHOUT_TOKENS = {"mlp", "moe"}
"""Kinds of layers without interaction between tokens."""
_STATE = "layers that carry a state from token to token, which would have to be handed on and differentiated, too"
_KINDS: Mapping[str, str] = {
    "chunked_attention": "attention that starts again at every chunk (attention_chunk_size), unlike a window",
    **dict.fromkeys(("linear_attention", "mamba", "recurrent", "conv", "hybrid", "hybrid_sliding"), _STATE),
    **dict.fromkeys(
        ("indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention"),
        "attention to keys that are chosen by a search or compressed over the whole row",
    ),
}
_SINKS = "attention sinks, learned scores without a key that take a share of every softmax, with gradients of their own"
_BIAS = "scores with a bias by distance (alibi), which the kernels do not add"
_FAMILIES: Mapping[str, str] = {
    **dict.fromkeys(
        ("gpt_oss", "granite_swa", "granitemoe_swa", "flint", "hy_v4", "mimo_v2_flash", "openai_privacy_filter"), _SINKS
    ),
    **dict.fromkeys(("bloom", "mpt"), _BIAS),
    "doge": "a mask that is computed from its values and added to the scores",
    "diffllama": "the difference of two attentions, whose values are wider than their keys",
    **dict.fromkeys(("rwkv", "xlstm", "mamba", "mamba2", "falcon_mamba", "falcon_h1", "bamba", "jamba"), _STATE),
    "recurrent_gemma": _STATE,  # transformers 5.17 names no kinds of its layers
}


def unsliceable_reason(config: PretrainedConfig) -> str | None:
    """None if all layers support slices; else a message with the family, the reason and an alternative.

    Cases that neither the configuration nor these tables show are found when a layer is split at its attention.
    """
    if reason := _reason(config):
        return f"rows of the family {config.model_type!r} cannot be cut into slices: {reason}. {_WHOLE} {_EXAMPLES}."
    return None


def unpackable_reason(config: PretrainedConfig) -> str | None:
    """None if all layers can separate the documents of a row; else a message with the reason and an alternative.

    Only attention separates documents, and it must be of a kind that supports slices.
    """
    if reason := _reason(config):
        return (
            f"rows of the family {config.model_type!r} cannot hold several samples: {reason}. Use --packing off, or "
            "joined for plain text"
        )
    return None


def _reason(config: PretrainedConfig) -> str | None:
    reasons: tuple[Callable[[Any], str | None], ...] = (_of_family, _of_kinds, _of_fields, _of_code)
    return next((reason for find in reasons if (reason := find(config))), None)


def _of_family(config: Any) -> str | None:
    found = _FAMILIES.get(config.model_type)
    return f"it has {found}" if found else None


def _of_kinds(config: Any) -> str | None:
    """Reason from the list of layer kinds that newer families have."""
    for kind in sorted(set(getattr(config, "layer_types", None) or ()) - _SLICEABLE_KINDS - _WITHOUT_TOKENS):
        return f"it has {_KINDS.get(kind, 'layers of a kind that is not known here')} ({kind} in layer_types)"
    return None


def _of_fields(config: Any) -> str | None:
    """Reason from other fields of the configuration."""
    is_windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    width = (getattr(config, "qk_nope_head_dim", None) or 0) + (getattr(config, "qk_rope_head_dim", None) or 0)
    values = getattr(config, "v_head_dim", None)
    found = {
        f"it has {_BIAS}": getattr(config, "alibi", False),
        "its tokens see later ones (use_bidirectional_attention)": getattr(
            config, "use_bidirectional_attention", False
        ),
        "its windows are in its masks alone (sliding_attention in layer_types), which attention here does not read": (
            is_windowed and config.model_type in _WINDOWS_IN_MASKS
        ),
        "it has an encoder, whose tokens see later ones (is_encoder_decoder)": config.is_encoder_decoder,
        "its tokens see later ones (is_decoder is false)": getattr(config, "is_decoder", None) is False,
        "it is more than a text model": config.get_text_config(decoder=True) is not config,
        "its layers share keys and values (num_kv_shared_layers), so gradients of other layers belong to them, too": (
            getattr(config, "num_kv_shared_layers", 0)
        ),
        f"its heads of values ({values}) are not as wide as those of keys ({width}), which no kernel here takes": (
            width and values and width != values
        ),
    }
    return next((reason for reason, holds in found.items() if holds), None)


def _of_code(config: Any) -> str | None:
    """Reason from the family's code: attention must go through transformers' attention interface."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "transformers has no causal language model of it"
    if not MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_attention_backend:
        return "its code computes attention itself instead of by transformers' attention interface"
    return None
