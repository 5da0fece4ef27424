"""What a rank holds at its fullest moment: by hand, as measured on H200s; and bounded sends never wait."""

import random
from collections import deque
from dataclasses import replace

import pytest
from harness.plan_requests import find_published_shape, request_of
from harness.schedules import spec_of

from mobius.limits import max_pending_offloads, max_sends_in_flight
from mobius.planner.memory_estimates import estimate_gpu_memory_of_ranks
from mobius.planner.peak_memory import LayerBytes, LiveMemory, MicrobatchBytes, find_peak
from mobius.schedule import spec
from mobius.schedule.action import ActionKind, source_stage
from mobius.schedule.build import build_schedule
from mobius.schedule.partition import partition_of
from mobius.schedule.plan import MemoryUse, Plan, make_plan
from mobius.schedule.render import place_actions
from mobius.schedule.schedule import Schedule
from mobius.units import GIB

SIZE = MicrobatchBytes(activation=10, layer=LayerBytes(saved_activations=100, peak=150), loss=70, embedding=500)


def plan_of(sizes: list[int], *, num_ranks: int, num_microbatches: int) -> Plan:
    resident = frozenset(range(len(sizes)))
    return Plan(num_ranks, len(sizes), num_microbatches, (0,) * num_ranks, resident, cuts=partition_of(sizes))


def keeping(plan: Plan, *stages: int) -> Plan:
    return replace(plan, saved_activation_stages=frozenset(stages))


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 7, 16])
@pytest.mark.parametrize(("forward_slots", "backward_slots"), [(1, 2), (1, 6), (3, 1)])
def test_a_message_is_received_before_as_many_others_are_sent_as_are_kept(
    num_ranks: int, num_microbatches: int, forward_slots: int, backward_slots: int
) -> None:
    schedule = build_schedule(spec_of(num_ranks, 3, num_microbatches, None))
    timeline = place_actions(schedule, forward_slots=forward_slots, backward_slots=backward_slots)
    received = {}  # (direction, sending stage, microbatch) -> when its receiver begins to use it
    for spans in timeline:
        for span in spans:
            source = source_stage(span.action, schedule.spec.num_stages)
            if source is not None:
                received[span.action.kind.is_backward, source, span.action.microbatch] = span.start
    for spans in timeline:
        sends = [
            (span.end, key)
            for span in spans
            if (key := (span.action.kind.is_backward, span.action.stage, span.action.microbatch)) in received
        ]
        kept = max_sends_in_flight(num_microbatches)
        for (_, older), (now, _) in zip(sends, sends[kept:], strict=False):
            assert received[older] <= now


def test_a_rank_without_the_models_last_stage_holds_most_when_its_backward_begins() -> None:
    plan = plan_of([1, 1, 1, 1], num_ranks=2, num_microbatches=3)
    # Inputs of two stages, two messages ahead and the five sent last, and a layer's work.
    held = find_peak(plan, 0, MicrobatchBytes(10, LayerBytes(100, 150), 70, 0))
    assert held == LiveMemory(inputs=60, saved_activations=0, messages=20 + 50, work=150)


def test_kept_activations_hold_their_outputs_so_that_sending_these_takes_nothing() -> None:
    plan = plan_of([1, 1, 1, 1], num_ranks=2, num_microbatches=3)
    held = find_peak(keeping(plan, 2), 0, MicrobatchBytes(10, LayerBytes(100, 150), 70, 0))
    # Stage 2 keeps three graphs, each of which has an output in it; of the five sent last two are stage 0's.
    assert held == LiveMemory(inputs=60, saved_activations=300, messages=20 + 20, work=50)


def test_a_backward_takes_what_its_own_level_takes() -> None:
    plan = keeping(plan_of([1, 1, 1, 1], num_ranks=2, num_microbatches=3), 2)
    size = MicrobatchBytes(10, LayerBytes(100, 150, saved_products=120, products_peak=300), 70, 0)
    assert find_peak(plan, 0, size).work == 50
    assert find_peak(replace(plan, saved_product_stages=plan.saved_activation_stages), 0, size).work == 180


def test_the_models_last_stage_keeps_one_microbatch_only() -> None:
    plan = plan_of([2, 2, 2, 2], num_ranks=2, num_microbatches=3)
    held = find_peak(plan, 1, MicrobatchBytes(10, LayerBytes(100, 150), 700, 0))
    # Two layers' inputs of three microbatches and of one; the loss beside the output.
    assert held == LiveMemory(inputs=2 * 3 * 10 + 2 * 10, saved_activations=0, messages=20 + 50, work=10 + 700)


