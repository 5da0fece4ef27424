"""Adapters of linear layers: LoRA (arXiv 2106.09685) and DoRA (arXiv 2402.09353).

    LoRA    y = W x + b + scale * B (A x)             A [rank, in], B [out, rank]: trained; W and b: frozen
    DoRA    y = m / n * (W x + scale * B (A x)) + b   m [out]: trained, at first n; n [out]: norms of W + scale * B A

A matrix of fused experts gets LoRA for each expert (`experts.ExpertsFactor`).

Names, order of products and initial values are the same as in peft, so adapter files are interchangeable. `adapt` adds
adapters to the selected linears and freezes all other parameters. It sets `requires_grad` to False on the meta device,
where blocks read it.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mobius.config.config import AdapterConfig, FinetuningType, pattern_value, split_names
from mobius.errors import ConfigError
from mobius.models.adapter_dropout import ForwardWithKeys, drop, linear_key
from mobius.models.experts import adapt_experts, fused_experts, is_of_experts, matrix_names
from mobius.models.linear import GradientFactorLinear, ProductFormat
from mobius.models.prefixes import add_prefixes, prefix_width
from mobius.models.reward_head import SCORE
from mobius.models.structure import ModelStructure
from mobius.process.log import RANK_ZERO_ONLY

NO_LINEARS = "none"
"""Word of `--lora_target` for an adapter of experts alone."""
LORA_A, LORA_B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"
_LEAST_SQUARE = 1e-30
"""Least square of a row's norm, for rows of zeros, which stay zeros."""
_ADAPTER = re.compile(rf"(?P<linear>.+)\.(?:(?:{LORA_A}|{LORA_B})\.weight|{MAGNITUDE})")


