"""Splits a decoder layer at its attention, with one mechanism for every family.

    hidden --> project --> query, key, value --> attention --> attended --> finish --> the layer's output
      `--------------------------------------------------------------------'

A layer of transformers works token by token, except in its attention function, which it looks up by name. Each half is
a copy of the layer that finds our function under that name. In the first half, our function captures query, key and
value and stops the layer; in the second half, it returns a given attention output. So the family's code still computes
residuals, norms and rotary embeddings.

Backward needs the layer's input, query, key and value, and the attention output. The backward of each half recomputes
the forward of that half. The second half omits linears that affect only query, key and value:

    post_attention_backward  gradient of the output             -> gradients of the layer's input and attention output
    attention's backward     gradient of the attention output   -> gradients of query, key and value
    pre_attention_backward   gradients of query, key and value  -> second gradient of the layer's input: add them
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mobius.errors import CheckpointError
from mobius.models.attention import ATTENTION_IMPLEMENTATION
from mobius.models.block_autograd import Block, NamedTensors, recomputed_backward, run_many_without_graph
from mobius.models.compiled import CompiledModule, KeywordArguments, Tensors
from mobius.models.model_files import describe_error
from mobius.models.structure import with_replaced_parameters

_STAND_IN_NAME = "mobius_stand_in"
_STAND_IN = "_mobius_stand_in"
_FOR_ATTENTION = ("attention_mask", "documents")
"""Layer arguments that only attention reads; the two halves do not get them."""
_OF_DOCUMENTS = _FOR_ATTENTION[1:]

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class LayerAttention:
    """A layer's attention function, with the arguments that the layer passes besides query, key and value."""

    function: Callable[..., tuple[Tensor, Any]]
    module: nn.Module
    """The layer's attention module, whose attributes the function may read."""
    constants: Settings
    """Constant arguments, such as `scaling` and `sliding_window`."""
    forwarded_arguments: tuple[str, ...]
    """Layer arguments that are passed to attention unchanged."""
    parameters: Mapping[str, str]
    """Argument of attention -> parameter of the layer that it is, such as attention sinks."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        arguments: Mapping[str, Any],
        parameters: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Tensor:
        """Heads [B, H, T, D] -> [B, T, H, D]; `arguments` are the layer's, `parameters` those that attention gets."""
        assert parameters.keys() == self.parameters.keys(), "attention gets its parameters"
        settings = {name: arguments[name] for name in self.forwarded_arguments if name in arguments}
        mask = settings.pop("attention_mask", None)
        # A family's own code reads them from its module.
        own = {self.parameters[name].rpartition(".")[2]: value for name, value in parameters.items()}
        module = with_replaced_parameters(self.module, own) if own else self.module
        return self.function(module, query, key, value, mask, **self.constants, **settings, **parameters)[0]


class Heads(NamedTuple):
    """Query, key and value as passed to an attention function, [B, H, T, D]; or their gradients."""

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class SplitBlocks:
    """A layer split at its attention; both halves have the layer's prefix.

    In all methods, `weights` are by Hugging Face name, and `arguments` are the layer's arguments for the tokens in
    `hidden` [B, T, hidden].
    """

    pre_attention: Block
    """Hidden states -> query, key and value."""
    post_attention: Block
    """Hidden states and attention output [B, T, H, D] -> the layer's output, and its router sums if requested."""
    attention: LayerAttention

    def at(self, prefix: str) -> SplitBlocks:
        """Return the same split for the layer whose parameters have `prefix`."""
        pre, post = (replace(half, prefix=prefix) for half in (self.pre_attention, self.post_attention))
        return SplitBlocks(pre, post, self.attention)

    def attention_parameters(self, named: NamedTensors) -> dict[str, Tensor]:
        """Weights or gradient sums in `named` of parameters that attention gets, by its argument; {} for most layers.

        Frozen parameters have no gradient sums.
        """
        names = {name: self.pre_attention.prefix + own for name, own in self.attention.parameters.items()}
        return {name: named[own] for name, own in names.items() if own in named}

    def run_pre_attention(self, weights: NamedTensors, hidden: Tensor, arguments: Mapping[str, Any]) -> Heads:
        """Return query, key and value, without an autograd graph."""
        return Heads(*run_many_without_graph(self.pre_attention, weights, (hidden,), _own(arguments)))

    def run_post_attention(
        self, weights: NamedTensors, hidden: Tensor, attended: Tensor, arguments: Mapping[str, Any]
    ) -> Tensors:
        """Return the layer's outputs, without an autograd graph."""
        return run_many_without_graph(self.post_attention, weights, (hidden, attended), _own(arguments))

    def post_attention_backward(
        self,
        weights: NamedTensors,
        gradients: NamedTensors,
        hidden: Tensor,
        attended: Tensor,
        gradient: Tensor,
        arguments: Mapping[str, Any],
        *other_gradients: Tensor,
    ) -> Tensors:
        """Add gradients of the parameters after attention to `gradients` (fp32 sums by Hugging Face name).

        `gradient` is the gradient of the layer's output, `other_gradients` of its router sums. Returns the gradients
        of `hidden` (without the path through attention) and of `attended`.
        """
        given = self.post_attention, weights, (hidden, attended), _own(arguments), gradients
        return recomputed_backward(*given, gradient, *other_gradients)

    def pre_attention_backward(
        self,
        weights: NamedTensors,
        gradients: NamedTensors,
        hidden: Tensor,
        head_gradients: Heads,
        arguments: Mapping[str, Any],
    ) -> Tensor:
        """Add gradients of parameters before attention to `gradients`; return the rest of the gradient of `hidden`."""
        given = self.pre_attention, weights, (hidden,), _own(arguments), gradients
        return recomputed_backward(*given, *head_gradients)[0]


