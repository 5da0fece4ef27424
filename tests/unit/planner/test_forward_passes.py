"""Forward passes of objectives: by hand, in a plan's answer, and in the search."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from itertools import product

import pytest
from harness.plan_requests import find_published_shape, plain_profile, request_of
from harness.schedules import spec_of

from mobius.config.config import ActivationOffloading, Recompute, config_from
from mobius.config.objective import LossType, ObjectiveName
from mobius.errors import ConfigError
from mobius.objectives.registry import make_objective
from mobius.planner.forecast import forecast
from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.memory_estimates import estimated_layer, microbatch_bytes
from mobius.planner.peak_memory import find_peak
from mobius.planner.request import Machine
from mobius.planner.solver import PlanResult, solve
from mobius.planner.stage_costs import StageCost, StepRules
from mobius.planner.step_prediction import predict_min_step_seconds, predict_pass_seconds, simulate_steps
from mobius.schedule.build import build_schedule
from mobius.schedule.memory_layout import MemoryRules

WORDS = shlex.split(
    "--model_path 3b --card RTX4090 --num_ranks 2 --num_stages 8 --num_chunks 4 --batch_size 16 --host_memory_limit 100"
)


def seconds(costs: list[StageCost], *, num_ranks: int, slots: int | None, is_step: bool) -> float:
    """Seconds of a step that begins with a pass, or of a pass among others; two microbatches."""
    spec = spec_of(num_ranks, len(costs) // num_ranks, 2, slots)
    rules = StepRules(MemoryRules(waits_for_norm=False), message_bytes=0, begins_with_pass=True)
    schedule = build_schedule(spec if is_step else spec.evaluation(2))
    return simulate_steps(schedule, costs, plain_profile(num_ranks), rules).step_seconds


def test_a_pass_follows_another_at_once_and_a_step_waits_for_its_pass() -> None:
    costs = [replace(StageCost(1, 2, 0, is_resident=True), evaluation=own) for own in ((0.0, 0.0), (2.0, 0.0))]
    assert seconds(costs, num_ranks=1, slots=None, is_step=False) == pytest.approx(2 * (1 + 2))
    # Rank 1 is busy for 4 seconds of each pass, while rank 0 begins the next.
    assert seconds(costs, num_ranks=2, slots=None, is_step=False) == pytest.approx(4)
    costs[1] = replace(costs[1], forward=0, backward=3)
    assert seconds(costs, num_ranks=1, slots=None, is_step=True) == pytest.approx(6 + 2 * 6)
    # F0 0-2, F1 1-5; then the step's nine seconds of `test_two_ranks_wait_for_each_other_at_both_ends`.
    assert seconds(costs, num_ranks=2, slots=None, is_step=True) == pytest.approx(5 + 9)


def test_a_pass_loads_each_stage_and_writes_nothing_back() -> None:
    costs = [StageCost(1, 2, 20), StageCost(0, 3, 20, evaluation=(1.0, 0.0))]
    # Each load takes 4 s, waits for the slot, and is followed by two seconds of compute.
    assert seconds(costs, num_ranks=1, slots=1, is_step=False) == pytest.approx(2 * (4 + 2))
    assert seconds(costs, num_ranks=1, slots=2, is_step=False) == pytest.approx(2 * 4)


def plan_for(objective: ObjectiveName, **options: object) -> PlanResult:
    machine, options = Machine(4, GPU_SPECS["RTX4090"]), {"gpu_memory_limit": 20, "objective": objective} | options
    request = request_of(find_published_shape("7b"), machine, **options)
    return solve(request, layer=estimated_layer(request))


def test_the_search_counts_the_pass_of_each_step() -> None:
    pairs, labels = plan_for(ObjectiveName.DPO), plan_for(ObjectiveName.KTO)
    assert pairs.pass_seconds is not None
    assert labels.profile is not None
    # A lone pass also fills and drains the pipeline; a good plan of one is nearly one of the other.
    alone = labels.step_seconds - pairs.step_seconds
    assert 0.98 * pairs.pass_seconds < alone < 1.5 * pairs.pass_seconds
    least = predict_min_step_seconds(labels.plan, labels.request, labels.profile)
    assert 0.7 * labels.step_seconds < least <= labels.step_seconds * (1 + 1e-9)
    without = labels.request.with_options("objective", loss_type=LossType.APO_ZERO_UNPAIRED)
    fewer = predict_min_step_seconds(labels.plan, without, labels.profile)
    assert least - fewer == pytest.approx(predict_pass_seconds(labels.plan, labels.request, labels.profile), rel=0.1)


@pytest.mark.parametrize(
    "options", [{}, {"recompute": Recompute.FULL, "activation_offloading": ActivationOffloading.ON}]
)
def test_a_pass_takes_less_memory_than_a_step(options: dict[str, object]) -> None:
    """Slots and resident stages are those of the step: even if all messages of a round wait, a step takes more."""
    found = plan_for(ObjectiveName.DPO, **options)
    size, plan = microbatch_bytes(found.request, found.layer), found.plan
    evaluation = plan.evaluation(plan.microbatches_per_round)
    assert (evaluation.slots, evaluation.resident) == (plan.slots, plan.resident)
    work = max(size.layer.peak - size.layer.saved_activations, size.loss) + size.activation
    most = plan.microbatches_per_round * size.activation + work
    assert all(most < find_peak(plan, rank, size).total for rank in range(plan.num_ranks))


def test_an_answer_tells_the_passes_in_one_line() -> None:
    found = {name: forecast([*WORDS, "--objective", name]) for name in ("sft", "dpo", "kto")}
    lines = {name: re.findall("^  reference .*", each.answer, re.MULTILINE) for name, each in found.items()}
    numbers = {name: each.to_json()["pass_seconds"] for name, each in found.items()}
    assert (lines["sft"], numbers["sft"]) == ([], None)
    (of_pairs,), (of_labels,) = lines["dpo"], lines["kto"]
    share = 100 * numbers["dpo"] / found["dpo"].step_seconds
    assert 20 < share < 40, "forward is a third of a step without recomputation"
    assert of_pairs == (
        f"  reference    a forward pass scores the first epoch before step 1: {numbers['dpo']:#.3g} s per step of it "
        f"({share:.0f} %); 4 bytes per answer on disk"
    )
    assert f" {2 * numbers['kto']:#.3g} s per step" in of_labels
    assert of_labels.endswith(f"; each step includes another pass, some {numbers['kto']:#.3g} s")
    one_step = [*WORDS, "--objective", "policy", "--num_iterations", "1"]
    assert "reference" not in forecast(one_step).answer, "the only step scores its rows itself"
    assert "4 bytes per token on disk" in forecast([*WORDS, "--objective", "policy"]).answer
    taught = forecast([*WORDS, "--objective", "distill", "--teacher_model", "70b"]).answer
    assert "194 bytes per target on disk, with a plan of its own (--model_path 70b --no_do_train --do_eval)" in taught


def test_plans_and_runs_agree_which_objectives_need_passes() -> None:
    checked = 0
    for name, loss_type in product(ObjectiveName, (None, *LossType)):
        try:
            config = config_from({"objective": name, "loss_type": loss_type}).objective
            made = make_objective(config)
        except (ConfigError, KeyError):
            continue
        assert (config.needs_reference, config.needs_divergence) == (made.needs_reference, made.needs_divergence), name
        checked += 1
    assert checked >= len(ObjectiveName)
