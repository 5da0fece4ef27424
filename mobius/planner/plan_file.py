"""Plan files (`plan.json`): written by a dry run or a run, and taken by a later run in place of its own choices.

A file names the model, ranks and step that its plan was made for. Another run is refused.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from mobius.config.config import ActivationOffloading, Config, Dtype, Order, PlanningConfig, Recompute, options
from mobius.config.validation import find_problems
from mobius.errors import PlanError, ScheduleError, excerpt, first_line, quoted, reason_of
from mobius.planner.request import PlanRequest
from mobius.regular_files import read_bytes
from mobius.schedule.partition import ModelShape, StageCut
from mobius.schedule.plan import Plan
from mobius.schedule.spec import ComputeOrder

logger = logging.getLogger(__name__)

VERSION = 2
ALL_AGAIN = "Make it anew with --dry_run, or leave --plan out."
PLAN_FIELDS: Final = {
    "num_ranks": "num_ranks",
    "num_microbatches": "num_microbatches",
    "num_rounds": "accumulation_rounds",
    "num_slices": "num_slices",
    "kept_products": "saved_product_stages",
    "kept_attention": "saved_attention_stages",
    "products_home": "num_offloaded_microbatches",
    "slots": "slots",
    "sum_buffers": "sum_buffers",
    "order": "order",
    "spans": "cuts",
    "resident": "resident",
    "kept_activations": "saved_activation_stages",
    "stashed_activations": "offloaded_activation_stages",
}
"""Key in the file -> field of `Plan`."""
_IN_ALL_FILES: Final = ("num_ranks", "num_microbatches", "slots", "spans", "resident", "kept_activations")
"""Keys that older files have too."""
_MOST_BYTES: Final = 1 << 24
_MOST: Final = 2**31
"""Upper bound of all numbers except those of the model, which are only compared."""
_MOST_PARAMETERS: Final = 2**62


@dataclass(frozen=True)
class ModelDigest:
    """Numbers that tell one model from another, as far as a plan depends on it."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    is_tied: bool
    dtype: str

    @classmethod
    def of(cls, shape: ModelShape, dtype: Dtype) -> ModelDigest:
        """Return the digest of a model in a working format."""
        sizes = (shape.num_parameters, shape.num_layers, shape.hidden_size, shape.vocab_size)
        return cls(*sizes, shape.is_tied, dtype.value)


@dataclass(frozen=True)
class SavedPlan:
    """A plan, and the model and step it was made for."""

    model: ModelDigest
    plan: Plan
    batch_size: int
    """Rows of a step of all replicas."""
    seq_length: int
    num_replicas: int = 1

    @classmethod
    def of(cls, request: PlanRequest, plan: Plan) -> SavedPlan:
        """Return the plan of a run as its file keeps it."""
        config = request.config
        digest = ModelDigest.of(request.shape, config.model.dtype)
        return cls(digest, plan, config.pipeline.batch_size, config.data.seq_length, request.machine.num_replicas)

    def to_json(self) -> str:
        """Return the file's text, with stages ascending, ending in a line break."""
        fields: dict[str, Any] = {"version": VERSION, **asdict(self)}
        plan = fields.pop("plan")
        if self.num_replicas == 1:
            del fields["num_replicas"]
        for key, name in PLAN_FIELDS.items():
            value = plan[name]
            fields[key] = sorted(value) if isinstance(value, frozenset) else value
        return json.dumps(fields, indent=2) + "\n"


def read_plan(path: Path) -> SavedPlan:
    """Read and check a plan file; raises PlanError with what is wrong with it."""
    shown = f"--plan {excerpt(str(path), 200)}"
    try:
        content = read_bytes(path, _MOST_BYTES)
    except (OSError, ValueError) as error:  # ValueError: no file can have this name
        raise PlanError(f"{shown} cannot be read: {reason_of(error)}. Name a plan.json.") from error
    try:
        fields = json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise PlanError(f"{shown}: its lists or objects are nested too deeply for a plan. {ALL_AGAIN}") from error
    except ValueError as error:
        raise PlanError(f"{shown} is no JSON: {excerpt(first_line(error), 200)}. {ALL_AGAIN}") from error
    version = fields.get("version") if isinstance(fields, dict) else None
    if type(version) is not int or version != VERSION:
        raise PlanError(f"{shown} has version {quoted(version)}, this program reads version {VERSION}. {ALL_AGAIN}")
    try:
        saved = SavedPlan(
            plan=_plan(fields),
            model=_digest(_field(fields, "model")),
            num_replicas=_whole(fields.get("num_replicas", 1), "num_replicas", least=1),
            batch_size=_whole(_field(fields, "batch_size"), "batch_size", least=1),
            seq_length=_whole(_field(fields, "seq_length"), "seq_length", least=2),
        )
        problem = next(_contradictions(saved), None)
    except _FieldError as error:
        problem = str(error)
    if problem is not None:
        raise PlanError(f"{shown} is broken: {problem}. {ALL_AGAIN}")
    return saved


