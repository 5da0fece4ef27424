"""Checks of the model and adapters that a run reads, before it changes any file."""

from __future__ import annotations

import logging
from pathlib import Path

from mobius.checkpoint.merged_model import check_free, merged_folder
from mobius.checkpoint.model_card import Origin
from mobius.checkpoint.resume import Resume
from mobius.config.config import Config
from mobius.distributed.rendezvous import Rendezvous, join_run
from mobius.errors import CheckpointError
from mobius.models.family_support import supported_text_config
from mobius.models.model_files import read_json_object
from mobius.models.peft_folder import AdapterBase, AdapterFolder, check_base
from mobius.models.weights import folder_has_weights
from mobius.planner.run_setup import RunSetup
from mobius.ranks import Ranks

logger = logging.getLogger(__name__)


def wait_until_inputs_are_read(ranks: Ranks) -> Rendezvous | None:
    """Return when all ranks have read the files that the user names; collective, before the first rank changes any.

    `--plan`, for instance, may be in the folder of an interrupted run that `prepare_output` removes. The caller holds
    the rendezvous until the next one: without torchrun the store lives in the first rank's process.
    """
    if ranks.num_ranks == 1:
        return None
    rendezvous = join_run(ranks)
    rendezvous.gather(None)
    return rendezvous


def find_adapter_base(sketch: RunSetup, model_folder: Path, resume: Resume | None) -> AdapterBase:
    """Return the base model of the adapters. Raises CheckpointError if given adapters are for another model."""
    adapters = sketch.config.adapters
    if adapters.merge and not sketch.config.output.overwrite_output_dir:
        check_free(merged_folder(sketch.config))
    if (part := supported_text_config(read_json_object(model_folder / "config.json"))) is not None:
        raise CheckpointError(
            f"--model_path {sketch.config.model.model_path} is more than a text model ({part.full_model_type}), and "
            "peft could not load adapters of its text part. Extract that part as a separate model first, and give "
            f"its folder:\n    python scripts/extract_text_model.py {sketch.config.model.model_path} FOLDER"
        )
    base = AdapterBase.of(sketch.config.model.model_path, model_folder)
    if base.fingerprint is None and adapters.merge:
        raise CheckpointError(f"`--merge`: {model_folder} has no weights to merge adapters into.")
    if base.fingerprint is None:
        logger.warning(
            "%s has no weights: adapters are trained on random ones, which no other program can load", model_folder
        )
    if resume is not None:
        check_base(resume.reader.path, base)
    elif adapters.adapter_path is not None:
        AdapterFolder(Path(adapters.adapter_path).expanduser()).check(sketch.parts, base)
    return base


def origin_of(config: Config, model_folder: Path) -> Origin:
    """Return the origin of the weights that a new run begins with."""
    return Origin(config.model.model_path, folder_has_weights(model_folder))
