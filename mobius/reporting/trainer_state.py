"""State of a run as transformers' TrainerState has it: where the run is, and the history of what it has shown."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from mobius.config.config import Config
from mobius.errors import CheckpointError, quoted
from mobius.regular_files import parse_json, typed_object
from mobius.reporting.json_lines import as_numbers, json_text

STATE_FILE: Final = "trainer_state.json"
_HISTORY: Final = '"log_history": '
_EVALUATION: Final = '"eval_'
"""Start of each name in an entry of an evaluation."""


class LogHistory:
    """Log history of a run, in order, as lines of JSON: each entry is serialized once, when it is added.

    A week has hundreds of thousands of entries. As objects they take three times the memory (600,000 steps: 960 MiB
    with other data of each step, now 350), and serializing all of them took half a minute at each checkpoint.
    """

    def __init__(self, entries: Iterable[Mapping[str, object]] = ()) -> None:
        self._lines = [json_text(entry) for entry in entries]

    def append(self, entry: Mapping[str, object]) -> None:
        """Add the latest entry."""
        self._lines.append(json_text(entry))

    def copy(self) -> LogHistory:
        """Return an independent copy."""
        other = LogHistory()
        other._lines = [*self._lines]
        return other

    def evaluations(self) -> Iterator[dict[str, Any]]:
        """Entries of evaluations, the latest one first."""
        return (_entry(line) for line in reversed(self._lines) if _EVALUATION in line)

    def to_json(self, before: str = "", tail: str = "") -> str:
        """All entries as a JSON list between two texts, one entry a line, indented as a field of an object."""
        if not self._lines:
            return f"{before}[]{tail}"
        lines = [*self._lines]
        lines[0] = f"{before}[\n    {lines[0]}"
        lines[-1] = f"{lines[-1]}\n  ]{tail}"
        return ",\n    ".join(lines)  # hundreds of MiB after a week: one copy

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(_entry, self._lines)

    def __reversed__(self) -> Iterator[dict[str, Any]]:
        return map(_entry, reversed(self._lines))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LogHistory) and self._lines == other._lines

    __hash__ = None  # type: ignore[assignment]


@dataclass
class TrainerState:
    """Position and log history of a run; it has the fields of transformers' TrainerState, which reads the file.

    Tokens count no padding; `log_history` has raw numbers.
    """

    max_steps: int
    num_train_epochs: int
    logging_steps: int
    train_batch_size: int
    """Rows of a step."""
    global_step: int = 0
    epoch: float = 0.0
    num_input_tokens_seen: int = 0
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    log_history: LogHistory = field(default_factory=LogHistory)
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True

    @classmethod
    def at_start(cls, config: Config) -> TrainerState:
        """The state of a run that has made no step."""
        optim = config.optim
        return cls(
            max_steps=optim.num_steps,
            num_train_epochs=math.ceil(optim.num_train_epochs or 0),  # if not given: the finished ones, rounded up
            logging_steps=config.output.logging_steps,
            train_batch_size=config.pipeline.batch_size,
        )

    @classmethod
    def from_json(cls, text: str, *, path: Path = Path(STATE_FILE)) -> TrainerState:
        """The state that `to_json` gave as `text`; raises CheckpointError, which names `path`, for anything else."""
        found = as_numbers(parse_json(text, path))
        try:
            state = typed_object(cls, found, log_history=list)
        except ValueError as problem:
            raise _no_state(path, f"it {problem}") from None
        for number, entry in enumerate(state.log_history):
            step = entry.get("step") if isinstance(entry, dict) else None
            if type(step) is not int or not 0 <= step <= state.global_step:
                raise _no_state(path, f"entry {number} of log_history is none of a step of the run: {quoted(entry)}")
            if wrong := [name for name, value in entry.items() if isinstance(value, str | list)]:
                raise _no_state(path, f"entry {number} of log_history has {quoted(entry[wrong[0]])} for {wrong[0]}")
        return replace(state, log_history=LogHistory(state.log_history))

    def to_json(self) -> str:
        """JSON that transformers reads; numbers that JSON does not have are words that `float` reads."""
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        state |= {"num_train_epochs": self.num_train_epochs or math.ceil(self.epoch), "log_history": []}
        before, name, tail = json_text(state, indent=2).partition(_HISTORY)
        return self.log_history.to_json(before + name, tail.removeprefix("[]"))

    def snapshot(self) -> TrainerState:
        """The state as it is now, which does not change with the run."""
        return replace(self, log_history=self.log_history.copy())

    def continued(self, config: Config) -> TrainerState:
        """Return the state with the options of the run that resumes from it."""
        options = ("max_steps", "num_train_epochs", "logging_steps", "train_batch_size")
        start = TrainerState.at_start(config)
        return replace(self, **{name: getattr(start, name) for name in options}, log_history=self.log_history.copy())


def _entry(line: str) -> dict[str, Any]:
    entry = as_numbers(json.loads(line))
    assert isinstance(entry, dict)
    return entry


def _no_state(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a state of a run as this version of Mobius writes it: {problem}. Go on from another checkpoint."
    )
