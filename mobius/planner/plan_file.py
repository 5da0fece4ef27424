"""Plan files (`plan.json`): a dry run or a run writes one, and a later run can use it instead of planning again.

A file names the model, ranks and step for which its plan was made. A run that differs in model, ranks or step is
refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final

from mobius.config.config import (
    ActivationOffloading,
    Config,
    Dtype,
    Order,
    PipelineConfig,
    PlanningConfig,
    Recompute,
    config_from,
    option_values,
)
from mobius.config.options import COUNT, OptionValue
from mobius.config.validation import find_problems
from mobius.errors import PlanError, ScheduleError, excerpt, quoted
from mobius.files.regular_files import parse_json, read_text, typed_object
from mobius.planner.request import PlanRequest
from mobius.schedule.partition import ModelShape, StageCut
from mobius.schedule.plan import Plan

logger = logging.getLogger(__name__)

VERSION = 3
ALL_AGAIN = "Name another file, make it again with --dry_run, or leave --plan out."
_NOT_IN_FILES: Final = {"num_stages", "states_in_memory"}
"""Fields of a plan that follow from its cuts, or that each run chooses by the memory that it may use."""
PLAN_FIELDS: Final = [field.name for field in fields(Plan) if field.name not in _NOT_IN_FILES]
_MOST_BYTES: Final = 1 << 24


@dataclass(frozen=True)
class ModelDigest:
    """Numbers by which a plan recognizes its model."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    is_tied: bool
    dtype: Dtype

    @classmethod
    def of(cls, shape: ModelShape, dtype: Dtype) -> ModelDigest:
        """Return the digest of a model in a working format."""
        sizes = (shape.num_parameters, shape.num_layers, shape.hidden_size, shape.vocab_size)
        return cls(*sizes, shape.is_tied, dtype)


@dataclass(frozen=True)
class SavedPlan:
    """A plan, and the model and step for which it was made."""

    model: ModelDigest
    plan: Plan
    batch_size: int
    """Rows of a step in all replicas together."""
    seq_length: int
    num_replicas: Annotated[int, COUNT] = 1

    @classmethod
    def of(cls, request: PlanRequest, plan: Plan) -> SavedPlan:
        """Return the plan of a run together with the run's model and step."""
        config = request.config
        digest = ModelDigest.of(request.shape, config.model.dtype)
        return cls(digest, plan, config.pipeline.batch_size, config.data.seq_length, request.machine.num_replicas)

    def to_json(self) -> str:
        """Return the file's text, which ends in a line break; stages are in ascending order."""
        content: dict[str, Any] = {"version": VERSION, **asdict(self)}
        plan = content.pop("plan")
        for name in PLAN_FIELDS:
            content[name] = sorted(plan[name]) if isinstance(plan[name], frozenset) else plan[name]
        return json.dumps(content, indent=2) + "\n"


def read_plan(path: Path) -> SavedPlan:
    """Read and check a plan file; raises PlanError that says what is wrong."""
    try:
        content = parse_json(read_text(path, PlanError, max_bytes=_MOST_BYTES), path, PlanError)
    except PlanError as error:
        raise PlanError(f"--plan {error} {ALL_AGAIN}") from error
    version = content.get("version") if isinstance(content, dict) else None
    if type(version) is not int or version != VERSION:
        raise PlanError(
            f"--plan {path} has version {quoted(version)}, this program reads version {VERSION}. {ALL_AGAIN}"
        )
    try:
        saved = _saved_plan(content)
        problem = next(_contradictions(saved), None)
    except ScheduleError as error:
        problem = str(error)
    except ValueError as error:
        problem = f"it {error}"
    if problem is not None:
        raise PlanError(f"--plan {path} is broken: {excerpt(problem, 300)}. {ALL_AGAIN}")
    return saved


