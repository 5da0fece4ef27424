"""Finds the parts of a causal language model, and the operations that the family's code runs between them.

A pipeline calls embedding, layers, norm and head itself, so it must know all operations of the model's forward between
these parts. To find them, the forward runs once with stand-ins for the parts, which record their inputs.

    embedding --> [scale] --> layer --> layer --> ... --> norm --> [scale] --> head --> [scale, softcap] --> logits

Scaling steps are recorded while the family's code runs, so no table of families and fields is needed. A model with
other operations between the parts (mixed outputs of several layers, learned positions, a second stream of hidden
states) cannot be split into stages; the error gives the reason.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from mobius.errors import CheckpointError
from mobius.models.block_autograd import NORM_CLASS
from mobius.models.experts import unsupported_experts_reason
from mobius.models.model_files import describe_error
from mobius.models.reward_head import SCORE, gives_scores

_TOKENS = 5


class UnsupportedStructureError(Exception):
    """Reason why a model cannot be split into stages: the end of a sentence that begins with the family's name."""


@dataclass(frozen=True)
class ModelStructure:
    """Names of the parts within the model, and the scaling steps after embedding, norm and head."""

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
        vars(self)["_module"] = module  # by `vars`, so that it is not registered as a submodule
        self.seen: dict[str, Any] = {}
        self.inputs: list[Tensor] = []
        self.output: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        if name in ("_parameters", "_buffers", "_modules") or vars(self).get("_module") is None:
            return super().__getattr__(name)
        return getattr(vars(self)["_module"], name)

    def forward(self, hidden: Tensor, *further: Any, **arguments: Any) -> Tensor:
        """Return the hidden states as a new tensor object with the same values.

        Arguments without a value, and empty mappings for what layers tell each other, are not recorded.
        """
        if any(each is not None for each in further):
            raise UnsupportedStructureError("passes positional arguments other than hidden states to its layers")
        self.seen = {name: each for name, each in arguments.items() if not isinstance(each, MutableMapping) or each}
        self.inputs.append(hidden)
        self.output = hidden.view_as(hidden)
        return self.output

    def forget(self) -> None:
        """Release the recorded tensors, which have the size of hidden states."""
        self.seen, self.inputs, self.output = {}, [], None


def with_replaced_children(module: nn.Module, replaced: Mapping[str, nn.Module]) -> nn.Module:
    """Shallow copy of `module` that shares all its children except the names in `replaced`."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules) | dict(replaced)
    return copied


def with_replaced_parameters(module: nn.Module, replaced: Mapping[str, Tensor]) -> nn.Module:
    """Shallow copy of `module` that has the tensors `replaced` in place of its parameters of these names."""
    copied = copy.copy(module)
    copied._parameters = cast(Any, dict(module._parameters) | dict(replaced))
    return copied


def base_model_with_stand_ins(
    model: PreTrainedModel, structure: ModelStructure
) -> tuple[nn.Module, list[LayerStandIn]]:
    """Base model with stand-ins for its layers and without norm, and the stand-ins. Call it with `inputs_embeds`."""
    layers, norm = (name.rpartition(".")[2] for name in (structure.layers, structure.norm))
    return _stand_in_for(getattr(model, model.base_model_prefix), layers, norm, nn.Identity())


def _stand_in_for(
    base: nn.Module, layers: str, norm: str, replacement: nn.Module
) -> tuple[nn.Module, list[LayerStandIn]]:
    """Copy of the base model with stand-ins for its layers and `replacement` for its norm, and the stand-ins."""
    stand_ins = [LayerStandIn(layer) for layer in cast(nn.ModuleList, getattr(base, layers))]
    return with_replaced_children(base, {layers: nn.ModuleList(stand_ins), norm: replacement}), stand_ins


def find_model_structure(model: PreTrainedModel) -> ModelStructure:
    """Find the structure by running the model's forward. Parameters may be on the meta device, buffers must be real.

    Raises UnsupportedStructureError, and any error of the family's code.
    """
    prefix = model.base_model_prefix
    base = cast(nn.Module, getattr(model, prefix))
    names = _planned(model, base)
    embedding, norm = (getattr(base, name) for name in (names[0], names[2]))
    if not isinstance(embedding, nn.Embedding):
        raise UnsupportedStructureError(f"does not begin with a token embedding ({type(embedding).__name__})")
    head: str | None = SCORE
    if not gives_scores(model):
        head = next((name for name, each in model.named_children() if each is model.get_output_embeddings()), None)
    if head is None:
        raise UnsupportedStructureError("has no head next to its base model")
    _check_names(model, [f"{prefix}.{name}." for name in names] + [f"{head}."])
    width, device = embedding.embedding_dim, next((buffer.device for buffer in base.buffers()), torch.device("cpu"))
    norm_stand_in = LayerStandIn(norm)
    body, stand_ins = _stand_in_for(base, names[1], names[2], norm_stand_in)
    with torch.no_grad():
        given = torch.zeros(1, _TOKENS, width, device=device)
        with OperationRecorder(given) as recorder:
            output = body(inputs_embeds=given, use_cache=False)
        _check_layers(stand_ins, norm_stand_in, recorder, output[0])
        embedding_scaling_steps = recorder.steps(given, stand_ins[0].inputs[0])
        norm_scaling_steps, logits_scaling_steps = (
            ((), ()) if gives_scores(model) else _scaling_after_norm(model, prefix, head, width, device)
        )
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
        raise UnsupportedStructureError(f"does more {where} than scaling")
    return steps


def layers_of(model: PreTrainedModel) -> Sequence[nn.Module]:
    """Return the decoder layers of `model`. Raises UnsupportedStructureError."""
    base = cast(nn.Module, getattr(model, model.base_model_prefix))
    return [*base.get_submodule(_planned(model, base)[1]).children()]


def _planned(model: PreTrainedModel, base: nn.Module) -> tuple[str, str, str]:
    """Names of embedding, layers and norm within the base model, from the family's pipeline plan or by their kinds."""
    plan = list(getattr(model.config, "base_model_pp_plan", None) or {}) or _parts_by_kind(model, base)
    lists = [name for name in plan if isinstance(getattr(base, name, None), nn.ModuleList)]
    if lists == [] or lists[0] in (plan[0], plan[-1]) or not hasattr(base, plan[-1]):
        raise UnsupportedStructureError(
            f"has no embedding, layers and norm by the names of its pipeline plan ({', '.join(plan)})"
        )
    return plan[0], lists[0], plan[-1]


