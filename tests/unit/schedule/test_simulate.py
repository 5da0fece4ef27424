"""The timeline: lengths known from arithmetic, and who waits for whom."""

import itertools

import pytest

from mobius.schedule import Schedule, build_schedule
from mobius.schedule.lanes import Lane
from mobius.schedule.simulate import ActionSpan, Costs, simulate

DEFAULT = Costs()


def spans_by_name(schedule: Schedule, rank: int, costs: Costs = DEFAULT) -> dict[str, ActionSpan]:
    """Names like `F0.0`; the second load or offload of a stage is `L0 again`."""
    spans: dict[str, ActionSpan] = {}
    for span in simulate(schedule, costs)[rank]:
        spans[f"{span.action} again" if str(span.action) in spans else str(span.action)] = span
    return spans


@pytest.mark.parametrize(
    ("num_ranks", "stages_per_rank", "num_microbatches"), [(1, 1, 3), (2, 2, 2), (4, 2, 4), (4, 3, 6)]
)
def test_a_step_takes_its_work_plus_the_way_through_the_ranks(
    num_ranks: int, stages_per_rank: int, num_microbatches: int
) -> None:
    # With M >= N a rank is never starved: v x M boxes of 1 + 2, and N - 1 boxes of each until the pipeline is full.
    timeline = simulate(build_schedule(num_ranks, stages_per_rank, num_microbatches, None))
    end = max(span.end for spans in timeline for span in spans)
    assert end == 3 * (stages_per_rank * num_microbatches + num_ranks - 1)


def test_the_costs_are_the_lengths() -> None:
    spans = spans_by_name(build_schedule(1, 1, 1, 1), 0, Costs(forward=2, backward=5, load=3, offload=4))
    found = {name: (span.start, span.end) for name, span in spans.items()}
    assert found == {
        "D0": (0, 0),
        "L0": (0, 3),
        "F0.0": (3, 5),
        "B0.0": (5, 10),
        "O0": (10, 14),
    }


def test_a_load_runs_beside_the_compute_of_the_stage_before_with_two_slots() -> None:
    spans = spans_by_name(build_schedule(1, 3, 4, 2), 0)
    # F1 starts when F0 ends; L2 then takes the slot that stage 0 gave up, and is done before F1 is.
    assert (spans["O0"].start, spans["L2"].start, spans["L2"].end) == (6, 6, 8)
    assert (spans["F1.0"].start, spans["F1.3"].end, spans["F2.0"].start) == (6, 10, 10)


def test_with_one_slot_compute_waits_for_every_load() -> None:
    spans = spans_by_name(build_schedule(1, 2, 2, 1), 0)
    # L0 0-2, F0 2-4, L1 4-6, F1 6-8, B1 8-12, O1 12-14, and only then the slot is free for L0.
    assert (spans["L1"].start, spans["F1.0"].start) == (4, 6)
    assert (spans["O1"].end, spans["L0 again"].start, spans["B0.0"].start) == (14, 14, 16)


def test_sums_leave_behind_their_backward_and_come_back_before_the_next_one() -> None:
    spans = spans_by_name(build_schedule(1, 2, 4, 2, accumulation_rounds=2), 0)
    # F0 2-4, F1 4-6, B1 6-10, B0 10-14, and the same again; a stage's sums take four slots each way.
    assert (spans["B1.1"].end, spans["OS1"].start, spans["OS1"].end) == (10, 10, 14)
    assert (spans["B0.1"].end, spans["OS0"].start, spans["OS0"].end) == (14, 14, 18)
    assert (spans["LS1"].start, spans["LS1"].end, spans["B1.2"].start) == (18, 22, 22)
    assert spans["LS0"].lane is Lane.LOAD
    assert spans["LS0"].end <= spans["B0.2"].start


def test_no_lane_does_two_things_at_once_and_no_message_arrives_before_it_is_sent(
    all_schedules: list[Schedule],
) -> None:
    for schedule in all_schedules:
        if schedule.num_microbatches not in (3, 5):
            continue
        timeline = simulate(schedule)
        ends = {
            str(span.action): span.end for spans in timeline for span in spans if span.action.microbatch is not None
        }
        for spans in timeline:
            for lane in Lane:
                ordered = [span for span in spans if span.lane is lane]
                assert all(a.end <= b.start for a, b in itertools.pairwise(ordered))
            for span in spans:
                if span.action.kind.is_forward and span.action.stage > 0:
                    assert span.start >= ends[f"F{span.action.stage - 1}.{span.action.microbatch}"]
                if span.action.kind.is_backward and span.action.stage < schedule.num_stages - 1:
                    assert span.start >= ends[f"B{span.action.stage + 1}.{span.action.microbatch}"]