def test_the_embeddings_backward_can_be_the_most() -> None:
    plan = plan_of([1, 1, 1, 1], num_ranks=2, num_microbatches=3)
    held = find_peak(plan, 0, SIZE)
    # Stage 0 alone is left, without its first microbatch; the gradient of the layer's input beside the embedding's.
    assert held == LiveMemory(inputs=20, saved_activations=0, messages=20 + 50, work=10 + 500)


def test_a_forward_in_tiles_makes_no_whole_layer_while_inputs_leave() -> None:
    plan = replace(
        plan_of([1, 1, 1, 1], num_ranks=2, num_microbatches=3), offloaded_activation_stages=frozenset({0, 1, 2})
    )
    held = find_peak(plan, 0, MicrobatchBytes(10, LayerBytes(100, 150, 30), 70, 0))
    # Two microbatches leave while a third is in stage 2's forward; both stages' last five outputs may not have left.
    assert held == LiveMemory(inputs=30, saved_activations=0, messages=20 + 50, work=30)


def test_a_rank_alone_hands_its_gradients_over_and_receives_nothing() -> None:
    plan = plan_of([1, 1, 1], num_ranks=1, num_microbatches=4)
    held = find_peak(plan, 0, MicrobatchBytes(10, LayerBytes(100, 150), 70, 0))
    # At the last stage's last turn: two stages' inputs, its own, three gradients; its output, the gradient and a layer.
    assert held == LiveMemory(inputs=80 + 10, saved_activations=0, messages=30, work=10 + 10 + 150)


def test_an_end_without_layers_keeps_nothing_but_what_passes() -> None:
    plan = plan_of([0, 2, 2, 0], num_ranks=2, num_microbatches=2)
    assert find_peak(keeping(plan, 0, 2), 0, SIZE).saved_activations in (0, 400)


def most_inputs(schedule: Schedule, plan: Plan, rank: int, *, products: int = 1) -> int:
    """Most inputs of layers and microbatches that are on a rank's GPU at a time, counted action by action.

    Of a microbatch whose products go home each layer counts as so many.
    """
    kept: dict[tuple[int, int | None], int] = {}
    leaving: deque[int] = deque(maxlen=max_pending_offloads(plan.copy_lookahead))
    most = 0
    for action in schedule.actions[rank]:
        own, number = (action.stage, action.microbatch), len(plan.cuts[action.stage].layers)
        number *= products if schedule.spec.offloads_all(action.stage, action.microbatch) else 1
        if action.kind is ActionKind.OFFLOAD_ACTIVATIONS:
            leaving.append(kept.pop(own))
        elif action.kind is ActionKind.PREFETCH_ACTIVATIONS:
            leaving.clear()
            kept[own] = number
        elif action.kind.is_forward:
            kept[own] = 1 if action.kind is ActionKind.FORWARD_LAST and plan.num_slices == 1 else number
        elif action.kind.is_backward:
            kept[own] = number  # of a whole sequence the model's last stage has made them now
        most = max(most, sum(kept.values()) + sum(leaving))
        is_last_slice = ((action.microbatch or 0) + 1) % plan.num_slices == 0
        comes_again = (
            action.kind is ActionKind.RECOMPUTE_KV
            and action.stage in plan.offloaded_activation_stages
            and not is_last_slice
        )
        if action.kind.is_backward or comes_again:
            del kept[own]
    return most


def test_no_more_inputs_are_on_a_gpu_than_are_counted() -> None:
    """Offloaded inputs of one, two and more microbatches in a round, slices, and stages of unequal size.

    Stages are so large that messages, of which there are twenty at most, do not hide an input of theirs.
    """
    draw, size, exact = random.Random(5), MicrobatchBytes(1, LayerBytes(0, 0), 0, 0), set[tuple[int, int]]()
    for _ in range(400):
        num_ranks, per_rank, num_slices = draw.choice([1, 2, 3]), draw.randint(1, 4), draw.choice([1, 2, 3])
        chunks = draw.randint(1, 4)
        rounds = draw.choice([number for number in range(1, chunks + 1) if chunks % number == 0])
        cuts = partition_of([100 * draw.randint(1, 3) for _ in range(num_ranks * per_rank)])
        whole = Plan(
            num_ranks, len(cuts), chunks * num_slices, (0,) * num_ranks, cuts=cuts,
            num_rounds=rounds, num_slices=num_slices,
        )  # fmt: skip
        plan = whole.with_memory_uses([MemoryUse(per_rank, 0, 0, draw.randint(0, per_rank)) for _ in range(num_ranks)])
        schedule = build_schedule(spec_of(
            num_ranks, per_rank, plan.num_microbatches, None,
            num_rounds=rounds, num_slices=num_slices,
            offloaded_activation_stages=plan.offloaded_activation_stages,
        ))  # fmt: skip
        for rank in range(num_ranks):
            held, told = most_inputs(schedule, plan, rank), find_peak(plan, rank, size).total
            assert held <= told, (plan, rank)
            exact |= {(num_slices, plan.microbatches_per_round)} if told < held + 100 else set()
    assert len(exact) > 5, "nor are many more counted"


