"""The plan: what it says of a run, in Python and to a reader."""

import pytest

from mobius.errors import PlanError
from mobius.schedule.partition import ModelShape
from mobius.schedule.plan import MemoryUse, make_plan


def test_stages_go_round_the_ranks(small: ModelShape) -> None:
    plan = make_plan(small, num_ranks=2, num_stages=4, num_microbatches=2, num_slots=2)

    assert (plan.num_stages, plan.stages_per_rank) == (4, 2)
    assert [list(plan.local_stages(rank)) for rank in range(2)] == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("num_ranks", "wanted", "slots"), [(1, 2, 2), (2, 2, 2), (4, 2, 1), (4, 1, 1), (2, 1, 1), (2, None, None)]
)
def test_a_rank_has_no_more_slots_than_stages(
    small: ModelShape, num_ranks: int, wanted: int | None, slots: int | None
) -> None:
    plan = make_plan(small, num_ranks=num_ranks, num_stages=4, num_microbatches=2, num_slots=wanted)

    assert plan.num_slots == slots


def test_more_stages_than_layers_embedding_and_head_are_refused(small: ModelShape) -> None:
    with pytest.raises(PlanError, match="--num_stages 10.* 5 layers.* Use --num_stages 8 or less"):
        make_plan(small, num_ranks=2, num_stages=10, num_microbatches=2, num_slots=2)


def test_the_description_tells_the_slots(small: ModelShape) -> None:
    plan = make_plan(small, num_ranks=1, num_stages=1, num_microbatches=1, num_slots=None)
    assert plan.describe() == "1 stages on 1 rank(s), 1 microbatches, no slots"
    streamed = make_plan(small, num_ranks=2, num_stages=4, num_microbatches=4, num_slots=2)
    assert streamed.describe() == "4 stages on 2 rank(s), 4 microbatches, 2 slot(s) per rank"
    mixed = streamed.with_memory_uses([MemoryUse(1, 0, 2), MemoryUse(0, 0, 2)])
    assert mixed.describe() == "4 stages on 2 rank(s), 4 microbatches, 1 to 2 slots per rank"


def test_each_rank_keeps_its_first_stages_and_slots_for_the_others_and_keeps_activations_of_its_last(
    small: ModelShape,
) -> None:
    streamed = make_plan(small, num_ranks=2, num_stages=4, num_microbatches=1, num_slots=2)
    plan = streamed.with_memory_uses([MemoryUse(2, 0, 2), MemoryUse(1, 1, 2)])

    assert plan.resident == {0, 2, 1}
    assert plan.saved_activation_stages == {3}
    assert [plan.streamed_stages(rank) for rank in range(2)] == [[], [3]]
    assert (plan.num_slots, plan.slots) == (1, (0, 1))
    assert [plan.use_of(rank) for rank in range(2)] == [MemoryUse(2, 0, 0), MemoryUse(1, 1, 1)]
    assert streamed.with_memory_uses([MemoryUse(0, 0, 2)] * 2) == streamed
    assert streamed.with_memory_uses([MemoryUse(0, 0, 1), MemoryUse(0, 0, 3)]).slots == (1, 2)
    everything = streamed.with_memory_uses([MemoryUse(2, 0, 2)] * 2)
    assert everything == make_plan(small, num_ranks=2, num_stages=4, num_microbatches=1, num_slots=None)
    assert everything.resident == {0, 1, 2, 3}
