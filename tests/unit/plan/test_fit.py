"""What is left of a GPU's memory goes to what shortens the step most, and never beyond the limit."""

from itertools import pairwise
from typing import Any

import pytest

from mobius.config.config import Dtype, Recompute
from mobius.errors import GpuMemoryError, PlanError
from mobius.plan.budget import ByteSizes, StepTokens
from mobius.plan.fit import FittedPlan, fit_plan
from mobius.plan.fit_request import FitRequest
from mobius.plan.plan import make_plan
from mobius.plan.preference import Candidate, Rates, Score, estimated_seconds
from mobius.plan.shape import ModelShape
from mobius.units import GIB

BF16 = ByteSizes.of(Dtype.BF16)
TOKENS = StepTokens(step=64 * 512, microbatch=16 * 512, loss_chunk=2048)
GRAPH = int(1.34 * GIB)
"""Of a layer and a microbatch."""


ALL_WAIT = frozenset(range(32))


def request_for(
    shape: ModelShape,
    gib: float | None,
    *,
    num_stages: int = 32,
    slots: int | None = 2,
    recompute: Recompute = Recompute.AUTO,
    resident: int | None = 0,
    waiting: frozenset[int] = ALL_WAIT,
    reserved: int = 0,
) -> FitRequest:
    plan = make_plan(shape, num_ranks=4, num_stages=num_stages, num_microbatches=4, num_slots=slots)
    return FitRequest(
        plan,
        shape,
        BF16,
        tokens=TOKENS,
        gpu_bytes=None if gib is None else int(gib * GIB),
        recompute=recompute,
        num_resident=resident,
        waiting=waiting,
        reserved_bytes=reserved,
    )


def fit(
    shape: ModelShape,
    gib: float | None,
    *,
    rank: int = 0,
    graph_bytes: int | None = GRAPH,
    score: Score | None = None,
    **changes: Any,
) -> FittedPlan:
    return fit_plan(request_for(shape, gib, **changes), rank=rank, graph_bytes=graph_bytes, score=score)


def num_resident(fitted: FittedPlan, rank: int = 0) -> int:
    plan = fitted.plan
    return len(plan.resident.intersection(plan.stages_of(rank)))


INNER, FIRST = 202_383_360, 333_455_360
"""Parameters of an inner stage and of the first one, with the embedding, of 32."""


def least_gib(slots: int, graphs: int, resident: int = 0, state_bytes: int = 14, graph: float = GRAPH / GIB) -> float:
    """By hand for rank 0 of Llama-2-7B in 32 stages: what must be free for a use of it to be chosen, in GiB.

    A message, or input of a layer, is 1/16 GiB; eight stages keep four inputs each. Two messages are received ahead;
    of the six that were sent last, four lie in the graphs of the last stage if it keeps them. A layer's work is 11 x
    4096 + 2 + 6 x 11008 wide where its graph is 7 x 4096 + 2 + 3 x 11008, and the graph is there already if it is kept.
    """
    largest = FIRST if resident == 0 else INNER
    states = slots * largest * 2 + FIRST * 4
    states += state_bytes * (FIRST + (resident - 1) * INNER) if resident else 0
    work = graph * (11 * 4096 + 2 + 6 * 11008) / (7 * 4096 + 2 + 3 * 11008) - (graph if graphs else 0)
    moment = 2 + 4 * graphs * graph + (2 + (2 if graphs else 6)) / 16 + work
    return (states / GIB + 1.03 * moment + 1 / 8 + 16 * 32768 / GIB) / 0.97


