"""Trackers (`--report_to`), which receive the numbers of a run and cannot end, block or slow the run.

    the run -> queue of lines (if full, a line is dropped and counted) -> a thread for each tracker -> its package

A package is imported in its thread. The first error of a tracker is logged; a tracker that hangs is abandoned at the
end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

from mobius.errors import ConfigError, excerpt

logger = logging.getLogger(__name__)

_MAX_QUEUED_LINES: Final = 1000
"""Maximum number of lines that wait for a tracker that is slow or still connecting."""
_CLOSE_SECONDS: Final = 20.0
"""Total time at the end of a run for all trackers to send waiting lines."""

_WITH_RUN_IDS: Final = frozenset({"swanlab", "wandb", "mlflow", "trackio"})
"""Trackers that can continue a run by its id."""
_RUN_ID: Final = re.compile(r"[0-9a-f]{21}")
"""Pattern of ids that all versions of SwanLab accept."""

_starting: Final = threading.Lock()
"""Lock that is held while a package might prompt for input or print."""
_MLFLOW_BATCH: Final = 100
"""Maximum number of options in one request to MLflow."""

_Line = tuple[int, Mapping[str, float]]


@dataclass(frozen=True)
class TrackedRun:
    """Facts of a run for a tracker."""

    name: str
    folder: Path
    """Folder for files that a tracker writes."""
    options: Mapping[str, object]
    """Options of the run by name; the options contain nothing of the environment."""
    first_step: int = 1
    """First step of this process; a resumed run records this step and later ones again."""
    run_id: str | None = None
    """Id of the run on the trackers' servers, which a resumed run keeps; None for a new run."""


class Tracker(NamedTuple):
    """A connection to one tracker."""

    log: Callable[[int, Mapping[str, float]], object]
    """Function that records a step and its numbers, by names such as `train/loss`."""
    close: Callable[[], object]
    """Function that sends all waiting numbers."""


class Trackers:
    """The trackers of a run, each in a separate thread."""

    def __init__(self, starts: Mapping[str, Callable[[], Tracker]], *, run_id: str | None = None) -> None:
        """Start the trackers; `starts` maps a name to the function that connects, called in the tracker's thread."""
        self.run_id = run_id
        self._feeds = [_TrackerThread(name, start) for name, start in starts.items()]

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Queue numbers for all trackers; returns at once."""
        for feed in self._feeds:
            feed.put((step, numbers))

    def close(self, *, seconds: float = _CLOSE_SECONDS) -> None:
        """Let the trackers finish within the time limit; log how many lines did not reach them."""
        deadline = time.monotonic() + seconds
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            feed.join(deadline)
        self._feeds = []


def check_installed(names: Sequence[str]) -> None:
    """Raise ConfigError for trackers whose package is not installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ConfigError(
            *(f"`--report_to {name}` needs a package that is not installed: pip install {name}" for name in missing)
        )


def start_trackers(names: Sequence[str], run: TrackedRun) -> Trackers:
    """Start the trackers that `--report_to` names; they connect while the run continues."""
    if _WITH_RUN_IDS.isdisjoint(names):
        run = replace(run, run_id=None)
    elif not _RUN_ID.fullmatch(run.run_id or ""):
        run = replace(run, run_id=secrets.token_hex(11)[:21])
    return Trackers({name: partial(_CONNECT[name], run) for name in names}, run_id=run.run_id)


