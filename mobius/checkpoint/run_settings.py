"""The folder of a run before its first step: whether results can be written, and the settings in it."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

import yaml

from mobius.checkpoint.folders import recover_interrupted_saves
from mobius.checkpoint.merged_model import base_shapes, check_free
from mobius.checkpoint.model_card import Origin
from mobius.checkpoint.resume import OPTIONS_FILE, PLAN_FILE, Resume
from mobius.checkpoint.run_folder import OutputFolder
from mobius.checkpoint.saved_stage import export_bytes
from mobius.checkpoint.saver import RunMetadata
from mobius.config.config import Config
from mobius.config.yaml_file import to_yaml
from mobius.errors import CheckpointError, reason_of
from mobius.messages.rendezvous import Rendezvous, join_run
from mobius.models.adapters.peft_folder import AdapterBase, AdapterFolder, check_base
from mobius.models.model_files import ModelFiles, read_json_object
from mobius.models.multimodal.text_config import supported_text_config
from mobius.models.weights import folder_has_weights
from mobius.planning.run_setup import RunSetup
from mobius.planning.saved_plan import saved_plan_of
from mobius.ranks import Ranks
from mobius.signal_handling import RunStatus

logger = logging.getLogger(__name__)


def wait_until_inputs_are_read(ranks: Ranks) -> Rendezvous | None:
    """Return when all ranks have read the files that the user names; collective, before the first rank changes any.

    `--plan`, for instance, may be in the folder of an interrupted run that `prepare_output` removes. The caller keeps
    the meeting until the ranks meet again: without torchrun the store is the first rank's process.
    """
    if ranks.num_ranks == 1:
        return None
    rendezvous = join_run(ranks)
    rendezvous.gather(None)
    return rendezvous


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
    """Put the plan that all ranks agreed on into the folder, and show every rank's actions if that is wanted."""
    if resolved_setup.rank_context.ranks.is_first:
        _write_settings(output, resolved_setup)
    if resolved_setup.config.output.show_actions:
        for rank, actions in enumerate(resolved_setup.schedule.actions):
            logger.info("actions of rank %d:", rank)
            for action in actions:
                logger.info("  %s", action.to_text(resolved_setup.plan.num_stages))


def merged_folder(config: Config) -> Path:
    """Place of the model that adapters are merged into."""
    return Path(config.output.save_dir) / "merged"


def find_adapter_base(sketch: RunSetup, model_folder: Path, resume: Resume | None) -> AdapterBase:
    """The model that adapters are for. Raises CheckpointError where those that are given are for another one."""
    adapters = sketch.config.adapters
    if adapters.merge and not sketch.config.output.overwrite_output_dir:
        check_free(merged_folder(sketch.config))
    if (part := supported_text_config(read_json_object(model_folder / "config.json"))) is not None:
        raise CheckpointError(
            f"--model_path {sketch.config.model.model_path} is more than a text model ({part.full_model_type}), and "
            "adapters of "
            "its text part would fit no model that peft loads. Write that part as a model of its own first, and give "
            f"its folder:\n    python scripts/extract_text_model.py {sketch.config.model.model_path} FOLDER"
        )
    base = AdapterBase.of(sketch.config.model.model_path, model_folder)
    if base.fingerprint is None and adapters.merge:
        raise CheckpointError(f"`--merge`: {model_folder} has no weights, so there is nothing to merge adapters into.")
    if base.fingerprint is None:
        logger.warning("%s has no weights: adapters are for fresh ones, which nothing else will load", model_folder)
    if resume is not None:
        check_base(resume.reader.path, base)
    elif adapters.adapter_path is not None:
        AdapterFolder(Path(adapters.adapter_path).expanduser()).check(sketch.parts, base)
    return base


def origin_of(config: Config, model_folder: Path) -> Origin:
    """The weights that a new run begins with."""
    return Origin(config.model.model_path, folder_has_weights(model_folder))


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
