"""Exceptions that a user sees as one message without a traceback, and helpers for messages; bugs keep a traceback.

Exit codes of a run: 0 everything is saved; 1 an error of this tree, or a bug of Mobius; 2 an invalid option; 3 nothing
to save; 75 the run stalled (watchdog.py); 130 Ctrl-C or SIGTERM (signal_handling.py).
"""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Final, Self

_SHOWN: Final = 60
"""Maximum characters of a quotation, enough for usual paths and names."""


class MobiusError(Exception):
    """Base of every error whose message is written for the user: what was given, what is allowed, what to change."""

    exit_code: ClassVar[int] = 1
    advice: tuple[str, ...] = ()
    """Options, as typed, that the message suggests; any one of them suffices."""


class Problem(str):
    """A line about options, with `advice` as in MobiusError."""

    advice: tuple[str, ...]

    def __new__(cls, text: str, advice: Iterable[str] = ()) -> Self:
        """Return the text with its advice."""
        own = super().__new__(cls, text)
        own.advice = tuple(advice)
        return own

    @classmethod
    def of(cls, reason: str, changes: Mapping[str, Sequence[object]], *, more: str = "") -> Self:
        """Return a line that ends with options, the values to use for them, and `more` advice."""
        ways = ", or ".join(f"--{name} {' or '.join(map(str, values))}" for name, values in changes.items())
        advice = (f"--{name} {value}" for name, values in changes.items() for value in values)
        return cls(f"{reason}; use {ways}{more}", advice)


class ConfigError(MobiusError):
    """One or more problems of the user's options: each of `problems` is a line of the message, `hint` its last line."""

    exit_code: ClassVar[int] = 2

    def __init__(self, *problems: str, hint: str | None = None) -> None:
        self.problems = problems
        self.advice = tuple(advice for each in problems if isinstance(each, Problem) for advice in each.advice)
        super().__init__("\n".join(problems if hint is None else (*problems, hint)))


class PlanError(MobiusError):
    """The model cannot be partitioned or placed under the given limits."""


class ScheduleError(MobiusError):
    """An action list breaks a rule of the schedule: completeness, residency, slot budget or freedom from deadlock."""


class RemediableError(MobiusError):
    """Memory does not suffice; the message ends with `remedies`."""

    remedies: Mapping[str, str] = {}
    """Option as typed, which alone makes the run fit -> memory and speed with this option."""


class HostMemoryError(RemediableError):
    """CPU memory does not suffice; the message has the arithmetic."""


class StateFileError(MobiusError):
    """Optimizer states cannot be kept on a disk; the message names the folder."""


class LimitError(MobiusError):
    """A limit that the system sets for a process is too low; the message names the limit and how to raise it."""


class GpuMemoryError(RemediableError):
    """GPU memory does not suffice, or a requested GPU does not exist."""


class DataError(MobiusError):
    """A dataset cannot be found, read or used."""


class CheckpointError(MobiusError):
    """Weights or results cannot be read or written."""


class RunFailedError(MobiusError):
    """A run started from Python ended without reporting an error, for example because the system killed it."""


class TransportError(MobiusError):
    """A neighbouring rank is gone or did not answer in time."""


class NonFiniteLossError(MobiusError):
    """Training stopped because the gradients of too many steps in a row were not finite."""


class NoResultError(MobiusError):
    """Training ended without a step that changed weights, or with weights that are not finite; nothing is saved."""

    exit_code: ClassVar[int] = 3


def error_class(name: str) -> type[MobiusError] | None:
    """Class of this tree with the given name; None for any other error, which is a bug."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, MobiusError) else None


def reason_of(error: BaseException) -> str:
    """The system's text for an error, without number and path; without such a text, the first line of its message."""
    return getattr(error, "strerror", None) or first_line(error)


def first_line(error: BaseException) -> str:
    """First line of a message, with the next line if it ends with a colon; the class name if the message is empty."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def excerpt(text: str, max_length: int = _SHOWN) -> str:
    """`text`, with its middle replaced by three dots if it is longer than `max_length`."""
    tail = max_length // 3
    return text if len(text) <= max_length else f"{text[: max_length - tail]}...{text[len(text) - tail :]}"


def quoted(value: object, max_length: int = _SHOWN) -> str:
    """Short `repr(value)`; visits only the parts of the value that are shown."""
    if isinstance(value, str) and len(value) <= max_length:
        return repr(value)
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = shortener.maxlong = max_length
    return excerpt(shortener.repr(value), max_length + 2)


def listed(names: Iterable[str]) -> str:
    """Names joined with commas, each shortened, at most as many as fit in a line; `(none)` if there are none."""
    every = list(names)
    more = [f"and {len(every) - 12} more"] if len(every) > 12 else []
    return ", ".join([*map(excerpt, every[:12]), *more]) or "(none)"
