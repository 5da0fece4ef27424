"""Table of allowed values for fields of config.json; with it, an error names the wrong field.

Sizes beyond any real model are refused, because building such a model would take minutes or too much memory.
transformers' classes check the types of other fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mobius.models.layer_config import MIXERS, layer_configs
from mobius.models.model_files import format_json_value
from mobius.models.rotary import rope_parameters


@dataclass(frozen=True)
class Rule:
    """Allowed values of a field: words that complete the sentence "it must be ...", and a test."""

    wanted: str
    allows: Callable[[Any], bool]


def _integer(low: int, high: int) -> Rule:
    return Rule(f"an integer from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def _number(wanted: str, test: Callable[[float], bool]) -> Rule:
    return Rule(wanted, lambda value: _is_number(value) and test(value))


def _or_null(rule: Rule) -> Rule:
    return Rule(rule.wanted, lambda value: value is None or rule.allows(value))


def _is_number(value: object) -> bool:
    """Whether a JSON value is a number within the range of a float; booleans are not numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


_ACTIVATION = Rule("the name of an activation, such as silu", lambda value: isinstance(value, str) and value in ACT2FN)
_KINDS = ("full_attention", "sliding_attention", "linear_attention")


def _kinds_of_layers(known: Collection[str]) -> Rule:
    return Rule(
        f"a list of {' and '.join(known)}, one for each layer",
        lambda kinds: kinds is None or (isinstance(kinds, list) and all(kind in known for kind in kinds)),
    )


_SHARE = _number("a number from 0 to 1", lambda value: 0 <= value <= 1)
_POSITIVE = _number("a positive number", lambda value: value > 0)

_WIDEST, _MOST_HEADS = 2**20, 2**14
_RULES: Mapping[str, Rule] = {
    "vocab_size": _integer(1, 2**28),
    "hidden_size": _integer(1, _WIDEST),
    "intermediate_size": _integer(1, 16 * _WIDEST),
    "num_hidden_layers": _integer(1, 1024),
    "num_attention_heads": _integer(1, _MOST_HEADS),
    "num_key_value_heads": _or_null(_integer(1, _MOST_HEADS)),
    "head_dim": _or_null(_integer(1, _MOST_HEADS)),
    "max_position_embeddings": _integer(1, 2**40),
    "sliding_window": _or_null(_integer(0, 2**40)),  # 0 in families whose windows are not used
    "hidden_act": _ACTIVATION,
    "hidden_activation": _ACTIVATION,
    "rms_norm_eps": _or_null(_SHARE),  # null in families that have layer_norm_eps too
    "initializer_range": _SHARE,
    "attention_dropout": _or_null(_SHARE),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "residual_dropout", "embedding_dropout"), _or_null(_SHARE)),
    **dict.fromkeys(("layer_norm_eps", "norm_epsilon"), _SHARE),
    "query_pre_attn_scalar": _POSITIVE,
    **dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier"), _POSITIVE),
    **dict.fromkeys(("scale_emb", "scale_depth", "dim_model_base"), _POSITIVE),
    **dict.fromkeys(("attention_multiplier", "logit_scale", "clip_qkv"), _or_null(_POSITIVE)),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim"), _or_null(_integer(1, _WIDEST))),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), _integer(1, _MOST_HEADS)),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), _or_null(_POSITIVE)),
    "router_aux_loss_coef": _or_null(_number("a number from 0", lambda value: value >= 0)),
    "use_bidirectional_attention": Rule(
        # Text is causal where the attention among an image's tokens is not.
        "false: only causal models are trained",
        lambda value: not value or value == "vision",
    ),
    "layer_types": _kinds_of_layers(_KINDS),
    "rope_theta": _POSITIVE,
    "partial_rotary_factor": _or_null(_number("a number above 0, up to 1", lambda value: 0 < value <= 1)),
}

_ALSO_READ = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
"""Fields that the classes of all families accept without declaring them."""

_ROPE_TYPES = ("default", *ROPE_INIT_FUNCTIONS)
_WITHOUT_SCALING = ("default", "proportional")
_ROPE_RULES: Mapping[str, Rule] = {
    "rope_type": Rule(
        f"one of {', '.join(_ROPE_TYPES)}", lambda value: isinstance(value, str) and value in _ROPE_TYPES
    ),
    "rope_theta": _POSITIVE,
    "factor": _number("a number of at least 1", lambda value: value >= 1),
    "partial_rotary_factor": _RULES["partial_rotary_factor"],
    "original_max_position_embeddings": _RULES["max_position_embeddings"],
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), _POSITIVE),
    **dict.fromkeys(("attention_factor", "beta_fast", "beta_slow"), _or_null(_POSITIVE)),
}


