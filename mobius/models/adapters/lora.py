"""Linear layers with an adapter, as in "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685).

    y = W x + b + scale * B (A x)        A [rank, in], B [out, rank]: trained; W and b: frozen

Names, order of products and initial values equal peft's, so that adapter files are interchangeable.
"""

from __future__ import annotations

import math
import re
import zlib
from typing import Protocol

import torch
from torch import Tensor, nn

from mobius.models.linear import GradientFactorLinear

LORA_A, LORA_B = "lora_A", "lora_B"
_ADAPTER = re.compile(rf"(?P<linear>.+)\.(?P<factor>{LORA_A}|{LORA_B})\.weight")


class LoraLinear(GradientFactorLinear):
    """A linear layer with frozen weight and bias, and the two trained factors of the weight's update."""

    def __init__(self, linear: nn.Linear, *, rank: int, scale: float) -> None:
        """Create the replacement of `linear` on the meta device."""
        options = {"device": "meta", "dtype": linear.weight.dtype}
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, **options)
        self.requires_grad_(False)
        self.lora_A = GradientFactorLinear(linear.in_features, rank, bias=False, **options)
        self.lora_B = GradientFactorLinear(rank, linear.out_features, bias=False, **options)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        # The order fixes the order in which input gradients are summed, too.
        output = super().forward(input)
        added: Tensor = self.lora_B(self.lora_A(input))
        return output + added * self.scale


class ParameterSource(Protocol):
    """Source of parameters by name, like `weights.WeightSource`."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Value of parameter `name`, of `shape`."""


def adapted_linear(name: str) -> str | None:
    """Name of the linear layer that `name` is an adapter factor of; None for other parameters."""
    match = _ADAPTER.fullmatch(name)
    return None if match is None else match["linear"]


class InitialAdapterWeights:
    """Initial values of adapters: A uniform in the bounds of a linear layer, B zero; `base` has all other parameters.

    A is seeded by its name, so values depend neither on the partition nor on the number of ranks.
    """

    def __init__(self, base: ParameterSource, *, seed: int) -> None:
        self._base, self._seed = base, seed

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Value of parameter `name`; fp32 for an adapter's."""
        if adapted_linear(name) is None:
            return self._base.read(name, shape)
        values = torch.zeros(shape)
        if name.endswith(f".{LORA_A}.weight"):
            # One hash of seed and name: the CPU generator uses only the low 32 bits of a seed.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        return values
