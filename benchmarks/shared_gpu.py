"""Lets the ranks of a pipeline share one GPU, where a machine has fewer than a run is to be looked at with.

Each rank takes the first GPU for its own, with a limit of its own (`--gpu_memory_limit`); messages are copied within
its memory, and NCCL, which takes no two ranks on a GPU of one host, speaks over sockets. What ranks compute, and what
they copy to and from the host, takes turns: seconds are those of one GPU, bytes those of several.
"""

import os

import torch

from mobius.config.config import Device
from mobius.distributed import rank_context
from mobius.distributed.cuda_copies import CudaCopyEngine
from mobius.hardware import cpu_dtype, devices, numa
from mobius.process.ranks import Ranks, allows_peer_copies


def share_first_gpu() -> None:
    """Make this process take the first GPU, whatever its rank; call it before anything is planned."""
    first = torch.device("cuda", 0)

    def has_gpus(wanted: Device, ranks: Ranks) -> bool:
        return wanted is not Device.CPU

    def choose_device(wanted: Device, ranks: Ranks, order: object) -> torch.device:
        os.environ["NCCL_HOSTID"] = f"rank-{ranks.rank}"
        devices.use_device(first)
        return first

    addresses = numa.gpu_addresses
    for place, name, put in (
        (cpu_dtype, "has_gpus", has_gpus),
        (rank_context, "has_gpus", has_gpus),
        (rank_context, "choose_device", choose_device),
        (devices, "choose_device", choose_device),
        (numa, "gpu_addresses", lambda indices: addresses([first.index for _ in indices])),
        (CudaCopyEngine, "can_access_peer", lambda engine, device_index: allows_peer_copies()),
    ):
        setattr(place, name, put)
