"""Linear layers with an adapter, as in "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685).

    y = W x + b + scale * B (A x)        A [rank, in], B [out, rank]: trained; W and b: frozen

Names, order of the products and initial values are those of peft, so that files go either way.
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
    """A linear layer whose weight and bias are frozen, with the two factors of what is added to the weight."""

    def __init__(self, linear: nn.Linear, *, rank: int, scale: float) -> None:
        """Take the place of `linear`, on the meta device as it is."""
        options = {"device": "meta", "dtype": linear.weight.dtype}
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, **options)
        self.requires_grad_(False)
        self.lora_A = GradientFactorLinear(linear.in_features, rank, bias=False, **options)
        self.lora_B = GradientFactorLinear(rank, linear.out_features, bias=False, **options)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        # In this order, in which gradients of the input are added up, too.
        output = super().forward(input)
        added: Tensor = self.lora_B(self.lora_A(input))
        return output + added * self.scale


class ParameterSource(Protocol):
    """Source of parameters by name (`weights.WeightSource`)."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Value of parameter `name`, which has `shape` in the model."""


def adapted_linear(name: str) -> str | None:
    """Name of the linear layer that the parameter `name` is an adapter's factor of; None for other parameters."""
    match = _ADAPTER.fullmatch(name)
    return None if match is None else match["linear"]


class InitialAdapterWeights:
    """Initial values: A uniform in a linear layer's own bounds, B zero; all other parameters are from elsewhere.

    A is drawn by its name: it does not depend on how the model is cut, or on the number of ranks.
    """

    def __init__(self, base: ParameterSource, *, seed: int) -> None:
        self._base, self._seed = base, seed

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Value of parameter `name`; an adapter's is in fp32."""
        if adapted_linear(name) is None:
            return self._base.read(name, shape)
        values = torch.zeros(shape)
        if name.endswith(f".{LORA_A}.weight"):
            # One hash of both: the CPU generator looks at the low 32 bits of a seed only.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        return values
