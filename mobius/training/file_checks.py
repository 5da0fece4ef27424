"""Whether the files of a run on several nodes are where all of them need them, found before training depends on it.

    model, adapters, data     read by every node: each may have copies of its own, if they are the same
    a checkpoint to go on     the same
    --save_dir                written on the first node alone; what reads it on all nodes says so below

Nothing here is asked of a run on one node.
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
from pathlib import Path
from typing import Final

from mobius.config.config import Config
from mobius.distributed.node_checks import check_same_facts
from mobius.distributed.rendezvous import Rendezvous, parse_values
from mobius.errors import CheckpointError, reason_of
from mobius.models.model_files import read_json_object
from mobius.models.peft_folder import weights_fingerprint
from mobius.ranks import Ranks, num_restarts_allowed

logger = logging.getLogger(__name__)

_SIGHT_SECONDS: Final = 3.0
"""Time in which what the first node writes is seen on the others, where they share the folder."""
_LOOK_SECONDS: Final = 0.1
_SAYS_NOTHING: Final = ("_name_or_path", "transformers_version")
"""Fields of config.json in which copies of a model may differ."""


def check_same_model(config: Config, folder: Path, replica_rendezvous: Rendezvous | None) -> None:
    """Raise ConfigError, on all processes alike, where `folder` holds another model on one of them. Collective."""
    if replica_rendezvous is None:
        return
    fields = read_json_object(folder / "config.json")
    text = json.dumps({name: fields[name] for name in sorted(fields) if name not in _SAYS_NOTHING})
    facts = {
        "the model's config.json": hashlib.sha256(text.encode()).hexdigest()[:12],
        "the model's weights": weights_fingerprint(folder) or "none",
    }
    if (adapter := config.adapters.adapter_path) is not None:
        facts["the adapter's weights"] = weights_fingerprint(Path(adapter).expanduser()) or "none"
    hint = "Each node reads these files by itself: copy them anew, or put them where all nodes see them."
    check_same_facts(facts, replica_rendezvous, hint=hint)


def check_save_dir(config: Config, ranks: Ranks, made: Path, replica_rendezvous: Rendezvous | None) -> None:
    """Find out which nodes see `made`, a folder that the first rank has made for --save_dir. Collective.

    Raises CheckpointError, on all processes alike, where the run is going to read it on a node that does not see it;
    where it is not, a line says so.
    """
    if replica_rendezvous is None or ranks.num_nodes == 1:
        return
    told = parse_values(
        _look_around(made, replica_rendezvous), lambda each: (str(each[0]), str(each[1]), each[2] is True)
    )
    blind = [rank for rank, (_, _, sees) in enumerate(told) if not sees]
    if not blind:
        return
    first, place, _ = told[0]
    host, other, _ = told[blind[0]]
    hosts = list(dict.fromkeys(told[rank][0] for rank in blind))
    found = f"--save_dir {config.output.save_dir}: {place} of rank 0 ({first}) is not "
    found += f"{other} of rank {blind[0]} ({host})"
    if reasons := _read_everywhere(config):
        raise CheckpointError(
            f"{found}, and {' and '.join(reasons)}. Use a --save_dir that all nodes share, or leave that option out."
        )
    if ranks.is_first:
        logger.warning(
            "%s: all that the run leaves is on %s alone. To go on from a checkpoint, copy it to the same place on %s",
            found,
            first,
            ", ".join(hosts),
        )


def _look_around(made: Path, replica_rendezvous: Rendezvous) -> Sequence[object]:
    """Host, path and whether it sees the first rank's mark in `made`, of every process.

    The mark has a name that nobody has looked for before, so that no node remembers that it was absent.
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
        replica_rendezvous.gather(None)  # from here on it is there
        sees = is_first or _is_seen(mark)
        place = str(made.with_name(made.name.removesuffix(".partial")))
        return replica_rendezvous.gather([socket.gethostname(), place, sees])
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
    """Reasons for which all nodes will read --save_dir."""
    reasons = []
    if config.evaluation.load_best_model_at_end and config.evaluation.do_train:
        reasons.append("--load_best_model_at_end reads the best checkpoint on every node")
    if config.saving.is_on and config.evaluation.do_train and num_restarts_allowed() > 0:
        reasons.append("--max_restarts goes on from the newest checkpoint on every node")
    return reasons
