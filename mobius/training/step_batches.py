"""Converts batches to the tensors of a training step or of an evaluation pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mobius.data.batches import Batch, balance_microbatches, shard_batch
from mobius.engine.documents import Rows, position_ids_and_cu_seqlens
from mobius.engine.step_inputs import StepBatch, StepImages
from mobius.models.adapter_dropout import DROPOUT_KEYS, token_keys
from mobius.models.loss import EXISTS, TargetRows
from mobius.objectives.cross_entropy import SUPERVISED
from mobius.objectives.distillation import empty_values
from mobius.objectives.objective import Objective
from mobius.training.run_setup import RunSetup


def step_batches(
    batches: Iterable[Batch], run_setup: RunSetup, objective: Objective, *, num_steps_done: int = 0
) -> Iterator[StepBatch]:
    """Yield this pipeline's rows of each step's batch; the first one is that of the step after `num_steps_done`."""
    ranks = run_setup.ranks
    for step, batch in enumerate(batches, num_steps_done + 1):
        assert batch.num_targets > 0, "samples without a target are dropped, and every step has samples"
        own = shard_batch(with_dropout_keys(batch, run_setup, step), ranks.replica, ranks.num_replicas)
        rows = concatenate_batches([own], run_setup, run_setup.plan.num_chunks)
        yield replace(rows, counts=objective.counts(target_rows(batch)))


def with_dropout_keys(batch: Batch, run_setup: RunSetup, step: int) -> Batch:
    """Return `batch` with the keys of its tokens, if adapters have dropout: they stay with their rows in any order."""
    if not run_setup.parts.adapters.lora_dropout:
        return batch
    rows, length = batch.input_ids.shape
    keys = token_keys((rows, length), seed=run_setup.config.optim.seed, step=step)
    return replace(batch, token_values={**batch.token_values, DROPOUT_KEYS: keys})


def target_rows(batch: Batch) -> TargetRows:
    """Return labels (not shifted) and values of a whole batch, on the host, for `Objective.counts`."""
    return TargetRows(torch.from_numpy(batch.labels), *_values([batch]))


def _values(batches: Sequence[Batch]) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None]:
    """Return the values of tokens, the values of sequences, and the place of each token's sequence."""
    of_tokens = _concatenated([batch.token_values for batch in batches])
    of_sequences = _concatenated([batch.sequence_values for batch in batches])
    sequences = [batch.sequences for batch in batches if batch.sequences is not None]
    if not sequences:
        return of_tokens, of_sequences, None
    numbers = [batch.sequence_numbers for batch in batches if batch.sequence_numbers is not None]
    of_sequences[EXISTS] = torch.from_numpy((np.concatenate(numbers) >= 0).astype(np.float32))
    return of_tokens, of_sequences, torch.from_numpy(np.concatenate(sequences))


def _concatenated(parts: Sequence[Mapping[str, npt.NDArray[Any]]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.concatenate([part[name] for part in parts])) for name in parts[0]}


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
        images=_images(arranged, documents, run_setup),
        **pinned_values(arranged, run_setup),
    )


def _images(batches: Sequence[Batch], documents: Rows, run_setup: RunSetup) -> StepImages | None:
    """Return the images of the rows, page-locked if there is a GPU; None for a run without images."""
    if run_setup.images is None:
        return None
    images = [row for batch in batches for row in batch.images or ((),) * len(batch.input_ids)]
    tokens = torch.from_numpy(np.concatenate([batch.input_ids for batch in batches]))
    has_first_stage = 0 in run_setup.plan.local_stages(run_setup.ranks.pipeline_rank)
    found = run_setup.images.of_rows(tokens, images, documents, has_first_stage=has_first_stage)
    return StepImages(*(_pinned(each, run_setup) for each in (found.positions, found.places, found.features)))


def warmup_fields(run_setup: RunSetup, rows: Rows) -> dict[str, Any]:
    """Return the fields of a synthetic `Batch` about values, for `rows` of documents; {} without values."""
    packed, objective = run_setup.result.request.packed, run_setup.objective
    if objective.teacher is not None:
        return {"token_values": empty_values(objective.teacher, len(rows), run_setup.config.data.seq_length)}
    if packed is None or objective.rows_kind == SUPERVISED.rows_kind:
        return {}
    shape, length = (len(rows), packed.max_documents), run_setup.config.data.seq_length
    places, numbers = np.full((len(rows), length), packed.max_documents, dtype=np.int64), np.full(shape, -1)
    for number, row in enumerate(rows):
        places[number, : sum(row)] = np.repeat(np.arange(len(row)), row)
        numbers[number, : len(row)] = 0
    return {
        "token_values": {name: np.zeros(places.shape, dtype=np.float32) for name in objective.token_values},
        "sequence_values": {name: np.zeros(shape, dtype=np.float32) for name in objective.sequence_values},
        "sequences": places,
        "sequence_numbers": numbers,
    }


def pinned_values(batches: Sequence[Batch], run_setup: RunSetup) -> dict[str, Any]:
    """Return the values of rows by the fields of `StepBatch` that hold them; empty for plain samples."""
    of_tokens, of_sequences, sequences = _values(batches)
    keys = of_tokens.pop(DROPOUT_KEYS, None)
    return {
        "dropout_keys": None if keys is None else _pinned(keys, run_setup),
        "token_values": {name: _pinned(value, run_setup) for name, value in of_tokens.items()},
        "sequence_values": {name: _pinned(value, run_setup) for name, value in of_sequences.items()},
        "sequences": None if sequences is None else _pinned(sequences, run_setup),
    }


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
    return _pinned(torch.from_numpy(array), run_setup)


def _pinned(tensor: Tensor, run_setup: RunSetup) -> Tensor:
    return tensor.pin_memory() if run_setup.device.type == "cuda" else tensor