def _saved_plan(content: Mapping[str, Any]) -> SavedPlan:
    """Convert a file's values to `SavedPlan` with its `Plan`; raises ValueError with a text that follows "it"."""
    cuts = content.get("cuts")
    own = {name: content[name] for name in PLAN_FIELDS if name in content}
    own |= {"num_stages": len(cuts) if isinstance(cuts, list) else 0, "states_in_memory": []}
    others = {name: value for name, value in content.items() if name not in {"version", *PLAN_FIELDS}}
    return typed_object(SavedPlan, {**others, "plan": typed_object(Plan, own)})


def _contradictions(saved: SavedPlan) -> Iterator[str]:
    """Yield contradictions in a plan as text; each check assumes that earlier ones passed. Raises ScheduleError."""
    plan, number = saved.plan, saved.plan.num_stages
    if plan.is_evaluation:
        yield f"`order` is {plan.order}, not {Order.BREADTH_FIRST} or {Order.DEPTH_FIRST}"
    if not plan.num_ranks == len(plan.slots) > 0:
        yield f"`slots` of {len(plan.slots)} ranks, not {plan.num_ranks}"
    if len(plan.sum_buffers) not in (0, plan.num_ranks):
        yield f"`sum_buffers` of {len(plan.sum_buffers)} ranks, not {plan.num_ranks}"
    plan.check_numbers()
    yield from find_problems(config_from(_options_of(saved)), num_ranks=plan.num_ranks, num_replicas=saved.num_replicas)
    starts = [0, *(cut.end_layer for cut in plan.cuts)]
    in_turn = [StageCut(s, starts[s], starts[s + 1], s == 0, s == number - 1) for s in range(number)]
    if [*plan.cuts] != in_turn or starts != sorted(starts) or starts[-1] != saved.model.num_layers:
        yield f"`cuts` do not hold the model's {saved.model.num_layers} layers one after the other"
    yield from _contradictions_of_stages(plan)


def _contradictions_of_stages(plan: Plan) -> Iterator[str]:
    """Yield contradictions about the memory use of stages, like `_contradictions`."""
    number, num_saving_attention = plan.num_stages, len(plan.saved_attention_stages)
    usual = plan.with_memory_uses([plan.use_of(rank) for rank in range(plan.num_ranks)])
    usual = replace(usual, saved_attention_stages=frozenset(range(number - num_saving_attention, number)))
    for name in PLAN_FIELDS:
        own, wanted = getattr(plan, name), getattr(usual, name)
        if own not in (wanted, ()):  # a file may omit sum buffers
            yield (
                f"`{name}` is {_listed(own)}, and would be {_listed(wanted)}: a rank's first stages are resident "
                "or offload activations, its last stages keep activations, and it has at most a slot per streamed stage"
            )
    saved = plan.saved_activation_stages
    if saved and plan.num_slices > 1:
        yield f"the stages {_listed(saved)} keep activations, but slices are recomputed"
    if num_saving_attention and plan.num_slices == 1:
        yield "attention's results are kept, but sequences are not in slices"
    if plan.num_offloaded_microbatches and not plan.offloaded_activation_stages:
        yield f"products of {plan.num_offloaded_microbatches} microbatches are offloaded, but no stage offloads"
    for rank, slots in enumerate(plan.slots):
        streamed = saved.intersection(plan.streamed_stages(rank))
        if len(streamed) > slots:
            yield f"the stages {_listed(streamed)} keep activations, but {slots} slots cannot keep their weights"


def _listed(numbers: Collection[int]) -> str:
    return excerpt(str(sorted(numbers) if isinstance(numbers, frozenset) else [*numbers]))


