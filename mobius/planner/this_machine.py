"""The machine on which a run starts: GPUs, host memory and disks, on which all ranks agree."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from mobius.config.config import Config, split_names
from mobius.distributed.node_checks import smallest_machine, smallest_of_all
from mobius.distributed.rank_context import RankContext
from mobius.distributed.rendezvous import Rendezvous
from mobius.distributed.transport import SingleRankTransport
from mobius.hardware.devices import cap_gpu_memory
from mobius.hardware.host_memory import available_host_bytes, total_host_bytes
from mobius.planner.disk_use import check_folders
from mobius.planner.gpu_specs import SUSTAINED_SHARE, Host, gpu_spec_of_device
from mobius.planner.measure import measure_product_rate
from mobius.planner.measured_disks import known_disks, try_disks
from mobius.planner.profile import DiskRates
from mobius.planner.request import Machine
from mobius.planner.timer import CollectiveTimer
from mobius.process.ranks import Ranks, allows_peer_copies, num_cpus_per_rank
from mobius.units import GIB

logger = logging.getLogger(__name__)

PROBE_SECONDS, MILLION = 0.1, 10**6
SLOW_SHARE = 0.8
"""Share of a card's usual rate of large products. If the measured rate is lower, a run plans with the measured rate."""
HOST_SHARE = 0.9
"""Share of the host's memory that plans may use; a run checks the free memory before it allocates."""


def find_machine(config: Config, context: RankContext) -> Machine:
    """Return the machine to plan for: the smallest of all ranks' machines, with the memory that options allow.

    Collective if `context` has a rendezvous. Disks for optimizer states are measured if no rates are known. Raises
    GpuMemoryError, and StateFileError for folders that cannot hold states.
    """
    pipeline, ranks, met = config.pipeline, context.ranks, context.widest_rendezvous
    machine = _own_machine(context.device, ranks, cap_gpu_memory(context.device, pipeline.gpu_memory_limit))
    if context.replica_rendezvous is not None:
        total, free, pipelines_per_host = smallest_machine(
            context.replica_rendezvous, ranks, machine.total_bytes, machine.free_bytes
        )
        machine = replace(
            machine,
            total_bytes=total,
            free_bytes=free,
            host_bytes=None if machine.host_bytes is None else machine.host_bytes // pipelines_per_host,
            num_nodes=max(1, ranks.num_replicas // pipelines_per_host),
            node_link=config.planning.node_link or machine.node_link,
        )
    if met is not None and machine.host_bytes is not None:
        limit = pipeline.host_memory_limit
        own = machine.host_bytes if limit is None else host_bytes_per_pipeline(config, machine)
        machine = replace(machine, agreed_host_bytes=smallest_of_all(met, own))
    check_folders(config)
    folders = split_names(pipeline.offload_states_to)
    if context.device.type == "cuda" and not ranks.local_rank and config.planning.disk_rate is None:
        try_disks(folders)
    return _with_disks(machine, folders, met)


def host_bytes_per_pipeline(config: Config, machine: Machine) -> int:
    """Return the host memory that a pipeline may use: its part of `--host_memory_limit`, or else of the free memory."""
    limit = config.pipeline.host_memory_limit
    return (available_host_bytes() if limit is None else int(limit * GIB)) // machine.replicas_per_node


def machine_of_gpu(name: str, total_bytes: int, num_ranks: int, *, free_bytes: int | None = None) -> Machine:
    """Return this machine; the driver calls its GPUs `name`."""
    return Machine(
        num_ranks,
        gpu_spec_of_device(name),
        total_bytes,
        free_bytes,
        host_bytes=int(total_host_bytes() * HOST_SHARE),
        has_peer_copies=allows_peer_copies(),
        host=Host(cores_per_rank=max(1, num_cpus_per_rank(num_ranks))),
    )


def with_product_share(machine: Machine, context: RankContext, dtype: torch.dtype) -> Machine:
    """Return `machine` with the measured share of its usual speed, if the slowest GPU of all ranks is slow.

    Collective if ranks can meet. Numbers are chosen by estimates before layers run. For a limited or shared GPU the
    estimated times would be far too short. A GPU that is not known, or has no room for a product, counts as normal.
    """
    if context.device.type != "cuda":
        return machine
    share, met = 1.0, context.widest_rendezvous
    if machine.gpu_spec is not None:
        timer = CollectiveTimer(context.device, SingleRankTransport(), part_seconds=PROBE_SECONDS)
        with suppress(torch.OutOfMemoryError):
            share = measure_product_rate(timer, dtype) * SUSTAINED_SHARE / machine.gpu_spec.product_rate
    if met is not None:
        share = smallest_of_all(met, round(MILLION * share)) / MILLION
    if share > SLOW_SHARE:
        return machine
    text = "large products take %.1f times as long as is usual for this GPU: numbers are chosen for this speed"
    logger.info(text, 1 / share)
    return replace(machine, product_share=share)


def _own_machine(device: torch.device, ranks: Ranks, free_bytes: int | None) -> Machine:
    if device.type != "cuda":
        return Machine(ranks.num_pipeline_ranks, num_replicas=ranks.num_replicas, num_nodes=ranks.num_nodes)
    properties = torch.cuda.get_device_properties(device)
    own = machine_of_gpu(properties.name, properties.total_memory, ranks.num_pipeline_ranks, free_bytes=free_bytes)
    if ranks.num_replicas == 1:
        return own
    host = replace(own.host, cores_per_rank=max(1, num_cpus_per_rank(ranks.num_local)))
    return replace(own, num_replicas=ranks.num_replicas, num_nodes=ranks.num_nodes, host=host)


def _with_disks(machine: Machine, folders: Sequence[str], met: Rendezvous | None) -> Machine:
    """Return `machine` with its disks' shares, and with the slowest node's rates, if rates are known on all nodes.

    Collective if ranks `met`.
    """
    if folders and met is not None:
        smallest_of_all(met, 0)  # waits until each node's first rank has tried its disks
    disks, shares = known_disks(folders)
    own = disks or DiskRates(0, 0, is_burst=True)
    numbers = [int(own.read), int(own.write), int(own.total), int(not own.is_burst)]
    if folders and met is not None:
        numbers = [smallest_of_all(met, number) for number in numbers]
    read, write, at_once, sustained = numbers
    disks = DiskRates(read, write, is_burst=not sustained, at_once=at_once) if read and write else None
    return replace(machine, disks=disks, disk_shares=shares)
