"""Layers are cut into contiguous stages of nearly equal size."""

from dataclasses import replace
from itertools import pairwise

import pytest

from mobius.errors import PlanError
from mobius.schedule.partition import ModelShape, balanced_partition

CASES = [(layers, stages) for layers in range(1, 25) for stages in range(1, layers + 1)]


def test_every_cut_is_complete_contiguous_and_balanced() -> None:
    for num_layers, num_stages in CASES:
        spans = balanced_partition(num_layers, num_stages)
        sizes = [len(span.layers) for span in spans]

        case = f"{num_layers} layers in {num_stages} stages"
        assert [span.stage for span in spans] == list(range(num_stages)), case
        assert [layer for span in spans for layer in span.layers] == list(range(num_layers)), case
        assert all(before.end_layer == after.first_layer for before, after in pairwise(spans)), case
        assert max(sizes) - min(sizes) <= 1, case
        assert min(sizes) >= 1, case


def test_exactly_the_outer_stages_carry_embedding_and_head() -> None:
    for num_layers, num_stages in CASES:
        spans = balanced_partition(num_layers, num_stages)

        assert [span.stage for span in spans if span.is_first] == [0]
        assert [span.stage for span in spans if span.is_last] == [num_stages - 1]


@pytest.mark.parametrize(
    ("num_layers", "sizes"),
    [(8, [2, 2, 2, 2]), (9, [2, 3, 2, 2]), (10, [2, 3, 3, 2]), (11, [2, 3, 3, 3]), (12, [3, 3, 3, 3])],
)
def test_layers_left_over_go_to_inner_stages_first(num_layers: int, sizes: list[int]) -> None:
    assert [len(span.layers) for span in balanced_partition(num_layers, 4)] == sizes


@pytest.mark.parametrize(
    ("num_stages", "sizes"),
    [(9, [*[1] * 8, 0]), (10, [0, *[1] * 8, 0]), (12, [0, 0, 0, *[1] * 8, 0])],
    ids=["the head alone", "and the embedding", "and two that fill up to a multiple of four"],
)
def test_more_stages_than_layers_give_head_and_embedding_stages_of_their_own(num_stages: int, sizes: list[int]) -> None:
    assert [len(span.layers) for span in balanced_partition(8, num_stages, num_ranks=4)] == sizes


@pytest.mark.parametrize(("num_ranks", "most"), [(1, 10), (2, 10), (3, 12), (4, 12)])
def test_more_stages_than_make_sense_are_refused_with_the_numbers(num_ranks: int, most: int) -> None:
    balanced_partition(8, most, num_ranks=num_ranks)
    with pytest.raises(PlanError, match=rf"--num_stages 13 is more .* 8 layers.* Use --num_stages {most} or less"):
        balanced_partition(8, 13, num_ranks=num_ranks)


def test_stages_hold_all_parameters_of_an_untied_model(llama_7b: ModelShape) -> None:
    for num_stages in (1, 2, 3, 8, 32):
        spans = balanced_partition(32, num_stages)

        assert sum(span.num_parameters(llama_7b) for span in spans) == 6_738_415_616


def test_a_tied_matrix_is_held_by_both_outer_stages_and_counted_once_in_the_model(small: ModelShape) -> None:
    spans = balanced_partition(5, 2)

    assert [span.num_parameters(small) for span in spans] == [240 + 200, 300 + 244]
    assert small.num_parameters == 240 + 500 + 4


def test_a_single_stage_holds_everything(small: ModelShape) -> None:
    (span,) = balanced_partition(5, 1)

    assert span.num_parameters(small) == 240 + 500 + 244


def test_layers_of_different_sizes_count_where_they_are(small: ModelShape) -> None:
    mixed = replace(small, layer_parameters=(1, 10, 100, 1000, 10000))

    assert [span.num_parameters(mixed) for span in balanced_partition(5, 5)] == [241, 10, 100, 1000, 10244]