def _own(arguments: Mapping[str, Any]) -> KeywordArguments:
    return KeywordArguments(without_attention_arguments(arguments))


def without_attention_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer's arguments, except arguments that only attention reads."""
    return {name: value for name, value in arguments.items() if name not in _FOR_ATTENTION}


def split_layer(
    block: Block, hidden: Tensor, arguments: Mapping[str, Any], *, family: str, compiled: bool
) -> SplitBlocks:
    """Split a layer, traced with `hidden` [B, T, hidden] and `arguments` on the meta device.

    If `compiled`, the halves run as compiled graphs. Raises a CheckpointError that names `family` if the layer does not
    call attention exactly once through transformers' interface, or passes it further tensors that the layer computes.
    """
    layer, settings = block.module, dict(arguments)
    configs = [cast(Any, module.config) for module in layer.modules() if hasattr(module, "config")]
    name = configs[0]._attn_implementation if configs else None
    if name == ATTENTION_IMPLEMENTATION:
        settings |= {own: torch.empty(2, device="meta") for own in _OF_DOCUMENTS}
    try:
        pre, post = _AttentionStandIn(layer), _AttentionStandIn(layer)
        attention = _attention(pre.capture(hidden, settings), settings, name, pre.layer)
        pre_attention, post_attention = pre.layer, post.layer
        vars(pre_attention)["forward"], vars(post_attention)["forward"] = pre.project, post.finish
        own, leaf = without_attention_arguments(arguments), hidden.detach().requires_grad_()
        for half in (pre_attention, post_attention):
            half.requires_grad_(True)  # frozen parameters too, to find the half that uses them
        with torch.enable_grad():
            heads = pre_attention(leaf, **own)
            query, _, value = heads
            attended = torch.empty(*query.transpose(1, 2).shape[:3], value.shape[-1], device="meta")
            pre_attention_parameters = _with_gradient(pre_attention, heads)
            output = post_attention(leaf, attended.requires_grad_(), **own)
            post_attention_parameters = _with_gradient(post_attention, (output,))
        for half, frozen in itertools.product((pre_attention, post_attention), block.frozen):
            half.get_parameter(frozen).requires_grad_(False)
    except Exception as error:
        fault = error if isinstance(error, _FaultError) else f"could not be run in halves ({describe_error(error)})"
        raise CheckpointError(
            f"layers of the family {family!r} {fault}, so they cannot be split at their attention, which tiles and "
            "sequence slices need. Use --tile_tokens off --num_slices 1."
        ) from error
    gone = list[str]()
    for linear, module in list(post_attention.named_modules()):
        if any(linear.startswith(f"{name}.") for name in gone):
            continue
        names = {f"{linear}.{name}".removeprefix(".") for name, _ in module.named_parameters(recurse=False)}
        is_read = bool(names & post_attention_parameters)
        if isinstance(module, nn.Linear) and names <= pre_attention_parameters and not is_read:
            post_attention.set_submodule(linear, _Unread(module.out_features))
            gone.append(linear)
    halves = []
    for half, trained in ((pre_attention, pre_attention_parameters), (post_attention, post_attention_parameters)):
        gradient_factors = tuple(each for each in block.gradient_factors if each.weight in trained)
        # Both halves can be compiled: FlexAttention, which compiles itself, is outside of them.
        graphs = CompiledModule(half, name="halves of layers") if compiled else None
        whole = Block.of("", half)
        quantizable = tuple(each for each in block.quantizable if f"{each}.weight" in whole.shapes)
        halves.append(replace(whole, gradient_factors=gradient_factors, graphs=graphs, quantizable=quantizable))
    return SplitBlocks(halves[0], halves[1], attention)


