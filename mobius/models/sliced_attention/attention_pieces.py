"""Cuts the attention of a slice into pieces that one call of a kernel takes each; made once per slice for all layers.

    one document; K is `keys_per_call`            documents d and e, with a window of 3

    keys       0       K       2K start end       d d d d d d d e e e
    queries    | # # # | # # # | # | #                    # # #          one call for all: the first document comes
               | # # # | # # # | # | # #                    # # #        with the keys before the slice that its
               | # # # | # # # | # | # # #                        #      window reaches
               rectangles without a mask,                         # #
               and a square that is causal

Rectangles end at multiples of K, so that few shapes come up, and what backward makes of keys at a time is bounded.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from mobius.errors import PlanError
from mobius.limits import KEYS_PER_CALL
from mobius.models.sliced_attention.kernel_choice import KERNEL_CAPABILITIES, AttentionKernel, unsupported_reason

TILE = 512
_LEAST_CUDNN_KEYS = 2


@dataclass(frozen=True)
class VisibleKeys:
    """The first key that each query of a slice sees; the last is its own."""

    start: int
    """Place of the slice's first query in the sequence."""
    first_keys: Tensor
    """int32 [B, T] on the computing device: places in the sequence."""
    spans: Sequence[tuple[int, int]]
    """Least and largest of `first_keys` in each tile of queries."""


