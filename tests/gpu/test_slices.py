"""On GPUs: sequences in slices give the gradients of whole ones, in stages that stream, offload and run in tiles."""

from __future__ import annotations

import pytest
import torch
from harness.pipelines import Pipeline, model_of
from torch import Tensor
from transformers import LlamaConfig

from mobius.engine.step_inputs import StepBatch

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
LENGTH, VOCAB = 4096, 512
CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}
CASES = {  # slices, slots, stages that offload activations, tokens of a tile, compiled
    "resident": (4, None, frozenset[int](), None, False),
    "streamed": (4, 2, frozenset[int](), None, False),
    "streamed, offloaded": (8, 2, frozenset({0, 1, 2}), None, False),
    "offloaded, in tiles": (2, 1, frozenset({0, 1, 2}), 512, False),
    "compiled": (4, 2, frozenset({0, 1, 2}), 512, True),
}


@pytest.fixture(scope="module")
def batch() -> StepBatch:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, VOCAB, (2, LENGTH), generator=generator).pin_memory()
    return StepBatch(tokens, tokens, 2 * (LENGTH - 1), tokens.numel(), 2)


def gradients_of(batch: StepBatch, dtype: torch.dtype, **options: object) -> tuple[Tensor, dict[str, Tensor]]:
    pipeline = Pipeline(model_of(LlamaConfig(**CONFIG)), 1, 4, device=CUDA, dtype=dtype, **options)  # type: ignore[arg-type]
    loss = pipeline.run(batch)
    return loss, {name: each.cpu() for name, each in pipeline.gradients.items()}  # streamed stages' are there


def apart(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Norm of all differences over that of all gradients."""
    differences = torch.stack([(found[name].float() - each.float()).norm() for name, each in exact.items()])
    return float(differences.norm() / torch.stack([each.float().norm() for each in exact.values()]).norm())


@pytest.mark.parametrize("case", sorted(CASES))
def test_slices_are_as_near_to_fp32_as_whole_sequences_are(batch: StepBatch, case: str) -> None:
    """In bf16; the exact step is that of whole sequences in fp32."""
    slices, slots, offloaded, tile_tokens, compiled = CASES[case]
    exact_loss, exact = gradients_of(batch, torch.float32, num_microbatches=2, num_slots=None)
    _, whole = gradients_of(batch, torch.bfloat16, num_microbatches=2, num_slots=None)

    loss, sliced = gradients_of(
        batch,
        torch.bfloat16,
        num_microbatches=2 * slices,
        num_slices=slices,
        num_slots=slots,
        offloaded_activation_stages=offloaded,
        tile_tokens=tile_tokens,
        compiled=compiled,
    )

    assert float(loss) == pytest.approx(float(exact_loss), rel=2e-3)
    assert apart(sliced, exact) < 1.3 * apart(whole, exact)


def test_where_inputs_wait_changes_no_bit_of_sliced_gradients(batch: StepBatch) -> None:
    shared = {"num_microbatches": 8, "num_slices": 4, "num_slots": 2}
    torch.use_deterministic_algorithms(True)
    try:
        loss, here = gradients_of(batch, torch.bfloat16, **shared)
        other_loss, there = gradients_of(
            batch, torch.bfloat16, offloaded_activation_stages=frozenset({0, 1, 2}), **shared
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(loss, other_loss)
    assert all(torch.equal(there[name], each) for name, each in here.items())
