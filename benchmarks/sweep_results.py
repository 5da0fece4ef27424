"""What the runs of benchmarks/sweep.py gave: one result per run, and the tables made of them."""

import functools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch import RunResult
from rows import GIB
from sweep_settings import Options

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
    """What worker.py tells of the plan."""
    gpu_gib: float | None
    host_gib: float | None
    """Of the ranks' processes."""
    problem: str | None
    start_host_gib: dict[str, float] = field(default_factory=dict)
    """Of the first rank's process, at the end of each part of its start."""
    start_seconds: dict[str, float] = field(default_factory=dict)
    """Of these parts."""
    wait_seconds: dict[str, float] = field(default_factory=dict)
    """What the worst rank's computation waited for in a step, by cause."""
    machine_gib: float | None = None
    """What the machine used beyond what it used before the run."""

    @property
    def step_seconds(self) -> float | None:
        """Of a step between others; None if it failed."""
        return steady(self.all_step_seconds)


def steady(values: Sequence[float]) -> float | None:
    """The median of steps between others.

    The first waits for no update of a step before; the last for its own, which run behind the next one's start else.
    """
    between = values[1:-1] or values
    return statistics.median(between) if between else None


def result_of(options: Options, run: RunResult) -> Result:
    """From what a worker wrote; of a run that failed, its last lines."""
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
    """That with fewer seconds; a failed run is never it."""
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
    """Of runs of one setting, the first of them auto's."""
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
    """In Markdown; the first row has the titles."""
    titles, *others = rows
    lines = [titles, ["---"] * len(titles), *others]
    print("", *("| " + " | ".join(row) + " |" for row in lines), sep="\n")


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
