"""Host memory of streamed stages: 16 bytes per element and nothing rounded up."""

import pytest
import torch
from torch import Tensor

from mobius.errors import HostMemoryError
from mobius.memory.host_arena import HostArena
from mobius.memory.layout import StageLayout
from mobius.memory.stage_state import StageState


def distinct_storages(state: StageState) -> dict[int, Tensor]:
    tensors = (state.weights, state.gradients, state.master, state.exp_avg, state.exp_avg_sq)
    return {tensor.data_ptr(): tensor for tensor in tensors}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_stage_takes_sixteen_bytes_per_element(layouts: dict[int, StageLayout], dtype: torch.dtype) -> None:
    arena = HostArena(layouts, dtype=dtype, register=False)

    for stage, num_elements in {0: 384, 2: 256, 4: 256}.items():
        storages = distinct_storages(arena.states[stage]).values()
        assert sum(tensor.untyped_storage().nbytes() for tensor in storages) == 16 * num_elements


def test_gradients_have_the_dtype_of_the_weights_and_the_optimizer_has_fp32(layouts: dict[int, StageLayout]) -> None:
    state = HostArena(layouts, dtype=torch.bfloat16, register=False).states[0]

    assert state.weights.dtype == state.gradients.dtype == torch.bfloat16
    assert state.master.dtype == state.exp_avg.dtype == state.exp_avg_sq.dtype == torch.float32
    assert len(distinct_storages(state)) == 5


def test_in_fp32_the_master_is_the_working_copy(layouts: dict[int, StageLayout]) -> None:
    state = HostArena(layouts, dtype=torch.float32, register=False).states[0]

    assert state.master is state.weights
    assert len(distinct_storages(state)) == 4


def test_all_memory_starts_at_zero(layouts: dict[int, StageLayout]) -> None:
    for state in HostArena(layouts, dtype=torch.bfloat16, register=False).states.values():
        for tensor in distinct_storages(state).values():
            assert tensor.count_nonzero() == 0


def test_stages_do_not_share_memory(layouts: dict[int, StageLayout]) -> None:
    arena = HostArena(layouts, dtype=torch.float32, register=False)

    arena.states[0].weights.fill_(1)

    assert arena.states[2].weights.count_nonzero() == 0
    assert arena.states[4].weights.count_nonzero() == 0


def test_a_parameter_is_set_exactly_in_the_master_and_rounded_in_the_working_copy(
    layouts: dict[int, StageLayout],
) -> None:
    state = HostArena(layouts, dtype=torch.bfloat16, register=False).states[0]
    value = torch.full((5, 40), 1.0 + 2.0**-20)

    state.set_parameter("matrix", value)

    assert torch.equal(layouts[0].views(state.master)["matrix"], value)
    assert torch.equal(layouts[0].views(state.weights)["matrix"].float(), torch.ones(5, 40))
    assert state.master.count_nonzero() == 200, "another parameter or the padding was written"


def test_the_memory_outlives_the_arena_and_closing_twice_is_allowed(layouts: dict[int, StageLayout]) -> None:
    arena = HostArena(layouts, dtype=torch.float32, register=False)
    weights = arena.states[2].weights
    arena.close()
    arena.close()
    del arena

    weights.fill_(2)

    assert weights.sum() == 2 * 256


def test_what_the_system_refuses_is_told_in_gib() -> None:
    layout = StageLayout({}, num_elements=2**58, num_parameters=2**58, ranges=())  # 2**60 bytes, 2**30 GiB

    with pytest.raises(HostMemoryError, match=r"refuses 1073741824\.00 GiB of host memory"):
        HostArena({0: layout}, dtype=torch.float32, register=False)