@pytest.mark.parametrize(
    ("slots", "num_graphs"), [(2, 0), (3, 0), (2, 1), (3, 1), (3, 3), (4, 4), (8, 8)]
)  # fmt: skip
def test_without_residency_activations_come_first_with_the_slots_they_need_and_then_a_slot_for_prefetching(
    llama_7b: ModelShape, slots: int, num_graphs: int
) -> None:
    fitted = fit(llama_7b, least_gib(slots, num_graphs) + 0.01)
    assert fitted.plan.slots[0] == slots
    assert fitted.graph_stages == set(range(28, -4, -4)[:num_graphs])
    if (slots, num_graphs) != (2, 0):
        less = fit(llama_7b, least_gib(slots, num_graphs) - 0.01)
        assert (less.plan.slots[0], len(less.graph_stages)) != (slots, num_graphs)


def test_the_models_last_stage_of_one_layer_takes_no_more_when_it_keeps_its_activations(llama_7b: ModelShape) -> None:
    assert fit(llama_7b, 8.3, rank=3).graph_stages == {31}


def test_without_prefetch_there_is_one_slot_in_which_the_last_stage_stays(llama_7b: ModelShape) -> None:
    fitted = fit(llama_7b, 80, slots=1)
    assert (fitted.plan.num_slots, fitted.graph_stages) == (1, {28})


def test_no_more_slots_are_taken_than_a_rank_has_stages(llama_7b: ModelShape) -> None:
    assert fit(llama_7b, 80, num_stages=8).plan.num_slots == 2
    assert fit(llama_7b, 140, slots=None).plan.num_slots is None


def test_recomputing_everywhere_keeps_nothing_but_may_take_a_third_slot(llama_7b: ModelShape) -> None:
    fitted = fit(llama_7b, 80, recompute=Recompute.FULL)
    assert (fitted.plan.num_slots, fitted.graph_stages) == (3, frozenset())


def test_all_stages_keep_their_activations_if_asked_and_too_little_memory_is_refused(llama_7b: ModelShape) -> None:
    fitted = fit(llama_7b, 140, rank=1, slots=None, recompute=Recompute.NONE)
    assert fitted.graph_stages == set(range(1, 32, 4))
    with pytest.raises(GpuMemoryError, match="stashed activations"):
        fit(llama_7b, 60, slots=None, recompute=Recompute.NONE)


def test_what_is_reserved_is_left_alone(llama_7b: ModelShape) -> None:
    gib = least_gib(3, 3) + 0.01
    assert len(fit(llama_7b, gib).graph_stages) == 3
    assert len(fit(llama_7b, gib, reserved=GIB).graph_stages) == 2


def test_what_is_not_measured_is_not_kept(llama_7b: ModelShape) -> None:
    assert fit(llama_7b, 140, graph_bytes=None).graph_stages == frozenset()


def test_graphs_that_hold_more_than_was_guessed_are_refused_before_anything_is_loaded(llama_7b: ModelShape) -> None:
    assert fit(llama_7b, 90, slots=None, recompute=Recompute.NONE).graph_stages == set(range(0, 32, 4))
    with pytest.raises(GpuMemoryError, match="stashed activations"):
        fit(llama_7b, 90, slots=None, recompute=Recompute.NONE, graph_bytes=2 * GRAPH)


def test_where_memory_is_unknown_nothing_is_added(llama_7b: ModelShape) -> None:
    assert fit(llama_7b, None).plan.num_slots == 2
    assert fit(llama_7b, None).graph_stages == frozenset()
    assert fit(llama_7b, None, slots=None, recompute=Recompute.NONE).graph_stages == set(range(0, 32, 4))


@pytest.mark.parametrize("stages", [1, 2, 5, 6, 7, 8])
def test_as_many_first_stages_stay_as_fit(llama_7b: ModelShape, stages: int) -> None:
    # The last two give up a slot each.
    least = least_gib(min(2, 8 - stages), 0, resident=stages)
    for gib, number in ((least - 0.01, stages - 1), (least + 0.01, stages)):
        fitted = fit(llama_7b, gib, resident=None, recompute=Recompute.FULL)
        assert fitted.plan.resident.intersection(fitted.plan.stages_of(0)) == set(range(0, 4 * number, 4))
        assert fitted.graph_stages == frozenset()