class LoraLinear(GradientFactorLinear):
    """A linear layer with frozen weight and bias, and the two trained factors of the weight's update."""

    def __init__(self, linear: nn.Linear, *, rank: int, scale: float, dropout: float = 0.0, key: int = 0) -> None:
        """Create a layer on the meta device that replaces `linear`.

        `dropout` is the probability that an element of the adapter's input is dropped, `key` as in `adapter_dropout`.
        """
        options = {"device": "meta", "dtype": linear.weight.dtype}
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, **options)
        self.requires_grad_(False)
        self.lora_A = GradientFactorLinear(linear.in_features, rank, bias=False, **options)
        self.lora_B = GradientFactorLinear(rank, linear.out_features, bias=False, **options)
        self.scale, self.dropout, self.key = scale, dropout, key
        self.dropout_keys: Tensor | None = None
        """Keys of the tokens while a layer runs with dropout (`ForwardWithKeys`)."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        # The order of these products also fixes the order in which input gradients are summed.
        output = super().forward(input)
        added: Tensor = self.lora_B(self.lora_A(self._dropped(input)))
        return output + added * self.scale

    def _dropped(self, input: Tensor) -> Tensor:
        """Return the adapter's input for this layer's input."""
        return input if self.dropout_keys is None else drop(input, self.dropout_keys, self.key, self.dropout)


class DoraLinear(LoraLinear):
    """A linear layer with a frozen direction: its rows have trained lengths, and low-rank updates before that."""

    def __init__(self, linear: nn.Linear, **options: Any) -> None:
        """Create a layer on the meta device that replaces `linear`; `options` as in `LoraLinear`."""
        super().__init__(linear, **options)
        self.lora_magnitude_vector = nn.Parameter(torch.empty_like(self.weight[:, 0]))

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        dropped = self._dropped(input)
        added: Tensor = self.lora_B(self.lora_A(dropped)) * self.scale
        output = ProductFormat.output(input, self.weight, None) + added
        # As in peft, what changes a row's length is computed from the adapter's input.
        changed = output if dropped is input else ProductFormat.output(dropped, self.weight, None) + added
        # The difference to 1 is small, so its rounding to the working dtype hardly matters.
        change = (self.lora_magnitude_vector.float() / self._row_norms() - 1).to(output.dtype)
        output = output + change * changed
        return output if self.bias is None else output + self.bias

    def _row_norms(self) -> Tensor:
        """Norms of the rows of W + scale * B A in fp32 [out], without gradients, as in the paper; W + ... never exists.

        |w + s b A|^2 = |w|^2 + 2 s (w A^T) b + s^2 b (A A^T) b for a row w of W and a row b of B.
        """
        weight, first = self.weight.detach(), self.lora_A.weight.detach()
        second = self.lora_B.weight.detach().float() * self.scale
        products = 2 * (weight @ first.t()).float() + second @ (first.float() @ first.float().t())
        squares: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
        return (squares + (products * second).sum(1)).clamp(min=_LEAST_SQUARE).sqrt()


def adapted_linear(name: str) -> str | None:
    """Name of the linear layer whose adapter contains the parameter `name`; None for other parameters."""
    match = _ADAPTER.fullmatch(name)
    return None if match is None else match["linear"]


def adapted_widths(shapes: Mapping[str, tuple[int, ...]], num_experts_per_token: int = 1) -> tuple[int, int]:
    """Return the input widths, summed, and the output widths of linears with adapters among parameters of `shapes`.

    Widths of experts count for each expert of a token.
    """
    ends = {f".{LORA_A}.weight": 1, f".{LORA_B}.weight": 0}
    inputs, outputs = (
        sum(
            shape[axis] * (num_experts_per_token if is_of_experts(name) else 1)
            for name, shape in shapes.items()
            if name.endswith(end)
        )
        for end, axis in ends.items()
    )
    return inputs, outputs


def magnitudes_in_fp32(model: nn.Module, dtype: torch.dtype) -> frozenset[str]:
    """Return the names of trained row lengths (DoRA), which are fp32 in a run in a 16-bit `dtype`.

    In bf16 a row would be up to 0.4 % too long or too short before any training.
    """
    names = (name for name, _ in model.named_parameters() if name.endswith(f".{MAGNITUDE}"))
    return frozenset(names if dtype.itemsize < torch.float32.itemsize else ())


def saved_widths(shapes: Mapping[str, tuple[int, ...]], config: AdapterConfig) -> int:
    """Return the elements per token that the adapters of a layer save for backward, besides those of LoRA alone."""
    inputs, outputs = adapted_widths(shapes)
    dropped = (inputs + outputs * config.use_dora) if config.lora_dropout else 0
    return dropped + outputs * config.use_dora


def learning_rate_factors(shapes: Mapping[str, tuple[int, ...]], config: AdapterConfig) -> dict[str, float]:
    """Return parameter -> factor of its learning rate, where it is not 1: LoRA+ (arXiv 2402.12354), as in peft.

    peft also gives trained vectors (norms, biases) the rate of B.
    """
    if config.loraplus_lr_ratio == 1:
        return {}
    fast = (name for name, shape in shapes.items() if len(shape) == 1 or name.endswith(f".{LORA_B}.weight"))
    return dict.fromkeys(fast, config.loraplus_lr_ratio)


logger = logging.getLogger(__name__)

_NAMES = re.compile(r"[\w.]+", re.ASCII)
_PARTS = ("embedding", "head", "norms")
"""Words for parts of a model that are not layers."""
_LAYERS = re.compile(r"layers\.(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)
_LISTED = 6
"""Maximum number of names listed in a message."""


def adapt(model: PreTrainedModel, structure: ModelStructure, config: AdapterConfig, *, trains: bool = True) -> None:
    """Add adapters to `model` (on the meta device) and freeze all parameters that `config` does not train.

    Unless the run `trains`, only the final norm is not frozen (a norm without parameters: the head), because a model
    without any trained parameter is not supported. Raises ConfigError for a target that does not exist or cannot be
    trained.
    """
    if config.is_lora:
        _add_adapters(model, structure, config)
        return
    if config.is_prompt:
        model.requires_grad_(False)  # a prompt's vectors are part of the embedding's block (`prompts.py`)
        if config.finetuning_type is FinetuningType.PREFIX:
            whole = torch.empty(config.num_virtual_tokens, prefix_width(model.config), device="meta")
            add_prefixes(model.config, [*model.get_submodule(structure.layers).children()], whole)
        return
    if not trains:
        model.requires_grad_(False)
        last = [*model.get_submodule(structure.norm).parameters()] or [
            *model.get_submodule(structure.head).parameters()
        ]
        for parameter in last:
            parameter.requires_grad_(True)
        return
    for word in config.frozen_parts:
        for parameter in _parameters(model, structure, word):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"`--freeze` {config.freeze} leaves nothing to train; name fewer parts")


def _add_adapters(model: nn.Module, structure: ModelStructure, config: AdapterConfig) -> None:
    """Add adapters; only they and the parts of `--additional_target` are trained. Raises ConfigError."""
    if both := [word for word in split_names(config.lora_target) if word in config.additional_parts]:
        raise ConfigError(
            f"`--lora_target` {both[0]} is also in --additional_target, which trains it in full, without an adapter; "
            "remove it from one of them"
        )
    matrices = _wanted_matrices(model, config)
    new_head = ("head",) if structure.head == SCORE else ()  # of a reward model; the base has none
    whole = [each for word in (*config.additional_parts, *new_head) for each in _additional(model, structure, word)]
    in_full = set(whole)
    targets = {
        name: linear
        for name, linear in _wanted(_linears(model, structure), config.lora_target).items()
        if linear.weight not in in_full
    }
    if not targets and not matrices:
        raise ConfigError(
            f"`--lora_target` {config.lora_target} leaves no layer with an adapter; name linear layers, or matrices of "
            "experts (--lora_target_parameters)"
        )
    _check_patterns([*targets, *matrices], config)
    if (config.use_dora or config.lora_dropout) and (taken := taken_for_experts(model, targets)):
        logger.warning(
            "peft 0.21 takes adapters of %s and %d other linear layers for those of experts, with DoRA or dropout, so "
            "the folder cannot be loaded there: merge it (--merge), or leave these layers out (--lora_target)",
            *(taken[0], len(taken) - 1),
            extra=RANK_ZERO_ONLY,
        )
    model.requires_grad_(False)
    for name, experts in fused_experts(model).items():
        own = {matrix: f"{name}.{matrix}" for matrix in matrix_names(experts) if f"{name}.{matrix}" in matrices}
        for full_name in own.values():
            _check_rank(full_name, tuple(matrices[full_name].shape[1:]), config.rank_of(full_name))
        adapt_experts(experts, {each: (config.rank_of(own[each]), config.scale_of(own[each])) for each in own})
    for name, linear in targets.items():
        rank = config.rank_of(name)
        _check_rank(name, (linear.out_features, linear.in_features), rank)
        kind = DoraLinear if config.use_dora else LoraLinear
        _, _, local = name.removeprefix(f"{structure.layers}.").partition(".")
        options: dict[str, Any] = {"dropout": config.lora_dropout, "key": linear_key(local)}
        adapted = kind(linear, rank=rank, scale=config.scale_of(name), **options)
        model.set_submodule(name, adapted.train(linear.training))
    for layer in model.get_submodule(structure.layers).children() if config.lora_dropout else ():
        linears = [module for module in layer.modules() if isinstance(module, LoraLinear)]
        vars(layer)["forward"] = ForwardWithKeys(layer, linears)
    for parameter in whole:
        parameter.requires_grad_(True)


def _check_patterns(targets: Iterable[str], config: AdapterConfig) -> None:
    """Raise ConfigError for a name in a pattern that matches no linear layer with an adapter."""
    for option in ("lora_rank_pattern", "lora_alpha_pattern"):
        for name, _ in getattr(config, option) or ():
            if not any(pattern_value(((name, name),), target, "") for target in targets):
                kinds = list(dict.fromkeys(target.rpartition(".")[2] for target in targets))
                raise ConfigError(
                    f"`--{option}` {name} matches no linear layer with an adapter; their names end in {_listed(kinds)}"
                )


def _wanted_matrices(model: nn.Module, config: AdapterConfig) -> dict[str, nn.Parameter]:
    """Return the matrices of fused experts that `--lora_target_parameters` selects, by full name.

    Without the option, logs that experts stay frozen. Raises ConfigError if a name matches none, or if `--lora_target`,
    which is for linear layers, names experts.
    """
    words, target, fused = split_names(config.lora_target_parameters), config.lora_target, fused_experts(model)
    matrices = {f"{name}.{own}": each.get_parameter(own) for name, each in fused.items() for own in matrix_names(each)}
    if not fused:
        if words:
            raise ConfigError(
                f"`--lora_target_parameters` {words[0]}: this model has no experts in one tensor per layer, the only "
                "parameters outside of linear layers that get adapters; use --lora_target"
            )
        return {}
    first = next(iter(matrices))
    reason = f"experts are stored in one tensor per layer ({first}), which is no linear layer"
    linears = {name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    named = {"experts", *(name.rpartition(".")[2] for name in matrices)} - linears
    if wrong := [word for word in split_names(target) if named & {*word.split(".")}]:
        raise ConfigError(
            f"`--lora_target` {wrong[0]} names experts: {reason}. Add --lora_target_parameters all, or names such as "
            f"{end_of(first)}, and name linear layers here (all selects all of them, none selects none)"
        )
    if not words:
        logger.info(
            "only linear layers get adapters: %s and stays frozen (--lora_target_parameters all adapts it)",
            *(reason,),
            extra=RANK_ZERO_ONLY,
        )
    if words == ("all",):
        return matrices
    found = {word: [name for name in matrices if f".{name}".endswith(f".{word}")] for word in words}
    if unknown := [word for word in words if not found[word]]:
        ends = list(dict.fromkeys(map(end_of, matrices)))
        raise ConfigError(
            f"`--lora_target_parameters` {unknown[0]} is no matrix of experts; it has {_listed(ends)}. Linear layers "
            "are named in --lora_target"
        )
    return {name: each for name, each in matrices.items() if any(name in own for own in found.values())}


_LIKE_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Last names of linear layers that experts had before they were one tensor."""


