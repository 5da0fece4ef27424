"""Host memory of streamed stages: 14 bytes per element in bf16, 16 in fp16 and fp32, and nothing rounded up."""

from pathlib import Path

import pytest
import torch

from mobius.engine.host_arena import HostArena
from mobius.engine.stage_state import StageState
from mobius.errors import HostMemoryError
from mobius.models.layout import StageLayout

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def state_of(
    layouts: dict[int, StageLayout], dtype: torch.dtype, gradient_dtype: torch.dtype | None = None
) -> StageState:
    return HostArena(layouts, dtype=dtype, register=False, gradient_dtype=gradient_dtype).states[0]


@pytest.mark.parametrize(
    ("dtype", "gradient_dtype", "num_bytes"),
    [
        (BF16, None, 2 + 2 + 2 + 8),  # weight, gradient, remainder, moments
        (BF16, FP32, 2 + 4 + 2 + 8),
        (FP16, None, 2 + 2 + 4 + 8),  # a whole master: fp16 is not half of an fp32 number
        (FP16, FP32, 2 + 4 + 4 + 8),
        (FP32, None, 4 + 4 + 8),
        (FP32, FP32, 4 + 4 + 8),
    ],
)
def test_the_bytes_of_a_stage_per_element(
    layouts: dict[int, StageLayout], dtype: torch.dtype, gradient_dtype: torch.dtype | None, num_bytes: int
) -> None:
    arena = HostArena(layouts, dtype=dtype, register=False, gradient_dtype=gradient_dtype)

    for stage, num_elements in {0: 384, 2: 256, 4: 256}.items():
        sizes = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in arena.states[stage].tensors}
        assert len(sizes) == len(arena.states[stage].tensors)
        assert sum(sizes.values()) == num_bytes * num_elements


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("gradient_dtype", [None, FP32])
def test_gradients_have_the_dtype_of_the_weights_or_the_wanted_one_and_moments_are_fp32(
    layouts: dict[int, StageLayout], dtype: torch.dtype, gradient_dtype: torch.dtype | None
) -> None:
    state = state_of(layouts, dtype, gradient_dtype)

    assert state.weights.dtype == dtype
    assert state.gradients.dtype == (gradient_dtype or dtype)
    assert state.exp_avg.dtype == state.exp_avg_sq.dtype == FP32
    assert state.read_master().dtype == FP32


def test_the_master_is_the_working_copy_in_fp32_split_in_bf16_and_apart_in_fp16(
    layouts: dict[int, StageLayout],
) -> None:
    full, split, half = (state_of(layouts, dtype) for dtype in (FP32, BF16, FP16))

    assert full.read_master().data_ptr() == full.weights.data_ptr()
    assert split.parts["master_low"].dtype == torch.int16
    assert half.read_master().data_ptr() == half.parts["master"].data_ptr()
    assert half.parts["master"].dtype == FP32


def test_all_memory_starts_at_zero(layouts: dict[int, StageLayout]) -> None:
    for state in HostArena(layouts, dtype=torch.bfloat16, register=False).states.values():
        for tensor in state.tensors:
            assert tensor.count_nonzero() == 0


def test_stages_do_not_share_memory(layouts: dict[int, StageLayout]) -> None:
    arena = HostArena(layouts, dtype=torch.float32, register=False)

    arena.states[0].weights.fill_(1)

    assert arena.states[2].weights.count_nonzero() == 0
    assert arena.states[4].weights.count_nonzero() == 0


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_parameter_is_set_exactly_in_the_master_and_rounded_in_the_working_copy(
    layouts: dict[int, StageLayout], dtype: torch.dtype
) -> None:
    state = state_of(layouts, dtype)
    value = torch.full((5, 40), 1.0 + 2.0**-20)

    state.set_parameter("matrix", value)

    assert torch.equal(layouts[0].views(state.read_master())["matrix"], value)
    assert torch.equal(layouts[0].views(state.weights)["matrix"].float(), torch.ones(5, 40))
    assert state.read_master().count_nonzero() == 200, "another parameter or the padding was written"


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("chunk", [1, 7, 200, 2**22])
def test_a_part_of_the_master_is_written_and_read_in_place(
    monkeypatch: pytest.MonkeyPatch, layouts: dict[int, StageLayout], dtype: torch.dtype, chunk: int
) -> None:
    monkeypatch.setattr("mobius.engine.state_codec.HOST_CHUNK_ELEMENTS", chunk)
    state = state_of(layouts, dtype)
    values = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    state.write_master(slice(50, 150), values)

    assert torch.equal(state.read_master(slice(50, 150)), values.float())
    assert torch.equal(state.weights[50:150], values.float().to(dtype))
    assert state.read_master().count_nonzero() == state.weights.count_nonzero() == 100


def test_a_transposed_parameter_is_set_in_its_own_order(layouts: dict[int, StageLayout]) -> None:
    state = state_of(layouts, BF16)
    value = torch.arange(200.0).view(40, 5).t()

    state.set_parameter("matrix", value)

    assert torch.equal(layouts[0].views(state.read_master())["matrix"], value)


def test_the_memory_outlives_the_arena_and_closing_twice_is_allowed(layouts: dict[int, StageLayout]) -> None:
    arena = HostArena(layouts, dtype=torch.float32, register=False)
    weights = arena.states[2].weights
    arena.close()
    arena.close()
    del arena

    weights.fill_(2)

    assert weights.sum() == 2 * 256


def test_what_the_system_refuses_is_told_in_gib() -> None:
    layout = StageLayout({}, num_units=2**58, num_trained=2**58, ranges=())  # 2**60 bytes, 2**30 GiB

    with pytest.raises(HostMemoryError, match=r"refuses 1073741824\.00 GiB of host memory"):
        HostArena({0: layout}, dtype=torch.float32, register=False)


def test_all_memory_of_an_arena_is_touched_at_once_and_lies_on_huge_pages_where_the_system_gives_them() -> None:
    layouts = {0: StageLayout.of({"weight": (4096, 4096)})}
    resident, kib = _memory_kib("Rss"), 4096 * 4096 * 14 // 1024

    arena = HostArena(layouts, dtype=BF16, register=False)

    assert arena.num_bytes == 1024 * kib
    assert _memory_kib("Rss") - resident >= 0.99 * kib
    if "never" not in HUGE_PAGES.read_text().split("[")[1].split("]")[0]:
        assert _memory_kib("AnonHugePages") >= 0.9 * kib


def _memory_kib(field: str) -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))
