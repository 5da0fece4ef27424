"""Learning-rate schedules and the arguments of each: names, bounds, and limits set by the run's length.

Schedules and arguments have transformers' names (`lr_scheduler_type`, `lr_scheduler_kwargs`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, Final

from mobius.config.options import COUNT, DECAY_RATE, NON_NEGATIVE, Bounds, Option
from mobius.errors import listed, quoted


class LrSchedulerType(StrEnum):
    """Learning-rate schedule."""

    LINEAR = "linear"
    COSINE = "cosine"
    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    POLYNOMIAL = "polynomial"
    INVERSE_SQRT = "inverse_sqrt"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"


ArgumentValue = int | float | str

_CYCLES: Final = Option(None, Bounds(above=0, ceiling=1001), value_type=float)
_SHARE: Final = Option(None, DECAY_RATE, value_type=float)
_RATE: Final = Option(None, NON_NEGATIVE, value_type=float)
_STEPS: Final = Option(None, COUNT, value_type=int)
_Shape = StrEnum("_Shape", {"LINEAR": "linear", "COSINE": "cosine", "SQRT": "1-sqrt"})
_SHAPE: Final = Option(None, value_type=_Shape)

SCHEDULE_ARGUMENTS: Final[Mapping[LrSchedulerType, Mapping[str, Option]]] = {
    LrSchedulerType.LINEAR: {},
    LrSchedulerType.COSINE: {"num_cycles": _CYCLES},
    LrSchedulerType.CONSTANT: {},
    LrSchedulerType.CONSTANT_WITH_WARMUP: {},
    LrSchedulerType.COSINE_WITH_MIN_LR: {"min_lr": _RATE, "min_lr_rate": _SHARE, "num_cycles": _CYCLES},
    LrSchedulerType.COSINE_WITH_RESTARTS: {"num_cycles": Option(None, Bounds(minimum=1, ceiling=1001), value_type=int)},
    LrSchedulerType.POLYNOMIAL: {"lr_end": _RATE, "power": _CYCLES},
    LrSchedulerType.INVERSE_SQRT: {"timescale": _STEPS},
    LrSchedulerType.WARMUP_STABLE_DECAY: {
        "num_decay_steps": _STEPS,
        "warmup_type": _SHAPE,
        "decay_type": _SHAPE,
        "min_lr_ratio": _SHARE,
        "num_cycles": _CYCLES,
    },
}
"""Arguments of each schedule. The number of stable steps follows from the number of decay steps."""

_NEEDED: Final[Mapping[LrSchedulerType, tuple[Sequence[str], str]]] = {
    LrSchedulerType.COSINE_WITH_MIN_LR: (("min_lr", "min_lr_rate"), "min_lr=1e-6"),
    LrSchedulerType.WARMUP_STABLE_DECAY: (("num_decay_steps",), "num_decay_steps=100"),
}
"""Arguments of which a schedule needs exactly one, and an example."""
_POLYNOMIAL_END: Final = 1e-7
"""Default of `lr_end`, as in transformers."""


def read_arguments(kind: LrSchedulerType, given: Sequence[tuple[str, str]]) -> dict[str, ArgumentValue]:
    """Return the valid arguments of `kind` in `given`."""
    known, values = SCHEDULE_ARGUMENTS[kind], dict[str, ArgumentValue]()
    for name, text in given:
        with suppress(KeyError, ValueError):
            value: Any = known[name].read(text)
            bounds = known[name].bounds
            if bounds is None or bounds.allow(value):
                values[name] = value
    return values


def find_scheduler_conflicts(
    kind: LrSchedulerType, given: Sequence[tuple[str, str]], *, learning_rate: float
) -> Iterator[tuple[str, str]]:
    """Yield, for each violated rule about arguments, the names of its options and the error line."""
    known, values, both = SCHEDULE_ARGUMENTS[kind], read_arguments(kind, given), "lr_scheduler_type lr_scheduler_kwargs"
    names = [name for name, _ in given]
    for name, text in given:
        if name not in known:
            takers = listed(other for other, arguments in SCHEDULE_ARGUMENTS.items() if name in arguments)
            detail = f"this schedule takes {listed(known)}; remove the argument, or use one of {takers}"
            line = f"{quoted(name)} has no effect with `--lr_scheduler_type {kind}`; {detail}"
            yield both, f"`--lr_scheduler_kwargs` {line}"
        elif name not in values:
            yield both, f"`--lr_scheduler_kwargs` {name} is {quoted(text)}; it must be {known[name].expectation}"
    needed, example = _NEEDED.get(kind, ((), ""))
    if needed and sum(name in names for name in needed) != 1:
        change = f"give --lr_scheduler_kwargs {example}, for example"
        yield both, f"`--lr_scheduler_type {kind}` needs one of {', '.join(needed)}; {change}"
    if kind is LrSchedulerType.POLYNOMIAL and "lr_end" not in names:
        values["lr_end"] = _POLYNOMIAL_END
    for name in ("min_lr", "lr_end"):
        end = values.get(name, 0.0)
        if isinstance(end, float) and end >= learning_rate:
            detail = f"is {end:g}, not below `--learning_rate` {learning_rate:g}; lower it, or raise the learning rate"
            yield f"{both} learning_rate", f"`--lr_scheduler_kwargs` {name} {detail}"


def find_decay_conflict(values: Mapping[str, ArgumentValue], *, num_steps: int, num_warmup_steps: int) -> str | None:
    """Return the error line if the decay does not fit after the warm-up in a run of `num_steps`, else None."""
    decay = values.get("num_decay_steps")
    most = num_steps - max(0, num_warmup_steps - 1)  # a decay can begin in the warm-up's last step, at the peak
    if not isinstance(decay, int) or decay <= most:
        return None
    room = f"of {num_steps} steps with {num_warmup_steps} of warm-up (--warmup_steps) it can be at most {most}"
    return f"`--lr_scheduler_kwargs` num_decay_steps is {decay}; {room}"