class _CapturedInputs(BaseException):
    """Stops a layer's forward and carries attention's inputs; a BaseException, so that no family's code catches it."""

    def __init__(self, module: nn.Module, heads: tuple[Tensor, Tensor, Tensor], settings: Settings) -> None:
        super().__init__()
        self.module, self.heads, self.settings = module, heads, settings


class _FaultError(Exception):
    """Reason why layers cannot be split: the end of a sentence that begins with the family's name."""


class _AttentionStandIn:
    """Replaces the attention function of a copy of a layer."""

    def __init__(self, layer: nn.Module) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(_STAND_IN_NAME, _attend)
        self.layer = copy.deepcopy(layer)
        self._forward = self.layer.forward
        self._given: Tensor | None = None
        """Attention output that `attend` returns; if None, it raises `_CapturedInputs` with the inputs."""
        self._num_calls = 0
        for module in self.layer.modules():
            vars(module)[_STAND_IN] = self
            if hasattr(module, "config"):
                cast(Any, module.config)._attn_implementation = _STAND_IN_NAME

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **settings: Any,
    ) -> tuple[Tensor, None]:
        self._num_calls += 1
        if self._given is None:
            raise _CapturedInputs(module, (query, key, value), settings | {"attention_mask": attention_mask})
        return self._given, None

    def capture(self, hidden: Tensor, arguments: Mapping[str, Any]) -> _CapturedInputs:
        try:
            self._forward(hidden, **arguments)
        except _CapturedInputs as captured:
            return captured.with_traceback(None)  # a traceback would keep the layer's tensors alive
        raise _FaultError("do not call attention through transformers' interface")

    def project(self, hidden: Tensor, **arguments: Any) -> Sequence[Tensor]:
        """Forward of the half before attention."""
        return self.capture(hidden, arguments).heads

    def finish(self, hidden: Tensor, attended: Tensor, **arguments: Any) -> object:
        """Forward of the half after attention."""
        self._given, self._num_calls = attended, 0
        try:
            output = self._forward(hidden, **arguments)
        finally:
            self._given = None
        if self._num_calls != 1:
            raise _FaultError(f"call attention {self._num_calls} times")
        return output


def _attend(module: nn.Module, *heads: Tensor, **settings: Any) -> tuple[Tensor, None]:
    return cast(_AttentionStandIn, getattr(module, _STAND_IN)).attend(module, *heads, **settings)


def _attention(captured: _CapturedInputs, given: Settings, name: str | None, layer: nn.Module) -> LayerAttention:
    from transformers import AttentionInterface

    forwarded_arguments = tuple(
        each for each in captured.settings if each in given and captured.settings[each] is given[each]
    )
    names = {id(parameter): own for own, parameter in layer.named_parameters()}
    parameters = {each: names[id(value)] for each, value in captured.settings.items() if id(value) in names}
    fixed = {*forwarded_arguments, *parameters}
    constants = {each: value for each, value in captured.settings.items() if each not in fixed}
    if made := [each for each, value in constants.items() if any(isinstance(x, Tensor) for x in tree_leaves(value))]:
        raise _FaultError(f"pass attention tensors that they compute ({', '.join(made)})")
    if missing := [each for each in _OF_DOCUMENTS if each in given and each not in forwarded_arguments]:
        raise _FaultError(f"do not pass {' and '.join(missing)} on to attention")
    function = getattr(sys.modules[type(captured.module).__module__], f"{name}_attention_forward", None)
    if name in (functions := AttentionInterface()):
        function = functions[name]
    if function is None:
        raise _FaultError(f"call attention of the kind {name!r}, which only their own code has")
    return LayerAttention(function, captured.module, constants, forwarded_arguments, parameters)


def _with_gradient(module: nn.Module, outputs: Sequence[Tensor]) -> frozenset[str]:
    """Names of the parameters on which `outputs` depend."""
    named = dict(module.named_parameters())
    found = torch.autograd.grad(
        outputs, list(named.values()), [torch.empty_like(output) for output in outputs], allow_unused=True
    )
    return frozenset(name for name, gradient in zip(named, found, strict=True) if gradient is not None)


class _Unread(nn.Module):
    """Replaces a linear whose output is not used; it returns new zeros, because a family may modify them in place."""

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self._out_features = out_features

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.new_zeros(*inputs.shape[:-1], self._out_features)
