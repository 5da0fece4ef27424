"""What is left of a GPU's memory goes to activations first and to a further slot then, and never beyond the limit."""

import pytest

from mobius.config import Dtype, Recompute
from mobius.errors import GpuMemoryError
from mobius.planner.budget import GIB, ByteSizes
from mobius.planner.fit import FittedPlan, StepTokens, fit_plan
from mobius.planner.plan import make_plan
from mobius.planner.shape import ModelShape

BF16 = ByteSizes.of(Dtype.BF16)
TOKENS = StepTokens(step=64 * 512, microbatch=16 * 512, loss_chunk=2048)
GRAPH = int(1.34 * GIB)
"""Of a layer and a microbatch."""


def fit(
    shape: ModelShape,
    gib: float | None,
    *,
    rank: int = 0,
    num_stages: int = 32,
    slots: int | None = 2,
    recompute: Recompute = Recompute.AUTO,
    graph_bytes: int | None = GRAPH,
    reserved: int = 0,
) -> FittedPlan:
    plan = make_plan(shape, num_ranks=4, num_stages=num_stages, num_microbatches=4, num_slots=slots)
    gpu_bytes = None if gib is None else int(gib * GIB)
    return fit_plan(
        plan,
        shape,
        BF16,
        rank=rank,
        tokens=TOKENS,
        gpu_bytes=gpu_bytes,
        recompute=recompute,
        graph_bytes=graph_bytes,
        reserved_bytes=reserved,
    )


# By hand, rank 0 of Llama-2-7B in 32 stages: 8 layers x 32768 tokens x 4096 x 2 bytes stashed = 2 GiB; a slot of a
# layer with the embedding 0.62, its fp32 gradients 1.24, one layer's work 1.34 GiB; a stage's activations 4 x 1.34.
@pytest.mark.parametrize(
    ("gib", "slots", "num_graphs"),
    [
        (7.6, 2, 0),  # 2 x 0.62 + 4.58 = 5.82 of 7.6 x 0.9 - 1 = 5.84
        (8.3, 3, 0),  # 6.44 of 6.47
        (13.7, 2, 1),  # 5.82 + 5.36 = 11.18 of 11.33
        (14.3, 3, 1),  # 11.80 of 11.87
        (26.3, 3, 3),  # 6.44 + 16.08 = 22.52 of 22.67
        (33.0, 4, 4),  # 7.06 + 21.44 = 28.50 of 28.70
        (59.5, 8, 8),  # 9.54 + 42.88 = 52.42 of 52.55
        (140.0, 8, 8),
    ],
)
def test_activations_come_first_with_the_slots_they_need_and_then_a_slot_for_prefetching(
    llama_7b: ModelShape, gib: float, slots: int, num_graphs: int
) -> None:
    fitted = fit(llama_7b, gib)
    assert fitted.plan.num_slots == slots
    assert fitted.graph_stages == set(range(28, -4, -4)[:num_graphs])


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
    assert len(fit(llama_7b, 26.3).graph_stages) == 3
    assert len(fit(llama_7b, 26.3, reserved=GIB).graph_stages) == 2


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
