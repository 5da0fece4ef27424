"""Results of sweep.py's runs, one for each, and the tables made of them."""

import functools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch import RunResult
from rows import markdown_table
from sweep_settings import Options

from mobius.units import GIB

ERROR_LINES = 2
TITLES = {
    "choice": ["setting", "auto: stages / chunks / resident", "auto, s", "best found, s", "auto off by", "runs"],
    "prediction": ["setting", "GPU GiB: predicted / reserved", "host GiB: predicted / peak", "s per step", "by"],
}


@dataclass(frozen=True)
class Result:
    """One run."""

    options: Options
    all_step_seconds: list[float]
    """Empty if it failed."""
    plan: dict[str, Any]
    """The plan as worker.py tells it."""
    gpu_gib: float | None
    host_gib: float | None
    """Memory of the ranks' processes."""
    problem: str | None
    start_host_gib: dict[str, float] = field(default_factory=dict)
    """Memory of the first rank's process at the end of each part of its start."""
    start_seconds: dict[str, float] = field(default_factory=dict)
    """Time of each of these parts."""
    wait_seconds: dict[str, float] = field(default_factory=dict)
    """Waits of the worst rank's computation in a step, by cause."""
    machine_gib: float | None = None
    """Growth of the memory that the machine uses."""

    @property
    def step_seconds(self) -> float | None:
        """Time of a step between others; None if the run failed."""
        return steady(self.all_step_seconds)


def steady(values: Sequence[float]) -> float | None:
    """The median of steps between others.

    The first waits for no update of a step before; the last for its own, which run behind the next one's start else.
    """
    between = values[1:-1] or values
    return statistics.median(between) if between else None


def result_of(options: Options, run: RunResult) -> Result:
    """Make a result of what a worker wrote; a run that failed gives its last lines."""
    if run.problem is not None:
        last = " ".join(run.log_end.splitlines()[-ERROR_LINES:])
        return Result(options, [], {}, None, None, f"{run.problem}: {last}")
    steps = run.output["steps"]
    waits = {cause: steady([step["wait_seconds"][cause] for step in steps]) for cause in steps[0]["wait_seconds"]}
    return Result(
        options,
        [step["step_seconds"] for step in steps],
        run.output["plan"],
        steps[-1]["reserved_gpu_memory_gib"],
        steps[-1]["peak_host_memory_gib"],
        None,
        run.output["start_host_gib"],
        run.output["start"],
        {cause: seconds for cause, seconds in waits.items() if seconds is not None},
        run.machine_bytes / GIB,
    )


def faster(one: Result, other: Result) -> Result:
    """The result with fewer seconds; a failed run is never faster."""
    if one.step_seconds is None:
        return other
    return other if other.step_seconds is not None and other.step_seconds < one.step_seconds else one


def describe(result: Result) -> str:
    """A run in a line."""
    if result.step_seconds is None:
        return result.problem or "failed"
    plan = result.plan
    predicted = "" if plan["step_seconds"] is None else f", predicted {plan['step_seconds']:.3f}"
    chosen = f"{plan['num_stages']} stages, {plan['num_chunks']} chunks, resident {plan['resident']}"
    return f"{result.step_seconds:.3f} s{predicted}; {chosen}, kept {plan['kept']}, slots {plan['slots']}"


def choice_row(name: str, results: Sequence[Result], note: str = "") -> list[str]:
    """The row of one setting; the first of its runs is auto's."""
    auto, best = results[0], functools.reduce(faster, results)
    if auto.step_seconds is None or best.step_seconds is None:
        return [name, "-", "-", "-", "-", auto.problem or "failed"]
    chosen = f"{auto.plan['num_stages']} / {auto.plan['num_chunks']} / {max(auto.plan['resident'], default=0)}"
    off = auto.step_seconds / best.step_seconds - 1
    found = "auto" if best is auto else str(best.options)
    return [name, chosen, f"{auto.step_seconds:.3f}", f"{best.step_seconds:.3f} ({found})", f"{off:+.1%}",
            f"{len(results)} runs{note and ', '}{note}"]  # fmt: skip


def prediction_cells(result: Result) -> list[str]:
    """GPU and host memory and seconds, predicted and measured, and what the prediction went by."""
    plan = result.plan
    return [
        beside(plan["gpu_gib"], result.gpu_gib),
        beside(plan["host_gib"] or None, result.host_gib),
        beside(plan["step_seconds"], result.step_seconds),
        plan["basis"] or "no estimate",
    ]


def beside(predicted: float | None, measured: float | None) -> str:
    """`predicted / measured (off by)`."""
    if predicted is None or not measured:
        return "-"
    return f"{predicted:.3g} / {measured:.3g} ({predicted / measured - 1:+.1%})"


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown; the first row has the titles."""
    titles, *others = rows
    print("", markdown_table(titles, others), sep="\n")


def report(path: Path, words: Sequence[str]) -> None:
    """The tables of `choice` and `prediction` from the runs in `path`."""
    by_setting: dict[str, list[Result]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        name, options = record.pop("setting"), Options(**record.pop("options"))
        if words and not any(word in name for word in words):
            continue
        if options == Options():
            by_setting[name] = []  # another sweep of it has begun
        by_setting.setdefault(name, []).append(Result(options, **record))
    chosen, predicted = [TITLES["choice"]], [["setting", "options", *TITLES["prediction"][1:]]]
    for name, results in by_setting.items():
        if results[0].options == Options() and len(results) > 1:
            chosen.append(choice_row(name, results))
        done = [result for result in results if result.step_seconds is not None]
        predicted += [[name, str(result.options), *prediction_cells(result)] for result in done]
    print_table(chosen)
    print_table(predicted)
