"""Owns the numbers of one optimizer step and how they are told: a line for people, a JSON line for programs.

Does not measure anything: the trainer hands the numbers in. The summary of a whole run is `report.py`'s.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step, over all ranks: sums of tokens, the worst rank's memory and waits."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over the target tokens of the step."""
    grad_norm: float
    """L2 norm of all gradients together, before clipping."""
    learning_rate: float
    step_seconds: float
    """Wall clock from the end of the step before to the end of this one, optimizer included."""
    tokens_per_second: float
    """Tokens without padding."""
    num_tokens: int
    """Tokens without padding."""
    num_targets: int
    """Tokens that count in the loss."""
    peak_gpu_memory_gib: float | None
    """Allocated, on the worst rank, since the start; None without a GPU."""
    reserved_gpu_memory_gib: float | None
    """What the allocator took from the GPU for that, on the worst rank; None without a GPU."""
    peak_host_memory_gib: float
    """All ranks together, since the start."""
    wait_seconds: Mapping[str, float]
    """Seconds by cause (`runtime.waits.WaitCause`) that the worst rank's computation stood still in this step."""
    skipped_steps: int
    """Steps so far whose update was left out because a gradient was not finite."""
    loss_scale: float | None
    """Of fp16 training; None in formats that need none."""


class MetricsLog:
    """The file `metrics.jsonl`: one JSON object per step, readable up to the last step at any time."""

    def __init__(self, path: Path) -> None:
        """Open `path` to append to it."""
        # buffering=1: a line is handed to the system as soon as it is complete, so a killed run keeps its metrics.
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def append(self, metrics: StepMetrics) -> None:
        """Write one line. Numbers that JSON does not have are strings that `float` reads: "nan", "inf", "-inf"."""
        self._file.write(json.dumps(_as_json(asdict(metrics)), allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file; the log cannot be appended to any more."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def step_line(metrics: StepMetrics, total_steps: int) -> str:
    """Tell one step in columns that stay in place over the steps of a run."""
    width = len(str(total_steps))
    columns = [
        f"step {metrics.step:>{width}}/{total_steps}",
        f"loss {metrics.loss:7.4f}",
        f"grad norm {metrics.grad_norm:8.3f}",
        f"lr {metrics.learning_rate:.2e}",
        f"{metrics.step_seconds:7.2f} s",
        f"{metrics.tokens_per_second:8,.0f} tokens/s",
        "waits" + ",".join(f" {cause} {seconds:5.2f}" for cause, seconds in metrics.wait_seconds.items()) + " s",
    ]
    if metrics.peak_gpu_memory_gib is not None:
        columns.append(f"GPU {metrics.peak_gpu_memory_gib:6.2f} GiB")
    columns.append(f"host {metrics.peak_host_memory_gib:6.2f} GiB")
    if metrics.loss_scale is not None:
        columns.append(f"loss scale {metrics.loss_scale:g}")
    if metrics.skipped_steps:
        columns.append(f"{metrics.skipped_steps} skipped")
    return " | ".join(columns)


def _as_json(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
