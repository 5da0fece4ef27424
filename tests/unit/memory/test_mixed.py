"""Resident and streamed stages behind one memory: each call reaches its stage, and they add up in one buffer."""

import pytest
import torch

from mobius.errors import ScheduleError
from mobius.memory.gradient_sum import GradientSum
from mobius.memory.host_arena import HostArena
from mobius.memory.layout import StageLayout
from mobius.memory.mixed import MixedStages
from mobius.memory.resident import ResidentStages
from mobius.memory.weight_slots import WeightSlots

CPU = torch.device("cpu")
NOTHING: frozenset[str] = frozenset()
Layouts = dict[int, StageLayout]


def make_mixed(
    layouts: Layouts, resident: tuple[int, ...], *, waiting: tuple[int, ...] = (), fp32_gradients: bool = False
) -> tuple[MixedStages, GradientSum]:
    """bf16 stages whose masters are their number plus 1 throughout."""
    kind = torch.float32 if fp32_gradients else None
    total = GradientSum(384, device=CPU, num_buffers=2 if fp32_gradients else 1)
    streamed = {stage: layout for stage, layout in layouts.items() if stage not in resident}
    arena = HostArena(streamed, dtype=torch.bfloat16, register=False, gradient_dtype=kind)
    staying = ResidentStages(
        {stage: layouts[stage] for stage in resident},
        dtype=torch.bfloat16,
        device=CPU,
        waiting=waiting,
        gradient_dtype=kind,
        gradient_sum=total,
    )
    memory = MixedStages(staying, WeightSlots(arena.states, num_slots=1, device=CPU, gradient_sum=total))
    for stage, state in memory.states.items():
        state.write_master(slice(None), torch.full((state.layout.num_elements,), stage + 1))
    return memory, total


@pytest.mark.parametrize("resident", [(0,), (2,), (4,), (0, 4)])
def test_each_stage_says_where_it_is_and_gives_its_own_weights(layouts: Layouts, resident: tuple[int, ...]) -> None:
    memory, _ = make_mixed(layouts, resident)
    assert list(memory.states) == [0, 2, 4]
    for stage in layouts:
        assert memory.is_resident(stage) == (stage in resident)
        if stage in resident:
            with pytest.raises(ScheduleError, match="is resident"):
                memory.load(stage)
            with pytest.raises(ScheduleError, match="is resident"):
                memory.offload(stage)
        else:
            memory.load(stage)
        memory.wait_until_updated(stage)
        assert all(bool((view == stage + 1).all()) for view in memory.weights(stage).values())
        if stage not in resident:
            assert memory.offload(stage) is None


@pytest.mark.parametrize("waiting", [(), (0,)])
@pytest.mark.parametrize("fp32_gradients", [False, True])
def test_gradients_of_all_stages_go_through_one_sum_and_arrive_where_they_belong(
    layouts: Layouts, waiting: tuple[int, ...], fp32_gradients: bool
) -> None:
    memory, _ = make_mixed(layouts, (0,), waiting=waiting, fp32_gradients=fp32_gradients)
    for step in (1, 2, 3):  # the buffers of the sum take turns
        seen = {}
        for stage in (4, 2, 0):
            if stage:
                memory.load(stage)
            for microbatch in range(2):
                memory.gradients(stage)["matrix"].add_(step * 10.0 ** (stage // 2) * (1 + microbatch))
            memory.seal_gradients(stage, excluded=NOTHING)
            if stage:
                assert memory.offload(stage) is not None
            memory.wait_for_gradients(stage)
            assert memory.have_gradients_arrived(stage)
            state = memory.states[stage]
            seen[stage] = state.layout.views(state.gradients)["matrix"].float().unique().tolist()
        expected = {stage: torch.tensor(3.0 * step * 10 ** (stage // 2)) for stage in (4, 2, 0)}
        kind = torch.float32 if fp32_gradients else torch.bfloat16
        assert seen == {stage: [value.to(kind).item()] for stage, value in expected.items()}


def test_resident_stages_keep_gradients_only_while_an_update_waits(layouts: Layouts) -> None:
    memory, total = make_mixed(layouts, (0, 2), waiting=(2,))
    assert [memory.keeps_gradients(stage) for stage in (0, 2, 4)] == [False, True, True]
    assert memory.states[0].gradients.data_ptr() == total.flat(layouts[0]).data_ptr()
    assert memory.states[2].gradients.dtype == torch.bfloat16


def test_a_streamed_stage_is_not_added_to_a_resident_one(layouts: Layouts) -> None:
    memory, _ = make_mixed(layouts, (0,))
    memory.load(2)
    memory.gradients(2)
    with pytest.raises(AssertionError, match="stage 2 was not sealed before stage 0"):
        memory.gradients(0)
