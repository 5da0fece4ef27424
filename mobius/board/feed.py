"""Reads the file to which a run appends events, line by line while the file grows, and returns numbers as columns.

The file is `events.jsonl` if it exists; a run of another version, or of LLaMA-Factory, may have another file instead.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from mobius.files.regular_files import open_regular
from mobius.reporting.events import StepMetrics

FEEDS: Final = ("events.jsonl", "metrics.jsonl", "trainer_log.jsonl")
RECENT: Final = 64
"""Number of latest steps whose pace predicts the time left."""
_RENAMED: Final = {"current_steps": "step", "lr": "learning_rate", "total_steps": "num_steps"}
"""Name in trainer_log.jsonl, which LLaMA-Factory also writes -> name in an event."""
_MARKS: Final = tuple(b'{"event": "%s"' % kind for kind in (b"start", b"evaluation", b"end"))
_HEAD, _TAIL = 2**15, 2**19
_MAX_LINE: Final = 2**20
_WIDE: Final = ("step", "time")
"""Columns whose values fp32 would round."""
_SPREAD: Final = ("loss", "grad_norm", "tokens_per_second", "step_seconds")
"""Columns whose smallest and largest values are sent along with the means."""
_COLUMNS: Final = (*_WIDE, *_SPREAD, "aux_loss", "learning_rate", "peak_gpu_memory_gib", "peak_host_memory_gib")
_MEASURED: Final = frozenset(each.name for each in fields(StepMetrics)) - {"numbers"}
"""Keys of every step; a step's other keys are numbers of its objective."""
_MAX_COLUMNS: Final = 40


