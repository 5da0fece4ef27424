"""A plan as a file: written before or by a run, and taken by a later one in place of its own choices.

It says for which model and ranks it was made; another one is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any, Final

from mobius.config.config import Dtype, options
from mobius.errors import PlanError, excerpt, first_line, quoted, reason_of
from mobius.regular_files import read_bytes
from mobius.schedule.partition import ModelShape, StageCut
from mobius.schedule.plan import Plan, RecomputeLevel

VERSION = 2
ALL_AGAIN = "Make it anew with --dry_run, or leave --plan out."
_MOST_BYTES: Final = 1 << 24
_MOST: Final = 2**31
"""Limit of all numbers of a plan but a model's, which are only compared."""
_MOST_PARAMETERS: Final = 2**62


@dataclass(frozen=True)
class ModelDigest:
    """Numbers that tell one model from another, as far as a plan goes."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    is_tied: bool
    dtype: str

    @classmethod
    def of(cls, shape: ModelShape, dtype: Dtype) -> ModelDigest:
        """The digest of a model in a working format."""
        return cls(
            shape.num_parameters, shape.num_layers, shape.hidden_size, shape.vocab_size, shape.is_tied, dtype.value
        )


@dataclass(frozen=True)
class SavedPlan:
    """A plan, and the model and step it was made for."""

    model: ModelDigest
    plan: Plan
    batch_size: int
    """Rows of a step of all replicas."""
    seq_length: int
    num_replicas: int = 1

    def to_json(self) -> str:
        """The file's text, stages ascending, ending in a line break."""
        plan = self.plan
        fields = {
            "version": VERSION,
            "model": asdict(self.model),
            "batch_size": self.batch_size,
            "seq_length": self.seq_length,
            **({"num_replicas": self.num_replicas} if self.num_replicas > 1 else {}),
            "num_ranks": plan.num_ranks,
            "num_microbatches": plan.num_microbatches,
            "num_rounds": plan.accumulation_rounds,
            "num_slices": plan.num_slices,
            "kept_level": plan.recompute_level,
            "kept_attention": sorted(plan.saved_attention_stages),
            "products_home": plan.num_offloaded_microbatches,
            "slots": plan.slots,
            "spans": [asdict(cut) for cut in plan.cuts],
            "resident": sorted(plan.resident),
            "kept_activations": sorted(plan.saved_activation_stages),
            "stashed_activations": sorted(plan.offloaded_activation_stages),
        }
        return json.dumps(fields, indent=2) + "\n"


def read_plan(path: Path) -> SavedPlan:
    """Read and check a file; raises PlanError with what is wrong with it."""
    shown = excerpt(str(path), 200)
    fields = _read_fields(path, shown)
    version = fields.get("version") if isinstance(fields, dict) else None
    if type(version) is not int or version != VERSION:
        raise PlanError(
            f"--plan {shown} has version {quoted(version)}, this program reads version {VERSION}. {ALL_AGAIN}"
        )
    try:
        saved = _saved_plan(fields)
        problem = _contradiction(saved)
    except _FieldError as error:
        problem = str(error)
    if problem is not None:
        raise PlanError(f"--plan {shown} is broken: {problem}. {ALL_AGAIN}")
    return saved


def _read_fields(path: Path, shown: str) -> Any:
    try:
        content = read_bytes(path, _MOST_BYTES)
    except (OSError, ValueError) as error:  # ValueError: no file can have this name
        raise PlanError(f"--plan {shown} cannot be read: {reason_of(error)}. Name a plan.json.") from error
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise PlanError(
            f"--plan {shown}: its lists or objects are nested too deeply for a plan. {ALL_AGAIN}"
        ) from error
    except ValueError as error:
        raise PlanError(f"--plan {shown} is no JSON: {excerpt(first_line(error), 200)}. {ALL_AGAIN}") from error


class _FieldError(Exception):
    """A field that is missing or of another kind than a plan's, as text."""


