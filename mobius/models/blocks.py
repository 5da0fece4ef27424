"""Takes a transformers model apart into an embedding, layers and a head, which run on weights passed in.

The model is built on the meta device, so it costs no memory. Layers that differ in nothing but their index share one
template.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from mobius.config.config import AdapterConfig
from mobius.errors import CheckpointError
from mobius.models.adapters.lora import adapted_linear
from mobius.models.adapters.targets import PartNames, adapt
from mobius.models.attention import (
    ATTENTION_IMPLEMENTATION,
    BlockMasks,
    DocumentAttention,
    DocumentLayout,
    choose_attention,
    register_attention,
)
from mobius.models.attention_split import LayerAttention, split_layer
from mobius.models.compiled import CompiledFunction, CompiledModule, KeywordArguments
from mobius.models.experts.forward import register_experts_implementation
from mobius.models.experts.gradient_factors import find_experts_gradient_factors
from mobius.models.experts.router_loss import install_router_loss
from mobius.models.linear import (
    GradientFactorLinear,
    GradientFactors,
    LinearGradientFactors,
    find_linear_gradient_factors,
    replace_linears,
)
from mobius.models.loss import LogitsLoss
from mobius.models.shapes.experts import count_experts
from mobius.models.sliced_attention.slice_support import unsliceable_reason
from mobius.models.structure.checked_families import checked_families
from mobius.models.structure.error_translation import file_of, translate_config_errors
from mobius.models.structure.model_structure import base_model_with_stand_ins, find_model_structure
from mobius.models.structure.persistent_buffers import freeze_persistent_buffers
from mobius.models.structure.scaling_steps import ScaledModule, ScalingSteps
from mobius.models.weight_conversion.parameter_pieces import ParameterPiece, find_parameter_pieces
from mobius.plan.partition import ModelShape, TrainedParameters

LayerArguments = Sequence[KeywordArguments]
"""Keyword arguments of each of the model's layers beside its hidden states."""
_NORM = re.compile(r"Norm(?![a-z])")
"""Part of the class names of norms, such as CohereLayerNorm, Qwen3RMSNorm and RMSNormGated."""
_PROBE_TOKENS = 13
"""A sequence length that is no model's width or number of experts."""


