"""Plays fuzzed inputs: each must give a plan, a run, or one message with an exit code; `scripts/fuzz` starts it.

    scripts/fuzz --inputs 10000

Inputs run one after the other in this process. What ends in a traceback or says nothing for 20 s is told with its kind
and number; `--only "model configs" 17` plays one.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT / "benchmarks")]

from mobius.process.ranks import Ranks, prepare_environment  # noqa: E402

prepare_environment()  # before torch is imported
os.environ["HF_HUB_OFFLINE"] = "1"

from harness.fuzzed_inputs import FuzzedInput, make_base  # noqa: E402
from harness.fuzzed_parts import KINDS, fuzzed_input  # noqa: E402

from mobius.config.cli import given_options, parse_args  # noqa: E402
from mobius.errors import MobiusError  # noqa: E402
from mobius.process.log import setup_logging  # noqa: E402
from mobius.process.system_limits import limit_error_from  # noqa: E402

SILENT_SECONDS = 20
STUCK_SECONDS = 300
"""Time after which this process ends, with the place where it waits in C and hears no signal."""
MEMORY_BYTES = 24 * 2**30
"""Most address space: an input that asks for the machine's memory ends in a MemoryError."""
LONGEST_MESSAGE = 6000
GOOD = ("plan", "run", "message")
BAD = ("traceback", "silent", "left something", "long message")


class SilentError(BaseException):
    """Nothing came for SILENT_SECONDS; no `except Exception` of the code that is fuzzed catches it."""


@dataclass(frozen=True)
class Outcome:
    """End of an input: one of GOOD or BAD, and what was said."""

    result: str
    text: str
    seconds: float


Ended = tuple[FuzzedInput, Outcome]


def lay_out(made: FuzzedInput, base: Path, folder: Path) -> None:
    """Make the folder of an input: links to the base's files, and its own in place of some."""
    (folder / "model").mkdir(parents=True)
    (folder / "data.jsonl").symlink_to(base / "data.jsonl")
    for path in (base / made.family).iterdir():
        if path.name not in made.files:
            (folder / "model" / path.name).symlink_to(path)
    for name, content in made.files.items():
        if content is not None:
            place = Path(os.path.normpath(folder / name if name == "fuzzed.yaml" else folder / "model" / name))
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
    for name, target in made.links.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        place.unlink(missing_ok=True)
        place.symlink_to(target)


def play(made: FuzzedInput, folder: Path) -> Outcome:
    """Run an input in this process, in `folder`; the picture of its curves, half of a run's time, is left empty."""
    start, told, before = time.monotonic(), io.StringIO(), {*folder.rglob("*.partial")}
    with (
        _inside(folder),
        mock.patch("mobius.training.reporting.draw_training", lambda history, path, *, title: path.touch()),
        contextlib.redirect_stdout(told),
        contextlib.redirect_stderr(told),
        _noticing_silence(),
    ):
        setup_logging(0)
        try:
            result, text = _result_of(made)
        except SystemExit as end:
            result, text = "message", f"exit code {end.code}"
        except SilentError:
            result, text = "silent", traceback.format_exc()
        except BaseException:
            result, text = "traceback", traceback.format_exc()
    is_told = ".partial" in text or "complete in there" in text
    if result == "message" and not is_told and {*folder.rglob("*.partial")} - before:
        result = "left something"
    if result == "message" and len(text) > LONGEST_MESSAGE:
        result = "long message"
    return Outcome(result, text, time.monotonic() - start)


