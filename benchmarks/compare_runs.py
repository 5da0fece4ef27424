"""Prints one table row per finished run: losses against a yardstick, seconds per step and where they go, memory.

    python benchmarks/compare_runs.py RUN_FOLDER... [--losses losses.json]

A run folder is a --save_dir; medians leave the first two steps out.
"""

import argparse
import json
import statistics
from pathlib import Path

COLUMNS = (
    f"{'run':28} {'steps':>5} {'last loss':>9} {'off by':>7} {'s/step':>7} {'tokens/s':>9} "
    f"{'weights':>7} {'optim':>7} {'neighb':>7} {'alloc':>6} {'resvd':>6} {'host':>6}"
)


def row(folder: Path, yardstick: list[float] | None) -> str:
    """One run as text; waits are the worst rank's seconds per step, memory is in GiB."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steady = steps[2:] or steps

    def median(key: str) -> float:
        return float(statistics.median(step[key] for step in steady))

    waits = {cause: statistics.median(s["wait_seconds"][cause] for s in steady) for cause in steps[0]["wait_seconds"]}
    worst = "-"
    if yardstick is not None:
        errors = [abs(s["loss"] - y) / y for s, y in zip(steps, yardstick, strict=False)]
        worst = f"{max(errors):.3%}"
    last = steps[-1]
    allocated, reserved = (last[key] or 0.0 for key in ("peak_gpu_memory_gib", "reserved_gpu_memory_gib"))
    return (
        f"{folder.name:28} {len(steps):5} {last['loss']:9.4f} {worst:>7} {median('step_seconds'):7.3f} "
        f"{median('tokens_per_second'):9,.0f} "
        f"{waits['weights']:7.3f} {waits['optimizer']:7.3f} {waits['neighbours']:7.3f} "
        f"{allocated:6.2f} {reserved:6.2f} {last['peak_host_memory_gib']:6.1f}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--losses", type=Path, help="losses of plain_training.py")
    arguments = parser.parse_args()
    yardstick = json.loads(arguments.losses.read_text()) if arguments.losses else None
    print(COLUMNS)
    for folder in arguments.folders:
        print(row(folder, yardstick) if (folder / "metrics.jsonl").is_file() else f"{folder.name:28} no metrics")


if __name__ == "__main__":
    main()
