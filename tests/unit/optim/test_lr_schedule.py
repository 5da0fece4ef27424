"""The learning rate of every step is the one that transformers' scheduler of the same name gives."""

import pytest
import torch
from transformers import get_scheduler

from mobius.config.config import LrSchedulerType, OptimConfig
from mobius.optim.lr_schedule import learning_rate_at

NAMES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


def rates_of_transformers(name: str, num_steps: int, num_warmup_steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=num_warmup_steps, num_training_steps=num_steps)
    rates = []
    for _ in range(num_steps):
        rates.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("kind", LrSchedulerType)
@pytest.mark.parametrize("num_steps", [1, 2, 10, 37])
@pytest.mark.parametrize("num_warmup_steps", [0, 1, 4, 10, 50])
def test_every_step_has_the_rate_of_transformers(kind: LrSchedulerType, num_steps: int, num_warmup_steps: int) -> None:
    config = OptimConfig(
        learning_rate=3e-4, lr_scheduler_type=kind, num_iterations=num_steps, warmup_steps=num_warmup_steps
    )

    rates = [learning_rate_at(step, config) for step in range(num_steps)]

    expected = rates_of_transformers(NAMES[kind.value], num_steps, num_warmup_steps)
    assert rates == pytest.approx(expected, rel=1e-9, abs=1e-18)


def test_a_share_of_the_steps_as_warm_up_is_rounded_up() -> None:
    config = OptimConfig(
        learning_rate=1.0, num_iterations=10, warmup_steps=0.11, lr_scheduler_type=LrSchedulerType.LINEAR
    )

    assert [learning_rate_at(step, config) for step in range(4)] == pytest.approx([0, 0.5, 1, 7 / 8])


def test_after_the_last_step_the_rate_stays_at_zero() -> None:
    config = OptimConfig(num_iterations=5, warmup_steps=0, lr_scheduler_type=LrSchedulerType.LINEAR)

    assert [learning_rate_at(step, config) for step in (5, 6, 50)] == [0.0, 0.0, 0.0]
