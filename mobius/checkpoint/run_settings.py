"""Checks before a run's first step that its results can be written, and writes the settings into its folder."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from mobius.checkpoint.folders import find_checkpoints, recover_interrupted_saves
from mobius.checkpoint.merged_model import base_shapes
from mobius.checkpoint.resume import Resume
from mobius.checkpoint.run_folder import OutputFolder
from mobius.checkpoint.saved_stage import PlannedRun, export_bytes, saved_parameters
from mobius.checkpoint.tensor_files import checkpoint_disk_bytes, free_disk_bytes
from mobius.checkpoint.whole_model import SavedLayout
from mobius.config.config import ALL_CHECKPOINTS, Config, SaveStrategy, steps_between
from mobius.config.earlier_results import OPTIONS_FILE, PLAN_FILE, output_files
from mobius.config.sources import to_yaml
from mobius.errors import CheckpointError
from mobius.process.signal_handling import RunStatus
from mobius.units import format_bytes

logger = logging.getLogger(__name__)


def prepare_output(
    run_setup: PlannedRun, run_status: RunStatus, resume: Resume | None, *, model_folder: Path, layout: SavedLayout
) -> OutputFolder:
    """Check before training that the results can be written, and prepare the folder with the settings.

    `model_folder` is the folder of --model_path, `layout` the result's. Raises CheckpointError.
    """
    config = run_setup.config
    wanted, save_dir, trains = config.output, Path(config.output.save_dir), config.evaluation.do_train
    if resume is None:
        _check_model_stays(config, model_folder, layout)
    files = output_files(config) if trains else {}  # only training runs write the files of --save_params/--save_results
    output = OutputFolder(
        save_dir,
        overwrite=wanted.overwrite_output_dir,
        files=files,
        resumes=resume is not None and resume.reader.is_in(save_dir),
    )
    if run_setup.ranks.is_first:
        num_bytes = export_bytes(run_setup) if trains else 0
        needed: dict[str, int] = {"--save_dir": num_bytes + layout.other_bytes}
        if "--save_params" in files:
            needed["--save_params"] = num_bytes
        if config.adapters.merge and trains:
            num_elements = sum(map(math.prod, base_shapes(run_setup.parts).values()))
            needed["--save_dir"] += num_elements * run_setup.dtype.itemsize
        output.prepare(needed)
        for line in recover_interrupted_saves(save_dir):
            logger.info("%s", line)
        try:
            write_settings(output, run_setup)
        except CheckpointError:
            output.discard()
            raise
    left = "nothing is left" if output.is_new else f"{output.save_dir} is as it was"
    run_status.set_status(f"before the first step: nothing was trained, and {left}", clean_up=output.discard)
    return output


def write_settings(output: OutputFolder, run_setup: PlannedRun) -> None:
    """Write the options and the plan into the folder, on the first rank. Raises CheckpointError."""
    if run_setup.ranks.is_first:
        plan = run_setup.saved_plan.to_json()
        output.write_settings({OPTIONS_FILE: to_yaml(run_setup.config), PLAN_FILE: plan})


def _check_model_stays(config: Config, model_folder: Path, layout: SavedLayout) -> None:
    """Raise CheckpointError if the model of --model_path would be replaced, though the results need it."""
    wanted, is_whole = config.output, config.evaluation.do_train and not config.adapters.has_frozen_base
    if (is_whole and layout.whole is None) or not wanted.overwrite_output_dir:
        return
    if model_folder.resolve().is_relative_to(Path(wanted.save_dir).resolve()):
        results = "adapters of it" if config.evaluation.do_train else "an evaluation or answers"
        results = f"a result with {layout}" if is_whole else results
        raise CheckpointError(
            f"--save_dir {wanted.save_dir} holds the model that --model_path {config.model.model_path} names, and "
            f"--overwrite_output_dir would remove it for {results}. Choose another --save_dir."
        )


def count_saves(config: Config, *, num_steps_done: int, epochs_done: float, epochs: float) -> int:
    """Return how many checkpoints a run will save after `num_steps_done`; its last step ends at about `epochs`."""
    saving, total = config.saving, config.optim.num_steps
    if saving.save_strategy is SaveStrategy.EPOCH:
        return math.floor(epochs) - math.floor(epochs_done)
    every = steps_between(saving.save_steps, total)
    return total // every - num_steps_done // every


def check_disk_space_for_run(run_setup: PlannedRun, save_dir: Path, *, num_saves: int, layout: SavedLayout) -> None:
    """Refuse a run whose disk has no room for its first checkpoint and its model; warn if later checkpoints do not fit.

    Called before weights are read, on the first rank; `layout` is the result's. Raises CheckpointError.
    """
    config = run_setup.config
    parameters, limit = saved_parameters(run_setup), config.saving.save_total_limit
    has_optimizer, model = not config.saving.save_only_model, export_bytes(run_setup) + layout.other_bytes
    each = checkpoint_disk_bytes(parameters, run_setup.dtype, has_optimizer)
    free = free_disk_bytes(save_dir)
    room = (free - model) // each
    found = f"--save_dir {save_dir}: a checkpoint takes {format_bytes(each)}, the model {format_bytes(model)}; "
    found += f"{format_bytes(free)} is free"
    smaller = checkpoint_disk_bytes(parameters, run_setup.dtype, has_optimizer=False)
    if num_saves > 0 and room < 1:
        less = f"save weights only (--save_only_model: {format_bytes(smaller)}), " if has_optimizer else ""
        raise CheckpointError(
            f"{found}. Nothing is trained yet. Free some space, choose another --save_dir, {less}or save no "
            "checkpoints: --save_strategy no."
        )
    # An older checkpoint is removed only when the new one is complete, so the disk must hold one more.
    wanted = num_saves
    if limit != ALL_CHECKPOINTS:
        wanted = min(num_saves, max(1, limit + 1 - len(find_checkpoints(save_dir).valid)))
    if room < wanted:
        logger.warning(
            "%s: room for %d of the %d further checkpoints that exist at the same time. Saves without room are skipped "
            "with a warning: free some space, or lower --save_total_limit",
            found,
            room,
            wanted,
        )
