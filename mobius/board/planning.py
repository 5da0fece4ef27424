"""The planner for the page, in a process of its own: it needs torch, which the board does without."""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final

from mobius.errors import MobiusError, PlanError
from mobius.ranks import prepare_environment

Answer = Mapping[str, Any]
OUTDATED: Final[Answer] = {"is_outdated": True}
"""Answer to a question that a newer one has replaced."""
_MODEL: Final = "MODEL"
"""Word in a command for the folder of a config.json of which only the text is known."""


class PlanningProcess:
    """Process that starts with the first question and ends with this one."""

    def __init__(self) -> None:
        self._turn, self._numbers, self._newest = threading.Lock(), itertools.count(1), 0
        self._process: SpawnProcess | None = None
        self._is_busy = False

    def answer(self, question: Mapping[str, Any]) -> Answer:
        """Forecast as JSON for `words`, or without them the names of cards and models.

        `config` is the text of a config.json in the model's place; with `is_draft` the answer comes soon, without
        remedies. A newer question ends an older one, whose answer is OUTDATED. Raises PlanError if the process dies.
        """
        own = self._newest = next(self._numbers)
        if self._is_busy and self._process is not None and self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGUSR1)
        with self._turn:
            if own != self._newest:
                return OUTDATED
            if self._process is None:
                context = multiprocessing.get_context("spawn")
                self._connection, theirs = context.Pipe()
                self._process = context.Process(target=answer_questions, args=(theirs,), daemon=True)
                self._process.start()
                theirs.close()
                self._names: Answer = self._received()
            if "words" not in question:
                return self._names
            with suppress(BrokenPipeError):
                self._connection.send(dict(question))
            self._is_busy = True
            return self._received()

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGUSR1)
            self._connection.close()
            self._process.join(5.0)

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
        finally:
            self._is_busy = False


class _Outdated(BaseException):
    """Nobody waits for the answer any more."""


def answer_questions(connection: Connection) -> None:
    """Send the names of cards and models, then an answer to each question. SIGUSR1 gives one up."""
    is_working = False

    def give_up(*_: object) -> None:
        if is_working:
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

    while True:
        try:
            question = connection.recv()
            is_working = True
            found = forecast_of(**question)
        except _Outdated:
            found = OUTDATED
        except EOFError:
            return
        except MobiusError as error:
            found = {"problem": str(error)}
        except Exception as error:
            found = {"problem": f"a bug in Mobius: {type(error).__name__}: {error}"}
        is_working = False
        connection.send(found)
