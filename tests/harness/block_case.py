"""A block of a model with weights and inputs, run in each of the ways that a stage runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mobius.models.block_autograd import backward, recomputed_backward, run_with_graph, run_without_graph
from mobius.models.blocks import Block
from mobius.schedule.plan import RecomputeLevel


@dataclass
class BlockCase:
    """A block with something to run it on."""

    block: Block
    weights: dict[str, Tensor]
    hidden: Tensor
    arguments: dict[str, Any]
    gradient: Tensor

    def kept(self, level: RecomputeLevel = RecomputeLevel.NONE) -> list[Tensor]:
        """Output, gradients of the inputs and of every parameter as a run makes them that kept the activations."""
        sums = self.sums()
        graph = run_with_graph(self.block, self.weights, self.hidden, self.arguments, level)
        return [graph.output.detach(), backward(self.block, graph, sums, self.gradient), *sums.values()]

    def by_autograd(self) -> list[Tensor]:
        """The same without graphs of our own."""
        return replace(self, block=replace(self.block, compiled=None, graphs=None)).kept()

    def forward(self) -> Tensor:
        """The output as a run makes it that keeps nothing."""
        return run_without_graph(self.block, self.weights, self.hidden, self.arguments)

    def recomputed(self) -> list[Tensor]:
        """The gradients as a run makes them that kept nothing."""
        sums = self.sums()
        given = self.block, self.weights, self.hidden, self.arguments, sums, self.gradient
        return [recomputed_backward(*given), *sums.values()]

    def sums(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(weight) for name, weight in self.weights.items()}


def assert_near(actual: Sequence[Tensor], expected: Sequence[Tensor], *, share: float) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert torch.allclose(one, other, rtol=share, atol=share * float(other.abs().max()))
