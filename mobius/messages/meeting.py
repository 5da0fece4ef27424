"""How ranks set something up together: step by step, and what fails on one of them is called off on all.

By what way they tell each other (a store, a process group) is not its business; what they tell is JSON in all of them.
A store listens on the network, so what comes from it is read as data: nothing in it is ever run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from mobius.errors import TransportError, first_line

Told: TypeAlias = "bool | int | float | str | Sequence[Told] | Mapping[str, Told] | None"
"""What a rank may tell: JSON's values. Numbers are finite, names are texts, and a tuple arrives as a list; bytes go as
the text `bytes.hex()` gives. Who gathers anything else makes it of these, and reads it with `read_told`."""

MOST_BYTES = 2**24
"""Of one rank's text: far more than is ever told, far less than memory."""

_Read = TypeVar("_Read")


class Meeting(Protocol):
    """How ranks tell each other what they found."""

    rank: int
    num_ranks: int

    def gather(self, value: Told) -> list[Any]:
        """Every rank's value, as it is after JSON, in the order of ranks; blocks until all have given theirs.

        Raises TransportError if a rank is gone, or what it told is no JSON.
        """


def told_text(value: Told) -> str:
    """The JSON of a value, in ASCII. Raises TypeError or ValueError for what is none of `Told`: a bug of the caller."""
    _check_names(value)
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _check_names(value: Told) -> None:
    """Raise TypeError for names that are no texts, which JSON would change without a word."""
    if isinstance(value, Mapping):
        if wrong := [name for name in value if not isinstance(name, str)]:
            raise TypeError(f"{wrong[0]!r} is no text, and only texts are names between ranks")
        for part in value.values():
            _check_names(part)
    elif isinstance(value, list | tuple):
        for part in value:
            _check_names(part)


def told_value(text: bytes, *, by: int) -> Any:
    """The value that rank `by` told in `text`; raises TransportError if it is no JSON."""
    try:
        return json.loads(text.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise not_told(by, error) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number that ranks tell each other")


def not_told(by: int, error: Exception) -> TransportError:
    """What is raised where rank `by` told something else than is expected of it."""
    return TransportError(
        f"what rank {by} told the others cannot be read ({first_line(error)}). All ranks must run the same version of "
        "Mobius, and nothing else may use their --master_port."
    )


def read_told(told: Any, read: Callable[[Any], _Read], *, by: int) -> _Read:
    """`read(told)`, of what rank `by` told; raises TransportError where that is not of the form that `read` expects."""
    try:
        return read(told)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise not_told(by, error) from error


def read_all(answers: Sequence[Any], read: Callable[[Any], _Read]) -> list[_Read]:
    """`read_told` of what each rank told."""
    return [read_told(told, read, by=rank) for rank, told in enumerate(answers)]


def read_number(told: Any) -> int:
    """A whole number of at least 0; raises TypeError or ValueError for anything else."""
    if type(told) is not int:
        raise TypeError(f"{type(told).__name__} instead of a whole number")
    if told < 0:
        raise ValueError(f"{told} is below 0")
    return told


def read_numbers(told: Any) -> tuple[int, ...]:
    """Several of them, of a list."""
    if type(told) is not list:
        raise TypeError(f"{type(told).__name__} instead of a list")
    return tuple(read_number(each) for each in told)


@dataclass(frozen=True)
class Outcome:
    """What steps that were taken together came to, the same on all ranks."""

    answers: list[Any]
    """What the last step gave, in the order of ranks."""
    problem: str | None = None
    """Of the first rank on which a step failed; none after it was taken."""


def take_together(meeting: Meeting, steps: Sequence[Callable[[list[Any]], Told]]) -> Outcome:
    """Take each of `steps` on all ranks before the next one; collective.

    A step is given what the one before it gave on every rank, as it is after JSON. OSError and RuntimeError are
    problems, which end it on all ranks; anything else is raised.
    """
    answers: list[Any] = []
    for step in steps:
        given: Told = None
        problem: str | None = None
        try:
            given = step(answers)
        except (OSError, RuntimeError) as error:
            lines = str(error).strip().splitlines()
            problem = f"rank {meeting.rank}: {lines[0] if lines else type(error).__name__}"
        found = meeting.gather([problem, given])
        read = read_all(found, _read_step)
        problems = [problem for problem, _ in read if problem is not None]
        if problems:
            return Outcome([], problems[0])
        answers = [given for _, given in read]
    return Outcome(answers)


def _read_step(told: Any) -> tuple[str | None, Any]:
    problem, given = told
    if not isinstance(problem, str | None):
        raise TypeError(f"{type(problem).__name__} instead of a text")
    return problem, given
