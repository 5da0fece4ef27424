"""Families that can be trained, text parts of multimodal models, and families without slices or packing.

`scripts/check_families` splits a tiny model of each family into stages and compares it with transformers. A family is
supported if the loss and every gradient are bit-equal.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mobius.models.layer_config import head_size, mixers_of

FAMILIES_PATH = Path(__file__).with_name("families.json")
TEXT_PARTS_PATH = Path(__file__).with_name("text_parts.json")


@dataclass(frozen=True)
class CheckedFamilies:
    """Contents of families.json."""

    transformers: str
    """Version of transformers in the comparison."""
    supported: Mapping[str, Mapping[str, str]]
    """Family -> check -> "yes", or the reason why the check fails."""
    refused: Mapping[str, str]
    """Family -> reason, which continues a sentence that begins with "the family"."""

    def unsupported_reason(self, family: str) -> str | None:
        """Reason (a clause) why `family` cannot be trained, or None if it can."""
        if family in self.supported:
            return None
        if family in self.refused:
            return f"it {self.refused[family]}"
        return f"it was not compared with transformers {self.transformers}, as every supported family was"

    def untileable_reason(self, family: str) -> str | None:
        """Reason why layers of a supported family cannot run in tiles, or None if they can."""
        found = self.supported.get(family, {}).get("tiles", "yes")
        return None if found == "yes" else found

    def wrong_result(self, family: str, check: str) -> str | None:
        """Wrong loss or gradients that a check of a supported family gave; None if they are right."""
        found = self.supported.get(family, {}).get(check, "yes")
        return found if found.startswith("its ") and not found.startswith("its value heads") else None

    def made_in_fp32(self, family: str) -> Sequence[str]:
        """Parts of the names of parameters that the family's code makes in fp32 for every format of the others."""
        return self.supported.get(family, {}).get("fp32", "").split()

    @property
    def names(self) -> str:
        """Names of the supported families, separated by commas."""
        return ", ".join(self.supported)


@functools.cache
def checked_families() -> CheckedFamilies:
    """Read families.json."""
    fields = json.loads(FAMILIES_PATH.read_text(encoding="utf-8"))
    return CheckedFamilies(fields["transformers"], fields["supported"], fields["refused"])


EQUIVALENT_FAMILIES: Mapping[str, str] = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
"""Family of a text part for which transformers has no causal language model -> family with the same results for text.
Without images, the positions on all three axes are equal. `scripts/check_families` compares the two."""

_OF_THE_WHOLE = ("bos_token_id", "eos_token_id", "pad_token_id")
_OF_THREE_AXES = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class TextConfig:
    """The text part of a multimodal model."""

    full_model_type: str
    """Family of the multimodal model."""
    fields: dict[str, Any]
    """Fields of config.json for the text part as a separate model."""
    ignored_configs: tuple[str, ...]
    """Names of the other parts' configurations, for example `vision_config`."""


@functools.cache
def checked_text_parts() -> Mapping[str, Mapping[str, str]]:
    """Multimodal family -> result of its check: the family of its `text` part and `parity`, or a `refused` reason.

    `scripts/check_families` writes the file.
    """
    return cast(Mapping[str, Mapping[str, str]], json.loads(TEXT_PARTS_PATH.read_text(encoding="utf-8")))


def is_text_config_supported(family: object) -> bool:
    """Whether Mobius trains the text part of models of this family."""
    return isinstance(family, str) and "parity" in checked_text_parts().get(family, {})


def supported_text_config(fields: Mapping[str, Any]) -> TextConfig | None:
    """Text part of the model that `fields` of a config.json describe; None for text models and unchecked families.

    For wrong values, raises any error of the family's configuration class.
    """
    whole = fields.get("model_type")
    if not is_text_config_supported(whole) or whole not in CONFIG_MAPPING:
        return None
    return extract_text_config(fields)


def text_config_of(config: PretrainedConfig) -> PretrainedConfig:
    """Configuration of the text part as a text model; `config` itself for a text model."""
    part = supported_text_config(config.to_dict())
    return config if part is None else CONFIG_MAPPING[part.fields["model_type"]].from_dict(copy.deepcopy(part.fields))


def extract_text_config(fields: Mapping[str, Any]) -> TextConfig | None:
    """Text part of a multimodal model, checked or not; None if the part is not a causal language model."""
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
    # transformers reads the field of the whole model. `load_model_config` detects a checkpoint with two matrices.
    made["tie_word_embeddings"] = bool(
        getattr(config, "tie_word_embeddings", False) or given.get("tie_word_embeddings", False)
    )
    made["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    others = [
        name for name in getattr(kind, "sub_configs", {}) if name != "text_config" and getattr(config, name, None)
    ]
    return TextConfig(str(fields["model_type"]), made, tuple(others))


