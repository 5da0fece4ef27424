"""Events of a run, and the log text of each event. `RunLog.emit` receives all events.

    RunStarted -> StepMetrics, Evaluated, CheckpointSaved, WarningLogged, ... -> RunEnded

`kind` names an event in the feed (events.jsonl), a file with a JSON object in each line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from typing import Any, ClassVar, Final

from mobius.config.config import BestMetric
from mobius.units import format_bytes

_DETAIL_INDENT: Final = "    "
_MARGINS, _ACCURACIES = ("rewards/margins", "margin"), ("rewards/accuracies", "accuracy")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """Start of training: the model, the data, the plan, and the seconds of the start-up."""

    kind: ClassVar = "start"
    name: str
    num_parameters: int
    num_trained: int
    dtype: str
    device: str
    num_ranks: int
    """Number of ranks of a pipeline."""
    num_replicas: int
    num_steps: int
    num_epochs: float
    batch_size: int
    """Rows of a step in all replicas together."""
    seq_length: int
    num_microbatches: int
    microbatch_rows: int
    plan: str
    """Stages, slots and microbatches as text; plan.json has the numbers."""
    planned_gpu_bytes: int | None
    """Planned peak of the fullest GPU; None without a GPU."""
    gpu_bytes: int | None
    """GPU memory that may be used."""
    planned_host_bytes: int
    """Planned host memory of all ranks of a pipeline."""
    predicted_step_seconds: float | None
    bottleneck: str | None
    """Resource that limits the predicted step."""
    startup_seconds: Mapping[str, float]
    """Seconds of each part of the start-up, from the start of the process to the first step."""

    @property
    def line(self) -> str:
        """Rows of the start-up table that follow the rows of model and data."""
        ranks = "" if self.num_replicas == 1 else f"; {self.num_replicas} replicas, which share rows and updates"
        owners = "all ranks" if self.num_replicas == 1 else "each replica"
        memory = f"host {format_bytes(self.planned_host_bytes)} of {owners}"
        if self.planned_gpu_bytes is not None and self.gpu_bytes is not None:
            memory = f"GPU {format_bytes(self.planned_gpu_bytes)} of {format_bytes(self.gpu_bytes)}, {memory}"
        rows = [
            (
                "training",
                f"{self.num_steps} steps of {self.batch_size} rows x {self.seq_length} tokens, {self.num_epochs:.3g} "
                f"epochs, in {self.num_microbatches} microbatches of {self.microbatch_rows}, on {self.device}",
            ),
            ("plan", f"{self.plan}{ranks}"),
            ("memory", f"{memory}, as planned"),
        ]
        if self.predicted_step_seconds is not None:
            rows.append(("step", f"{self.predicted_step_seconds:.3f} s as predicted, limited by {self.bottleneck}"))
        parts = ", ".join(f"{part} {own:.1f}" for part, own in self.startup_seconds.items() if own >= 0.05)
        rows.append(("start-up", f"{sum(self.startup_seconds.values()):.1f} s: {parts}"))
        return "\n".join(table_row(name, text) for name, text in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Numbers of one optimizer step on all ranks: tokens are sums; GPU memory and waits are of the worst rank."""

    kind: ClassVar = "step"
    step: int
    """Number of the step, counted from 1."""
    epoch: float
    """Epochs completed after the step."""
    loss: float
    """Mean over the target tokens of the step, plus the router loss times its coefficient, if any."""
    grad_norm: float
    """L2 norm of all gradients together, before clipping."""
    learning_rate: float
    step_seconds: float
    """Wall-clock seconds from the end of the previous step to the end of this step, optimizer included."""
    tokens_per_second: float
    """Tokens without padding per second."""
    num_tokens: int
    """Tokens without padding."""
    num_targets: int
    """Tokens that count in the loss."""
    num_samples: int
    """Number of samples; a packed row holds several."""
    padding: float
    """Share of the step's positions that are padding."""
    peak_gpu_memory_gib: float | None
    """Peak allocated memory of the worst rank since the start, in GiB; None without a GPU."""
    reserved_gpu_memory_gib: float | None
    """Peak memory that the allocator reserved, on the worst rank, in GiB; None without a GPU."""
    peak_host_memory_gib: float
    """Peak host memory since the start, of all ranks together, in GiB."""
    wait_seconds: Mapping[str, float]
    """Seconds that compute waited in this step, on the worst rank, by cause (`WaitCause`)."""
    skipped_steps: int
    """Number of steps so far whose update was skipped because a gradient was not finite."""
    loss_scale: float | None
    """Loss scale of fp16 training; None in other formats."""
    aux_loss: float | None = None
    """Router loss, the mean over microbatches without its coefficient; None for models without routers."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of the objective by name."""

    def record(self) -> dict[str, Any]:
        """Return all numbers by name, including the objective's numbers."""
        fields = asdict(self)
        numbers: dict[str, Any] = fields.pop("numbers")
        return fields | numbers

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> StepMetrics:
        """Return the metrics of a `record`. Raises TypeError if a number is missing."""
        known = {each.name for each in fields(cls)}
        others = {name: value for name, value in record.items() if name not in known}
        return cls(**{name: value for name, value in record.items() if name in known}, numbers=others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Evaluation of the weights after `step`."""

    kind: ClassVar = "evaluation"
    step: int
    numbers: Mapping[str, float]
    """Numbers by name, such as `loss` and `perplexity`; numbers of one dataset have its name as a prefix."""
    num_samples: int

    @property
    def line(self) -> str:
        """Line of the log."""
        when = f"evaluation after step {self.step}" if self.step else "evaluation before any step"
        numbers = self.numbers
        if "perplexity" in numbers:
            text = f"perplexity {numbers['perplexity']:.4g}, token accuracy {numbers['token_accuracy']:.2%}"
        else:
            shown = {*(metric.value for metric in BestMetric), "reward", "kl"} - {"loss"}
            text = ", ".join(f"{name} {value:.4f}" for name, value in numbers.items() if name in shown)
        return (
            f"{when}: loss {numbers['loss']:.4f}, {text}, {self.num_samples:,} samples in {numbers['runtime']:.2f} s "
            f"({numbers['tokens_per_second']:,.0f} tokens/s)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """Checkpoint that is complete and has its final name."""

    kind: ClassVar = "checkpoint"
    step: int
    path: str
    num_bytes: int
    seconds: float
    waited_seconds: float
    """Time that updates waited for copies of their state."""

    @property
    def line(self) -> str:
        """Line of the log."""
        rate = format_bytes(int(self.num_bytes / max(self.seconds, 1e-3)))
        return (
            f"checkpoint saved: {self.path}, {format_bytes(self.num_bytes)} in {self.seconds:.1f} s ({rate}/s); "
            f"updates waited {self.waited_seconds:.2f} s for copies"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WarningLogged:
    """Warning or error in the log of the first rank."""

    kind: ClassVar = "warning"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """End of the steps; the model is exported after this event."""

    kind: ClassVar = "end"
    reason: str
    """Reason of the end: a value of `StopReason`, or `error`."""
    num_steps: int
    """Number of steps of this process."""
    step_seconds: float
    """Sum of the seconds of these steps."""


Event = RunStarted | StepMetrics | Evaluated | CheckpointSaved | WarningLogged | RunEnded


def step_line(metrics: StepMetrics, total_steps: int, seconds_left: float | None = None) -> str:
    """Line of a step in fixed columns, at most 100 characters for runs of up to 9,999 steps.

    The line shows the memory of the fullest GPU, or host memory without a GPU. Objectives with rewards have two more
    columns of 30 characters.
    """
    width, gpu, numbers = len(str(total_steps)), metrics.peak_gpu_memory_gib, metrics.numbers
    columns = [
        f"step {metrics.step:>{width}}/{total_steps}",
        f"loss {metrics.loss:7.4f}",
        *(f"margin {numbers[name]:6.3f}" for name in _MARGINS if name in numbers),
        *(f"accuracy {numbers[name]:.2f}" for name in _ACCURACIES if name in numbers),
        *(f"{name} {numbers[name]:.3f}" for name in ("reward",) if name in numbers),
        f"norm {format_digits(metrics.grad_norm, 4):>5}",
        f"lr {metrics.learning_rate:.2e}",
        f"{format_digits(metrics.step_seconds, 3):>4} s",
        f"{metrics.tokens_per_second:6,.0f} tok/s",
        f"{format_digits(metrics.peak_host_memory_gib if gpu is None else gpu, 3):>4} GiB",
    ]
    if seconds_left is not None:
        columns.append(f"{format_time_left(seconds_left):>6} left")
    return "  ".join(columns)


def detail_line(metrics: StepMetrics) -> str:
    """Second line of a step (`--verbose`), with the numbers that `step_line` leaves out."""
    waits = ", ".join(f"{cause} {seconds:.2f}" for cause, seconds in metrics.wait_seconds.items())
    parts = [
        f"epoch {metrics.epoch:.3f}",
        f"{metrics.num_samples} samples, {metrics.num_tokens:,} tokens, {100 * metrics.padding:.1f} % padding",
        f"waits {waits} s",
        f"host {metrics.peak_host_memory_gib:.2f} GiB",
    ]
    if metrics.peak_gpu_memory_gib is not None:
        reserved = metrics.reserved_gpu_memory_gib or 0.0
        parts.append(f"GPU {metrics.peak_gpu_memory_gib:.2f} GiB, {reserved:.2f} reserved")
    if metrics.aux_loss is not None:
        parts.append(f"router loss {metrics.aux_loss:.4f}")
    parts += [f"{name} {value:.4f}" for name, value in metrics.numbers.items()]
    if metrics.loss_scale is not None:
        parts.append(f"loss scale {metrics.loss_scale:g}")
    if metrics.skipped_steps:
        parts.append(f"{metrics.skipped_steps} skipped")
    return f"{_DETAIL_INDENT}{'; '.join(parts)}"


def table_row(name: str, text: str) -> str:
    """Row of the table that a run prints before the first step."""
    return f"{name:<9} {text}"


def format_digits(value: float, digits: int) -> str:
    """Format `value` with `digits` digits, at least one before the point; all integer digits are shown."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < 1 - digits:
        return f"{value:.1e}"
    return f"{value:.{min(max(digits - 1 - exponent, 0), digits - 1)}f}"


def format_time_left(seconds: float) -> str:
    """Format as days and hours, hours and minutes, or minutes and seconds: `4d03h`, `2h05m`, `12m05s`, `5s`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def format_clock(seconds: float) -> str:
    """Format as hours, minutes and seconds, such as `0:02:05`, with the days before them if there are any."""
    return str(timedelta(seconds=round(seconds)))
