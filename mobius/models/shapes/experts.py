"""Counts experts and their parameters from tensor shapes, for layers with fused expert matrices."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence

from transformers import PretrainedConfig

from mobius.schedule.partition import Experts

_EXPERTS, _SHARED = re.compile(r"(^|\.)experts\."), re.compile(r"(^|\.)shared_experts?\.")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
"""Configuration fields for the number of experts per token, by family."""


def is_expert(name: str) -> bool:
    """Whether the parameter `name` belongs to the routed experts of a layer."""
    return _EXPERTS.search(name) is not None


def count_experts(
    config: PretrainedConfig, layers: Sequence[Mapping[str, tuple[int, ...]]], frozen: Sequence[Collection[str]]
) -> Experts | None:
    """The experts of `layers`, each a map of parameter name to shape; None if there are none.

    `frozen` holds each layer's untrained parameter names. The first dimension of every expert tensor is their number.
    """
    own = [{name: shape for name, shape in shapes.items() if is_expert(name)} for shapes in layers]
    numbers = {shape[0] for shapes in own for shape in shapes.values()}
    if not numbers:
        return None
    assert len(numbers) == 1, numbers
    (number,) = numbers
    num_experts_per_token = next(
        (own_number for name in _PER_TOKEN if (own_number := getattr(config, name, None))), None
    )
    shared = [
        sum(math.prod(shape) for name, shape in shapes.items() if _SHARED.search(name)) // (3 * config.hidden_size)
        for shapes in layers
    ]
    return Experts(
        number=number,
        num_experts_per_token=min(number, int(num_experts_per_token or number)),
        layers=tuple(sum(map(math.prod, shapes.values())) for shapes in own),
        shared_width=max(shared),
        trained=tuple(
            sum(math.prod(shape) for name, shape in shapes.items() if name not in names)
            for shapes, names in zip(own, frozen, strict=True)
        ),
    )
