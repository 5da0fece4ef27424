"""Locates a causal language model's parts, and the operations that its own code runs between them.

A pipeline calls embedding, layers, norm and head itself, so it must know everything that the model's forward does
around them. The forward runs once with stand-ins for these parts, which record their inputs.

    embedding --> [scale] --> layer --> layer --> ... --> norm --> [scale] --> head --> [scale, softcap] --> logits

A model that does anything else there (mixes outputs of several layers, learned positions, a second stream of hidden
states) cannot be split into stages; the error gives the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from mobius.models.experts.fused import unsupported_experts_reason
from mobius.models.structure.scaling_steps import OperationRecorder, ScalingSteps

_TOKENS = 5


class UnsupportedStructureError(Exception):
    """Reason why a family's model cannot be split into stages; follows the family's name."""


@dataclass(frozen=True)
class ModelStructure:
    """Names of the parts within the model, and the scaling steps after three of them."""

    embedding: str
    layers: str
    norm: str
    head: str
    embedding_scaling_steps: ScalingSteps
    norm_scaling_steps: ScalingSteps
    logits_scaling_steps: ScalingSteps


class LayerStandIn(nn.Module):
    """Replaces a layer or norm, records its arguments, and returns the hidden states.

    Attributes that the family reads from its layers come from the real layer.
    """

    def __init__(self, module: nn.Module | None) -> None:
        super().__init__()
        vars(self)["_module"] = module  # not registered, so that it is no submodule of the copy
        self.seen: dict[str, Any] = {}
        self.inputs: list[Tensor] = []
        self.output: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        if name in ("_parameters", "_buffers", "_modules") or vars(self).get("_module") is None:
            return super().__getattr__(name)
        return getattr(vars(self)["_module"], name)

    def forward(self, hidden: Tensor, *further: Any, **arguments: Any) -> Tensor:
        """Return the hidden states as a new tensor object with equal values."""
        if further:
            raise UnsupportedStructureError("gives its layers more than their hidden states without a name")
        self.seen = arguments
        self.inputs.append(hidden)
        self.output = hidden.view_as(hidden)
        return self.output


def with_replaced_children(module: nn.Module, replaced: Mapping[str, nn.Module]) -> nn.Module:
    """A shallow copy of `module` that shares everything except the children in `replaced`."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules) | dict(replaced)
    return copied


def base_model_with_stand_ins(
    model: PreTrainedModel, structure: ModelStructure
) -> tuple[nn.Module, list[LayerStandIn]]:
    """The base model with stand-ins for its layers and without norm, and these stand-ins; call with `inputs_embeds`."""
    layers, norm = (name.rpartition(".")[2] for name in (structure.layers, structure.norm))
    return _hollow(getattr(model, model.base_model_prefix), layers, norm, nn.Identity())


def _hollow(base: nn.Module, layers: str, norm: str, in_its_place: nn.Module) -> tuple[nn.Module, list[LayerStandIn]]:
    stands = [LayerStandIn(layer) for layer in cast(nn.ModuleList, getattr(base, layers))]
    return with_replaced_children(base, {layers: nn.ModuleList(stands), norm: in_its_place}), stands


def find_model_structure(model: PreTrainedModel) -> ModelStructure:
    """Find the structure by running the model's own forward. Parameters may be on the meta device, buffers are real.

    Raises UnsupportedStructureError, and any error of the family's code.
    """
    prefix = model.base_model_prefix
    base = cast(nn.Module, getattr(model, prefix))
    names = _planned(model, base)
    embedding, norm = (getattr(base, name) for name in (names[0], names[2]))
    if not isinstance(embedding, nn.Embedding):
        raise UnsupportedStructureError(f"has no table of tokens as its first part ({type(embedding).__name__})")
    head = next((name for name, module in model.named_children() if module is model.get_output_embeddings()), None)
    if head is None:
        raise UnsupportedStructureError("has no head beside its base model")
    _check_names(model, [f"{prefix}.{name}." for name in names] + [f"{head}."])
    width, device = embedding.embedding_dim, next((buffer.device for buffer in base.buffers()), torch.device("cpu"))
    behind = LayerStandIn(norm)
    body, stands = _hollow(base, names[1], names[2], behind)
    with torch.no_grad():
        given = torch.zeros(1, _TOKENS, width, device=device)
        with OperationRecorder(given) as watch:
            output = body(inputs_embeds=given, use_cache=False)
        _check_layers(stands, behind, watch, output[0])
        embedding_scaling_steps = watch.steps(given, stands[0].inputs[0])
        norm_scaling_steps, logits_scaling_steps = _behind_the_norm(model, prefix, head, width, device)
    return ModelStructure(
        embedding=f"{prefix}.{names[0]}",
        layers=f"{prefix}.{names[1]}",
        norm=f"{prefix}.{names[2]}",
        head=head,
        embedding_scaling_steps=_plain(embedding_scaling_steps, "between its embedding and its first layer"),
        norm_scaling_steps=_plain(norm_scaling_steps, "between its last norm and its head"),
        logits_scaling_steps=_plain(logits_scaling_steps, "with its logits"),
    )


