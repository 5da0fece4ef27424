"""Results after the last step: generated answers, and the report of the run."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mobius.atomic_files import atomic_write
from mobius.checkpoint.run_folder import OutputFolder
from mobius.config.sources import to_yaml
from mobius.distributed.transport import all_gather_numbers
from mobius.errors import CheckpointError, reason_of
from mobius.hardware.devices import MemoryMeter
from mobius.planner.run_setup import RunSetup
from mobius.planner.step_prediction import steady_seconds
from mobius.regular_files import read_json
from mobius.reporting.json_lines import json_text
from mobius.reporting.summary import RankMemory, StepTotals, Timings, closing_lines, write_report
from mobius.training.evaluation.prediction import PromptAndLabel, predict
from mobius.training.reporting import ideal_step_seconds
from mobius.training.session import Session

logger = logging.getLogger(__name__)


class RunTimer:
    """Wall-clock seconds of the parts of a run, from construction on."""

    def __init__(self) -> None:
        self.started = self._trained = self._ended = time.monotonic()
        self._loaded = self.started

    def end_loading(self) -> None:
        """Mark the start of training."""
        self._loaded = time.monotonic()

    def end_training(self) -> None:
        """Mark the end of the last step."""
        self._trained = time.monotonic()

    def timings(self, steps: StepTotals) -> Timings:
        """Return the seconds of each part for the report; saving ends now."""
        return {
            "loading": self._loaded - self.started,
            "training": sum(steps.seconds),
            "saving": time.monotonic() - self._trained,
        }


@dataclass(frozen=True, kw_only=True)
class PredictionTask:
    """Answers to generate on the first rank once the run's memory is free."""

    folder: Path
    """Hugging Face folder of the model."""
    samples: Sequence[PromptAndLabel]
    output: Path
    max_new_tokens: int
    device: torch.device
    status_text: str
    """Text that an interruption prints about the files that the run has written."""

    def run(self) -> None:
        """Generate and score the answers, and write them to `output`. Raises the errors of `predict`."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        numbers = predict(
            self.folder,
            self.samples,
            output=self.output,
            max_new_tokens=self.max_new_tokens,
            device=self.device,
            show_progress=True,
        )
        try:
            write_results(self.output, "predict", numbers)
        except OSError as error:
            raise CheckpointError(f"cannot write the scores to {self.output}: {reason_of(error)}.") from error
        shown = {name: number for name, number in numbers.items() if name not in ("runtime", "samples_per_second")}
        text = ", ".join(f"{name} {number:.4g}" for name, number in shown.items())
        logger.info("answers to %d samples in %s: %s", len(self.samples), self.output, text)


def write_results(folder: Path, name: str, numbers: Mapping[str, object]) -> None:
    """Write `<name>_results.json`, and add the numbers to all_results.json, each named `<name>_...`. Raises OSError."""
    named = {f"{name}_{key}": value for key, value in numbers.items()}
    everything = folder / "all_results.json"
    before = read_json(everything) if everything.is_file() else {}
    for path, values in ((folder / f"{name}_results.json", named), (everything, {**before, **named})):
        with atomic_write(path) as temporary:
            temporary.write_text(json_text(values, indent=2) + "\n", encoding="utf-8")


def write_final_report(
    session: Session, output: OutputFolder, steps: StepTotals, timings: Timings, problems: Sequence[str]
) -> None:
    """Gather every rank's memory and write the report; then raise CheckpointError for `problems` and failed writes.

    A run that was resumed after its last step has no report.
    """
    run_setup, meter = session.run_setup, MemoryMeter(session.run_setup.rank_context.device)
    reading = meter.read()
    own = [reading.peak_allocated, reading.peak_reserved, reading.allocated, reading.peak_host]
    session.activity.start_action("the report")
    rows = all_gather_numbers(session.all_ranks, own).tolist()
    if session.all_ranks.rank != 0:
        return

    def gpu_bytes(value: float) -> int | None:
        return int(value) if meter.has_gpu else None

    per_rank = [
        RankMemory(
            rank=rank,
            device=meter.device_name,
            peak_allocated_bytes=gpu_bytes(row[0]),
            peak_reserved_bytes=gpu_bytes(row[1]),
            persistent_bytes=gpu_bytes(row[2]),
            peak_host_bytes=int(row[3]),
        )
        for rank, row in enumerate(rows)
    ]
    if steps:
        problems = [*problems, *_report(run_setup, steps, per_rank, timings)]
    if problems and run_setup.config.evaluation.do_train:
        problems = [*problems, f"The model itself is complete and checked: {output.save_dir}."]
    if problems:
        raise CheckpointError("\n".join(problems))


def _report(run_setup: RunSetup, steps: StepTotals, per_rank: Sequence[RankMemory], timings: Timings) -> list[str]:
    """Log the closing lines and write the report; returns the problems."""
    config = run_setup.config
    report = Path(config.output.save_results)
    plan_text, step_time_prediction = run_setup.plan.describe(run_setup.shape), run_setup.result.step_time_prediction
    seconds, ideal = steps.seconds, ideal_step_seconds(run_setup)
    mfu = None if ideal is None else ideal / steady_seconds(seconds)
    if step_time_prediction is not None:
        logger.info("%s", step_time_prediction.compare(seconds))
    for line in closing_lines(steps, per_rank, timings, mfu):
        logger.info("%s", line)
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        write_report(report, to_yaml(config), plan_text, steps, per_rank, timings, step_time_prediction, mfu)
        logger.info("results saved to %s", report)
    except (CheckpointError, OSError) as error:
        return [f"--save_results: {error}"]
    return []
