"""Conversion of batches to the tensors of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mobius.data.batches import Batch, balance_microbatches, shard_batch
from mobius.engine.documents import Rows, position_ids_and_cu_seqlens
from mobius.engine.executor import StepBatch
from mobius.planner.run_setup import RunSetup


def step_batches(batches: Iterable[Batch], run_setup: RunSetup) -> Iterator[StepBatch]:
    """Yield the batches as tensors, page-locked for a GPU, with packed rows in the order of microbatches."""
    ranks = run_setup.rank_context.ranks
    for given in batches:
        assert given.num_targets > 0, "samples without a target are dropped, and every step has samples"
        num_chunks = run_setup.plan.num_chunks
        batch = balance_microbatches(shard_batch(given, ranks.replica, ranks.num_replicas), num_chunks)
        input_ids, labels = (_tensor(each, run_setup) for each in (batch.input_ids, batch.labels))
        documents = (
            None
            if batch.document_lengths is None
            else document_tensors(batch.document_lengths, run_setup, num_microbatches=run_setup.plan.num_chunks)
        )
        numbers = batch.num_targets, batch.num_tokens, batch.num_samples, batch.epoch
        row_lengths = None
        if run_setup.parts.router_loss is not None and batch.row_lengths is not None:
            row_lengths = _tensor(np.array(batch.row_lengths, dtype=np.int64), run_setup)
        yield StepBatch(input_ids, labels, *numbers, documents, ranks.num_replicas, row_lengths)


def document_tensors(rows: Rows, run_setup: RunSetup, *, num_microbatches: int) -> tuple[Tensor, Tensor] | None:
    """Return position ids and cu_seqlens of documents with the token counts `rows`; None if rows are not packed."""
    packed = run_setup.result.request.packed
    if packed is None:
        return None
    position_ids, cu_seqlens = position_ids_and_cu_seqlens(
        rows,
        seq_length=run_setup.config.data.seq_length,
        num_microbatches=num_microbatches,
        max_documents=packed.max_documents,
    )
    return _tensor(position_ids, run_setup), _tensor(cu_seqlens, run_setup)


def _tensor(array: npt.NDArray[Any], run_setup: RunSetup) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if run_setup.rank_context.device.type == "cuda" else tensor
