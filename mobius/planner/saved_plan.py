"""A saved plan and a run: what of it a run takes, and what a run leaves for a later one."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from mobius.config.config import ActivationOffloading, Config, PlanningConfig, Recompute
from mobius.config.validation import find_problems
from mobius.errors import PlanError
from mobius.planner.plan_file import ModelDigest, SavedPlan, read_plan
from mobius.planner.solver import PlanResult
from mobius.schedule.plan import recompute_level_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConfigWithPlan:
    """A config with the numbers of the plan that it names, if it names one."""

    config: Config
    saved: SavedPlan | None


def apply_saved_plan(config: Config, *, given: Collection[str]) -> ConfigWithPlan:
    """Read `--plan` and put its numbers into the config.

    Raises PlanError for a file that cannot be used, and for every option in `given` (set by the user) that says
    something else.
    """
    if config.planning.plan is None:
        return ConfigWithPlan(config, None)
    path = Path(config.planning.plan)
    saved = read_plan(path)
    problems = [text for name, text in _contradictions(config, saved).items() if name in given]
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
        num_stages=plan.num_stages,
        use_offload=plan.num_slots is not None,
        use_prefetch=plan.num_slots != 1 or plan.stages_per_rank == 1,
    )
    data = replace(config.data, seq_length=saved.seq_length)
    config = replace(config, pipeline=pipeline, data=data)
    if problems := find_problems(replace(config, planning=PlanningConfig())):
        raise PlanError(f"--plan {path} cannot be run: {'; '.join(problems)}. Make it anew with --dry_run.")
    logger.info("plan taken from %s: %d stages, %d chunks", path, plan.num_stages, plan.num_chunks)
    return ConfigWithPlan(config, saved)


def _contradictions(config: Config, saved: SavedPlan) -> dict[str, str]:
    """Option -> how it differs from the plan, for those that do."""
    plan, pipeline = saved.plan, config.pipeline
    found = {}
    numbers = {
        "batch_size": (pipeline.batch_size, saved.batch_size),
        "seq_length": (config.data.seq_length, saved.seq_length),
        "num_stages": (pipeline.num_stages, plan.num_stages),
        "num_chunks": (pipeline.num_chunks, plan.num_chunks),
        "num_slices": (pipeline.num_slices, plan.num_slices),
        "num_rounds": (pipeline.num_rounds, plan.accumulation_rounds),
        "dtype": (config.model.dtype.value, saved.model.dtype),
    }
    for name, (own, planned) in numbers.items():
        if own is not None and own != planned:  # None: auto, and the plan is an answer to that
            found[name] = f"--{name} {own}, the plan has {planned}"
    residents = {plan.use_of(rank).num_resident for rank in range(plan.num_ranks)}
    wanted = plan.stages_per_rank if pipeline.resident_stages == "all" else pipeline.num_resident_stages
    if wanted is not None and residents != {wanted}:
        shown = " to ".join(str(number) for number in sorted({min(residents), max(residents)}))
        found["resident_stages"] = f"--resident_stages {pipeline.resident_stages}, the plan has {shown} on each rank"
    if not pipeline.use_offload and plan.num_slots is not None:
        found["use_offload"] = f"--no_offload, the plan streams {plan.num_stages - len(plan.resident)} stages"
    if not pipeline.use_prefetch and (plan.num_slots or 1) > 1:
        found["use_prefetch"] = f"--no_prefetch, the plan has {plan.num_slots} slots"
    if pipeline.recompute is Recompute.FULL and plan.saved_activation_stages:
        found["recompute"] = (
            f"--recompute full, the plan keeps activations of {len(plan.saved_activation_stages)} stages"
        )
    if plan.num_offloaded_microbatches and pipeline.recompute is not Recompute.AUTO:
        told = f"the plan sends products of {plan.num_offloaded_microbatches} microbatches home"
        found["recompute"] = f"--recompute {pipeline.recompute}, {told}"
    if plan.saved_attention_stages and pipeline.recompute not in (Recompute.AUTO, Recompute.LINEAR):
        found["recompute"] = f"--recompute {pipeline.recompute}, the plan keeps results of attention"
    if pipeline.recompute is Recompute.LINEAR and len(plan.saved_attention_stages) < plan.num_stages:
        told = (
            f"--recompute linear, the plan keeps attention's results of {len(plan.saved_attention_stages)} stages only"
        )
        found["recompute"] = told
    if pipeline.activation_offloading is ActivationOffloading.OFF and plan.offloaded_activation_stages:
        told = (
            f"--activation_offloading off, the plan stashes activations of {len(plan.offloaded_activation_stages)} "
            "stages"
        )
        found["activation_offloading"] = told
    could = set(range(plan.num_stages - 1)) - plan.saved_activation_stages
    if pipeline.activation_offloading is ActivationOffloading.ON and plan.offloaded_activation_stages < could:
        told = (
            f"--activation_offloading on, the plan stashes activations of {len(plan.offloaded_activation_stages)} "
            f"of {len(could)} stages"
        )
        found["activation_offloading"] = told
    if pipeline.recompute.saves_activations and len(plan.saved_activation_stages) < plan.num_stages:
        told = (
            f"--recompute {pipeline.recompute}, the plan keeps activations of {len(plan.saved_activation_stages)} "
            "stages only"
        )
        found["recompute"] = told
    elif pipeline.recompute.saves_activations and plan.recompute_level is not recompute_level_of(pipeline.recompute):
        found["recompute"] = f"--recompute {pipeline.recompute}, the plan keeps {plan.recompute_level}"
    return found


def saved_plan_of(result: PlanResult) -> SavedPlan:
    """The plan of a run as a file keeps it; of other ranks it tells what this one knows."""
    config = result.request.config
    digest = ModelDigest.of(result.request.shape, config.model.dtype)
    sizes = config.pipeline.batch_size, config.data.seq_length
    return SavedPlan(digest, result.plan, *sizes, result.request.machine.num_replicas)
