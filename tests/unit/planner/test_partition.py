"""Layers are cut into contiguous stages, so that no rank waits long for the slowest stage."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import pytest
from harness.plan_requests import find_published_shape
from harness.schedules import even_cuts

from mobius.errors import PlanError
from mobius.schedule.partition import ModelShape, cut_model

CASES = [
    (num_layers, ranks * per_rank, ranks, head)
    for num_layers in range(1, 20)
    for ranks in (1, 2, 4)
    for per_rank in range(1, num_layers // ranks + 1)
    for head in (0, 2, 50)
]
"""Layers of work 3, stages, ranks, and the head's work."""


def shape_of(layers: Sequence[int], head: int) -> ModelShape:
    """The shape of a model with that many parameters in its layers and its head."""
    return ModelShape(7, tuple(layers), head, 4, 8, 60, is_tied=False)


def sizes_of(shape: ModelShape, num_stages: int, num_ranks: int = 1) -> list[int]:
    return [len(cut.layers) for cut in cut_model(shape, num_stages, num_ranks=num_ranks)]


def works_of(shape: ModelShape, sizes: Sequence[int]) -> list[int]:
    """Parameters of the stages that compute."""
    ends = accumulate(sizes, initial=0)
    works = [sum(shape.layer_parameters[first:end]) for first, end in pairwise(ends)]
    return [*works[:-1], works[-1] + shape.head_parameters]


def work_of_rows(works: Sequence[int], num_ranks: int) -> int:
    """Work of the slowest of each `num_ranks` stages, summed up."""
    return sum(max(works[first : first + num_ranks]) for first in range(0, len(works), num_ranks))


def seconds_of_pass(works: Sequence[int], num_ranks: int, num_microbatches: int) -> int:
    """Seconds of all stages for all microbatches, played one by one: a rank finishes a stage before its next."""
    free = [0] * num_ranks
    arrived = [0] * num_microbatches
    for stage, work in enumerate(works):
        rank = stage % num_ranks
        for microbatch in range(num_microbatches):
            free[rank] = arrived[microbatch] = max(free[rank], arrived[microbatch]) + work
    return max(free)


def test_every_cut_is_complete_and_contiguous_and_each_stage_but_the_heads_has_a_layer() -> None:
    for num_layers, num_stages, num_ranks, head in CASES:
        cuts = cut_model(shape_of([3] * num_layers, head), num_stages, num_ranks=num_ranks)

        case = f"{num_layers} layers in {num_stages} stages on {num_ranks} ranks, head {head}"
        assert [cut.stage for cut in cuts] == list(range(num_stages)), case
        assert [layer for cut in cuts for layer in cut.layers] == list(range(num_layers)), case
        assert all(before.end_layer == after.first_layer for before, after in pairwise(cuts)), case
        assert min((len(cut.layers) for cut in cuts[:-1]), default=1) >= 1, case
        assert cuts[-1].layers or head, case
        assert [cut.stage for cut in cuts if cut.is_first] == [0], case
        assert [cut.stage for cut in cuts if cut.is_last] == [num_stages - 1], case


