"""Linears that hand out the factors of their weight gradient, against autograd's own gradients."""

from __future__ import annotations

import pytest
import torch
from harness.block_case import parts_of
from harness.pipelines import FAMILIES
from torch import Tensor, nn

from mobius.models.linear import (
    GradientFactorLinear,
    LinearGradientFactors,
    ProductFormat,
    find_linear_gradient_factors,
    replace_linears,
)

CPU = torch.device("cpu")


class TwoLinears(nn.Module):
    """One linear for all tokens; one that is called `times` times, on the first `num_rows`."""

    def __init__(self, *, times: int, num_rows: int) -> None:
        super().__init__()
        self.all, self.some = nn.Linear(4, 4), nn.Linear(4, 4)
        self.times, self.num_rows = times, num_rows

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.all(inputs)
        for _ in range(self.times):
            outputs = outputs + self.some(inputs[:, : self.num_rows]).sum()
        return outputs


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.extended)])
def test_the_product_of_the_factors_is_the_weights_gradient(bias: bool, backend: str | None) -> None:
    torch.manual_seed(3)
    linear = GradientFactorLinear(6, 5, bias=bias, dtype=torch.float64)
    inputs, gradient = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True), torch.randn(2, 3, 5).double()
    others = [inputs, *([linear.bias] if bias else [])]
    plain = torch.autograd.grad(linear(inputs), [linear.weight, *others], gradient)
    placeholders = LinearGradientFactors("").make_placeholders(linear.weight.detach(), num_tokens=6)

    def call(inputs: Tensor, placeholders: dict[str, Tensor]) -> Tensor:
        output: Tensor = torch.func.functional_call(linear, placeholders, inputs)
        return output

    output = (torch.compile(call, backend=backend) if backend else call)(inputs, placeholders)
    factor, output_factor, *rest = torch.autograd.grad(output, [*placeholders.values(), *others], gradient)

    assert not factor.requires_grad
    assert torch.equal(output, linear(inputs))
    torch.testing.assert_close(output_factor.T @ factor, plain[0])
    for value, expected in zip(rest, plain[1:], strict=True):
        torch.testing.assert_close(value, expected)


def test_a_product_is_added_to_what_is_there() -> None:
    total, gradient, inputs = torch.ones(2, 3), torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0, 30.0]])

    ProductFormat.add_weight_gradient(total, gradient, inputs)

    assert total.tolist() == [[11.0, 21.0, 31.0], [21.0, 41.0, 61.0]]


def test_placeholders_take_no_memory_of_their_own() -> None:
    weight = torch.zeros(7, 5, dtype=torch.bfloat16)
    placeholders = LinearGradientFactors("part").make_placeholders(weight, num_tokens=1000)

    shapes = {name: tuple(each.shape) for name, each in placeholders.items()}
    assert shapes == {"part.input_placeholder": (1000, 5), "part.output_placeholder": (1000, 7)}
    assert {each.untyped_storage().nbytes() for each in placeholders.values()} == {2}


@pytest.mark.parametrize(
    ("times", "num_rows", "expected"),
    [(1, 3, {"all", "some"}), (2, 3, {"all"}), (1, 2, {"all"}), (0, 3, {"all"})],
    ids=["once on all", "twice", "on some tokens", "never"],
)
def test_only_what_is_called_once_on_all_tokens_has_factors(times: int, num_rows: int, expected: set[str]) -> None:
    module = TwoLinears(times=times, num_rows=num_rows).to("meta")
    replace_linears(module)

    factors = find_linear_gradient_factors(module, lambda: module(torch.empty(1, 3, 4, device="meta")), num_tokens=3)

    assert {each.linear for each in factors} == expected


class Clipped(nn.Module):
    """Two linears, of which one has its output changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.clipped, self.plain = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.plain(self.clipped(inputs).clamp_(-1, 1)) * 2


def test_a_linear_whose_output_is_changed_in_place_has_no_factors() -> None:
    module = Clipped().to("meta")
    replace_linears(module)

    factors = find_linear_gradient_factors(module, lambda: module(torch.empty(1, 3, 4, device="meta")), num_tokens=3)
    assert factors == (LinearGradientFactors("plain"),)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_matrices_of_a_dense_layer_have_factors_and_of_the_head(family: str) -> None:
    parts = parts_of(family)

    for block in (*parts.layers, parts.head):
        matrices = {name for name, shape in block.shapes.items() if len(shape) == 2}
        assert {each.weight for each in block.gradient_factors} == matrices