class _FieldError(Exception):
    """A field that is missing or of the wrong kind, as text."""


def _plan(fields: Mapping[str, Any]) -> Plan:
    types = {field.name: str(field.type) for field in dataclasses.fields(Plan)}
    values = {}
    for key, name in PLAN_FIELDS.items():
        if key in fields or key in _IN_ALL_FILES:
            values[name] = _READERS[types[name]](_field(fields, key), key)
        if key in ("num_rounds", "num_slices"):
            _whole(values.get(name, 1), key, least=1)
    if fields.get("kept_level") == "products":  # of all stages, in files of version 0.1
        values["saved_product_stages"] = values["saved_activation_stages"]
    return Plan(num_stages=len(values["cuts"]), **values)


def _field(fields: Mapping[str, Any], name: str) -> object:
    if name not in fields:
        raise _FieldError(f"`{name}` is missing")
    return fields[name]


def _whole(value: object, name: str, *, least: int = 0) -> int:
    if type(value) is not int or not least <= value < _MOST:
        raise _FieldError(f"`{name}` is {quoted(value)}, not a whole number from {least} on")
    return value


def _order(value: object, name: str) -> ComputeOrder:
    orders = [order for order in ComputeOrder if order is not ComputeOrder.EVALUATION]
    if not isinstance(value, str) or value not in orders:
        raise _FieldError(f"`{name}` is {quoted(value)}, not one of {', '.join(orders)}")
    return ComputeOrder(value)


def _cut(value: object, name: str) -> StageCut:
    if not isinstance(value, dict):
        raise _FieldError(f"`{name}` is {quoted(value)}, not an object")
    stage, first, end = (_whole(value.get(key), f"{name}`.`{key}") for key in ("stage", "first_layer", "end_layer"))
    return StageCut(stage, first, end, value.get("is_first") is True, value.get("is_last") is True)


