"""State of a run as transformers' TrainerState has it: where the run is, and the history of what it has shown."""

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
"""Start of each name in an entry of an evaluation."""


@dataclass
class TrainerState:
    """Position and log history of a run; it has the fields of transformers' TrainerState, which reads the file.

    Tokens count no padding.
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
    """Entries in order, each as JSON, made when it is added: a week has hundreds of thousands. As objects they take
    three times the memory (600,000 steps: 960 MiB with other data of each step, now 350), and serializing all of them
    took half a minute at each checkpoint."""
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
            eval_steps=steps_between(config.evaluation.eval_steps, optim.num_steps),
            save_steps=steps_between(config.saving.save_steps, optim.num_steps),
        )

    @classmethod
    def from_json(cls, text: str, *, path: Path = Path(STATE_FILE)) -> TrainerState:
        """The state that `to_json` gave as `text`; raises CheckpointError, which names `path`, for anything else."""
        found = as_numbers(parse_json(text, path))
        try:
            state = typed_object(cls, found, log_history=list)
        except ValueError as problem:
            raise _no_state(path, f"it {problem}") from None
        entries: list[Any] = state.log_history
        for number, entry in enumerate(entries):
            step = entry.get("step") if isinstance(entry, dict) else None
            if type(step) is not int or not 0 <= step <= state.global_step:
                raise _no_state(path, f"entry {number} of log_history is none of a step of the run: {quoted(entry)}")
            if wrong := [name for name, value in entry.items() if isinstance(value, str | list)]:
                raise _no_state(path, f"entry {number} of log_history has {quoted(entry[wrong[0]])} for {wrong[0]}")
        return replace(state, log_history=[json_text(entry) for entry in entries])

    def add(self, entry: Mapping[str, object]) -> None:
        """Add the latest entry of the history, with raw numbers."""
        self.log_history.append(json_text(entry))

    def entries(self) -> Iterator[dict[str, Any]]:
        """Entries of the history."""
        return map(_entry, self.log_history)

    def evaluations(self) -> Iterator[dict[str, Any]]:
        """Entries of evaluations, the latest one first."""
        return (_entry(line) for line in reversed(self.log_history) if _EVALUATION in line)

    def set_best(self, metric: float | None, step: int | None = None, checkpoint: Path | None = None) -> None:
        """Record that the best evaluation so far was `metric`, after `step`; None: later ones do not compare with it.

        `checkpoint` has the weights of that step; None if they were not saved.
        """
        self.best_metric, self.best_global_step = metric, step
        self.best_model_checkpoint = None if checkpoint is None else str(checkpoint)

    def to_json(self) -> str:
        """JSON that transformers reads; numbers that JSON does not have are words that `float` reads."""
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        state |= {"num_train_epochs": self.num_train_epochs or math.ceil(self.epoch), "log_history": []}
        text = json_text(state, indent=2)
        if not self.log_history:
            return text
        before, name, tail = text.partition(_HISTORY)
        history = ",\n    ".join(self.log_history)
        return "".join((before, name, "[\n    ", history, "\n  ]", tail.removeprefix("[]")))

    def snapshot(self) -> TrainerState:
        """The state as it is now, which does not change with the run."""
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
        f"{path} is not a state of a run as this version of Mobius writes it: {problem}. Go on from another checkpoint."
    )
