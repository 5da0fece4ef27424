"""Draws the predicted step of a plan, or writes it for ui.perfetto.dev as a measured one; needs no GPU.

python scripts/draw_step.py FILE.png|FILE.svg|FILE.json OPTIONS_OF_MOBIUS_PLAN
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("mobius") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mobius.errors import MobiusError, PlanError
from mobius.planner.forecast import forecast
from mobius.process.log import printable
from mobius.reporting.pictures import draw_timeline
from mobius.reporting.trace import predicted_trace, write_trace
from mobius.schedule.build import build_unchecked


def main(argv: list[str]) -> int:
    if not argv or Path(argv[0]).suffix not in (".png", ".svg", ".json"):
        print(__doc__)
        return 2
    path, words = Path(argv[0]), argv[1:]
    try:
        own = forecast(words)
        if own.found is None or own.found.step_time_prediction is None:
            raise PlanError(own.problem or "no step is predicted: name a GPU with --card, and a format of two bytes")
    except MobiusError as error:
        print(f"error: {printable(str(error), sys.stderr)}", file=sys.stderr)
        return 2
    assert own.machine.gpu_spec is not None
    schedule, steps = build_unchecked(own.found.plan), own.found.step_time_prediction
    trace = predicted_trace(steps.spans, steps.step_ends, schedule, device=own.machine.gpu_spec.name)
    if path.suffix == ".json":
        write_trace(path, trace)
    else:
        draw_timeline(trace, path, step=trace.steps[-1])
    print(printable(f"written: {path}", sys.stdout))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