@dataclass(frozen=True)
class Block:
    """One module of the model and the Hugging Face prefix of its parameters; blocks may share `module`."""

    prefix: str
    """With its closing dot, for example `model.layers.3.`."""
    module: nn.Module
    """On the meta device; its buffers (which are never trained) are real."""
    shapes: Mapping[str, tuple[int, ...]]
    """Parameter name within the module -> shape."""
    gradient_factors: tuple[GradientFactors, ...] = ()
    """Weights within the module whose gradient is made outside of autograd (`linear.py`, `experts`)."""
    compiled: CompiledFunction[..., Tensor] | None = None
    """The module's code compiled, shared like `module`; None to run it eagerly."""
    frozen: frozenset[str] = frozenset()
    """Parameters that are not trained."""
    no_weight_decay: frozenset[str] = frozenset()
    """Parameters without weight decay: of norms, biases, and whatever else has one dimension or none."""
    graphs: CompiledModule | None = None
    """The module as graphs of its own, shared too; None to call its code and leave backward to autograd."""

    @property
    def num_parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    @property
    def num_trained_parameters(self) -> int:
        """Parameters that are trained."""
        return sum(torch.Size(shape).numel() for name, shape in self.shapes.items() if name not in self.frozen)

    def frozen_names(self) -> frozenset[str]:
        """Hugging Face names of parameters that are not trained."""
        return frozenset(self.prefix + name for name in self.frozen)

    def no_weight_decay_names(self) -> frozenset[str]:
        """Hugging Face names of parameters without weight decay."""
        return frozenset(self.prefix + name for name in self.no_weight_decay)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape."""
        return {self.prefix + name: shape for name, shape in self.shapes.items()}

    def __call__(self, weights: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Run the module on `weights` (name within the module -> tensor; taps of its linears among them or not)."""
        if self.compiled is not None:
            return self.compiled(dict(weights), args, kwargs)
        return cast(Tensor, functional_call(self.module, dict(weights), args, kwargs))

    def compile(self, name: str) -> Block:
        """This block, run under torch.compile; `name` is what messages call it, in the plural."""

        def run(weights: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
            return cast(Tensor, functional_call(self.module, weights, args, kwargs))

        return replace(self, compiled=CompiledFunction(run, name=name), graphs=CompiledModule(self.module, name=name))


@dataclass(frozen=True)
class SplitBlocks:
    """A layer cut at its attention (`attention_split.py`); each half has its parameters by the layer's prefix."""

    pre_attention: Block
    """Hidden states -> query, key and value."""
    post_attention: Block
    """Hidden states and attention's result -> the layer's output."""
    attention: LayerAttention


class ModelParts:
    """A causal language model as blocks: embedding, layers, norm, head; and its own initialization."""

    def __init__(
        self,
        config: PretrainedConfig,
        device: torch.device,
        *,
        compiled: bool = False,
        packed_dtype: torch.dtype | None = None,
        adapters: AdapterConfig = AdapterConfig(),
    ) -> None:
        """`compiled` runs layers, norm and loss as graphs. `packed`: rows hold documents, in this dtype.

        `adapters` says what is trained. Raises CheckpointError for a model of another build, and ConfigError for
        adapters that it cannot have.
        """
        self.adapters = adapters
        self.attention = None if packed_dtype is None else _attention_of(config, device, packed_dtype)
        config = copy.deepcopy(config)  # what it says of attention and experts is changed
        if self.attention is not None:
            register_attention()
            config._attn_implementation = ATTENTION_IMPLEMENTATION
        self.config = config
        with translate_config_errors(config), torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False
            )
        # Dropout would draw other numbers in the recomputed forward; fine-tuning models ship with 0.
        self.model = model.eval()
        freeze_persistent_buffers(model)
        replace_linears(model)
        register_experts_implementation(model)
        with translate_config_errors(config):
            self._make_buffers_real(device)
            self.structure = find_model_structure(model)
        structure = self.structure
        self.router_loss = install_router_loss(model, structure.layers)
        adapt(model, PartNames(structure.embedding, structure.layers, structure.norm, structure.head), adapters)
        self.embedding = self._scaled_block(structure.embedding, structure.embedding_scaling_steps)
        norm = self._scaled_block(structure.norm, structure.norm_scaling_steps)
        self.norm = norm.compile("norms") if compiled else norm
        head = _block(f"{structure.head}.", model.get_submodule(structure.head))
        is_tapped = isinstance(head.module, GradientFactorLinear) and head.module.weight.requires_grad
        self.head = replace(head, gradient_factors=(LinearGradientFactors(""),)) if is_tapped else head
        arguments = LayerArgumentsBuilder(self, device=device, dtype=torch.float32)(_PROBE_TOKENS)
        _check_rotary(config, arguments)
        self._probed, self._is_compiled = arguments, compiled
        self._halves: dict[int, SplitBlocks] = {}
        # FlexAttention compiles itself, and its masks are no tensors that a graph takes.
        compiled_layers = compiled and self.attention is not DocumentAttention.FLEX
        self.layers = tuple(self._layer_blocks(structure.layers, arguments, compiled=compiled_layers))
        self.is_tied = bool(config.tie_word_embeddings)
        self.logits_loss = LogitsLoss(structure.logits_scaling_steps, compiled=compiled)

    @property
    def tied_names(self) -> tuple[str, str] | None:
        """Names of the embedding's and the head's shared matrix, or None if they are separate."""
        return (f"{self.structure.embedding}.weight", self.head.prefix + "weight") if self.is_tied else None

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All parts in forward order."""
        return self.embedding, *self.layers, self.norm, self.head

    @property
    def trained_tied_names(self) -> tuple[str, str] | None:
        """`tied_names` of a matrix that is trained."""
        return self.tied_names if self.embedding.num_trained_parameters else None

    @property
    def stored_names(self) -> dict[str, str]:
        """Parameter -> the name it is stored under, where that is another one: a tied head's."""
        return {self.tied_names[1]: self.tied_names[0]} if self.tied_names else {}

    def base_shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter -> shape, without adapters."""
        named = (item for block in self.blocks for item in block.parameter_shapes().items())
        return {name: shape for name, shape in named if adapted_linear(name) is None}

    @cached_property
    def parameter_pieces(self) -> Mapping[str, tuple[ParameterPiece, ...]]:
        """Parameter -> tensors that it is stored as, where that is not one by its name; raises CheckpointError."""
        return find_parameter_pieces(self.model, self.base_shapes())

    @property
    def first_trained_layer(self) -> int:
        """The first layer that backward has to reach: 0 where the embedding is trained, the layers' number for none."""
        has_trained = (layer.num_trained_parameters > 0 for layer in self.layers)
        first = next((index for index, is_trained in enumerate(has_trained) if is_trained), len(self.layers))
        return 0 if self.embedding.num_trained_parameters else first

    def shape(self) -> ModelShape:
        """The model in the planner's numbers."""
        return ModelShape(
            embedding_parameters=self.embedding.num_parameters,
            layer_parameters=tuple(layer.num_parameters for layer in self.layers),
            head_parameters=self.norm.num_parameters + self.head.num_parameters,
            hidden_size=self.config.hidden_size,
            # A family whose layers are all of experts may have theirs alone.
            intermediate_size=getattr(self.config, "intermediate_size", None) or self.config.moe_intermediate_size,
            vocab_size=self.config.vocab_size,
            is_tied=self.is_tied,
            num_heads=self.config.num_attention_heads,
            head_size=_head_size(self.config),
            num_key_heads=getattr(self.config, "num_key_value_heads", None),
            is_sliceable=unsliceable_reason(self.config) is None and self.router_loss is None,
            is_tileable=checked_families().untileable_reason(self.config.model_type) is None,
            trained=self._trained_parameters(),
            experts=count_experts(
                self.config, [layer.shapes for layer in self.layers], [layer.frozen for layer in self.layers]
            ),
        )

    def _trained_parameters(self) -> TrainedParameters | None:
        if not any(block.frozen for block in self.blocks):
            return None
        layers, ends = (
            tuple(layer.num_trained_parameters for layer in self.layers),
            self.norm.num_trained_parameters + self.head.num_trained_parameters,
        )
        rank = self.adapters.lora_rank if self.adapters.is_lora else 0
        return TrainedParameters(
            self.embedding.num_trained_parameters, layers, ends, is_on_gpu=self.adapters.is_lora, rank=rank
        )

    def split_at_attention(self, index: int) -> SplitBlocks:
        """The layer `index` cut at its attention; layers of one template share the halves' code and graphs.

        Raises CheckpointError for a family whose layers cannot be cut.
        """
        layer = self.layers[index]
        key = id(layer.module)
        if key not in self._halves:
            self._halves[key] = self._cut(layer, self._probed[index])
        halves = self._halves[key]
        pre_attention, post_attention = (
            replace(half, prefix=layer.prefix) for half in (halves.pre_attention, halves.post_attention)
        )
        return replace(halves, pre_attention=pre_attention, post_attention=post_attention)

    def _cut(self, layer: Block, arguments: KeywordArguments) -> SplitBlocks:
        hidden, on_meta = self._on_meta(arguments)
        cut = split_layer(layer.module, hidden, on_meta, family=self.config.model_type)

        def half(module: nn.Module, trained: frozenset[str]) -> Block:
            gradient_factors = tuple(tap for tap in layer.gradient_factors if tap.weight in trained)
            # FlexAttention, which compiles itself, is in neither half.
            graphs = CompiledModule(module, name="halves of layers") if self._is_compiled else None
            return replace(_block("", module), gradient_factors=gradient_factors, graphs=graphs)

        return SplitBlocks(
            half(cut.pre_attention, cut.pre_attention_parameters),
            half(cut.post_attention, cut.post_attention_parameters),
            cut.attention,
        )

    def _on_meta(self, arguments: KeywordArguments) -> tuple[Tensor, dict[str, Any]]:
        """Hidden states and a layer's arguments to try it with."""
        hidden = torch.empty(1, _PROBE_TOKENS, self.config.hidden_size, device="meta")
        return hidden, tree_map_only(Tensor, lambda value: value.to("meta"), dict(arguments))

    def _scaled_block(self, name: str, steps: ScalingSteps) -> Block:
        """The part of this name, with the steps that follow it."""
        module = self.model.get_submodule(name)
        if not steps:
            return _block(f"{name}.", module)
        above, _, own = name.rpartition(".")
        return _block(f"{above}.", ScaledModule(own, module, steps))

    def _layer_blocks(self, prefix: str, arguments: LayerArguments, *, compiled: bool) -> Iterator[Block]:
        """One block per layer, with taps of its linears and experts that one forward calls once, on all of its tokens.

        Layers with equal signatures get the module of the first of them.
        """
        templates: dict[tuple[Any, ...], Block] = {}
        for (index, layer), own in zip(self.model.get_submodule(prefix).named_children(), arguments, strict=True):
            signature = _signature(layer)
            if signature not in templates:
                hidden, on_meta = self._on_meta(own)
                with translate_config_errors(self.config):
                    gradient_factors = _taps(layer, partial(layer, hidden, **on_meta))
                template = replace(_block("", layer), gradient_factors=gradient_factors)
                templates[signature] = template.compile("layers") if compiled else template
            yield replace(templates[signature], prefix=f"{prefix}.{index}.")

    def _make_buffers_real(self, device: torch.device) -> None:
        """Give every buffer storage on `device` and let the model fill it: meta buffers have no values."""
        for module in self.model.modules():
            on_meta = [(name, buffer) for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
            module._buffers.update({name: torch.empty_like(buffer, device=device) for name, buffer in on_meta})
            if on_meta:
                with torch.no_grad():
                    self.model._init_weights(module)


def _attention_of(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> DocumentAttention:
    softcap = getattr(config, "attn_logit_softcapping", None)
    return choose_attention(device, dtype, head_size=_head_size(config), softcap=softcap)


def _head_size(config: PretrainedConfig) -> int:
    if (plain := getattr(config, "qk_nope_head_dim", None)) is not None:  # of queries and keys, which are in two parts
        return int(plain + getattr(config, "qk_rope_head_dim", 0))
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _taps(layer: nn.Module, run: Callable[[], object]) -> tuple[GradientFactors, ...]:
    """Taps of a layer that `run` runs on the probe's tokens."""
    linears = find_linear_gradient_factors(layer, run, num_tokens=_PROBE_TOKENS)
    return *linears, *find_experts_gradient_factors(layer, run, num_tokens=_PROBE_TOKENS)


def _block(prefix: str, module: nn.Module) -> Block:
    named = dict(module.named_parameters())
    frozen = frozenset(name for name, parameter in named.items() if not parameter.requires_grad)
    shapes = {name: tuple(each.shape) for name, each in named.items()}
    return Block(prefix, module, shapes, frozen=frozen, no_weight_decay=_without_decay(module))


def _without_decay(module: nn.Module) -> frozenset[str]:
    """Names of parameters that weight decay leaves alone.

    Kinds decide, not shapes: norms of heads and biases of experts are matrices in some families.
    """
    return frozenset(
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        for name, parameter in part.named_parameters(recurse=False)
        if parameter.ndim < 2 or _NORM.search(type(part).__name__) or name.endswith("bias")
    )


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    """All that makes a layer compute what it does, but not its index: classes, parameter shapes, plain settings."""
    named = layer.named_parameters()
    parts: list[Any] = [(name, tuple(parameter.shape), parameter.requires_grad) for name, parameter in named]
    for path, module in layer.named_modules():
        plain = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str | None)}
        plain.pop("layer_idx", None)
        parts.append((path, type(module), *sorted(plain.items())))
    return tuple(parts)


