"""Folders of runs as a run leaves them, with made-up numbers, for tests of the board."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mobius.reporting.events import CheckpointSaved, Evaluated, Event, RunEnded, RunStarted, StepMetrics, WarningLogged

BEGUN = 1_700_000_000.0


def started(num_steps: int, **others: Any) -> RunStarted:
    """Start of a run on two cards."""
    facts: dict[str, Any] = {
        "name": "tiny",
        "num_parameters": 1_852_544,
        "num_trained": 1_852_544,
        "dtype": "bf16",
        "device": "RTX4090",
        "num_ranks": 2,
        "num_replicas": 1,
        "num_steps": num_steps,
        "num_epochs": 1.0,
        "batch_size": 4,
        "seq_length": 256,
        "num_microbatches": 4,
        "microbatch_rows": 1,
        "plan": "4 stages on 2 rank(s), 4 microbatches, 2 slot(s) per rank",
        "planned_gpu_bytes": 20 * 2**30,
        "gpu_bytes": 24 * 2**30,
        "planned_host_bytes": 48 * 2**30,
        "predicted_step_seconds": 0.5,
        "bottleneck": "loads of weights",
        "startup_seconds": {"imports": 3.0, "weights": 4.5},
    }
    return RunStarted(**facts | others)


def step(number: int, **others: Any) -> StepMetrics:
    """Step whose loss falls slowly and whose seconds vary."""
    facts: dict[str, Any] = {
        "step": number,
        "epoch": number / 1000,
        "loss": 2.0 + 6.0 * math.exp(-number / 300) + 0.1 * math.sin(number * 1.7),
        "grad_norm": 1.0 + 0.3 * math.cos(number),
        "learning_rate": 1e-5 * min(1.0, number / 100),
        "step_seconds": 0.5 + 0.02 * math.sin(number),
        "tokens_per_second": 2000.0 + 50 * math.sin(number),
        "num_tokens": 1000,
        "num_targets": 400,
        "num_samples": 16,
        "padding": 0.05,
        "peak_gpu_memory_gib": 19.5,
        "reserved_gpu_memory_gib": 20.5,
        "peak_host_memory_gib": 47.0,
        "wait_seconds": {"weights": 0.12, "optimizer": 0.01, "neighbours": 0.05, "activations": 0.0},
        "skipped_steps": 0,
        "loss_scale": None,
    }
    return StepMetrics(**facts | others)


def evaluated(number: int) -> Evaluated:
    """Evaluation after a step."""
    loss = 2.2 + 5.0 * math.exp(-number / 300)
    return Evaluated(
        step=number, numbers={"loss": loss, "perplexity": math.exp(loss), "token_accuracy": 0.4}, num_samples=100
    )


def line(event: Event, place: int, seconds: float = 0.0) -> str:
    """Line of the feed about `event`, in the form of `RunLog.emit`; `seconds` after the start of the run."""
    own = event.record() if isinstance(event, StepMetrics) else asdict(event)
    facts = {"event": event.kind, "time": round(BEGUN + seconds, 3), "step": place, **own}
    return json.dumps(facts) + "\n"


def feed(num_steps: int, *, total: int | None = None, ends: str | None = "last step") -> Iterable[str]:
    """Lines of a run of `num_steps` of `total` steps; `ends` is the reason of its end, None if it was killed."""
    yield line(WarningLogged(text="attention is slow <b>here</b>"), 0)
    yield line(started(total or num_steps), 0)
    for number in range(1, num_steps + 1):
        yield line(step(number), number, number * 0.5)
        if number % 500 == 0:
            yield line(evaluated(number), number, number * 0.5)
    saved = CheckpointSaved(step=num_steps, path="checkpoint", num_bytes=10**9, seconds=2.0, waited_seconds=0.1)
    yield line(saved, num_steps, num_steps * 0.5)
    if ends:
        yield line(RunEnded(reason=ends, num_steps=num_steps, step_seconds=num_steps * 0.5), num_steps, num_steps * 0.5)


def write_run(folder: Path, num_steps: int, **how: Any) -> Path:
    """Make `folder` with the feed of a run; returns the feed."""
    folder.mkdir(parents=True)
    path = folder / "events.jsonl"
    path.write_text("".join(feed(num_steps, **how)), encoding="utf-8")
    return path
