"""Long sequences in slices: when they are cut, what keys and values take, what later slices cost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from harness.plan_requests import H200, estimate_gpu_memory, find_published_shape, refusal_by, request_of

from mobius.config.cli import parse_args
from mobius.config.config import ActivationOffloading, Recompute
from mobius.errors import ConfigError, HostMemoryError, PlanError
from mobius.planner.fit import fit_plan
from mobius.planner.memory_estimates import (
    estimate_host_memory,
    estimated_layer,
)
from mobius.planner.plan_file import ModelDigest, SavedPlan, read_plan
from mobius.planner.remedies import check_host_memory
from mobius.planner.request import PlanRequest
from mobius.planner.solver import resolve_auto, solve
from mobius.planner.stage_costs import StageCost, stage_costs
from mobius.planner.step_prediction import simulate_steps
from mobius.schedule.build import build_unchecked
from mobius.schedule.lanes import Lane
from mobius.schedule.partition import ModelShape
from mobius.schedule.plan import Plan
from mobius.units import GIB

LONG = {
    "num_stages": 8,
    "batch_size": 1,
    "num_chunks": 1,
    "seq_length": 131072,
    "num_slices": None,
    "activation_offloading": ActivationOffloading.AUTO,
    "host_memory_limit": 400.0,
}
TWO = replace(H200, num_ranks=2)


@cache
def eight_layers() -> ModelShape:
    """A quarter of 8B, which is planned in a quarter of the time."""
    shape = find_published_shape("8b")
    return replace(shape, layer_parameters=shape.layer_parameters[:8])


@cache
def ask(**options: Any) -> PlanRequest:
    return resolve_auto(request_of(eight_layers(), TWO, **{**LONG, **options}))


@cache
def ask_of_all(**options: Any) -> PlanRequest:
    """Of all of 8B, a layer in each stage."""
    return resolve_auto(request_of(find_published_shape("8b"), TWO, **{**LONG, "num_stages": 32, **options}))


@pytest.mark.parametrize(
    ("length", "batch", "slices"),
    [
        (131072, 1, 8),  # four microbatches for each of two ranks
        (131072, 4, 2),
        (131072, 8, 1),
        (16384, 1, 4),  # of 4,096 tokens, the least
        (8192, 1, 1),  # too short to be cut by itself
        (16390, 1, 2),  # of whole tokens
    ],
)
def test_auto_cuts_long_sequences_that_are_too_few_for_the_ranks(length: int, batch: int, slices: int) -> None:
    request = ask(seq_length=length, batch_size=batch, num_chunks=batch)
    assert request.num_slices == slices
    assert request.plan.num_microbatches == batch * slices
    assert request.plan.num_chunks == batch


@pytest.mark.parametrize(
    ("options", "slices", "rounds"),
    [
        ({"seq_length": 262144}, 8, 1),
        # Eight slices leave a layer's work too large for 24 GiB; of more, attention's results fit beside.
        ({"seq_length": 393216, "recompute": Recompute.FULL}, 12, 1),
        ({"seq_length": 393216}, 24, 1),
        # Eight sequences fill two ranks in one round, but not each in a round of its own.
        pytest.param({"batch_size": 8, "num_chunks": 8, "num_rounds": 8}, 8, 8, marks=pytest.mark.extended),
        (
            {"batch_size": 8, "num_chunks": 8, "num_rounds": 2},
            4,
            2,
        ),  # of two, a layer's work would be too large
    ],
)
def test_auto_takes_as_many_slices_as_fit_and_as_fill_a_round(
    options: dict[str, Any], slices: int, rounds: int
) -> None:
    request = ask(gpu_memory_limit=24.0, **options)
    assert (request.num_slices, request.candidate.num_rounds) == (slices, rounds)
    assert fit_plan(request, layer=estimated_layer(request)).num_slices == slices


@pytest.mark.parametrize(
    ("host", "slices", "keeping"),
    [pytest.param(240.0, 64, 16, marks=pytest.mark.extended), pytest.param(400.0, 24, 32, marks=pytest.mark.extended)],
)
def test_more_slices_leave_room_for_attentions_results_of_some_stages(host: float, slices: int, keeping: int) -> None:
    found = solve(ask_of_all(gpu_memory_limit=24.0, seq_length=393216, host_memory_limit=host))
    assert (found.plan.num_slices, len(found.plan.saved_attention_stages)) == (slices, keeping)


def test_auto_chooses_slices_with_the_numbers_of_stages_and_chunks() -> None:
    request = ask(batch_size=2, num_chunks=None, num_stages=None, gpu_memory_limit=24.0)
    assert request.num_chunks * request.num_slices >= 4 * 2
    assert solve(request).plan.num_slices == request.num_slices


def test_auto_cuts_nothing_that_cannot_be_cut() -> None:
    shape = replace(find_published_shape("8b"), is_sliceable=False)
    assert resolve_auto(request_of(shape, TWO, **LONG)).num_slices == 1
    kept = {"recompute": Recompute.NONE, "use_offload": False, "seq_length": 32768}
    assert resolve_auto(request_of(find_published_shape("8b"), TWO, **(LONG | kept))).num_slices == 1


def test_keys_and_values_of_one_stage_are_there_with_their_sums() -> None:
    request = ask(num_stages=4)
    need = estimate_gpu_memory(request, request.plan, rank=0, layer=estimated_layer(request))
    # Two layers of a stage, 131,072 tokens, 8 heads of 128, keys and values, 2 bytes and 4 of their gradients.
    assert need.kv_cache == 2 * 131072 * 8 * 128 * 2 * (2 + 4)
    assert "kv cache 3.00" in need.describe()
    whole = ask(num_slices=1)
    assert estimate_gpu_memory(whole, whole.plan, rank=0, layer=estimated_layer(whole)).kv_cache == 0


def test_a_layers_work_and_messages_are_those_of_a_slice() -> None:
    needs = []
    for slices in (1, 8):
        request = ask(num_slices=slices, tile_tokens="off")
        needs.append(estimate_gpu_memory(request, request.plan, rank=0, layer=estimated_layer(request)))
    assert ask(num_slices=8).message_bytes == 131072 // 8 * 4096 * 2
    assert needs[1].working_set < needs[0].working_set / 3


def test_slices_keep_no_activations_and_fit_where_whole_sequences_do_not() -> None:
    request = ask(gpu_memory_limit=24.0)
    layer = estimated_layer(request)
    plan = fit_plan(request, layer=layer)
    assert plan.saved_activation_stages == frozenset()
    assert max(estimate_gpu_memory(request, plan, rank=rank, layer=layer).total for rank in (0, 1)) <= 24 * GIB
    # Three inputs of all its layers at least leave or come while a stage goes forward; 6 stages are offloaded.
    assert (
        estimate_host_memory(request, plan).offloaded_activations
        == len(plan.offloaded_activation_stages) * 131072 * 4096 * 2
    )

    message = refusal_by(lambda: ask(gpu_memory_limit=12.0, num_slices=2, tile_tokens="off"))
    assert re.search(r"^  --num_slices \d+ ", message, re.MULTILINE)


def test_later_slices_cost_more_and_all_together_as_much_as_on_average() -> None:
    request = ask(recompute=Recompute.FULL)
    found = solve(request, layer=estimated_layer(request))
    assert found.profile is not None
    costs = stage_costs(found.plan, request.shape, found.profile)
    actions = [action for action in build_unchecked(found.plan).actions[0] if action.stage == 2]
    for wanted, seconds in (("F", costs[2].forward), ("B", costs[2].backward)):
        own = [costs[2].slice_seconds(a, 8) for a in actions if str(a).startswith(wanted)]
        own.sort()
        assert sum(own) == pytest.approx(8 * seconds)
        # The average slice attends with each of 16,384 tokens to 65,536: slice i to (2 i + 1) / 8 of that.
        attention = found.profile.attention
        taken = attention.forward if wanted == "F" else attention.recomputed_backward
        assert own[-1] - own[0] == pytest.approx(taken * 14 / 8)


def test_the_last_layers_forward_waits_for_its_slices_turn() -> None:
    request = ask()
    found = solve(request, layer=estimated_layer(request))
    assert found.profile is not None
    costs = stage_costs(found.plan, request.shape, found.profile)
    of_stage = {stage: seconds_of(found.plan, costs, stage) for stage in (6, 7)}
    before, last = of_stage[6], of_stage[7]
    # Queries, keys and values alone go forward, which later slices need; the rest and the loss come before backward.
    assert last["F"] == pytest.approx([costs[7].keys] * 8, rel=0.1)
    for index in range(8):
        own = before["F"][index] + before["B"][index] + found.profile.loss
        assert last["B"][index] == pytest.approx(own, rel=0.01)


def seconds_of(plan: Plan, costs: Sequence[StageCost], stage: int) -> dict[str, list[float]]:
    """Seconds of a stage's forwards, keys and backwards by slice."""
    number = plan.num_microbatches
    actions = [
        a for rank in build_unchecked(plan).actions for a in rank if a.stage == stage and a.kind.runs_on_compute_lane
    ]
    own = {(str(action)[0], action.microbatch): costs[stage].slice_seconds(action, number) for action in actions}
    return {kind: [own[kind, index] for index in range(number)] for kind in "FB"}


