"""Fused experts by themselves: which are run, and that they give what transformers' own implementations give."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from harness.block_case import layer_case
from harness.pipelines import model_of
from harness.tiny_families import tiny_config
from torch import Tensor, nn

from mobius.config.config import AdapterConfig, FinetuningType
from mobius.errors import ConfigError
from mobius.models.blocks import ModelParts
from mobius.models.experts import (
    ExpertsFactor,
    ExpertsGradientFactors,
    adapt_experts,
    fused_experts,
    matrix_names,
    register_experts_implementation,
    run_experts,
    run_experts_on_gpu,
    unsupported_experts_reason,
)
from mobius.schedule.plan import RecomputeLevel

CPU = torch.device("cpu")
TOKENS, CHOSEN = 24, 3
LORA = AdapterConfig(FinetuningType.LORA, lora_rank=2)


def experts_of(family: str) -> nn.Module:
    """Fused experts of the last layer of a tiny model."""
    return list(fused_experts(model_of(tiny_config(family))).values())[-1]


def random_inputs(experts: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of tokens, their experts, one of which nobody takes, and shares."""
    torch.manual_seed(0)
    chosen = torch.stack([torch.randperm(experts.num_experts - 1)[:CHOSEN] for _ in range(TOKENS)])
    return torch.randn(TOKENS, 32, requires_grad=True), chosen, torch.rand(TOKENS, CHOSEN, requires_grad=True)


def results_of(
    run: Callable[..., Tensor], hidden: Tensor, chosen: Tensor, shares: Tensor, parameters: Iterable[Tensor] = ()
) -> list[Tensor]:
    """Output, and gradients of hidden states, shares and parameters, which a module has itself."""
    parameters = run.parameters() if isinstance(run, nn.Module) else parameters
    output = run(hidden, chosen, shares)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return [output, *torch.autograd.grad(output, [hidden, shares, *parameters], gradient)]


@pytest.mark.parametrize("family", ["qwen3_moe", "aria_text", "gpt_oss"])
def test_outputs_and_gradients_are_those_of_transformers(family: str) -> None:
    experts = experts_of(family)
    inputs = random_inputs(experts)
    expected = {}
    for implementation in ("grouped_mm", "eager"):
        experts.config._experts_implementation = implementation
        expected[implementation] = results_of(experts, *inputs)

    register_experts_implementation(experts)
    actual = results_of(experts, *inputs)

    assert all(map(torch.equal, actual, expected["grouped_mm"]))
    for own, eager in zip(actual, expected["eager"], strict=True):
        torch.testing.assert_close(own, eager, rtol=1e-6, atol=1e-6 * float(eager.detach().abs().max()))


def add_adapters(experts: nn.Module) -> nn.Module:
    """Give both matrices adapters with random factors, of different ranks."""
    into, out_of = matrix_names(experts)
    adapt_experts(experts, {into: (2, 0.5), out_of: (3, 2.0)})
    for module in experts.modules():
        if isinstance(module, ExpertsFactor):
            module.weight = nn.Parameter(torch.randn(module.weight.shape) * 0.3)
    return experts


@pytest.mark.parametrize("family", ["qwen3_moe", "aria_text", "gpt_oss"])
@pytest.mark.parametrize("run", [run_experts, run_experts_on_gpu])
def test_adapters_give_what_is_added_to_each_experts_matrix(family: str, run: Callable[..., Tensor]) -> None:
    experts = add_adapters(experts_of(family))
    inputs, plain = random_inputs(experts), experts_of(family)
    register_experts_implementation(experts)
    actual = results_of(partial(run, experts), *inputs)
    for name, holder in zip(matrix_names(experts), (experts.base_layer, experts), strict=True):
        first, second = (factor.weight.detach() for factor in (holder.lora_A, holder.lora_B))
        for number, matrix in enumerate(plain.get_parameter(name).data):
            rank = len(first) // plain.num_experts
            added = second[:, number :: plain.num_experts] @ first[number * rank : (number + 1) * rank]
            matrix += holder.lora_B.scale * (added.t() if experts.is_transposed else added)
    register_experts_implementation(plain)
    expected = results_of(partial(run_experts, plain), *inputs)
    for own, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=2e-6 * float(other.detach().abs().max()))


@pytest.mark.parametrize("family", ["qwen3_moe", "aria_text", "gpt_oss"])
def test_the_way_of_gpus_gives_the_same(family: str) -> None:
    experts = add_adapters(experts_of(family))
    inputs = random_inputs(experts)
    register_experts_implementation(experts)
    expected = results_of(experts, *inputs)

    actual = results_of(partial(run_experts_on_gpu, experts), *inputs, parameters=experts.parameters())

    for own, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-6 * float(other.detach().abs().max()))


