"""Attention within documents beside a dense mask, which nothing but a test makes."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from mobius.errors import PlanError
from mobius.models import attention
from mobius.models.attention import (
    BlockMasks,
    DocumentAttention,
    DocumentLayout,
    _flex,
    attend_documents,
    choose_attention,
    make_block_mask,
)

LENGTH, HEADS, KEY_HEADS, WIDTH = 300, 4, 2, 16
ROWS = [[100, 50, 130, 20], [300], [1, 1, 127, 171]]
POSITIONS = torch.tensor([[place for length in row for place in range(length)] for row in ROWS], dtype=torch.int32)
BOUNDS = torch.tensor([0, 100, 150, 280, 300, 600, 601, 602, 729, 900, 900, 900], dtype=torch.int32)
SINKS = torch.tensor([-3.0, 0.0, 2.0, 5.0])
CPU = torch.device("cpu")


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value [B, H, L, D]."""
    torch.manual_seed(0)
    return [torch.randn(len(ROWS), heads, LENGTH, WIDTH, dtype=dtype) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]


def dense(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None, *, window: int | None, softcap: float | None
) -> Tensor:
    """Scores of all pairs, a mask of those that see each other, and one more logit for each head if it has a sink."""
    places, document = torch.arange(LENGTH), torch.arange(LENGTH) - POSITIONS
    distance = places.unsqueeze(1) - places
    seen = (distance >= 0) & (document.unsqueeze(2) == document.unsqueeze(1))
    if window is not None:
        seen = seen & (distance < window)
    key, value = (each.repeat_interleave(HEADS // KEY_HEADS, 1) for each in (key, value))
    scores = query @ key.transpose(2, 3) / math.sqrt(WIDTH)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., :LENGTH]
    return (weights @ value).transpose(1, 2)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 1, 7, 128, 200])
def test_documents_one_by_one_are_what_a_dense_mask_gives(window: int | None, softcap: float | None) -> None:
    results = []
    for attend in (
        partial(dense, window=window, softcap=softcap),
        lambda *given: attend_documents(
            nn.Identity(), *given, None, sliding_window=window, softcap=softcap, documents=BOUNDS
        )[0],
    ):
        given = [each.requires_grad_() for each in tensors()]
        output = attend(*given)
        gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
        results.append([output, *torch.autograd.grad(output, given, gradient)])
    for expected, actual in zip(*results, strict=True):
        assert (expected - actual).abs().max() <= 2e-6 * expected.abs().max()


def plain_flex(
    query: Tensor, key: Tensor, value: Tensor, *, block_mask: BlockMask, scale: float, **_: Any
) -> tuple[Tensor, SimpleNamespace]:
    """What FlexAttention returns, with gradients, which only GPUs have."""
    rows, places = torch.arange(len(query)).view(-1, 1, 1), torch.arange(query.shape[2])
    seen = block_mask.mask_mod(rows, 0, places.view(-1, 1), places).unsqueeze(1)
    scores = (query @ spread(key).transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ spread(value), SimpleNamespace(lse=scores.logsumexp(-1))


def flash_scores(query: Tensor, key: Tensor, bounds: Tensor, scale: float, window_size_left: int = -1) -> Tensor:
    """Scores [H, T, T] of tokens [T, H, D]."""
    places = torch.arange(len(query))
    document, distance = torch.searchsorted(bounds, places, right=True), places.unsqueeze(1) - places
    seen = (distance >= 0) & (document.unsqueeze(1) == document)
    seen = seen & (distance <= window_size_left) if window_size_left >= 0 else seen
    return (torch.einsum("qhd,khd->hqk", query, spread(key)) * scale).masked_fill(~seen, -1e30)


def spread(heads: Tensor) -> Tensor:
    return heads.repeat_interleave(HEADS // KEY_HEADS, 1)


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *_: Any, window_size_right: int = 0, **named: Any
) -> tuple[Tensor, Tensor]:
    """What FlashAttention returns, which only GPUs have: output [T, H, D] and log-sum-exp [H, T]."""
    scores = flash_scores(query, key, bounds, **named)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), spread(value)), scores.logsumexp(-1)


