"""Converts batches to the tensors of a training step or of an evaluation pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mobius.data.batches import Batch, balance_microbatches, shard_batch
from mobius.engine.documents import Rows, position_ids_and_cu_seqlens
from mobius.engine.step_inputs import StepBatch
from mobius.training.run_setup import RunSetup


def step_batches(batches: Iterable[Batch], run_setup: RunSetup) -> Iterator[StepBatch]:
    """Yield this pipeline's rows of each step's batch."""
    ranks = run_setup.ranks
    for batch in batches:
        assert batch.num_targets > 0, "samples without a target are dropped, and every step has samples"
        own = shard_batch(batch, ranks.replica, ranks.num_replicas)
        yield concatenate_batches([own], run_setup, run_setup.plan.num_chunks)


def concatenate_batches(batches: Sequence[Batch], run_setup: RunSetup, num_microbatches: int) -> StepBatch:
    """Concatenate batches of `num_microbatches` each, with rows in microbatch order; page-locked if there is a GPU."""
    arranged = [balance_microbatches(batch, num_microbatches) for batch in batches]
    documents = [row for batch in arranged for row in batch.document_lengths or ()]
    lengths = None
    if run_setup.parts.router_loss is not None:
        lengths = np.array([length for batch in arranged for length in batch.row_lengths or ()], dtype=np.int64)
    return StepBatch(
        _tensor(np.concatenate([batch.input_ids for batch in arranged]), run_setup),
        _tensor(np.concatenate([batch.labels for batch in arranged]), run_setup),
        num_targets=sum(batch.num_targets for batch in arranged),
        num_tokens=sum(batch.num_tokens for batch in arranged),
        num_samples=sum(batch.num_samples for batch in arranged),
        epoch=arranged[-1].epoch,
        documents=document_tensors(documents, run_setup, num_microbatches=num_microbatches * len(batches)),
        num_replicas=run_setup.ranks.num_replicas,
        lengths=None if lengths is None or not len(lengths) else _tensor(lengths, run_setup),
        document_lengths=documents or [(length,) for batch in arranged for length in batch.row_lengths or ()],
    )


def document_tensors(rows: Rows, run_setup: RunSetup, *, num_microbatches: int) -> tuple[Tensor, Tensor] | None:
    """Return position ids and cu_seqlens of the documents in `rows` (token counts); None if rows are not packed."""
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
    return tensor.pin_memory() if run_setup.device.type == "cuda" else tensor