def _result_of(made: FuzzedInput) -> tuple[str, str]:
    """Do what the program does with arguments, without the end of the process."""
    from mobius.planner.forecast import run_dry
    from mobius.training.preview_run import run_preview
    from mobius.training.run import run_training

    arguments = made.arguments
    try:
        if made.call is not None:
            made.call()
            return "run", ""
        ranks, given = Ranks(0, 1, 0), given_options(arguments)
        config = parse_args(arguments, num_ranks=1)
        if config.planning.dry_run:
            return ("plan" if run_dry(config, ranks, given=given) else "message"), ""
        if config.data.preview is not None:
            run_preview(config, ranks, given=given)
            return "plan", ""
        run_training(config, ranks, given=given)
        return "run", ""
    except MobiusError as error:
        return ("message" if str(error).strip() else "silent"), str(error)
    except Exception as error:
        if (limit := limit_error_from(error)) is None:
            raise
        return "message", str(limit)


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _noticing_silence() -> Iterator[None]:
    start, delayed = time.monotonic(), _delayed_seconds()

    def notice(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - start - (_delayed_seconds() - delayed) >= SILENT_SECONDS:
            signal.setitimer(signal.ITIMER_REAL, 0)  # once: a second error could end what handles the first
            raise SilentError

    before = signal.signal(signal.SIGALRM, notice)
    signal.setitimer(signal.ITIMER_REAL, SILENT_SECONDS, SILENT_SECONDS / 10)
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _delayed_seconds() -> float:
    """Time that this process's main thread had to wait for a core, which is no silence of the program."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def inputs_of(number: int, first: int = 0) -> Iterator[tuple[str, int]]:
    """All kinds by turns, each with its numbers from `first` on."""
    kinds = list(KINDS)
    for index in range(number):
        yield kinds[index % len(kinds)], first + index // len(kinds)


def fuzz(chosen: Iterable[tuple[str, int]], place: Path) -> list[Ended]:
    """Play inputs below `place`; what is bad is told as it comes."""
    ended, base, chosen = [], place / "base", list(chosen)
    if not base.exists():
        base.mkdir()
        make_base(base)
    for kind, number in chosen:
        made, folder = fuzzed_input(kind, number, base), place / "input"
        lay_out(made, base, folder)
        outcome = play(made, folder)
        shutil.rmtree(folder)
        ended.append((made, outcome))
        if len(ended) % 500 == 0:
            sys.stderr.write(f"{len(ended)} of {len(chosen)} inputs played\n")
        if outcome.result in BAD:
            sys.stderr.write(f"{made.kind} {made.number}: {outcome.result}\n{outcome.text[-3000:]}\n")
    return ended


def table(ended: Sequence[Ended]) -> str:
    """Rows of kinds, columns of results."""
    counts = Counter((made.kind, outcome.result) for made, outcome in ended)
    columns = [*GOOD, *BAD]
    rows = [["inputs of", "all", *columns, "longest, s"]]
    for kind in KINDS:
        own = [outcome for made, outcome in ended if made.kind == kind]
        if own:
            slowest = max(outcome.seconds for outcome in own)
            rows.append([kind, str(len(own)), *(str(counts[kind, name]) for name in columns), f"{slowest:.1f}"])
    totals = [str(sum(outcome.result == name for _, outcome in ended)) for name in columns]
    rows.append(["all", str(len(ended)), *totals, f"{max(outcome.seconds for _, outcome in ended):.1f}"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main() -> int:
    """Print the table; the exit code is 1 if anything ended badly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000, help="(default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of each kind's first (default: %(default)s)")
    parser.add_argument("--only", nargs=2, metavar=("KIND", "NUMBER"), help="play this one and show what it says")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzzed-") as place:
        if arguments.only:
            ((made, outcome),) = fuzz([(arguments.only[0], int(arguments.only[1]))], Path(place))
            print(made.arguments, made.links, {name: (each or b"")[:300] for name, each in made.files.items()})
            print(outcome.result, outcome.text, sep="\n")
            return int(outcome.result in BAD)
        ended = fuzz(inputs_of(arguments.inputs, arguments.first), Path(place))
    print(table(ended))
    print(f"{time.monotonic() - start:.0f} s")
    return int(any(outcome.result in BAD for _, outcome in ended))


if __name__ == "__main__":
    sys.exit(main())
