"""Text summary of a finished run (`--save_results`): settings, times and memory."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mobius.errors import CheckpointError
from mobius.files.atomic_files import atomic_write
from mobius.reporting.events import StepMetrics, format_clock
from mobius.schedule.lanes import WaitCause
from mobius.units import format_columns, format_gib

UNSTEADY_STEPS = 2
"""Number of first steps, which use memory for the first time. They count only if a run has no other steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory that one rank used; GPU bytes are None on a rank that computes on the CPU."""

    rank: int
    device: str
    """Name of the device, such as "NVIDIA L20" or "cpu"."""
    peak_allocated_bytes: int | None
    """Peak GPU memory of tensors."""
    peak_reserved_bytes: int | None
    """Peak GPU memory that the allocator reserved; this memory must fit."""
    persistent_bytes: int | None
    """GPU memory in tensors between two steps: slots, resident stages, buffers."""
    peak_host_bytes: int


Timings = Mapping[str, float]
"""Wall-clock seconds of the parts of a run: loading (from the start of the program), training (all steps, with the
optimizer) and saving."""


class StepTotals:
    """Sums over all steps of a process, and losses, seconds and waits of each step; the length is the number of steps.

    A week has hundreds of thousands of steps, so each step stores only these numbers, of 8 bytes each.
    """

    first: StepMetrics
    last: StepMetrics

    def __init__(self) -> None:
        self.num_tokens = self.num_samples = self.num_targets = 0
        self.total_seconds = 0.0
        self.losses = array("d")
        self.seconds = array("d")
        """Seconds of each step."""
        self.waits = {cause: array("d") for cause in WaitCause}
        """Seconds that computation waited in each step, by cause."""
        self._padding = 0.0

    def add(self, metrics: StepMetrics) -> None:
        """Count a step."""
        self.first, self.last = self.first if self.seconds else metrics, metrics
        self.num_tokens += metrics.num_tokens
        self.num_samples += metrics.num_samples
        self.num_targets += metrics.num_targets
        self.total_seconds += metrics.step_seconds
        self.losses.append(metrics.loss)
        self.seconds.append(metrics.step_seconds)
        for cause, own in self.waits.items():
            own.append(metrics.wait_seconds.get(cause, 0.0))
        self._padding += metrics.padding

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def mean_padding(self) -> float:
        """Mean share of a step's positions that are padding."""
        return self._padding / len(self)


def closing_lines(
    steps: StepTotals, per_rank: Sequence[RankMemory], timings: Timings, mfu: float | None = None
) -> list[str]:
    """Summary in three lines for the log: steps and speed, times, peak memory.

    `mfu` is the speed of steady steps / the peak speed in the GPUs' data sheets, if known.
    """
    training = timings["training"]
    speed = f"{steps.num_tokens / training:,.0f} tokens/s" + ("" if mfu is None else f", {_percent(mfu)} MFU")
    waits = [f"{cause} {_percent(sum(own) / training)}" for cause, own in steps.waits.items()]
    everything = sum(timings.values())
    parts = [f"{name} {seconds:.1f} s ({_percent(seconds / everything)})" for name, seconds in timings.items()]
    gpu_bytes = [memory.peak_allocated_bytes for memory in per_rank if memory.peak_allocated_bytes is not None]
    peaks = [f"{_gib(max(gpu_bytes))} on the fullest GPU"] if gpu_bytes else []
    peaks.append(f"{_gib(sum(memory.peak_host_bytes for memory in per_rank))} of host memory of all ranks together")
    return [
        f"trained {len(steps)} steps, {steps.last.epoch:.3f} epochs done: {steps.num_samples:,} samples, "
        f"{steps.num_tokens:,} tokens without padding, in {format_clock(training)} ({speed})",
        f"time: {', '.join(parts)}; in steps, computation waited for {', '.join(waits)}",
        f"memory: at most {', '.join(peaks)}",
    ]


def steady_seconds(step_seconds: Sequence[float]) -> float:
    """Return the median seconds of a step, without the first steps."""
    return statistics.median(step_seconds[UNSTEADY_STEPS:] or step_seconds)


