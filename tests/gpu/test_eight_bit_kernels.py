"""On a GPU: codes and int8 products have the bits of the CPU; fp8 products are as near as tensor cores add."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mobius.models.quantization import FORMATS, FP8, INT8, EightBitFormat, QuantizedMatrix, product

pytestmark = pytest.mark.gpu

ROWS = (1, 13, 512, 4096)
LINEARS = {
    "Llama-2-7B": [(4096, 4096), (4096, 11008), (11008, 4096)],
    "Qwen2-0.5B": [(896, 896), (896, 128), (896, 4864)],
    "SmolLM2-135M": [(576, 576), (576, 192), (576, 1536)],
    "Gemma3-1B": [(1152, 1024), (1152, 256), (1152, 6912)],
    "Mistral-7B": [(4096, 1024), (4096, 14336)],
    "narrow": [(16, 16), (48, 112), (112, 48), (128, 896)],
}
"""Widths in and out."""
WIDTHS = [pytest.param(*each, id=f"{family}-{each[0]}x{each[1]}") for family, own in LINEARS.items() for each in own]
LOST = 8
"""Bound of what an fp8 sum loses, in 2^-13 of the sum of magnitudes of its products.

Tensor cores of Hopper add 32 products to the sum in fixed point with 13 bits after the leading one of the largest, and
drop the rest (arXiv 2412.19437, 3.3.2). A model of that in fp64 lost at most 2.4 in 20,000 sums of random codes of both
signs, of 48 to 14336 products; this allows three times as much for the largest of 6e7 sums. A sum with one wrong
product of the largest codes, or in one wrong scale, is farther off.
"""


def _matrix(weight: Tensor, own: EightBitFormat) -> QuantizedMatrix:
    """Codes and scales of `weight`, over memory full of other codes."""

    def codes(shape: torch.Size) -> Tensor:
        return torch.full(shape, 77, dtype=torch.uint8, device=weight.device).view(own.codes)

    scales = [torch.full((size,), 77.0, device=weight.device) for size in weight.shape]
    matrix = QuantizedMatrix(codes(weight.shape), scales[0], codes(weight.t().shape), scales[1])
    matrix.fill(weight)
    return matrix


def _assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """Check each bit, but for those of NaNs."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    same = (found.cpu().view(kind) == expected.view(kind)) | (found.cpu().isnan() & expected.isnan())
    assert same.all(), f"{(~same).sum()} of {same.numel()} differ"


def _random(*shape: int, seed: int = 0) -> Tensor:
    """Normal values, in rows of magnitudes from 2^-8 to 2^8."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-8, 9, (shape[0], 1), generator=generator)
    return (torch.randn(shape, generator=generator) * torch.exp2(exponents.float())).bfloat16()


def _random_bits(rows: int, columns: int) -> Tensor:
    """Patterns of 16 bits, of which some values are not finite."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-(2**15), 2**15, (rows, columns), generator=generator).short().view(torch.bfloat16)


def _finite_bits(rows: int, columns: int) -> Tensor:
    return torch.where((values := _random_bits(rows, columns)).isfinite(), values, 1.5)


def _subnormal(rows: int, columns: int) -> Tensor:
    """Values of the two lowest exponents."""
    return (_random_bits(rows, columns).view(torch.int16) & ~0x7F00).view(torch.bfloat16)


def _at_the_largest_code(rows: int, columns: int) -> Tensor:
    """Rows of each exponent, whose largest value lies about that of the largest code."""
    generator = torch.Generator().manual_seed(2)
    mantissas = (
        torch.randint(0, 2**15, (rows, columns), generator=generator) % (0x59 + torch.arange(rows) % 40)[:, None]
    )
    signs = torch.randint(0, 2, (rows, columns), generator=generator) << 15
    bits = signs | (torch.arange(rows) % 254 + 1 << 7)[:, None] | mantissas
    return (bits - ((bits >> 15) << 16)).short().view(torch.bfloat16)


def _with_holes(rows: int, columns: int) -> Tensor:
    """Random values with a row and a column of zeros, and one value each of infinity and NaN."""
    values = _random(rows, columns)
    values[3], values[:, 5] = 0.0, -0.0
    values[rows // 2, 1], values[rows - 1, 2] = float("-inf"), float("nan")
    return values


@pytest.fixture(params=FORMATS.values(), ids=FORMATS)
def own(request: pytest.FixtureRequest) -> EightBitFormat:
    if request.param is FP8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    return request.param


@pytest.mark.parametrize("shape", [(16, 16), (48, 112), (1536, 576), (1040, 272), (11008, 4096)])
@pytest.mark.parametrize("values", [_random, _finite_bits, _subnormal, _at_the_largest_code, _with_holes, _random_bits])
def test_codes_of_a_weight_are_those_of_the_cpu(
    own: EightBitFormat, shape: tuple[int, int], values: Callable[[int, int], Tensor]
) -> None:
    weight = values(*shape)
    expected, found = _matrix(weight, own), _matrix(weight.cuda(), own)
    for codes, scales in ((0, 1), (2, 3)):
        _assert_same_bits(found[scales], expected[scales])
        is_finite = expected[scales].isfinite()  # of other rows any code will do
        _assert_same_bits(found[codes][is_finite.cuda()], expected[codes][is_finite])


@pytest.mark.parametrize(("width", "out"), WIDTHS)
def test_int8_products_are_those_of_the_cpu(width: int, out: int) -> None:
    weight, inputs = _random(out, width), _random(max(ROWS), width, seed=1)
    matrix, expected = _matrix(weight.cuda(), INT8), product(inputs, *_matrix(weight, INT8)[:2])
    for rows in ROWS:
        _assert_same_bits(product(inputs[:rows].cuda(), *matrix[:2]), expected[:rows])


@pytest.mark.parametrize(("width", "out"), WIDTHS)
def test_fp8_products_are_as_near_as_tensor_cores_add(width: int, out: int) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    weight, inputs = _random(out, width), _random(max(ROWS), width, seed=1)
    matrix, on_gpu = _matrix(weight, FP8), _matrix(weight.cuda(), FP8)
    exact = product(inputs.float(), *matrix[:2])
    magnitudes = product(inputs.float().abs(), matrix.by_rows.float().abs().to(FP8.codes), matrix.row_scales)
    bound = 2**-8 * exact.abs() + LOST * 2**-13 * magnitudes
    assert bound.mean() < 0.2 * exact.abs().mean()
    for rows in ROWS:
        off = (product(inputs[:rows].cuda(), *on_gpu[:2]).cpu().float() - exact[:rows]).abs()
        assert (off <= bound[:rows]).all(), f"{(off / bound[:rows]).max():.2f} of the bound, {rows} rows"


def test_products_show_values_that_are_not_finite_in_their_rows_and_columns(own: EightBitFormat) -> None:
    weight, inputs = _with_holes(48, 112), _with_holes(32, 112)
    expected = product(inputs, *_matrix(weight, own)[:2]).isnan()
    assert 0 < expected.sum() < expected.numel()
    assert torch.equal(product(inputs.cuda(), *_matrix(weight.cuda(), own)[:2]).cpu().isnan(), expected)


@pytest.mark.parametrize("rows", [13, 4096])
def test_products_repeat_to_the_bit(own: EightBitFormat, rows: int) -> None:
    weight, inputs = _random(4096, 11008).cuda(), _random(rows, 11008, seed=1).cuda()
    first = product(inputs, *_matrix(weight, own)[:2]).cpu()
    for _ in range(5):
        _assert_same_bits(product(inputs, *_matrix(weight, own)[:2]), first)