def test_what_is_updated_at_once_keeps_no_gradients_and_more_of_it_fits(llama_7b: ModelShape) -> None:
    gib = least_gib(1, 0, resident=7, state_bytes=12) + 0.01
    assert least_gib(2, 0, resident=5) < gib < least_gib(2, 0, resident=6)
    for waiting, stages in ((frozenset[int](), 7), (ALL_WAIT, 5)):
        fitted = fit(llama_7b, gib, resident=None, recompute=Recompute.FULL, waiting=waiting)
        assert num_resident(fitted) == stages


def test_all_ranks_make_the_same_plan_but_for_their_own_slots(llama_7b: ModelShape) -> None:
    for gib in (8, 10, 14, 24, 33, 48, 80):
        plans = [fit(llama_7b, gib, rank=rank, resident=None).plan for rank in range(4)]
        assert len({plan.resident for plan in plans}) == 1
        for rank, plan in enumerate(plans):
            assert (plan.slots[rank] > 0) == (num_resident(FittedPlan(plan, frozenset()), rank) < 8)
            others = range(plan.num_ranks)
            assert all(plan.slots[other] > 0 for other in others if plan.streamed_stages(other))


def test_kept_activations_have_their_weights_in_place(llama_7b: ModelShape) -> None:
    for gib in range(8, 100, 3):
        for rank in range(4):
            fitted = fit(llama_7b, gib, rank=rank, resident=None)
            streamed = fitted.plan.streamed_stages(rank)
            staying = streamed[len(streamed) - fitted.plan.slots[rank] :]
            assert fitted.graph_stages <= fitted.plan.resident.union(staying)


def test_more_memory_is_never_used_worse(llama_7b: ModelShape) -> None:
    request = request_for(llama_7b, None, resident=None)
    counts = [request.plan.spans[stage].num_parameters(llama_7b) for stage in request.plan.stages_of(0)]
    seconds = []
    for gib in range(8, 80, 2):
        fitted = fit(llama_7b, gib, resident=None)
        chosen = Candidate(num_resident(fitted), len(fitted.graph_stages), fitted.plan.slots[0])
        seconds.append(estimated_seconds(chosen, counts, tokens=TOKENS.step, clips=True, rates=Rates()))
    assert all(later <= earlier for earlier, later in pairwise(seconds))
    assert seconds[-1] < seconds[0]


def test_a_handed_in_score_decides_among_what_fits(llama_7b: ModelShape) -> None:
    def activations_first(rank: int, candidate: Candidate) -> float:
        return -candidate.num_graphs

    fitted = fit(llama_7b, 26.3, resident=None, score=activations_first)
    # As without residency (above): three keep their activations; what is left then takes no resident stage.
    assert (len(fitted.graph_stages), num_resident(fitted)) == (3, 0)
    fitted = fit(llama_7b, 26.3, resident=None, score=lambda rank, candidate: candidate.num_resident)
    assert num_resident(fitted) == 0
    assert num_resident(fit(llama_7b, 26.3, resident=None)) > 0


@pytest.mark.parametrize("stages", [0, 1, 3, 8])
def test_a_number_that_is_asked_for_is_taken_and_only_activations_are_chosen(llama_7b: ModelShape, stages: int) -> None:
    fitted = fit(llama_7b, 140, resident=stages)
    assert [num_resident(fitted, rank) for rank in range(4)] == [stages] * 4
    assert len(fitted.graph_stages) == 8
    assert fit(llama_7b, None, resident=stages).plan.resident == fitted.plan.resident


