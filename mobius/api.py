"""Fine-tuning from a script or a notebook: `finetune` starts one process per GPU as train.sh does, `plan` needs no GPU.

    import mobius

    result = mobius.finetune("Qwen/Qwen2.5-0.5B", records, save_dir="output/mine", num_train_epochs=3)
    print(result.metrics["train_loss"], result.folder)
    print(mobius.plan("8b", card="RTX4090", num_ranks=2, batch_size=16).describe())

Options are those of the command line (docs/user/options.md) by their names.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from mobius import errors
from mobius.atomic_files import atomic_write
from mobius.config.launch import launch_command, own_resources
from mobius.config.options import OptionValue
from mobius.errors import CheckpointError, ConfigError, DataError, MobiusError, RunFailedError, reason_of
from mobius.launcher import free_port
from mobius.ranks import cache_folder, child_variables
from mobius.regular_files import read_json, read_text

if TYPE_CHECKING:
    from mobius.planner.forecast import Forecast

Records: TypeAlias = Iterable[Mapping[str, object]]
"""Rows in any format of docs/user/data.md: dictionaries, or a `datasets.Dataset`."""
Data: TypeAlias = str | os.PathLike[str] | Sequence[str] | Records
"""A name, file or folder, several of them, or records."""
Value: TypeAlias = OptionValue | Sequence[str] | os.PathLike[str]
EventHandler: TypeAlias = Callable[[Mapping[str, Any]], object]
_EVENTS: Final = "events.jsonl"
_LAST_LINES: Final = 20
"""Lines of the output that an error without a message of its own has."""


@dataclass(frozen=True)
class Result:
    """A run that has ended, with what it left in `folder`."""

    folder: Path
    """Model in Hugging Face layout, checkpoints, logs."""
    metrics: Mapping[str, Any]
    """Last numbers by name, such as `train_loss` and `eval_loss` (all_results.json)."""
    history: Sequence[Mapping[str, Any]] = field(repr=False)
    """Measurements of each step: loss, gradient norm, seconds, tokens, memory, waits (metrics.jsonl)."""
    plan: Mapping[str, Any] = field(repr=False)
    """Plan that the run was made by (plan.json)."""


def finetune(
    model: str | os.PathLike[str],
    dataset: Data,
    *,
    eval_dataset: Data | None = None,
    save_dir: str | os.PathLike[str] = "output/finetune",
    on_event: EventHandler | None = None,
    progress: bool = True,
    **options: Value,
) -> Result:
    """Fine-tune a model on all GPUs of this machine, or on its CPU, and return what came out.

    `on_event` gets each event of the run (start, step, evaluation, checkpoint, warning, end) as it is written to
    events.jsonl. `progress`: print the run's log, in a notebook a progress bar.

    Raises the error that the run ended by, such as ConfigError, GpuMemoryError or DataError; RunFailedError if there
    was none, as when the system killed a process. Ctrl-C (or "interrupt" in a notebook) lets the run save a checkpoint,
    then raises KeyboardInterrupt; call again with `resume_from_checkpoint=True`. The run also saves and ends when this
    process ends before it.
    """
    folder = Path(save_dir)
    given = {"model_path": model, "dataset": _on_disk(dataset), "eval_dataset": _on_disk(eval_dataset)}
    words = option_words({**given, "save_dir": folder, "master_port": free_port(), **options})
    command, notice = launch_command(words, None, own_resources())
    show = _Bar() if progress and _is_notebook() else partial(print, flush=True) if progress else _nothing
    if notice:
        show(notice)
    events = _Events(folder / _EVENTS, [*filter(None, (on_event, getattr(show, "take", None)))])
    with tempfile.TemporaryDirectory(prefix="mobius-") as temporary:
        error_file = Path(temporary) / "error.json"
        variables = child_variables(error_file, Path(__file__).parent.parent)
        code, last_lines = _run(["env", *variables, *command], show, events)
        if code:
            raise _failure(error_file, code, last_lines)
    try:
        history = [json.loads(line) for line in read_text(folder / "metrics.jsonl").splitlines()]
    except CheckpointError:  # with --no_do_train
        history = []
    plan_file, results = folder / "plan.json", folder / "all_results.json"
    plan = read_json(plan_file) if plan_file.is_file() else {}
    return Result(folder, read_json(results) if results.is_file() else {}, history, plan)


def plan(model: str | os.PathLike[str], **options: Value) -> Forecast:
    """Return whether a run fits, its memory by owner, its predicted step, and what would make it fit; trains nothing.

    `card` and `num_ranks` name GPUs that need not be here. Raises MobiusError for what cannot be planned at all.
    """
    from mobius.planner.forecast import forecast  # torch and transformers, which starting ranks does without

    return forecast(option_words({"model_path": model, **options}))


def option_words(options: Mapping[str, Value | None]) -> list[str]:
    """Words of a command line; None leaves an option out. Raises ConfigError for a value that has no words."""
    words = []
    for name, value in options.items():
        if isinstance(value, Mapping):
            raise ConfigError(f"{name}={value!r}: a mapping is for YAML files; give names, files or records")
        if isinstance(value, list | tuple):
            words += [f"--{name}", *map(str, value)]
        elif value is not None:
            words.append(f"--{name}={str(value).lower() if isinstance(value, bool) else value}")
    return words


def _on_disk(data: Data | None) -> Value | None:
    """Names and files as they are; records as a JSON Lines file of their own, whose name follows from their content."""
    if data is None or isinstance(data, str | os.PathLike):
        return data
    if isinstance(data, list | tuple) and data and all(isinstance(each, str) for each in data):
        return data
    lines = []
    for number, record in enumerate(data):
        if not isinstance(record, Mapping):
            raise DataError(f"record {number} is {type(record).__name__}, not a mapping such as {{'text': '...'}}")
        try:
            lines.append(json.dumps(dict(record)))
        except (TypeError, ValueError) as error:
            raise DataError(f"record {number} holds what JSON has no words for: {error}") from None
    if not lines:
        raise DataError("there are no records; give at least one")
    text = "\n".join(lines) + "\n"
    path = cache_folder() / "records" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    if not path.is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as temporary:
                temporary.write_text(text, encoding="utf-8")
        except OSError as error:
            raise DataError(f"the records cannot be written to {path}: {reason_of(error)}") from error
    return path


class _Events:
    """The feed of a run, from its beginning in this process; torn last lines wait until they are whole."""

    def __init__(self, path: Path, handlers: Sequence[EventHandler]) -> None:
        self._path, self._handlers = path, handlers
        self._since, self._position = time.time(), 0

    def read(self) -> None:
        """Hand new events to the handlers; earlier ones of a resumed run are left out."""
        if not self._handlers:
            return
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            self._position = min(self._position, size)  # a resumed run cuts its files
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                event = json.loads(line)
                if event.get("time", 0) >= self._since:
                    for handler in self._handlers:
                        handler(event)


class _Bar:
    """Progress bar of a notebook, which replaces itself."""

    def __init__(self) -> None:
        display: Callable[..., Any] = importlib.import_module("IPython.display").display
        self._steps, self._lines = 0, list[str]()
        self._step: Mapping[str, Any] = {}
        self._handle: Any = display(self, display_id=True)  # the last: it shows the bar at once

    def __call__(self, line: str) -> None:
        """Take a line of the log; the last ones stand below the bar."""
        self._lines = [*self._lines, line][-_LAST_LINES:]
        self._handle.update(self)

    def take(self, event: Mapping[str, Any]) -> None:
        """Take an event."""
        if event["event"] == "start":
            self._steps = event["num_steps"]
        elif event["event"] == "step":
            self._step = event
            self._handle.update(self)

    def _repr_html_(self) -> str:
        done, loss = self._step.get("step", 0), self._step.get("loss")
        text = "starting" if loss is None else f"step {done} of {self._steps}, loss {float(loss):.4f}"
        log = html.escape("\n".join(self._lines))
        return f"<progress value={done} max={self._steps or 1}></progress> {text}<pre>{log}</pre>"


def _is_notebook() -> bool:
    """Whether a kernel of Jupyter runs this."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