def _list_of(read: Callable[[object, str], Any], value: object, name: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _FieldError(f"`{name}` is {quoted(value)}, not a list")
    return tuple(read(each, f"{name}[{index}]") for index, each in enumerate(value))


_READERS: Final[dict[str, Callable[[object, str], Any]]] = {
    "int": _whole,
    "ComputeOrder": _order,
    "tuple[int, ...]": lambda value, name: _list_of(_whole, value, name),
    "tuple[StageCut, ...]": lambda value, name: _list_of(_cut, value, name),
    "frozenset[int]": lambda value, name: frozenset(_list_of(_whole, value, name)),
}
"""How a field of `Plan` is read, by its type."""


def _digest(value: object) -> ModelDigest:
    """The model's numbers, each of which is compared with that of a run."""
    types = {"int": int, "bool": bool, "str": str}
    kinds = {field.name: types[str(field.type)] for field in dataclasses.fields(ModelDigest)}
    if not isinstance(value, dict) or set(value) != set(kinds):
        raise _FieldError(f"`model` must hold {', '.join(kinds)}, not {quoted(value)}")
    for name, kind in kinds.items():
        if type(value[name]) is not kind or (kind is int and not 0 <= value[name] < _MOST_PARAMETERS):
            raise _FieldError(f"`model`.`{name}` is {quoted(value[name])}")
    if value["dtype"] not in list(Dtype):
        raise _FieldError(f"`model`.`dtype` is {quoted(value['dtype'])}, not one of {', '.join(Dtype)}")
    return ModelDigest(**value)


def _contradictions(saved: SavedPlan) -> Iterator[str]:
    """Contradictions in a plan, as text; each takes for granted that there is none before it."""
    plan, number, slices = saved.plan, saved.plan.num_stages, saved.plan.num_slices
    if plan.num_ranks < 1 or number < 1 or number % plan.num_ranks:
        yield f"{number} stages on {plan.num_ranks} ranks"
    for name, option, value in (
        ("num_microbatches", "num_chunks", plan.num_chunks),
        ("num_slices", "num_slices", slices),
        ("spans", "num_stages", number),
    ):
        bounds = options()[option].bounds
        if bounds is not None and not bounds.allow(value):
            yield f"`{name}` are {value}, which must be {bounds.demand(value)}"
    if plan.num_microbatches % slices or saved.seq_length % slices:
        yield f"{plan.num_microbatches} microbatches of {saved.seq_length} tokens in {slices} slices"
    if plan.num_chunks % plan.accumulation_rounds:
        yield f"{plan.num_chunks} microbatches in {plan.accumulation_rounds} rounds"
    if saved.batch_size % (plan.num_chunks * saved.num_replicas):
        each = f" of each of {saved.num_replicas} replicas" if saved.num_replicas > 1 else ""
        yield f"{saved.batch_size} sequences in {plan.num_chunks} microbatches{each}"
    starts = [0, *(cut.end_layer for cut in plan.cuts)]
    wanted = [(s, starts[s], s == 0, s == number - 1) for s in range(number)]
    if [(cut.stage, cut.first_layer, cut.is_first, cut.is_last) for cut in plan.cuts] != wanted:
        yield "its stages do not follow each other"
    if starts != sorted(starts) or starts[-1] != saved.model.num_layers:
        yield f"its stages do not hold the model's {saved.model.num_layers} layers"
    yield from _contradictions_of_stages(plan)


def _contradictions_of_stages(plan: Plan) -> Iterator[str]:
    saved, offloaded = plan.saved_activation_stages, plan.offloaded_activation_stages
    if not plan.saved_product_stages <= saved:
        yield "stages that keep products alone are among those that keep activations"
    if not (plan.resident | saved | offloaded | plan.saved_attention_stages) <= set(range(plan.num_stages)):
        yield "resident stages, or stages with saved or offloaded activations, name a stage that there is not"
    if both := sorted(offloaded & (saved | {plan.num_stages - 1})):
        yield f"the stages {both} offload activations, which the last stage and those that save them cannot"
    most = plan.microbatches_per_round if offloaded and plan.num_slices == 1 else 0
    if plan.num_offloaded_microbatches > most:
        yield (
            f"products of {plan.num_offloaded_microbatches} microbatches of a round are offloaded, which has "
            f"{plan.microbatches_per_round}; this needs stages that offload activations, and no slices"
        )
    if saved and plan.num_slices > 1:
        yield f"the stages {sorted(saved)} keep activations, but slices are recomputed"
    if plan.saved_attention_stages and plan.num_slices == 1:
        yield "attention's results are saved, but sequences are not in slices"
    if len(plan.slots) != plan.num_ranks:
        yield f"slots of {len(plan.slots)} ranks, not {plan.num_ranks}"
    if plan.sum_buffers and len(plan.sum_buffers) != plan.num_ranks:
        yield f"sum buffers of {len(plan.sum_buffers)} ranks, not {plan.num_ranks}"
    for rank, slots in enumerate(plan.slots):
        streamed = plan.streamed_stages(rank)
        if not min(1, len(streamed)) <= slots <= len(streamed):
            yield f"{slots} slots for the {len(streamed)} streamed stages of rank {rank}"
        if lost := sorted(saved.intersection(streamed[: len(streamed) - slots])):
            yield f"the stages {lost} keep activations, but their weights leave"
    try:
        plan.check_numbers()
    except ScheduleError as error:
        yield str(error)


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


def apply_saved_plan(config: Config, *, given: Collection[str]) -> tuple[Config, SavedPlan | None]:
    """Read `--plan`, if it is given, and put its numbers into the config.

    Raises PlanError for a file that cannot be used, and for every option in `given` (set by the user) that says
    something else.
    """
    if config.planning.plan is None:
        return config, None
    path = Path(config.planning.plan)
    saved = read_plan(path)
    problems = [text for name, text in _differences(config, saved) if name in given]
    if problems:
        raise PlanError(
            f"--plan {path} contradicts what else is given: {'; '.join(problems)}. Leave these options out, or make "
            "the plan anew with them (--dry_run)."
        )
    plan = saved.plan
    pipeline = replace(
        config.pipeline,
        batch_size=saved.batch_size,
        num_chunks=plan.num_chunks,
        num_slices=plan.num_slices,
        num_rounds=plan.accumulation_rounds,
        compute_order=Order(plan.order.value),
        num_stages=plan.num_stages,
        use_offload=plan.num_slots is not None,
        use_prefetch=plan.num_slots != 1 or plan.stages_per_rank == 1,
    )
    config = replace(config, pipeline=pipeline, data=replace(config.data, seq_length=saved.seq_length))
    if invalid := find_problems(replace(config, planning=PlanningConfig())):
        raise PlanError(f"--plan {path} cannot be run: {'; '.join(invalid)}. Make it anew with --dry_run.")
    logger.info("plan taken from %s: %d stages, %d chunks", path, plan.num_stages, plan.num_chunks)
    return config, saved


def _differences(config: Config, saved: SavedPlan) -> Iterator[tuple[str, str]]:
    """Options that differ from the plan, each with the difference as text."""
    plan, pipeline = saved.plan, config.pipeline
    for name, own, planned in (
        ("batch_size", pipeline.batch_size, saved.batch_size),
        ("seq_length", config.data.seq_length, saved.seq_length),
        ("num_stages", pipeline.num_stages, plan.num_stages),
        ("num_chunks", pipeline.num_chunks, plan.num_chunks),
        ("num_slices", pipeline.num_slices, plan.num_slices),
        ("num_rounds", pipeline.num_rounds, plan.accumulation_rounds),
        ("dtype", config.model.dtype.value, saved.model.dtype),
    ):
        if own is not None and own != planned:  # None: auto, and the plan is an answer to that
            yield name, f"--{name} {own}, the plan has {planned}"
    if pipeline.compute_order not in (Order.AUTO, plan.order.value):
        yield "compute_order", f"--compute_order {pipeline.compute_order}, the plan is {plan.order}"
    residents = sorted({plan.use_of(rank).num_resident for rank in range(plan.num_ranks)})
    wanted = plan.stages_per_rank if pipeline.resident_stages == "all" else pipeline.num_resident_stages
    if wanted is not None and residents != [wanted]:
        shown = " to ".join(map(str, dict.fromkeys((residents[0], residents[-1]))))
        yield "resident_stages", f"--resident_stages {pipeline.resident_stages}, the plan has {shown} on each rank"
    if not pipeline.use_offload and plan.num_slots is not None:
        yield "use_offload", f"--no_offload, the plan streams {plan.num_stages - len(plan.resident)} stages"
    if not pipeline.use_prefetch and (plan.num_slots or 1) > 1:
        yield "use_prefetch", f"--no_prefetch, the plan has {plan.num_slots} slots"
    offloaded = len(plan.offloaded_activation_stages)
    could = len(set(range(plan.num_stages - 1)) - plan.saved_activation_stages)
    text = f"--activation_offloading {pipeline.activation_offloading}, the plan offloads activations of {offloaded}"
    if pipeline.activation_offloading is ActivationOffloading.OFF and offloaded:
        yield "activation_offloading", f"{text} stages"
    if pipeline.activation_offloading is ActivationOffloading.ON and offloaded < could:
        yield "activation_offloading", f"{text} of {could} stages"
    if (contradiction := _recompute_difference(plan, pipeline.recompute)) is not None:
        yield "recompute", f"--recompute {pipeline.recompute}, the plan {contradiction}"


def _recompute_difference(plan: Plan, asked: Recompute) -> str | None:
    saved, attention = len(plan.saved_activation_stages), len(plan.saved_attention_stages)
    if asked.saves_activations and saved < plan.num_stages:
        return f"keeps activations of {saved} stages only"
    products = saved if asked is Recompute.ELEMENTWISE else 0
    if asked.saves_activations and len(plan.saved_product_stages) != products:
        return f"keeps products alone in {len(plan.saved_product_stages)} stages"
    if asked is Recompute.LINEAR and attention < plan.num_stages:
        return f"keeps attention's results of {attention} stages only"
    if attention and asked not in (Recompute.AUTO, Recompute.LINEAR):
        return "keeps results of attention"
    if plan.num_offloaded_microbatches and asked is not Recompute.AUTO:
        return f"offloads products of {plan.num_offloaded_microbatches} microbatches"
    if asked is Recompute.FULL and saved:
        return f"keeps activations of {saved} stages"
    return None
