"""Stages that stay on the device: nothing is loaded or offloaded, gradients are kept where an update waits."""

import pytest
import torch
from harness.rank_memory import allocate_memory

from mobius.engine.stage_memory import StageMemory
from mobius.engine.stage_state import StageState
from mobius.errors import ScheduleError
from mobius.models.layout import StageLayout

CPU = torch.device("cpu")
NOTHING: frozenset[str] = frozenset()


Layouts = dict[int, StageLayout]
Stages = dict[int, StageMemory]


def make_resident(
    layouts: Layouts,
    *,
    dtype: torch.dtype = torch.bfloat16,
    deferred_updates: tuple[int, ...] = (0, 2, 4),
    gradient_dtype: torch.dtype | None = None,
) -> Stages:
    """Resident stages of one rank; those in `deferred_updates` keep their gradients."""
    memory, _ = allocate_memory(
        layouts,
        resident=layouts,
        num_slots=0,
        dtype=dtype,
        gradient_dtype=gradient_dtype or dtype,
        deferred_updates=deferred_updates,
        device=CPU,
    )
    return memory


@pytest.fixture
def resident(layouts: Layouts) -> Stages:
    return make_resident(layouts)


def test_loading_and_offloading_contradict_the_schedule(resident: Stages) -> None:
    with pytest.raises(ScheduleError, match="stage 2 is resident and cannot be loaded"):
        resident[2].weights.load()
    with pytest.raises(ScheduleError, match="stage 2 is resident and cannot be offloaded"):
        resident[2].offload()


def test_an_update_of_the_state_is_seen_in_the_views(resident: Stages) -> None:
    views = resident[0].weights.views()
    resident[0].state.set_parameter("norm", torch.arange(7.0))

    assert views["norm"].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert views["matrix"].count_nonzero() == 0


VALUE = 1.0 + 2.0**-9 + 2.0**-20
"""In bf16, whose numbers are 2**-7 apart here, it is 1."""


@pytest.mark.parametrize("deferred_updates", [(), (0, 2, 4)])
@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.bfloat16, 1.0), (torch.float32, 1.0 + 2.0**-9 + 2.0**-20)], ids=["bf16", "fp32"]
)
def test_gradients_are_rounded_as_those_that_leave_unless_fp32_is_wanted(
    layouts: Layouts, deferred_updates: tuple[int, ...], dtype: torch.dtype, expected: float
) -> None:
    stages = make_resident(layouts, deferred_updates=deferred_updates, gradient_dtype=dtype)
    stages[0].sums.views()["norm"].fill_(VALUE)
    squares = stages[0].finish_gradients()
    stages[0].states.wait_for_gradients()

    state = stages[0].state
    assert state.layout.views(state.gradients)["norm"].tolist() == [expected] * 7
    assert squares.tolist() == pytest.approx([7 * VALUE**2, 0.0], rel=1e-6), "the norm is that of the exact gradients"


@pytest.mark.parametrize(
    ("dtype", "gradient_dtype", "kept", "not_kept"),
    [
        (torch.bfloat16, None, 2 + 2 + 8 + 2, 2 + 2 + 8),  # weight, remainder, moments; kept gradient
        (torch.bfloat16, torch.float32, 2 + 2 + 8 + 4, 2 + 2 + 8),
        (torch.float16, None, 2 + 4 + 8 + 2, None),
        (torch.float32, None, 4 + 8 + 4, 4 + 8),
    ],
)
def test_bytes_per_element(
    layouts: Layouts,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype | None,
    kept: int,
    not_kept: int | None,
) -> None:
    # 384 + 256 + 256 elements; the sum belongs to the rank and is not counted.
    for deferred_updates, expected in (((0, 2, 4), kept), ((), not_kept)):
        if expected is None:
            continue
        stages = make_resident(
            layouts,
            dtype=dtype,
            deferred_updates=deferred_updates,
            gradient_dtype=gradient_dtype,
        )
        tensors = [tensor for stage in stages.values() for tensor in stage.state.tensors]
        distinct = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        if not deferred_updates:
            distinct.pop(stages[0].sums.finished.values.data_ptr())
        assert sum(distinct.values()) == expected * 896


def test_what_waits_for_its_update_stays_when_another_stage_adds_up(layouts: Layouts) -> None:
    stages = make_resident(layouts, deferred_updates=(2,))
    stages[2].sums.views()["matrix"].add_(3)
    stages[2].finish_gradients()
    stages[0].sums.views()["norm"].add_(1)
    stages[0].finish_gradients()

    assert bool((stages[2].state.gradients == 3).all())
    assert bool((stages[0].state.gradients[-128:-121] == 1).all())  # matrix first, then the norm


def test_the_norm_tells_of_a_gradient_that_fp16_cannot_hold(layouts: Layouts) -> None:
    stages = make_resident(layouts, dtype=torch.float16)
    stages[0].sums.views()["norm"].fill_(70_000.0)  # fp16 ends at 65504
    assert stages[0].finish_gradients().isnan().all()


def test_gradients_add_up_until_they_are_sealed_and_then_begin_at_zero(resident: Stages) -> None:
    for expected in (1.0, 2.0):
        resident[4].sums.views()["bias"].add_(1)
        assert bool((resident[4].sums.views()["bias"] == expected).all())
    resident[4].finish_gradients()

    assert resident[4].sums.views()["bias"].count_nonzero() == 0


def test_one_stage_at_a_time_adds_up(resident: Stages) -> None:
    resident[0].sums.views()["norm"].add_(1)
    with pytest.raises(AssertionError, match="stages .0. have unfinished sums, no buffer is free for stage 2"):
        resident[2].sums.views()


def test_sealing_returns_the_squared_norm_of_each_tensor_and_0_for_the_excluded(resident: Stages) -> None:
    for excluded, expected in ((NOTHING, [12 * 9.0, 128 * 0.25]), (frozenset({"bias"}), [12 * 9.0, 0.0])):
        resident[4].sums.views()["matrix"].fill_(-3)
        resident[4].sums.views()["bias"].fill_(0.5)

        resident[4].sums.tied = excluded
        assert resident[4].finish_gradients().tolist() == pytest.approx(expected)


def test_a_stage_without_any_backward_has_gradients_of_zero(resident: Stages) -> None:
    resident[0].state.gradients.fill_(5)

    assert resident[0].finish_gradients().tolist() == [0.0, 0.0]
    assert resident[0].state.gradients.count_nonzero() == 0


def test_a_state_alone_is_had_without_the_ranks_sum() -> None:
    layout = StageLayout.of({"weight": (64, 2)})
    state = StageState.on_device(layout, CPU, torch.bfloat16)
    assert (state.gradients.dtype, len(state.gradients)) == (torch.bfloat16, layout.num_trained)
