"""Mixers: modules of layers that carry a state from token to token, such as gated delta nets and short convolutions.

In a packed row each document begins with a new state; a slice of a sequence begins with the state at the end of the
slice before. Only some operations of a mixer mix tokens; a family's code calls them by name and passes on the layer's
arguments:

    projections -> causal_conv1d_fn(..., documents, states) -> chunk_gated_delta_rule(..., the same) -> projection

A mixer's forward therefore runs with other functions by these names (`OPERATIONS`). They run the family's functions
document by document, which is exact. All else runs once for all tokens.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import FunctionType
from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from mobius.errors import CheckpointError
from mobius.models.block_autograd import Block
from mobius.models.compiled import CompiledModule, as_tuple
from mobius.models.layer_config import mixers_of

Operation = Callable[..., Any]


def separate_documents(config: Any, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Let the mixers of `layers`, the model's, begin with a new state at each document; return the layers with mixers.

    `num_states` checks whether they are told of documents.
    """
    mixers, found = mixers_of(config), list[nn.Module]()
    for layer, kind in zip(layers, config.layer_types, strict=True) if mixers else ():
        if kind in mixers:
            mixer = layer.get_submodule(mixers[kind])
            mixer.__class__ = _by_documents(type(mixer))  # type: ignore[arg-type]  # classes are hashable
            found.append(layer)
    return found


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


class SliceStates:
    """States that the mixing functions of a layer take from the slice before, in the order of their calls, and leave.

    A state is [B, ...]. Without states, sequences begin here.
    """

    def __init__(self, given: Sequence[Tensor] = (), *, stop_after: int | None = None) -> None:
        """`stop_after`: number of states after which `put` raises `_AllStatesMade`."""
        self._given, self._stop_after = iter(given), stop_after
        self.made = list[Tensor]()

    def take(self) -> Tensor | None:
        """Return the state for the next function; None if sequences begin here."""
        return next(self._given, None)

    def put(self, state: Tensor) -> None:
        """Leave the state at the end of the slice."""
        self.made.append(state)
        if len(self.made) == self._stop_after:
            raise _AllStatesMade


class _AllStatesMade(BaseException):
    """Stops a layer's forward; a BaseException, so that no family's code catches it."""


def _convolve(
    own: Operation,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    documents: Tensor | None = None,
    states: SliceStates | None = None,
    **_: Any,
) -> Tensor:
    """Causal convolution of `inputs` [B, channels, L] within documents.

    The state is the last inputs, as many as the next outputs need. Slices have no documents.
    """
    convolve = functools.partial(own, weight=weight, bias=bias, activation=activation)
    if states is not None:
        before, length, num_before = states.take(), inputs.shape[-1], weight.shape[-1] - 1
        known = inputs if before is None else torch.cat([before, inputs], -1)
        states.put(functional.pad(known, (num_before, 0))[..., known.shape[-1] :].contiguous())
        return torch.as_tensor(convolve(known)[..., -length:])
    if documents is None:
        return torch.as_tensor(convolve(inputs))
    rows = inputs.transpose(0, 1).flatten(1)[None]
    pieces = [convolve(rows[..., start:end]) for start, end in _bounds(documents)]
    return torch.as_tensor(torch.cat(pieces, -1).squeeze(0).unflatten(1, (len(inputs), -1)).transpose(0, 1))


def _delta_rule(
    own: Operation,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    documents: Tensor | None = None,
    states: SliceStates | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    **_: Any,
) -> tuple[Tensor, None]:
    """Gated delta rule (arXiv 2412.06464) of queries, keys and values [B, L, heads, size] within documents.

    The state is the matrix of each value head. Slices have no documents.
    """
    run = functools.partial(own, cu_seqlens=None, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    if states is not None:
        before = states.take()
        mixed, after = run(query, key, value, g=g, beta=beta, initial_state=before, output_final_state=True)
        states.put(after)
        return mixed, None
    if documents is None:
        return run(query, key, value, g=g, beta=beta)[0], None
    rows = [each.flatten(0, 1)[None] for each in (query, key, value, g, beta)]
    pieces = list[Tensor]()
    for start, end in _bounds(documents):
        *heads, decay, strength = (each[:, start:end] for each in rows)
        pieces.append(run(*heads, g=decay, beta=strength)[0])
    return torch.cat(pieces, 1).squeeze(0).unflatten(0, query.shape[:2]), None


OPERATIONS: Final[dict[str, Operation]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
}
"""Name in the families' code of a function that mixes tokens -> function of it, of its arguments and documents."""


def _bounds(documents: Tensor) -> list[tuple[int, int]]:
    """Return the first and last token of each document (`attention.DocumentLayout.cu_seqlens`); waits for a GPU."""
    return [(start, end) for start, end in pairwise(documents.tolist()) if start < end]


@dataclass(frozen=True)
class StatefulBlocks:
    """Blocks of a layer with mixers, for slices: all of it, and the part up to its last state."""

    whole: Block
    """Hidden states and the states at the start of the slice -> the layer's output, and the states at its end."""
    mixing: Block
    """Hidden states and the states at the start of the slice -> only the states at its end."""

    def at(self, prefix: str) -> StatefulBlocks:
        """Return the same blocks for the layer whose parameters have `prefix`."""
        return StatefulBlocks(replace(self.whole, prefix=prefix), replace(self.mixing, prefix=prefix))


def num_states(layer: nn.Module, hidden: Tensor, arguments: Mapping[str, Any]) -> int:
    """Return the number of states of a layer, traced with `hidden` [B, T, hidden] and `arguments` on the meta device.

    Raises CheckpointError if the layer does not pass its arguments on to its mixer, as in older transformers.
    """
    states = SliceStates()
    with torch.no_grad():
        layer(hidden, states=states, **arguments)
    if not states.made:
        raise CheckpointError(
            f"{type(layer).__name__} of transformers {transformers.__version__} does not tell its mixer where "
            "documents and slices begin. Use --packing off and whole sequences, or a newer transformers."
        )
    return len(states.made)


def with_states(block: Block, hidden: Tensor, arguments: Mapping[str, Any], *, compiled: bool) -> StatefulBlocks:
    """Return a layer as blocks with states; arguments and errors as in `num_states`."""
    blocks = list[Block]()
    for stop_after in (None, num_states(block.module, hidden, arguments)):
        module = copy.deepcopy(block.module)
        vars(module)["forward"] = functools.partial(_run, module.forward, stop_after)
        graphs = CompiledModule(module, name="layers with states") if compiled else None
        blocks.append(replace(block, module=module, compiled=None, graphs=graphs))
    return StatefulBlocks(*blocks)


def _run(
    forward: Callable[..., Any], stop_after: int | None, hidden: Tensor, *given: Tensor, **arguments: Any
) -> tuple[Tensor, ...]:
    states = SliceStates(given, stop_after=stop_after)
    try:
        output = forward(hidden, states=states, **arguments)
    except _AllStatesMade:
        return tuple(states.made)
    return as_tuple(output)[0], *states.made
