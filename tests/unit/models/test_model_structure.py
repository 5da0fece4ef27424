"""What a family does around its layers is read off its own forward; what is more than scaling is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness.tiny_families import tiny_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from mobius.models.blocks import ModelParts
from mobius.models.structure import (
    OperationRecorder,
    ScaledModule,
    ScalingKind,
    ScalingStep,
    UnsupportedStructureError,
    apply_scaling,
    apply_scaling_with_derivative,
    find_model_structure,
    freeze_persistent_buffers,
)

START = torch.tensor([[-2.0, -0.3], [0.5, 3.0]])


def steps_of(function: Callable[[Tensor], Tensor]) -> tuple[ScalingStep, ...] | None:
    with OperationRecorder(START) as watch:
        return watch.steps(START, function(START))


def model_of(family: str) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).eval()


def buffers_on_cpu(model: PreTrainedModel) -> PreTrainedModel:
    for module in model.modules():
        names = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        module._buffers.update({name: torch.zeros_like(module._buffers[name], device="cpu") for name in names})
    return model


@pytest.mark.parametrize(
    ("family", "embedding", "norm", "logits"),
    [
        ("llama", (), (), ()),
        ("granite", (ScalingStep(ScalingKind.MULTIPLY, 1.7),), (), (ScalingStep(ScalingKind.DIVIDE, 1.3),)),
        ("hyperclovax", (ScalingStep(ScalingKind.MULTIPLY, 1.7),), (), (ScalingStep(ScalingKind.MULTIPLY, 1.3),)),
        ("cohere", (), (), (ScalingStep(ScalingKind.MULTIPLY, 0.3),)),
        (
            "gemma2",
            (),
            (),
            (
                ScalingStep(ScalingKind.DIVIDE, 5.0),
                ScalingStep(ScalingKind.TANH),
                ScalingStep(ScalingKind.MULTIPLY, 5.0),
            ),
        ),
        ("minicpm3", (), (ScalingStep(ScalingKind.DIVIDE, 32 / 24),), ()),
    ],
)
def test_scalings_are_those_of_the_configuration(
    family: str, embedding: tuple[ScalingStep, ...], norm: tuple[ScalingStep, ...], logits: tuple[ScalingStep, ...]
) -> None:
    structure = find_model_structure(buffers_on_cpu(model_of(family)))

    assert (structure.embedding_scaling_steps, structure.norm_scaling_steps, structure.logits_scaling_steps) == (
        embedding,
        norm,
        logits,
    )
    assert (structure.embedding, structure.layers, structure.head) == ("model.embed_tokens", "model.layers", "lm_head")


def test_a_norm_by_another_name_is_found() -> None:
    assert find_model_structure(buffers_on_cpu(model_of("phi"))).norm == "model.final_layernorm"


def test_steps_are_read_in_their_order() -> None:
    assert steps_of(lambda x: torch.tanh(x.float() / 3) * torch.tensor(4.0)) == (
        ScalingStep(ScalingKind.DIVIDE, 3.0),
        ScalingStep(ScalingKind.TANH),
        ScalingStep(ScalingKind.MULTIPLY, 4.0),
    )
    assert steps_of(lambda x: x) == ()
    assert steps_of(lambda x: x.view_as(x)) == ()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1,
        lambda x: x * x,
        lambda x: x * nn.Parameter(torch.tensor(2.0)),
        lambda x: x[:, :1],
        lambda x: x.t(),
        lambda x: torch.ones(2, 2),
        lambda x: 2.0 / x,
    ],
)
def test_anything_else_is_no_scaling(function: Callable[[Tensor], Tensor]) -> None:
    assert steps_of(function) is None


def test_the_slope_is_that_of_autograd() -> None:
    steps = (
        ScalingStep(ScalingKind.MULTIPLY, 0.7),
        ScalingStep(ScalingKind.DIVIDE, 2.0),
        ScalingStep(ScalingKind.FLOAT),
        ScalingStep(ScalingKind.TANH),
        ScalingStep(ScalingKind.MULTIPLY, 5.0),
    )
    leaf = START.clone().requires_grad_()
    apply_scaling(leaf, steps).sum().backward()

    values, slope = apply_scaling_with_derivative(START, steps)

    assert torch.equal(values, apply_scaling(START, steps))
    torch.testing.assert_close(torch.as_tensor(slope), leaf.grad)


def test_a_scaled_module_keeps_the_names_of_its_parameters() -> None:
    scaled = ScaledModule("embed", nn.Embedding(3, 2), (ScalingStep(ScalingKind.MULTIPLY, 2.0),))

    assert [name for name, _ in scaled.named_parameters()] == ["embed.weight"]
    assert torch.equal(scaled(torch.tensor([1])), 2 * scaled.get_parameter("embed.weight")[1:2])


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("hrm_text", "has no embedding, layers and norm by the names of its pipeline plan"),
    ],
)
def test_a_family_that_is_not_of_the_plan_is_told_why(family: str, reason: str) -> None:
    with pytest.raises(UnsupportedStructureError, match=reason):
        find_model_structure(buffers_on_cpu(model_of(family)))


def test_stored_constants_become_parameters_that_are_not_trained() -> None:
    parts = ModelParts(tiny_config("apertus"), torch.device("cpu"))

    for layer in parts.layers:
        assert layer.frozen == {"mlp.act_fn.beta", "mlp.act_fn.eps"}
        assert layer.num_trained_parameters == layer.num_parameters - 2
    assert parts.embedding.frozen == parts.norm.frozen == parts.head.frozen == frozenset()


def test_stored_whole_numbers_are_told() -> None:
    model = buffers_on_cpu(model_of("llama"))
    model.model.layers[0].register_buffer("counted", torch.zeros(2, dtype=torch.long))
    freeze_persistent_buffers(model)

    with pytest.raises(UnsupportedStructureError, match=r"stores constants .* \(such as model.layers.0.counted\)"):
        find_model_structure(model)


def test_parameters_outside_of_the_parts_are_told() -> None:
    model = buffers_on_cpu(model_of("llama"))
    model.model.adapter = nn.Linear(2, 2, device="meta")

    with pytest.raises(UnsupportedStructureError, match=r"has parameters outside .* \(such as model.adapter.bias\)"):
        find_model_structure(model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda base, hidden: hidden + 1, "does more between its embedding and its first layer"),
        (lambda base, hidden: base.norm(hidden), "does not call each of its layers and its norm once"),
    ],
)
def test_a_forward_that_does_more_is_told_where(
    change: Callable[[nn.Module, Tensor], Tensor], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = buffers_on_cpu(model_of("llama"))
    plain = type(model.model).forward

    def forward(self: nn.Module, inputs_embeds: Tensor, **arguments: object) -> object:
        return plain(self, inputs_embeds=change(self, inputs_embeds), **arguments)

    monkeypatch.setattr(type(model.model), "forward", forward)

    with pytest.raises(UnsupportedStructureError, match=reason):
        find_model_structure(model)


def test_layers_that_get_something_of_the_tokens_beside_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = buffers_on_cpu(model_of("llama"))
    plain = type(model.model).forward

    def forward(self: nn.Module, inputs_embeds: Tensor, **arguments: object) -> object:
        return plain(self, inputs_embeds=inputs_embeds, per_layer=inputs_embeds.exp(), **arguments)

    monkeypatch.setattr(type(model.model), "forward", forward)

    with pytest.raises(
        UnsupportedStructureError, match=r"passes its layers something .* embedded tokens \(per_layer\)"
    ):
        find_model_structure(model)
