"""Steps on rows of several sequences, and the same steps by a plain model that reads each sequence alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from harness.packed_rows import make_packed_batch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from mobius.engine.step_inputs import StepBatch
from mobius.models.loss import EXISTS, TargetRows, shift_left
from mobius.objectives.sequences import SequenceObjective

LENGTH, NEAR = 40, {"loss": 1e-5, "gradients": 1e-5}
ROWS = [[9, 8], [6, 7, 8, 5], [12, 11, 9, 6], [7, 9]]
"""Lengths of the sequences of each row, an even number, as pairs need."""
WAYS = [  # ranks, stages of a rank, microbatches, slots
    (1, 1, 1, None),
    (1, 3, 4, 2),
    (2, 2, 2, 2),
    (2, 1, 4, None),
    (3, 2, 4, 1),
]


def rows_of_sequences(num_microbatches: int) -> StepBatch:
    """Rows with the places of their sequences."""
    batch, most = make_packed_batch(ROWS, LENGTH, num_microbatches), max(map(len, ROWS)) + 1
    places, exists = torch.full_like(batch.input_ids, most), torch.zeros(len(ROWS), most)
    for number, row in enumerate(ROWS):
        places[number, : sum(row)] = torch.arange(len(row)).repeat_interleave(torch.tensor(row))
        exists[number, : len(row)] = 1
    return replace(batch, sequence_values={EXISTS: exists}, sequences=places)


def plain_step(
    model: PreTrainedModel, batch: StepBatch, objective: SequenceObjective
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same step on log-probabilities of each answer alone, with gradients by autograd."""
    model.zero_grad()
    logps = torch.zeros(batch.labels.shape)
    for number, row in enumerate(ROWS):
        for place, length in enumerate(row):
            own = slice(start := sum(row[:place]), start + length)
            logits = model(input_ids=batch.input_ids[number : number + 1, own]).logits[0, :-1].log_softmax(-1)
            following = batch.input_ids[number, own][1:]
            logps = logps.clone()
            logps[number, start : start + length - 1] = logits.gather(-1, following.unsqueeze(-1)).squeeze(-1)
    targets = F.pad(batch.labels, (0, 1), value=-100)[:, 1:]
    of_tokens = {name: shift_left(value) for name, value in batch.token_values.items()}
    rows = TargetRows(targets, of_tokens, batch.sequence_values, batch.sequences, batch.input_ids)
    scored = objective.scored_targets(rows)
    sums = objective.sums(torch.where(scored != -100, logps, 0.0), rows)
    loss = torch.stack(
        [sums[part] / batch.counts[objective.number_counts[part]] for part in objective.loss_parts]
    ).sum()
    loss.backward()
    named = model.named_parameters(remove_duplicate=False)
    return loss.detach(), {name: each.grad for name, each in named if each.grad is not None}
