"""Checks that the nodes of a run with replicas match, before any large file is read and before planning.

A run with one pipeline skips these checks. All processes exchange their facts and reach the same result.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

import torch

import mobius
from mobius.config.config import Config
from mobius.config.sources import written_options
from mobius.distributed.rendezvous import JsonValue, Rendezvous, join_run, parse_count, parse_values
from mobius.distributed.transport import Transport
from mobius.errors import ConfigError, PlanError
from mobius.process.ranks import Ranks, boot_id
from mobius.schedule.plan import Plan
from mobius.units import format_bytes

logger = logging.getLogger(__name__)

_PACKAGES: Final = ("torch", "transformers", "safetensors", "tokenizers", "numpy")
_OF_A_NODE: Final = ("cuda_visible_devices", "node_rank", "master_port", "rdzv_endpoint", "host_memory_limit")
"""Options that may differ between nodes."""
_CLOCKS_APART_SECONDS: Final = 60.0
"""Minimum clock difference for a warning. It equals the minimum age at which cache files count as complete."""
_NOTICED: Final = 0.02
"""Share of GPU memory by which machines may differ without a warning."""


def join_replicas(config: Config, ranks: Ranks) -> Rendezvous | None:
    """Return the rendezvous of all replicas, or None if there is one pipeline; collective.

    Raises TransportError, and ConfigError on all processes if code, versions or options differ.
    """
    if ranks.num_replicas == 1:
        return None
    replica_rendezvous = join_run(ranks)
    hint = "All nodes must run the same code, with the same packages and options."
    check_same_facts({"Mobius' own code": _code()} | versions() | _options(config), replica_rendezvous, hint=hint)
    if ranks.num_nodes > 1:
        warn_clock_skew(replica_rendezvous)
    return replica_rendezvous


def warn_clock_skew(replica_rendezvous: Rendezvous) -> None:
    """Warn on rank 0 if the nodes' clocks differ; collective. Training does not depend on clocks."""
    replica_rendezvous.gather(None)  # all ranks have arrived, so the next gather measures latency only
    begun = time.monotonic()
    replica_rendezvous.gather(None)
    now, way = time.time(), time.monotonic() - begun
    gathered = replica_rendezvous.gather([socket.gethostname(), now, way])
    answers = parse_values(gathered, lambda each: (str(each[0]), float(each[1]), float(each[2])))
    (late, behind, _), *_, (early, ahead, _) = sorted(answers, key=lambda answer: answer[1])
    unsure = max(way for _, _, way in answers)
    if replica_rendezvous.rank == 0 and ahead - behind - unsure > _CLOCKS_APART_SECONDS:
        logger.warning(
            "the clock of %s is %.0f s ahead of the clock of %s: dates in logs and in a cache on shared storage do not "
            "match. Synchronize the clocks by NTP; training does not compare clocks.",
            early,
            ahead - behind,
            late,
        )


def check_same_data(
    trained: Callable[[], str], judged: Callable[[], str], replica_rendezvous: Rendezvous | None
) -> None:
    """Raise ConfigError on all processes if their training or evaluation data differs; collective."""
    if replica_rendezvous is not None:
        hint = "Each node reads its own copy of the data: give all nodes the same files."
        check_same_facts(
            {"the training data": trained(), "the evaluation data": judged()}, replica_rendezvous, hint=hint
        )


def smallest_machine(
    replica_rendezvous: Rendezvous, ranks: Ranks, total_bytes: int | None, free_bytes: int | None
) -> tuple[int | None, int | None, int]:
    """Return the minimum of all GPUs' total memory and of their free memory, and this host's number of pipelines."""
    gathered = replica_rendezvous.gather([boot_id(), total_bytes or 0, free_bytes or 0])
    machines = parse_values(gathered, lambda each: str(each[0]))
    totals, free = ([parse_count(each[index]) for each in gathered] for index in (1, 2))
    if total_bytes is not None and max(totals) > (1 + _NOTICED) * min(totals):
        logger.warning(
            "GPUs differ: rank %d has %s, rank %d %s; the run is planned for the smallest",
            totals.index(min(totals)),
            format_bytes(min(totals)),
            totals.index(max(totals)),
            format_bytes(max(totals)),
        )
    pipelines_per_host = max(1, machines.count(boot_id()) // ranks.num_pipeline_ranks)
    both = (None, None) if total_bytes is None else (min(totals), min(free))
    return *both, pipelines_per_host


def smallest_of_all(rendezvous: Rendezvous, own: int) -> int:
    """Return the minimum of `own` on all processes; collective.

    All processes must plan with the same number, but nodes may differ, and two readings of one host may differ, too.
    """
    return min(parse_values(rendezvous.gather(own), parse_count))


def check_same_residents(plan: Plan, transport: Transport) -> None:
    """Raise PlanError on all ranks if a stage is resident in some replicas but not in all; collective.

    Such replicas would deadlock, because weights of resident and streamed stages are all-gathered at different times.
    """
    if transport.replicas is None:
        return
    own = torch.zeros(plan.num_stages, dtype=torch.float64)
    own[[stage for stage in plan.local_stages(transport.rank) if stage in plan.resident]] = 1
    found = transport.all_ranks.sum_over_ranks(own).tolist()
    apart = [str(stage) for stage, number in enumerate(found) if number not in (0, transport.replicas.num_replicas)]
    if apart:
        raise PlanError(
            f"stage(s) {', '.join(apart)} would stay on the GPUs of some replicas only, because their GPUs or hosts "
            "differ. Instead of auto, set how many stages stay on each GPU: --resident_stages 0, or a number that fits "
            "on all GPUs."
        )


def check_same_facts(own: Mapping[str, str], replica_rendezvous: Rendezvous, *, hint: str) -> None:
    """Raise ConfigError on all processes if a fact in `own` differs; collective. `hint` ends the message."""
    gathered = replica_rendezvous.gather([socket.gethostname(), dict(own)])
    hosts = parse_values(gathered, lambda each: str(each[0]))
    facts = parse_values(gathered, lambda each: {str(name): str(value) for name, value in each[1].items()})
    if problems := _differences(facts, hosts):
        raise ConfigError(*problems, hint=hint)


def _differences(facts: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> list[str]:
    """Return a line for each fact in which a process differs from rank 0."""
    found = list[str]()
    for name in dict.fromkeys(name for each in facts for name in each):
        values = [each.get(name, "not given") for each in facts]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            found.append(
                f"{name} differs: {values[0]} on rank 0 ({hosts[0]}), {values[other]} on rank {other} ({hosts[other]})"
            )
    return found


def _code() -> str:
    """Digest of the files in the package `mobius`."""
    digest = hashlib.sha256()
    folder = Path(mobius.__file__).parent
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".py", ".c", ".json"):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect results."""
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in _PACKAGES}


def _options(config: Config) -> dict[str, str]:
    values: Mapping[str, JsonValue] = written_options(config)
    return {f"`--{name}`": str(value) for name, value in values.items() if name not in _OF_A_NODE}