def _plain(steps: ScalingSteps | None, where: str) -> ScalingSteps:
    if steps is None:
        raise UnsupportedStructureError(f"does more {where} than to scale numbers")
    return steps


def _planned(model: PreTrainedModel, base: nn.Module) -> tuple[str, str, str]:
    """Names of embedding, layers and norm within the base model, from the family's pipeline plan."""
    plan = list(getattr(model.config, "base_model_pp_plan", None) or {})
    lists = [name for name in plan if isinstance(getattr(base, name, None), nn.ModuleList)]
    if not plan:
        raise UnsupportedStructureError("has no pipeline plan of embedding, layers and norm (base_model_pp_plan)")
    if lists == [] or lists[0] in (plan[0], plan[-1]) or not hasattr(base, plan[-1]):
        raise UnsupportedStructureError(
            f"has no embedding, layers and norm by the names of its pipeline plan ({', '.join(plan)})"
        )
    return plan[0], lists[0], plan[-1]


def _check_names(model: PreTrainedModel, parts: list[str]) -> None:
    """Raise UnsupportedStructureError for stored tensors that would be neither trained nor saved."""
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if outside := sorted(name for name in trained if not name.startswith(tuple(parts))):
        raise UnsupportedStructureError(
            f"has parameters outside of embedding, layers, norm and head (such as {outside[0]})"
        )
    if reason := unsupported_experts_reason(model):
        raise UnsupportedStructureError(reason)
    if constants := sorted(model.state_dict().keys() - trained):
        raise UnsupportedStructureError(
            f"stores constants among its weights that are whole numbers or stay in fp32 (such as {constants[0]})"
        )


def _check_layers(stands: list[LayerStandIn], norm: LayerStandIn, watch: OperationRecorder, output: Tensor) -> None:
    """Raise UnsupportedStructureError unless hidden states alone pass from layer to layer and to the norm."""
    if any(len(stand.inputs) != 1 for stand in (*stands, norm)):
        raise UnsupportedStructureError("does not call each of its layers and its norm once")
    for before, after in zip(stands, [*stands[1:], norm], strict=True):
        if after.inputs[0] is not before.output:
            where = "the last layer and the norm" if after is norm else "two layers"
            raise UnsupportedStructureError(f"does more than to hand hidden states on between {where}")
    if output is not norm.output:
        raise UnsupportedStructureError("does more behind its norm")
    for stand in stands:
        for name, value in stand.seen.items():
            if any(isinstance(each, Tensor) and watch.is_made_from_start(each) for each in tree_leaves(value)):
                raise UnsupportedStructureError(
                    f"gives its layers something that is made from the embedded tokens ({name})"
                )


class _Outputs:
    """Output of a base model as a causal language model reads it: hidden states, None for everything else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Tensor:
        assert index == 0, index
        return self.last_hidden_state


class _Body(nn.Module):
    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *_: Any, **__: Any) -> _Outputs:
        return _Outputs(self._hidden)


class _Head(nn.Module):
    def __init__(self, head: nn.Module, logits: Tensor) -> None:
        super().__init__()
        vars(self)["_module"] = head
        self.given: Tensor | None = None
        self._logits = logits

    @property
    def weight(self) -> Tensor:
        return cast(Tensor, vars(self)["_module"].weight)

    def forward(self, hidden: Tensor) -> Tensor:
        self.given = hidden
        return self._logits


def _behind_the_norm(
    model: PreTrainedModel, prefix: str, head: str, width: int, device: torch.device
) -> tuple[ScalingSteps | None, ScalingSteps | None]:
    """Steps before and after the head. Runs in bf16, where a cast to fp32 is recorded as an operation."""
    hidden = torch.zeros(1, _TOKENS, width, device=device, dtype=torch.bfloat16)
    logits = torch.zeros(1, _TOKENS, int(model.config.vocab_size), device=device, dtype=torch.bfloat16)
    stand = _Head(model.get_submodule(head), logits)
    outer = cast(Callable[..., Any], with_replaced_children(model, {prefix: _Body(hidden), head: stand}))
    with OperationRecorder(hidden) as watch:
        result = outer(input_ids=torch.zeros(1, _TOKENS, dtype=torch.long, device=device), use_cache=False)
    if stand.given is None:
        raise UnsupportedStructureError("does not call its head once on its hidden states")
    return watch.steps(hidden, stand.given), watch.steps(logits, result.logits)
