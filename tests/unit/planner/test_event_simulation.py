"""Tasks take their turns on lanes, flows share what they use, and nothing is lost: times worked out by hand."""

import itertools
import random

import pytest

from mobius.planner.event_simulation import Flow, RateTable, Task, run, share_rates


def ends(tasks: list[Task]) -> list[float]:
    return [round(task.end, 9) for task in tasks]


def test_a_task_begins_when_all_that_it_needs_is_done() -> None:
    first, second = Task("a", 2.0), Task("b", 3.0)
    third = Task("c", 1.0, [first, second])
    run([first, second, third], RateTable({}))
    assert (third.start, third.end) == (3.0, 4.0)


def test_a_lane_does_one_thing_at_a_time_in_the_order_in_which_things_become_ready() -> None:
    late = Task(None, 1.0)
    tasks = [late, Task("a", 2.0, [late]), Task("a", 5.0)]
    run(tasks, RateTable({}))
    assert ends(tasks) == [1.0, 7.0, 5.0]


def test_the_lowest_priority_number_goes_first_also_when_it_becomes_ready_at_the_same_moment() -> None:
    # Two pieces of stage 4; stage 0 becomes ready just as the first piece ends.
    first = Task("optimizer", 2.0, [], 4)
    second = Task("optimizer", 2.0, [first], 4)
    arrival = Task(None, 2.0)
    urgent = Task("optimizer", 1.0, [arrival], 0)
    run([first, second, arrival, urgent], RateTable({}))
    assert (urgent.start, second.start) == (2.0, 3.0)


def test_two_flows_share_a_resource_and_the_longer_one_has_it_alone_afterwards() -> None:
    short, long = (Task(name, Flow(amount, 10.0, {"r": 1.0})) for name, amount in (("a", 10.0), ("b", 30.0)))
    run([short, long], RateTable({"r": 10.0}))
    # 5 each for 2 s; then 20 are left at 10.
    assert ends([short, long]) == [2.0, 4.0]


def test_a_flow_that_begins_later_slows_the_one_under_way() -> None:
    first = Task("a", Flow(30.0, 10.0, {"r": 1.0}))
    wait = Task(None, 1.0)
    second = Task("b", Flow(5.0, 10.0, {"r": 1.0}), [wait])
    run([first, wait, second], RateTable({"r": 10.0}))
    # 10 by 1 s; then 5 each until 2 s; then the last 15 at 10.
    assert ends([first, second]) == [3.5, 2.0]


def test_rates_are_max_min_fair() -> None:
    # b may take 1; a and c share the rest of r, 4.5 each; c is also alone on s, which has room.
    flows = {name: Flow(1.0, limit, uses) for name, limit, uses in (
        ("a", 10.0, {"r": 1.0}), ("b", 1.0, {"r": 1.0}), ("c", 10.0, {"r": 1.0, "s": 1.0}))}  # fmt: skip
    assert share_rates(flows, {"r": 10.0, "s": 8.0}) == pytest.approx({"a": 4.5, "b": 1.0, "c": 4.5})


def test_weights_and_amounts_per_unit_count() -> None:
    # a grows thrice as fast and uses twice as much of r per unit: 3x of 2 and x of 1, 7x = 14.
    flows = {"a": Flow(1.0, 100.0, {"r": 2.0}, weight=3.0), "b": Flow(1.0, 100.0, {"r": 1.0})}
    assert share_rates(flows, {"r": 14.0}) == pytest.approx({"a": 6.0, "b": 2.0})


@pytest.mark.parametrize("seed", range(20))
def test_no_resource_gives_more_than_it_has_and_no_flow_could_go_faster(seed: int) -> None:
    draw = random.Random(seed)
    capacities = {resource: draw.uniform(1, 10) for resource in "rst"}
    flows = {
        number: Flow(1.0, draw.uniform(0.5, 8), {r: draw.uniform(0.5, 2) for r in draw.sample("rst", 2)},
                     draw.uniform(0.5, 3))
        for number in range(6)
    }  # fmt: skip
    rates = share_rates(flows, capacities)
    used = {r: sum(rates[n] * flow.uses.get(r, 0.0) for n, flow in flows.items()) for r in capacities}
    for resource, amount in used.items():
        assert amount <= capacities[resource] * (1 + 1e-6)
    for number, flow in flows.items():
        is_full = any(used[r] >= capacities[r] * (1 - 1e-6) for r in flow.uses)
        assert is_full or rates[number] == pytest.approx(flow.limit)


@pytest.mark.parametrize("seed", range(10))
def test_random_tasks_all_end_lanes_never_overlap_and_amounts_are_conserved(seed: int) -> None:
    draw = random.Random(seed)
    tasks: list[Task] = []
    for _ in range(60):
        lane = draw.choice("abcd")
        # The tasks of a lane flow alike.
        work = draw.uniform(0, 2) if lane in "ab" else Flow(draw.uniform(0, 5), 3.0, {"r": 1.0, lane: 2.0})
        tasks.append(Task(lane, work, draw.sample(tasks, min(2, len(tasks))), draw.randint(0, 3)))
    run(tasks, RateTable({"r": 4.0, "c": 3.0, "d": 9.0}))
    for task in tasks:
        assert all(needed.end <= task.start + 1e-9 for needed in task.needs)
    for lane in "abcd":
        own = sorted((task for task in tasks if task.lane == lane), key=lambda task: (task.start, task.end))
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(own))
    # What flowed over r is no more than it gives while anything flows.
    flows = [task for task in tasks if isinstance(task.work, Flow)]
    assert sum(task.work.amount for task in flows) <= 4.0 * max(task.end for task in flows) * (1 + 1e-9)


def test_a_circle_of_needs_is_our_own_bug() -> None:
    first = Task("a", 1.0)
    second = Task("b", 1.0, [first])
    first.needs = [second]
    with pytest.raises(AssertionError, match="circle"):
        run([first, second], RateTable({}))
