"""Disk rates of this machine's folders for optimizer states, measured in runs or a first trial, and kept for plans."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import shutil
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path

from torch import frombuffer, uint8

from mobius.distributed.transport import RankGroup, all_gather_numbers
from mobius.engine.host_arena import map_zeros
from mobius.engine.state_files import CHUNK_BYTES, StateFiles, wait
from mobius.errors import CheckpointError, StateFileError, reason_of
from mobius.files.atomic_files import atomic_write, nearest_folder
from mobius.files.regular_files import read_json, typed_value
from mobius.hardware.disk_traffic import NO_SPAN, BusySpan, Moved, Traffic, moved_by_kind
from mobius.planner.profile import DiskRates
from mobius.process.ranks import Ranks, cache_folder
from mobius.units import format_bytes

logger = logging.getLogger(__name__)

CACHE_SHARE = 1 / 3
"""Share of its free space that a consumer drive may use as a write cache, where cells for three bits hold one bit."""
LEAST_BYTES = 2**30
"""Minimum bytes of a measurement; fewer bytes say nothing about a disk."""
TRIAL_BYTES = LEAST_BYTES * 5 // 4
"""Bytes that a trial writes in each folder, then reads, then writes and reads at once."""


def known_disks(folders: Sequence[str]) -> tuple[DiskRates | None, tuple[float, ...]]:
    """Return the folders' total rates and each folder's share of the bytes; (None, ()) if one was never measured.

    Shares are proportional to write rates. Drives write more slowly than they read, so all drives end a step together.
    """
    known = _read() if folders else {}
    rates = [known[name] for name in map(_name, folders) if name in known]
    if not rates or len(rates) < len(folders):
        return None, ()
    write = sum(each.write for each in rates)
    shares = tuple(each.write / write for each in rates)
    read, at_once = (
        min(rate / share for rate, share in zip(own, shares, strict=True))
        for own in ([each.read for each in rates], [each.total for each in rates])
    )
    return DiskRates(read, write, any(each.is_burst for each in rates), at_once), shares


def try_disks(folders: Sequence[str]) -> None:
    """Measure the folders in a short trial if one was never measured, and keep the rates until a run replaces them.

    The rates count as rates of a burst. The trial reads and writes as a run does. Unusable folders stay unmeasured.
    """
    if not folders or known_disks(folders)[0] is not None:
        return
    size = TRIAL_BYTES * len(folders)
    logger.info(
        "the rates of %s are not known: %s are written and read there", ", ".join(folders), format_bytes(2 * size)
    )
    buffer, paths = map_zeros(size, uint8), [nearest_folder(Path(_name(each))) for each in folders]
    # random: no disk can compress it
    buffer.view(-1, CHUNK_BYTES).copy_(frombuffer(bytearray(os.urandom(CHUNK_BYTES)), dtype=uint8))
    try:
        with closing(StateFiles(paths, {0: size, 1: size})) as files:
            wait(files.write(0, buffer))
            wait(files.read(0, buffer))
            wait([*files.write(1, buffer), *files.read(0, buffer)])
    except StateFileError:
        return  # a full disk is refused later, with the arithmetic
    found = dict[str, DiskRates]()
    for folder, reads, writes in zip(folders, files.reads, files.writes, strict=True):
        rates = _rates([reads.history()], [writes.history()], 0.0, math.inf)
        found |= {} if rates is None else {_name(folder): rates}
    _keep(found)


def keep_rates(
    folders: Sequence[str],
    traffic: tuple[Sequence[Traffic], Sequence[Traffic]],
    *,
    since: float,
    ranks: Ranks,
    all_ranks: RankGroup,
) -> dict[str, DiskRates]:
    """Return the rates of each folder `since` a time (`time.monotonic`), and keep them for later plans; collective.

    `traffic` are this rank's reads and writes in each folder. All ranks of a node count together, because they share
    its disks.
    """
    own = [each.history() for each in (*traffic[0], *traffic[1])] or [[] for _ in range(2 * len(folders))]
    of_node = _gather(own, all_ranks)[ranks.node * ranks.num_local :][: ranks.num_local]
    found = dict[str, DiskRates]()
    for place, folder in enumerate(folders):
        reads, writes = ([rank[way + place] for rank in of_node] for way in (0, len(folders)))
        free = shutil.disk_usage(nearest_folder(Path(_name(folder)))).free  # no folder if all stages are resident
        rates = _rates(reads, writes, since, CACHE_SHARE * free)
        found |= {} if rates is None else {_name(folder): rates}
    if found and not ranks.local_rank:
        _keep(found)
    return found


def _keep(found: Mapping[str, DiskRates]) -> None:
    kept, path = _read(), _file()
    kept |= {name: rates for name, rates in found.items() if not rates.is_burst or kept.get(name, rates).is_burst}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, has_many_writers=True) as temporary:
            temporary.write_text(json.dumps({name: asdict(rates) for name, rates in kept.items()}))
    except OSError as error:
        logger.warning("the rates of disks cannot be saved in %s: %s", path, reason_of(error))


def _rates(
    reads: Sequence[Sequence[BusySpan]], writes: Sequence[Sequence[BusySpan]], since: float, cache_bytes: float
) -> DiskRates | None:
    """Rates of bytes moved after the drive's cache was full, or else of all bytes; None for too few bytes."""
    since = max([since, *(spans[1].begin for spans in (*reads, *writes) if spans and spans[0].num_bytes)])
    read, written = (sorted(span for spans in both for span in spans) for both in (reads, writes))
    passed = [*accumulate(span.num_bytes for span in written)]
    place = bisect_right(passed, cache_bytes)
    full = math.inf if place == len(passed) else max(since, written[place].end)
    for start, is_burst in ((full, False), (since, True)):
        moved = moved_by_kind(read, written, start)
        if min(moved.sum(axis=0)[:2]) >= LEAST_BYTES:
            read_rate, write_rate = (_rate(moved, way) for way in (0, 1))
            at_once = float(moved[2, :2].sum() / moved[2, 2]) if moved[2, :2].sum() >= LEAST_BYTES else None
            return DiskRates(read_rate, write_rate, is_burst, at_once)
    return None


def _rate(moved: Moved, way: int) -> float:
    """Bytes per second of reads (0) or writes (1): while only these run, or, if these moved few bytes, at any time."""
    own = moved[way] if moved[way, way] >= LEAST_BYTES else moved[way] + moved[2]
    return float(own[way] / own[2])


def _gather(own: Sequence[Sequence[BusySpan]], all_ranks: RankGroup) -> list[list[list[BusySpan]]]:
    """Lists of spans of every rank, filled up with empty spans; collective."""
    longest = int(all_gather_numbers(all_ranks, [max(map(len, own))]).max())
    row = [number for spans in own for span in [*spans, *[NO_SPAN] * (longest - len(spans))] for number in span]
    table = all_gather_numbers(all_ranks, row).view(all_ranks.num_ranks, len(own), longest, 3).tolist()
    return [[[BusySpan(*span) for span in spans] for spans in rank] for rank in table]


def _name(folder: str) -> str:
    return str(Path(folder).expanduser().resolve())


def _file() -> Path:
    return cache_folder() / "profiles" / f"disks-{platform.node()}.json"


def _read() -> dict[str, DiskRates]:
    try:
        values = read_json(_file()) if _file().exists() else {}
        return dict(typed_value(Mapping[str, DiskRates], values, "disks"))
    except (CheckpointError, ValueError) as error:
        logger.warning("rates of disks cannot be read: %s", error)
        return {}
