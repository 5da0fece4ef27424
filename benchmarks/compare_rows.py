"""Prints one Markdown table of the rows that benchmark.py appended to a file: each figure beside its prediction.

    python benchmarks/compare_rows.py rows.jsonl [MORE.jsonl ...]

"off" is the share of the prediction by which the measured seconds differ; "first step" the seconds from the launch on.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

from benchmark import parse
from rows import markdown_table

TITLES = (
    *("work", "system", "s/step", "predicted", "off", "tokens/s", "ratio", "GPU GiB", "predicted", "host GiB"),
    *("predicted", "first step, s"),
)


def work_of(command: str) -> str:
    """Return what a command of benchmark.py measures: shape, batch, clipping, environment."""
    words = parse(shlex.split(command)[2:])
    parts = [words.size if words.layers is None else f"{words.layers} layers of {words.size}"]
    parts += [f"{words.batch_size} × {words.seq_length}", "clipping" if words.max_grad_norm else "no clipping"]
    return ", ".join([*parts, *("=".join(setting) for setting in words.env)])


def cells(row: Mapping[str, Any]) -> Sequence[str]:
    """Return the row's texts, in the order of `TITLES`."""
    measured, name = row["measurement"], " ".join([row["name"], row["options"]]).strip()
    if measured is None:
        return [work_of(row["command"]), name, row["problem"], *[""] * (len(TITLES) - 3)]
    plan = measured["plan"] or {}
    seconds, predicted = measured["step_seconds"], plan.get("step_seconds")
    return [
        work_of(row["command"]),
        name,
        f"{seconds:.3f}",
        _text(predicted, ".3f"),
        _text(predicted and seconds / predicted - 1, "+.1%"),
        f"{measured['tokens_per_second']:,.0f}",
        _text(row["ratio"], ".2f"),
        _text(measured["reserved_gib"], ".1f"),
        _text(plan.get("gpu_gib"), ".1f"),
        _text(measured["host_gib"], ".1f"),
        _text(plan.get("host_gib"), ".1f"),
        f"{measured['load_seconds']:.0f}",
    ]


def _text(number: float | None, look: str) -> str:
    return "" if number is None else format(number, look)


def main() -> None:
    """Read the files and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", type=Path)
    lines = [line for path in parser.parse_args().rows for line in path.read_text(encoding="utf-8").splitlines()]
    print(markdown_table(TITLES, [cells(json.loads(line)) for line in lines]))


if __name__ == "__main__":
    main()