def flash_backward(
    gradient: Tensor, *given: Tensor | Any, window_size_right: int = 0, **named: Any
) -> tuple[Tensor, ...]:
    """Gradients as it computes them, from an output and a log-sum-exp of whatever keys."""
    query, key, value, output, lse, bounds = given[:6]
    weights = (flash_scores(query, key, bounds, **named) - lse.unsqueeze(-1)).exp()
    of_weights = torch.einsum("qhd,khd->hqk", gradient, spread(value))
    of_scores = weights * (of_weights - (gradient * output).sum(-1).t().unsqueeze(-1)) * named["scale"]
    of_keys = torch.einsum("hqk,qhd->khd", of_scores, query), torch.einsum("hqk,qhd->khd", weights, gradient)
    of_key, of_value = (each.unflatten(1, (KEY_HEADS, -1)).sum(2) for each in of_keys)
    return torch.einsum("hqk,khd->qhd", of_scores, spread(key)), of_key, of_value


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kind", DocumentAttention)
def test_sinks_are_logits_without_values(
    kind: DocumentAttention, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of attention, with the kernels that only GPUs have replaced."""
    monkeypatch.setattr(attention, "_compiled_flex", lambda: plain_flex)
    monkeypatch.setattr(attention._aten, "_flash_attention_forward", flash_forward)
    monkeypatch.setattr(attention._aten, "_flash_attention_backward", flash_backward)
    masks = BlockMasks(DocumentLayout(POSITIONS, BOUNDS))
    results = []
    for attend in (
        partial(dense, window=window, softcap=None),
        {
            DocumentAttention.VARLEN: lambda *each: attention._varlen(each[:3], each[3], BOUNDS, WIDTH**-0.5, window),
            DocumentAttention.FLEX: lambda *each: attention._flex(
                *each[:3], masks.of_window(window), WIDTH**-0.5, None, each[3]
            ),
            DocumentAttention.PER_DOCUMENT: lambda *each: attend_documents(
                nn.Identity(), *each[:3], None, sliding_window=window, s_aux=each[3], documents=BOUNDS
            )[0],
        }[kind],
    ):
        given = [each.requires_grad_() for each in (*tensors(), SINKS.clone())]
        output = attend(*given)
        gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
        results.append([output, *torch.autograd.grad(output, given, gradient)])
    for expected, actual in zip(*results, strict=True):
        assert (expected - actual).abs().max() <= 2e-6 * expected.abs().max()


def test_without_bounds_each_row_is_one_document() -> None:
    query, key, value = tensors()
    cu_seqlens = torch.arange(0, 4 * LENGTH, LENGTH, dtype=torch.int32)
    expected, _ = attend_documents(nn.Identity(), query, key, value, None, documents=cu_seqlens)
    assert torch.equal(attend_documents(nn.Identity(), query, key, value, None)[0], expected)


def test_two_byte_formats_are_attended_in_their_format() -> None:
    query, key, value = tensors(torch.bfloat16)
    for softcap in (None, 3.0):
        output, _ = attend_documents(nn.Identity(), query, key, value, None, documents=BOUNDS, softcap=softcap)
        expected = dense(query.float(), key.float(), value.float(), window=None, softcap=softcap)
        assert output.dtype == torch.bfloat16
        assert (output - expected).abs().max() <= 0.02 * expected.abs().max()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("softcap", "sinks"), [(None, None), (3.0, None), (None, SINKS)])
@pytest.mark.parametrize("window", [None, 1, 7, 128, 200])
def test_block_masks_show_each_token_its_document(
    window: int | None, softcap: float | None, sinks: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexAttention without its kernel, which only GPUs have, but with the masks, blocks and cap that it gets there."""
    monkeypatch.setattr("mobius.models.attention._compiled_flex", lambda: flex_attention)
    query, key, value = tensors()
    mask = make_block_mask(DocumentLayout(POSITIONS, BOUNDS), window)
    output = _flex(query, key, value, mask, 1 / math.sqrt(WIDTH), softcap, sinks)
    expected = dense(query, key, value, sinks, window=window, softcap=softcap)
    assert (output - expected).abs().max() <= 2e-6 * expected.abs().max()


@pytest.mark.parametrize("window", [None, 1, 7, 128, 200])
def test_a_block_mask_has_the_blocks_that_hold_a_visible_pair_and_no_others(window: int | None) -> None:
    mask = make_block_mask(DocumentLayout(POSITIONS, BOUNDS), window)
    blocks = -(-LENGTH // 128)
    document = torch.arange(LENGTH) - POSITIONS
    for row in range(len(ROWS)):
        for block in range(blocks):
            own = mask.kv_indices[row, 0, block, : mask.kv_num_blocks[row, 0, block]].tolist()
            queries = range(128 * block, min(LENGTH, 128 * (block + 1)))
            needed = {
                key // 128
                for query in queries
                for key in range(max(int(document[row, query]), query - (window or LENGTH) + 1), query + 1)
            }
            assert set(own) == needed


def test_attention_that_cannot_be_compiled_is_told_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure of torch where there is no compiler, in the place of the kernel that only GPUs have."""

    def fail(*_: object, **__: object) -> Tensor:
        raise BackendCompilerFailed(fail, RuntimeError("Failed to find C compiler"), None)

    monkeypatch.setattr("mobius.models.attention._compiled_flex", lambda: fail)
    with pytest.raises(PlanError, match="Failed to find C compiler.*--packing off"):
        _flex(*tensors(), None, 1.0, None)


def test_masks_are_made_once_for_each_window() -> None:
    masks = BlockMasks(DocumentLayout(POSITIONS, BOUNDS))
    assert masks.of_window(None) is masks.of_window(None)
    assert masks.of_window(7) is not masks.of_window(None)


def test_a_cpu_attends_one_by_one() -> None:
    assert choose_attention(CPU, torch.float32, head_size=64, softcap=None) is DocumentAttention.PER_DOCUMENT


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "softcap", "expected"),
    [
        ((9, 0), torch.bfloat16, 128, None, DocumentAttention.VARLEN),
        ((8, 0), torch.float16, 256, None, DocumentAttention.VARLEN),
        ((8, 9), torch.bfloat16, 256, None, DocumentAttention.VARLEN),
        ((8, 9), torch.bfloat16, 200, None, DocumentAttention.FLEX),
        ((9, 0), torch.bfloat16, 200, None, DocumentAttention.VARLEN),
        ((9, 0), torch.bfloat16, 264, None, DocumentAttention.FLEX),
        ((9, 0), torch.bfloat16, 100, None, DocumentAttention.FLEX),
        ((9, 0), torch.bfloat16, 128, 50.0, DocumentAttention.FLEX),
        ((9, 0), torch.float32, 128, None, DocumentAttention.FLEX),
        ((7, 5), torch.float16, 128, None, DocumentAttention.FLEX),
    ],
)
def test_a_gpu_takes_variable_lengths_where_the_kernel_can(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    width: int,
    softcap: float | None,
    expected: DocumentAttention,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_attention(torch.device("cuda"), dtype, head_size=width, softcap=softcap) is expected
