"""Stages that stay on the device: nothing is loaded or offloaded, gradients stay in fp32."""

import pytest
import torch

from mobius.errors import ScheduleError
from mobius.memory.layout import StageLayout
from mobius.memory.resident import ResidentStages

NOTHING: frozenset[str] = frozenset()


@pytest.fixture
def resident(layouts: dict[int, StageLayout]) -> ResidentStages:
    return ResidentStages(layouts, dtype=torch.bfloat16, device=torch.device("cpu"))


def test_loading_and_offloading_contradict_the_schedule(resident: ResidentStages) -> None:
    with pytest.raises(ScheduleError, match="stage 2 is resident and cannot be loaded"):
        resident.load(2)
    with pytest.raises(ScheduleError, match="stage 2 is resident and cannot be offloaded"):
        resident.offload(2)


def test_an_update_of_the_state_is_seen_in_the_views(resident: ResidentStages) -> None:
    views = resident.weights(0)
    resident.states[0].set_parameter("norm", torch.arange(7.0))

    assert views["norm"].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert views["matrix"].count_nonzero() == 0


def test_gradients_are_fp32_and_take_no_rounding_on_their_way(resident: ResidentStages) -> None:
    resident.gradients(0)["norm"].fill_(1.0 + 2.0**-20)
    resident.seal_gradients(0, excluded=NOTHING)
    resident.wait_for_gradients(0)

    state = resident.states[0]
    assert state.gradients.dtype == torch.float32
    assert state.layout.views(state.gradients)["norm"].tolist() == [1.0 + 2.0**-20] * 7


def test_a_bf16_stage_takes_18_bytes_per_element_and_an_fp32_stage_16(layouts: dict[int, StageLayout]) -> None:
    for dtype, expected in ((torch.bfloat16, 18), (torch.float32, 16)):
        state = ResidentStages(layouts, dtype=dtype, device=torch.device("cpu")).states[0]
        distinct = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in state.tensors}
        assert sum(distinct.values()) == expected * 384


def test_gradients_add_up_until_they_are_sealed_and_then_begin_at_zero(resident: ResidentStages) -> None:
    for expected in (1.0, 2.0):
        resident.gradients(4)["bias"].add_(1)
        assert bool((resident.gradients(4)["bias"] == expected).all())
    resident.seal_gradients(4, excluded=NOTHING)

    assert resident.gradients(4)["bias"].count_nonzero() == 0


def test_stages_accumulate_independently(resident: ResidentStages) -> None:
    resident.gradients(0)["norm"].add_(1)
    resident.gradients(2)["matrix"].add_(2)

    assert bool((resident.gradients(0)["norm"] == 1).all())


def test_sealing_returns_the_squared_norm_without_the_excluded(resident: ResidentStages) -> None:
    for excluded, expected in ((NOTHING, 12 * 9.0 + 128 * 0.25), (frozenset({"bias"}), 12 * 9.0)):
        resident.gradients(4)["matrix"].fill_(-3)
        resident.gradients(4)["bias"].fill_(0.5)

        assert resident.seal_gradients(4, excluded=excluded).item() == pytest.approx(expected)


def test_a_stage_without_any_backward_has_gradients_of_zero(resident: ResidentStages) -> None:
    resident.states[0].gradients.fill_(5)

    assert resident.seal_gradients(0, excluded=NOTHING).item() == 0.0
    assert resident.states[0].gradients.count_nonzero() == 0
