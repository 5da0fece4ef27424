"""State of a run in the format of transformers' TrainerState: its position, and the history of its shown numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from mobius.config.config import Config, steps_between
from mobius.errors import CheckpointError, quoted
from mobius.files.regular_files import parse_json, typed_object
from mobius.reporting.json_lines import as_numbers, json_text

STATE_FILE: Final = "trainer_state.json"
_HISTORY: Final = '"log_history": '
_EVALUATION: Final = '"eval_'
"""Prefix of each name in the entry of an evaluation."""


@dataclass
class TrainerState:
    """Position and log history of a run, with the fields of transformers' TrainerState, which can read the file.

    Padding does not count as tokens.
    """

    max_steps: int
    num_train_epochs: int
    logging_steps: int
    train_batch_size: int
    """Rows of a step."""
    eval_steps: int
    save_steps: int
    global_step: int = 0
    epoch: float = 0.0
    num_input_tokens_seen: int = 0
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    log_history: list[str] = field(default_factory=list)
    """Entries in order. Each is turned into JSON when it is added, because a week has hundreds of thousands of entries.
    Objects took three times the memory (600,000 steps with other data of each step: 960 MiB as objects, 350 MiB as
    JSON), and each checkpoint took half a minute to serialize them."""
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True

    @classmethod
    def at_start(cls, config: Config) -> TrainerState:
        """State of a run that has done no step."""
        optim = config.optim
        return cls(
            max_steps=optim.num_steps,
            # 0 without num_train_epochs: `to_json` then writes the epochs so far, rounded up
            num_train_epochs=math.ceil(optim.num_train_epochs or 0),
            logging_steps=config.output.logging_steps,
            train_batch_size=config.pipeline.batch_size,
            eval_steps=steps_between(config.evaluation.eval_steps, optim.num_steps),
            save_steps=steps_between(config.saving.save_steps, optim.num_steps),
        )

    @classmethod
    def from_json(cls, text: str, *, path: Path = Path(STATE_FILE)) -> TrainerState:
        """Read a state from the `text` of `to_json`; raises CheckpointError, which names `path`, for other text."""
        found = as_numbers(parse_json(text, path))
        try:
            state = typed_object(cls, found, log_history=list)
        except ValueError as problem:
            raise _no_state(path, f"it {problem}") from None
        entries: list[Any] = state.log_history
        for number, entry in enumerate(entries):
            step = entry.get("step") if isinstance(entry, dict) else None
            if type(step) is not int or not 0 <= step <= state.global_step:
                raise _no_state(path, f"entry {number} of log_history belongs to no step of the run: {quoted(entry)}")
            if wrong := [name for name, value in entry.items() if isinstance(value, str | list)]:
                raise _no_state(path, f"entry {number} of log_history has {quoted(entry[wrong[0]])} for {wrong[0]}")
        return replace(state, log_history=[json_text(entry) for entry in entries])

    def add(self, entry: Mapping[str, object]) -> None:
        """Append an entry to the history; its numbers need not be finite."""
        self.log_history.append(json_text(entry))

    def entries(self) -> Iterator[dict[str, Any]]:
        """Entries of the history, in order."""
        return map(_entry, self.log_history)

    def evaluations(self) -> Iterator[dict[str, Any]]:
        """Entries of evaluations, the latest first."""
        return (_entry(line) for line in reversed(self.log_history) if _EVALUATION in line)

    def set_best(self, metric: float | None, step: int | None = None, checkpoint: Path | None = None) -> None:
        """Record that the best evaluation so far had `metric`, after `step`; None: there is no comparable evaluation.

        `checkpoint` has the weights of that step; None if they were not saved.
        """
        self.best_metric, self.best_global_step = metric, step
        self.best_model_checkpoint = None if checkpoint is None else str(checkpoint)

    def to_json(self) -> str:
        """Return JSON that transformers reads; numbers that JSON lacks become strings that `float` reads."""
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        state |= {"num_train_epochs": self.num_train_epochs or math.ceil(self.epoch), "log_history": []}
        text = json_text(state, indent=2)
        if not self.log_history:
            return text
        before, name, tail = text.partition(_HISTORY)
        history = ",\n    ".join(self.log_history)
        return "".join((before, name, "[\n    ", history, "\n  ]", tail.removeprefix("[]")))

    def snapshot(self) -> TrainerState:
        """Return a copy of the current state. The run does not change the copy."""
        return replace(self, log_history=[*self.log_history])

    def continued(self, config: Config) -> TrainerState:
        """Return the state with the options of the run that resumes from it."""
        options = ("max_steps", "num_train_epochs", "logging_steps", "train_batch_size", "eval_steps", "save_steps")
        start = TrainerState.at_start(config)
        return replace(self.snapshot(), **{name: getattr(start, name) for name in options})


def _entry(line: str) -> dict[str, Any]:
    entry = as_numbers(json.loads(line))
    assert isinstance(entry, dict)
    return entry


def _no_state(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a state that this version of Mobius can read: {problem}. Resume from another checkpoint."
    )