def _parts_by_kind(model: PreTrainedModel, base: nn.Module) -> list[str]:
    """Names of the base model's input embedding, its only list of modules, and its only norm, in this order."""
    children, embedding = dict(base.named_children()), model.get_input_embeddings()
    kinds: tuple[Callable[[nn.Module], bool], ...] = (
        lambda each: each is embedding,
        lambda each: isinstance(each, nn.ModuleList),
        lambda each: bool(NORM_CLASS.search(type(each).__name__)),
    )
    found = [[name for name, each in children.items() if is_kind(each)] for is_kind in kinds]
    if any(len(names) != 1 for names in found):
        raise UnsupportedStructureError(
            "has no pipeline plan (base_model_pp_plan), and not exactly one embedding, one list of layers and one norm"
        )
    return [names[0] for names in found]


def _check_names(model: PreTrainedModel, parts: list[str]) -> None:
    """Raise UnsupportedStructureError if a stored tensor would be neither trained nor saved."""
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if outside := sorted(name for name in trained if not name.startswith(tuple(parts))):
        raise UnsupportedStructureError(
            f"has parameters outside of embedding, layers, norm and head (such as {outside[0]})"
        )
    if reason := unsupported_experts_reason(model):
        raise UnsupportedStructureError(reason)
    if constants := sorted(model.state_dict().keys() - trained):
        raise UnsupportedStructureError(
            f"stores constants among its weights that are whole numbers (such as {constants[0]})"
        )


def _check_layers(
    stand_ins: list[LayerStandIn], norm: LayerStandIn, recorder: OperationRecorder, output: Tensor
) -> None:
    """Raise UnsupportedStructureError unless only hidden states go from layer to layer and to the norm."""
    if any(len(stand_in.inputs) != 1 for stand_in in (*stand_ins, norm)):
        raise UnsupportedStructureError("does not call each of its layers and its norm once")
    for before, after in zip(stand_ins, [*stand_ins[1:], norm], strict=True):
        if after.inputs[0] is not before.output:
            where = "the last layer and the norm" if after is norm else "two layers"
            raise UnsupportedStructureError(f"does more than pass hidden states on between {where}")
    if output is not norm.output:
        raise UnsupportedStructureError("does more after its norm")
    for stand_in in stand_ins:
        for name, value in stand_in.seen.items():
            if any(isinstance(each, Tensor) and recorder.is_made_from_start(each) for each in tree_leaves(value)):
                raise UnsupportedStructureError(
                    f"passes its layers something that is computed from the embedded tokens ({name})"
                )


