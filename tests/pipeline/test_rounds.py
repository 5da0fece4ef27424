"""Rounds change no bit: gradients of a step in parts are those of the step at once."""

from __future__ import annotations

import pytest
import torch
from harness.pipelines import Pipeline, make_batch, make_model

CASES = {  # number of slots, whether graphs are kept, places of the resident stages among a rank's
    "resident": (None, False, ()),
    "resident, graphs kept": (None, True, ()),
    "streamed": (1, False, ()),
    "streamed, prefetched": (2, False, ()),
    "streamed, three slots, last graphs kept": (3, True, ()),
    "first resident": (2, False, (0,)),
    "all but one resident, graphs kept": (1, True, (0, 1)),
}


PIPELINES = ((1, 3), (2, 1), (2, 3), (4, 2))  # ranks, stages of each
NUM_LAYERS = 10  # two in some stages of the longest, one in its others
FORMATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.grid
@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_rounds_change_no_bit(family: str, case: str) -> None:
    """Each case meets each pipeline with one format, and each format in one of the families or the other."""
    model = make_model(family, NUM_LAYERS)
    num_slots, keeps_graphs, places = CASES[case]
    first = sorted(CASES).index(case) + (family == "llama-tied")
    for turn, (num_ranks, stages_per_rank) in enumerate(PIPELINES):
        dtype = FORMATS[(first + turn) % len(FORMATS)]
        resident = frozenset(
            rank + place * num_ranks for rank in range(num_ranks) for place in places if place < stages_per_rank
        )
        num_microbatches, some_rounds = (6, (3,)) if num_ranks == 4 else (4, (2, 4))
        batch = make_batch(num_microbatches)
        runs = {}
        for accumulation_rounds in (1, *some_rounds):
            pipeline = Pipeline(
                model,
                num_ranks,
                stages_per_rank,
                num_microbatches,
                num_slots,
                keeps_graphs,
                resident=resident,
                dtype=dtype,
                accumulation_rounds=accumulation_rounds,
            )
            runs[accumulation_rounds] = pipeline.run(batch), pipeline.gradients
        loss, gradients = runs[1]
        for accumulation_rounds in some_rounds:
            own_loss, own = runs[accumulation_rounds]
            where = f"N={num_ranks} v={stages_per_rank} M={num_microbatches} R={accumulation_rounds} {dtype}"
            assert torch.equal(own_loss, loss), where
            assert own.keys() == gradients.keys()
            for name, gradient in gradients.items():
                assert torch.equal(own[name].to(dtype), gradient.to(dtype)), f"{where} {name}"
                assert gradient.abs().max() > 0, name
