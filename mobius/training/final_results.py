"""Everything that comes behind the last step: the best weights, the model's files, the report."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mobius.atomic_files import atomic_write
from mobius.checkpoints.folders import checkpoint_path, open_checkpoint
from mobius.checkpoints.manifest import MANIFEST_FILE
from mobius.config.yaml_file import to_yaml
from mobius.errors import CheckpointError, reason_of
from mobius.machine.devices import MemoryMeter
from mobius.models.adapters.peft_folder import AdapterBase, AdapterFolder
from mobius.models.model_files import ModelFiles
from mobius.output.adapters.merged import merge_adapter
from mobius.output.output_folder import OutputFolder
from mobius.plan.step_prediction import steady_seconds
from mobius.planning.run_setup import RunSetup
from mobius.regular_files import read_json
from mobius.reporting.json_lines import json_text
from mobius.reporting.summary import RankMemory, RunTimings, StepTotals, closing_lines, write_report
from mobius.signal_handling import RunStatus
from mobius.training.evaluation.prediction import PromptAndLabel, predict
from mobius.training.export import export_model, write_single_file
from mobius.training.reporting import ideal_step_seconds
from mobius.training.resuming import restore
from mobius.training.run_folder import merged_folder
from mobius.training.saving import CheckpointSaver
from mobius.training.session import Session
from mobius.training.trainer import all_gather_numbers

logger = logging.getLogger(__name__)


class RunTimer:
    """Wall-clock seconds of the parts of a run, from its making on."""

    def __init__(self) -> None:
        self.started = self._trained = self._ended = time.monotonic()
        self._loaded = self.started

    def end_loading(self) -> None:
        """Call it where training begins."""
        self._loaded = time.monotonic()

    def end_training(self) -> None:
        """Call it behind the last step."""
        self._trained = time.monotonic()

    def timings(self, steps: StepTotals) -> RunTimings:
        """The parts as a report tells them; saving has ended now."""
        return RunTimings(
            load_seconds=self._loaded - self.started,
            training_seconds=sum(steps.seconds),
            save_seconds=time.monotonic() - self._trained,
        )


def load_best_model(session: Session, saver: CheckpointSaver, earlier: Path | None = None) -> int | None:
    """Put the best checkpoint's weights into the stages; returns its step, None if there is none. Collective.

    `earlier` is the best one of before the run was resumed, in whichever folder. Only a rank that has been told of a
    failed save knows that a checkpoint is not there, so the first one decides.
    """
    found = [0.0, 0.0]
    if session.all_ranks.rank == 0:
        has_earlier = earlier is not None and (earlier / MANIFEST_FILE).is_file()
        best = saver.best_step or 0
        if not (checkpoint_path(saver.save_dir, best) / MANIFEST_FILE).is_file():
            best = 0  # somebody has removed it
        found = [float(best), float(not best and has_earlier)]
    step, is_earlier = map(int, all_gather_numbers(session.all_ranks, found).sum(0).tolist())
    if not step and not is_earlier:
        logger.warning(
            "--load_best_model_at_end: there is no checkpoint that was evaluated, so the last weights are the result"
        )
        return None
    reader = open_checkpoint(earlier if is_earlier and earlier else checkpoint_path(saver.save_dir, step))
    session.activity.start_action("the weights of the best checkpoint")
    progress = session.activity.progress
    restore(session.stages, session.run_setup.parts, reader, weights_only=True, progress=progress)
    logger.info("weights of the best checkpoint are taken: %s", reader.path)
    session.all_ranks.barrier()
    return reader.manifest.step


@dataclass(frozen=True, kw_only=True)
class PredictionTask:
    """Answers that the first rank is to generate once the run's memory is free."""

    folder: Path
    """Hugging Face folder of the model."""
    samples: Sequence[PromptAndLabel]
    output: Path
    max_new_tokens: int
    device: torch.device
    status_text: str
    """Word of an interruption about what the run has left so far."""

    def run(self) -> None:
        """Generate and score the answers, and leave them in `output`. Raises what `predict` raises."""
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


def save_model(
    session: Session,
    output: OutputFolder,
    model_files: ModelFiles,
    run_status: RunStatus,
    base: AdapterBase | None = None,
) -> list[str]:
    """Save the model, say where it is, and make the single file of it; returns the problem of that, if there is one.

    With `base` adapters are saved, which are for that. Once the model has its name, nothing that fails may hide that.
    """
    session.activity.start_action("the export of the model")
    export_model(session, output, model_files=model_files, run_status=run_status, base=base)
    if session.all_ranks.rank != 0:
        return []
    config, problems = session.run_setup.config, list[str]()
    what = "model" if base is None else "adapter"
    logger.info("%s saved to %s (checked tensor by tensor)", what, output.save_dir)
    if base is not None and config.adapters.merge:
        problems = _merge(session, output, base, model_files)
    saved = f"after the last step: the {what} is complete and checked in {output.save_dir}"
    if config.output.params_file is None:
        run_status.set_status(f"{saved}; {config.output.save_results} was not written")
        return problems
    params = Path(config.output.params_file)
    unfinished = params.with_name(f"{params.name}.partial")
    run_status.set_status(f"{saved}; {params} was not written", clean_up=unfinished.unlink)
    try:
        session.activity.start_action("the single file of all parameters")
        write_single_file(params, output, progress=session.activity.progress)
    except CheckpointError as error:
        return [*problems, str(error)]
    run_status.set_status(f"{saved} and in {params}; {config.output.save_results} was not written")
    logger.info("模型已保存到 %s (parameters saved to one file)", params)
    return problems


def _merge(session: Session, output: OutputFolder, base: AdapterBase, model_files: ModelFiles) -> list[str]:
    """Write the merged model beside the adapter; returns the problem of that, if there is one."""
    session.activity.start_action("the merged model")
    run_setup, folder = session.run_setup, merged_folder(session.run_setup.config)
    try:
        adapter = AdapterFolder(output.save_dir)
        given = adapter, base.folder, run_setup.parts, folder
        progress = session.activity.progress
        merge_adapter(*given, dtype=run_setup.dtype, model_files=model_files, progress=progress)
    except CheckpointError as error:
        command = f"python scripts/merge_adapter.py {output.save_dir} FOLDER"
        return [f"--merge: {error} The adapter is complete; to merge it later: {command}"]
    logger.info("merged model saved to %s", folder)
    return []


def write_final_report(
    session: Session, output: OutputFolder, steps: StepTotals, timings: RunTimings, problems: Sequence[str]
) -> None:
    """Gather every rank's memory and write the report; then raise CheckpointError for `problems` and those of that.

    There is nothing to report of a run that was resumed behind its last step.
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


def _report(run_setup: RunSetup, steps: StepTotals, per_rank: Sequence[RankMemory], timings: RunTimings) -> list[str]:
    """Log the closing lines and write the report; returns what failed."""
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