class _Output(MoeModelOutputWithPast):
    """Output of a base model, in which every field that only one family has is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _Body(nn.Module):
    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *_: Any, **__: Any) -> MoeModelOutputWithPast:
        return _Output(last_hidden_state=cast(Any, self._hidden))


class _Head(LayerStandIn):
    def __init__(self, head: nn.Module, logits: Tensor) -> None:
        super().__init__(head)
        self._logits = logits

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        self.inputs.append(hidden)
        return self._logits


def _scaling_after_norm(
    model: PreTrainedModel, prefix: str, head: str, width: int, device: torch.device
) -> tuple[ScalingSteps | None, ScalingSteps | None]:
    """Scaling steps before and after the head. It runs in bf16, so that a cast to fp32 is recorded."""
    hidden = torch.zeros(1, _TOKENS, width, device=device, dtype=torch.bfloat16)
    logits = torch.zeros(1, _TOKENS, int(model.config.vocab_size), device=device, dtype=torch.bfloat16)
    stand_in = _Head(model.get_submodule(head), logits)
    outer = cast(Callable[..., Any], with_replaced_children(model, {prefix: _Body(hidden), head: stand_in}))
    with OperationRecorder(hidden) as recorder:
        result = outer(input_ids=torch.zeros(1, _TOKENS, dtype=torch.long, device=device), use_cache=False)
    if len(stand_in.inputs) != 1:
        raise UnsupportedStructureError("does not call its head once on its hidden states")
    return recorder.steps(hidden, stand_in.inputs[0]), recorder.steps(logits, result.logits)


_aten = torch.ops.aten


class ScalingKind(StrEnum):
    """Operation of a scaling step."""

    MULTIPLY = "times"
    DIVIDE = "over"
    TANH = "tanh"
    FLOAT = "float"


class ScalingStep(NamedTuple):
    """One elementwise operation; only MULTIPLY and DIVIDE use `number`."""

    kind: ScalingKind
    number: float = 0.0


ScalingSteps = tuple[ScalingStep, ...]

_APPLY: Mapping[ScalingKind, Callable[[Tensor, float], Tensor]] = {
    ScalingKind.MULTIPLY: lambda values, number: values * number,
    ScalingKind.DIVIDE: lambda values, number: values / number,
    ScalingKind.TANH: lambda values, _: torch.tanh(values),
    ScalingKind.FLOAT: lambda values, _: values.float(),
}
_SLOPE: Mapping[ScalingKind, Callable[[Tensor, float], Tensor | float]] = {
    ScalingKind.MULTIPLY: lambda _, number: number,
    ScalingKind.DIVIDE: lambda _, number: 1.0 / number,
    ScalingKind.TANH: lambda bounded, _: 1.0 - bounded * bounded,
    ScalingKind.FLOAT: lambda *_: 1.0,
}
"""Derivative of a step, computed from the step's result."""


def apply_scaling(values: Tensor, steps: ScalingSteps) -> Tensor:
    """Apply the steps as the family does."""
    for step in steps:
        values = _APPLY[step.kind](values, step.number)
    return values


def apply_scaling_with_derivative(values: Tensor, steps: ScalingSteps) -> tuple[Tensor, Tensor | float]:
    """Apply the steps; return the result and its derivative at each of `values`."""
    slope: Tensor | float = 1.0
    for step in steps:
        values = _APPLY[step.kind](values, step.number)
        slope = slope * _SLOPE[step.kind](values, step.number)
    return values, slope


class ScaledModule(nn.Module):
    """A module followed by its scaling steps; parameters have the same names as in the module's parent."""

    def __init__(self, name: str, module: nn.Module, steps: ScalingSteps) -> None:
        super().__init__()
        self.add_module(name, module)
        self._name, self._steps = name, steps

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the module's output, scaled."""
        return apply_scaling(self._modules[self._name](inputs), self._steps)  # type: ignore[misc]