class LayerArgumentsBuilder:
    """Makes what each layer gets beside its hidden states: masks, rotary embeddings, and the bounds of documents.

    The family's own forward makes them, run once per length with stand-ins in the layers' places: masks by layer kind,
    scaled and sliding variants are transformers' own. Right padding with causal attention needs no padding mask.
    """

    def __init__(self, parts: ModelParts, *, device: torch.device, dtype: torch.dtype) -> None:
        self._config, self._device, self._dtype = parts.config, device, dtype
        self._has_block_masks = parts.attention is DocumentAttention.FLEX
        self._base, self._stand_ins = base_model_with_stand_ins(parts.model, parts.structure)
        self._by_length: dict[int, LayerArguments] = {}

    def __call__(self, seq_length: int, documents: DocumentLayout | None = None) -> LayerArguments:
        """Keyword arguments of every layer for sequences of `seq_length` tokens.

        Those of one length are kept, with tensors of batch size 1. Those of `documents` are made anew: rotary
        embeddings [B, L, ...] are rows of the kept ones, so a token's are the same wherever its document lies.
        """
        if seq_length not in self._by_length:
            hidden = torch.zeros(1, seq_length, self._config.hidden_size, device=self._device, dtype=self._dtype)
            with translate_config_errors(self._config), torch.no_grad():
                self._base(inputs_embeds=hidden, use_cache=False)
            self._by_length[seq_length] = tuple(KeywordArguments(each.seen) for each in self._stand_ins)
        kept = self._by_length[seq_length]
        return kept if documents is None else self._placed(kept, documents)

    def _placed(self, kept: LayerArguments, documents: DocumentLayout) -> LayerArguments:
        """The arguments `kept` for rows with `documents` instead of one sequence; layers of a kind share theirs."""
        shared: dict[str, Any] = {"position_ids": documents.position_ids, "document_cu_seqlens": documents.cu_seqlens}
        if self._has_block_masks:
            shared["block_masks"] = BlockMasks(documents)
        places, moved = documents.position_ids.flatten(), dict[int, Tensor]()

        def place(table: Tensor) -> Tensor:
            if id(table) not in moved:
                moved[id(table)] = table[0].index_select(0, places).unflatten(0, documents.position_ids.shape)
            return moved[id(table)]

        made, placed = dict[tuple[int, ...], KeywordArguments](), list[KeywordArguments]()
        for own in kept:
            tables = own.get("position_embeddings")
            key = tuple(map(id, tree_leaves(tables)))
            if key not in made:
                rotary = {"position_embeddings": tree_map_only(Tensor, place, tables)}
                made[key] = KeywordArguments(dict(own) | shared | rotary)
            placed.append(made[key])
        return tuple(placed)


def _check_rotary(config: PretrainedConfig, inputs: LayerArguments) -> None:
    """Refuse rotary embeddings that are not finite: every activation would become so. Masks may be infinite."""
    values = {id(value): value for own in inputs for value in tree_leaves(own.get("position_embeddings"))}
    if not all(bool(value.isfinite().all()) for value in values.values() if isinstance(value, Tensor)):
        raise CheckpointError(
            f"{file_of(config)} gives rotary embeddings that are not finite. Mend its rope_theta, rope_parameters or "
            "rope_scaling."
        )