def check_saved_plan(
    saved: SavedPlan, path: Path, *, model: ModelDigest, num_ranks: int, num_replicas: int = 1
) -> None:
    """Raise PlanError if the plan is for another model, or another number of ranks of a pipeline or of replicas."""
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

    Raises PlanError if the file cannot be used, or if an option in `given` (set by the user) contradicts it.
    """
    if config.planning.plan is None:
        return config, None
    path = Path(config.planning.plan)
    saved = read_plan(path)
    if problems := [*_differences(config, saved, given)]:
        raise PlanError(
            f"--plan {path} contradicts other options: {'; '.join(problems)}. Leave these options out, or make the "
            "plan again with them (--dry_run)."
        )
    config = config_from({**option_values(config), **_options_of(saved)})
    if invalid := find_problems(replace(config, planning=PlanningConfig())):
        raise PlanError(f"--plan {path} cannot be run: {'; '.join(invalid)}. Make it again with --dry_run.")
    logger.info("plan read from %s: %d stages, %d chunks", path, saved.plan.num_stages, saved.plan.num_chunks)
    return config, saved


def _options_of(saved: SavedPlan) -> dict[str, OptionValue]:
    """Options that a run takes from a plan, by name."""
    plan = saved.plan
    return {
        "batch_size": saved.batch_size,
        "seq_length": saved.seq_length,
        "num_stages": plan.num_stages,
        "num_chunks": plan.num_chunks,
        "num_slices": plan.num_slices,
        "num_rounds": plan.num_rounds,
        "compute_order": Order(plan.order.value),
        "spread_head": plan.spreads_head,
        "use_offload": plan.num_slots is not None,
        "use_prefetch": plan.num_slots != 1 or plan.stages_per_rank == 1,
    }


def _differences(config: Config, saved: SavedPlan, given: Collection[str]) -> Iterator[str]:
    """Options in `given` that contradict the plan, each with the difference as text."""
    values, numbers = option_values(config), {**_options_of(saved), "dtype": saved.model.dtype}
    agreements = {
        name: (values[name] in (None, "auto", number), f"has {number}")  # None means auto
        for name, number in numbers.items()
    }
    agreements |= _agreements_of_stages(saved.plan, config.pipeline)
    for name, (agrees, text) in agreements.items():
        if name in given and not agrees:
            own = f"--no_{name.removeprefix('use_')}" if values[name] is False else f"--{name} {values[name]}"
            yield f"{own}, the plan {text}"


def _agreements_of_stages(plan: Plan, asked: PipelineConfig) -> dict[str, tuple[bool, str]]:
    """Return for each option whether it agrees with the plan's stages, and a text that says what the plan does."""
    number, saved, offloaded = plan.num_stages, plan.saved_activation_stages, plan.offloaded_activation_stages
    residents = sorted({plan.use_of(rank).num_resident for rank in range(plan.num_ranks)})
    num_resident = plan.stages_per_rank if asked.resident_stages == "all" else asked.num_resident_stages
    num_offloadable = len(set(range(number - 1)) - saved)
    offloading = {ActivationOffloading.OFF: 0, ActivationOffloading.ON: num_offloadable}
    products, attention = len(plan.saved_product_stages), len(plan.saved_attention_stages)
    saving = (len(saved), products, attention, plan.num_offloaded_microbatches)
    recompute = {
        Recompute.FULL: (0, 0, 0, 0),
        Recompute.LINEAR: (0, 0, number, 0),
        Recompute.ELEMENTWISE: (number, number, 0, 0),
        Recompute.NONE: (number, 0, 0, 0),
    }
    return {
        "resident_stages": (
            num_resident is None or residents == [num_resident],
            f"has {' or '.join(map(str, residents))} on each rank",
        ),
        "use_offload": (asked.use_offload or plan.num_slots is None, f"streams {number - len(plan.resident)} stages"),
        "use_prefetch": (asked.use_prefetch or plan.num_slots in (None, 1), f"has {plan.num_slots} slots"),
        "activation_offloading": (
            len(offloaded) == offloading.get(asked.activation_offloading, len(offloaded)),
            f"offloads activations of {len(offloaded)} of {num_offloadable} stages",
        ),
        "recompute": (
            saving == recompute.get(asked.recompute, saving),
            f"keeps activations of {len(saved)} stages, only products in {products} of these, attention's results of "
            f"{attention}, and offloads products of {plan.num_offloaded_microbatches} microbatches",
        ),
    }
