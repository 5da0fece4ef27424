"""Resident and streamed stages of one rank: each says what it is, and they add up in one buffer."""

import pytest
import torch
from harness.rank_memory import allocate_memory

from mobius.engine.stage_memory import StageMemory
from mobius.errors import ScheduleError
from mobius.models.layout import StageLayout

CPU = torch.device("cpu")
Layouts = dict[int, StageLayout]


def make_mixed(
    layouts: Layouts, resident: tuple[int, ...], *, deferred_updates: tuple[int, ...] = (), fp32_gradients: bool = False
) -> dict[int, StageMemory]:
    """bf16 stages whose masters are their number plus 1 throughout."""
    memory, _ = allocate_memory(
        layouts,
        resident=resident,
        num_slots=1,
        dtype=torch.bfloat16,
        gradient_dtype=torch.float32 if fp32_gradients else torch.bfloat16,
        deferred_updates=deferred_updates,
        device=CPU,
    )
    for stage, own in memory.items():
        own.state.write_master(slice(None), torch.full((own.state.layout.num_units,), stage + 1))
    return memory


@pytest.mark.parametrize("resident", [(0,), (2,), (4,), (0, 4)])
def test_each_stage_says_where_it_is_and_gives_its_own_weights(layouts: Layouts, resident: tuple[int, ...]) -> None:
    memory = make_mixed(layouts, resident)
    assert list(memory) == [0, 2, 4]
    for stage in layouts:
        assert memory[stage].states.is_on_host == (stage not in resident)
        if stage in resident:
            with pytest.raises(ScheduleError, match="is resident"):
                memory[stage].weights.load()
            with pytest.raises(ScheduleError, match="is resident"):
                memory[stage].offload()
        else:
            memory[stage].weights.load()
        memory[stage].weights.wait_until_updated()
        assert all(bool((view == stage + 1).all()) for view in memory[stage].weights.views().values())
        if stage not in resident:
            memory[stage].offload()


@pytest.mark.parametrize("deferred_updates", [(), (0,)])
@pytest.mark.parametrize("fp32_gradients", [False, True])
def test_gradients_of_all_stages_go_through_one_sum_and_arrive_where_they_belong(
    layouts: Layouts, deferred_updates: tuple[int, ...], fp32_gradients: bool
) -> None:
    memory = make_mixed(layouts, (0,), deferred_updates=deferred_updates, fp32_gradients=fp32_gradients)
    for step in (1, 2, 3):  # the buffers of the sum take turns
        seen = {}
        for stage in (4, 2, 0):
            if stage:
                memory[stage].weights.load()
            for microbatch in range(2):
                memory[stage].sums.views()["matrix"].add_(step * 10.0 ** (stage // 2) * (1 + microbatch))
            memory[stage].finish_gradients()
            if stage:
                memory[stage].offload()
            memory[stage].states.wait_for_gradients()
            state = memory[stage].state
            seen[stage] = state.layout.views(state.gradients)["matrix"].float().unique().tolist()
        expected = {stage: torch.tensor(3.0 * step * 10 ** (stage // 2)) for stage in (4, 2, 0)}
        kind = torch.float32 if fp32_gradients else torch.bfloat16
        assert seen == {stage: [value.to(kind).item()] for stage, value in expected.items()}


def test_resident_stages_keep_gradients_only_while_an_update_waits(layouts: Layouts) -> None:
    memory = make_mixed(layouts, (0, 2), deferred_updates=(2,))
    total = memory[0].sums.views()["matrix"]
    assert memory[0].state.gradients.data_ptr() == total.data_ptr(), "they are read from the rank's sum"
    assert memory[2].state.gradients.data_ptr() != total.data_ptr()
    assert memory[2].state.gradients.dtype == torch.bfloat16


def test_a_streamed_stage_is_not_added_to_a_resident_one(layouts: Layouts) -> None:
    memory = make_mixed(layouts, (0,))
    memory[2].weights.load()
    memory[2].sums.views()
    with pytest.raises(AssertionError, match="stages .2. have unfinished sums, no buffer is free for stage 0"):
        memory[0].sums.views()


@pytest.mark.parametrize("num_stages", [3, 4])
def test_a_long_stage_lengthens_one_of_two_sums_where_turns_come_out_even(num_stages: int) -> None:
    shapes = {stage: {"matrix": (500 if stage == 0 else 100, 64)} for stage in range(num_stages)}
    memory, _ = allocate_memory(
        {stage: StageLayout.of(own) for stage, own in shapes.items()},
        resident=(),
        num_slots=2,
        dtype=torch.bfloat16,
        gradient_dtype=torch.bfloat16,
        deferred_updates=(),
        device=CPU,
        num_sum_buffers=2,
        has_partial_sums=True,
    )
    sizes = set()
    for step in range(3):
        for stage in reversed(range(num_stages)):
            memory[stage].weights.load()
            views = memory[stage].sums.views()
            assert not views["matrix"].any()
            views["matrix"].fill_(step + stage + 1)
            sizes.add((views["matrix"].untyped_storage().data_ptr(), views["matrix"].untyped_storage().nbytes()))
            memory[stage].finish_gradients()
            memory[stage].offload()
            memory[stage].states.wait_for_gradients()
            assert memory[stage].state.gradients.unique().tolist() == [step + stage + 1]
    long, short = 4 * 500 * 64, 4 * 100 * 64
    assert sorted(each for _, each in sizes) == ([short, long] if num_stages == 4 else [long, long])


def test_sums_are_as_long_as_the_stages_that_add_up_in_them(layouts: Layouts) -> None:
    """A resident stage that has a sum of its own, as in rounds, lengthens none of the others'."""
    shapes = {0: {"matrix": (50, 400)}, **{stage: {"matrix": (5, 40)} for stage in (2, 4, 6)}}
    given = {stage: StageLayout.of(own) for stage, own in shapes.items()}
    memory, arena = allocate_memory(
        given,
        resident=(0,),
        num_slots=2,
        dtype=torch.bfloat16,
        gradient_dtype=torch.bfloat16,
        deferred_updates=(),
        device=CPU,
        num_sum_buffers=2,
        has_partial_sums=True,
    )
    longest = {stage: memory[stage].sums.views()["matrix"].untyped_storage().nbytes() // 4 for stage in (0, 2)}
    assert longest == {0: given[0].num_trained, 2: given[2].num_trained}
    assert arena is not None
    assert arena.num_bytes == sum((2 + 4 + 2 + 8) * given[stage].num_units for stage in (2, 4, 6))
