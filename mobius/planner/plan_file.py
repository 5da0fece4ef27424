"""A plan as a file: written before or by a run, and taken by a later one in place of its own choices.

It says for which model and ranks it was made; another one is refused. It knows neither options nor devices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mobius.config import Dtype
from mobius.errors import PlanError
from mobius.planner.partition import StageSpan
from mobius.planner.plan import Plan
from mobius.planner.shape import ModelShape

VERSION = 2
ALL_AGAIN = "Make it anew with --dry_run, or leave --plan out."


@dataclass(frozen=True)
class ModelDigest:
    """What tells one model from another, as far as a plan goes."""

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
    """A plan, which stages of it keep their activations, and the step it was made for."""

    model: ModelDigest
    plan: Plan
    graph_stages: frozenset[int]
    batch_size: int
    seq_length: int

    def to_json(self) -> str:
        """The file's text, stages ascending, ending in a line break."""
        plan = {**asdict(self.plan), "resident": sorted(self.plan.resident)}
        fields = {
            "version": VERSION,
            "model": asdict(self.model),
            "batch_size": self.batch_size,
            "seq_length": self.seq_length,
            **plan,
            "kept_activations": sorted(self.graph_stages),
        }
        return json.dumps(fields, indent=2) + "\n"


def read_plan(path: Path) -> SavedPlan:
    """Read and check a file; raises PlanError with what is wrong with it."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"--plan {path} cannot be read: {error.strerror}. Name a plan.json.") from error
    except ValueError as error:
        raise PlanError(f"--plan {path} is no JSON: {error}. {ALL_AGAIN}") from error
    version = fields.get("version") if isinstance(fields, dict) else None
    if version != VERSION:
        raise PlanError(f"--plan {path} has version {version}, this program reads version {VERSION}. {ALL_AGAIN}")
    try:
        saved = _saved_plan(fields)
        problem = _contradiction(saved)
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__} {error}"
    if problem is not None:
        raise PlanError(f"--plan {path} is broken: {problem}. {ALL_AGAIN}")
    return saved


def _saved_plan(fields: Mapping[str, Any]) -> SavedPlan:
    spans = tuple(
        StageSpan(
            _count(span["stage"]),
            _count(span["first_layer"]),
            _count(span["end_layer"]),
            span["is_first"] is True,
            span["is_last"] is True,
        )
        for span in fields["spans"]
    )
    plan = Plan(
        _count(fields["num_ranks"]),
        _count(fields["num_microbatches"]),
        tuple(map(_count, fields["slots"])),
        spans,
        frozenset(map(_count, fields["resident"])),
    )
    kept = frozenset(map(_count, fields["kept_activations"]))
    digest = ModelDigest(**fields["model"])
    return SavedPlan(digest, plan, kept, _count(fields["batch_size"]), _count(fields["seq_length"]))


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a whole number from 0 on")
    return value


def _contradiction(saved: SavedPlan) -> str | None:
    """What cannot be in a plan, as text."""
    plan, number = saved.plan, saved.plan.num_stages
    if plan.num_ranks < 1 or number < 1 or number % plan.num_ranks:
        return f"{number} stages on {plan.num_ranks} ranks"
    if plan.num_microbatches < 1 or saved.batch_size % plan.num_microbatches:
        return f"{saved.batch_size} sequences in {plan.num_microbatches} microbatches"
    starts = [0, *(span.end_layer for span in plan.spans)]
    wanted = [(s, starts[s], s == 0, s == number - 1) for s in range(number)]
    if [(span.stage, span.first_layer, span.is_first, span.is_last) for span in plan.spans] != wanted:
        return "its stages do not follow each other"
    if any(span.end_layer < span.first_layer for span in plan.spans) or starts[-1] != saved.model.num_layers:
        return f"its stages do not hold the model's {saved.model.num_layers} layers"
    if not (plan.resident | saved.graph_stages) <= set(range(number)):
        return "resident stages or kept activations name a stage that there is not"
    if len(plan.slots) != plan.num_ranks:
        return f"slots of {len(plan.slots)} ranks, not {plan.num_ranks}"
    for rank in range(plan.num_ranks):
        streamed = plan.streamed_stages(rank)
        if not min(1, len(streamed)) <= plan.slots[rank] <= len(streamed):
            return f"{plan.slots[rank]} slots for the {len(streamed)} streamed stages of rank {rank}"
        staying = set(streamed[len(streamed) - plan.slots[rank] :])
        lost = sorted(saved.graph_stages & set(streamed) - staying)
        if lost:
            return f"the stages {lost} keep activations, but their weights leave"
    return None


def check_saved_plan(saved: SavedPlan, path: Path, *, model: ModelDigest, num_ranks: int) -> None:
    """Raise PlanError if the plan was made for another model or number of ranks."""
    if saved.model != model:
        own, other = asdict(model), asdict(saved.model)
        parts = ", ".join(f"{name} {other[name]} (here {own[name]})" for name in own if own[name] != other[name])
        raise PlanError(f"--plan {path} is of another model: {parts}. {ALL_AGAIN}")
    if saved.plan.num_ranks != num_ranks:
        raise PlanError(
            f"--plan {path} is for {saved.plan.num_ranks} rank(s), {num_ranks} are started. Start "
            f"{saved.plan.num_ranks} (--nproc_per_node), or make a plan with --dry_run --num_ranks {num_ranks}."
        )
