"""Owns the text summary of a finished run (`--save_results`): what was run, how long it took, what memory it used."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mobius.errors import CheckpointError
from mobius.output.metrics import StepMetrics
from mobius.plan.simulation import Forecast, steady_seconds
from mobius.schedule.lanes import WaitCause
from mobius.units import gib_cell
from mobius.writing import replaced_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory that one rank used. GPU bytes are None on a rank that computes on the CPU."""

    rank: int
    device: str
    """Name as people know it: "NVIDIA L20", "cpu"."""
    peak_allocated_bytes: int | None
    """Most GPU memory in tensors at one time."""
    peak_reserved_bytes: int | None
    """Most GPU memory that the allocator held at one time: what must fit."""
    persistent_bytes: int | None
    """GPU memory in tensors between two steps: slots, resident stages, buffers."""
    peak_host_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimings:
    """Wall-clock seconds of the parts of a run."""

    load_seconds: float
    """Time from the start of the program to the start of training."""
    training_seconds: float
    """Time of all steps, the optimizer's work included."""
    save_seconds: float


def write_report(
    path: Path,
    config_yaml: str,
    plan_text: str,
    steps: Sequence[StepMetrics],
    per_rank: Sequence[RankMemory],
    timings: RunTimings,
    forecast: Forecast | None = None,
) -> None:
    """Write the summary to `path`; it appears whole or not at all. Raises CheckpointError."""
    assert steps, "a run has at least one step"
    sections = [
        ("Result", _result(steps)),
        ("Time", _time(steps, timings, forecast)),
        ("Waiting", _waiting(steps)),
        ("Memory", _memory(per_rank)),
        ("Settings", config_yaml.strip()),
        ("Plan", plan_text.strip()),
    ]
    text = "\n\n".join(f"{title}\n{'=' * len(title)}\n{body}" for title, body in sections) + "\n"
    try:
        with replaced_whole(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


def _result(steps: Sequence[StepMetrics]) -> str:
    rows = [
        ("steps", f"{len(steps)}"),
        ("epochs", f"{steps[-1].epoch:.3f}"),
        ("samples, repeated ones counted", f"{sum(step.num_samples for step in steps):,}"),
        ("skipped steps", f"{steps[-1].skipped_steps}"),
        ("loss, first step", f"{steps[0].loss:.4f}"),
        ("loss, last step", f"{steps[-1].loss:.4f}"),
        ("tokens without padding", f"{sum(step.num_tokens for step in steps):,}"),
        ("target tokens", f"{sum(step.num_targets for step in steps):,}"),
        ("padding, share of all positions", f"{statistics.fmean(step.padding for step in steps):.1%}"),
    ]
    return _table(rows)


def _time(steps: Sequence[StepMetrics], timings: RunTimings, forecast: Forecast | None) -> str:
    seconds = [step.step_seconds for step in steps]
    rows = [
        ("loading", f"{timings.load_seconds:.2f} s"),
        ("training, optimizer included", f"{timings.training_seconds:.2f} s"),
        ("saving", f"{timings.save_seconds:.2f} s"),
        ("seconds per step, median", f"{statistics.median(seconds):.3f} s"),
        ("seconds per step, mean", f"{statistics.fmean(seconds):.3f} s"),
        ("seconds per step, first", f"{seconds[0]:.3f} s"),
        ("tokens per second, without padding", f"{sum(step.num_tokens for step in steps) / sum(seconds):,.0f}"),
    ]
    if forecast is not None:
        off = forecast.step_seconds / steady_seconds(seconds) - 1
        rows += [
            ("seconds per step, predicted", f"{forecast.step_seconds:.3f} s, limited by {forecast.limit}"),
            ("prediction off by", f"{off:+.1%} of a steady step, {forecast.basis}"),
        ]
    return _table(rows)


def _waiting(steps: Sequence[StepMetrics]) -> str:
    total = sum(step.step_seconds for step in steps)
    waits = {cause: [step.wait_seconds.get(cause, 0.0) for step in steps] for cause in WaitCause}
    rows = [(cause, f"{statistics.median(own):.3f}", f"{sum(own) / total:.1%}") for cause, own in waits.items()]
    return _table([("computation waited for", "seconds per step, median", "share of all step time"), *rows])


def _memory(per_rank: Sequence[RankMemory]) -> str:
    rows: list[tuple[str, ...]] = [("rank", "device", "GPU peak", "GPU reserved", "GPU persistent", "host peak")]
    for memory in sorted(per_rank, key=lambda memory: memory.rank):
        gpu_bytes = (memory.peak_allocated_bytes, memory.peak_reserved_bytes, memory.persistent_bytes)
        rows.append((f"{memory.rank}", memory.device, *map(_gib, gpu_bytes), _gib(memory.peak_host_bytes)))
    host = sum(memory.peak_host_bytes for memory in per_rank)
    return f"{_table(rows)}\nhost memory of all ranks together: {_gib(host)}"


def _gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{gib_cell(num_bytes)} GiB"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
