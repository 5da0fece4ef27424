"""The solver's cut is the best of all cuts where all can be tried, keeps its caps, and is missed without harm."""

import itertools
import random
from dataclasses import replace

import pytest

from mobius.plan.partition import balanced_partition
from mobius.plan.uneven_partition import PartitionTask, solve, uneven_partition


def make_task(**changes: object) -> PartitionTask:
    """Six equal layers, a loss that costs as much as 0.6 of one, in four stages on two ranks."""
    task = PartitionTask(
        layer_seconds=(1.0,) * 6,
        first_seconds=0.1,
        last_seconds=0.6,
        layer_parameters=(10,) * 6,
        first_parameters=5,
        last_parameters=5,
        num_ranks=2,
        num_stages=4,
    )
    return replace(task, **changes)  # type: ignore[arg-type]


def all_sizes(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """Every way to write `num_layers` as a sum of that many numbers from 0 on."""
    bars = itertools.combinations(range(num_layers + num_stages - 1), num_stages - 1)
    ends = [(-1, *places, num_layers + num_stages - 1) for places in bars]
    return [tuple(b - a - 1 for a, b in itertools.pairwise(places)) for places in ends]


def best_score(task: PartitionTask, pace: float) -> float:
    cuts = [sizes for sizes in all_sizes(len(task.layer_seconds), task.num_stages) if task.allows(sizes)]
    return min(task.score(sizes, pace) for sizes in cuts)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("are_alike", [True, False])
def test_the_solver_finds_what_trying_all_cuts_finds(seed: int, are_alike: bool) -> None:
    draw = random.Random(seed)
    num_ranks, stages_per_rank = draw.choice([(1, 2), (1, 4), (2, 2), (2, 3), (3, 1), (3, 2)])
    num_layers = draw.randint(num_ranks * stages_per_rank, 9)
    kinds = [draw.uniform(0.5, 2) for _ in range(1 if are_alike else 3)]
    layers = tuple(draw.choice(kinds) for _ in range(num_layers))
    task = make_task(
        layer_seconds=layers,
        layer_parameters=tuple(round(100 * seconds) for seconds in layers),
        first_seconds=draw.uniform(0, 1),
        last_seconds=draw.uniform(0, 2),
        first_parameters=50,
        last_parameters=60,
        num_ranks=num_ranks,
        num_stages=num_ranks * stages_per_rank,
        max_parameters=draw.choice([None, round(sum(layers) * 70)]),
        max_layers_of_rank=draw.choice([None, -(-num_layers // num_ranks) + 1]),
    )
    for pace in (0.0, 0.5, 1.0):
        sizes, is_proved = solve(task, pace=pace, time_limit=20)
        assert sizes is not None
        assert is_proved
        assert task.allows(sizes)
        assert task.score(sizes, pace) == pytest.approx(best_score(task, pace), rel=1e-5)


def test_the_score_is_the_sum_of_the_slowest_of_each_round_or_the_fullest_rank() -> None:
    # Stages take 2.1, 2, 1 and 1.6; rounds (2.1, 2) and (1, 1.6); ranks 2.1 + 1 and 2 + 1.6.
    task = make_task()
    assert task.score((2, 2, 1, 1), 1.0) == pytest.approx(2.1 + 1.6)
    assert task.score((2, 2, 1, 1), 0.0) == pytest.approx(3.6)


def test_a_costly_loss_takes_layers_off_the_last_stage() -> None:
    task = make_task(layer_seconds=(1.0,) * 7, layer_parameters=(10,) * 7, last_seconds=2.0, first_seconds=0.0)
    sizes, _ = solve(task, pace=0.0, time_limit=20)
    assert sizes is not None
    # Nine seconds on two ranks: five with the loss, or four and three layers: rank 1 gets two or three layers.
    assert sizes[1] + sizes[3] in (2, 3)


def test_only_the_outer_stages_may_be_empty() -> None:
    task = make_task()
    assert task.allows((0, 3, 3, 0))
    assert not task.allows((3, 0, 3, 0))
    assert not make_task(num_stages=1, num_ranks=1).allows((0,))


def test_caps_that_nothing_satisfies_give_the_balanced_cut_and_a_line() -> None:
    cut = uneven_partition(make_task(max_parameters=9), pace=0.5)
    assert cut.spans == balanced_partition(6, 4)
    assert cut.notice is not None
    assert "evenly" in cut.notice


def test_a_solver_without_time_gives_a_cut_and_a_line() -> None:
    draw = random.Random(0)
    layers = tuple(draw.uniform(0.5, 2) for _ in range(40))
    task = make_task(layer_seconds=layers, layer_parameters=(10,) * 40, num_ranks=4, num_stages=20)
    cut = uneven_partition(task, pace=0.5, time_limit=1e-3)
    assert task.allows([len(span.layers) for span in cut.spans])
    assert cut.notice is not None


def test_the_shape_of_llama_7b_is_solved_in_time() -> None:
    task = make_task(layer_seconds=(1.0,) * 32, layer_parameters=(10,) * 32, num_ranks=4, num_stages=16)
    cut = uneven_partition(task, pace=0.5)
    assert cut.notice is None
