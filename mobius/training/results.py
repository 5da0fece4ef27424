"""Everything that comes behind the last step: the best weights, the model's files, the report."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mobius.checkpoints.folders import checkpoint_path, open_checkpoint
from mobius.checkpoints.manifest import MANIFEST_FILE
from mobius.config.yaml_file import to_yaml
from mobius.errors import CheckpointError, reason_of
from mobius.interruption import Standing
from mobius.machine.devices import MemoryMeter
from mobius.models.adapters.files import AdapterFolder, Base
from mobius.models.base_files import BaseFiles
from mobius.output.adapters.merged import merge_adapter
from mobius.output.metrics import json_text
from mobius.output.output_folder import OutputFolder
from mobius.output.report import RankMemory, RunTimings, StepTotals, closing_lines, write_report
from mobius.plan.simulation import steady_seconds
from mobius.planning.blueprint import Blueprint
from mobius.regular_files import read_json
from mobius.training.export import export_model, write_single_file
from mobius.training.judging.prediction import PromptAndAnswer, predict
from mobius.training.opening import merged_folder
from mobius.training.records import ideal_step_seconds
from mobius.training.resuming import restore
from mobius.training.saving import CheckpointSaver
from mobius.training.session import Session
from mobius.training.trainer import numbers_of_ranks
from mobius.writing import replaced_whole

logger = logging.getLogger(__name__)


class Timing:
    """Wall-clock seconds of the parts of a run, from its making on."""

    def __init__(self) -> None:
        self.started = self._trained = self._ended = time.monotonic()
        self._loaded = self.started

    def ends_loading(self) -> None:
        """Call it where training begins."""
        self._loaded = time.monotonic()

    def ends_training(self) -> None:
        """Call it behind the last step."""
        self._trained = time.monotonic()

    def of_run(self, steps: StepTotals) -> RunTimings:
        """The parts as a report tells them; saving has ended now."""
        return RunTimings(
            load_seconds=self._loaded - self.started,
            training_seconds=sum(steps.seconds),
            save_seconds=time.monotonic() - self._trained,
        )


def take_best(session: Session, saver: CheckpointSaver, earlier: Path | None = None) -> int | None:
    """Put the best checkpoint's weights into the stages; returns its step, None if there is none. Collective.

    `earlier` is the best one of before the run was resumed, in whichever folder. Only a rank that has been told of a
    failed save knows that a checkpoint is not there, so the first one decides.
    """
    found = [0.0, 0.0]
    if session.everyone.rank == 0:
        has_earlier = earlier is not None and (earlier / MANIFEST_FILE).is_file()
        best = saver.best_step or 0
        if not (checkpoint_path(saver.save_dir, best) / MANIFEST_FILE).is_file():
            best = 0  # somebody has removed it
        found = [float(best), float(not best and has_earlier)]
    step, is_earlier = map(int, numbers_of_ranks(session.everyone, found).sum(0).tolist())
    if not step and not is_earlier:
        logger.warning(
            "--load_best_model_at_end: there is no checkpoint that was evaluated, so the last weights are the result"
        )
        return None
    reader = open_checkpoint(earlier if is_earlier and earlier else checkpoint_path(saver.save_dir, step))
    session.activity.begins("the weights of the best checkpoint")
    progress = session.activity.progress
    restore(session.stages, session.blueprint.parts, reader, weights_only=True, progress=progress)
    logger.info("weights of the best checkpoint are taken: %s", reader.path)
    session.everyone.barrier()
    return reader.manifest.step


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Answers that the first rank is to generate once the run's memory is free."""

    folder: Path
    """Hugging Face folder of the model."""
    samples: Sequence[PromptAndAnswer]
    output: Path
    max_new_tokens: int
    device: torch.device
    left: str
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
            leave_results(self.output, "predict", numbers)
        except OSError as error:
            raise CheckpointError(f"cannot write the scores to {self.output}: {reason_of(error)}.") from error
        shown = {name: number for name, number in numbers.items() if name not in ("runtime", "samples_per_second")}
        text = ", ".join(f"{name} {number:.4g}" for name, number in shown.items())
        logger.info("answers to %d samples in %s: %s", len(self.samples), self.output, text)