def taken_for_experts(model: nn.Module, linears: Iterable[str]) -> list[str]:
    """Names in `linears` that peft 0.21 would take for those of experts when it loads an adapter for `model`."""
    has_experts = bool(fused_experts(model))
    return [name for name in linears if has_experts and name.rpartition(".")[2] in _LIKE_EXPERTS]


def end_of(name: str) -> str:
    """Name of a matrix of experts without its layer."""
    return ".".join(name.split(".")[-2:])


def _linears(model: nn.Module, structure: ModelStructure) -> dict[str, nn.Linear]:
    """Linears within the model's layers, by full name."""
    layers = model.get_submodule(structure.layers)
    return {
        f"{structure.layers}.{name}": module for name, module in layers.named_modules() if isinstance(module, nn.Linear)
    }


def _wanted(linears: Mapping[str, nn.Linear], target: str) -> dict[str, nn.Linear]:
    """The linears that `--lora_target` selects, also none. Raises ConfigError for a name that matches nothing."""
    if target.strip() == NO_LINEARS:
        return {}
    if target.strip() in ("all", "all-linear"):
        # A gate with one output per token is smaller than any rank above 1, so it gets no adapter.
        return {name: linear for name, linear in linears.items() if linear.out_features > 1}
    words = split_names(target)
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in linears))
    if not all(map(_NAMES.fullmatch, words)):
        try:
            pattern = re.compile(target.strip())
        except re.error as error:
            raise ConfigError(f"`--lora_target` {target} is not a valid regular expression: {error}") from error
        found = {name: linear for name, linear in linears.items() if pattern.fullmatch(name)}
        if not found:
            example = next(iter(linears), "")
            raise ConfigError(
                f"`--lora_target` {target} matches no full name of a linear layer. Such a name is {example}; the names "
                f"end in {_listed(kinds)}"
            )
        return found
    matches = {word: [name for name in linears if f".{name}".endswith(f".{word}")] for word in words}
    if unknown := [word for word, found in matches.items() if not found]:
        near = difflib.get_close_matches(unknown[0], kinds, n=_LISTED, cutoff=0.4)
        hint = f"did you mean {_listed(near)}? It" if near else "it"
        reason = "the embedding and the head are outside the layers (--additional_target trains them in full)"
        is_outer = unknown[0] in ("embed_tokens", "lm_head", *_PARTS)
        hint_or_reason = reason if is_outer else f"{hint} has {_listed(kinds)}"
        raise ConfigError(f"`--lora_target` {unknown[0]} is no linear layer of this model; {hint_or_reason}")
    chosen = {name for found in matches.values() for name in found}
    return {name: linear for name, linear in linears.items() if name in chosen}


