"""Splits a slice's attention into pieces, each computed by one kernel call. All layers use the pieces of a slice.

    one document; K is `keys_per_call`            documents d and e, with a window of 3

    keys       0       K       2K start end       d d d d d d d e e e
    queries    | # # # | # # # | # | #                    # # #          one call for both documents; keys of d
               | # # # | # # # | # | # #                    # # #        before the slice are included only
               | # # # | # # # | # | # # #                        #      inside the window
               rectangles without a mask,                         # #
               and a causal square

Rectangles end at multiples of K. This limits the number of shapes, and the memory of a backward call. Kernels:

    kernel   devices        dtypes      head size             windows  documents    log-sum-exp, natural logarithm, fp32
    cudnn    9.0 10.0 10.3  bf16 fp16   8n <= 128, 9.0: 256   no       no           [B, H, T, 1], or [B, H, T] (probed)
    flash    8.0 and later  bf16 fp16   8n <= 256             yes      yes          [B, H, T]; of documents [H, T]
    cpu      CPU            fp32 bf16   any                   no       one by one   [B, H, T], read by its strides
    tiles    any            any         any                   yes      yes          [B, H, T]

All kernels support grouped-query attention directly: flash's backward computes key gradients for all query heads, then
sums them. No kernel pads its log-sum-exp. Only tiles support softcap. torch's memory-efficient kernel is not used: it
needs keys expanded to all query heads, and a log-sum-exp padded to 32 queries; tiles support the same dtypes.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

import torch
from torch import Tensor

from mobius.limits import KEYS_PER_CALL
from mobius.models.attention import DocumentAttention, choose_attention

_LEAST_CUDNN = 91501
"""cuDNN 9.15.1. Results of older versions are wrong if a length is no multiple of 128 (pytorch issue 169849)."""
_CUDNN_CARDS = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities for which torch prefers cuDNN to FlashAttention."""


class AttentionKernel(StrEnum):
    """Kernels for a piece of a slice, in order of preference."""

    CUDNN = "cudnn"
    FLASH = "flash"
    CPU = "cpu"
    TILES = "tiles"


def choose_kernel(
    device: torch.device, dtype: torch.dtype, *, head_size: int, window: int | None, softcap: float | None
) -> AttentionKernel:
    """Return the first kernel that fits; if deterministic algorithms are enabled, it is a deterministic kernel."""
    for kernel in AttentionKernel:
        is_able = takes_settings(kernel, window=window, softcap=softcap)
        if is_able and is_kernel_available(kernel, device, dtype, head_size):
            return kernel
    raise AssertionError("tiles support everything")


