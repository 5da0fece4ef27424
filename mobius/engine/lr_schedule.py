"""Learning rate of each step: transformers' curve, shifted so that the first step does not have a rate of zero."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch
from transformers import get_scheduler

from mobius.config.config import OptimConfig
from mobius.config.lr_schedules import LrSchedulerType


def learning_rate_at(step: int, config: OptimConfig) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    transformers starts a warm-up at zero; here the first of n warm-up steps has 1/n of the peak. So with a warm-up, the
    result is the rate that transformers' get_scheduler gives to step + 1 in a run with one more step. Without a
    warm-up, it is the rate of `step` in a run with as many steps.
    """
    assert 0 <= step < config.num_steps, f"step {step} of {config.num_steps}"
    shift = _shift(config)
    return config.learning_rate * _curve(config)(step + shift)


def _shift(config: OptimConfig) -> int:
    return min(1, config.num_warmup_steps)


@functools.lru_cache(maxsize=8)
def _curve(config: OptimConfig) -> Callable[[int], float]:
    """Return the function from a step of transformers to the factor by which the peak is multiplied."""
    kind = config.lr_scheduler_type
    # Both names of a constant rate allow a warm-up here; in transformers `constant` ignores it.
    name = LrSchedulerType.CONSTANT_WITH_WARMUP if kind is LrSchedulerType.CONSTANT else kind
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    scheduler = get_scheduler(
        name.value,
        optimizer,
        num_warmup_steps=config.num_warmup_steps,
        num_training_steps=config.num_steps + _shift(config),
        scheduler_specific_kwargs=config.schedule_arguments,
    )
    (factor,) = scheduler.lr_lambdas
    return cast(Callable[[int], float], factor)
