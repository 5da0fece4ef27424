"""Attention over slices of sequences, compared with an explicit softmax, on a CPU and on GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.library import _scoped_library

from mobius.models.slice_attention import SequenceKVCache, attend_slice, attend_slice_backward
from mobius.models.slice_pieces import AttentionKernel, SlicedAttentionSettings

Rows = Sequence[Sequence[int]]
"""Lengths of the documents of each row; all rows are equally long."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sequences:
    """Queries [B, H, S, D], keys and values [B, Hk, S, D] and the gradient [B, S, H, D] of their output."""

    query: Tensor
    key: Tensor
    value: Tensor
    d_output: Tensor
    rows: Rows
    scale: float = 0.3
    window: int | None = None
    softcap: float | None = None

    @classmethod
    def draw(
        cls,
        rows: Rows,
        heads: tuple[int, int] = (4, 2),
        size: int = 16,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        **settings: float | int | None,
    ) -> Sequences:
        generator = torch.Generator().manual_seed(0)
        shape = len(rows), sum(rows[0]), size

        def normal(number: int) -> Tensor:
            # In memory as a projection leaves them: token by token.
            drawn = torch.randn(shape[0], shape[1], number, size, generator=generator)
            return drawn.to(device, dtype).transpose(1, 2)

        query, key, value, gradient = (normal(number) for number in (heads[0], heads[1], heads[1], heads[0]))
        return cls(query, key, value, gradient.transpose(1, 2), rows, **settings)  # type: ignore[arg-type]

    @property
    def length(self) -> int:
        return self.query.shape[2]

    def cu_seqlens(self) -> Tensor:
        """The documents' bounds as packed rows have them, the last one repeated."""
        lengths = [length for row in self.rows for length in row]
        edges = [0, *accumulate(lengths)]
        return torch.tensor([*edges, edges[-1]], dtype=torch.int32)

    def settings(self, kernel: AttentionKernel, **others: int) -> SlicedAttentionSettings:
        documents = None if all(len(row) == 1 for row in self.rows) else self.cu_seqlens()
        return SlicedAttentionSettings(kernel, self.scale, self.window, self.softcap, documents, **others)

    def cache(self) -> SequenceKVCache:
        shape = self.key.shape
        return SequenceKVCache((shape[0], shape[1], shape[2], shape[3]), dtype=self.key.dtype, device=self.key.device)


@dataclass(frozen=True)
class Attended:
    """What came out: output [B, S, H, D], log-sum-exp [B, H, S] and the gradients, like their tensors."""

    output: Tensor
    lse: Tensor
    d_query: Tensor
    d_key: Tensor
    d_value: Tensor

    def errors(self, expected: Attended) -> dict[str, float]:
        """Norm of each difference as a share of the expected one's norm, or of the values' where all is zero."""
        return {
            name: float((own.double() - other).norm() / (other if other.any() else expected.d_value).norm())
            for (name, own), other in zip(vars(self).items(), vars(expected).values(), strict=True)
        }


def in_slices(
    given: Sequences, lengths: Sequence[int], settings: SlicedAttentionSettings, cache: SequenceKVCache | None = None
) -> Attended:
    """Forward in order and backward in reverse, as stages of a pipeline do it."""
    cache = cache or given.cache()
    edges = list(pairwise([0, *accumulate(lengths)]))
    assert edges[-1][1] == given.length
    forward = []
    for start, end in edges:
        cache.put(start, given.key[:, :, start:end], given.value[:, :, start:end])
        forward.append(attend_slice(given.query[:, :, start:end], cache, start, settings))
    backward = []
    for (start, end), (output, lse) in reversed(list(zip(edges, forward, strict=True))):
        query, d_output = given.query[:, :, start:end], given.d_output[:, start:end]
        d_query = attend_slice_backward(d_output, query, output, lse, cache, start, settings)
        backward.append((d_query, *cache.take_gradients(start, end)))
    gradients = [torch.cat(parts[::-1], dim=2) for parts in zip(*backward, strict=True)]
    outputs, lses = zip(*forward, strict=True)
    return Attended(torch.cat(outputs, dim=1), torch.cat(lses, dim=2), *gradients)


def at_once(given: Sequences, dtype: torch.dtype = torch.float64) -> Attended:
    """Scores of all pairs, a mask of those that see each other, and autograd."""
    leaves = [each.to(dtype, copy=True).requires_grad_() for each in (given.query, given.key, given.value)]
    query, *others = leaves
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in others)
    scores = query @ key.transpose(2, 3) * given.scale
    if given.softcap is not None:
        scores = given.softcap * torch.tanh(scores / given.softcap)
    scores = scores.masked_fill(~_seen(given).unsqueeze(1), -torch.inf)
    output = (scores.softmax(-1) @ value).transpose(1, 2)
    gradients = torch.autograd.grad(output, leaves, given.d_output.to(dtype))
    return Attended(output.detach(), scores.logsumexp(-1).detach(), *gradients)


def _seen(given: Sequences) -> Tensor:
    """True [B, S, S] where a query sees a key."""
    device = given.query.device
    numbers = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in given.rows]
    documents, places = torch.stack(numbers).to(device), torch.arange(given.length, device=device)
    distance = places.unsqueeze(1) - places
    seen = (distance >= 0) & (distance < (given.window or given.length))
    return seen & (documents.unsqueeze(2) == documents.unsqueeze(1))


