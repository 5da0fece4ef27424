"""Rates that folders with optimizer states reached in runs on this machine, kept for the plans of later ones."""

from __future__ import annotations

import json
import logging
import math
import platform
import shutil
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path

from mobius.atomic_files import atomic_write, nearest_folder
from mobius.distributed.transport import RankGroup, all_gather_numbers
from mobius.errors import CheckpointError, reason_of
from mobius.hardware.disk_traffic import NO_SPAN, BusySpan, Traffic, rate_of
from mobius.planner.profile import DiskRates
from mobius.ranks import Ranks, cache_folder
from mobius.regular_files import read_json, typed_value

logger = logging.getLogger(__name__)

CACHE_SHARE = 1 / 3
"""Share of free space that a consumer drive may take as a cache of writes: cells of three bits hold one."""
LEAST_BYTES = 2**30
"""Fewer tell nothing of a disk."""


def known_disks(folders: Sequence[str]) -> tuple[DiskRates | None, tuple[float, ...]]:
    """Return what folders reach together, and the part of the bytes that each gets; None, () if one was never measured.

    Shares are by what each writes per second: drives write more slowly than they read, so they end a step together.
    """
    known = _read() if folders else {}
    rates = [known[name] for name in map(_name, folders) if name in known]
    if not rates or len(rates) < len(folders):
        return None, ()
    write = sum(each.write for each in rates)
    shares = tuple(each.write / write for each in rates)
    read = min(each.read / share for each, share in zip(rates, shares, strict=True))
    return DiskRates(read, write, any(each.is_burst for each in rates)), shares


def keep_rates(
    folders: Sequence[str],
    traffic: tuple[Sequence[Traffic], Sequence[Traffic]],
    *,
    since: float,
    ranks: Ranks,
    all_ranks: RankGroup,
) -> dict[str, DiskRates]:
    """Return what each folder reached `since` a time (`time.monotonic`), and keep it for later plans; collective.

    `traffic` are this rank's reads and writes in each folder; all ranks of a node count together, who share its disks.
    """
    own = [each.history() for each in (*traffic[0], *traffic[1])] or [[] for _ in range(2 * len(folders))]
    of_node = _gather(own, all_ranks)[ranks.node * ranks.num_local :][: ranks.num_local]
    found = dict[str, DiskRates]()
    for place, folder in enumerate(folders):
        reads, writes = ([rank[way + place] for rank in of_node] for way in (0, len(folders)))
        free = shutil.disk_usage(nearest_folder(Path(_name(folder)))).free  # all stages of all ranks may be resident
        rates = _rates(reads, writes, since, CACHE_SHARE * free)
        found |= {} if rates is None else {_name(folder): rates}
    if not found or ranks.local_rank:
        return found
    kept, path = _read(), _file()
    kept |= {name: rates for name, rates in found.items() if not rates.is_burst or kept.get(name, rates).is_burst}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, has_many_writers=True) as temporary:
            temporary.write_text(json.dumps({name: asdict(rates) for name, rates in kept.items()}))
    except OSError as error:
        logger.warning("the rates of disks cannot be saved in %s: %s", path, reason_of(error))
    return found


def _rates(
    reads: Sequence[Sequence[BusySpan]], writes: Sequence[Sequence[BusySpan]], since: float, cache_bytes: float
) -> DiskRates | None:
    """Rates after the cache was full, or else of what there is; None for too few bytes."""
    since = max([since, *(spans[1].begin for spans in (*reads, *writes) if spans and spans[0].num_bytes)])
    read, written = (sorted(span for spans in both for span in spans) for both in (reads, writes))
    passed = [*accumulate(span.num_bytes for span in written)]
    place = bisect_right(passed, cache_bytes)
    full = math.inf if place == len(passed) else max(since, written[place].end)
    for start, is_burst in ((full, False), (since, True)):
        if min(sum(span.num_bytes for span in each if span.begin >= start) for each in (read, written)) >= LEAST_BYTES:
            return DiskRates(rate_of(read, start), rate_of(written, start), is_burst)
    return None


def _gather(own: Sequence[Sequence[BusySpan]], all_ranks: RankGroup) -> list[list[list[BusySpan]]]:
    """Lists of spans of every rank, with empty ones at their ends; collective."""
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
