"""The folder of a run before its first step: whether results can be written, and the settings in it."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

import yaml

from mobius.checkpoint.folders import recover_interrupted_saves
from mobius.checkpoint.merged_model import base_shapes
from mobius.checkpoint.model_card import Origin
from mobius.checkpoint.resume import OPTIONS_FILE, PLAN_FILE, Resume
from mobius.checkpoint.run_folder import OutputFolder
from mobius.checkpoint.saved_stage import export_bytes
from mobius.checkpoint.saver import RunMetadata
from mobius.config.config import Config
from mobius.config.sources import to_yaml
from mobius.errors import CheckpointError, reason_of
from mobius.models.adapters.peft_folder import AdapterBase
from mobius.models.model_files import ModelFiles
from mobius.planner.run_setup import RunSetup
from mobius.planner.saved_plan import saved_plan_of
from mobius.signal_handling import RunStatus

logger = logging.getLogger(__name__)


def prepare_output(
    run_setup: RunSetup, run_status: RunStatus, resume: Resume | None, *, model_folder: Path
) -> OutputFolder:
    """Find out now, not after training, whether the results can be written; start the folder with the settings.

    `model_folder` is that of --model_path. Raises CheckpointError.
    """
    config = run_setup.config
    wanted, save_dir, trains = config.output, Path(config.output.save_dir), config.evaluation.do_train
    if resume is None:
        _check_model_stays(config, model_folder)
    files = {"--save_results": Path(wanted.save_results)} if trains else {}  # the report is one of a training
    if wanted.params_file is not None and trains:
        files = {"--save_params": Path(wanted.params_file), **files}
    output = OutputFolder(
        save_dir,
        overwrite=wanted.overwrite_output_dir,
        files=files,
        keeps_checkpoints=config.saving.is_on and trains,
        resumes=resume is not None and resume.reader.path.resolve().parent == save_dir.resolve(),
    )
    if run_setup.rank_context.ranks.is_first:
        num_bytes = export_bytes(run_setup) if trains else 0
        needed: dict[str, int] = {"--save_dir": num_bytes}
        if "--save_params" in files:
            needed["--save_params"] = num_bytes
        if config.adapters.merge and trains:
            num_elements = sum(map(math.prod, base_shapes(run_setup.parts).values()))
            needed["--save_dir"] += num_elements * run_setup.dtype.itemsize
        output.prepare(needed)
        for line in recover_interrupted_saves(save_dir):
            logger.info("%s", line)
        try:
            _write_settings(output, run_setup)
        except CheckpointError:
            output.discard()
            raise
    kept = f"{output.save_dir} is as it was" if output.save_dir.exists() else "nothing is left"
    run_status.set_status(f"before the first step: nothing was trained, and {kept}", clean_up=output.discard)
    return output


def _check_model_stays(config: Config, model_folder: Path) -> None:
    """Raise CheckpointError where the results would replace the model, and are not a whole one themselves."""
    wanted, is_whole = config.output, config.evaluation.do_train and not config.adapters.is_lora
    if is_whole or not wanted.overwrite_output_dir:
        return
    if model_folder.resolve().is_relative_to(Path(wanted.save_dir).resolve()):
        results = "adapters of it" if config.evaluation.do_train else "an evaluation or answers"
        raise CheckpointError(
            f"--save_dir {wanted.save_dir} holds the model that --model_path {config.model.model_path} names, and "
            f"--overwrite_output_dir would remove it for {results}. Choose another --save_dir."
        )


def recreate_run_folder(output: OutputFolder, run_setup: RunSetup) -> None:
    """Make the run's folder anew, with its settings, if somebody has removed it meanwhile; the first rank's."""
    if output.recreate_if_removed():
        _write_settings(output, run_setup)


def write_resolved_plan(output: OutputFolder, resolved_setup: RunSetup) -> None:
    """Put the plan that all ranks agreed on into the folder."""
    if resolved_setup.rank_context.ranks.is_first:
        _write_settings(output, resolved_setup)


def collect_run_metadata(
    run_setup: RunSetup, model_files: ModelFiles, fingerprint: str, *, base: AdapterBase | None, origin: Origin
) -> RunMetadata:
    """Everything in a run's checkpoints that does not change; options as they were asked for, `auto` as auto."""
    plan = saved_plan_of(run_setup.result).to_json()
    requested_config = replace(run_setup.requested_config, optim=run_setup.config.optim)
    return RunMetadata(
        model_files=model_files,
        files={OPTIONS_FILE: to_yaml(requested_config), PLAN_FILE: plan},
        options=yaml.safe_load(to_yaml(requested_config)),
        data_fingerprint=fingerprint,
        origin=origin,
        base=base,
    )


def _write_settings(output: OutputFolder, run_setup: RunSetup) -> None:
    settings = {OPTIONS_FILE: to_yaml(run_setup.config), PLAN_FILE: saved_plan_of(run_setup.result).to_json()}
    for name, text in settings.items():
        try:
            (output.folder / name).write_text(text)
        except OSError as error:
            path = output.folder / name
            raise CheckpointError(
                f"--save_dir {output.save_dir}: cannot write {path} ({reason_of(error)}). Free some space, or choose "
                "another folder."
            ) from error
