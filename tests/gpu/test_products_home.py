"""On one GPU: products of some microbatches wait on the host, and gradients have the bits of recomputed layers."""

from __future__ import annotations

import pytest
import torch
from harness.pipelines import Pipeline, make_batch, make_model
from torch import Tensor

from mobius.engine import saved_activations

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
LAYERS = STAGES = 4
MICROBATCHES = 4


@pytest.mark.parametrize("family", ["llama-tied", "qwen3"])
@pytest.mark.parametrize("accumulation_rounds", [1, 2])
def test_compiled_layers_go_on_from_what_came_back(
    family: str, accumulation_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products go home and come back beside loads and gradients; a place taken too early shows."""
    model, batch = make_model(family, LAYERS).to(CUDA), make_batch(MICROBATCHES)
    sent, leave = [], saved_activations._select_for_offload

    def counted(kept: object, room: int) -> object:
        layers, leaving = leave(kept, room)  # type: ignore[arg-type]
        sent.append(sum(layer.saved is not None for layer in layers))
        return layers, leaving

    monkeypatch.setattr(saved_activations, "_select_for_offload", counted)
    expected: tuple[Tensor, dict[str, Tensor]] | None = None
    for number in (0, 1, MICROBATCHES // accumulation_rounds):
        sent.clear()
        pipeline = Pipeline(
            model,
            1,
            STAGES,
            MICROBATCHES,
            2,
            accumulation_rounds=accumulation_rounds,
            offloaded_activation_stages=frozenset(range(STAGES - 1)),
            num_offloaded_microbatches=number,
            compiled=True,
            dtype=torch.bfloat16,
            device=CUDA,
        )
        found = pipeline.run(batch), {name: each.cpu() for name, each in pipeline.gradients.items()}
        assert sum(sent) == number * accumulation_rounds * (STAGES - 1)
        expected = expected or found
        assert torch.equal(found[0], expected[0]), number
        for name, gradient in expected[1].items():
            assert torch.equal(found[1][name], gradient), (number, name)