FORWARD = (0.0153, 0.0247, 0.0328, 0.0409, 0.0482, 0.0563, 0.0633, 0.0712)
BACKWARD = (0.0459, 0.0770, 0.1068, 0.1376, 0.1649, 0.1940, 0.2200, 0.2457)
"""A layer of 8B, slices of 16,384 of 131,072 tokens: means of 28 stages in a step of two H200, recomputed."""


def test_a_step_of_two_h200_is_predicted_with_its_slices() -> None:
    request = ask_of_all(gpu_memory_limit=24.0, host_memory_limit=230.0, recompute=Recompute.FULL)
    found = solve(request, layer=estimated_layer(request))
    assert found.profile is not None
    costs = stage_costs(found.plan, request.shape, found.profile)
    predicted = seconds_of(found.plan, costs, 5)
    for kind, measured in (("F", FORWARD), ("B", BACKWARD)):
        assert predicted[kind] == pytest.approx(measured, rel=0.07)
        assert sum(predicted[kind]) == pytest.approx(sum(measured), rel=0.03)
    assert found.step_seconds == pytest.approx(26.45, rel=0.05)


def test_the_prediction_makes_keys_anew_and_its_bubble_is_small() -> None:
    request = ask()
    found = solve(request, layer=estimated_layer(request))
    assert found.profile is not None
    costs = stage_costs(found.plan, request.shape, found.profile)
    predicted = simulate_steps(build_unchecked(found.plan), costs, found.profile, request.rules, num_steps=2)
    names = [span.name for span in predicted.spans[0] if span.lane is Lane.COMPUTE and span.step == 2]
    assert sum(name.startswith("K") for name in names) == 4 * 8
    assert predicted.bubble < 0.15


