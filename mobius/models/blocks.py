"""Splits a transformers model into embedding, layers and head, which run on weights passed as arguments.

The model is built on the meta device, so it takes no memory. Layers that differ only in their index share one module.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from mobius.config.config import AdapterConfig, BaseDtype, Config, MatmulDtype
from mobius.errors import CheckpointError
from mobius.models.adapters import adapt, adapted_linear, adapted_widths, magnitudes_in_fp32, saved_widths
from mobius.models.attention import (
    ATTENTION_IMPLEMENTATION,
    BlockMasks,
    DocumentAttention,
    DocumentLayout,
    choose_attention,
    register_attention,
)
from mobius.models.attention_split import SplitBlocks, split_layer
from mobius.models.block_autograd import Block
from mobius.models.compiled import KeywordArguments
from mobius.models.experts import (
    count_experts,
    find_experts_gradient_factors,
    fused_experts,
    register_experts_implementation,
)
from mobius.models.family_support import checked_families, unsliceable_reason
from mobius.models.layer_config import head_size, mixers_of, num_key_heads
from mobius.models.linear import (
    GradientFactorLinear,
    GradientFactors,
    LinearGradientFactors,
    find_linear_gradient_factors,
    find_quantizable_linears,
    replace_linears,
)
from mobius.models.loss import TokenLosses
from mobius.models.mixers import StatefulBlocks, num_states, separate_documents, with_states
from mobius.models.parameter_pieces import ParameterPiece, find_parameter_pieces
from mobius.models.prompts import PromptedEmbedding, is_prompt_parameter
from mobius.models.quantization import FORMATS, WIDTH_MULTIPLE
from mobius.models.reward_head import is_reward_model
from mobius.models.rotary import RotaryLengths, with_new_rotary
from mobius.models.router_loss import install_router_loss
from mobius.models.structure import (
    LayerStandIn,
    ScaledModule,
    ScalingSteps,
    base_model_with_stand_ins,
    file_of,
    find_model_structure,
    freeze_persistent_buffers,
    keep_no_shared_keys,
    names_in_fp32,
    translate_config_errors,
)
from mobius.models.weight_codecs import CODECS, WeightCodec
from mobius.schedule.partition import (
    CodedWeights,
    Experts,
    ModelShape,
    QuantizedWeights,
    TrainedParameters,
    WeightsInFP32,
)

LayerArguments = Sequence[KeywordArguments]
"""Keyword arguments of each layer of the model, besides its hidden states."""
_PROBE_TOKENS = 13
"""Length of a probe sequence. No model has this width or number of experts, so a dimension of 13 means tokens."""
_MOST_LENGTHS = 4
"""Number of lengths whose arguments are cached: the length of a run's rows, and lengths of two rotary tables."""