def _nothing(_: str) -> None:
    pass


def _run(command: Sequence[str], show: Callable[[str], object], events: _Events) -> tuple[int, list[str]]:
    """Run a command to its end and return its exit code and last lines; Ctrl-C goes to it and is raised in the end."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    assert process.stdout is not None
    last, is_interrupted = list[str](), False
    try:
        while True:
            try:
                for line in _lines(process.stdout):
                    last = [*last, line][-_LAST_LINES:]
                    show(line)
                    events.read()
                break
            except KeyboardInterrupt:
                is_interrupted = True
                process.send_signal(signal.SIGINT)
    except BaseException:  # of a handler
        process.send_signal(signal.SIGTERM)
        process.communicate()  # it saves, and would wait for somebody who reads its output
        raise
    code = process.wait()
    events.read()
    if is_interrupted:
        raise KeyboardInterrupt(last[-1] if last else "")
    return code, last


def _lines(stream: Iterable[str]) -> Iterator[str]:
    """Lines without their ends; of a progress bar, which overwrites itself, the last state."""
    for line in stream:
        if text := line.rstrip("\n").rpartition("\r")[2]:
            yield text


def _failure(file: Path, code: int, last_lines: Sequence[str]) -> MobiusError:
    """The error that the first rank ended by, else one with the last lines."""
    try:
        found = read_json(file)
        kind, message = getattr(errors, str(found["type"]), None), str(found["message"])
    except (CheckpointError, KeyError, TypeError):
        return RunFailedError("\n".join([f"the run ended with exit code {code}", *last_lines]))
    if isinstance(kind, type) and issubclass(kind, MobiusError):
        return kind(message)
    return RunFailedError(f"{found['type']}: {message}")