def test_what_was_measured_on_slices_alone_counts_attention_to_all_before() -> None:
    request = ask()
    estimated = solve(request, layer=estimated_layer(request)).profile
    assert estimated is not None
    short = solve(ask(seq_length=16384, num_slices=1), layer=None).profile
    assert short is not None
    measured = replace(estimated, layer_kinds=short.layer_kinds, attention_length=None)
    found = solve(request, layer=estimated_layer(request), profile=measured)
    assert found.profile is not None
    assert found.profile.layer_kinds[0].forward == pytest.approx(estimated.layer_kinds[0].forward, rel=0.01)
    again = solve(request, layer=estimated_layer(request), profile=found.profile)
    assert again.profile == found.profile


def test_a_plan_file_keeps_its_slices_and_refuses_what_they_do_not_divide(tmp_path: Path) -> None:
    request, path = ask(), tmp_path / "plan.json"
    digest = ModelDigest.of(request.shape, request.config.model.dtype)
    path.write_text(SavedPlan(digest, request.plan, 1, 131072).to_json())
    assert read_plan(path).plan == request.plan

    path.write_text(SavedPlan(digest, request.plan, 1, 131071).to_json())
    with pytest.raises(PlanError, match="`--seq_length` 131071 and `--num_slices` 8: 131071 has no 8 equal slices"):
        read_plan(path)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--seq_length 100 --num_slices 3", "`--seq_length` 100 and `--num_slices` 3: .* 2 or 4"),
        ("--num_slices 4 --no_offload --recompute none", "`--num_slices` 4 and `--recompute` none"),
    ],
)
def test_slices_that_cannot_be_are_refused(words: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_args(words.split())


@pytest.mark.extended  # a quarter of a minute of searches
def test_attention_is_kept_where_the_host_has_room_and_the_step_is_shorter_by_its_forward() -> None:
    """131,072 tokens of 8B under 24 GiB: 31 stages, on each 4,096 numbers of 2 bytes and 32 of 4 for a token."""
    plans, needs, seconds = {}, {}, {}
    for recompute in (Recompute.AUTO, Recompute.FULL):
        found = solve(ask_of_all(gpu_memory_limit=24.0, recompute=recompute))
        plans[recompute], needs[recompute], seconds[recompute] = found.plan, found.host_estimate, found.step_seconds
    assert plans[Recompute.AUTO].saved_attention_stages == {*range(32)}
    assert not plans[Recompute.FULL].saved_attention_stages
    places = sum(
        len(plans[Recompute.AUTO].cuts[stage].layers) for stage in plans[Recompute.AUTO].offloaded_activation_stages
    )
    assert needs[Recompute.AUTO].attention == places * 131072 * (4096 * 2 + 32 * 4)
    assert seconds[Recompute.AUTO] < 0.88 * seconds[Recompute.FULL]

    small = solve(ask_of_all(gpu_memory_limit=24.0, host_memory_limit=140.0))
    assert 8 < len(small.plan.saved_attention_stages) < 32  # half of the bytes fit
    assert small.host_estimate.total < 140 * GIB < needs[Recompute.AUTO].total


def test_attention_that_is_asked_for_is_kept_and_refused_with_what_frees_memory() -> None:
    linear = ask(gpu_memory_limit=12.0, recompute=Recompute.LINEAR, host_memory_limit=50.0)
    found = solve(linear)
    assert len(found.plan.saved_attention_stages) == found.plan.num_stages
    with pytest.raises(HostMemoryError, match=r"\n  --recompute auto +\d"):
        check_host_memory(found, 50 * GIB)
    with pytest.raises(PlanError, match="this run does not slice its sequences: use --recompute auto"):
        solve(ask(seq_length=8192, recompute=Recompute.LINEAR))


def test_a_plan_file_keeps_which_stages_keep_attention(tmp_path: Path) -> None:
    request = ask(gpu_memory_limit=24.0)
    plan = solve(request).plan
    digest = ModelDigest.of(request.shape, request.config.model.dtype)
    text = SavedPlan(digest, plan, 1, 131072).to_json()
    (tmp_path / "plan.json").write_text(text)
    assert plan.saved_attention_stages
    assert read_plan(tmp_path / "plan.json").plan == plan
    (tmp_path / "plan.json").write_text(text.replace('"saved_attention_stages": [', '"saved_attention_stages": [99, '))
    with pytest.raises(PlanError, match=r"`saved_attention_stages` is \[.*99\]"):
        read_plan(tmp_path / "plan.json")