class PredictedStep(Protocol):
    """Prediction of a step."""

    @property
    def step_seconds(self) -> float:
        """Seconds of a steady step."""

    @property
    def bottleneck(self) -> object:
        """Resource that limits the step."""

    @property
    def basis(self) -> str:
        """Text that names the rates behind the prediction."""


def write_report(
    path: Path,
    config_yaml: str,
    plan_text: str,
    steps: StepTotals,
    per_rank: Sequence[RankMemory],
    timings: Timings,
    prediction: PredictedStep | None = None,
    mfu: float | None = None,
) -> None:
    """Write the summary to `path` atomically. Raises CheckpointError."""
    sections = [
        ("Result", _result(steps)),
        ("Time", _time(steps, timings, prediction, mfu)),
        ("Waiting", _waiting(steps)),
        ("Memory", _memory(per_rank)),
        ("Settings", config_yaml.strip()),
        ("Plan", plan_text.strip()),
    ]
    text = "\n\n".join(f"{title}\n{'=' * len(title)}\n{body}" for title, body in sections) + "\n"
    try:
        with atomic_write(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


def _result(steps: StepTotals) -> str:
    first, last = steps.first, steps.last
    rows = [
        ("steps", f"{len(steps)}"),
        ("epochs", f"{last.epoch:.3f}"),
        ("samples, repeated ones counted", f"{steps.num_samples:,}"),
        ("skipped steps", f"{last.skipped_steps}"),
        ("loss, first step", f"{first.loss:.4f}"),
        ("loss, last step", f"{last.loss:.4f}"),
        ("tokens without padding", f"{steps.num_tokens:,}"),
        ("target tokens", f"{steps.num_targets:,}"),
        ("padding, share of all positions", f"{steps.mean_padding:.1%}"),
    ]
    return _table(rows)


def _time(steps: StepTotals, timings: Timings, prediction: PredictedStep | None, mfu: float | None) -> str:
    seconds = steps.seconds
    names = {"training": "training, optimizer included"}
    rows = [
        *((names.get(name, name), f"{part:.2f} s") for name, part in timings.items()),
        ("seconds per step, median", f"{statistics.median(seconds):.3f} s"),
        ("seconds per step, mean", f"{statistics.fmean(seconds):.3f} s"),
        ("seconds per step, first", f"{seconds[0]:.3f} s"),
        ("tokens per second, without padding", f"{steps.num_tokens / steps.total_seconds:,.0f}"),
    ]
    if mfu is not None:
        rows.append(("MFU of steady steps, by the data sheet", f"{mfu:.1%}"))
    if prediction is not None:
        off = prediction.step_seconds / steady_seconds(seconds) - 1
        rows += [
            (
                "seconds per step, predicted",
                f"{prediction.step_seconds:.3f} s, limited by {prediction.bottleneck}",
            ),
            ("prediction off by", f"{off:+.1%} of a steady step, {prediction.basis}"),
        ]
    return _table(rows)


def _waiting(steps: StepTotals) -> str:
    total = sum(steps.seconds)
    rows = [(cause, f"{statistics.median(own):.3f}", f"{sum(own) / total:.1%}") for cause, own in steps.waits.items()]
    return _table([("computation waited for", "seconds per step, median", "share of all step time"), *rows])


def _memory(per_rank: Sequence[RankMemory]) -> str:
    rows: list[tuple[str, ...]] = [("rank", "device", "GPU peak", "GPU reserved", "GPU persistent", "host peak")]
    for memory in sorted(per_rank, key=lambda memory: memory.rank):
        gpu_bytes = (memory.peak_allocated_bytes, memory.peak_reserved_bytes, memory.persistent_bytes)
        rows.append((f"{memory.rank}", memory.device, *map(_gib, gpu_bytes), _gib(memory.peak_host_bytes)))
    host = sum(memory.peak_host_bytes for memory in per_rank)
    return f"{_table(rows)}\nhost memory of all ranks together: {_gib(host)}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{format_gib(num_bytes)} GiB"


def _table(rows: Sequence[Sequence[str]]) -> str:
    return format_columns(rows, num_left=len(rows[0]), indent="")
