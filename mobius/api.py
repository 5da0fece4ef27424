"""Fine-tuning from a script or notebook: `finetune` starts one process per GPU, like train.sh; `plan` needs no GPU.

    import mobius

    result = mobius.finetune("Qwen/Qwen2.5-0.5B", records, save_dir="output/mine", num_train_epochs=3)
    print(result.metrics["train_loss"], result.folder)
    print(mobius.plan("8b", card="RTX4090", num_ranks=2, batch_size=16).describe())

Keywords are the names of the command line's options (docs/user/options.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from mobius.config.cli import count_planned_ranks
from mobius.config.config import nearest_name, spellings
from mobius.config.launch import launch_command, own_resources
from mobius.config.options import OptionValue
from mobius.config.recipes.answers import foreign_option
from mobius.config.recipes.recipe import Launch, translate
from mobius.config.recipes.trl import TRL
from mobius.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MobiusError,
    RunFailedError,
    error_class,
    listed,
    reason_of,
)
from mobius.files.atomic_files import atomic_write
from mobius.files.regular_files import read_json, read_text
from mobius.launcher import free_port
from mobius.process.ranks import cache_folder, child_variables

if TYPE_CHECKING:
    from mobius.planner.forecast import Forecast

Records: TypeAlias = Iterable[Mapping[str, object]]
"""Rows in any format of docs/user/data.md: dictionaries, a `datasets.Dataset` or a pandas DataFrame."""
Data: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Records | Mapping[str, Records]
"""Name, file or folder, a list of names or paths, records, or records by split, such as a `datasets.DatasetDict`."""
Value: TypeAlias = OptionValue | Sequence[object] | Mapping[str, object] | os.PathLike[str]
EventHandler: TypeAlias = Callable[[Mapping[str, Any]], object]
_EVENTS: Final = "events.jsonl"
_ELSEWHERE: Final = {
    "dry_run": "mobius.plan(model, ...) plans a run",
    "preview": "`mobius preview --model_path ... --dataset ...` shows samples, in a terminal",
}
"""Options of the command line that describe a run, and what to use from Python instead."""
_LAST_LINES: Final = 20
"""Number of output lines that an error shows if the run reported no message."""


@dataclass(frozen=True)
class Result:
    """A finished run, with its results in `folder`."""

    folder: Path
    """Model in Hugging Face layout, checkpoints, logs."""
    metrics: Mapping[str, Any]
    """Final numbers by name, such as `train_loss` and `eval_loss` (all_results.json)."""
    history: Sequence[Mapping[str, Any]] = field(repr=False)
    """Measurements of each step: loss, gradient norm, seconds, tokens, memory, waits (metrics.jsonl)."""
    plan: Mapping[str, Any] = field(repr=False)
    """Plan that the run used (plan.json)."""


def finetune(
    model: str | os.PathLike[str],
    dataset: Data | None = None,
    *,
    eval_dataset: Data | None = None,
    save_dir: str | os.PathLike[str] | None = None,
    on_event: EventHandler | None = None,
    progress: bool = True,
    **options: Value,
) -> Result:
    """Fine-tune a model on all GPUs of this machine, or on its CPU, and return the result.

    `save_dir`, or `output_dir`: folder of the result, by default "output/finetune". `on_event` gets each event of the
    run (start, step, evaluation, checkpoint, warning, end) when it is written to events.jsonl. `progress`: print the
    run's log; in a notebook, show a progress bar.

    Raises the run's error, such as ConfigError, GpuMemoryError or DataError; RunFailedError if the run reported no
    error, for example because the system killed a process. On Ctrl-C (or "interrupt" in a notebook) the run saves a
    checkpoint, then KeyboardInterrupt is raised; call again with `resume_from_checkpoint=True`. If this process ends
    before the run, the run also saves and ends.
    """
    for name in filter(options.get, _ELSEWHERE):
        raise ConfigError(f"`{name}`: finetune trains; {_ELSEWHERE[name]}")
    own, notices = _own_options(options)
    if {"save_dir", "output_dir"} <= {*own, *(["save_dir"] if save_dir is not None else [])}:
        raise ConfigError("`save_dir` and `output_dir` are one option; keep one")
    folder = Path(_as_path("save_dir", save_dir or own.pop("output_dir", None) or "output/finetune"))
    if dataset is None and (eval_dataset is None or own.get("do_train", True)):
        raise ConfigError(
            "`dataset` is None: give a name, files or records; to evaluate only, give eval_dataset and do_train=False"
        )
    data = {name: _on_disk(name, each) for name, each in (("dataset", dataset), ("eval_dataset", eval_dataset))}
    given = {"model_path": _as_path("model", model), **data, "save_dir": folder}
    command, notice = launch_command(option_words({**given, "master_port": free_port(), **own}), None, own_resources())
    show = _Bar() if progress and _is_notebook() else partial(print, flush=True) if progress else _nothing
    for line in filter(None, (*notices, notice)):
        show(line)
    events = _Events(folder / _EVENTS, [*filter(None, (on_event, getattr(show, "take", None)))])
    with tempfile.TemporaryDirectory(prefix="mobius-") as temporary:
        error_file = Path(temporary) / "error.json"
        variables = child_variables(error_file, Path(__file__).parent.parent)
        code, last_lines = _run(["env", *variables, *command], show, events)
        if code:
            raise _failure(error_file, code, last_lines, data)
    try:
        history = [json.loads(line) for line in read_text(folder / "metrics.jsonl").splitlines()]
    except CheckpointError:  # a run with --no_do_train writes no metrics
        history = []
    plan_file, results = folder / "plan.json", folder / "all_results.json"
    plan = read_json(plan_file) if plan_file.is_file() else {}
    return Result(folder, read_json(results) if results.is_file() else {}, history, plan)


def plan(model: str | os.PathLike[str], **options: Value) -> Forecast:
    """Return whether a run fits, its memory by owner, its predicted step, and changes that make it fit; trains nothing.

    `card` and `num_ranks` name GPUs that need not be in this machine. Raises MobiusError if no plan is possible.
    """
    from mobius.planner.forecast import forecast  # imports torch, which `finetune` does not need

    own, _ = _own_options(options)
    return forecast(option_words({"model_path": _as_path("model", model), **own}))


def option_words(options: Mapping[str, Value | None]) -> list[str]:
    """Words of a command line; None leaves an option out. Raises ConfigError for a value that cannot be written."""
    words = []
    for name, value in options.items():
        spelling = spellings().get(name)
        if isinstance(value, list | tuple) and spelling is not None and spelling.option.is_list:
            words += [f"--{name}", *map(str, value)]
        elif isinstance(value, list | tuple):
            words.append(f"--{name}={','.join(map(str, value))}")
        elif isinstance(value, Mapping):
            words.append(f"--{name}={','.join(f'{key}={each}' for key, each in value.items())}")
        elif isinstance(value, str | Real | os.PathLike):
            words.append(f"--{name}={str(value).lower() if isinstance(value, bool) else value}")
        elif value is not None:
            raise ConfigError(f"`{name}` is {_kind(value)}: give a number, a text, or a list of them")
    return words


def _own_options(options: Mapping[str, Value | None]) -> tuple[dict[str, Any], list[str]]:
    """Translate keywords, which may be TRL's, to options of Mobius; the second value has lines about TRL's keywords.

    Keywords must be full names, not shortened ones. TRL's defaults are not used. Raises ConfigError with all unknown
    names.
    """
    for name, value in options.items():
        try:
            json.dumps(value, default=str, skipkeys=True)
        except (ValueError, RecursionError) as error:  # a value that contains itself or a huge number
            raise ConfigError(f"`{name}` cannot be written as text: {error}") from None
    foreign = [name for name in options if name not in spellings() and name != "config"]
    if unknown := [name for name in foreign if TRL.row(name) is None]:
        raise ConfigError(*(f"unknown option `{name}`{_hint(name)}" for name in unknown))
    if not foreign:
        return dict(options), []
    keys = {name: _as_yaml(value) for name, value in options.items() if TRL.row(name) is not None}
    num_ranks, others = count_planned_ranks(options), {name: options[name] for name in options if name not in keys}
    file, _ = translate(TRL, keys, Launch(num_ranks, num_ranks, {**others, "dataset": None}))
    if "dataset" in file.said:
        file.problems.append("the data are the argument `dataset`")
    if file.problems:
        raise ConfigError(*file.problems)
    told = [*file.facts, *file.notices, *([f"no effect here: {listed(file.ignored)}"] if file.ignored else [])]
    return {**others, **{name: file.given[name][0] for name in file.given if name in file.said}}, told


def _as_yaml(value: object) -> object:
    """Return a value in the form of a YAML file: texts, lists, mappings and None."""
    if isinstance(value, Mapping):
        return {str(key): _as_yaml(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_yaml(each) for each in value]
    return None if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _hint(name: str) -> str:
    """End of a message about an unknown keyword."""
    if name == "help":
        return ": help(mobius.finetune) prints its arguments, docs/user/options.md has all options"
    if (answer := foreign_option(name)) is not None:
        return f": {answer}"
    begun = [known for known in spellings() if len(name) > 1 and known.startswith(name)]
    nearest = nearest_name(name) or next(iter(begun), None)
    return f"; did you mean `{nearest}`?" if nearest else "; docs/user/options.md has all options"


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")


def _as_path(name: str, value: object) -> str | os.PathLike[str]:
    if isinstance(value, str | os.PathLike):
        return value
    how = "; save it with its tokenizer (save_pretrained) and give the folder" if hasattr(value, "state_dict") else ""
    raise ConfigError(f"`{name}` is {_kind(value)}: give a name or a folder{how}")


def _records(name: str, data: object) -> Iterable[object]:
    """Rows of an object that holds records. Raises ConfigError for any other object."""
    if isinstance(data, Mapping):
        splits = ("train",) if name == "dataset" else ("validation", "test", "eval")
        found = [split for split in splits if split in data and not isinstance(data[split], str)]
        if len(found) != 1 or not isinstance(data[found[0]], Iterable):
            keys = listed(map(str, data))
            raise ConfigError(f"`{name}` has {keys}: give one split, such as data[{splits[0]!r}], or a list of records")
        return _records(name, data[found[0]])
    if type(data).__module__.partition(".")[0] == "pandas" and hasattr(data, "to_json"):
        try:
            rows: list[object] = json.loads(data.to_json(orient="records"))  # `to_json` writes NaN as null
        except (ValueError, OverflowError, RecursionError) as error:  # columns with equal names, or objects as values
            raise DataError(f"`{name}` is a DataFrame that cannot be written as JSON: {error}") from None
        return rows
    if isinstance(data, bytes) or not isinstance(data, Iterable):
        raise ConfigError(f"`{name}` is {_kind(data)}: give a name, a file or folder, a list of them, or records")
    return data


def _on_disk(name: str, data: Data | None) -> Value | None:
    """Return names and files unchanged; records are written to a JSON Lines file, named by their content."""
    if data is None or isinstance(data, str | os.PathLike):
        return data
    if isinstance(data, list | tuple) and data and all(isinstance(each, str | os.PathLike) for each in data):
        return [os.fspath(each) for each in data]
    lines = []
    for number, record in enumerate(_records(name, data)):
        if not isinstance(record, Mapping):
            raise DataError(f"{name}[{number}] is {_kind(record)}, not a mapping such as {{'text': '...'}}")
        try:
            lines.append(json.dumps(dict(record)))
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"{name}[{number}] cannot be written as JSON: {error}") from None
    if not lines:
        raise DataError("there are no records; give at least one")
    text = "\n".join(lines) + "\n"
    path = _records_folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    if not path.is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as temporary:
                temporary.write_text(text, encoding="utf-8")
        except OSError as error:
            raise DataError(f"the records cannot be written to {path}: {reason_of(error)}") from error
    return path


def _records_folder() -> Path:
    return cache_folder() / "records"


class _Events:
    """Feed of a run since its start in this process; a partly written last line waits until it is complete."""

    def __init__(self, path: Path, handlers: Sequence[EventHandler]) -> None:
        self._path, self._handlers = path, handlers
        self._since, self._position = time.time(), 0

    def read(self) -> None:
        """Pass new events to the handlers; a resumed run's earlier events are left out."""
        if not self._handlers:
            return
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            self._position = min(self._position, size)  # a resumed run truncates its files
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
    """Progress bar of a notebook; each update replaces the last one."""

    def __init__(self) -> None:
        display: Callable[..., Any] = importlib.import_module("IPython.display").display
        self._steps, self._lines = 0, list[str]()
        self._step: Mapping[str, Any] = {}
        self._handle: Any = display(self, display_id=True)  # last, because it shows the bar at once

    def __call__(self, line: str) -> None:
        """Add a line of the log; the last lines are shown below the bar."""
        self._lines = [*self._lines, line][-_LAST_LINES:]
        self._handle.update(self)

    def take(self, event: Mapping[str, Any]) -> None:
        """Update the bar with an event."""
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
    """Whether this code runs in a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


def _nothing(_: str) -> None:
    pass


def _run(command: Sequence[str], show: Callable[[str], object], events: _Events) -> tuple[int, list[str]]:
    """Run a command; returns its exit code and last lines. Ctrl-C is passed to the command, and raised at its end."""
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
    except BaseException:  # an event handler of the user failed
        process.send_signal(signal.SIGTERM)
        process.communicate()  # the run saves, and would block if nobody read its output
        raise
    code = process.wait()
    events.read()
    if is_interrupted:
        raise KeyboardInterrupt(last[-1] if last else "")
    return code, last


def _lines(stream: Iterable[str]) -> Iterator[str]:
    """Yield lines without line ends; a progress bar, which overwrites itself, gives only its last state."""
    for line in stream:
        if text := line.rstrip("\n").rpartition("\r")[2]:
            yield text


def _failure(file: Path, code: int, last_lines: Sequence[str], data: Mapping[str, object]) -> MobiusError:
    """Return the first rank's error, or else an error with the last lines; `data`: the values of data options."""
    try:
        found = read_json(file)
        kind, message = error_class(str(found["type"])), str(found["message"])
    except (CheckpointError, KeyError, TypeError):
        return RunFailedError("\n".join([f"the run ended with exit code {code}", *last_lines]))
    for name, path in data.items():
        if isinstance(path, Path) and path.parent == _records_folder():  # line n of the file is record n - 1
            parts = re.split(rf"{re.escape(str(path))}, line (\d+)", message)
            message = "".join(f"{name}[{int(part) - 1}]" if at % 2 else part for at, part in enumerate(parts))
    return kind(message) if kind is not None else RunFailedError(f"{found['type']}: {message}")
