"""Pieces that a slice is cut into for each kernel, and what the kernels of GPUs are called with; without a GPU."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from harness.sliced_sequences import Rows, Sequences, at_once, gpu_attention_on_cpu, in_slices
from torch import Tensor

from mobius.limits import KEYS_PER_CALL
from mobius.models.slice_attention import SequenceKVCache, _cudnn_statistics_rank, attend_slice, attend_slice_backward
from mobius.models.slice_pieces import AttentionKernel, AttentionPiece, SlicedAttentionSettings, choose_kernel

CPU = torch.device("cpu")
CUTS = [[97], [50, 47], [32, 32, 33], [1, 60, 20, 16], [16, 31, 2, 47, 1]]
ROWS = [[[97]], [[97], [97]], [[40, 3, 54]], [[40, 3, 54], [97]], [[1] * 97, [96, 1]], [[10, 60, 27], [49, 48]]]


def pairs(piece: AttentionPiece, num_rows: int, num_queries: int, length: int) -> Tensor:
    """How often [row, query of the slice, key of the sequence] is attended, as FlashAttention's interface has it."""
    seen = torch.zeros(num_rows, num_queries, length, dtype=torch.int64)
    ranges = [(0, piece.longest[0], 0, piece.longest[1])]
    if piece.cu_seqlens is not None:
        of_queries, of_keys = (each.tolist() for each in piece.cu_seqlens)
        ranges = [(*query, *key) for query, key in zip(pairwise(of_queries), pairwise(of_keys), strict=True)]
    for first_query, last_query, first_key, last_key in ranges:
        shape = last_query - first_query, last_key - first_key
        mask = torch.ones(shape, dtype=torch.bool)
        if piece.is_causal:
            offset = shape[1] - shape[0]
            mask = mask.tril(offset)
            mask = mask if piece.window is None else mask.triu(offset - piece.window + 1)
            assert piece.kernel is AttentionKernel.FLASH or offset == 0, "other kernels align at the upper left"
        rows, own = seen[piece.rows], (piece.queries.start + first_query, piece.queries.start + last_query)
        rows[:, own[0] : own[1], piece.keys.start + first_key : piece.keys.start + last_key] += mask
    return seen


@pytest.mark.grid(strength=2)
@pytest.mark.parametrize(
    ("kernel", "window"),
    [
        (AttentionKernel.CUDNN, None),
        (AttentionKernel.CPU, None),
        *((AttentionKernel.FLASH, window) for window in (None, 1, 7, 40, 200)),
    ],
)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("lengths", CUTS)
def test_pieces_have_each_pair_that_sees_each_other_once(
    lengths: list[int], rows: Rows, kernel: AttentionKernel, window: int | None
) -> None:
    settings = Sequences.draw(rows, window=window).settings(kernel, keys_per_call=20)
    numbers = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])
    distance = torch.arange(97).unsqueeze(1) - torch.arange(97)
    wanted = (distance >= 0) & (distance < (window or 97)) & (numbers.unsqueeze(2) == numbers.unsqueeze(1))
    for start, end in pairwise([0, *accumulate(lengths)]):
        pieces = settings.pieces(num_rows=len(rows), length=97, start=start, end=end, device=CPU)
        counted = sum(pairs(piece, len(rows), end - start, 97) for piece in pieces)
        assert torch.equal(counted, wanted[:, start:end].long())
        assert all(piece.kernel is not AttentionKernel.CUDNN or piece.longest[1] > 1 for piece in pieces)


def test_rectangles_of_cudnn_have_few_shapes() -> None:
    """It makes a plan for each shape, which is kept."""
    settings = SlicedAttentionSettings(AttentionKernel.CUDNN, 1.0)
    cuts = [(start, start + 8192) for start in range(0, 131072, 8192)]
    pieces = [settings.pieces(num_rows=1, length=131072, start=start, end=end, device=CPU) for start, end in cuts]
    assert {(piece.longest, piece.is_causal) for own in pieces for piece in own} == {
        ((8192, 8192), True),
        *(((8192, keys), False) for keys in range(8192, KEYS_PER_CALL + 1, 8192)),
    }
    assert settings.pieces(num_rows=1, length=131072, start=0, end=8192, device=CPU) is pieces[0], "made once"


def test_documents_that_keep_changing_make_no_plans_of_cudnn() -> None:
    given = Sequences.draw([[40, 57], [97]])
    settings = given.settings(AttentionKernel.CUDNN)
    first = settings.pieces(num_rows=2, length=97, start=0, end=40, device=CPU)
    second = settings.pieces(num_rows=2, length=97, start=40, end=97, device=CPU)
    assert [(piece.kernel, piece.rows) for piece in first] == [(AttentionKernel.CUDNN, slice(0, 2))], (
        "one document in each row"
    )
    assert {piece.kernel for piece in second} == {AttentionKernel.FLASH}


