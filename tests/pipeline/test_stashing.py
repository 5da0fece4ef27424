"""Activations that wait on the host change no bit: inputs of layers come back as they left."""

from __future__ import annotations

import pytest
import torch
from harness.pipelines import Pipeline, make_batch, make_model

CASES = {  # number of slots, places of the resident stages among a rank's, rounds
    "resident": (None, (), 1),
    "streamed": (1, (), 1),
    "streamed, prefetched": (2, (), 1),
    "first resident": (2, (0,), 1),
    "streamed, rounds": (2, (), 2),
}
PIPELINES = ((1, 3), (2, 1), (2, 3), (4, 2))  # ranks, stages of each
NUM_LAYERS = 10  # two in some stages of the longest, one in its others
FORMATS = (torch.float32, torch.bfloat16)


@pytest.mark.grid
@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_stashing_changes_no_bit(family: str, case: str) -> None:
    """Every stage but the model's last, or the first ones of each rank."""
    model = make_model(family, NUM_LAYERS)
    num_slots, places, accumulation_rounds = CASES[case]
    first = sorted(CASES).index(case) + (family == "llama")
    for turn, (num_ranks, stages_per_rank) in enumerate(PIPELINES):
        num_stages = num_ranks * stages_per_rank
        resident = frozenset(
            rank + place * num_ranks for rank in range(num_ranks) for place in places if place < stages_per_rank
        )
        num_microbatches = (4, 6)[turn % 2]
        batch = make_batch(num_microbatches)
        runs = {}
        for offloaded_activation_stages in (
            frozenset(),
            frozenset(range(num_ranks)) - {num_stages - 1},
            frozenset(range(num_stages - 1)),
        ):
            pipeline = Pipeline(
                model,
                num_ranks,
                stages_per_rank,
                num_microbatches,
                num_slots,
                resident=resident,
                dtype=FORMATS[(first + turn) % len(FORMATS)],
                accumulation_rounds=accumulation_rounds,
                offloaded_activation_stages=offloaded_activation_stages,
            )
            runs[offloaded_activation_stages] = pipeline.run(batch), pipeline.gradients
        loss, gradients = runs.pop(frozenset())
        for offloaded_activation_stages, (own_loss, own) in runs.items():
            where = f"N={num_ranks} v={stages_per_rank} M={num_microbatches} {sorted(offloaded_activation_stages)}"
            assert torch.equal(own_loss, loss), where
            for name, gradient in gradients.items():
                assert torch.equal(own[name], gradient), f"{where} {name}"
                assert gradient.abs().max() > 0, name