class OperationRecorder(TorchDispatchMode):
    """Context that records the operation that made each tensor, and which tensors depend on `start`."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, tuple[Any, tuple[Any, ...], Tensor]] = {}
        self._from_start = {id(start)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = tuple(tree_leaves((args, kwargs or {})))
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and not any(each is other for other in given):
                self._made[id(each)] = (func, given, each)  # holds the tensor, so that its id is not reused
                if any(id(other) in self._from_start for other in given):
                    self._from_start.add(id(each))
        return output

    def is_made_from_start(self, tensor: Tensor) -> bool:
        """Whether the values of `tensor` may depend on the recorder's `start`."""
        return id(tensor) in self._from_start

    def steps(self, start: Tensor, end: Tensor) -> ScalingSteps | None:
        """Scaling steps from `start` to `end`, or None if another operation is between the two."""
        found = list[ScalingStep]()
        while end is not start:
            if id(end) not in self._made:
                return None
            func, args, _ = self._made[id(end)]
            step = _step(func.overloadpacket, args, end)
            if step is None or not isinstance(args[0], Tensor):
                return None
            if step is not _NOTHING:
                found.append(step)
            end = args[0]
        return tuple(reversed(found))


_NOTHING = ScalingStep(ScalingKind.MULTIPLY, 1.0)
"""Marks an operation that returns its input."""
_PRODUCTS = {_aten.mul: ScalingKind.MULTIPLY, _aten.div: ScalingKind.DIVIDE}
_SAME = (_aten.alias, _aten.detach, _aten.clone, _aten.view, _aten.slice, _aten._unsafe_view, _aten.contiguous)


def _step(operation: Any, args: tuple[Any, ...], made: Tensor) -> ScalingStep | None:
    if operation in _PRODUCTS:
        number = _number(args[1])
        return None if number is None else ScalingStep(_PRODUCTS[operation], number)
    if operation is _aten.tanh:
        return ScalingStep(ScalingKind.TANH)
    if operation is _aten._to_copy and made.dtype == torch.float32:
        return ScalingStep(ScalingKind.FLOAT)
    return _NOTHING if operation in _SAME and made.shape == args[0].shape else None


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        is_constant = value.ndim == 0 and not value.is_meta and not isinstance(value, nn.Parameter)
        return float(value) if is_constant else None
    return float(value) if isinstance(value, int | float) else None


def names_in_fp32(model: PreTrainedModel, dtype: torch.dtype, made_in_fp32: Sequence[str] = ()) -> frozenset[str]:
    """Names of the parameters that transformers keeps in fp32 in a model in `dtype`, such as routers.

    `made_in_fp32` are further names, or parts of them, for any 16-bit format. They are searched as in transformers 5.24
    (`core_model_loading.build_glob_alternation`), where a dot matches any letter.
    """
    if dtype.itemsize >= torch.float32.itemsize:
        return frozenset()
    wanted = {*(getattr(model, "_keep_in_fp32_modules_strict", None) or ()), *made_in_fp32}
    if dtype is torch.float16:
        wanted |= {*(getattr(model, "_keep_in_fp32_modules", None) or ())}
    pattern = re.compile("|".join(name.replace("*", ".*") for name in sorted(wanted)) or "(?!)")
    return frozenset(name for name, _ in model.named_parameters() if pattern.search(name))


def keep_no_shared_keys(model: PreTrainedModel) -> None:
    """Keep layers from handing keys and values to later layers, which read none in the models that are trained."""
    for module in model.modules():
        if getattr(module, "store_full_length_kv", False):
            cast(Any, module).store_full_length_kv = False


def freeze_persistent_buffers(model: PreTrainedModel) -> None:
    """Turn the persistent buffers of `model` into frozen parameters, on the same device; integer buffers stay."""
    stored = model.state_dict().keys()
    for path, module in model.named_modules():
        for local, buffer in list(module.named_buffers(recurse=False)):
            name = f"{path}.{local}" if path else local
            if name in stored and buffer.is_floating_point():
                del module._buffers[local]
                module.register_parameter(local, nn.Parameter(buffer.detach(), requires_grad=False))


@contextlib.contextmanager
def translate_config_errors(config: PretrainedConfig) -> Iterator[None]:
    """Convert any error of the family's code, caused by unexpected values, to CheckpointError."""
    try:
        yield
    except (CheckpointError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # GPU errors say nothing about the configuration
    except UnsupportedStructureError as error:
        raise CheckpointError(
            f"{file_of(config)}: the family {config.model_type!r} {error}, so it cannot be split into stages."
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"{file_of(config)} describes no model that can be built: {describe_error(error)}"
        ) from error


def file_of(config: PretrainedConfig) -> str:
    """Path of the configuration's file for messages, or "the configuration" without a file."""
    folder = getattr(config, "name_or_path", None)
    return str(Path(folder) / "config.json") if isinstance(folder, str) and folder else "the configuration"