def _check_rank(name: str, shape: tuple[int, ...], rank: int) -> None:
    if rank > min(shape):
        raise ConfigError(
            f"`--lora_rank` {rank} is too large for {name}, a matrix of {shape[0]} x {shape[1]}; use at most "
            f"{min(shape)}, or other layers (--lora_target)"
        )


def _additional(model: nn.Module, structure: ModelStructure, word: str) -> list[nn.Parameter]:
    """Parameters that `word` of `--additional_target` names: a part, or modules by the end of their names, as in peft.

    Raises ConfigError.
    """
    modules = dict(model.named_modules())
    outer = [modules[name] for name in (structure.embedding, structure.head)]
    if word in _PARTS:
        found = [*_parameters(model, structure, word)]
    else:
        fused = fused_experts(model)
        named = [name for name in modules if name.endswith(word)]
        if within := [each for each in fused if any(f"{each}.".startswith(f"{name}.") for name in named)]:
            raise ConfigError(f"`--additional_target` {word} contains fused experts ({within[0]}), which stay frozen")
        found = [*dict.fromkeys(parameter for name in named for parameter in modules[name].parameters())]
    if not found:
        kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in _linears(model, structure)))
        near = difflib.get_close_matches(word, kinds, n=1, cutoff=0.4)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(
            f"`--additional_target` {word} is not a part of the model{hint}; use {', '.join(_PARTS)}, or linear layers "
            f"such as {_listed(kinds)}"
        )
    if _is_tied(model) and {*found} & {parameter for module in outer for parameter in module.parameters()}:
        raise ConfigError(
            f"`--additional_target` {word}: this model has one matrix for embedding and head, but an adapter file "
            "cannot store a shared matrix; train all parameters (--finetuning_type full), or only adapters"
        )
    return found


