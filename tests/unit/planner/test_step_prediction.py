"""Predicted steps: small ones by hand, large ones against what was measured, and faster parts make none slower."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
from harness.plan_requests import SLOW_COPIES, find_published_shape, plain_profile, request_of
from harness.schedules import spec_of

from mobius.config.config import Recompute
from mobius.planner.event_simulation import SharedBandwidth, share_rates
from mobius.planner.fit import fit_plan
from mobius.planner.gpu_specs import GPU_SPECS, estimate_profile
from mobius.planner.profile import LayerSeconds, MessageRates, Profile
from mobius.planner.rates import estimated_profile
from mobius.planner.request import Machine
from mobius.planner.stage_costs import StageCost, StepRules, stage_costs
from mobius.planner.step_prediction import (
    Resource,
    SimulatedSteps,
    find_bottleneck,
    predict_step_time,
    simulate_steps,
    simulated_seconds,
    with_faster,
)
from mobius.planner.step_tasks import FINISH_GRADIENTS_BYTES
from mobius.schedule.build import build_schedule
from mobius.schedule.lanes import Lane, WaitCause
from mobius.schedule.memory_layout import MemoryRules
from mobius.schedule.partition import ModelShape
from mobius.schedule.plan import make_plan


def predict(
    costs: list[StageCost],
    *,
    num_ranks: int = 1,
    microbatches: int = 1,
    slots: int | None = None,
    clips: bool = False,
    overlaps: bool = True,
    profile: Profile | None = None,
    message_bytes: int = 0,
) -> SimulatedSteps:
    schedule = build_schedule(spec_of(num_ranks, len(costs) // num_ranks, microbatches, slots))
    rules = StepRules(MemoryRules(waits_for_norm=clips, overlaps_optimizer=overlaps), message_bytes=message_bytes)
    return simulate_steps(schedule, costs, profile or plain_profile(num_ranks), rules, num_steps=4)


def resident(count: int, *, parameters: int = 0) -> list[StageCost]:
    """Stages of 1 second forward and 2 backward, the last with both in its backward."""
    inner = [StageCost(1, 2, parameters, is_resident=True)] * (count - 1)
    return [*inner, StageCost(0, 3, parameters, is_resident=True)]


def test_one_rank_does_everything_one_after_the_other() -> None:
    prediction = predict(resident(3), microbatches=4)
    assert prediction.step_seconds == pytest.approx(3 * 4 * 3)
    assert prediction.bubble == pytest.approx(0)


def test_two_ranks_wait_for_each_other_at_both_ends() -> None:
    # Rank 0: F0 0-1, 1-2; rank 1: B1.0 1-4, B1.1 4-7; rank 0: B0.0 4-6, B0.1 7-9. Nine seconds, each busy for six.
    prediction = predict(resident(2), num_ranks=2, microbatches=2)
    assert prediction.step_seconds == pytest.approx(9)
    assert prediction.busy_seconds == pytest.approx((6, 6))
    assert prediction.bubble == pytest.approx(1 / 3)
    # Rank 0 from 2 to 4 and from 6 to 7; rank 1 one second at the start and two at the end.
    assert [waits[WaitCause.NEIGHBOURS] for waits in prediction.waits] == pytest.approx([3, 3])


def test_a_gradient_leaves_before_its_stage_is_sealed() -> None:
    profile = plain_profile(
        2, gpu_bandwidth=FINISH_GRADIENTS_BYTES, gpu_adamw=1e12
    )  # a second for each stage's parameter
    prediction = predict(resident(2, parameters=1), num_ranks=2, profile=profile)
    assert prediction.step_seconds == pytest.approx(1 + 3 + 2 + 1)
    assert sum(prediction.busy_seconds) == pytest.approx(1 + 3 + 2 + 2)


def test_a_message_takes_its_latency_and_its_bytes_and_those_of_an_edge_take_turns() -> None:
    profile = plain_profile(2, messages=MessageRates(2, 0.5, is_through_host=False))
    # Each message 0.5 + 4 / 2 = 2.5 s. F0.0 0-1, there at 3.5; F0.1 1-2, there at 6, B1.0 3.5-6.5, its gradient
    # there at 9; B1.1 6.5-9.5, there at 12; B0.1 12-14.
    prediction = predict(resident(2), num_ranks=2, microbatches=2, profile=profile, message_bytes=4)
    assert prediction.step_seconds == pytest.approx(14)


def test_a_message_through_the_host_shares_the_links_with_copies() -> None:
    messages = MessageRates(10, 0, is_through_host=True)
    profile = plain_profile(2, messages=messages)
    # 20 bytes at 10 per second: F0 0-1, B1 3-6, B0 8-10.
    assert predict(resident(2), num_ranks=2, profile=profile, message_bytes=20).step_seconds == pytest.approx(10)


def test_a_single_streamed_stage_is_a_circle_of_load_compute_offload_and_update() -> None:
    # Load 20 x 2 / 10 = 4 s, compute 3, offload 4, update 20 / 5 = 4. The next load waits for the update.
    prediction = predict([StageCost(0, 3, 20)], slots=1)
    assert prediction.step_seconds == pytest.approx(15)
    waits = {WaitCause.NEIGHBOURS: 0, WaitCause.OPTIMIZER: 8, WaitCause.WEIGHTS: 4, WaitCause.ACTIVATIONS: 0}
    assert prediction.waits[0] == pytest.approx(waits)


def test_a_resident_stage_pays_its_update_on_the_gpu_and_nothing_else() -> None:
    for clips in (False, True):
        prediction = predict([StageCost(0, 3, 20, is_resident=True)], clips=clips)
        assert prediction.step_seconds == pytest.approx(3 + 20 / 100)


def test_updates_run_under_the_backward_of_the_stages_before() -> None:
    costs = [StageCost(10, 20, 20), StageCost(10, 20, 20), StageCost(0, 30, 20)]
    prediction = predict(costs, slots=3)
    # Only stage 0's way home, update and load are seen: 4 + 4 + 4.
    assert prediction.step_seconds == pytest.approx(90 + 12)


def test_with_clipping_updates_begin_after_the_step_in_forward_order() -> None:
    costs = [StageCost(10, 20, 20), StageCost(10, 20, 20), StageCost(0, 30, 20)]
    prediction = predict(costs, slots=3, clips=True)
    # Stages 2 and 1 are home by then, but stage 0 is not: the optimizer takes stage 1 (4 s) while 0 arrives (4 s).
    assert prediction.step_seconds == pytest.approx(90 + 4 + 4 + 4)
    updates = [s for s in prediction.spans[0] if s.lane is Lane.OPTIMIZER and s.step == 2]
    assert [span.name for span in updates] == ["U1", "U0", "U2"]


def test_without_overlap_all_updates_stand_between_two_steps() -> None:
    costs = [StageCost(10, 20, 20), StageCost(10, 20, 20), StageCost(0, 30, 20)]
    # Stage 0 comes home in 4 s, then 12 s of updates and its load.
    prediction = predict(costs, slots=3, overlaps=False)
    assert prediction.step_seconds == pytest.approx(90 + 4 + 12 + 4)


def test_a_load_waits_for_its_slot_and_compute_for_the_load() -> None:
    # One slot: L0 4, F0 1, L1 4, B1 3; O1 4, then L0 4, B0 2; O0 4, and U0 4 before the next L0.
    costs = [StageCost(1, 2, 20), StageCost(0, 3, 20)]
    prediction = predict(costs, slots=1)
    assert prediction.step_seconds == pytest.approx(4 + 1 + 4 + 3 + 4 + 4 + 2 + 4 + 4)


def test_ranks_that_load_at_once_share_what_the_host_gives() -> None:
    costs = [StageCost(1, 2, 20), StageCost(0, 3, 20)]
    shared = replace(SLOW_COPIES, host_to_device_all_gpus=5)
    alone = predict(costs, num_ranks=2, slots=1)
    together = predict(costs, num_ranks=2, slots=1, profile=plain_profile(2, copies=shared))
    # Nobody loads twice; rank 0 waits for its load of 40 bytes, at 5 instead of 10 per second while rank 1 loads.
    assert together.step_seconds > alone.step_seconds


def test_resident_stages_of_a_streaming_schedule_are_not_loaded() -> None:
    costs = [StageCost(1, 2, 20, is_resident=True), StageCost(1, 2, 20), StageCost(0, 3, 20)]
    prediction = predict(costs, slots=2)
    names = {span.name for span in prediction.spans[0] if span.lane in (Lane.LOAD, Lane.OFFLOAD)}
    assert names == {"L1", "O1", "L2", "O2"}
    assert "U0" in {span.name for span in prediction.spans[0] if span.lane is Lane.COMPUTE}


def test_residency_of_the_first_stage_hides_what_streaming_shows() -> None:
    costs = [StageCost(10, 20, 20), StageCost(10, 20, 20), StageCost(0, 30, 20)]
    costs[0] = replace(costs[0], is_resident=True)
    assert predict(costs, slots=3).step_seconds == pytest.approx(90 + 20 / 100)


def test_busy_time_is_the_sum_of_the_costs_and_waits_fill_the_rest() -> None:
    costs = [StageCost(1, 2, 30), StageCost(1, 2, 20), StageCost(1, 2, 10), StageCost(0, 3, 20)]
    for clips in (False, True):
        prediction = predict(costs, num_ranks=2, microbatches=3, slots=2, clips=clips)
        assert prediction.busy_seconds == pytest.approx((18, 18))
        for busy, waits in zip(prediction.busy_seconds, prediction.waits, strict=True):
            assert busy + sum(waits.values()) == pytest.approx(prediction.step_seconds)


def llama(num_layers: int, whole: ModelShape) -> ModelShape:
    return replace(whole, layer_parameters=whole.layer_parameters[:num_layers])


def predict_llama(
    whole: ModelShape,
    *,
    num_layers: int = 32,
    num_ranks: int = 4,
    microbatches: int = 4,
    slots: int | None = 3,
    clips: bool = False,
    keeps_graphs: bool = False,
    change: tuple[Resource, float] | None = None,
) -> SimulatedSteps:
    """64 x 512 on H200s, a layer per stage, as in test_measured_rows.py."""
    shape, tokens = llama(num_layers, whole), 64 * 512 // microbatches
    profile = estimate_profile(GPU_SPECS["H200"], shape, microbatch_tokens=tokens, seq_length=512, num_ranks=num_ranks)
    profile = with_faster(profile, *change) if change else profile
    stages = frozenset(range(num_layers))
    plan = make_plan(shape, num_ranks=num_ranks, num_stages=num_layers, num_microbatches=microbatches, num_slots=slots)
    costs = stage_costs(replace(plan, saved_activation_stages=stages if keeps_graphs else frozenset()), shape, profile)
    schedule = build_schedule(spec_of(num_ranks, num_layers // num_ranks, microbatches, slots))
    return simulate_steps(
        schedule, costs, profile, StepRules(MemoryRules(waits_for_norm=clips), message_bytes=tokens * 4096 * 2)
    )


def test_all_at_once_ranks_update_and_copy_as_fast_as_was_measured(llama_7b: ModelShape) -> None:
    profile = estimate_profile(GPU_SPECS["H200"], llama_7b, microbatch_tokens=8192, seq_length=512, num_ranks=4)
    rates = SharedBandwidth(profile, 4)
    copies = {("load", rank): rates.load(rank, 1) for rank in range(4)}
    copies |= {("offload", rank): rates.offload(rank, 1) for rank in range(4)}
    updates = {("update", rank): rates.update(1) for rank in range(4)}

    alone = share_rates(updates, rates.capacities)
    together = share_rates({**updates, **copies}, rates.capacities)

    # 7.2 and 5.0 Gparam/s with 28 bytes each, here 26; 22 + 25 GB/s of copies.
    assert sum(alone[name] for name in updates) == pytest.approx(7.2e9, rel=0.03)
    assert sum(together[name] for name in updates) == pytest.approx(5.0e9, rel=0.05)
    assert sum(together[name] for name in copies) / 4 == pytest.approx(47e9, rel=0.01)


@pytest.mark.grid
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("microbatches", [2, 4, 16])
@pytest.mark.parametrize("resource", list(Resource))
def test_a_faster_part_never_makes_a_step_slower(
    llama_7b: ModelShape, resource: Resource, microbatches: int, clips: bool
) -> None:
    seconds = [
        predict_llama(
            llama_7b, num_layers=16, microbatches=microbatches, clips=clips, change=(resource, factor)
        ).step_seconds
        for factor in (0.5, 1.0, 2.0, 8.0)
    ]
    # But for 2 %: tasks that cannot be interrupted, and flows that share, have such anomalies (Graham 1969).
    assert all(faster <= slower * 1.02 for slower, faster in itertools.pairwise(seconds))


def test_a_step_of_many_microbatches_is_simulated_in_less_than_a_second(llama_7b: ModelShape) -> None:
    start = time.process_time()  # a busy machine must not fail it
    predict_llama(llama_7b, microbatches=16)
    assert time.process_time() - start < 1


def test_the_limiting_resource_is_what_gains_most() -> None:
    costs = [StageCost(1, 2, 0, is_resident=True), StageCost(0, 3, 0, is_resident=True)]

    def seconds(profile: Profile) -> float:
        share = profile.layer_kinds[0].forward
        scaled = [replace(c, forward=c.forward * share, backward=c.backward * share) for c in costs]
        return predict(scaled, num_ranks=2, profile=profile, message_bytes=4).step_seconds

    by_messages = plain_profile(2, messages=MessageRates(0.1, 0, is_through_host=False))
    for profile, resource in ((by_messages, Resource.MESSAGES), (plain_profile(2), Resource.COMPUTE)):
        assert find_bottleneck(profile, seconds, seconds(profile))[0] is resource


def test_spans_carry_the_names_of_the_grid_and_lie_in_order() -> None:
    costs = [StageCost(1, 2, 30), StageCost(1, 2, 20), StageCost(1, 2, 10), StageCost(0, 3, 20)]
    prediction = predict(costs, num_ranks=2, microbatches=2, slots=2, message_bytes=1)
    names = {span.name for span in prediction.spans[0] if span.step == 1}
    assert {"F0.0", "F2.1", "B0.1", "L0", "O0", "U0", "F0.0 to 1"} <= names
    for spans in prediction.spans:
        assert [span.start for span in spans] == sorted(span.start for span in spans)


def test_seconds_alone_are_those_of_the_prediction() -> None:
    costs = [StageCost(1, 2, 10), StageCost(1, 3, 10)] * 2
    schedule, rules = build_schedule(spec_of(2, 2, 4, 1)), StepRules(MemoryRules(waits_for_norm=True), message_bytes=5)
    profile = plain_profile(2)
    for num_steps in (1, 3):
        whole = simulate_steps(schedule, costs, profile, rules, num_steps=num_steps)
        assert simulated_seconds(schedule, costs, profile, rules, num_steps=num_steps) == whole.step_seconds


def test_compute_waits_for_the_host_where_that_is_slower() -> None:
    # Four microbatches forward and backward: the host takes 3 + 4 for each, the device 1 + 2.
    slow = [StageCost(1, 2, 0, is_resident=True, forward_launch=3, backward_launch=4)] * 2
    prediction = predict(slow, microbatches=4)
    assert prediction.step_seconds == pytest.approx(8 * 3 + 8 * 4 + 2)  # and the last backward behind its launch


def test_a_host_that_is_ahead_costs_nothing_but_the_first_launch() -> None:
    quick = [StageCost(1, 2, 0, is_resident=True, forward_launch=0.5, backward_launch=0.5)] * 2
    free = [StageCost(1, 2, 0, is_resident=True)] * 2
    for microbatches in (1, 4):
        with_host = predict(quick, microbatches=microbatches).step_seconds
        assert with_host == pytest.approx(predict(free, microbatches=microbatches).step_seconds + 0.5)


def test_a_stage_costs_the_host_its_layers_and_each_action(llama_7b: ModelShape) -> None:
    profile = replace(
        estimate_profile(GPU_SPECS["H200"], llama_7b, microbatch_tokens=2048, seq_length=512, num_ranks=2),
        launch_overhead=LayerSeconds(1.0, 4.0, 6.0),
        action_launch=0.5,
    )
    plan = make_plan(llama_7b, num_ranks=2, num_stages=16, num_microbatches=4, num_slots=2)
    every = frozenset(range(16))

    def launches(
        stage: int, *, resident: frozenset[int], saved_activation_stages: frozenset[int]
    ) -> tuple[float, float]:
        cost = stage_costs(
            replace(plan, resident=resident, saved_activation_stages=saved_activation_stages), llama_7b, profile
        )[stage]
        return cost.forward_launch, cost.backward_launch

    assert launches(3, resident=every, saved_activation_stages=every) == (2 * 1.0 + 0.5, 2 * 4.0 + 0.5)
    assert launches(3, resident=every, saved_activation_stages=frozenset()) == (2 * 1.0 + 0.5, 2 * 6.0 + 0.5)
    # The last stage's forward is in its backward.
    assert launches(15, resident=every, saved_activation_stages=every) == (0.0, 2 * 4.0 + 0.5 + 2 * 1.0 + 0.5)


@pytest.mark.parametrize("clips", [True, False])
def test_updates_slow_what_the_host_enqueues_meanwhile(clips: bool) -> None:
    """With clipping the next forward, without it the next backward."""
    # The host takes 2 s for each of 16 microbatches, forward and backward; stage 1 is updated for 10 s.
    costs = [StageCost(1, 1, 0, is_resident=True, forward_launch=2, backward_launch=2), StageCost(0, 1, 50)]

    def seconds(slowdown: float) -> float:
        profile = replace(plain_profile(1), launch_beside_updates=slowdown)
        return predict(costs, microbatches=16, slots=1, clips=clips, profile=profile).step_seconds

    assert seconds(1.0) == pytest.approx(16 * 2 * 2 + 1)
    # Two begin within 10 s and take 6 s each in place of 2.
    assert seconds(3.0) - seconds(1.0) == pytest.approx(2 * 4)


def test_a_step_that_only_computes_is_limited_by_compute() -> None:
    shape = llama(4, find_published_shape("1b"))
    options = {"num_stages": 4, "num_chunks": 2, "batch_size": 8, "use_offload": False, "recompute": Recompute.NONE}
    request = request_of(shape, Machine(1, GPU_SPECS["L20"]), max_grad_norm=0.0, **options)
    profile = estimated_profile(request)
    assert profile is not None
    found = predict_step_time(fit_plan(request), request, profile)
    layers = 2 * 4 * (profile.layer_kinds[0].forward + profile.layer_kinds[0].backward)
    ends = 2 * (profile.embedding_forward + profile.embedding_backward + profile.loss)
    updates = shape.num_parameters * (1 / profile.gpu_adamw + 14 / profile.gpu_bandwidth)
    between = profile.step_overhead + profile.launch_overhead.forward + profile.action_launch
    assert found.step_seconds == pytest.approx(layers + ends + updates + between, rel=0.01)
    assert found.bottleneck is Resource.COMPUTE
    assert found.gain == pytest.approx(1 / 11, abs=0.02)
    assert found.basis.startswith("estimated (1 x L20")
