"""What a family does around its layers is read off its own forward; what is more than scaling is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness.tiny_families import tiny_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from mobius.models.blocks import ModelParts
from mobius.models.by_plan.anatomy import NotByPlanError, find_anatomy
from mobius.models.by_plan.constants import keep_constants
from mobius.models.by_plan.scalings import Kind, Scaled, Step, Watch, scale, scale_with_slope

START = torch.tensor([[-2.0, -0.3], [0.5, 3.0]])


def steps_of(function: Callable[[Tensor], Tensor]) -> tuple[Step, ...] | None:
    with Watch(START) as watch:
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
        ("granite", (Step(Kind.TIMES, 1.7),), (), (Step(Kind.OVER, 1.3),)),
        ("hyperclovax", (Step(Kind.TIMES, 1.7),), (), (Step(Kind.TIMES, 1.3),)),
        ("cohere", (), (), (Step(Kind.TIMES, 0.3),)),
        ("gemma2", (), (), (Step(Kind.OVER, 5.0), Step(Kind.TANH), Step(Kind.TIMES, 5.0))),
        ("minicpm3", (), (Step(Kind.OVER, 32 / 24),), ()),
    ],
)
def test_scalings_are_those_of_the_configuration(
    family: str, embedding: tuple[Step, ...], norm: tuple[Step, ...], logits: tuple[Step, ...]
) -> None:
    anatomy = find_anatomy(buffers_on_cpu(model_of(family)))

    assert (anatomy.embedding_steps, anatomy.norm_steps, anatomy.logits_steps) == (embedding, norm, logits)
    assert (anatomy.embedding, anatomy.layers, anatomy.head) == ("model.embed_tokens", "model.layers", "lm_head")


def test_a_norm_by_another_name_is_found() -> None:
    assert find_anatomy(buffers_on_cpu(model_of("phi"))).norm == "model.final_layernorm"


def test_steps_are_read_in_their_order() -> None:
    assert steps_of(lambda x: torch.tanh(x.float() / 3) * torch.tensor(4.0)) == (
        Step(Kind.OVER, 3.0),
        Step(Kind.TANH),
        Step(Kind.TIMES, 4.0),
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
    steps = (Step(Kind.TIMES, 0.7), Step(Kind.OVER, 2.0), Step(Kind.FLOAT), Step(Kind.TANH), Step(Kind.TIMES, 5.0))
    leaf = START.clone().requires_grad_()
    scale(leaf, steps).sum().backward()

    values, slope = scale_with_slope(START, steps)

    assert torch.equal(values, scale(START, steps))
    torch.testing.assert_close(torch.as_tensor(slope), leaf.grad)


def test_a_scaled_module_keeps_the_names_of_its_parameters() -> None:
    scaled = Scaled("embed", nn.Embedding(3, 2), (Step(Kind.TIMES, 2.0),))

    assert [name for name, _ in scaled.named_parameters()] == ["embed.weight"]
    assert torch.equal(scaled(torch.tensor([1])), 2 * scaled.get_parameter("embed.weight")[1:2])


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("hrm_text", "has no embedding, layers and norm by the names of its pipeline plan"),
    ],
)
def test_a_family_that_is_not_of_the_plan_is_told_why(family: str, reason: str) -> None:
    with pytest.raises(NotByPlanError, match=reason):
        find_anatomy(buffers_on_cpu(model_of(family)))


def test_stored_constants_become_parameters_that_are_not_trained() -> None:
    parts = ModelParts(tiny_config("apertus"), torch.device("cpu"))

    for layer in parts.layers:
        assert layer.frozen == {"mlp.act_fn.beta", "mlp.act_fn.eps"}
        assert layer.num_trained == layer.num_parameters - 2
    assert parts.embedding.frozen == parts.norm.frozen == parts.head.frozen == frozenset()


@pytest.mark.parametrize(("dtype", "in_fp32"), [(torch.long, ()), (torch.float32, ("counted",))])
def test_stored_whole_numbers_and_constants_that_stay_in_fp32_are_told(
    dtype: torch.dtype, in_fp32: tuple[str, ...]
) -> None:
    model = buffers_on_cpu(model_of("llama"))
    model.model.layers[0].register_buffer("counted", torch.zeros(2, dtype=dtype))
    model._keep_in_fp32_modules_strict = set(in_fp32)
    keep_constants(model)

    with pytest.raises(NotByPlanError, match=r"stores constants .* \(such as model.layers.0.counted\)"):
        find_anatomy(model)


def test_parameters_outside_of_the_parts_are_told() -> None:
    model = buffers_on_cpu(model_of("llama"))
    model.model.adapter = nn.Linear(2, 2, device="meta")

    with pytest.raises(NotByPlanError, match=r"has parameters outside .* \(such as model.adapter.bias\)"):
        find_anatomy(model)


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

    with pytest.raises(NotByPlanError, match=reason):
        find_anatomy(model)


def test_layers_that_get_something_of_the_tokens_beside_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = buffers_on_cpu(model_of("llama"))
    plain = type(model.model).forward

    def forward(self: nn.Module, inputs_embeds: Tensor, **arguments: object) -> object:
        return plain(self, inputs_embeds=inputs_embeds, per_layer=inputs_embeds.exp(), **arguments)

    monkeypatch.setattr(type(model.model), "forward", forward)

    with pytest.raises(NotByPlanError, match=r"gives its layers something .* embedded tokens \(per_layer\)"):
        find_anatomy(model)