def test_more_resident_stages_than_fit_are_refused_with_the_arithmetic_and_the_largest_number_that_does(
    llama_7b: ModelShape,
) -> None:
    with pytest.raises(GpuMemoryError) as caught:
        fit(llama_7b, 20, resident=8)
    message = str(caught.value)
    # The first rank has 7 x 202,383,360 + 333,455,360 = 1,750,138,880 parameters, and a sum of 4 x 333,455,360 bytes.
    assert "--resident_stages 8: rank 0 needs " in message
    assert "weights 3.26 + gradients 4.50 + optimizer 16.30" in message
    assert "20.0 GiB is available. At most --resident_stages 4 fits, which needs " in message


def test_residency_is_not_blamed_where_nothing_fits(llama_7b: ModelShape) -> None:
    with pytest.raises(GpuMemoryError, match="raise --num_stages") as caught:
        fit(llama_7b, 4, resident=3)
    assert "--resident_stages" not in str(caught.value)


def test_more_resident_stages_than_a_rank_has_are_refused(llama_7b: ModelShape) -> None:
    for gib in (None, 140):
        with pytest.raises(PlanError, match=r"--resident_stages 9: each rank has 8 stage\(s\)"):
            fit(llama_7b, gib, resident=9)


def test_where_memory_is_unknown_nothing_stays_unless_asked_for(llama_7b: ModelShape) -> None:
    assert fit(llama_7b, None, resident=None).plan.resident == frozenset()


def test_a_rank_without_streamed_stages_leaves_the_others_slots_in_its_plan(llama_7b: ModelShape) -> None:
    def by_rank(rank: int, candidate: Candidate) -> float:
        return abs(candidate.num_resident - (8 if rank == 0 else 0))

    plan = fit(llama_7b, 140, resident=None, score=by_rank).plan
    assert (plan.slots[0], plan.slots[1]) == (0, 8)


# Two stages of 3e9 parameters, 1e6 tokens, 1e16 FLOP and 1e9 updates a second: forward 0.6 s per stage, update 3 s.
@pytest.mark.parametrize(
    ("resident", "graphs", "clips", "expected"),
    [
        (2, 2, True, 2 * 1.8),
        (2, 0, True, 2 * 2.4),
        (0, 2, False, 3.6 + 3.0),
        (0, 0, False, 4.8 + 3.0),  # the first stage's gradients come last
        (1, 0, False, 4.8 + 3.0 - 1.8),
        (0, 0, True, 4.8 + 6.0 - 0.6),  # the second stage waits for both updates, and has a forward's time
        (1, 0, True, 4.8 + 3.0 - 0.6),
    ],
)
def test_the_estimate_by_hand(resident: int, graphs: int, clips: bool, expected: float) -> None:
    rates = Rates(flops=1e16, updates_in_step=1e9, updates_behind_step=1e9)
    candidate = Candidate(resident, graphs, 2)
    seconds = estimated_seconds(candidate, [3 * 10**9] * 2, tokens=10**6, clips=clips, rates=rates)
    assert seconds == pytest.approx(expected)


def test_the_cpu_paces_a_step_that_computes_for_less_than_its_updates_take() -> None:
    rates = Rates(flops=1e17, updates_in_step=1e9)
    seconds = estimated_seconds(Candidate(1, 0, 2), [3 * 10**9] * 3, tokens=10**6, clips=False, rates=rates)
    assert seconds == pytest.approx(6.0)  # two streamed stages; compute takes 0.72 s


def test_the_default_rates_give_back_what_they_were_taken_from() -> None:
    # docs/benchmarks.md: 1.220 s streamed, 1.622 s with clipping, 0.762 s with all on the GPU and nothing recomputed.
    counts = [202_383_360] * 7 + [333_459_456]
    measured = (((0, 0), False, 1.220), ((0, 0), True, 1.622), ((8, 8), False, 0.762))
    for (resident, graphs), clips, seconds in measured:
        candidate = Candidate(resident, graphs, 2)
        estimate = estimated_seconds(candidate, counts, tokens=TOKENS.step, clips=clips, rates=Rates())
        assert estimate == pytest.approx(seconds, rel=0.05)