@dataclass(frozen=True)
class AttentionPiece:
    """Some queries of some rows, and a range of keys; which of them see each other is the mask.

    Without `is_causal` all do. With it the last query of a document sees all of the document's keys, and each one
    before it a key less; of them only the last `window` if that is set.
    """

    kernel: AttentionKernel
    rows: slice
    queries: slice
    """Within the slice."""
    keys: slice
    """Within the sequence."""
    is_causal: bool = False
    window: int | None = None
    cu_seqlens: tuple[Tensor, Tensor] | None = None
    """int32 [n + 1] on the computing device: where the n documents' queries and keys begin within the piece."""
    visible_keys: VisibleKeys | None = None
    """First keys that are seen; for tiles alone."""

    @property
    def longest(self) -> tuple[int, int]:
        """Bounds on queries and keys of a document."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start


@dataclass(eq=False)
class SlicedAttentionSettings:
    """How layers of one kind attend in the sequences of a microbatch; the pieces of each slice, made when asked for.

    Raises PlanError for what `kernel` cannot do (`choice.choose_kernel` finds one that can).
    """

    kernel: AttentionKernel
    scale: float
    window: int | None = None
    """Tokens that a query sees, itself included; None: all before it."""
    softcap: float | None = None
    documents: Tensor | None = None
    """`attention.DocumentLayout.cu_seqlens` of the whole sequences, on the host: int32 [D + 1] of B * S tokens."""
    keys_per_call: int = KEYS_PER_CALL
    tile: int = TILE
    """Queries and keys of a tile."""
    _bounds: Sequence[int] | None = field(init=False, repr=False)
    _made: dict[tuple[object, ...], tuple[AttentionPiece, ...]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if reason := unsupported_reason(self.kernel, window=self.window, softcap=self.softcap):
            raise PlanError(f"attention of a slice: {reason}. Let choose_kernel find one, or train rows in one piece.")
        assert self.documents is None or self.documents.device.type == "cpu", "bounds are read on the host"
        self._bounds = None if self.documents is None else self.documents.tolist()

    def pieces(
        self, *, num_rows: int, length: int, start: int, end: int, device: torch.device
    ) -> tuple[AttentionPiece, ...]:
        """The pieces of slice [start, end) of `num_rows` sequences of `length` tokens; does not wait for the device."""
        asked = num_rows, length, start, end, device
        if asked not in self._made:
            starts = [_document_starts(self._bounds, row, length, end) for row in range(num_rows)]
            self._made[asked] = tuple(_cut(self, starts, start, end, device))
        return self._made[asked]


def _document_starts(cu_seqlens: Sequence[int] | None, row: int, length: int, end: int) -> list[int]:
    """First tokens of the documents of a row that begin before `end`, ascending; places in the sequence."""
    if cu_seqlens is None:
        return [0]
    begin = row * length
    return sorted({bound - begin for bound in cu_seqlens if begin <= bound < begin + end})


def _cut(
    settings: SlicedAttentionSettings, rows: Sequence[Sequence[int]], start: int, end: int, device: torch.device
) -> list[AttentionPiece]:
    """The pieces of slice [start, end) of rows whose documents begin at the places in `rows`."""
    if settings.kernel is AttentionKernel.TILES:
        return [_tiled(settings, rows, start, end, device)]
    if all(starts == [0] for starts in rows):
        return list(_of_document(settings, settings.kernel, slice(0, len(rows)), 0, (start, end), start))
    # Shapes that follow documents are new all the time, and cuDNN would make a plan for each.
    kernel = AttentionKernel.FLASH if settings.kernel is AttentionKernel.CUDNN else settings.kernel
    pieces: list[AttentionPiece] = []
    for row, starts in enumerate(rows):
        own, inner = slice(row, row + 1), [each for each in starts if each > start]
        edges = [starts[bisect.bisect_right(starts, start) - 1], *inner, end]
        if inner and KERNEL_CAPABILITIES[kernel].takes_documents:
            pieces += _in_one_call(settings, kernel, own, edges, start, device)
            continue
        for first, last in pairwise(edges):
            pieces += _of_document(settings, kernel, own, first, (max(first, start), last), start)
    return pieces


def _of_document(
    settings: SlicedAttentionSettings,
    kernel: AttentionKernel,
    rows: slice,
    first: int,
    span: tuple[int, int],
    start: int,
) -> Iterator[AttentionPiece]:
    """A document that begins at `first` and of which the slice that begins at `start` holds the tokens of `span`."""
    queries, window = slice(span[0] - start, span[1] - start), settings.window
    if window is not None and window < span[1] - first:
        keys = slice(max(first, span[0] - window + 1), span[1])
        yield AttentionPiece(kernel, rows, queries, keys, is_causal=True, window=window)
        return
    yield AttentionPiece(_taking(kernel, span), rows, queries, slice(*span), is_causal=True)
    yield from _past(settings, kernel, rows, queries, first, span[0])


def _past(
    settings: SlicedAttentionSettings, kernel: AttentionKernel, rows: slice, queries: slice, first: int, start: int
) -> Iterator[AttentionPiece]:
    """Rectangles over the keys before the slice."""
    step = settings.keys_per_call
    edges = [first, *range(first - first % step + step, start, step), start]
    for keys in pairwise(edges):
        if keys[0] < keys[1]:
            yield AttentionPiece(_taking(kernel, keys), rows, queries, slice(*keys))


def _taking(kernel: AttentionKernel, keys: tuple[int, int]) -> AttentionKernel:
    """FlashAttention instead of cuDNN for a single key, which that refuses."""
    too_few = kernel is AttentionKernel.CUDNN and keys[1] - keys[0] < _LEAST_CUDNN_KEYS
    return AttentionKernel.FLASH if too_few else kernel


def _in_one_call(
    settings: SlicedAttentionSettings,
    kernel: AttentionKernel,
    rows: slice,
    edges: Sequence[int],
    start: int,
    device: torch.device,
) -> Iterator[AttentionPiece]:
    """The documents that begin at `edges`, but for the last, the slice's end; the first of them may reach into it."""
    window, end = settings.window, edges[-1]
    # With a window the first document's keys before the slice come in the same call: at most as many as the window.
    first = start if window is None else max(edges[0], start - window + 1)
    cu_seqlens = tuple(
        torch.tensor([0, *(edge - base for edge in edges[1:])], dtype=torch.int32).to(device, non_blocking=True)
        for base in (start, first)
    )
    queries, keys = slice(0, end - start), slice(first, end)
    yield AttentionPiece(
        kernel, rows, queries, keys, is_causal=True, window=window, cu_seqlens=(cu_seqlens[0], cu_seqlens[1])
    )
    if window is None:
        yield from _past(settings, kernel, rows, slice(0, edges[1] - start), edges[0], start)


def _tiled(
    settings: SlicedAttentionSettings, starts: Sequence[Sequence[int]], start: int, end: int, device: torch.device
) -> AttentionPiece:
    """All queries of all rows at once, each with the first key that it sees."""
    places = torch.arange(start, end)
    first_keys = torch.stack([_firsts(places, row, settings.window) for row in starts]).to(torch.int32)
    spans = [(int(part.min()), int(part.max())) for part in first_keys.split(settings.tile, dim=1)]
    visible_keys = VisibleKeys(start, first_keys.to(device, non_blocking=True), spans)
    keys = slice(min(low for low, _ in spans), end)
    return AttentionPiece(
        AttentionKernel.TILES,
        slice(0, len(starts)),
        slice(0, end - start),
        keys,
        is_causal=True,
        visible_keys=visible_keys,
    )


def _firsts(places: Tensor, starts: Sequence[int], window: int | None) -> Tensor:
    """The first key that queries at `places` see: their document's, or their window's."""
    documents = torch.tensor(starts)
    first_keys = documents[torch.searchsorted(documents, places, right=True) - 1]
    return first_keys if window is None else first_keys.maximum(places - window + 1)