class ModelParts:
    """A language or reward model as blocks (embedding, layers, norm, head), with the family's initialization."""

    @classmethod
    def of(cls, config: Config, model: PretrainedConfig, device: torch.device | None = None, **more: Any) -> ModelParts:
        """Build the parts of a run; `more` goes to the constructor. For a plan, no `device` is needed."""
        device, adapters, matmul_dtype = device or torch.device("cpu"), config.adapters, config.model.matmul_dtype
        trains = config.evaluation.do_train
        return cls(model, device, adapters=adapters, matmul_dtype=matmul_dtype, trains=trains, **more)

    def __init__(
        self,
        config: PretrainedConfig,
        device: torch.device,
        *,
        compiled: bool = False,
        packed_dtype: torch.dtype | None = None,
        adapters: AdapterConfig = AdapterConfig(),
        matmul_dtype: MatmulDtype = MatmulDtype.BF16,
        trains: bool = True,
    ) -> None:
        """Build the parts. `compiled` compiles layers, norm and loss; `packed_dtype` is the dtype of packed rows.

        `trains` False: the weights have no gradients and optimizer states. `adapters` selects the trained parameters,
        `matmul_dtype` the format of the layers' matrix products. Raises CheckpointError for an unsupported model
        structure, and ConfigError for adapters that do not fit the model.
        """
        self.adapters = adapters
        self.eight_bit = FORMATS.get(matmul_dtype)
        """Format in which `Block.quantizable` linears multiply; None for the format of weights and activations."""
        self.attention = None if packed_dtype is None else _attention_of(config, device, packed_dtype)
        config = copy.deepcopy(config)  # its attention and experts implementations are changed below
        if self.attention is not None:
            register_attention()
            config._attn_implementation = ATTENTION_IMPLEMENTATION
        self.config = config
        with translate_config_errors(config), torch.device("meta"), _WithoutInitialization():
            kind = AutoModelForSequenceClassification if is_reward_model(config) else AutoModelForCausalLM
            model: PreTrainedModel = kind.from_config(config, dtype=torch.float32, trust_remote_code=False)
        # Recomputed forwards would draw different dropout masks; models for fine-tuning ship with dropout 0.
        self.model = model.eval()
        freeze_persistent_buffers(model)
        keep_no_shared_keys(model)
        with _WithoutInitialization():
            replace_linears(model)
        register_experts_implementation(model)
        with translate_config_errors(config):
            self._make_buffers_real(device)
            self.structure = structure = find_model_structure(model)
        self.router_loss = install_router_loss(model, structure.layers)
        adapt(model, structure, adapters, trains=trains)
        self.embedding = self._embedding_block()
        norm = self._scaled_block(structure.norm, structure.norm_scaling_steps)
        self.norm = norm.compile("norms") if compiled else norm
        head = Block.of(f"{structure.head}.", model.get_submodule(structure.head))
        has_factors = isinstance(head.module, GradientFactorLinear) and head.module.weight.requires_grad
        self.head = replace(head, gradient_factors=(LinearGradientFactors(""),)) if has_factors else head
        arguments = LayerArgumentsBuilder(self, device=device, dtype=torch.float32)(_PROBE_TOKENS)
        _check_rotary(config, arguments)
        self._probed, self._is_compiled = arguments, compiled
        self._halves, self._in_fp32 = dict[int, SplitBlocks](), dict[torch.dtype, frozenset[str]]()
        # FlexAttention compiles itself, and its masks are not tensors, so they cannot be graph inputs.
        compiled_layers = compiled and self.attention is not DocumentAttention.FLEX
        self.layers = tuple(self._layer_blocks(structure.layers, arguments, compiled=compiled_layers))
        if self.eight_bit is not None and not any(layer.quantizable for layer in self.layers):
            raise CheckpointError(
                f"--matmul_dtype {matmul_dtype}: the family {config.model_type!r} has no linear layer that can be "
                "quantized. Such a layer must run on all tokens, and its sizes must be multiples of "
                f"{WIDTH_MULTIPLE}. Use --matmul_dtype bf16."
            )
        self.is_tied = bool(config.tie_word_embeddings)
        self.token_losses = TokenLosses(structure.logits_scaling_steps, compiled=compiled)

    @property
    def tied_names(self) -> tuple[str, str] | None:
        """Names of the matrix that embedding and head share; None if they have separate matrices."""
        return (f"{self.structure.embedding}.weight", self.head.prefix + "weight") if self.is_tied else None

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks in forward order."""
        return self.embedding, *self.layers, self.norm, self.head

    @property
    def trained_tied_names(self) -> tuple[str, str] | None:
        """`tied_names` if the shared matrix is trained, else None."""
        if self.tied_names is None or self.tied_names[0] in self.embedding.frozen_names():
            return None
        return self.tied_names

    @property
    def stored_names(self) -> dict[str, str]:
        """Parameter -> name in the checkpoint, for a parameter stored under another name: the tied head."""
        return {self.tied_names[1]: self.tied_names[0]} if self.tied_names else {}

    def base_shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter -> shape, without adapters and prompts."""
        named = (item for block in self.blocks for item in block.parameter_shapes().items())
        return {name: shape for name, shape in named if adapted_linear(name) is None and not is_prompt_parameter(name)}

    @property
    def stores_in_order(self) -> bool:
        """Whether each tensor of a checkpoint fills a contiguous part of a parameter."""
        return all(piece.is_contiguous for pieces in self.parameter_pieces.values() for piece in pieces)

    @cached_property
    def parameter_pieces(self) -> Mapping[str, tuple[ParameterPiece, ...]]:
        """Parameter -> its pieces, for parameters that a checkpoint stores as other tensors. Raises CheckpointError."""
        return find_parameter_pieces(self.model, self.base_shapes())

    @property
    def first_trained_layer(self) -> int:
        """First layer that backward must reach: 0 if the embedding is trained, `len(layers)` without trained layers."""
        has_trained = (layer.num_trained_parameters > 0 for layer in self.layers)
        first = next((index for index, is_trained in enumerate(has_trained) if is_trained), len(self.layers))
        return 0 if self.embedding.num_trained_parameters else first

    def shape(self) -> ModelShape:
        """The model's sizes, for the planner."""
        return ModelShape(
            embedding_parameters=self.embedding.num_parameters,
            layer_parameters=tuple(layer.num_parameters for layer in self.layers),
            head_parameters=self.norm.num_parameters + self.head.num_parameters,
            hidden_size=self.config.hidden_size,
            intermediate_size=_intermediate_size(self.config),
            vocab_size=self.config.vocab_size,
            is_tied=self.is_tied,
            num_heads=self.config.num_attention_heads,
            head_size=head_size(self.config),
            num_key_heads=num_key_heads(self.config),
            is_sliceable=unsliceable_reason(self.config, on_gpu=True) is None and self.router_loss is None,
            is_tileable=checked_families().untileable_reason(self.config.model_type) is None,
            trained=self._trained_parameters(),
            experts=self._experts(),
            quantized=self._quantized_weights(),
            in_fp32=self._weights_in_fp32(),
            coded=self._coded_weights(),
        )

    def names_in_fp32(self, dtype: torch.dtype) -> frozenset[str]:
        """Parameters whose weights are fp32 in a run in `dtype`; none in fp32 runs."""
        if dtype not in self._in_fp32:
            made = checked_families().made_in_fp32(self.config.model_type)
            self._in_fp32[dtype] = names_in_fp32(self.model, dtype, made) | magnitudes_in_fp32(self.model, dtype)
        return self._in_fp32[dtype]

    def weight_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Format of a parameter's weights in a run in `dtype`."""
        return torch.float32 if name in self.names_in_fp32(dtype) else dtype

    @cached_property
    def codecs(self) -> Mapping[str, WeightCodec]:
        """Frozen matrices of the layers, without routers, and the codec of --base_dtype; {} for plain weights."""
        codec, found = CODECS[self.adapters.base_dtype], dict[str, WeightCodec]()
        for layer in self.layers if self.adapters.base_dtype is not BaseDtype.BF16 else ():
            routers = {int(cast(Any, experts).num_experts) for experts in fused_experts(layer.module).values()}
            for name in layer.frozen - layer.no_weight_decay:
                shape = layer.shapes[name]
                if codec.takes(shape) and (len(shape) > 2 or (len(shape) == 2 and shape[0] not in routers)):
                    found[layer.prefix + name] = codec
        return found

    def codecs_in(self, dtype: torch.dtype) -> dict[str, WeightCodec]:
        """Codecs of the matrices that are codes in a run in `dtype`."""
        return {name: codec for name, codec in self.codecs.items() if name not in self.names_in_fp32(dtype)}

    def _coded_weights(self) -> CodedWeights | None:
        if not self.codecs:
            return None
        codecs = self.codecs_in(torch.bfloat16)
        layers = [[shape for name, shape in each.parameter_shapes().items() if name in codecs] for each in self.layers]
        codec = CODECS[self.adapters.base_dtype]
        return CodedWeights(
            self.adapters.base_dtype,
            layers=tuple(sum(map(math.prod, own)) for own in layers),
            num_bytes=tuple(sum(map(codec.num_bytes, own)) for own in layers),
        )

    def _weights_in_fp32(self) -> WeightsInFP32 | None:
        if not (found := self.names_in_fp32(torch.bfloat16)):
            return None
        counts = [
            [
                sum(math.prod(each.shapes[name]) for name in names if each.prefix + name in found)
                for names in (each.shapes, each.shapes.keys() - each.frozen)
            ]
            for each in self.layers
        ]
        return WeightsInFP32(*zip(*counts, strict=True))

    def _quantized_weights(self) -> QuantizedWeights | None:
        if self.eight_bit is None:
            return None
        layers = [[layer.shapes[f"{linear}.weight"] for linear in layer.quantizable] for layer in self.layers]
        every = [shape for own in layers for shape in own]
        return QuantizedWeights(
            self.eight_bit.name,
            layers=tuple(sum(map(math.prod, own)) for own in layers),
            scales=tuple(sum(map(sum, own)) for own in layers),
            largest=max(map(math.prod, every), default=0),
            widest=max(map(max, every), default=0),
        )

    def _experts(self) -> Experts | None:
        layers = self.layers
        return count_experts(self.config, [each.shapes for each in layers], [each.frozen for each in layers])

    def _trained_parameters(self) -> TrainedParameters | None:
        if not any(block.frozen for block in self.blocks):
            return None
        layers, ends = (
            tuple(layer.num_trained_parameters for layer in self.layers),
            self.norm.num_trained_parameters + self.head.num_trained_parameters,
        )
        adapters = self.adapters
        shapes, experts = [layer.shapes for layer in self.layers], self._experts()
        chosen = 1 if experts is None else experts.num_experts_per_token
        return TrainedParameters(
            self.embedding.num_trained_parameters,
            layers,
            ends,
            is_on_gpu=adapters.has_frozen_base,
            adapted_widths=tuple(sum(adapted_widths(own, chosen)) for own in shapes) if adapters.is_lora else (),
            saved_widths=tuple(saved_widths(own, adapters) for own in shapes) if adapters.is_lora else (),
            has_row_norms=adapters.use_dora,
        )

    def split_at_attention(self, index: int) -> SplitBlocks:
        """Layer `index` split at its attention; layers that share a module share the halves' modules and graphs.

        Raises CheckpointError for a family whose layers cannot be split.
        """
        layer = self.layers[index]
        key = id(layer.module)
        if key not in self._halves:
            traced = self._on_meta(self._probed[index])
            family, compiled = self.config.model_type, self._is_compiled
            self._halves[key] = split_layer(layer, *traced, family=family, compiled=compiled)
        return self._halves[key].at(layer.prefix)

    def with_states(self, index: int) -> StatefulBlocks | None:
        """Layer `index` with the states of its mixers; None if it has none. Layers share modules as in halves."""
        if getattr(self.config, "layer_types", [None] * len(self.layers))[index] not in mixers_of(self.config):
            return None
        layer = self.layers[index]
        key = id(layer.module)
        if key not in self._stateful_blocks:
            traced = self._on_meta(self._probed[index])
            self._stateful_blocks[key] = with_states(layer, *traced, compiled=self._is_compiled)
        return self._stateful_blocks[key].at(layer.prefix)

    @cached_property
    def _stateful_blocks(self) -> dict[int, StatefulBlocks]:
        return {}

    def _on_meta(self, arguments: KeywordArguments) -> tuple[Tensor, dict[str, Any]]:
        """Return hidden states and a layer's `arguments` on the meta device, for tracing the layer."""
        hidden = torch.empty(1, _PROBE_TOKENS, self.config.hidden_size, device="meta")
        return hidden, tree_map_only(Tensor, lambda value: value.to("meta"), dict(arguments))

    def _embedding_block(self) -> Block:
        """Block of the first stage's input (`engine/embedder.py`)."""
        path, steps = self.structure.embedding, self.structure.embedding_scaling_steps
        if not self.adapters.is_prompt:
            return self._scaled_block(path, steps)
        return Block.of("", PromptedEmbedding(path, self.model.get_submodule(path), steps, self.adapters))

    def _scaled_block(self, name: str, steps: ScalingSteps) -> Block:
        """Block that runs the module `name`, then its scaling steps."""
        module = self.model.get_submodule(name)
        if not steps:
            return Block.of(f"{name}.", module)
        above, _, own = name.rpartition(".")
        return Block.of(f"{above}.", ScaledModule(own, module, steps))

    def _layer_blocks(self, prefix: str, arguments: LayerArguments, *, compiled: bool) -> Iterator[Block]:
        """One block per layer, with gradient factors for linears and experts that run once per forward on all tokens.

        All layers with the same signature share the module of the first such layer.
        """
        templates, layers = dict[tuple[Any, ...], Block](), dict(self.model.get_submodule(prefix).named_children())
        stateful = separate_documents(self.config, [*layers.values()]) if self.attention is not None else ()
        for (index, layer), own in zip(layers.items(), arguments, strict=True):
            signature = _signature(layer)
            if signature not in templates:
                hidden, on_meta = self._on_meta(own)
                with translate_config_errors(self.config):
                    if layer in stateful:
                        num_states(layer, hidden, on_meta)
                    run = partial(layer, hidden, **on_meta)
                    gradient_factors = _find_gradient_factors(layer, run)
                    quantizable = _find_quantizable(layer, run, gradient_factors) if self.eight_bit else ()
                template = replace(Block.of("", layer), gradient_factors=gradient_factors, quantizable=quantizable)
                templates[signature] = template.compile("layers") if compiled else template
            yield replace(templates[signature], prefix=f"{prefix}.{index}.")

    def _make_buffers_real(self, device: torch.device) -> None:
        """Allocate every meta buffer on `device` and let the model fill it."""
        for module in self.model.modules():
            on_meta = [(name, buffer) for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
            module._buffers.update({name: torch.empty_like(buffer, device=device) for name, buffer in on_meta})
            if on_meta:
                with torch.no_grad():
                    self.model._init_weights(module)


class _WithoutInitialization(TorchFunctionMode):
    """Skips random initialization, which took a third of the time to build a 7B model on the meta device."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (nn.init.kaiming_uniform_, nn.init.normal_, Tensor.uniform_, Tensor.normal_):
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _attention_of(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> DocumentAttention:
    softcap = getattr(config, "attn_logit_softcapping", None)
    return choose_attention(device, dtype, head_size=head_size(config), softcap=softcap)


def _intermediate_size(config: PretrainedConfig) -> int:
    """Width of the feed-forward part; its field has other names if all layers have experts, and in older families."""
    names = ("intermediate_size", "moe_intermediate_size", "n_inner")
    return next((int(size) for name in names if (size := getattr(config, name, None))), 4 * config.hidden_size)


def _find_gradient_factors(layer: nn.Module, run: Callable[[], object]) -> tuple[GradientFactors, ...]:
    """Gradient factors of `layer`; `run` runs it on the probe tokens."""
    linears = find_linear_gradient_factors(layer, run, num_tokens=_PROBE_TOKENS)
    return *linears, *find_experts_gradient_factors(layer, run, num_tokens=_PROBE_TOKENS)


def _find_quantizable(
    layer: nn.Module, run: Callable[[], object], gradient_factors: Sequence[GradientFactors]
) -> tuple[str, ...]:
    """Linears of `layer` that may multiply in 8 bits: no routers, and none whose weight gradient autograd computes."""
    factored = {each.weight for each in gradient_factors}
    routers = {int(cast(Any, experts).num_experts) for experts in fused_experts(layer).values()}
    return tuple(
        name
        for name in find_quantizable_linears(layer, run, num_tokens=_PROBE_TOKENS, kept=routers)
        if adapted_linear(f"{name}.weight") is None
        and (f"{name}.weight" in factored or not layer.get_parameter(f"{name}.weight").requires_grad)
    )


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    """Properties that determine what a layer computes: classes, parameter shapes, plain attributes, but no index."""
    named = layer.named_parameters()
    parts: list[Any] = [(name, tuple(parameter.shape), parameter.requires_grad) for name, parameter in named]
    for path, module in layer.named_modules():
        plain = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str | None)}
        plain.pop("layer_idx", None)
        parts.append((path, type(module), *sorted(plain.items())))
    return tuple(parts)


class LayerArgumentsBuilder:
    """Builds each layer's arguments besides hidden states: masks, rotary embeddings, document bounds.

    The family's forward creates them: it runs once per length, with stand-ins for the layers. So transformers creates
    the mask of each layer kind, and scaled or sliding variants. Right padding needs no mask in causal attention.
    """

    def __init__(self, parts: ModelParts, *, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._has_block_masks = device, parts.attention is DocumentAttention.FLEX
        self._rotary_lengths = RotaryLengths.of(parts.config)
        # A cached method would be a reference cycle, which keeps the memory of the arguments.
        family = partial(_run_family, parts, device, dtype, *base_model_with_stand_ins(parts.model, parts.structure))
        self._family, self._of_length = family, lru_cache(maxsize=_MOST_LENGTHS)(family)

    def __call__(
        self,
        seq_length: int,
        documents: DocumentLayout | None = None,
        rows: Sequence[Sequence[int]] = (),
        positions: Tensor | None = None,
    ) -> LayerArguments:
        """Keyword arguments of every layer for sequences of `seq_length` tokens.

        They are cached per length, with batch size 1. With `documents`, rotary embeddings [B, L, ...] are gathered
        from the cached rows by position, so a token gets the same values wherever its document starts. `rows` holds
        the lengths of each row's documents, on the host, without padding; () for full rows. It matters only if rotary
        factors depend on a document's length. `positions` [axes, B, L], on the device: positions on several axes, by
        which the family computes rotary embeddings.
        """
        if positions is not None:
            assert self._rotary_lengths is None, "no family has images and rotary factors by length"
            made = self._family(seq_length, positions=positions)
            shared = {} if documents is None else self._shared(documents)
            return tuple(KeywordArguments(dict(own) | shared) for own in made)
        cached = self._of_length(seq_length)
        sources, places = [cached], None if documents is None else documents.position_ids
        if self._rotary_lengths is not None and rows:
            sources, places = self._sources(self._rotary_lengths, seq_length, rows, places)
        if places is None:
            return cached
        shared = {} if documents is None else self._shared(documents)
        return _placed(cached, shared, sources, places)

    def _shared(self, documents: DocumentLayout) -> dict[str, Any]:
        """Arguments of all layers that separate documents."""
        bounds = BlockMasks(documents) if self._has_block_masks else documents.cu_seqlens
        return {"position_ids": documents.position_ids, "documents": bounds}

    def _sources(
        self, lengths: RotaryLengths, seq_length: int, rows: Sequence[Sequence[int]], position_ids: Tensor | None
    ) -> tuple[list[LayerArguments], Tensor]:
        """Arguments for each rotary table that documents of `rows` need, and each token's place in the joined tables.

        Places are [B, L]; places of padding have no meaning. Usually all documents need one table, and nothing is
        copied from the host.
        """
        longest = {n: lengths.longest_alike(n, seq_length) for row in rows for n in row or (seq_length,)}
        kinds = list(dict.fromkeys(longest.values()))
        sources = [self._of_length(kind) for kind in kinds]
        if len(kinds) == 1:
            if position_ids is None:
                position_ids = torch.arange(seq_length, device=self._device).expand(len(rows), -1)
            return sources, position_ids.clamp(max=kinds[0] - 1)
        starts = dict(zip(kinds, accumulate(kinds, initial=0), strict=False))
        places = torch.zeros(len(rows), seq_length, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        for own, row in zip(places.numpy(), rows, strict=True):
            first = 0
            for length in row or (seq_length,):
                start = starts[longest[length]]
                own[first : first + length] = np.arange(start, start + length)
                first += length
        return sources, places.to(self._device, non_blocking=True)


def _run_family(
    parts: ModelParts,
    device: torch.device,
    dtype: torch.dtype,
    base: nn.Module,
    stand_ins: Sequence[LayerStandIn],
    seq_length: int,
    positions: Tensor | None = None,
) -> LayerArguments:
    """Keyword arguments for one document of `seq_length` tokens, as a newly loaded model creates them.

    With `positions` [axes, B, L], for rows of tokens at these positions.
    """
    config = parts.config
    hidden = torch.zeros(1, seq_length, config.hidden_size, device=device, dtype=dtype)
    given: dict[str, Any] = {}
    if positions is not None:
        hidden, given = hidden.expand(positions.shape[1], -1, -1), {"position_ids": positions}
    own = base if RotaryLengths.of(config) is None else with_new_rotary(base, config)
    with translate_config_errors(config), torch.no_grad():
        own(inputs_embeds=hidden, use_cache=False, **given)
    arguments = tuple(KeywordArguments(each.seen) for each in stand_ins)
    for each in stand_ins:
        each.forget()
    return arguments


def _placed(
    cached: LayerArguments, shared: Mapping[str, Any], sources: Sequence[LayerArguments], places: Tensor
) -> LayerArguments:
    """`cached` arguments, updated with `shared` and with the rotary embeddings of `sources` at `places` [B, L].

    Layers that have the same rotary tables share one result.
    """
    indices, moved = places.flatten(), dict[int, Tensor]()

    def place(*tables: Any) -> Any:
        if not isinstance(tables[0], Tensor):
            return tables[0]
        if id(tables[0]) not in moved:
            table = tables[0][0] if len(tables) == 1 else torch.cat([own[0] for own in tables])
            moved[id(tables[0])] = table.index_select(0, indices).unflatten(0, places.shape)
        return moved[id(tables[0])]

    made, placed = dict[tuple[int, ...], KeywordArguments](), list[KeywordArguments]()
    embeddings = ([each.get("position_embeddings") for each in source] for source in sources)
    for own, *tables in zip(cached, *embeddings, strict=True):
        key = tuple(map(id, tree_leaves(tables[0])))
        if key not in made:
            made[key] = KeywordArguments(dict(own) | dict(shared) | {"position_embeddings": tree_map(place, *tables)})
        placed.append(made[key])
    return tuple(placed)


def _check_rotary(config: PretrainedConfig, inputs: LayerArguments) -> None:
    """Raise CheckpointError for non-finite rotary embeddings: every activation would become non-finite."""
    values = {id(value): value for own in inputs for value in tree_leaves(own.get("position_embeddings"))}
    if not all(bool(value.isfinite().all()) for value in values.values() if isinstance(value, Tensor)):
        raise CheckpointError(
            f"{file_of(config)} gives rotary embeddings that are not finite. Correct its rope_theta, rope_parameters "
            "or rope_scaling."
        )
