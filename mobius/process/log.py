"""Sets up the log on the screen: which rank writes what, to which stream, in which form."""

import logging
import os
import re
import sys
import warnings
from collections.abc import Mapping
from typing import IO, Final, NoReturn

from tqdm import tqdm

# Logs and warnings of these libraries are for their developers; problems that matter to a user are exceptions.
_NOISY_LIBRARIES: Final = (
    *("transformers", "torch", "datasets", "huggingface_hub", "tokenizers", "safetensors", "pyarrow", "urllib3"),
    *("httpx", "httpcore", "filelock", "fsspec", "matplotlib", "PIL", "asyncio"),
)

PROGRESS_BAR_DELAY_SECONDS: Final = 2.0
"""Seconds of work before a progress bar appears."""

RANK_ZERO_ONLY: Final[Mapping[str, object]] = {"is_said_once": True}
"""`extra` of a log record that is the same on all ranks (about the model or the data): only the first rank logs it."""

# C0 and C1 controls, line separators, direction marks and overrides, lone surrogates.
_STEERING: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def setup_logging(rank: int, *, is_verbose: bool = False, only_warnings: bool = False) -> None:
    """Send rank 0's records from INFO on to standard output, and the warnings of other ranks to standard error.

    `is_verbose` adds rank 0's DEBUG records, the details of a run. `only_warnings` sends only warnings, to standard
    error, because standard output is for answers.

    Third-party records and warnings are dropped below ERROR. Calling it again replaces the earlier call.
    """
    handler = _BarSafeHandler(rank, logging.DEBUG if is_verbose else logging.INFO, only_warnings=only_warnings)
    handler.addFilter(lambda record: rank == 0 or not getattr(record, "is_said_once", False))
    root = logging.getLogger()
    root.handlers = [*(old for old in root.handlers if not isinstance(old, _BarSafeHandler)), handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("mobius").setLevel(logging.DEBUG if is_verbose else logging.INFO)
    for name in _NOISY_LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module=rf"{re.escape(name)}(\.|$)")
    logging.captureWarnings(True)


def progress_bar(desc: str, unit: str, total: int | None = None) -> "tqdm[NoReturn]":
    """Progress bar on rank 0's terminal for work that takes more than `PROGRESS_BAR_DELAY_SECONDS`.

    The bar disappears when it is closed.
    """
    speaks = any(isinstance(each, _BarSafeHandler) and each.is_first for each in logging.getLogger().handlers)
    disable = None if speaks else True  # None: shown if standard error is a terminal
    return tqdm(desc=desc, unit=unit, total=total, delay=PROGRESS_BAR_DELAY_SECONDS, leave=False, disable=disable)


def redirect_to_devnull(stream: IO[str]) -> None:
    """Discard the buffer of `stream` and all later output to it, because its reader has ended."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def printable(text: str, stream: IO[str]) -> str:
    """Return `text` with escapes (`\\x1b`) for characters that could control a terminal.

    It escapes control characters other than line feed and tab, characters that change the writing direction, lone
    surrogates, and characters that the stream's encoding lacks.
    """
    escaped = _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return escaped.encode(encoding, "backslashreplace").decode(encoding)


class _BarSafeHandler(logging.Handler):
    """Writes records above any progress bar: the rank (except rank 0), the level from WARNING on, and the message."""

    def __init__(self, rank: int, level: int, *, only_warnings: bool) -> None:
        super().__init__(logging.WARNING if rank or only_warnings else level)
        self._stream = sys.stderr if rank or only_warnings else sys.stdout
        self.is_first = rank == 0
        self._prefix = f"[rank {rank}] " if rank else ""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record).rstrip()  # captured warnings already end with a line feed
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{self._prefix}{level}{text}"

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(printable(self.format(record), self._stream), file=self._stream)
            self._stream.flush()
        except BrokenPipeError:  # the reader has ended, as in `mobius | head`
            redirect_to_devnull(self._stream)
        except Exception:  # as in the logging module: a record that cannot be written must not end the run
            self.handleError(record)
