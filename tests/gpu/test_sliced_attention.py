"""Slices on a GPU by each kernel that it has, compared with an explicit softmax in fp32."""

from __future__ import annotations

import pytest
import torch
from harness.sliced_sequences import Rows, Sequences, at_once, in_slices

from mobius.models.slice_attention import attend_slice, attend_slice_backward
from mobius.models.slice_pieces import (
    AttentionKernel,
    choose_kernel,
    is_kernel_available,
    takes_settings,
)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
CUTS = [[1000], [512, 488], [256, 256, 256, 232], [1, 500, 99, 400]]
WHOLE, PACKED = [[1000]], [[450, 30, 520]]
ROWS = [WHOLE, [[1000], [1000]], PACKED, [[1000], [450, 30, 520]], [[1] * 40 + [960]]]
SMALL = {"keys_per_call": 200, "tile": 128}


@pytest.fixture(autouse=True)
def _any_kernel(_deterministic_kernels: None) -> None:
    """Not deterministic, or cuDNN would be refused."""
    torch.use_deterministic_algorithms(False)


def skip_unless_fit(kernel: AttentionKernel, dtype: torch.dtype, size: int) -> None:
    if not is_kernel_available(kernel, CUDA, dtype, size):
        pytest.skip(f"this GPU's {kernel} takes no heads of {size} in {dtype}")


def assert_near(given: Sequences, lengths: list[int], kernel: AttentionKernel) -> None:
    """Norms of differences: two-byte formats are rounded to 8 or 11 bits, and probabilities within the kernels, too."""
    errors = in_slices(given, lengths, given.settings(kernel, **SMALL)).errors(at_once(given, torch.float32))
    share = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[given.query.dtype]
    lse = errors.pop("lse")
    assert lse <= 1e-5, "natural logarithm of the scores as they are scaled"
    assert all(error <= share for error in errors.values()), errors


@pytest.mark.parametrize(
    ("kernel", "dtype", "heads", "size"),
    [
        (AttentionKernel.CUDNN, torch.bfloat16, (8, 2), 128),
        (AttentionKernel.CUDNN, torch.bfloat16, (4, 4), 64),
        (AttentionKernel.CUDNN, torch.float16, (8, 1), 64),
        (AttentionKernel.CUDNN, torch.bfloat16, (4, 2), 256),
        (AttentionKernel.FLASH, torch.bfloat16, (8, 2), 128),
        (AttentionKernel.FLASH, torch.bfloat16, (4, 4), 64),
        (AttentionKernel.FLASH, torch.float16, (8, 1), 64),
        (AttentionKernel.FLASH, torch.bfloat16, (4, 2), 256),
        (AttentionKernel.TILES, torch.bfloat16, (8, 2), 64),
        (AttentionKernel.TILES, torch.float32, (8, 2), 64),
    ],
)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("lengths", CUTS)
def test_slices_are_what_the_whole_is(
    lengths: list[int], rows: Rows, kernel: AttentionKernel, dtype: torch.dtype, heads: tuple[int, int], size: int
) -> None:
    skip_unless_fit(kernel, dtype, size)
    given = Sequences.draw(rows, heads, size, dtype=dtype, device=CUDA, scale=size**-0.5)
    assert_near(given, lengths, kernel)


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("window", [None, 7, 64, 300])
@pytest.mark.parametrize("rows", [WHOLE, PACKED])
@pytest.mark.parametrize("lengths", CUTS)
@pytest.mark.parametrize("kernel", [AttentionKernel.FLASH, AttentionKernel.TILES])
def test_slices_keep_windows_and_caps(
    kernel: AttentionKernel, lengths: list[int], rows: Rows, window: int | None, softcap: float | None
) -> None:
    if not takes_settings(kernel, window=window, softcap=softcap):
        return
    skip_unless_fit(kernel, torch.bfloat16, 64)
    given = Sequences.draw(
        rows, (8, 2), 64, dtype=torch.bfloat16, device=CUDA, scale=0.125, window=window, softcap=softcap
    )
    assert_near(given, lengths, kernel)


def test_the_kernel_that_is_chosen_runs() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        kernel = choose_kernel(CUDA, dtype, head_size=128, window=None, softcap=None)
        given = Sequences.draw(PACKED, (8, 2), 128, dtype=dtype, device=CUDA, scale=128**-0.5)
        assert_near(given, CUTS[2], kernel)


@pytest.mark.parametrize("kernel", [AttentionKernel.FLASH, AttentionKernel.TILES])
def test_deterministic_kernels_give_the_same_bits_twice(kernel: AttentionKernel) -> None:
    torch.use_deterministic_algorithms(True)
    skip_unless_fit(kernel, torch.bfloat16, 64)
    given = Sequences.draw(PACKED, (8, 2), 64, dtype=torch.bfloat16, device=CUDA)
    first, second = (in_slices(given, CUTS[2], given.settings(kernel, **SMALL)) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(vars(first).values(), vars(second).values(), strict=True))


@pytest.mark.parametrize("kernel", [AttentionKernel.CUDNN, AttentionKernel.FLASH, AttentionKernel.TILES])
def test_memory_does_not_grow_with_the_keys_before_a_slice(kernel: AttentionKernel) -> None:
    """As torch's own meter has it, workspaces of the kernels included; a slice's scores would be 512 MiB at 32768."""
    skip_unless_fit(kernel, torch.bfloat16, 64)
    peaks = []
    for length in (8192, 8192, 32768):  # the first has the libraries' own workspaces in it
        given = Sequences.draw([[length]], (2, 1), 64, dtype=torch.bfloat16, device=CUDA)
        settings, cache = given.settings(kernel, keys_per_call=4096), given.cache()
        cache.put(0, given.key, given.value)
        start = length - 4096
        query, d_output = given.query[:, :, start:].contiguous(), given.d_output[:, start:].contiguous()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output, lse = attend_slice(query, cache, start, settings)
        attend_slice_backward(d_output, query, output, lse, cache, start, settings)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[2] <= peaks[1] + 2**20
    assert peaks[2] < 64 * 2**20


def test_the_host_does_not_wait_for_the_device() -> None:
    kernel = choose_kernel(CUDA, torch.bfloat16, head_size=128, window=None, softcap=None)
    given = Sequences.draw(PACKED, (8, 2), 128, dtype=torch.bfloat16, device=CUDA)
    settings, cache = given.settings(kernel), given.cache()
    in_slices(given, CUTS[2], settings, cache)
    fresh = given.settings(kernel)
    torch.cuda.set_sync_debug_mode("error")
    try:
        in_slices(given, CUTS[2], fresh, cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
