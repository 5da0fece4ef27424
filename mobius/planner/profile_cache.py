"""Keeps measured profiles between runs, by all that they depend on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from mobius import __version__
from mobius.atomic_files import atomic_write
from mobius.distributed.transport import Transport, all_have_same
from mobius.errors import CheckpointError, reason_of
from mobius.planner.measure import MicrobatchShape
from mobius.planner.profile import FORMAT, Profile, ProfileError
from mobius.regular_files import read_text
from mobius.schedule.partition import ModelShape

logger = logging.getLogger(__name__)


def profile_key(
    model: ModelShape,
    shape: MicrobatchShape,
    *,
    device: torch.device,
    num_ranks: int,
    is_compiled: bool,
    has_peer_copies: bool = True,
) -> dict[str, object]:
    """Everything that a profile depends on: hardware, model, microbatch, format, ranks, versions."""
    is_cuda = device.type == "cuda"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if is_cuda else []
    return {
        "devices": names or [platform.processor() or platform.machine()],
        "device_bytes": torch.cuda.get_device_properties(device).total_memory if is_cuda else 0,
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "model": repr(model),
        "microbatch": [shape.batch, shape.seq_length, str(shape.dtype), shape.loss_chunk_tokens, *_documents(shape)],
        "tile_tokens": shape.tile_tokens,
        "whole_length": shape.full_seq_length,
        "num_ranks": num_ranks,
        "is_compiled": is_compiled,
        "has_peer_copies": has_peer_copies,
        "versions": [__version__, torch.__version__, FORMAT],
    }


def _documents(shape: MicrobatchShape) -> list[int]:
    """Documents of a measured row, and how many there may be; nothing if it is one."""
    if shape.packed is None:
        return []
    return [len(shape.packed.typical_row(shape.seq_length)), shape.packed.max_documents]


def profile_path(folder: Path, key: Mapping[str, object]) -> Path:
    """The file of a profile with that key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"profile-{digest}.json"


def cached_profile(path: Path, measure: Callable[[], Profile], transport: Transport) -> tuple[Profile, bool]:
    """The profile in `path`, or the one that `measure` gives and is kept there, and whether it is new; collective.

    All ranks read the same or all measure: each node has a cache of its own. A file that is no profile is logged and
    replaced; one that cannot be written is logged only.
    """
    known = _read(path)
    all_know = all_have_same("" if known is None else known.to_json(), transport.all_ranks)
    if known is not None and all_know:
        return known, False
    profile = measure()
    if transport.rank == 0:
        _write(path, profile)
    return profile, True


def _read(path: Path) -> Profile | None:
    try:
        return Profile.from_json(read_text(path)) if path.exists() else None
    except (OSError, CheckpointError, ProfileError) as error:
        logger.warning("the profile %s cannot be used and is measured again: %s", path, error)
        return None


def _write(path: Path, profile: Profile) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, has_many_writers=True) as temporary:
            temporary.write_text(profile.to_json(), encoding="utf-8")
    except OSError as error:
        logger.warning("the profile cannot be kept in %s, the next run measures again: %s", path, reason_of(error))