def is_kernel_available(kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether `kernel` runs on `device` with this dtype and head size; for cuDNN, also whether torch prefers it."""
    if kernel is AttentionKernel.CUDNN:
        return _cudnn_fits(device, dtype, head_size)
    if kernel is AttentionKernel.FLASH:
        return _flash_fits(device, dtype, head_size)
    return kernel is AttentionKernel.TILES or (device.type == "cpu" and dtype in (torch.float32, torch.bfloat16))


def takes_settings(kernel: AttentionKernel, *, window: int | None, softcap: float | None) -> bool:
    """Whether `kernel` supports the sliding window and the softcap, if there are any."""
    if kernel is AttentionKernel.TILES:
        return True
    return softcap is None and (window is None or kernel is AttentionKernel.FLASH)


def _cudnn_fits(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    if not _flash_fits(device, dtype, head_size):
        return False
    capability = torch.cuda.get_device_capability(device)
    is_new = (torch.backends.cudnn.version() or 0) >= _LEAST_CUDNN
    # cuDNN attention is not deterministic, so a request for deterministic algorithms excludes it.
    is_free = torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
    return is_free and is_new and capability in _CUDNN_CARDS and head_size <= (256 if capability == (9, 0) else 128)


def _flash_fits(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    if device.type != "cuda":
        return False
    return choose_attention(device, dtype, head_size=head_size, softcap=None) is DocumentAttention.VARLEN


TILE = 512
_LEAST_CUDNN_KEYS = 2


@dataclass(frozen=True)
class VisibleKeys:
    """First visible key of each query in a slice; the last visible key is at the query's position."""

    start: int
    """Position of the slice's first query in the sequence."""
    first_keys: Tensor
    """int32 [B, T] on the compute device: positions in the sequence."""
    spans: Sequence[tuple[int, int]]
    """Minimum and maximum of `first_keys` in each tile of queries."""


@dataclass(frozen=True)
class AttentionPiece:
    """A range of queries in some rows, and a range of keys, with their mask.

    Without `is_causal`, every query attends to every key. With `is_causal`, the last query of a document attends to all
    keys of the document, and each earlier query to one key less than the next. With `window`, a query attends only to
    the last `window` of these keys.
    """

    kernel: AttentionKernel
    rows: slice
    queries: slice
    """Relative to the slice."""
    keys: slice
    """Relative to the sequence."""
    is_causal: bool = False
    window: int | None = None
    cu_seqlens: tuple[Tensor, Tensor] | None = None
    """int32 [n + 1] on the compute device: starts of the n documents' queries and keys within the piece."""
    visible_keys: VisibleKeys | None = None
    """First visible key of each query; only for TILES."""

    @property
    def longest(self) -> tuple[int, int]:
        """Upper bounds on the number of queries and the number of keys of a document."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start


@dataclass(eq=False)
class SlicedAttentionSettings:
    """Attention settings of one kind of layers for a microbatch's sequences, with a cache of pieces per slice."""

    kernel: AttentionKernel
    scale: float
    window: int | None = None
    """Number of tokens to which a query attends, including the query's token; None without a window."""
    softcap: float | None = None
    documents: Tensor | None = None
    """`attention.DocumentLayout.cu_seqlens` of whole sequences, on the host: int32 [D + 1] of B * L tokens."""
    keys_per_call: int = KEYS_PER_CALL
    tile: int = TILE
    """Tile size in queries and in keys."""
    _bounds: Sequence[int] | None = field(init=False, repr=False)
    _made: dict[tuple[object, ...], tuple[AttentionPiece, ...]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        assert takes_settings(self.kernel, window=self.window, softcap=self.softcap), self
        assert self.documents is None or self.documents.device.type == "cpu", "bounds are read on the host"
        self._bounds = None if self.documents is None else self.documents.tolist()

    def pieces(
        self, *, num_rows: int, length: int, start: int, end: int, device: torch.device
    ) -> tuple[AttentionPiece, ...]:
        """Pieces of the slice [start, end) in `num_rows` sequences of `length` tokens; does not wait for the device."""
        asked = num_rows, length, start, end, device
        if asked not in self._made:
            starts = [_document_starts(self._bounds, row, length, end) for row in range(num_rows)]
            self._made[asked] = tuple(_cut(self, starts, start, end, device))
        return self._made[asked]


def _document_starts(cu_seqlens: Sequence[int] | None, row: int, length: int, end: int) -> list[int]:
    """Positions in the sequence where the documents of a row begin, if before `end`; ascending."""
    if cu_seqlens is None:
        return [0]
    begin = row * length
    return sorted({bound - begin for bound in cu_seqlens if begin <= bound < begin + end})


def _cut(
    settings: SlicedAttentionSettings, rows: Sequence[Sequence[int]], start: int, end: int, device: torch.device
) -> list[AttentionPiece]:
    """Pieces of the slice [start, end); `rows` holds the document starts of each row."""
    if settings.kernel is AttentionKernel.TILES:
        return [_tiled(settings, rows, start, end, device)]
    if all(starts == [0] for starts in rows):
        return list(_of_document(settings, settings.kernel, slice(0, len(rows)), 0, (start, end), start))
    # Document shapes differ in every microbatch, and cuDNN would build a new plan for each shape.
    kernel = AttentionKernel.FLASH if settings.kernel is AttentionKernel.CUDNN else settings.kernel
    pieces: list[AttentionPiece] = []
    for row, starts in enumerate(rows):
        own, inner = slice(row, row + 1), [each for each in starts if each > start]
        edges = [starts[bisect.bisect_right(starts, start) - 1], *inner, end]
        if inner and kernel is AttentionKernel.FLASH:
            pieces += _in_one_call(settings, own, edges, start, device)
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
    """Pieces of a document that begins at `first`; `span` is its token range in the slice that begins at `start`."""
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
    """Rectangles without a mask, for the keys from `first` to the slice, which begins at `start`."""
    step = settings.keys_per_call
    edges = [first, *range(first - first % step + step, start, step), start]
    for keys in pairwise(edges):
        if keys[0] < keys[1]:
            yield AttentionPiece(_taking(kernel, keys), rows, queries, slice(*keys))


def _taking(kernel: AttentionKernel, keys: tuple[int, int]) -> AttentionKernel:
    """Return `kernel`, but FlashAttention instead of cuDNN for a single key, which cuDNN refuses."""
    too_few = kernel is AttentionKernel.CUDNN and keys[1] - keys[0] < _LEAST_CUDNN_KEYS
    return AttentionKernel.FLASH if too_few else kernel


def _in_one_call(
    settings: SlicedAttentionSettings, rows: slice, edges: Sequence[int], start: int, device: torch.device
) -> Iterator[AttentionPiece]:
    """One call of FlashAttention for documents that begin at `edges[:-1]`; the last edge is the slice's end."""
    window, end, kernel = settings.window, edges[-1], AttentionKernel.FLASH
    # With a window, the same call includes the first document's keys before the slice, fewer than `window` keys.
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
    """One piece for all queries in all rows, with the first visible key of each query."""
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
    """First visible key of queries at `places`: the start of a query's document, or of its window if that is later."""
    documents = torch.tensor(starts)
    first_keys = documents[torch.searchsorted(documents, places, right=True) - 1]
    return first_keys if window is None else first_keys.maximum(places - window + 1)
