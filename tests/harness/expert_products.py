"""Products of experts beside the same in fp64, expert by expert, on any device."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

COUNTS = (10, 0, 150, 3, 129, 128, 0)
"""Rows of each expert; among them none, less than a tile, and more than one."""


class Case:
    """Random rows of both sides, and matrices [experts, in, out] of both forms, one of them a transposed view."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, width: int, out_width: int) -> None:
        generator = torch.Generator().manual_seed(4)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.expert_offsets = torch.tensor(COUNTS).cumsum(0).to(device, torch.int32)
        self.rows, self.gradient = draw(sum(COUNTS), width), draw(sum(COUNTS), out_width)
        plain, turned = draw(len(COUNTS), width, out_width), draw(len(COUNTS), out_width, width).transpose(1, 2)
        self.matrices = plain, turned
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