@contextlib.contextmanager
def gpu_attention_on_cpu(rank: int = 4) -> Iterator[None]:
    """Registers the operators for tensors of CPUs, and takes them away again."""
    with _scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_cudnn_attention", partial(_cudnn, rank), "CPU")
        library.impl("_scaled_dot_product_cudnn_attention_backward", partial(_cudnn_backward, rank), "CPU")
        library.impl("_flash_attention_forward", _flash, "CPU")
        library.impl("_flash_attention_backward", _flash_backward, "CPU")
        yield


def _cudnn(rank: int, q: Tensor, k: Tensor, v: Tensor, *others: object, scale: float) -> tuple[object, ...]:
    """`others`: bias, whether the log-sum-exp is asked for, dropout, is_causal; the last ones are left out if false."""
    is_causal = len(others) > 3 and others[3]
    output, lse = _forward(q, k, v, _mask(q.shape[2], k.shape[2], bool(is_causal), 0), scale)
    shape, none = lse.shape if rank == 3 else (*lse.shape, 1), torch.empty(0)
    made = torch.empty_like(q).copy_(output)
    return made, lse.reshape(shape), none, none, q.shape[2], k.shape[2], none, none, none


def _cudnn_backward(
    rank: int, g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *others: Any, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`others`: seed, offset, bias, bounds of queries and keys, their numbers, dropout, is_causal."""
    *_, most_queries, most_keys, _, is_causal = others
    assert len(others) == 9
    assert lse.shape == (q.shape[:3] if rank == 3 else (*q.shape[:3], 1))
    assert (most_queries, most_keys) == (q.shape[2], k.shape[2])
    assert _layout(o) == _layout(g) == _layout(q), "a plan is found again by the layout of its queries"
    return _backward(g, q, k, v, o, lse.reshape(q.shape[:3]), _mask(most_queries, most_keys, is_causal, 0), scale)


def _layout(tensor: Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _flash(q: Tensor, k: Tensor, v: Tensor, *others: Any, scale: float, **window: int) -> tuple[Tensor, ...]:
    """`others`: bounds of queries and keys, most queries and keys, dropout, is_causal, and a mask for debugging."""
    cu_seqlens, is_causal = others[:2], others[5]
    q, k, v = (_heads(each, cu_seqlens[0]) for each in (q, k, v))
    output, lse = _forward(q, k, v, _lower_right(q, k, cu_seqlens, is_causal, **window), scale)
    output, none = output.transpose(1, 2).contiguous(), torch.empty(0)
    return (output, lse, none, none, none) if cu_seqlens[0] is None else (output[0], lse[0], none, none, none)


def _flash_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *others: Any, scale: float, **window: int
) -> list[Tensor]:
    """`others`: bounds of queries and keys, most queries and keys, dropout, is_causal, and two states."""
    cu_seqlens, is_causal = others[:2], others[5]
    assert len(others) == 8
    assert lse.is_contiguous()
    assert lse.dim() == (3 if cu_seqlens[0] is None else 2)
    g, q, k, v, o = (_heads(each, cu_seqlens[0]) for each in (g, q, k, v, o))
    mask = _lower_right(q, k, cu_seqlens, is_causal, **window)
    results = _backward(g, q, k, v, o, lse.reshape(q.shape[:3]), mask, scale)
    return [each.transpose(1, 2) if cu_seqlens[0] is None else each[0].transpose(0, 1) for each in results]


def _heads(tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return tokens.transpose(1, 2) if cu_seqlens is None else tokens.transpose(0, 1).unsqueeze(0)


def _mask(queries: int, keys: int, causal: bool, offset: int) -> Tensor:
    mask = torch.ones(queries, keys, dtype=torch.bool)
    return mask.tril(offset) if causal else mask


def _lower_right(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Sequence[Tensor | None],
    is_causal: bool,
    *,
    window_size_left: int = -1,
    window_size_right: int = -1,
) -> Tensor:
    """Which of all pairs see each other: documents keep to their own, each with its own lower right corner."""
    assert window_size_right in (-1, 0)
    ends = q.shape[2], k.shape[2]
    edges = [[0, end] if own is None else own.tolist() for own, end in zip(cu_seqlens, ends, strict=True)]
    mask = torch.zeros(ends, dtype=torch.bool)
    for (a, b), (c, d) in zip(pairwise(edges[0]), pairwise(edges[1]), strict=True):
        corner = (d - c) - (b - a)
        own = _mask(b - a, d - c, is_causal or window_size_right == 0, corner)
        mask[a:b, c:d] = own if window_size_left < 0 else own.triu(corner - window_size_left)
    return mask


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    key, value = (each.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = (q.double() @ key.transpose(2, 3) * scale).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).to(q.dtype), scores.logsumexp(-1).float()


def _backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    key, value = (each.double().repeat_interleave(groups, 1) for each in (k, v))
    scores = (q.double() @ key.transpose(2, 3) * scale).masked_fill(~mask, -torch.inf)
    weights, given = (scores - lse.double().unsqueeze(-1)).exp(), g.double()
    slopes = weights * (given @ value.transpose(2, 3) - (given * o.double()).sum(-1, keepdim=True)) * scale
    results = slopes @ key, slopes.transpose(2, 3) @ q.double(), weights.transpose(2, 3) @ given
    summed = [each if index == 0 else each.unflatten(1, (-1, groups)).sum(2) for index, each in enumerate(results)]
    return summed[0].to(q.dtype), summed[1].to(k.dtype), summed[2].to(v.dtype)