def leave_results(folder: Path, name: str, numbers: Mapping[str, object]) -> None:
    """Write `<name>_results.json`, and add the numbers to all_results.json, each named `<name>_...`. Raises OSError."""
    named = {f"{name}_{key}": value for key, value in numbers.items()}
    everything = folder / "all_results.json"
    before = read_json(everything) if everything.is_file() else {}
    for path, values in ((folder / f"{name}_results.json", named), (everything, {**before, **named})):
        with replaced_whole(path) as temporary:
            temporary.write_text(json_text(values, indent=2) + "\n", encoding="utf-8")


def save_model(
    session: Session, output: OutputFolder, base_files: BaseFiles, standing: Standing, base: Base | None = None
) -> list[str]:
    """Save the model, say where it is, and make the single file of it; returns the problem of that, if there is one.

    With `base` adapters are saved, which are for that. Once the model has its name, nothing that fails may hide that.
    """
    session.activity.begins("the export of the model")
    export_model(session, output, base_files=base_files, standing=standing, base=base)
    if session.everyone.rank != 0:
        return []
    config, problems = session.blueprint.config, list[str]()
    what = "model" if base is None else "adapter"
    logger.info("%s saved to %s (checked tensor by tensor)", what, output.save_dir)
    if base is not None and config.adapters.merge:
        problems = _merge(session, output, base, base_files)
    saved = f"after the last step: the {what} is complete and checked in {output.save_dir}"
    if config.output.params_file is None:
        standing.becomes(f"{saved}; {config.output.save_results} was not written")
        return problems
    params = Path(config.output.params_file)
    unfinished = params.with_name(f"{params.name}.partial")
    standing.becomes(f"{saved}; {params} was not written", clear=unfinished.unlink)
    try:
        session.activity.begins("the single file of all parameters")
        write_single_file(params, output, progress=session.activity.progress)
    except CheckpointError as error:
        return [*problems, str(error)]
    standing.becomes(f"{saved} and in {params}; {config.output.save_results} was not written")
    logger.info("模型已保存到 %s (parameters saved to one file)", params)
    return problems


def _merge(session: Session, output: OutputFolder, base: Base, base_files: BaseFiles) -> list[str]:
    """Write the merged model beside the adapter; returns the problem of that, if there is one."""
    session.activity.begins("the merged model")
    blueprint, folder = session.blueprint, merged_folder(session.blueprint.config)
    try:
        adapter = AdapterFolder(output.save_dir)
        given = adapter, base.folder, blueprint.parts, folder
        progress = session.activity.progress
        merge_adapter(*given, dtype=blueprint.dtype, base_files=base_files, progress=progress)
    except CheckpointError as error:
        command = f"python scripts/merge_adapter.py {output.save_dir} FOLDER"
        return [f"--merge: {error} The adapter is complete; to merge it later: {command}"]
    logger.info("merged model saved to %s", folder)
    return []


def finish(
    session: Session, output: OutputFolder, steps: StepTotals, timings: RunTimings, problems: Sequence[str]
) -> None:
    """Gather every rank's memory and write the report; then raise CheckpointError for `problems` and those of that.

    There is nothing to report of a run that was resumed behind its last step.
    """
    blueprint, meter = session.blueprint, MemoryMeter(session.blueprint.place.device)
    reading = meter.read()
    own = [reading.peak_allocated, reading.peak_reserved, reading.allocated, reading.peak_host]
    session.activity.begins("the report")
    rows = numbers_of_ranks(session.everyone, own).tolist()
    if session.everyone.rank != 0:
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
        problems = [*problems, *_report(blueprint, steps, per_rank, timings)]
    if problems and blueprint.config.evaluation.do_train:
        problems = [*problems, f"The model itself is complete and checked: {output.save_dir}."]
    if problems:
        raise CheckpointError("\n".join(problems))


def _report(blueprint: Blueprint, steps: StepTotals, per_rank: Sequence[RankMemory], timings: RunTimings) -> list[str]:
    """Log the closing lines and write the report; returns what failed."""
    config = blueprint.config
    report = Path(config.output.save_results)
    plan_text, forecast = blueprint.plan.describe(blueprint.shape), blueprint.answer.forecast
    seconds, ideal = steps.seconds, ideal_step_seconds(blueprint)
    mfu = None if ideal is None else ideal / steady_seconds(seconds)
    if forecast is not None:
        logger.info("%s", forecast.compare(seconds))
    for line in closing_lines(steps, per_rank, timings, mfu):
        logger.info("%s", line)
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        write_report(report, to_yaml(config), plan_text, steps, per_rank, timings, forecast, mfu)
        logger.info("results saved to %s", report)
    except (CheckpointError, OSError) as error:
        return [f"--save_results: {error}"]
    return []
