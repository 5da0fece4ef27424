"""Finds the runs under a folder by their files, and reads these files while they grow, without any change.

The list of runs needs only the two ends of each feed; a run is read from its start only when a user opens it.
"""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any, Final

from mobius.board.feed import FEEDS, RECENT, Feed, History, number, parse_event
from mobius.files.regular_files import open_regular

FILES: Final = {
    **dict.fromkeys(("plan.json", "predict_results.json", "training_args.yaml"), 2**20),
    "generated_predictions.jsonl": 2**18,
    "trace.json": 2**26,
}
"""Files of a run that the page may read, with the maximum number of bytes that the page gets."""
_MARKS: Final = frozenset({*FEEDS, "training_args.yaml"})
_DEPTH, _MAX_FOLDERS = 5, 4000
_SEARCH_SECONDS: Final = 3.0
_QUIET_SECONDS: Final = 60.0
"""Shortest time without new lines after which a run that holds no lock counts as killed."""
_NUM_HISTORIES: Final = 8
_MAX_SECONDS: Final = 1e9
"""Longest plausible time between two steps; a longer time means a wrong clock."""
_ENDS: Final = {"error": "failed", "signal": "stopped", "time": "stopped"}
_SHOWN: Final = ("loss", "tokens_per_second", "step_seconds", "peak_gpu_memory_gib", "peak_host_memory_gib")


