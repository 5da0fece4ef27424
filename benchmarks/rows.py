"""Owns the arithmetic and the look of benchmark.py's rows: pure functions, from what a run wrote to a line."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mobius.planner.gpu_specs import gpu_spec_of_device
from mobius.units import GIB

CAUSES = ("weights", "optimizer", "neighbours")
MICROBATCH = ("rows_per_microbatch", "trial_seconds_per_row")
"""What a peer tells that chooses its microbatch."""


@dataclass(frozen=True)
class Workload:
    """The work that all rows do alike."""

    num_parameters: int
    tokens: int
    """Positions of a step: its tokens, unless samples are packed."""
    num_gpus: int
    gpu_name: str
    """As the driver tells it; "" without a GPU."""
    warmup: int
    """Steps at the start that medians leave out."""
    num_active: int | None = None
    """Parameters that compute for a token, where they are not all: of experts a few."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Numbers of one run; GiB of the GPU are the worst rank's."""

    step_seconds: float
    """Median without the warm-up."""
    tokens_per_second: float
    mfu: float | None
    """6 operations per parameter and token, as a share of the GPUs' bf16 rate; None for unknown GPUs."""
    wait_seconds: Mapping[str, float] | None
    """Mobius's medians by cause, of the worst rank; None of a peer."""
    allocated_gib: float | None
    reserved_gib: float | None
    host_gib: float
    """Sum of the ranks' largest resident sets."""
    machine_gib: float
    """Growth of the memory that the machine uses."""
    load_seconds: float
    """Time from the launch to the first step."""
    loss: float
    """Loss of the last step."""
    all_step_seconds: Sequence[float]
    huge_page_share: float | None = None
    """Share of rank 0's memory on huge pages; recorded, and no column."""
    start: Mapping[str, float] | None = None
    """Parts of `load_seconds` on rank 0; recorded, and no column."""
    plan: Mapping[str, Any] | None = None
    """Mobius's plan and predictions; recorded, and no column."""
    microbatch: Mapping[str, Any] | None = None
    """Microbatch that a peer chose, and those it tried; recorded, and no column."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line: a measurement, or why there is none."""

    name: str
    options: str
    measurement: Measurement | None
    problem: str | None
    run_seconds: float
    ratio: float | None = None
    """Mobius's tokens per second over this row's."""


def mobius_measurement(output: Mapping[str, Any], workload: Workload, machine_bytes: int) -> Measurement:
    """Make a measurement of what worker.py wrote: a dictionary of every step's metrics."""
    steps = output["steps"]
    steady, last = steps[workload.warmup :], steps[-1]
    return _measurement(
        [step["step_seconds"] for step in steps],
        [step["num_tokens"] for step in steps],
        workload,
        wait_seconds={
            cause: statistics.median(step["wait_seconds"][cause] for step in steady)
            for cause in CAUSES
            if cause in last["wait_seconds"]
        },
        allocated_gib=last["peak_gpu_memory_gib"],
        reserved_gib=last["reserved_gpu_memory_gib"],
        host_gib=last["peak_host_memory_gib"],
        machine_gib=machine_bytes / GIB,
        load_seconds=output["load_seconds"],
        loss=last["loss"],
        huge_page_share=output.get("huge_page_share"),
        start=output.get("start"),
        plan=output.get("plan"),
    )


def peer_measurement(output: Mapping[str, Any], workload: Workload, machine_bytes: int) -> Measurement:
    """Make a measurement of what a peer wrote."""
    return _measurement(
        output["step_seconds"],
        output.get("step_tokens", [workload.tokens] * len(output["step_seconds"])),
        workload,
        wait_seconds=None,
        allocated_gib=output["peak_allocated"] / GIB or None,
        reserved_gib=output["peak_reserved"] / GIB or None,
        host_gib=output["peak_host"] / GIB,
        machine_gib=machine_bytes / GIB,
        load_seconds=output["load_seconds"],
        loss=output["loss"],
        microbatch={key: output[key] for key in MICROBATCH} if MICROBATCH[0] in output else None,
    )


def _measurement(seconds: Sequence[float], tokens: Sequence[int], workload: Workload, **others: Any) -> Measurement:
    median = statistics.median(seconds[workload.warmup :])
    rate = statistics.mean(tokens[workload.warmup :]) / median
    return Measurement(
        step_seconds=median,
        tokens_per_second=rate,
        mfu=model_flops_utilization(rate, workload),
        all_step_seconds=list(seconds),
        **others,
    )


def model_flops_utilization(tokens_per_second: float, workload: Workload) -> float | None:
    """Share of the GPUs' bf16 rate that useful work takes (recompute is none); None for an unknown GPU."""
    card = gpu_spec_of_device(workload.gpu_name)
    if card is None:
        return None
    active = workload.num_active or workload.num_parameters
    return 6 * active * tokens_per_second / (workload.num_gpus * card.tera_flops * 1e12)


def _value(title: str, look: str, get: Callable[[Measurement], float | None]) -> tuple[str, Callable[[Row], str]]:
    def text(row: Row) -> str:
        value = None if row.measurement is None else get(row.measurement)
        return "-" if value is None else format(value, look)

    return title, text


def _wait(cause: str) -> Callable[[Measurement], float | None]:
    return lambda measurement: (measurement.wait_seconds or {}).get(cause)


COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    _value("s/step", ".3f", lambda m: m.step_seconds),
    _value("tokens/s", ",.0f", lambda m: m.tokens_per_second),
    ("ratio", lambda row: "-" if row.ratio is None else f"{row.ratio:.2f}"),
    _value("MFU", ".1%", lambda m: m.mfu),
    *(_value(title, ".3f", _wait(cause)) for title, cause in zip(("weights", "optim", "neighb"), CAUSES, strict=True)),
    _value("alloc", ".2f", lambda m: m.allocated_gib),
    _value("resvd", ".2f", lambda m: m.reserved_gib),
    _value("host", ".1f", lambda m: m.host_gib),
    _value("machine", ".1f", lambda m: m.machine_gib),
    _value("load s", ".0f", lambda m: m.load_seconds),
    _value("loss", ".2f", lambda m: m.loss),
)
WIDTH = 8


def header() -> str:
    """The titles, in the columns of `line`."""
    return f"{'system':26}" + "".join(f"{title:>{WIDTH + 1}}" for title, _ in COLUMNS)


def line(row: Row) -> str:
    """The row in columns of fixed width, or its problem."""
    if row.problem is not None:
        return f"{row.name:26} {row.problem}" + (f" after {row.run_seconds:.0f} s" if row.run_seconds else "")
    return f"{row.name:26}" + "".join(f"{text(row):>{WIDTH + 1}}" for _, text in COLUMNS)


def markdown(rows: Sequence[Row]) -> str:
    """The table of all rows for a document."""
    lines = []
    for row in rows:
        texts = [text(row) for _, text in COLUMNS]
        lines.append([row.name, row.problem, *texts[1:]] if row.problem is not None else [row.name, *texts])
    return markdown_table(["system", *(title for title, _ in COLUMNS)], lines)


def markdown_table(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (titles, ["---"] * len(titles), *lines))


def record(row: Row, facts: Mapping[str, object]) -> dict[str, object]:
    """The row as one JSON object, `facts` of the whole benchmark in it; numbers that JSON does not have are None."""
    return {**facts, **{key: _finite(value) for key, value in asdict(row).items()}}


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