def test_a_single_rank_waits_for_no_other_and_takes_even_stages() -> None:
    for num_layers, num_stages, _, head in CASES:
        sizes = sizes_of(shape_of([3] * num_layers, head), num_stages)
        assert max(sizes) == -(-num_layers // num_stages), (num_layers, num_stages, head)


def test_no_other_cut_has_less_work_or_a_smaller_largest_stage() -> None:
    """By brute force: each layer that the largest stage has more than in an even cut saves two percent."""
    draw = random.Random(3)
    for _ in range(150):
        num_ranks, num_layers = draw.choice([1, 2, 3]), draw.randint(4, 9)
        num_stages = num_ranks * draw.randint(1, num_layers // num_ranks)
        kinds = draw.choice([[100], [100], [40, 100, 230]])
        shape = shape_of([draw.choice(kinds) for _ in range(num_layers)], draw.choice([0, 64, 240, 700]))
        recomputing = replace(shape, head_parameters=shape.head_parameters * 3 // 4)

        def best(asked: ModelShape, most: int, num_ranks: int = num_ranks, num_stages: int = num_stages) -> list[int]:
            limit = max(sum(asked.layer_parameters[first : first + most]) for first in range(asked.num_layers))
            each = (works_of(asked, sizes) for sizes in _all_sizes(asked, num_stages))
            allowed = [works for works in each if max(*works[:-1], works[-1] - asked.head_parameters, 0) <= limit]
            return min([work_of_rows(works, num_ranks), max(works)] for works in allowed)

        most = -(-num_layers // num_stages)
        while best(recomputing, most + 1)[0] <= 0.98 * best(recomputing, most)[0]:
            most += 1
        found = works_of(shape, sizes_of(shape, num_stages, num_ranks))
        assert [work_of_rows(found, num_ranks), max(found)] == best(shape, most), (shape, num_stages, num_ranks)


def _all_sizes(shape: ModelShape, num_stages: int) -> Iterator[list[int]]:
    """All cuts into stages with a layer at least; the last may have the head alone."""
    alone = num_stages > 1 and shape.head_parameters > 0
    for ends in combinations(range(1, shape.num_layers + alone), num_stages - 1):
        yield [end - first for first, end in pairwise([0, *ends, shape.num_layers])]


@pytest.mark.parametrize(
    ("model", "sizes", "ratio"),
    [
        # Head in layers: 2.41 of 32 (8b), 2.83 of 48 (14b), 0.65 of 32 (7b).
        ("8b", [9, 9, 8, 6], 9 / 8.603),
        ("8b", [4, 4, 4, 4, 5, 5, 4, 2], 9 / 8.603),
        ("8b", [*[2] * 12, 3, 3, 2, 0], 9 / 8.603),
        ("8b", [*[2] * 8, *[1] * 12, 2, 1, 1, 0], 9.41 / 8.603),
        ("8b", [*[1] * 28, 2, 1, 1, 0], 9.41 / 8.603),
        ("14b", [13, 13, 12, 10], 13 / 12.707),
        ("14b", [6, 6, 6, 6, 7, 7, 6, 4], 13 / 12.707),
        ("14b", [*[3] * 12, 4, 4, 3, 1], 13 / 12.707),
        ("14b", [*[2] * 20, 3, 3, 2, 0], 13 / 12.707),
        ("14b", [*[2] * 16, *[1] * 12, 2, 1, 1, 0], 13.83 / 12.707),
        ("7b", [8] * 4, 8.65 / 8.162),
        ("7b", [4] * 8, 8.65 / 8.162),
        ("7b", [2] * 16, 8.65 / 8.162),
        ("7b", [1] * 32, 8.65 / 8.162),
    ],
)
def test_a_pipeline_on_four_ranks_takes_about_the_mean_of_the_ranks(model: str, sizes: list[int], ratio: float) -> None:
    shape, num_microbatches = find_published_shape(model), 400
    works = works_of(shape, sizes)
    assert sizes_of(shape, len(sizes), 4) == sizes
    assert seconds_of_pass(works, 4, num_microbatches) == pytest.approx(
        ratio * num_microbatches * sum(works) / 4, rel=0.01
    )


def test_attention_over_long_sequences_makes_the_head_a_small_share() -> None:
    """8b: attention of 131,072 tokens is 2.5 times the products of a layer, so that the head is 0.7 layers."""
    shape = find_published_shape("8b")
    assert [len(cut.layers) for cut in cut_model(shape, 4, num_ranks=4, attention_length=2048)] == [9, 9, 8, 6]
    assert [len(cut.layers) for cut in cut_model(shape, 4, num_ranks=4, attention_length=131072)] == [8] * 4


def test_a_head_larger_than_all_layers_leaves_none_to_its_stage() -> None:
    assert sizes_of(shape_of([3] * 8, 50), 4, 4) == [3, 3, 2, 0]
    assert sizes_of(shape_of([3] * 8, 50), 8, 4) == [1, 1, 1, 1, 2, 1, 1, 0]


@pytest.mark.parametrize(
    "model",
    ["0.5b", "8b", *(pytest.param(name, marks=pytest.mark.extended) for name in ("3b", "4b", "14b", "32b", "70b"))],
)
def test_no_step_is_slower_than_with_an_even_cut(model: str) -> None:
    shape = find_published_shape(model)
    for num_ranks in (2, 4, 8):
        for num_stages in range(num_ranks, shape.num_layers + 1, num_ranks):
            even = [len(cut.layers) for cut in even_cuts(shape.num_layers, num_stages)]
            found = sizes_of(shape, num_stages, num_ranks)
            seconds = [seconds_of_pass(works_of(shape, sizes), num_ranks, 64) for sizes in (found, even)]
            assert seconds[0] <= 1.005 * seconds[1], (num_ranks, num_stages)


@pytest.mark.parametrize(
    ("num_stages", "sizes"),
    [(9, [*[1] * 8, 0]), (10, [0, *[1] * 8, 0]), (12, [0, 0, 0, *[1] * 8, 0])],
    ids=["the head alone", "and the embedding", "and two that fill up to a multiple of four"],
)
def test_more_stages_than_layers_give_head_and_embedding_stages_of_their_own(num_stages: int, sizes: list[int]) -> None:
    assert sizes_of(shape_of([3] * 8, 50), num_stages, 4) == sizes


@pytest.mark.parametrize(("num_ranks", "most"), [(1, 10), (2, 10), (3, 12), (4, 12)])
def test_more_stages_than_make_sense_are_refused_with_the_numbers(num_ranks: int, most: int) -> None:
    shape = shape_of([3] * 8, 2)
    cut_model(shape, most, num_ranks=num_ranks)
    with pytest.raises(PlanError, match=rf"--num_stages 13 is more .* 8 layers.* Use --num_stages {most} or less"):
        cut_model(shape, 13, num_ranks=num_ranks)


def test_stages_hold_all_parameters_of_an_untied_model(llama_7b: ModelShape) -> None:
    for num_stages in (1, 2, 3, 8, 32):
        cuts = cut_model(llama_7b, num_stages)

        assert sum(cut.num_parameters(llama_7b) for cut in cuts) == 6_738_415_616


def test_a_tied_matrix_is_held_by_both_outer_stages_and_counted_once_in_the_model(small: ModelShape) -> None:
    cuts = cut_model(small, 2)

    assert [cut.num_parameters(small) for cut in cuts] == [240 + 300, 200 + 244]
    assert small.num_parameters == 240 + 500 + 4


def test_a_single_stage_holds_everything(small: ModelShape) -> None:
    (cut,) = cut_model(small, 1)

    assert cut.num_parameters(small) == 240 + 500 + 244


def test_layers_of_different_sizes_count_where_they_are(small: ModelShape) -> None:
    mixed = replace(small, layer_parameters=(1, 10, 100, 1000, 10000))

    assert [cut.num_parameters(mixed) for cut in cut_model(mixed, 5)] == [251, 100, 1000, 10000, 244]