def find_invalid_fields(fields: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Return a sentence for each invalid field; `known` are the fields that the family's class declares."""
    read = {name: value for name, value in fields.items() if name in known or name in _ALSO_READ}
    rules, vocab_size = dict(_RULES), read.get("vocab_size")
    if (family := fields.get("model_type")) in MIXERS:
        rules["layer_types"] = _kinds_of_layers({**dict.fromkeys(_KINDS), **MIXERS[family]})
    if isinstance(vocab_size, int):
        # A negative id counts from the end of the embedding, as in torch; older checkpoints have -1.
        rules["pad_token_id"] = _or_null(_integer(-vocab_size, max(vocab_size, 1) - 1))
    given = [(name, read[name], rule) for name, rule in rules.items() if name in read]
    problems = [_complaint(name, value, rule) for name, value, rule in given if not rule.allows(value)]
    kinds, num_layers = read.get("layer_types"), read.get("num_hidden_layers")
    if isinstance(kinds, list) and isinstance(num_layers, int) and len(kinds) != num_layers:
        problems.append(f"'layer_types' names {len(kinds)} layers, 'num_hidden_layers' is {num_layers}")
    for name in ("rope_parameters", "rope_scaling"):
        if read.get(name) is not None:
            problems += _wrong_rope(name, read[name])
    return problems


def find_inconsistent_fields(config: Any) -> list[str]:
    """Return a sentence for each pair of fields that contradict each other, defaults included."""
    problems = list[str]()
    for layer in layer_configs(config):
        heads = layer.num_attention_heads
        key_value_heads = getattr(layer, "num_key_value_heads", None) or heads
        if heads % key_value_heads:
            problems.append(f"'num_key_value_heads' {key_value_heads} does not divide 'num_attention_heads' {heads}")
        width = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        if width % 2:
            problems.append(
                f"the head size ('head_dim' or hidden size / heads) is {width}; rotary embeddings need it even"
            )
    return list(dict.fromkeys(problems))


def max_positions_warning(config: Any, seq_length: int) -> str | None:
    """Return a warning if rows of `seq_length` tokens exceed the model's position limit, else None.

    All supported families have rotary positions, which extend beyond the limit; learned positions would not.
    """
    scaled = [own for own in rope_parameters(config) if own["rope_type"] not in _WITHOUT_SCALING]
    if any("dynamic" in own["rope_type"] for own in scaled):
        return None  # dynamic scaling adapts to any length
    reached = (own["factor"] * own.get("original_max_position_embeddings", 0) for own in scaled if own.get("factor"))
    longest = max([config.max_position_embeddings, *map(int, reached)])
    if seq_length <= longest:
        return None
    made_for = f"--seq_length {seq_length} is more than the {longest} positions that the model supports"
    if scaled:
        return (
            f"{made_for} (rope_type {scaled[0]['rope_type']!r} in its config.json scales no further). Use --seq_length "
            f"{longest} or less, or set factor and max_position_embeddings in config.json for the new length."
        )
    return (
        f"{made_for} (max_position_embeddings in its config.json): later positions are trained without scaling. "
        f"Use --seq_length {longest} or less, or set rope_parameters in config.json to a scaling type (such as yarn) "
        "and max_position_embeddings to the new length."
    )


def _complaint(name: str, value: object, rule: Rule) -> str:
    return f"{name!r} is {format_json_value(value)}, it must be {rule.wanted}"


def _wrong_rope(name: str, parameters: object) -> Iterator[str]:
    """Yield the problems of rotary parameters: one object for all layers, or one object per layer kind."""
    if not isinstance(parameters, dict):
        yield f"{name!r} is {format_json_value(parameters)}, it must be an object"
        return
    for key, value in parameters.items():
        path = f"{name}.{key}"
        if key in _KINDS:
            if value is not None:
                yield from _wrong_rope(path, value)
        elif rule := _ROPE_RULES.get("rope_type" if key == "type" else key):
            if not rule.allows(value):
                yield _complaint(path, value, rule)
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{path!r} is {format_json_value(value)}, it must be finite"