class Run:
    """One run of the list: its start, its latest numbers, and whether it still runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._feed, self._was_locked = folder, Feed(folder), False
        self._latest: dict[str, dict[str, Any]] = {}
        self._steps: deque[dict[str, Any]] = deque(maxlen=RECENT)

    def refresh(self) -> None:
        """Read new lines; the first time, only both ends of the feed. Raises OSError."""
        changed = self._feed.poll()
        if changed is None:
            self._latest.clear()
            self._steps.clear()
        for line in self._feed.outline() if changed is None else self._feed.lines() if changed else ():
            if (event := parse_event(line)) is not None and event["event"] == "step":
                self._steps.append(event)
            elif event is not None:
                self._latest[event["event"]] = event
                if event["event"] == "start":
                    self._latest.pop("end", None)

    def state(self, locked: frozenset[int], now: float) -> str:
        """`done`, `stopped` (can be resumed), `failed`, `running`, `empty`, or `killed` (no end, no process).

        `locked` are the inodes that processes have locked; a run locks its folder.
        """
        if (end := self._latest.get("end")) is not None:
            return _ENDS.get(str(end.get("reason")), "done")
        was_locked, is_locked = self._was_locked, False
        with suppress(OSError):
            is_locked = os.stat(self.folder).st_ino in locked
        self._was_locked = is_locked or was_locked
        if is_locked:
            return "running"
        if not self._steps and "start" not in self._latest:
            return "empty"
        patience = 5.0 if was_locked else max(_QUIET_SECONDS, 20 * (self._recent("step_seconds") or 0.0))
        return "running" if now - self._feed.modified < patience else "killed"

    def summary(self, name: str, locked: frozenset[int], now: float) -> dict[str, Any]:
        """Row of the list of runs."""
        start, last = self._latest.get("start", {}), self._steps[-1] if self._steps else {}
        state, total = self.state(locked, now), start.get("num_steps") or last.get("num_steps")
        numbers = self._latest.get("evaluation", {}).get("numbers")
        loss = number(numbers.get("loss")) if isinstance(numbers, dict) else math.nan
        return {
            "id": name,
            "state": state,
            "step": last.get("step", start.get("step", 0)),
            "num_steps": total if isinstance(total, int) else None,
            "modified": round(self._feed.modified),
            "eval_loss": loss if math.isfinite(loss) else None,
            **{shown: self._recent(shown) for shown in _SHOWN},
            "left": seconds_left([*self._steps], total) if state == "running" and isinstance(total, int) else None,
        }

    def _recent(self, name: str) -> float | None:
        """Median of the last 20 steps, which a single slow or odd step does not change."""
        values = [number(step.get(name)) for step in islice(reversed(self._steps), 20)]
        known = [value for value in values if math.isfinite(value)]
        return statistics.median(known) if known else None


def seconds_left(steps: Sequence[dict[str, Any]], total: int) -> list[float] | None:
    """Seconds until step `total` at the usual pace, and at the fastest and the slowest pace of any eighth of `steps`.

    The pace follows the clock, so the time of evaluations and checkpoints counts.
    """
    paces = []
    for later, earlier in pairwise(steps[::-1][:: max(1, len(steps) // 8)]):
        seconds, num_steps = number(later.get("time")) - number(earlier.get("time")), later["step"] - earlier["step"]
        if num_steps > 0 and 0 < seconds < _MAX_SECONDS:
            paces.append(seconds / num_steps)
    if not paces:
        return None
    left = max(0, total - steps[-1]["step"])
    return [round(left * pace, 1) for pace in (statistics.median(paces), min(paces), max(paces))]


class RunStore:
    """All runs under a folder. Any thread may call the methods; nothing runs between calls."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._histories: OrderedDict[str, tuple[Feed, History, int]] = OrderedDict()
        self._numbers = count(1)
        self._searched = -math.inf

    def summaries(self) -> list[dict[str, Any]]:
        """Rows of the list of runs; the run with the latest change comes first."""
        with self._lock:
            if time.monotonic() - self._searched > _SEARCH_SECONDS:
                self._runs = {name: self._runs.get(name) or Run(path) for name, path in find_runs(self.root)}
                self._searched = time.monotonic()
            for run in self._runs.values():
                with suppress(OSError):
                    run.refresh()
            locked, now = locked_inodes(), time.time()
            rows = [run.summary(name, locked, now) for name, run in self._runs.items()]
        return sorted(rows, key=lambda row: -row["modified"])

    def history(self, name: str, seen: tuple[int, int], points: int) -> tuple[dict[str, Any], tuple[int, int]]:
        """Data of a run that a page does not have yet, with the mark to pass as `seen` next time.

        `seen` (0, 0) asks for all data. The page appends the columns unless `is_whole` says to replace them. Raises
        KeyError if there is no such run.
        """
        with self._lock:
            history, own = self._read(name)
            first = seen[1] if seen[0] == own and len(history) - seen[1] <= points // 4 else 0
            series = history.series(first, len(history), points)
            return {"id": name, "is_whole": not first, "series": series, **history.facts()}, (own, len(history))

    def section(self, name: str, first_step: float, last_step: float, points: int) -> dict[str, Any]:
        """Columns of the steps `first_step` to `last_step`, in finer groups than for the whole run. Raises KeyError."""
        with self._lock:
            history, _ = self._read(name)
            steps = history.columns["step"]
            inside = [index for index, step in enumerate(steps) if first_step <= step <= last_step] or [0]
            end = min(inside[-1] + 1, len(steps))  # there may be no steps
            return {"id": name, "series": history.series(inside[0], end, points)}

    def _read(self, name: str) -> tuple[History, int]:
        """History of a run up to now, and the number of the file from which it was read."""
        feed, history, own = self._histories.pop(name, (Feed(self._runs[name].folder), History(), 0))
        if feed.poll() is None:
            history, own = History(), next(self._numbers)
        with suppress(OSError):
            for line in feed.lines():
                history.add(line)
        self._histories[name] = feed, history, own
        if len(self._histories) > _NUM_HISTORIES:
            self._histories.popitem(last=False)
        return history, own

    def folder(self, name: str) -> Path:
        """Folder of a run; KeyError if there is no such run."""
        return self._runs[name].folder

    def file(self, name: str, file: str) -> bytes:
        """Beginning of a run's file; empty without a file. Raises KeyError for names not in FILES, and OSError."""
        path, most = self.folder(name) / file, FILES[file]
        if not path.exists():
            return b""
        with open_regular(path) as opened:
            return opened.read(most)


def find_runs(root: Path) -> Iterator[tuple[str, Path]]:
    """Folders at or under `root` with files of a run, by their path relative to `root`; links are not followed."""
    for place, folders, files in islice(os.walk(root), _MAX_FOLDERS):
        name = Path(place).relative_to(root)
        own = (each for each in sorted(folders) if not each.startswith((".", "checkpoint-")))
        folders[:] = own if len(name.parts) < _DEPTH else ()
        if not _MARKS.isdisjoint(files) and str(name).isprintable():
            yield name.as_posix(), Path(place)


def locked_inodes() -> frozenset[int]:
    """Inodes locked by `flock`, from the kernel's table: taking a lock as a test could make a run's start fail."""
    with suppress(OSError, ValueError, IndexError), open("/proc/locks", encoding="ascii") as table:
        rows = [line.split() for line in table]
        return frozenset(int(row[5].rpartition(":")[2]) for row in rows if row[1] == "FLOCK")
    return frozenset()
