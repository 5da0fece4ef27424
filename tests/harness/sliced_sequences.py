"""One sequence attended slice by slice, and the same at once by explicit softmax over all pairs in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mobius.models.sliced_attention.attention_pieces import SlicedAttentionSettings
from mobius.models.sliced_attention.kernel_choice import AttentionKernel
from mobius.models.sliced_attention.kv_cache import SequenceKVCache
from mobius.models.sliced_attention.slice_attention import attend_slice, attend_slice_backward

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
