"""How ranks set something up together: step by step, and what fails on one of them is called off on all.

By what way they tell each other (a store, a process group) is not its business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Meeting(Protocol):
    """How ranks tell each other what they found."""

    rank: int
    num_ranks: int

    def gather(self, value: object) -> list[Any]:
        """Every rank's value (it is pickled) in the order of ranks; blocks until all have given theirs."""


@dataclass(frozen=True)
class Outcome:
    """What steps that were taken together came to, the same on all ranks."""

    answers: list[Any]
    """What the last step gave, in the order of ranks."""
    problem: str | None = None
    """Of the first rank on which a step failed; none after it was taken."""


def take_together(meeting: Meeting, steps: Sequence[Callable[[list[Any]], object]]) -> Outcome:
    """Take each of `steps` on all ranks before the next one; collective.

    A step is given what the one before it gave on every rank. OSError and RuntimeError are problems, which end it
    on all ranks; anything else is raised.
    """
    answers: list[Any] = []
    for step in steps:
        given, problem = None, None
        try:
            given = step(answers)
        except (OSError, RuntimeError) as error:
            lines = str(error).strip().splitlines()
            problem = f"rank {meeting.rank}: {lines[0] if lines else type(error).__name__}"
        found = meeting.gather((problem, given))
        problems = [problem for problem, _ in found if problem is not None]
        if problems:
            return Outcome([], problems[0])
        answers = [given for _, given in found]
    return Outcome(answers)