def _saved_plan(fields: Mapping[str, Any]) -> SavedPlan:
    cuts = tuple(_cut(value, f"spans[{index}]") for index, value in enumerate(_list(fields, "spans")))
    plan = Plan(
        _count(fields, "num_ranks"),
        len(cuts),
        _count(fields, "num_microbatches"),
        _counts(fields, "slots"),
        frozenset(_counts(fields, "resident")),
        # plans from before rounds and slices have none of these
        _count(fields, "num_rounds", least=1) if "num_rounds" in fields else 1,
        _count(fields, "num_slices", least=1) if "num_slices" in fields else 1,
        frozenset(_counts(fields, "stashed_activations") if "stashed_activations" in fields else ()),
        _count(fields, "products_home") if "products_home" in fields else 0,
        cuts=cuts,
        saved_activation_stages=frozenset(_counts(fields, "kept_activations")),
        recompute_level=_level(fields["kept_level"]) if "kept_level" in fields else RecomputeLevel.NONE,
        saved_attention_stages=frozenset(_counts(fields, "kept_attention") if "kept_attention" in fields else ()),
    )
    digest = _digest(_field(fields, "model"))
    num_replicas = _count(fields, "num_replicas", least=1) if "num_replicas" in fields else 1
    rows, length = _count(fields, "batch_size", least=1), _count(fields, "seq_length", least=2)
    return SavedPlan(digest, plan, rows, length, num_replicas)


def _level(value: object) -> RecomputeLevel:
    if not isinstance(value, str) or value not in list(RecomputeLevel):
        raise _FieldError(f"`kept_level` is {quoted(value)}, not one of {', '.join(RecomputeLevel)}")
    return RecomputeLevel(value)


def _cut(value: object, name: str) -> StageCut:
    if not isinstance(value, dict):
        raise _FieldError(f"`{name}` is {quoted(value)}, not an object")
    stage, first, end = (_whole(value.get(key), f"{name}`.`{key}") for key in ("stage", "first_layer", "end_layer"))
    return StageCut(stage, first, end, value.get("is_first") is True, value.get("is_last") is True)


def _digest(value: object) -> ModelDigest:
    """The model's numbers, of which every one is compared with those of a run."""
    kinds = {
        known.name: {"int": int, "bool": bool, "str": str}[str(known.type)] for known in dataclass_fields(ModelDigest)
    }
    if not isinstance(value, dict) or set(value) != set(kinds):
        raise _FieldError(f"`model` must hold {', '.join(kinds)}, not {quoted(value)}")
    for name, kind in kinds.items():
        if type(value[name]) is not kind or (kind is int and not 0 <= value[name] < _MOST_PARAMETERS):
            raise _FieldError(f"`model`.`{name}` is {quoted(value[name])}")
    if value["dtype"] not in list(Dtype):
        raise _FieldError(f"`model`.`dtype` is {quoted(value['dtype'])}, not one of {', '.join(Dtype)}")
    return ModelDigest(**value)


def _field(fields: Mapping[str, Any], name: str) -> object:
    if name not in fields:
        raise _FieldError(f"`{name}` is missing")
    return fields[name]


def _list(fields: Mapping[str, Any], name: str) -> list[object]:
    value = _field(fields, name)
    if not isinstance(value, list):
        raise _FieldError(f"`{name}` is {quoted(value)}, not a list")
    return value


