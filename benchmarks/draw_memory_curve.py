"""Draws tokens per second against GPU memory from benchmark.py's rows: a curve of Mobius's, a point for each peer.

The memory is what a run reserved on its fullest GPU. Rows without a measurement are left out. Needs matplotlib.

    bash benchmarks/gpu.sh memory
    python benchmarks/draw_memory_curve.py rows.jsonl --output docs/images/memory_7b.png
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Point:
    """One measured run."""

    name: str
    gib: float
    """GPU memory reserved on the fullest rank."""
    tokens_per_second: float
    is_mobius: bool


def points_of(records: Sequence[Mapping[str, Any]]) -> list[Point]:
    """The measured rows, by memory; raises ValueError if Mobius has fewer than two."""
    points = [
        Point(
            "no limit" if record["name"] == "Mobius" and not record["options"] else record["name"],
            record["measurement"]["reserved_gib"],
            record["measurement"]["tokens_per_second"],
            record["measurement"]["wait_seconds"] is not None,
        )
        for record in records
        if record["measurement"] is not None and record["measurement"]["reserved_gib"] is not None
    ]
    if sum(point.is_mobius for point in points) < 2:
        raise ValueError("a curve takes at least two measured rows of Mobius on GPUs")
    return sorted(points, key=lambda point: point.gib)


def draw(points: Sequence[Point], title: str, path: Path) -> None:
    """Write the picture; the name's ending says in which format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    own = [point for point in points if point.is_mobius]
    above = (4, 6)
    places = {point: above if number % 2 else (4, -12) for number, point in enumerate(own)}
    axes.plot([p.gib for p in own], [p.tokens_per_second for p in own], marker="o", color=(0.13, 0.45, 0.71))
    for point in points:
        if not point.is_mobius:
            axes.plot(point.gib, point.tokens_per_second, marker="s", color=(0.4, 0.4, 0.4))
        axes.annotate(
            point.name,
            (point.gib, point.tokens_per_second),
            xytext=places.get(point, above),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set_xlabel("GPU memory taken on the fullest GPU, GiB")
    axes.set_ylabel("tokens per second")
    axes.margins(x=0.12, y=0.1)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.set_title(title, fontsize=10)
    figure.savefig(path)


def main(argv: list[str] | None = None) -> int:
    """Draw; the exit code is 2 where the rows cannot be drawn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="JSON lines that benchmark.py --output appended")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.png")
    parser.add_argument("--title", default="", help="above the picture")
    arguments = parser.parse_args(argv)
    try:
        records = [json.loads(line) for line in arguments.rows.read_text().splitlines() if line.strip()]
        points = points_of(records)
        title = arguments.title or records[0]["hardware"].partition(",")[0]
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        draw(points, title, arguments.output)
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {arguments.rows}: {error}", file=sys.stderr)
        return 2
    for point in points:
        print(f"{point.gib:7.2f} GiB  {point.tokens_per_second:9,.0f} tokens/s  {point.name}")
    print(f"drawn: {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
