"""Activations that wait on the host: what they take here and there, what they cost, and when they do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from harness.plan_requests import H200, estimate_gpu_memory, find_published_shape, refusal_by, request_of

from mobius.config.cli import parse_args
from mobius.config.config import ActivationOffloading, Recompute
from mobius.errors import ConfigError, PlanError
from mobius.planner.fit import fit_plan, fitting_plans
from mobius.planner.memory_estimates import (
    estimate_host_memory,
    estimated_layer,
)
from mobius.planner.plan_file import ModelDigest, SavedPlan, read_plan
from mobius.planner.request import PlanRequest
from mobius.planner.solver import resolve_auto, solve
from mobius.planner.step_prediction import predict_step_seconds
from mobius.schedule.plan import MemoryUse, Plan
from mobius.units import GIB

LARGE = {"batch_size": 1024, "seq_length": 512, "num_chunks": 64}
"""A step of 524,288 tokens; an input of a layer is 8192 x 4096 x 2 bytes, a sixteenth of a GiB."""
SMALLER = {"batch_size": 512, "seq_length": 512, "num_chunks": 32, "num_stages": 16}
"""Half as many tokens, in half as many chunks and stages, which are simulated in a quarter of the time."""
INPUT = 2**26


def ask(**options: Any) -> PlanRequest:
    return resolve_auto(request_of(find_published_shape("7b"), H200, **options))


def use_all(request: PlanRequest, use: MemoryUse) -> Plan:
    return request.plan.with_memory_uses([use] * 4)


def test_the_first_stages_of_a_rank_offload_but_never_the_models_last() -> None:
    request = ask()

    assert use_all(request, MemoryUse(0, 0, 2, 3)).offloaded_activation_stages == frozenset(range(12))
    assert use_all(request, MemoryUse(0, 0, 2, 8)).offloaded_activation_stages == frozenset(range(31))
    assert use_all(request, MemoryUse(0, 2, 2, 8)).offloaded_activation_stages == frozenset(range(24)), (
        "those that keep them do not"
    )
    assert use_all(request, MemoryUse(0, 0, 2, 3)).use_of(1) == MemoryUse(0, 0, 2, 3)


def test_two_microbatches_of_a_offloaded_stage_are_on_the_gpu_where_all_of_a_round_were() -> None:
    request = ask(**LARGE, num_rounds=1)
    layer = estimated_layer(request)

    # Rank 0 has eight stages of a layer; of the last no more microbatches wait than of the others.
    needs = [
        estimate_gpu_memory(request, use_all(request, MemoryUse(0, 0, 2, n)), rank=0, layer=layer) for n in (0, 5, 8)
    ]

    assert [need.inputs for need in needs] == [8 * 64 * INPUT, (3 * 64 + 2) * INPUT, 2 * INPUT]
    beside = {need.total - need.inputs - need.libraries for need in needs}
    assert len(beside) == 1, "nothing else changes"


def test_while_a_forward_runs_two_before_it_may_still_leave() -> None:
    # Two long microbatches: nothing else of the step holds as much as three inputs and a forward.
    request = ask(batch_size=4, num_chunks=4, num_rounds=1, seq_length=65536, loss_chunk_tokens=128)
    layer = replace(estimated_layer(request), peak=0, saved_activations=0)
    need = estimate_gpu_memory(request, use_all(request, MemoryUse(0, 0, 2, 8)), rank=1, layer=layer)

    assert need.inputs == 3 * request.message_bytes


def test_the_host_keeps_a_place_for_each_stage_layer_and_microbatch_of_a_round() -> None:
    one, four = (ask(**LARGE, num_rounds=number) for number in (1, 4))

    needs = [estimate_host_memory(each, use_all(each, MemoryUse(0, 0, 2, 8))) for each in (one, four)]

    assert needs[0].offloaded_activations == 31 * 64 * INPUT, "the model's last stage has none"
    assert needs[1].offloaded_activations == needs[0].offloaded_activations / 4
    assert "124 GiB for activations" in needs[0].describe()
    assert estimate_host_memory(one, use_all(one, MemoryUse(0, 0, 2, 0))).offloaded_activations == 0


def test_a_large_batch_needs_no_rounds_where_the_host_has_room() -> None:
    """Refused in one round without; by prediction one round with offloaded is faster than four without."""
    options = {**SMALLER, "gpu_memory_limit": 16.0}
    auto = {"activation_offloading": ActivationOffloading.AUTO}
    limits = {"host_memory_limit": 480.0}

    message = refusal_by(lambda: fit_plan(ask(**options, num_rounds=1)))
    assert "  --activation_offloading auto " in message
    rounds, offloaded = ask(**options, **limits), ask(**options, **limits, **auto)
    assert rounds.candidate.num_rounds is not None
    assert rounds.candidate.num_rounds > 1
    assert offloaded.candidate.num_rounds == 1
    seconds = [solve(each, layer=estimated_layer(each)).step_seconds for each in (rounds, offloaded)]
    assert seconds[1] < seconds[0]


@pytest.mark.extended  # searches for seconds
def test_rounds_stay_where_the_host_has_no_room() -> None:
    options = {**SMALLER, "gpu_memory_limit": 16.0, "activation_offloading": ActivationOffloading.AUTO}
    asked = resolve_auto(request_of(find_published_shape("7b"), H200, host_memory_limit=110.0, **options))

    assert asked.candidate.num_rounds is not None
    assert asked.candidate.num_rounds > 1
    found = solve(asked, layer=estimated_layer(asked))
    assert found.host_estimate.total <= 110 * GIB


@pytest.mark.parametrize("limit", [9.0, 12.0, 16.0, 24.0, 100.0])
def test_all_stages_offload_or_no_more_than_it_takes(limit: float) -> None:
    """One fewer on any rank would not fit, and what is chosen does."""
    request = ask(
        num_chunks=4,
        batch_size=128,
        gpu_memory_limit=limit,
        num_rounds=1,
        activation_offloading=ActivationOffloading.AUTO,
    )
    layer, fewest = estimated_layer(request), 0

    def fits(plan: Plan, rank: int) -> bool:
        usable = int(limit * GIB * 0.97) - request.mailbox_bytes
        return estimate_gpu_memory(request, plan, rank=rank, layer=layer).total <= usable

    plans = fitting_plans(request, layer)
    for plan in plans:
        assert all(fits(plan, rank) for rank in range(4))
        if len(plan.offloaded_activation_stages | plan.saved_activation_stages) >= 31:
            continue  # all that may
        for rank in range(4):
            use = plan.use_of(rank)
            if use.num_offloading_activations > 0:
                fewer = replace(use, num_offloading_activations=use.num_offloading_activations - 1)
                uses = [fewer if each == rank else plan.use_of(each) for each in range(4)]
                assert not fits(plan.with_memory_uses(uses), rank)
                fewest += 1
    assert (fewest > 0) == (limit < 100)
    assert all(plan.offloaded_activation_stages for plan in plans) == (limit < 16), "streaming alone is not enough"
    assert bool(fit_plan(request, layer=layer).offloaded_activation_stages) == (limit < 100)


def test_on_is_every_stage_that_recomputes_and_off_is_none() -> None:
    for word, offloaded_activation_stages in (
        (ActivationOffloading.ON, frozenset(range(31))),
        (ActivationOffloading.OFF, frozenset[int]()),
    ):
        request = ask(activation_offloading=word, recompute=Recompute.FULL)
        assert (
            fit_plan(request, layer=estimated_layer(request)).offloaded_activation_stages == offloaded_activation_stages
        )


@pytest.mark.extended  # a quarter of a minute of searches
def test_copies_that_compute_does_not_hide_cost_time() -> None:
    request = ask(**LARGE, num_rounds=1)
    profile = solve(request.trying(num_rounds=8)).profile
    assert profile is not None
    slow = replace(profile, copies=replace(profile.copies, device_to_host=2e9, device_to_host_all_gpus=2e9))
    plans = [use_all(request, MemoryUse(0, 0, 2, n)) for n in (0, 8)]

    seconds = [predict_step_seconds(plan, request, profile) for plan in plans]
    assert seconds[0] <= seconds[1] < 1.02 * seconds[0], "hidden"
    behind = [predict_step_seconds(plan, request, slow) for plan in plans]
    # By hand: rank 0 sends 8 x 64 inputs at 2 GB/s, and computes no less than at full speed.
    assert behind[1] > 8 * 64 * INPUT / 2e9 > behind[0]


def test_a_plan_file_keeps_what_is_offloaded_and_refuses_what_cannot_be(tmp_path: Any) -> None:
    request, path = ask(), tmp_path / "plan.json"
    digest = ModelDigest.of(request.shape, request.config.model.dtype)
    plan = use_all(request, MemoryUse(0, 0, 2, 3))
    path.write_text(SavedPlan(digest, plan, 64, 512).to_json())
    assert read_plan(path).plan == plan

    for offloaded_activation_stages, reason in (
        ((40,), r"`offloaded_activation_stages` is \[40\], and would be \[\]"),
        ((31,), r"`offloaded_activation_stages` is \[31\], and would be \[3\]"),
    ):
        path.write_text(
            SavedPlan(
                digest, replace(plan, offloaded_activation_stages=frozenset(offloaded_activation_stages)), 64, 512
            ).to_json()
        )
        with pytest.raises(PlanError, match=reason):
            read_plan(path)


def test_sending_what_is_never_recomputed_is_refused() -> None:
    with pytest.raises(ConfigError, match="only inputs of recomputed layers are offloaded"):
        parse_args(["--no_offload", "--recompute", "none", "--activation_offloading", "on"])