class Feed:
    """One growing file of JSON lines, and the position up to which it was read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._identity: tuple[str, int] | None = None
        self._offset = self._num_bytes = 0
        self.modified = 0.0
        """Time of the last change, in Unix seconds; 0 without a file."""

    def poll(self) -> bool | None:
        """Whether there are new bytes; None if the file was replaced or shortened, and is read from its start again."""
        name = next((each for each in FEEDS if (self._folder / each).is_file()), None)
        if name is None:
            return False
        found = os.stat(self._folder / name)
        is_same = self._identity == (name, found.st_ino) and found.st_size >= self._num_bytes
        has_more = found.st_size > self._num_bytes
        self._identity, self._num_bytes, self.modified = (name, found.st_ino), found.st_size, found.st_mtime
        if not is_same:
            self._offset = 0
            return None
        return has_more

    def outline(self) -> list[bytes]:
        """Lines at both ends of the file, which show the run's progress; `lines` continues there. Raises OSError."""
        if self._identity is None:
            return []
        with open_regular(self._folder / self._identity[0]) as file:
            text = file.read(_HEAD + _TAIL)
            if self._num_bytes > len(text):
                file.seek(self._num_bytes - _TAIL)
                text = text[: text.rfind(b"\n", 0, _HEAD) + 1] + file.read(_TAIL).partition(b"\n")[2]
            complete = text.rfind(b"\n") + 1
            self._offset = file.tell() - len(text) + complete
        marked = sorted(place for mark in _MARKS if (place := text.rfind(mark, 0, complete)) >= 0)
        return [
            *(text[place : text.find(b"\n", place)] for place in marked),
            *text[max(0, complete - _TAIL // 4) : complete].rsplit(b"\n", RECENT + 1)[-RECENT - 1 : -1],
        ]

    def lines(self) -> Iterator[bytes]:
        """Complete lines that were not read yet; a partly written last line waits for its end. Raises OSError."""
        if self._identity is None:
            return
        with open_regular(self._folder / self._identity[0]) as file:
            file.seek(self._offset)
            while line := file.readline(_MAX_LINE):
                if not line.endswith(b"\n") and len(line) < _MAX_LINE:
                    break
                self._offset += len(line)
                yield line


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Event of a line in this version's format; None for a line that is no event with a step.

    Inside the event, None replaces each number that a browser cannot read.
    """
    try:
        record = json.loads(line, parse_constant=lambda _: None, parse_float=_finite, parse_int=_exact)
    except ValueError:
        return None
    if isinstance(record, dict) and "event" not in record:
        record = {_RENAMED.get(name, name): value for name, value in record.items()}
        numbers = {name[5:]: value for name, value in record.items() if name.startswith("eval_")}
        record |= {"event": "evaluation", "numbers": numbers} if numbers else {"event": "step"}
    is_event = isinstance(record, dict) and isinstance(record["event"], str) and type(record.get("step")) is int
    return record if is_event else None


def _finite(text: str) -> float | None:
    return value if math.isfinite(value := float(text)) else None


def _exact(text: str) -> int | None:
    return int(text) if len(text) < 16 else None  # 2 ** 53 has 16 digits


def number(value: object) -> float:
    """`value` as a number; NaN if it is not a number."""
    return value if type(value) is float or type(value) is int else math.nan


class History:
    """Events that were read from a feed: all steps as columns of numbers, and events of other kinds unchanged."""

    def __init__(self) -> None:
        self.columns = {name: array("d" if name in _WIDE else "f") for name in _COLUMNS}
        self._events: dict[str, deque[dict[str, Any]]] = {
            "start": deque(maxlen=1),
            "evaluation": deque(maxlen=2000),
            "checkpoint": deque(maxlen=50),
            "warning": deque(maxlen=200),
        }
        self._num_unread = 0

    def __len__(self) -> int:
        return len(self.columns["step"])

    def add(self, line: bytes) -> None:
        """Add one line of the feed."""
        event = parse_event(line)
        if event is None:
            self._num_unread += 1
        elif event["event"] == "step":
            self._add_step(event)
        elif event["event"] in self._events:
            self._events[event["event"]].append(event)

    def _add_step(self, event: Mapping[str, Any]) -> None:
        if isinstance(waits := event.get("wait_seconds"), dict):
            waits = {f"wait/{cause}": seconds for cause, seconds in waits.items()}
            is_own = event.keys() >= _MEASURED
            own = [name for name in event if is_own and name not in _MEASURED and name not in ("event", "time")]
            event = {**event, **waits}
            for name in (*waits, *own):
                if name not in self.columns and len(self.columns) < _MAX_COLUMNS:
                    self.columns[name] = array("f", [math.nan]) * len(self)
        for name, column in self.columns.items():
            column.append(number(event.get(name)))

    def facts(self) -> dict[str, Any]:
        """Latest events of each kind except steps, and the numbers of steps and of lines that are not events."""
        start = self._events["start"][0] if self._events["start"] else {}
        events = {f"{kind}s": [*events] for kind, events in self._events.items() if kind != "start"}
        return {"start": start, **events, "num_steps": len(self), "num_unread": self._num_unread}

    def series(self, first: int, end: int, points: int) -> dict[str, list[float | None]]:
        """Columns of the entries `first` to `end` - 1, as means over at most `points` groups of consecutive entries.

        If groups have several entries, `loss:min` and `loss:max` are a group's extremes; None stands for NaN.
        """
        width = max(1, math.ceil((end - first) / points))
        found: dict[str, list[float | None]] = {}
        for name, column in self.columns.items():
            parts = [column[begin : min(begin + width, end)] for begin in range(first, end, width)]
            if name in _WIDE:
                found[name] = [part[-1] if math.isfinite(part[-1]) else None for part in parts]
                continue
            clean = [[value for value in part if math.isfinite(value)] for part in parts]
            found[name] = [_shown(sum(part) / len(part)) if part else None for part in clean]
            if name in _SPREAD and width > 1:
                found[f"{name}:min"] = [_shown(min(part)) if part else None for part in clean]
                found[f"{name}:max"] = [_shown(max(part)) if part else None for part in clean]
        return found


def _shown(value: float) -> float:
    return float(f"{value:.7g}")
