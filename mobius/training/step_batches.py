"""The batches of a run as the tensors that a step reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mobius.data.batches import Batch, arrange, share_of
from mobius.planning.blueprint import Blueprint
from mobius.runtime.documents import Rows, place_documents
from mobius.runtime.executor import StepBatch


def step_batches(batches: Iterable[Batch], blueprint: Blueprint) -> Iterator[StepBatch]:
    """The batches as tensors, page-locked if they go to a GPU, packed rows in the order of microbatches."""
    ranks = blueprint.place.ranks
    for given in batches:
        assert given.num_targets > 0, "samples without a target are dropped, and no step is without samples"
        num_chunks = blueprint.plan.num_chunks
        batch = arrange(share_of(given, ranks.replica, ranks.num_replicas), num_chunks)
        input_ids, labels = (_tensor(each, blueprint) for each in (batch.input_ids, batch.labels))
        documents = (
            None
            if batch.documents is None
            else document_tensors(batch.documents, blueprint, num_microbatches=blueprint.plan.num_chunks)
        )
        numbers = batch.num_targets, batch.num_tokens, batch.num_samples, batch.epoch
        lengths = None
        if blueprint.parts.router_loss is not None and batch.lengths is not None:
            lengths = _tensor(np.array(batch.lengths, dtype=np.int64), blueprint)
        yield StepBatch(input_ids, labels, *numbers, documents, ranks.num_replicas, lengths)


def document_tensors(rows: Rows, blueprint: Blueprint, *, num_microbatches: int) -> tuple[Tensor, Tensor] | None:
    """Places of the documents of `rows`, which have these token counts; None where rows are one document each."""
    packed = blueprint.answer.request.packed
    if packed is None:
        return None
    positions, bounds = place_documents(
        rows,
        seq_length=blueprint.config.data.seq_length,
        num_microbatches=num_microbatches,
        most_documents=packed.most_documents,
    )
    return _tensor(positions, blueprint), _tensor(bounds, blueprint)


def _tensor(array: npt.NDArray[Any], blueprint: Blueprint) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if blueprint.place.device.type == "cuda" else tensor