def _as_family(fields: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Keep only the fields that `family` declares, without settings for positions on several axes."""
    kind = cast(Any, CONFIG_MAPPING[family])
    declared = {field.name for field in dataclasses.fields(kind)}
    general = {field.name for field in dataclasses.fields(cast(Any, PretrainedConfig))}
    made = {name: value for name, value in fields.items() if name in {*(declared - general), "per_layer_config"}}
    rope = made.get("rope_parameters")
    if (
        isinstance(rope, dict)
        and any(name in rope for name in _OF_THREE_AXES)
        and family in EQUIVALENT_FAMILIES.values()
    ):
        plain = {name: value for name, value in rope.items() if name not in (*_OF_THREE_AXES, "type")}
        made["rope_parameters"] = plain | {"rope_type": "default"} if plain.get("rope_type") == "mrope" else plain
    return {"model_type": family, **made}


_ACROSS_STAGES: Mapping[str, str] = {
    "hidden_size_per_layer_input": "each layer also reads an input of its own, made from the tokens (per-layer input)",
    "num_kv_shared_layers": "its last layers read keys and values of layers before them",
}
"""Field that must be 0 -> what a layer would get from another stage."""


def unsplittable_reason(config: PretrainedConfig) -> str | None:
    """None if only hidden states go from layer to layer; else sentences with the reason."""
    for name, what in _ACROSS_STAGES.items():
        if value := getattr(config, name, None):
            return (
                f"{name!r} is {value}: {what}, which is not sent from stage to stage. Models of the family "
                f"{config.model_type!r} can be trained if {name!r} is 0."
            )
    return None


_SLICEABLE_KINDS = {"full_attention", "sliding_attention"}
_WITH_STATE = {"linear_attention", "conv"}
_WITHOUT_TOKENS = {"mlp", "moe"}
"""Kinds of layers in which tokens do not interact."""
_STATE = "layers that carry a state from token to token, which slices would have to pass on and differentiate, too"
_WINDOWS_IN_MASKS = ("qwen2_moe",)
"""Families whose code passes attention windows only as masks."""


def unsliceable_reason(config: PretrainedConfig, *, on_gpu: bool = False, packed: bool = False) -> str | None:
    """None if all layers of a supported family support slices; else a message with the reason and an alternative.

    Mixers (models/mixers.py) support slices on CPUs, of rows that are not `packed`. The configuration does not show all
    reasons; splitting a layer at its attention finds the others.
    """
    reason = _reason(config, "slices")
    if reason is None and mixers_of(config) and (on_gpu or packed):
        where = "on CPUs only" if on_gpu else "only of rows that are not packed (--packing off)"
        reason = f"its layers that carry a state from token to token run on slices {where}"
    if reason:
        return (
            f"rows of the family {config.model_type!r} cannot be split into slices: {reason}. Choose a --seq_length "
            "whose whole rows fit, or another family, such as llama, mistral, qwen3 or gemma3_text."
        )
    return None


def unpackable_reason(config: PretrainedConfig, *, on_gpu: bool = False) -> str | None:
    """None if all layers can separate the documents of a row; else a message with the reason and an alternative.

    Attention separates documents, and must be of a kind that supports slices; mixers (models/mixers.py), on CPUs.
    """
    reason = _reason(config, "packing")
    if reason is None and on_gpu and mixers_of(config):
        reason = "its layers that carry a state from token to token separate samples on CPUs only"
    if reason:
        return (
            f"rows of the family {config.model_type!r} cannot hold several samples: {reason}. Use --packing off, or "
            "joined for plain text"
        )
    return None


def _reason(config: Any, check: str) -> str | None:
    """Reason why rows cannot be treated as in the `check`, slices or packing; a clause."""
    if wrong := checked_families().wrong_result(config.model_type, check):
        return f"a tiny model of it gave other results than transformers ({wrong})"
    kinds = set(getattr(config, "layer_types", None) or ())
    for kind in sorted(kinds - _SLICEABLE_KINDS - _WITHOUT_TOKENS - mixers_of(config).keys()):
        what = _STATE if kind in _WITH_STATE else "layers of an unknown kind"
        return f"it has {what} ({kind} in layer_types)"
    if "sliding_attention" in kinds and config.model_type in _WINDOWS_IN_MASKS:
        return (
            "only its masks contain its windows (sliding_attention in layer_types), but attention here reads no masks"
        )
    width, values = head_size(config), getattr(config, "v_head_dim", None)
    if values and width != values:
        return f"its value heads ({values}) are not as wide as its key heads ({width}), which no kernel here supports"
    return None
