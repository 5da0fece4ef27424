"""Mixers: modules of layers that carry a state from token to token, such as gated delta nets and short convolutions.

In a packed row each document begins with a new state. Only some operations of a mixer mix tokens; a family's code calls
them by name and passes on the layer's arguments:

    projections -> causal_conv1d_fn(..., documents) -> chunk_gated_delta_rule(..., documents) -> projection

A mixer's forward therefore runs with other functions by these names (`OPERATIONS`). They run the family's functions
document by document, which is exact. All else runs once for all tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor, nn

GATED_DELTA_NET: Final = {"linear_attention": "linear_attn"}
SHORT_CONVOLUTION: Final = {"conv": "conv"}
MIXERS: Final[dict[str, Mapping[str, str]]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), GATED_DELTA_NET),
    **dict.fromkeys(("lfm2", "lfm2_moe"), SHORT_CONVOLUTION),
}
"""Family -> kind of a layer, as in `layer_types` -> name of the mixer in such a layer."""

Operation = Callable[..., Any]


def mixers_of(config: Any) -> Mapping[str, str]:
    """Return the kinds of layers with mixers that a configuration has, and the mixers' names."""
    kinds = {*(getattr(config, "layer_types", None) or ())}
    return {kind: name for kind, name in MIXERS.get(config.model_type, {}).items() if kind in kinds}


def separate_documents(config: Any, layers: Sequence[nn.Module]) -> None:
    """Let the mixers of `layers`, the model's, begin with a new state at each document."""
    mixers = mixers_of(config)
    for layer, kind in zip(layers, config.layer_types, strict=True) if mixers else ():
        if kind in mixers:
            mixer = layer.get_submodule(mixers[kind])
            mixer.__class__ = _by_documents(type(mixer))  # type: ignore[arg-type]  # classes are hashable


@functools.cache
def _by_documents(mixer: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a family's `mixer` whose forward calls `OPERATIONS`."""
    plain = inspect.unwrap(mixer.forward)
    assert isinstance(plain, FunctionType)
    named = {name: plain.__globals__[name] for name in OPERATIONS.keys() & {*plain.__code__.co_names}}
    operations = {name: functools.partial(OPERATIONS[name], own) for name, own in named.items()}
    forward = FunctionType(
        plain.__code__, {**plain.__globals__, **operations}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    forward.__kwdefaults__ = plain.__kwdefaults__
    return type(mixer.__name__, (mixer,), {"forward": forward})


def _convolve(
    own: Operation,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    documents: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Causal convolution of `inputs` [B, channels, L] within documents."""
    convolve = functools.partial(own, weight=weight, bias=bias, activation=activation)
    if documents is None:
        mixed: Tensor = convolve(inputs)
        return mixed
    rows = inputs.transpose(0, 1).flatten(1)[None]
    pieces: list[Tensor] = [convolve(rows[..., start:end]) for start, end in _bounds(documents)]
    return torch.cat(pieces, -1)[0].unflatten(1, (len(inputs), -1)).transpose(0, 1)


def _delta_rule(
    own: Operation,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    documents: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    **_: Any,
) -> tuple[Tensor, None]:
    """Gated delta rule (arXiv 2412.06464) of queries, keys and values [B, L, heads, size] within documents."""
    run = functools.partial(own, initial_state=None, output_final_state=False, cu_seqlens=None)
    run = functools.partial(run, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    if documents is None:
        return run(query, key, value, g=g, beta=beta)[0], None
    rows = [each.flatten(0, 1)[None] for each in (query, key, value, g, beta)]
    pieces = list[Tensor]()
    for start, end in _bounds(documents):
        *heads, decay, strength = (each[:, start:end] for each in rows)
        pieces.append(run(*heads, g=decay, beta=strength)[0])
    return torch.cat(pieces, 1)[0].unflatten(0, query.shape[:2]), None


OPERATIONS: Final[dict[str, Operation]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
}
"""Name in the families' code of a function that mixes tokens -> function of it, of its arguments and documents."""


def _bounds(documents: Tensor) -> list[tuple[int, int]]:
    """Return the first and last token of each document (`attention.DocumentLayout.cu_seqlens`); waits for a GPU."""
    return [(start, end) for start, end in pairwise(documents.tolist()) if start < end]
