"""Learning rates are transformers' own curve, from the first step on that has a rate above zero."""

import inspect
from collections.abc import Mapping

import pytest
import torch
from transformers import get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from mobius.config.config import Config, OptimConfig
from mobius.config.lr_schedules import SCHEDULE_ARGUMENTS, LrSchedulerType
from mobius.config.validation import find_problems
from mobius.engine.lr_schedule import learning_rate_at

PEAK = 3e-4
ARGUMENTS: dict[LrSchedulerType, list[dict[str, str]]] = {
    LrSchedulerType.COSINE: [{}, {"num_cycles": "0.4"}],
    LrSchedulerType.COSINE_WITH_MIN_LR: [{"min_lr": "1e-5"}, {"min_lr_rate": "0.1"}],
    LrSchedulerType.COSINE_WITH_RESTARTS: [{}, {"num_cycles": "3"}],
    LrSchedulerType.POLYNOMIAL: [{}, {"power": "2", "lr_end": "1e-6"}],
    LrSchedulerType.INVERSE_SQRT: [{}, {"timescale": "7"}],
    LrSchedulerType.WARMUP_STABLE_DECAY: [
        {"num_decay_steps": "1"},
        {"num_decay_steps": "1", "decay_type": "1-sqrt", "warmup_type": "cosine", "min_lr_ratio": "0.2"},
    ],
}
CASES = [(kind, arguments) for kind in LrSchedulerType for arguments in ARGUMENTS.get(kind, [{}])]


def optim(kind: LrSchedulerType, arguments: dict[str, str], *, num_steps: int, num_warmup_steps: int) -> OptimConfig:
    return OptimConfig(
        learning_rate=PEAK,
        lr_scheduler_type=kind,
        lr_scheduler_kwargs=tuple(arguments.items()) or None,
        num_iterations=num_steps,
        warmup_steps=num_warmup_steps,
    )


def rates_of_transformers(
    name: str, arguments: Mapping[str, object], *, num_steps: int, num_warmup_steps: int
) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps, num_steps, scheduler_specific_kwargs=dict(arguments))
    rates = []
    for _ in range(num_steps):
        rates.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(("kind", "arguments"), CASES)
@pytest.mark.parametrize("num_steps", [1, 2, 10, 37])
def test_rates_are_those_of_one_step_more_in_transformers_without_its_first(
    kind: LrSchedulerType, arguments: dict[str, str], num_steps: int
) -> None:
    for num_warmup_steps in sorted({0, 1, num_steps // 2, num_steps}):
        config = optim(kind, arguments, num_steps=num_steps, num_warmup_steps=num_warmup_steps)
        name = "constant_with_warmup" if kind is LrSchedulerType.CONSTANT else kind.value
        further = min(1, num_warmup_steps)
        expected = rates_of_transformers(
            name, config.schedule_arguments, num_steps=num_steps + further, num_warmup_steps=num_warmup_steps
        )

        rates = [learning_rate_at(step, config) for step in range(num_steps)]

        assert not find_problems(Config(optim=config))
        assert rates == expected[further:], "the same bits"
        assert rates[0] > 0
        assert rates[-1] > 0
        assert max(rates) <= PEAK


@pytest.mark.parametrize(("kind", "arguments"), [case for case in CASES if "warmup_type" not in case[1]])
def test_a_warm_up_of_n_steps_begins_at_one_nth_of_the_peak(kind: LrSchedulerType, arguments: dict[str, str]) -> None:
    config = optim(kind, arguments, num_steps=40, num_warmup_steps=4)
    rates = [learning_rate_at(step, config) for step in range(4)]
    assert rates == pytest.approx([PEAK / 4, PEAK / 2, PEAK * 3 / 4, PEAK])


def test_the_only_step_of_a_run_has_the_peak_rate() -> None:
    assert learning_rate_at(0, OptimConfig(num_iterations=1, learning_rate=PEAK)) == PEAK


def test_a_share_of_the_steps_as_warm_up_is_rounded_up() -> None:
    config = OptimConfig(
        learning_rate=1.0, num_iterations=10, warmup_steps=0.11, lr_scheduler_type=LrSchedulerType.LINEAR
    )

    assert [learning_rate_at(step, config) for step in range(4)] == pytest.approx([0.5, 1, 8 / 9, 7 / 9])


@pytest.mark.parametrize("kind", LrSchedulerType)
def test_arguments_are_those_that_transformers_takes(kind: LrSchedulerType) -> None:
    """Except for steps that follow from others, and those of the optimizer and the run."""
    taken = set(inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[kind.value]).parameters)
    given = {"optimizer", "num_warmup_steps", "num_training_steps", "num_stable_steps", "last_epoch"}
    assert set(SCHEDULE_ARGUMENTS[kind]) == taken - given