def test_no_more_products_are_on_a_gpu_than_are_counted() -> None:
    """Products of layers take seven times as much as inputs; stages are equal, and some stay or are not offloaded."""
    draw, products, exact = random.Random(6), 7, set[int]()
    size = MicrobatchBytes(1, LayerBytes(0, 0, saved_products=products), 0, 0)
    for _ in range(300):
        num_ranks, per_rank, chunks = draw.choice([1, 2, 3]), draw.randint(2, 4), draw.randint(1, 12)
        cuts = partition_of([100] * (num_ranks * per_rank))
        whole = Plan(
            num_ranks,
            len(cuts),
            chunks,
            (0,) * num_ranks,
            cuts=cuts,
            num_offloaded_microbatches=draw.randint(1, chunks),
        )
        plan = whole.with_memory_uses([MemoryUse(per_rank, 0, 0, draw.randint(1, per_rank)) for _ in range(num_ranks)])
        schedule = build_schedule(
            spec_of(
                num_ranks,
                per_rank,
                chunks,
                None,
                offloaded_activation_stages=plan.offloaded_activation_stages,
                num_offloaded_microbatches=plan.num_offloaded_microbatches,
            )
        )
        for rank in range(num_ranks):
            held = most_inputs(schedule, plan, rank, products=products)
            told = find_peak(plan, rank, size).total
            assert held <= told, (plan, rank)
            exact |= {plan.num_offloaded_microbatches} if told < held + 100 else set()
    assert len(exact) > 5, "nor are many more counted"


# 4 x H200 (2026-11-21), before sends were bounded. The host was then a thousand launches ahead of the GPU; a
# compiled layer's forward makes some 16, so that about 64 messages were kept. That number is inferred, not measured.
KEPT_THEN = 64
MEASURED = [
    # model, stages, sequence length, chunks, loss chunk, slots, bytes per resident parameter, kept, reserved GiB
    ("7b", 32, 512, 8, 2048, 2, None, (1, 1, 1, 2), 10.26),
    ("7b", 32, 512, 8, 8192, None, 18, (8, 8, 8, 8), 63.96),
    ("7b", 32, 2048, 16, 2048, None, 18, (0, 0, 0, 0), 41.69),
    ("7b", 32, 2048, 16, 2048, 6, None, (6, 6, 6, 6), 111.73),  # which stages were kept is not on record
    ("13b", 40, 128, 4, 2048, 10, None, (10, 10, 10, 10), 24.47),
]


@pytest.mark.parametrize(("model", "stages", "length", "chunks", "loss", "slots", "held", "kept", "gib"), MEASURED)
def test_what_was_reserved_on_h200s_is_predicted_within_ten_percent_and_not_under_by_more_than_three(
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    stages: int,
    length: int,
    chunks: int,
    loss: int,
    slots: int | None,
    held: int | None,
    kept: tuple[int, ...],
    gib: float,
) -> None:
    request = request_of(
        find_published_shape(model), num_stages=stages, seq_length=length, num_chunks=chunks, loss_chunk_tokens=loss,
        max_grad_norm=0.0,
    )  # fmt: skip
    whole = make_plan(request.shape, num_ranks=4, num_stages=stages, num_microbatches=chunks, num_slots=slots)
    resident = 0 if slots else whole.stages_per_rank
    plan = whole.with_memory_uses([MemoryUse(resident, number, slots or 0) for number in kept])
    monkeypatch.setattr(spec, "max_sends_in_flight", lambda _: KEPT_THEN)
    needs = []
    for rank, need in enumerate(estimate_gpu_memory_of_ranks(request, plan)):
        # Resident stages had whole masters and fp32 gradients then, and all slots the size of the largest stage.
        parameters = [plan.cuts[stage].num_parameters(request.shape) for stage in plan.local_stages(rank)]
        streamed = need.gradients + 2 * (slots or 0) * max(parameters)
        needs.append(need.total - need.states + (streamed if held is None else held * sum(parameters)))
    assert gib * 0.97 <= max(needs) / GIB <= gib * 1.10
