"""Shows one step of a trace.json that `--trace` wrote: seconds per rank and lane, and the picture if it is wanted.

It needs no GPU. The whole trace opens in ui.perfetto.dev or chrome://tracing.

    python scripts/show_trace.py save_ckpt/trace.json --step 4 --output timeline.png
"""

import argparse
import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("mobius") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mobius.errors import MobiusError
from mobius.log import printable
from mobius.reporting.pictures import draw_timeline
from mobius.reporting.trace import Trace, read_trace


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Show one measured step.")
    parser.add_argument("trace", type=Path, help="the trace.json of a run with --trace")
    parser.add_argument("--step", type=int, help="step to show (default: the second one of the trace)")
    parser.add_argument("--output", type=Path, help="write a picture, FILE.png or FILE.svg", metavar="FILE")
    return parser.parse_args(argv)


def table(trace: Trace, step: int) -> str:
    """Milliseconds that each lane of each rank worked in `step`, and that compute waited, by cause."""
    rows = [{name: f"{1000 * value:.1f}" for name, value in row.items()} for row in trace.lane_seconds(step)]
    names = list(dict.fromkeys(name for row in rows for name in row))
    header = ["rank", *names]
    cells = [[str(rank), *(row.get(name, "-") for name in names)] for rank, row in enumerate(rows)]
    widths = [max(len(line[column]) for line in [header, *cells]) for column in range(len(header))]
    lines = [
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in [header, *cells]
    ]
    return "\n".join([f"step {step} on {trace.facts.device}, milliseconds", *lines])


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        trace = read_trace(arguments.trace)
        step = trace.choose_step(arguments.step)
        print(printable(table(trace, step), sys.stdout))
        if arguments.output is not None:
            draw_timeline(trace, arguments.output, step=step)
            print(printable(f"\npicture written to {arguments.output}", sys.stdout))
    except (MobiusError, OSError) as error:
        print(f"error: {printable(str(error), sys.stderr)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
