"""A pipeline with adapters beside frozen weights computes loss, gradients and steps of peft's model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.adapted_models import (
    GivenValues,
    adapt_by_peft,
    adapted,
    give,
    gradients_of,
    parameters_of,
    train,
    train_by_peft,
)
from harness.pipelines import Pipeline, make_batch, plain_step
from harness.runs import make_checkpoint
from harness.sessions import random_samples
from peft import PeftModel

from mobius.config.adapters import AdapterConfig, FinetuningType
from mobius.models.adapters.lora import FreshAdapters
from mobius.runtime.executor import StepBatch

LORA = AdapterConfig(finetuning_type=FinetuningType.LORA, lora_rank=4, lora_alpha=8.0)
CASES = {  # number of slots, whether graphs are kept, resident stages
    "resident": (None, False, frozenset()),
    "resident, graphs kept": (None, True, frozenset()),
    "streamed": (1, False, frozenset()),
    "streamed, prefetched, last graphs kept": (2, True, frozenset()),
    "mixed": (2, False, frozenset({0})),
}
NUM_STEPS = 20
OPTIONS = f"""--use_lora --lora_rank 4 --lora_alpha 8 --fp32 --packing off --num_iterations {NUM_STEPS}
    --learning_rate 2e-3 --lr_scheduler_type constant --warmup_steps 0 --weight_decay 0.1 --max_grad_norm 0.2
    --batch_size 6 --num_chunks 3 --seq_length 24 --seed 3"""


def check(pipeline: Pipeline, batch: StepBatch, model: PeftModel, num_microbatches: int, where: str) -> None:
    model.zero_grad()
    expected_loss, _ = plain_step(model, batch, num_microbatches)
    expected = gradients_of(model)
    assert torch.equal(pipeline.run(batch), expected_loss), where
    assert pipeline.gradients.keys() == expected.keys(), where
    for name, gradient in expected.items():
        assert torch.equal(pipeline.gradients[name], gradient), f"{where} {name}"


@pytest.mark.parametrize(("num_ranks", "stages_per_rank"), [(1, 1), (1, 3), (2, 1), (2, 2), (4, 1)])
def test_loss_and_gradients_are_those_of_peft_bit_by_bit(num_ranks: int, stages_per_rank: int) -> None:
    model = adapted("llama", LORA)
    for num_microbatches in (1, 3):
        batch = make_batch(num_microbatches)
        for case, (num_slots, keeps_graphs, resident) in CASES.items():
            pipeline = Pipeline(
                model.base_model.model,
                num_ranks,
                stages_per_rank,
                num_microbatches,
                num_slots,
                keeps_graphs,
                resident=resident,
                adapters=LORA,
                source=GivenValues(parameters_of(model)),
            )
            check(pipeline, batch, model, num_microbatches, f"M={num_microbatches} {case}")


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [(1, "--num_stages 1 --no_offload"), (1, "--num_stages 2 --resident_stages 1"), (2, "--num_stages 4")],
)
def test_twenty_clipped_steps_are_those_of_peft(tmp_path: Path, num_ranks: int, options: str) -> None:
    base = make_checkpoint(tmp_path)
    samples = random_samples(30, 24)
    losses, ours, batches = train(num_ranks, tmp_path, f"{OPTIONS} {options}", samples)
    before = parameters_of(adapt_by_peft(base, LORA))
    fresh = FreshAdapters(GivenValues(before), seed=3)
    model = give(adapt_by_peft(base, LORA), {name: fresh.read(name, each.shape) for name, each in before.items()})
    expected = train_by_peft(model, batches)

    assert losses == pytest.approx(expected, abs=1e-6)
    assert expected[-1] < expected[0]
    for name, value in parameters_of(model).items():
        difference = (ours[name] - value).abs().max()
        assert difference <= 1e-5 * value.abs().max(), f"{name}: {difference / value.abs().max()}"
        assert torch.equal(value, before[name]) == ("lora_" not in name), name
        if "lora_" not in name:
            assert torch.equal(ours[name], value), f"{name} is frozen"
