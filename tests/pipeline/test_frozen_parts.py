"""Parts that are frozen have no gradient, and all others have the plain model's; what nobody needs is not computed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from harness.pipelines import CPU, Pipeline, make_batch, make_model, plain_step

from mobius.config.config import AdapterConfig
from mobius.engine.saved_activations import SavedActivations
from mobius.engine.stage import SavedForBackward
from mobius.errors import ConfigError
from mobius.models.blocks import ModelParts

FROZEN = {
    "embedding": "model.embed_tokens.",
    "head": "lm_head.",
    "layers.0-2": ("model.layers.0.", "model.layers.1.", "model.layers.2."),
    "embedding,layers.0-1": ("model.embed_tokens.", "model.layers.0.", "model.layers.1."),
    "layers.3,layers.1": ("model.layers.3.", "model.layers.1."),
}
"""What is typed, and how the names of the parameters begin."""


@pytest.mark.grid
@pytest.mark.parametrize(
    ("num_ranks", "num_slots", "keeps_graphs"), [(1, None, True), (1, 1, False), (2, 2, False), (4, None, False)]
)
@pytest.mark.parametrize("freeze", FROZEN)
def test_gradients_of_the_rest_are_the_plain_models_bit_by_bit(
    freeze: str, num_ranks: int, num_slots: int | None, keeps_graphs: bool
) -> None:
    model, batch, adapters = make_model("llama", 4), make_batch(2), AdapterConfig(freeze=freeze)
    expected_loss, expected = plain_step(model, batch, 2)
    stages_per_rank = 2 if num_ranks < 4 else 1
    pipeline = Pipeline(model, num_ranks, stages_per_rank, 2, num_slots, keeps_graphs, adapters=adapters)

    assert torch.equal(pipeline.run(batch), expected_loss)
    assert pipeline.gradients.keys() == {name for name in expected if not name.startswith(FROZEN[freeze])}
    for name, gradient in pipeline.gradients.items():
        assert torch.equal(gradient, expected[name]), name


def test_a_tied_matrix_is_frozen_as_embedding_and_as_head() -> None:
    model, batch = make_model("llama-tied", 4), make_batch(2)
    _, expected = plain_step(model, batch, 2)
    for word in ("embedding", "head"):
        pipeline = Pipeline(model, 2, 2, 2, 2, adapters=AdapterConfig(freeze=word))
        pipeline.run(batch)
        assert pipeline.gradients.keys() == expected.keys() - {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("options", [{"num_slices": 2}, {"tile_tokens": 5}])
def test_frozen_layers_in_slices_and_tiles_leave_the_others_gradients(options: dict[str, int]) -> None:
    model, batch, number = make_model("llama", 4), make_batch(2), 2 * options.get("num_slices", 1)
    frozen = AdapterConfig(freeze="embedding,layers.0-1,norms")
    both = [Pipeline(model, 2, 2, number, 1, adapters=each, **options) for each in (AdapterConfig(), frozen)]
    losses = [pipeline.run(batch) for pipeline in both]
    expected, found = (pipeline.gradients for pipeline in both)

    assert torch.equal(*losses)
    trained = ("model.layers.2.", "model.layers.3.", "lm_head.")
    assert found.keys() == {name for name in expected if name.startswith(trained) and "norm" not in name}
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize(("freeze", "expected"), [("embedding,layers.0-1", 2), ("layers.0-1", 4), ("embedding", 4)])
def test_layers_before_which_nothing_is_trained_have_no_backward(
    freeze: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mobius.engine import stage

    run, ran = stage.recomputed_backward, []

    def count(*args: object) -> torch.Tensor:
        ran.append(args)
        return run(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(stage, "recomputed_backward", count)
    Pipeline(make_model("llama", 4), 1, 2, 1, 1, adapters=AdapterConfig(freeze=freeze)).run(make_batch(1))
    assert len(ran) == expected


@pytest.mark.parametrize("options", [{}, {"num_slices": 2}])
@pytest.mark.parametrize("offloaded_activation_stages", [frozenset(), frozenset({0, 1})])
def test_layers_without_a_backward_keep_nothing_for_it(
    options: dict[str, int], offloaded_activation_stages: frozenset[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers 0 to 2 of 8 are frozen: stage 0 of 4 keeps nothing, and stage 1 the input of one of its two layers."""
    model, batch, number = make_model("llama", 8), make_batch(2), 2 * options.get("num_slices", 1)
    put, kept = SavedActivations.put, dict[int, list[int]]()

    def seen(self: SavedActivations, stage: int, microbatch: int, tensors: Sequence[SavedForBackward]) -> None:
        kept[stage] = [each.numel() for each in tensors if isinstance(each, torch.Tensor)]
        put(self, stage, microbatch, tensors)  # type: ignore[arg-type]

    monkeypatch.setattr(SavedActivations, "put", seen)
    frozen = AdapterConfig(freeze="embedding,layers.0-2")
    both = [
        Pipeline(
            model, 2, 2, number, 1, adapters=each, offloaded_activation_stages=offloaded_activation_stages, **options
        )  # type: ignore[arg-type]
        for each in (AdapterConfig(), frozen)
    ]
    losses, found = [], []
    for pipeline in both:
        losses.append(pipeline.run(batch))
        found.append(dict(kept))
    whole = found[0][0][0]
    assert [each[:2] for each in (found[0][0], found[0][1])] == [[whole, whole]] * 2
    assert (found[1][0], found[1][1]) == ([0, 0], [0, whole])
    assert torch.equal(*losses)
    for name, gradient in both[1].gradients.items():
        assert torch.equal(gradient, both[0].gradients[name]), name


@pytest.mark.parametrize(
    ("freeze", "told"),
    [
        ("layers.2-4", "layers.0-3"),
        ("layers.3-1", "layers.0-3"),
        ("attention", "embedding, head, norms, layers.0-15"),
        ("embedding,head,norms,layers.0-3", "nothing to train"),
    ],
)
def test_a_part_that_is_not_there_is_refused(freeze: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ModelParts(make_model("llama", 4).config, CPU, adapters=AdapterConfig(freeze=freeze))