def _counts(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    return tuple(_whole(value, f"{name}[{index}]") for index, value in enumerate(_list(fields, name)))


def _count(fields: Mapping[str, Any], name: str, *, least: int = 0) -> int:
    return _whole(_field(fields, name), name, least=least)


def _whole(value: object, name: str, *, least: int = 0) -> int:
    if type(value) is not int or not least <= value < _MOST:
        raise _FieldError(f"`{name}` is {quoted(value)}, not a whole number from {least} on")
    return value


def _contradiction(saved: SavedPlan) -> str | None:
    """A contradiction in the plan, as text; None if there is none."""
    return _contradiction_of_numbers(saved) or _contradiction_of_stages(saved.plan, saved.model.num_layers)


def _contradiction_of_numbers(saved: SavedPlan) -> str | None:
    plan, number = saved.plan, saved.plan.num_stages
    if plan.num_ranks < 1 or number < 1 or number % plan.num_ranks:
        return f"{number} stages on {plan.num_ranks} ranks"
    for name, option, value in (
        ("num_microbatches", "num_chunks", plan.num_chunks),
        ("num_slices", "num_slices", plan.num_slices),
        ("spans", "num_stages", number),
    ):
        bounds = options()[option].bounds
        if bounds is not None and not bounds.allow(value):
            return f"`{name}` are {value}, which must be {bounds.demand(value)}"
    if plan.num_microbatches % plan.num_slices or saved.seq_length % plan.num_slices:
        return f"{plan.num_microbatches} microbatches of {saved.seq_length} tokens in {plan.num_slices} slices"
    if plan.num_chunks % plan.accumulation_rounds:
        return f"{plan.num_chunks} microbatches in {plan.accumulation_rounds} rounds"
    if saved.batch_size % (plan.num_chunks * saved.num_replicas):
        each = f" of each of {saved.num_replicas} replicas" if saved.num_replicas > 1 else ""
        return f"{saved.batch_size} sequences in {plan.num_chunks} microbatches{each}"
    return None


def _contradiction_of_stages(plan: Plan, num_layers: int) -> str | None:
    number = plan.num_stages
    starts = [0, *(cut.end_layer for cut in plan.cuts)]
    wanted = [(s, starts[s], s == 0, s == number - 1) for s in range(number)]
    if [(cut.stage, cut.first_layer, cut.is_first, cut.is_last) for cut in plan.cuts] != wanted:
        return "its stages do not follow each other"
    if any(cut.end_layer < cut.first_layer for cut in plan.cuts) or starts[-1] != num_layers:
        return f"its stages do not hold the model's {num_layers} layers"
    if not (
        plan.resident | plan.saved_activation_stages | plan.offloaded_activation_stages | plan.saved_attention_stages
    ) <= set(range(number)):
        return "resident stages, kept or stashed activations name a stage that there is not"
    if both := sorted(plan.offloaded_activation_stages & (plan.saved_activation_stages | {number - 1})):
        return f"the stages {both} stash activations, which those that keep them and the last one cannot"
    if plan.num_offloaded_microbatches > (
        plan.microbatches_per_round if plan.offloaded_activation_stages and plan.num_slices == 1 else 0
    ):
        told = f"products of {plan.num_offloaded_microbatches} microbatches of a round go home"
        return f"{told}, which has {plan.microbatches_per_round}; it takes stages that stash, and no slices"
    if plan.saved_activation_stages and plan.num_slices > 1:
        return f"the stages {sorted(plan.saved_activation_stages)} keep activations, but slices are recomputed"
    if plan.saved_attention_stages and plan.num_slices == 1:
        return "attention's results are kept, but sequences are not in slices"
    return _contradiction_of_slots(plan)


def _contradiction_of_slots(plan: Plan) -> str | None:
    if len(plan.slots) != plan.num_ranks:
        return f"slots of {len(plan.slots)} ranks, not {plan.num_ranks}"
    for rank in range(plan.num_ranks):
        streamed = plan.streamed_stages(rank)
        if not min(1, len(streamed)) <= plan.slots[rank] <= len(streamed):
            return f"{plan.slots[rank]} slots for the {len(streamed)} streamed stages of rank {rank}"
        in_slots = set(streamed[len(streamed) - plan.slots[rank] :])
        lost = sorted(plan.saved_activation_stages & set(streamed) - in_slots)
        if lost:
            return f"the stages {lost} keep activations, but their weights leave"
    return None


def check_saved_plan(
    saved: SavedPlan, path: Path, *, model: ModelDigest, num_ranks: int, num_replicas: int = 1
) -> None:
    """Raise PlanError if the plan was made for another model, number of ranks of a pipeline, or of replicas."""
    if saved.model != model:
        own, other = asdict(model), asdict(saved.model)
        parts = ", ".join(f"{name} {other[name]} (here {own[name]})" for name in own if own[name] != other[name])
        raise PlanError(f"--plan {path} is of another model: {parts}. {ALL_AGAIN}")
    if saved.plan.num_ranks != num_ranks:
        raise PlanError(
            f"--plan {path} is for {saved.plan.num_ranks} rank(s), {num_ranks} are started. Start "
            f"{saved.plan.num_ranks} (--nproc_per_node), or make a plan with --dry_run --num_ranks {num_ranks}."
        )
    if saved.num_replicas != num_replicas:
        raise PlanError(
            f"--plan {path} is for {saved.num_replicas} replica(s) of the pipeline, {num_replicas} are started. Start "
            f"{saved.num_replicas} (--nnodes, --pipeline_ranks), or make a plan for {num_replicas} with --dry_run."
        )
