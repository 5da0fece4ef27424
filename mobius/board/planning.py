"""The planner for the page, in a separate process, because it needs torch and the board does not."""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final

from mobius.errors import MobiusError, PlanError
from mobius.process.ranks import prepare_environment

Answer = Mapping[str, Any]
OUTDATED: Final[Answer] = {"is_outdated": True}
"""Answer to a question that a newer question has replaced, or for whose answer nobody waits."""
IDLE_SECONDS, GONE_SECONDS = 600.0, 20.0
"""Seconds without a question after which the process ends: usually, and if a page was closed during its question."""
_POLL_SECONDS: Final = 0.2
_PATIENCE_SECONDS: Final = 10.0
_MODEL: Final = "MODEL"
"""Word in a command in place of the model's folder, if only the text of its config.json is known."""


class PlanningProcess:
    """Process that starts with the first question. It ends with the board, or when nobody asks any more."""

    def __init__(self) -> None:
        self._turn, self._numbers, self._newest = threading.Lock(), itertools.count(1), 0
        self._process: SpawnProcess | None = None
        self._is_ready = False
        self._end_when_idle = threading.Timer(0.0, self._close_if_idle)

    def answer(self, question: Mapping[str, Any], has_gone: Callable[[], bool] = lambda: False) -> Answer:
        """Forecast as JSON for the question's `words`; without `words`, the names of cards and models.

        `config` is the text of a config.json that replaces the model; with `is_draft` the answer comes soon, without
        remedies. If a newer question comes, or if `has_gone` says that nobody waits for the answer, the answer is
        OUTDATED. Raises PlanError if the process dies.
        """
        own = self._newest = next(self._numbers)

        def is_wanted() -> bool:
            return own == self._newest and not has_gone()

        with self._turn:
            if own != self._newest:
                return OUTDATED
            self._end_when_idle.cancel()
            try:
                self._start()
                if "words" not in question:
                    return self._names
                if not self._is_ready:
                    if not self._comes(is_wanted):
                        return OUTDATED
                    self._received()
                    self._is_ready = True
                with suppress(BrokenPipeError):
                    self._connection.send(dict(question))
                return self._received() if self._comes(is_wanted) else self._given_up()
            finally:
                seconds = GONE_SECONDS if has_gone() else IDLE_SECONDS
                self._end_when_idle = threading.Timer(seconds, self._close_if_idle)
                self._end_when_idle.daemon = True
                self._end_when_idle.start()

    def close(self) -> None:
        """End the process."""
        self._end_when_idle.cancel()
        if (process := self._process) is not None:
            self._interrupt()
            self._connection.close()
            process.join(5.0)
            process.kill()
            self._process = None

    def _start(self) -> None:
        """Start the process if it does not run, and receive the names of cards and models from it."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=answer_questions, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
            self._names: Answer = self._received()
            self._is_ready = False  # the process still imports for some seconds

    def _comes(self, is_wanted: Callable[[], bool]) -> bool:
        """Wait for an answer as long as it is wanted; return whether it has come."""
        while not self._connection.poll(_POLL_SECONDS):
            if not is_wanted():
                return False
        return True

    def _interrupt(self) -> None:
        if self._process is not None and self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGUSR1)

    def _given_up(self) -> Answer:
        """Make the process give up its question, or else kill the process: a solver may not react for a long time."""
        for _ in range(int(_PATIENCE_SECONDS / _POLL_SECONDS)):
            self._interrupt()
            if self._connection.poll(_POLL_SECONDS):
                with suppress(PlanError):  # the process has died, which is fine, too
                    self._received()
                return OUTDATED
        assert self._process is not None
        self._process.kill()
        self._process.join()
        self._process = None
        return OUTDATED

    def _close_if_idle(self) -> None:
        if self._turn.acquire(blocking=False):
            try:
                self.close()
            finally:
                self._turn.release()

    def _received(self) -> Answer:
        assert self._process is not None
        try:
            found: Answer = self._connection.recv()
            return found
        except (EOFError, OSError) as error:
            self._process.join()
            code, self._process = self._process.exitcode, None
            raise PlanError(
                f"the planner's process has ended with code {code}. The next change starts another."
            ) from error


class _Outdated(BaseException):
    """Raised when nobody waits for the answer any more."""


def answer_questions(connection: Connection) -> None:
    """Send the names of cards and models, then answer each question. SIGUSR1 ends the work on a question."""
    is_working = False

    def give_up(*_: object) -> None:
        nonlocal is_working
        if is_working:
            is_working = False
            raise _Outdated

    signal.signal(signal.SIGUSR1, give_up)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for the board, which ends this process
    prepare_environment()
    logging.getLogger("mobius").addHandler(logging.NullHandler())
    from mobius.models.published_shapes import SHORT_NAMES
    from mobius.planner.gpu_specs import GPU_SPECS

    connection.send({"models": dict(SHORT_NAMES), "cards": {name: card.memory_gb for name, card in GPU_SPECS.items()}})
    from mobius.planner.forecast import forecast

    def forecast_of(words: Sequence[str], config: str | None = None, is_draft: bool = False) -> Answer:
        with tempfile.TemporaryDirectory() as folder:
            if config is not None:
                (Path(folder) / "config.json").write_text(config, encoding="utf-8")
                words = [*words, "--model_path", folder]
            found = forecast(words, is_draft=is_draft).to_json()
            answer: Answer = json.loads(json.dumps(found).replace(folder, _MODEL))
            return answer

    with suppress(EOFError, ConnectionError):  # the board has gone
        connection.send({"is_ready": True})
        while True:
            question = connection.recv()
            try:
                is_working = True
                found = forecast_of(**question)
                is_working = False
            except _Outdated:
                found = OUTDATED
            except MobiusError as error:
                found = {"problem": str(error), "advice": [*error.advice]}
            except Exception as error:
                found = {"problem": f"a bug in Mobius: {type(error).__name__}: {error}"}
            is_working = False
            connection.send(found)