def _is_tied(model: nn.Module) -> bool:
    """Whether embedding and head share one matrix; on the meta device they are still two parameters."""
    return bool(getattr(model.config, "tie_word_embeddings", False))


def _parameters(model: nn.Module, structure: ModelStructure, word: str) -> Iterable[nn.Parameter]:
    """Parameters of the part that `word` of `--freeze` names. Raises ConfigError."""
    if word in ("embedding", "head"):
        both = {"embedding": structure.embedding, "head": structure.head}
        wanted = both.values() if _is_tied(model) else [both[word]]
        return [parameter for name in wanted for parameter in model.get_submodule(name).parameters()]
    layers: Sequence[nn.Module] = [*model.get_submodule(structure.layers).children()]
    if word == "norms":
        norms = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
        return [parameter for norm in norms for parameter in norm.parameters(recurse=False)]
    match = _LAYERS.fullmatch(word)
    span = None if match is None else range(int(match[1]), int(match[2] or match[1]) + 1)
    if span is None:
        allowed = f"{', '.join(_PARTS)}, layers.0-15, layers.3"
        raise ConfigError(f"`--freeze` {word} is not a part of the model; use {allowed}")
    if not span or span[-1] >= len(layers):
        raise ConfigError(f"`--freeze` {word}: the model has layers.0-{len(layers) - 1}")
    return [parameter for index in span for parameter in layers[index].parameters()]


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:_LISTED]) + (", ..." if len(words) > _LISTED else "")
