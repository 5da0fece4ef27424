"""On a GPU: grouped products and gradients compared with fp64; `gpu_check.sh exact` trains experts."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from mobius.models.grouped_matmul import ExpertKernels, add_weight_gradient, grouped_matmul, grouped_weight_gradient

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
NEAR = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}
"""Of products that are rounded to the format; sums in fp32 are as near in all of them."""
WIDTHS = [(256, 384), (40, 72), (130, 33), (256, 8), (8, 256)]
"""Of whole tiles, of parts of them, of such as no kernel of 16 bytes takes, and of an adapter's factors."""


COUNTS = (10, 0, 150, 3, 129, 128, 0)
"""Rows of each expert; among them none, less than a tile, and more than one."""


class Case:
    """Random rows of both sides, and matrices [experts, in, out]: plain, transposed, an adapter's second factor."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, width: int, out_width: int) -> None:
        generator = torch.Generator().manual_seed(4)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.expert_offsets = torch.tensor(COUNTS).cumsum(0).to(device, torch.int32)
        self.rows, self.gradient = draw(sum(COUNTS), width), draw(sum(COUNTS), out_width)
        plain, turned = draw(len(COUNTS), width, out_width), draw(len(COUNTS), out_width, width).transpose(1, 2)
        self.matrices = plain, turned, draw(out_width, width, len(COUNTS)).permute(2, 1, 0)
        self._edges = list(pairwise([0, *self.expert_offsets.tolist()]))

    def product(self, matrix: Tensor) -> Tensor:
        """Rows times their experts' matrices, in fp64."""
        parts = zip(self._edges, matrix.double(), strict=True)
        return torch.cat([self.rows[start:end].double() @ own for (start, end), own in parts])

    def grouped_weight_gradient(self) -> Tensor:
        """gradient^T rows of each expert, in fp64."""
        return torch.stack([self.gradient[a:b].double().t() @ self.rows[a:b].double() for a, b in self._edges])


def off(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, as a share of the largest entry."""
    return float((actual.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("dtype", NEAR)
def test_products_are_those_of_each_expert(dtype: torch.dtype, widths: tuple[int, int]) -> None:
    case, own = Case(GPU, dtype, width=widths[0], out_width=widths[1]), ExpertKernels()
    for matrix in case.matrices:
        of_triton = own.multiply(case.rows, matrix, case.expert_offsets)
        assert of_triton is not None
        assert off(of_triton, case.product(matrix)) < NEAR[dtype]
        assert off(grouped_matmul(case.rows, matrix, case.expert_offsets), case.product(matrix)) < NEAR[dtype]


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("dtype", NEAR)
def test_factors_are_added_to_the_fp32_sum_in_fp32(dtype: torch.dtype, widths: tuple[int, int]) -> None:
    case = Case(GPU, dtype, width=widths[0], out_width=widths[1])
    total = torch.ones_like(case.grouped_weight_gradient(), dtype=torch.float32)

    assert ExpertKernels().add_factors(total, case.gradient, case.rows, case.expert_offsets)

    assert off(total, case.grouped_weight_gradient() + 1) < NEAR[torch.float32]
    assert (
        off(grouped_weight_gradient(case.gradient, case.rows, case.expert_offsets), case.grouped_weight_gradient())
        < NEAR[dtype]
    )


def test_neither_product_waits_for_the_gpu() -> None:
    case = Case(GPU, torch.bfloat16, width=256, out_width=384)
    total = torch.zeros_like(case.grouped_weight_gradient(), dtype=torch.float32)
    for mode in ("default", "error"):  # the first round compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            grouped_matmul(case.rows, case.matrices[0], case.expert_offsets)
            grouped_matmul(case.gradient, case.matrices[0].transpose(1, 2), case.expert_offsets)
            add_weight_gradient(total, case.gradient, case.rows, case.expert_offsets)
        finally:
            torch.cuda.set_sync_debug_mode("default")
