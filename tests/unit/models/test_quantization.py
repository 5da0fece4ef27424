"""Scales, codes and products in eight bits."""

from __future__ import annotations

import math

import pytest
import torch
from harness.pipelines import FAMILIES
from torch import Tensor

from mobius.config.config import MatmulDtype
from mobius.errors import CheckpointError
from mobius.models.blocks import ModelParts
from mobius.models.quantization import FP8, INT8, EightBitFormat, QuantizedMatrix, check_products, product

CPU = torch.device("cpu")
LARGEST = {FP8: 448.0, INT8: 127.0}
over_formats = pytest.mark.parametrize("own", [FP8, INT8], ids=lambda own: own.name)


def quantized(weight: Tensor, own: EightBitFormat) -> QuantizedMatrix:
    rows, columns = weight.shape
    matrix = QuantizedMatrix(
        torch.empty(rows, columns, dtype=own.codes),
        torch.empty(rows),
        torch.empty(columns, rows, dtype=own.codes),
        torch.empty(columns),
    )
    matrix.fill(weight)
    return matrix


@over_formats
def test_a_scale_is_the_smallest_power_of_two_that_overflows_no_code(own: EightBitFormat) -> None:
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.rand(10_000, generator=generator) * torch.exp2(
        torch.randint(-100, 100, (10_000,), generator=generator).float()
    )
    edges = torch.tensor([LARGEST[own] * 2.0**n for n in (-3, 0, 5)])
    magnitudes = torch.cat([magnitudes, edges, torch.nextafter(edges, torch.tensor(math.inf))])

    scales, inverse = own.scales(magnitudes)

    assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))
    assert torch.equal(scales * inverse, torch.ones_like(scales))
    assert (magnitudes / scales <= LARGEST[own]).all()
    assert (magnitudes / (scales / 2) > LARGEST[own]).all()


@over_formats
def test_rows_of_nothing_and_of_what_is_not_finite_show(own: EightBitFormat) -> None:
    rows = torch.ones(5, 16, dtype=torch.bfloat16)
    rows[0], rows[1, 3], rows[2, 4], rows[3, 5] = 0, math.inf, -math.inf, math.nan
    matrix = quantized(torch.ones(32, 16, dtype=torch.bfloat16), own)

    output = product(rows, matrix.by_rows, matrix.row_scales)

    assert torch.equal(output[0], torch.zeros_like(output[0]))
    assert output[1:4].isnan().all()
    assert torch.equal(output[4], torch.full_like(output[4], 16))
    weight = torch.ones(32, 16, dtype=torch.bfloat16)
    weight[7, 9] = math.inf
    bad = quantized(weight, own)
    seen = product(rows[4:], bad.by_rows, bad.row_scales).isnan()
    assert seen.nonzero().tolist() == [[0, 7]]
    assert product(torch.ones(1, 32, dtype=torch.bfloat16), bad.by_columns, bad.column_scales).isnan().sum() == 1


@pytest.mark.parametrize(("own", "error"), [(FP8, 0.04), (INT8, 0.02)], ids=["fp8", "int8"])
@pytest.mark.parametrize("tokens", [1, 13])
def test_products_in_both_orders_are_off_by_the_formats_share(own: EightBitFormat, error: float, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(96, 208, generator=generator) * 0.02).bfloat16()
    inputs = torch.randn(tokens, 208, generator=generator).bfloat16()
    gradient = torch.randn(2, tokens, 96, generator=generator).bfloat16()
    matrix = quantized(weight, own)

    for given, codes, scales, factor in (
        (inputs, matrix.by_rows, matrix.row_scales, weight.t()),
        (gradient, matrix.by_columns, matrix.column_scales, weight),
    ):
        exact = given.double() @ factor.double()
        found = product(given, codes, scales)
        assert found.dtype == torch.bfloat16
        assert found.shape == exact.shape
        assert 0.2 * error < float((found.double() - exact).norm() / exact.norm()) < 1.3 * error


def test_a_cpu_multiplies_in_all_formats() -> None:
    for each in MatmulDtype:
        check_products(each, CPU)


def test_sizes_that_are_no_multiples_of_sixteen_stay() -> None:
    config = FAMILIES["llama"](num_hidden_layers=1, intermediate_size=50)
    (layer,) = ModelParts(config, CPU, matmul_dtype=MatmulDtype.INT8).layers
    assert {name.partition(".")[0] for name in layer.quantizable} == {"self_attn"}
    assert ModelParts(config, CPU).layers[0].quantizable == ()


def test_a_model_without_any_is_refused() -> None:
    config = FAMILIES["llama"](num_hidden_layers=1, hidden_size=40, head_dim=10, intermediate_size=50)
    with pytest.raises(
        CheckpointError, match="--matmul_dtype fp8: the family 'llama' has no linear layer .* Use --matmul_dtype bf16"
    ):
        ModelParts(config, CPU, matmul_dtype=MatmulDtype.FP8)
