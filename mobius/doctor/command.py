"""`mobius doctor [--json] [--folder DIR] [options of mobius plan]`: all checks and the table, in less than 20 s."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from mobius.config.cli import parse_args
from mobius.config.command_parser import CommandParser
from mobius.config.config import spellings
from mobius.config.gpu_count import CPU_RANKS
from mobius.config.launch import count_cores, own_resources
from mobius.config.sources import read_command_line
from mobius.doctor import fits, machine
from mobius.doctor.apart import Problem, Work, run_apart
from mobius.doctor.checks import Finding, Status, judge_all
from mobius.errors import ConfigError
from mobius.hardware.host_memory import available_host_bytes
from mobius.planner.gpu_specs import find_gpu_spec
from mobius.process.log import printable, progress_bar, setup_logging
from mobius.process.ranks import device_list, seconds_since_start
from mobius.units import GIB

SECONDS, LEAST_SECONDS, SPEED_SECONDS = 18.0, 8.0, 6.0
"""Seconds for all checks since this process began, with 4 s of imports; minimum for checks; maximum for host speed."""
ROW_SECONDS = 180.0
"""Seconds for all rows of the table; 12 rows and all checks take 13 s on two idle cores."""


def parser() -> CommandParser:
    """Parser of the options that only this command has."""
    made = CommandParser(
        prog="mobius doctor",
        description="Check this machine, and say which models fit. All options of `mobius plan` work, too, such as "
        "--card RTX4090 --num_ranks 4 for GPUs that are not here, --host_memory_limit or --seq_length.",
        allow_abbrev=False,
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument("--folder", type=Path, default=Path(), help="folder whose disk is measured (default: this one)")
    return made


def run(words: Sequence[str]) -> int:
    """Print what this machine is good for; return 1 if a check found something wrong.

    Raises ConfigError for options that a plan does not accept.
    """
    own, given = parser().parse_among(words, spellings())
    if not own.json:
        setup_logging(0)
    if not own.folder.is_dir():
        raise ConfigError(f"--folder {own.folder} is no folder: name one on the disk to measure")
    end = time.monotonic() + max(LEAST_SECONDS, SECONDS - seconds_since_start())
    typed, resources, tries = read_command_line(given).values, own_resources(), {}
    if taken := sorted({"model_path", "finetuning_type"} & typed.keys()):
        options = ", ".join(f"--{name}" for name in taken)
        raise ConfigError(
            f"{options}: doctor plans a fixed list of models and training methods; "
            "for another model or method use mobius plan"
        )
    listed = [name for name in device_list(resources.visible_devices) if name != "-1"]
    num_gpus = resources.num_gpus if resources.visible_devices is None else len(listed)
    num_ranks = int(str(typed.get("num_ranks", num_gpus or CPU_RANKS)))
    if num_ranks > 0 and (num_gpus or "card" in typed):
        if "host_memory_limit" not in typed:
            given += ["--host_memory_limit", str(available_host_bytes() // GIB)]  # the memory that is free now
        tries = fits.rows_to_plan(given, num_ranks)
    # Wrong options would fail in every row, so check them once, with the first row.
    config = parse_args(["--dry_run", *(next(iter(tries.values()))[0][0].words if tries else given)])
    if config.planning.card is not None:
        find_gpu_spec(config.planning.card)
    facts, rows = _gather(own.folder, tries, end)
    findings = [*judge_all(facts)]
    report = {
        "checks": [asdict(each) for each in findings],
        "models": [{**asdict(row), "command": row.command} for row in rows],
        "seconds": round(seconds_since_start(), 1),
    }
    text = json.dumps(report, indent=2) if own.json else "\n".join(_lines(findings, rows, report["seconds"]))
    sys.stdout.write(f"{printable(text, sys.stdout)}\n")
    return int(any(each.status is Status.WRONG for each in findings))


def _gather(
    folder: Path, tries: dict[tuple[str, str], fits.Tries], end: float
) -> tuple[Mapping[str, object], list[fits.Row]]:
    """Facts by name, and the rows of the table.

    The machine's load is read before this command adds to it. The host's speed is measured while nothing else runs.
    """
    with progress_bar("looking at this machine", " parts", total=6 + len(tries)) as bar:
        alone: dict[str, Work] = {"host": machine.read_host, "speed": machine.measure_host}
        facts = run_apart(alone, end=min(end, time.monotonic() + SPEED_SECONDS), most_at_once=1, tick=bar.update)
        reads: dict[str, Work] = {
            "links": machine.measure_links,
            "disk": partial(machine.measure_disk, folder.absolute()),
            "gpus": machine.read_gpus,
            "software": machine.read_software,
        }
        rows, most = fits.works_of(tries), max(3, count_cores())  # links and disk need no core while measured
        ends = dict.fromkeys(rows, time.monotonic() + ROW_SECONDS)
        facts |= run_apart({**reads, **rows}, end=end, most_at_once=most, tick=bar.update, ends=ends)
    return facts, [_row(facts[" ".join(key)], own[0][0]) for key, own in tries.items()]


def _row(planned: object, first: fits.Row) -> fits.Row:
    if isinstance(planned, Problem):
        return fits.Row(first.model, first.way, first.words, None if planned.is_late else False, reason=planned.text)
    assert isinstance(planned, fits.Row)
    return planned


def _lines(findings: Sequence[Finding], rows: Sequence[fits.Row], seconds: object) -> Iterator[str]:
    for each in findings:
        yield f"{each.status:<5}  {each.name:<11}  {each.found}"
        if each.advice:
            yield f"       {'':<11}  -> {each.advice}"
    yield ""
    if rows:
        yield "What fits, in tokens per second as predicted by data sheets (each command prints the plan of its row):"
        yield from fits.describe(rows)
    else:
        yield "No GPU was found. What would fit with one: mobius doctor --card RTX4090 --num_ranks 2"
    yield f"{seconds} s"