@pytest.mark.grid(strength=2)
@pytest.mark.parametrize(
    ("kernel", "window"), [(AttentionKernel.CUDNN, None), *((AttentionKernel.FLASH, each) for each in (None, 1, 40))]
)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("lengths", CUTS)
def test_operators_of_gpus_get_their_layouts_and_what_they_return_is_the_whole(
    lengths: list[int], rows: Rows, heads: tuple[int, int], kernel: AttentionKernel, window: int | None
) -> None:
    """With operators that compute by explicit scores what those of GPUs promise."""
    given = Sequences.draw(rows, heads, window=window)
    for rank in (3, 4):
        with gpu_attention_on_cpu(rank):
            _cudnn_statistics_rank.cache_clear()
            errors = in_slices(given, lengths, given.settings(kernel, keys_per_call=20)).errors(at_once(given))
        assert all(error <= 1e-6 for error in errors.values()), errors
    _cudnn_statistics_rank.cache_clear()


@pytest.mark.parametrize("rows", [[[256]], [[256], [256]], [[40, 100, 116], [256]]])
@pytest.mark.parametrize(
    ("kernel", "window"),
    [
        (AttentionKernel.CUDNN, None),
        *((each, w) for each in (AttentionKernel.FLASH, AttentionKernel.TILES) for w in (None, 40)),
    ],
)
def test_operators_of_gpus_take_what_they_are_called_with(
    kernel: AttentionKernel, rows: Rows, window: int | None
) -> None:
    """By their kernels for tensors without values, which know signatures and shapes and compute nothing."""
    settings = Sequences.draw(rows, window=window).settings(kernel, keys_per_call=64, tile=32)
    device, batch = torch.device("meta"), len(rows)
    cache = SequenceKVCache((batch, 2, 256, 64), dtype=torch.bfloat16, device=device)
    cache.put(128, *(torch.empty(batch, 2, 128, 64, dtype=torch.bfloat16, device=device) for _ in range(2)))
    query = torch.empty(batch, 128, 8, 64, dtype=torch.bfloat16, device=device).transpose(1, 2)
    output, lse = attend_slice(query, cache, 128, settings)
    d_query = attend_slice_backward(torch.empty_like(output), query, output, lse, cache, 128, settings)
    gradients = cache.take_gradients(128, 256)
    assert (output.shape, output.dtype) == ((batch, 128, 8, 64), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((batch, 8, 128), torch.float32)
    assert (d_query.shape, d_query.dtype) == (query.shape, torch.bfloat16)
    assert all((each.shape, each.dtype) == ((batch, 2, 128, 64), torch.bfloat16) for each in gradients)


@pytest.mark.parametrize(
    ("capability", "dtype", "size", "asked", "expected"),
    [
        ((9, 0), torch.bfloat16, 128, {}, AttentionKernel.CUDNN),
        ((9, 0), torch.float16, 256, {}, AttentionKernel.CUDNN),
        ((10, 0), torch.bfloat16, 128, {}, AttentionKernel.CUDNN),
        ((10, 3), torch.bfloat16, 128, {}, AttentionKernel.CUDNN),
        ((10, 0), torch.bfloat16, 256, {}, AttentionKernel.FLASH),
        ((9, 0), torch.bfloat16, 128, {"window": 512}, AttentionKernel.FLASH),
        ((8, 0), torch.bfloat16, 128, {}, AttentionKernel.FLASH),
        ((8, 9), torch.bfloat16, 200, {}, AttentionKernel.TILES),
        ((12, 0), torch.bfloat16, 128, {}, AttentionKernel.FLASH),
        ((9, 0), torch.bfloat16, 100, {}, AttentionKernel.TILES),
        ((9, 0), torch.bfloat16, 128, {"softcap": 50.0}, AttentionKernel.TILES),
        ((9, 0), torch.float32, 128, {}, AttentionKernel.TILES),
        ((7, 5), torch.float16, 128, {}, AttentionKernel.TILES),
    ],
)
def test_a_gpu_takes_the_fastest_kernel_that_can(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    size: int,
    asked: dict[str, float],
    expected: AttentionKernel,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    settings = {"window": None, "softcap": None} | asked
    kernel = choose_kernel(torch.device("cuda"), dtype, head_size=size, **settings)  # type: ignore[arg-type]
    assert kernel is expected
    if kernel is AttentionKernel.CUDNN:
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert choose_kernel(torch.device("cuda"), dtype, head_size=size, **settings) is AttentionKernel.FLASH  # type: ignore[arg-type]


def test_a_cudnn_that_has_a_fault_with_odd_lengths_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    chosen = []
    for version in (None, 91500, 91501):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        device = torch.device("cuda")
        chosen.append(choose_kernel(device, torch.bfloat16, head_size=128, window=None, softcap=None))
    assert chosen == [AttentionKernel.FLASH, AttentionKernel.FLASH, AttentionKernel.CUDNN]


@pytest.mark.parametrize(
    ("dtype", "window", "expected"),
    [
        (torch.float32, None, AttentionKernel.CPU),
        (torch.bfloat16, None, AttentionKernel.CPU),
        (torch.float32, 7, AttentionKernel.TILES),
        (torch.float64, None, AttentionKernel.TILES),
    ],
)
def test_a_cpu_takes_the_kernel_of_torch_where_it_can(
    dtype: torch.dtype, window: int | None, expected: AttentionKernel
) -> None:
    assert choose_kernel(CPU, dtype, head_size=64, window=window, softcap=None) is expected