@pytest.mark.parametrize("run", [run_experts, run_experts_on_gpu])
@pytest.mark.parametrize("family", ["qwen3_moe", "aria_text"])
def test_factors_that_leave_by_taps_make_the_weights_gradients(family: str, run: Callable[..., Tensor]) -> None:
    experts = add_adapters(experts_of(family))
    inputs = random_inputs(experts)
    register_experts_implementation(experts)
    expected = results_of(partial(run, experts), *inputs, parameters=experts.parameters())
    own = [ExpertsGradientFactors(name, CHOSEN) for name in matrix_names(experts)]
    for name in (name for name, _ in experts.named_parameters() if "lora" in name):
        own.append(ExpertsGradientFactors(name, CHOSEN, experts.num_experts, "lora_B" in name))
    placeholders = {
        name: leaf
        for factors in own
        for name, leaf in factors.make_placeholders(experts.get_parameter(factors.weight), num_tokens=TOKENS).items()
    }
    for name, leaf in placeholders.items():
        module, _, local = name.rpartition(".")
        vars(experts.get_submodule(module))["_buffers"][local] = leaf

    actual = results_of(partial(run, experts), *inputs, parameters=placeholders.values())

    assert all(map(torch.equal, actual[:3], expected[:3]))
    found = dict(zip(placeholders, actual[3:], strict=True))
    for factors, gradient in zip(own, expected[3:], strict=True):
        total = torch.ones_like(gradient)
        factors.add_gradient(total, found)
        assert torch.equal(total, 1 + gradient)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_all_matrices_of_a_sparse_layer_have_factors_but_the_routers(family: str) -> None:
    parts = ModelParts(tiny_config(family), CPU)
    layer = next(layer for layer in parts.layers if "mlp.gate.weight" in layer.shapes)
    matrices = {name for name, shape in layer.shapes.items() if len(shape) > 1}
    assert matrices - {factors.weight for factors in layer.gradient_factors} == {"mlp.gate.weight"}


@pytest.mark.parametrize("compiler", ["none", pytest.param("inductor", marks=pytest.mark.extended)])
@pytest.mark.parametrize("adapters", [AdapterConfig(), replace(LORA, lora_target_parameters="all")], ids=["", "lora"])
def test_a_sparse_layer_as_graphs_gives_what_it_gives_eagerly(
    compiler: str, adapters: AdapterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler == "none":  # graphs run as they were traced
        monkeypatch.setattr(torch._inductor, "compile", lambda graph, _: graph)
    config = tiny_config("qwen3_moe")
    results = []
    for compiled in (False, True):
        parts = ModelParts(config, CPU, compiled=compiled, adapters=adapters)
        index = next(n for n, layer in enumerate(parts.layers) if "mlp.gate.weight" in layer.shapes)
        case = layer_case(parts, index)
        own = case.kept(RecomputeLevel.ELEMENTWISE)
        if compiler != "none":
            own += case.recomputed()
        results.append(own)
        assert (case.block.graphs is not None and not case.block.graphs._is_broken) == compiled
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager, rtol=1e-5, atol=2e-6 * float(eager.detach().abs().max()))


def test_adapters_are_beside_linears_and_not_experts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        parts = ModelParts(tiny_config("qwen2_moe"), CPU, adapters=AdapterConfig(FinetuningType.LORA, lora_rank=2))
    adapted = {name.rpartition(".lora_A")[0].rpartition(".")[2] for layer in parts.layers for name in layer.shapes}
    assert "shared_expert_gate" not in adapted, "a gate of one number"
    assert {"q_proj", "o_proj", "gate_proj", "down_proj"} <= adapted
    assert not any("experts." in name for layer in parts.layers for name in layer.shapes.keys() - layer.frozen)
    assert "experts are stored in one tensor per layer" in caplog.text
    assert "peft" not in caplog.text
    ModelParts(tiny_config("qwen2_moe"), CPU, adapters=replace(LORA, use_dora=True, lora_target="o_proj"))
    assert "peft" not in caplog.text
    ModelParts(tiny_config("qwen2_moe"), CPU, adapters=replace(LORA, use_dora=True))
    assert "peft 0.21 takes adapters of model.layers.0.mlp." in caplog.text


@pytest.mark.parametrize(
    ("family", "adapters", "told"),
    [
        ("qwen3_moe", {"lora_target": "experts"}, r"names experts: .*gate_up_proj.*--lora_target_parameters all"),
        ("qwen3_moe", {"lora_target": "q_proj,mlp.experts.gate_up_proj"}, "names experts"),
        ("qwen3_moe", {"lora_target": "gate_up_proj"}, "names experts"),
        ("qwen3_moe", {"lora_target": "none"}, "leaves no layer with an adapter"),
        ("qwen3_moe", {"lora_target_parameters": "q_proj"}, "q_proj is no matrix of experts; it has experts.gate_up_p"),
        (
            "qwen3_moe",
            {"lora_target": "none", "lora_target_parameters": "all", "lora_rank": 99},
            "99 is too large for .*gate_up_proj, a matr",
        ),
        ("llama", {"lora_target_parameters": "all"}, "this model has no experts in one tensor per layer"),
    ],
)
def test_a_target_that_is_none_is_refused_by_name(family: str, adapters: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ModelParts(tiny_config(family), CPU, adapters=replace(LORA, **adapters))


def test_transposed_matrices_are_known() -> None:
    assert experts_of("aria_text").is_transposed
    assert not experts_of("qwen3_moe").is_transposed


def test_experts_with_other_parameters_are_refused() -> None:
    model = model_of(tiny_config("gpt_oss"))
    assert unsupported_experts_reason(model) is None
    model.model.layers[0].mlp.experts.scale = nn.Parameter(torch.ones(6))
    reason = unsupported_experts_reason(model)
    assert reason is not None
    assert reason.startswith("has experts with other parameters than two matrices of three dimensions (gate_up_proj, ")


def test_experts_that_are_linears_are_refused() -> None:
    model = nn.Module()
    model.mlp = nn.Module()
    model.mlp.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    reason = unsupported_experts_reason(model)
    assert reason == "has experts that are not held in one tensor per matrix (such as mlp.experts.0.bias)"


def test_a_dense_model_has_no_experts() -> None:
    model = model_of(tiny_config("llama"))
    assert unsupported_experts_reason(model) is None
    assert fused_experts(model) == {}
