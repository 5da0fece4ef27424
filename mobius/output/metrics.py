"""Owns the numbers of one optimizer step and how they are told and kept: a line for people, JSON lines for programs."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from io import FileIO
from pathlib import Path
from typing import Any, Final, overload

from mobius.atomic_files import atomic_write
from mobius.errors import reason_of
from mobius.regular_files import open_regular

logger = logging.getLogger(__name__)

_NO_JSON_NUMBERS: Final = ("nan", "inf", "-inf")
_EVALUATION: Final = '"eval_'
"""Start of each name in an entry of an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step, over all ranks: sums of tokens, the worst rank's memory and waits."""

    step: int
    """Counted from 1."""
    epoch: float
    """Epochs that are done after the step."""
    loss: float
    """Mean over the target tokens of the step, and behind it the loss over routers times its coefficient, if any."""
    grad_norm: float
    """L2 norm of all gradients together, before clipping."""
    learning_rate: float
    step_seconds: float
    """Wall clock from the end of the step before to the end of this one, optimizer included."""
    tokens_per_second: float
    """Tokens without padding."""
    num_tokens: int
    """Tokens without padding."""
    num_targets: int
    """Tokens that count in the loss."""
    num_samples: int
    """Samples, of which packed rows hold several."""
    padding: float
    """Share of the step's positions that are padding."""
    peak_gpu_memory_gib: float | None
    """Allocated, on the worst rank, since the start; None without a GPU."""
    reserved_gpu_memory_gib: float | None
    """Taken from the GPU by the allocator for that, on the worst rank; None without a GPU."""
    peak_host_memory_gib: float
    """All ranks together, since the start."""
    wait_seconds: Mapping[str, float]
    """Seconds by cause (`WaitCause`) that the worst rank's computation stood still in this step."""
    skipped_steps: int
    """Steps so far whose update was left out because a gradient was not finite."""
    loss_scale: float | None
    """Factor of the loss in fp16 training; None in formats that need none."""
    aux_loss: float | None = None
    """Loss over routers, the mean over microbatches without its coefficient; None for models without."""


class JsonLines:
    """A file with a whole line of JSON per step; those that a full disk does not take wait in memory."""

    def __init__(self, path: Path) -> None:
        """`path` is appended to; it is opened with the first step."""
        self._path = path
        self._file: FileIO | None = None  # unbuffered, so that a killed run keeps its metrics
        self._num_bytes = 0
        self._waiting: list[bytes] = []
        self._has_warned = False

    def append(self, numbers: Mapping[str, object]) -> None:
        """Write one line, in the form of `json_text`."""
        self._waiting.append(json_text(numbers).encode() + b"\n")
        try:
            self._write()
        except OSError as error:
            if not self._has_warned:
                then = "the run goes on, and the file is completed when there is space again"
                logger.warning("cannot write %s (%s); %s", self._path, reason_of(error), then)
            self._has_warned = True

    def _write(self) -> None:
        """Write all that waits, or nothing: the part that found room is cut off again."""
        if self._file is None:
            self._file = FileIO(self._path, "a+")
            self._num_bytes = self._file.seek(0, os.SEEK_END)
        self._write_anew_if_removed(self._file)
        text = b"".join(self._waiting)
        try:
            written = 0
            while written < len(text):
                written += self._file.write(text[written:])
        except OSError:
            self._file.truncate(self._num_bytes)
            raise
        self._num_bytes += len(text)
        self._waiting.clear()

    def _write_anew_if_removed(self, opened: FileIO) -> None:
        """Where somebody has removed the file, bring back its lines, which are there until it is closed."""
        if self._path.exists():
            return
        opened.seek(0)
        with atomic_write(self._path) as temporary, temporary.open("wb") as file:
            shutil.copyfileobj(opened, file)
        self._file = FileIO(self._path, "a+")
        self._num_bytes = self._file.seek(0, os.SEEK_END)
        opened.close()

    def flush(self) -> None:
        """See to it that the file has every line. Raises OSError."""
        if self._file is not None or self._waiting:
            self._write()

    def close(self) -> None:
        """Close the file; the log cannot be appended to any more."""
        if self._waiting:
            logger.warning("%s lacks the last %d lines", self._path, len(self._waiting))
        if self._file is not None:
            self._file.close()