class _TrackerThread:
    """One tracker's queue and thread."""

    def __init__(self, name: str, start: Callable[[], Tracker]) -> None:
        self._name, self._start = name, start
        self._queue: SimpleQueue[_Line | None] = SimpleQueue()
        self._num_lines = self._num_taken = 0
        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, line: _Line) -> None:
        """Queue a line, or drop it if the queue is full."""
        self._num_lines += 1
        if self._queue.qsize() < _MAX_QUEUED_LINES:
            self._queue.put(line)

    def end(self) -> None:
        """Let the thread end after the waiting lines."""
        self._queue.put(None)

    def join(self, deadline: float) -> None:
        """Wait for the thread until `deadline`, and log how many lines did not reach its tracker."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._has_warned = True  # later errors of this tracker are not logged
            lost = f"{self._num_lines - self._num_taken} of {self._num_lines} lines"
            logger.warning("--report_to %s: it does not answer and is abandoned; it lacks up to %s", self._name, lost)
        elif self._num_taken < self._num_lines:
            logger.warning("--report_to %s: it has %d of %d lines", self._name, self._num_taken, self._num_lines)

    def _run(self) -> None:
        try:
            tracker = self._start()
        except (Exception, SystemExit) as error:
            self._warn("cannot start", error)
            return
        while (line := self._queue.get()) is not None:
            try:
                tracker.log(*line)
                self._num_taken += 1
            except (Exception, SystemExit) as error:
                self._warn(f"failed in step {line[0]}", error)
        try:
            tracker.close()
        except (Exception, SystemExit) as error:
            self._warn("failed at the end", error)

    def _warn(self, problem: str, error: BaseException) -> None:
        """Log the first failure; the run continues, and the tracker continues if it can."""
        if not self._has_warned:
            logger.warning("--report_to %s: it %s (%s); the run goes on", self._name, problem, _error_text(error))
        self._has_warned = True


def _tensorboard(run: TrackedRun) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(log_dir=str(run.folder / "runs"), purge_step=run.first_step)
    writer.add_text("options", "\n".join(f"    {name}: {value}" for name, value in run.options.items()))

    def log(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()  # so that the curves of a killed run are complete

    return Tracker(log, writer.close)


def _wandb(run: TrackedRun) -> Tracker:
    package: Any = import_module("wandb")
    quiet = package.Settings(console="off", silent=True)  # print nothing: the run prints its own lines
    start = partial(package.init, name=run.name, config=dict(run.options), settings=quiet, id=run.run_id)
    own = _online_or_not("wandb", partial(start, resume="allow"), partial(start, resume="allow", mode="offline"))
    return Tracker(lambda step, numbers: own.log(dict(numbers), step=step), own.finish)


def _swanlab(run: TrackedRun) -> Tracker:
    package: Any = import_module("swanlab")
    start = partial(package.init, experiment_name=run.name, config=dict(run.options))
    # Only SwanLab's server can continue a run, so an offline run gets no id.
    _online_or_not("swanlab", partial(start, id=run.run_id, resume="allow"), partial(start, mode="offline"))
    return Tracker(lambda step, numbers: package.log(dict(numbers), step=step), package.finish)


def _mlflow(run: TrackedRun) -> Tracker:
    package: Any = import_module("mlflow")
    tag = "mobius.run_id"
    with _quiet():
        # The server chooses the ids, so a resumed run is found by its tag.
        found = package.search_runs(filter_string=f"tags.`{tag}` = '{run.run_id}'", output_format="list")
        package.start_run(found[0].info.run_id if found else None, run_name=run.name, tags={tag: run.run_id})
        if not found:  # only for a new run: MLflow does not let options change
            options = list(run.options.items())
            for start in range(0, len(options), _MLFLOW_BATCH):
                package.log_params(dict(options[start : start + _MLFLOW_BATCH]))
    return Tracker(lambda step, numbers: package.log_metrics(dict(numbers), step=step), _quiet()(package.end_run))


def _trackio(run: TrackedRun) -> Tracker:
    package: Any = import_module("trackio")
    with _quiet():
        # Trackio continues a run by its name.
        name = f"{run.name}-{str(run.run_id)[:7]}"
        own = package.init(project="mobius", name=name, config=dict(run.options), resume="allow", embed=False)
    return Tracker(lambda step, numbers: own.log(dict(numbers), step=step), _quiet()(own.finish))


_CONNECT: Final = {
    "tensorboard": _tensorboard,
    "swanlab": _swanlab,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}


def _online_or_not(name: str, start: Callable[[], Any], start_offline: Callable[[], Any]) -> Any:
    """Start a tracker with the user's settings, or offline if that fails."""
    with _no_questions():
        try:
            return start()
        except (Exception, SystemExit) as error:
            run = start_offline()
            problem = f"it cannot go online ({_error_text(error)}); it records offline, and `{name} sync` can upload it"
            logger.warning("--report_to %s: %s", name, problem)
            return run


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {excerpt(' '.join(str(error).split()), 200)}"


@contextlib.contextmanager
def _no_questions() -> Iterator[None]:
    """Prevent packages from prompting for a key on the terminal, because a run reads no input."""
    with _starting, open(os.devnull) as nothing:
        before, sys.stdin = sys.stdin, nothing
        try:
            yield
        finally:
            sys.stdin = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Prevent packages from prompting and from printing to standard output; log lines of the run still appear."""
    with _no_questions(), open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        yield
