"""Positions of documents in packed rows; every rank computes them on the host from the same data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from mobius.models.adapter_dropout import DropoutArguments, token_keys
from mobius.models.attention import DocumentAttention, DocumentLayout
from mobius.models.blocks import LayerArguments, LayerArgumentsBuilder, ModelParts
from mobius.schedule.packed_rows import PackedRows

Rows = Sequence[Sequence[int]]
"""Document lengths of each row, without the padding at its end."""


def position_ids_and_cu_seqlens(
    rows: Rows, *, seq_length: int, num_microbatches: int, max_documents: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return position ids [rows, seq_length] and document bounds [num_microbatches, D + 1] (`models.attention`).

    D is always `max_documents` times the rows of a microbatch; padding at the end of a row counts as a document.
    """
    lengths = [_with_padding(row, seq_length) for row in rows]
    position_ids = np.concatenate([np.arange(length, dtype=np.int32) for row in lengths for length in row])
    assert max(map(len, lengths)) <= max_documents, f"{max(map(len, lengths))} documents in a row"
    per_microbatch = len(rows) // num_microbatches
    shape = num_microbatches, per_microbatch * max_documents + 1
    cu_seqlens = np.full(shape, per_microbatch * seq_length, dtype=np.int32)
    for microbatch, own in enumerate(cu_seqlens):
        first = microbatch * per_microbatch
        ends = np.cumsum([length for row in lengths[first : first + per_microbatch] for length in row])
        own[0] = 0
        own[1 : len(ends) + 1] = ends
    return position_ids.reshape(len(rows), seq_length), cu_seqlens


def typical_arguments(
    parts: ModelParts,
    packed: PackedRows | None,
    *,
    batch: int,
    seq_length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LayerArguments:
    """Return the arguments of all layers for a typical microbatch; documents of packed rows have equal lengths."""
    inputs, rows = LayerArgumentsBuilder(parts, device=device, dtype=dtype), _typical_rows(packed, batch, seq_length)
    layout = None
    # FlexAttention computes its mask from documents, so it also gets documents for rows that are not packed.
    if packed is not None or parts.attention is DocumentAttention.FLEX:
        documents = typical_documents(packed, batch=batch, seq_length=seq_length)
        layout = DocumentLayout(documents.position_ids.to(device), documents.cu_seqlens.to(device))
    arguments = inputs(seq_length, layout, rows)
    if not parts.adapters.lora_dropout:
        return arguments
    keys = token_keys((batch, seq_length), seed=0, step=0)
    return DropoutArguments(arguments, torch.from_numpy(keys).to(device))


def typical_documents(packed: PackedRows | None, *, batch: int, seq_length: int) -> DocumentLayout:
    """Return the documents of a typical microbatch, on the host; one document per row if `packed` is None."""
    rows, most = _typical_rows(packed, batch, seq_length), 1 if packed is None else packed.max_documents
    places = position_ids_and_cu_seqlens(rows, seq_length=seq_length, num_microbatches=1, max_documents=most)
    position_ids, (cu_seqlens,) = (torch.from_numpy(each) for each in places)
    return DocumentLayout(position_ids, cu_seqlens)


def _typical_rows(packed: PackedRows | None, batch: int, seq_length: int) -> Rows:
    return [(seq_length,) if packed is None else packed.typical_row(seq_length)] * batch


def _with_padding(row: Sequence[int], seq_length: int) -> list[int]:
    padding = seq_length - sum(row)
    assert padding >= 0, f"documents of {list(row)} tokens in a row of {seq_length}"
    return [*row, padding] if padding else list(row)