class LogHistory(Sequence[dict[str, Any]]):
    """Entries that a run has shown, in their order, as lines of JSON: each becomes text once, when it comes.

    A week has hundreds of thousands. As objects they take three times the memory (600,000 steps: 960 MiB with what else
    was kept of each, now 350), and making text of all of them took half a minute at each checkpoint.
    """

    def __init__(self, entries: Iterable[Mapping[str, object]] = ()) -> None:
        self._lines = [json_text(entry) for entry in entries]

    def append(self, entry: Mapping[str, object]) -> None:
        """Add the latest entry."""
        self._lines.append(json_text(entry))

    def copy(self) -> LogHistory:
        """Another one with these entries, to be carried on by itself."""
        other = LogHistory()
        other._lines = [*self._lines]
        return other

    def evaluations(self) -> Iterator[dict[str, Any]]:
        """Entries of evaluations, the latest one first."""
        return (_entry(line) for line in reversed(self._lines) if _EVALUATION in line)

    def to_json(self, before: str = "", behind: str = "") -> str:
        """All entries as a list in JSON between two other texts, one in a line, indented as a field of an object is."""
        if not self._lines:
            return f"{before}[]{behind}"
        lines = [*self._lines]
        lines[0] = f"{before}[\n    {lines[0]}"
        lines[-1] = f"{lines[-1]}\n  ]{behind}"
        return ",\n    ".join(lines)  # hundreds of MiB after a week: one copy

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, place: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, place: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        found = self._lines[place]
        return _entry(found) if isinstance(found, str) else [_entry(line) for line in found]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LogHistory) and self._lines == other._lines

    __hash__ = None  # type: ignore[assignment]


def filter_lines(path: Path, keeps: Callable[[Mapping[str, Any]], bool]) -> int:
    """Remove lines from a file of JSON lines, at once and synced; returns their number. Raises OSError.

    Those that `keeps` refuses, which is asked once for each in their order, and those that are no whole line of a JSON
    object, such as the half that a loss of power leaves at the end. A file that is absent has none.
    """
    if not path.exists():
        return 0
    with open_regular(path) as file:
        kept = bytearray(_keeps_line(line, keeps) for line in file)
    if not all(kept):
        with atomic_write(path) as temporary, path.open("rb") as file, temporary.open("wb") as shorter:
            shorter.writelines(line for line, is_kept in zip(file, kept, strict=True) if is_kept)
    return kept.count(0)


def _keeps_line(line: bytes, keeps: Callable[[Mapping[str, Any]], bool]) -> bool:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return line.endswith(b"\n") and isinstance(record, dict) and keeps(record)


def step_line(metrics: StepMetrics, total_steps: int, seconds_left: float | None = None) -> str:
    """Tell one step, and the time left if it is known, in columns that stay in place over the steps of a run."""
    width = len(str(total_steps))
    columns = [
        f"step {metrics.step:>{width}}/{total_steps}",
        f"epoch {metrics.epoch:6.3f}",
        f"loss {metrics.loss:7.4f}",
        *([] if metrics.aux_loss is None else [f"aux loss {metrics.aux_loss:7.4f}"]),
        f"grad norm {metrics.grad_norm:8.3f}",
        f"lr {metrics.learning_rate:.2e}",
        f"{metrics.step_seconds:7.2f} s",
        f"{metrics.tokens_per_second:8,.0f} tokens/s",
        f"{metrics.num_samples:4} samples, {metrics.num_tokens:7,} tokens, {100 * metrics.padding:4.1f} % padding",
        "waits" + ",".join(f" {cause} {seconds:5.2f}" for cause, seconds in metrics.wait_seconds.items()) + " s",
    ]
    if metrics.peak_gpu_memory_gib is not None:
        columns.append(f"GPU {metrics.peak_gpu_memory_gib:6.2f} GiB")
    columns.append(f"host {metrics.peak_host_memory_gib:6.2f} GiB")
    if metrics.loss_scale is not None:
        columns.append(f"loss scale {metrics.loss_scale:g}")
    if metrics.skipped_steps:
        columns.append(f"{metrics.skipped_steps} skipped")
    if seconds_left is not None:
        columns.append(f"{format_clock(seconds_left)} left")
    return " | ".join(columns)


def format_clock(seconds: float) -> str:
    """Hours, minutes and seconds, such as `0:02:05`, and days before them if there are any."""
    return str(timedelta(seconds=round(seconds)))


def json_text(value: object, *, indent: int | None = None) -> str:
    """JSON of plain values; numbers that it does not have become strings that `float` reads: "nan", "inf", "-inf"."""
    return json.dumps(_as_json(value), allow_nan=False, indent=indent)


def _as_json(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def as_numbers(value: Any) -> Any:
    """`value` with the words that stand for numbers in JSON made numbers again."""
    if isinstance(value, dict):
        return {name: as_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [as_numbers(item) for item in value]
    return float(value) if value in _NO_JSON_NUMBERS else value


def _entry(line: str) -> dict[str, Any]:
    entry = as_numbers(json.loads(line))
    assert isinstance(entry, dict)
    return entry
