"""Checks of the files that a run reads, before training starts and before the run changes any file.

With several nodes, all nodes must have these files:

    model, adapters, data       every node reads them; a node may read its own copy if all copies are equal
    the checkpoint to resume    as for the model
    --save_dir                  the first node writes it; `_read_everywhere` lists options for which all nodes read it
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from mobius.checkpoint.merged_model import check_free, merged_folder
from mobius.checkpoint.resume import Resume
from mobius.checkpoint.whole_model import (
    TEXT_ALONE,
    SavedLayout,
    check_recorded,
    chosen_layout,
    find_whole_model,
    recorded_base,
)
from mobius.config.config import Config, ExportAs
from mobius.distributed.node_checks import check_same_facts
from mobius.distributed.rendezvous import Rendezvous, join_run, parse_values
from mobius.errors import CheckpointError, reason_of
from mobius.models.adapter_kinds import KINDS, open_adapter
from mobius.models.blocks import ModelParts
from mobius.models.families import ADAPTER_FILE
from mobius.models.family_support import supported_text_config
from mobius.models.model_files import read_json_object
from mobius.models.peft_folder import AdapterBase, check_base, weights_fingerprint
from mobius.models.whole_class import text_prefix_of
from mobius.process.log import RANK_ZERO_ONLY
from mobius.process.ranks import Ranks, num_restarts_allowed

logger = logging.getLogger(__name__)

_SIGHT_SECONDS: Final = 3.0
"""Maximum time after which other nodes see a file that the first node has written to a shared folder."""
_LOOK_SECONDS: Final = 0.1
_SAYS_NOTHING: Final = ("_name_or_path", "transformers_version")
"""Fields of config.json that may differ between copies of one model."""


def wait_until_inputs_are_read(ranks: Ranks) -> Rendezvous | None:
    """Wait until all ranks have read the files that the options name; then the first rank may change them. Collective.

    For instance, the file of `--plan` may be in the folder of an interrupted run, which `prepare_output` removes. The
    caller keeps the returned rendezvous until the next one: without torchrun, its store is in the first rank's process.
    """
    if ranks.num_ranks == 1:
        return None
    rendezvous = join_run(ranks)
    rendezvous.gather(None)
    return rendezvous


def find_adapter_base(config: Config, parts: ModelParts, model_folder: Path, resume: Resume | None) -> AdapterBase:
    """Return the base model of the adapters. Raises CheckpointError if existing adapters are for another model."""
    adapters = config.adapters
    if adapters.merge and not config.output.overwrite_output_dir:
        check_free(merged_folder(config))
    base = AdapterBase.of(config.model.model_path, model_folder)
    if (part := supported_text_config(read_json_object(model_folder / "config.json"))) is not None:
        prefix = None if adapters.is_prompt else text_prefix_of(model_folder)
        if prefix is None:
            raise CheckpointError(
                f"--model_path {config.model.model_path} is more than a text model ({part.full_model_type}), and "
                f"peft could not load {KINDS[adapters.finetuning_type].noun} of its text part. Extract that part as a "
                "separate model first, and give its folder:\n"
                f"    mobius export {config.model.model_path} FOLDER --export_as text"
            )
        base = replace(base, text_prefix=prefix)
    if base.fingerprint is None and adapters.merge:
        raise CheckpointError(f"`--merge`: {model_folder} has no weights to merge adapters into.")
    if base.fingerprint is None:
        logger.warning(
            "%s has no weights: adapters are trained on random weights, which no other program can load",
            model_folder,
            extra=RANK_ZERO_ONLY,
        )
    if resume is not None:
        check_base(resume.reader.path, base)
    elif adapters.adapter_path is not None:
        open_adapter(Path(adapters.adapter_path).expanduser(), adapters).check(parts, base)
    return base


def find_layout(config: Config, parts: ModelParts, folder: Path, resume: Resume | None) -> SavedLayout:
    """Return the layout of the result, whose base is in `folder`. Raises MobiusError if it is not possible.

    A resumed run needs the base from which its text was taken.
    """
    if config.adapters.has_frozen_base and not config.adapters.merge:
        return TEXT_ALONE
    export_as, recorded = config.output.export_as, {} if resume is None else recorded_base(resume.reader.path)
    whole = find_whole_model(config.model.model_path, folder, parts)
    if recorded and export_as is not ExportAs.TEXT and not config.adapters.has_frozen_base:  # else `check_base` does it
        check_recorded(recorded, None if whole is None else whole.base, option="--model_path")
    return chosen_layout(whole, export_as)


def check_same_model(folder: Path, adapter_path: str | None, replica_rendezvous: Rendezvous | None) -> None:
    """Raise ConfigError on all processes if one process has another model or adapter. Collective."""
    if replica_rendezvous is None:
        return
    fields = read_json_object(folder / "config.json")
    text = json.dumps({name: fields[name] for name in sorted(fields) if name not in _SAYS_NOTHING})
    facts = {
        "the model's config.json": _digest(text),
        "the model's weights": weights_fingerprint(folder) or "none",
    }
    if adapter_path is not None:
        adapter = Path(adapter_path).expanduser()
        facts["the adapter's weights"] = weights_fingerprint(adapter) or "none"
        settings = adapter / ADAPTER_FILE
        facts["the adapter's options"] = _digest(str(read_json_object(settings))) if settings.is_file() else "none"
    hint = "Each node reads its own copy of these files: copy them again, or put them in a shared folder."
    check_same_facts(facts, replica_rendezvous, hint=hint)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def check_save_dir(config: Config, ranks: Ranks, made: Path, replica_rendezvous: Rendezvous | None) -> None:
    """Check which nodes see `made`, the folder that the first rank created for --save_dir. Collective.

    If a node does not see the folder: raises CheckpointError on all processes if the run will read the folder on that
    node, and only warns otherwise.
    """
    if replica_rendezvous is None or ranks.num_nodes == 1:
        return
    answers = parse_values(
        _look_around(made, replica_rendezvous), lambda each: (str(each[0]), str(each[1]), each[2] is True)
    )
    blind = [rank for rank, (_, _, sees) in enumerate(answers) if not sees]
    if not blind:
        return
    first, place, _ = answers[0]
    host, other, _ = answers[blind[0]]
    hosts = list(dict.fromkeys(answers[rank][0] for rank in blind))
    problem = f"--save_dir {config.output.save_dir}: {place} of rank 0 ({first}) is not "
    problem += f"{other} of rank {blind[0]} ({host})"
    if reasons := _read_everywhere(config):
        raise CheckpointError(
            f"{problem}, and {' and '.join(reasons)}. Use a --save_dir that all nodes share, or omit that option."
        )
    if ranks.is_first:
        logger.warning(
            "%s: checkpoints and results are on %s only. To resume from a checkpoint, copy it to the same path on %s",
            problem,
            first,
            ", ".join(hosts),
        )


def _look_around(made: Path, replica_rendezvous: Rendezvous) -> Sequence[object]:
    """Return for every process: its host, its path of `made`, and whether it sees the first rank's marker file there.

    The marker has a new random name: a node could have cached that a file with a fixed name does not exist.
    """
    is_first = replica_rendezvous.rank == 0
    name = str(replica_rendezvous.gather(f"seen-{secrets.token_hex(8)}" if is_first else None)[0])
    mark = made / name
    try:
        if is_first:
            try:
                mark.write_text(name)
            except OSError as error:
                raise CheckpointError(
                    f"{mark} cannot be written ({reason_of(error)}). Use another --save_dir."
                ) from error
        replica_rendezvous.gather(None)  # wait until the marker exists
        sees = is_first or _is_seen(mark)
        return replica_rendezvous.gather([socket.gethostname(), str(made), sees])
    finally:
        if is_first:
            with contextlib.suppress(OSError):
                mark.unlink()


def _is_seen(mark: Path) -> bool:
    end = time.monotonic() + _SIGHT_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if mark.read_text() == mark.name:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_SECONDS)


def _read_everywhere(config: Config) -> list[str]:
    """Return the reasons why all nodes will read --save_dir; empty if they will not."""
    reasons = []
    if config.evaluation.load_best_model_at_end and config.evaluation.do_train:
        reasons.append("--load_best_model_at_end reads the best checkpoint on every node")
    if config.saving.is_on and config.evaluation.do_train and num_restarts_allowed() > 0:
        reasons.append("--max_restarts resumes from the newest checkpoint on every node")
    return reasons
