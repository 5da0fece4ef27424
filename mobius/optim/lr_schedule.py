"""The learning rate of each step: warm-up, then linear, cosine or constant."""

from __future__ import annotations

import math
from collections.abc import Callable

from mobius.config.config import LrSchedulerType, OptimConfig

_DECAYS: dict[LrSchedulerType, Callable[[float], float]] = {
    LrSchedulerType.CONSTANT: lambda progress: 1.0,
    LrSchedulerType.LINEAR: lambda progress: 1.0 - progress,
    LrSchedulerType.COSINE: lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def learning_rate_at(step: int, config: OptimConfig) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    The same values as transformers' get_scheduler: linear warm-up from 0 over `num_warmup_steps`, then decay to 0 at
    `num_iterations`.
    """
    warmup, total = config.num_warmup_steps, config.num_steps
    if step < warmup:
        return config.learning_rate * step / max(1, warmup)
    progress = (step - warmup) / max(1, total - warmup)
    return config.learning_rate * max(0.0, _DECAYS[config.lr_scheduler_type](progress))
