"""Ranks that share the first GPU take it, are hosts of their own to NCCL, and reach each other's memory."""

from __future__ import annotations

import os

import pytest
import torch
from shared_gpu import share_first_gpu

from mobius.config.config import Device
from mobius.distributed import rank_context
from mobius.distributed.cuda_copies import CudaCopyEngine
from mobius.hardware import cpu_dtype, devices, numa
from mobius.process.ranks import Ranks


def test_each_rank_takes_the_first_gpu_and_is_a_host_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "gpu_addresses", lambda indices: [f"GPU {index}" for index in indices])
    for place, name in (
        *((each, "has_gpus") for each in (cpu_dtype, rank_context)),
        *((each, "choose_device") for each in (devices, rank_context)),
        (CudaCopyEngine, "can_access_peer"),
    ):
        monkeypatch.setattr(place, name, getattr(place, name))  # put back behind the test
    used: list[torch.device] = []
    monkeypatch.setattr(devices, "use_device", used.append)
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setenv("NCCL_HOSTID", "")
    share_first_gpu()
    ranks = Ranks(1, 2, 1)
    assert rank_context.has_gpus(Device.AUTO, ranks)
    assert rank_context.choose_device(Device.AUTO, ranks, (0, 1)) == torch.device("cuda", 0) == used[0]
    assert os.environ["NCCL_HOSTID"] == "rank-1"
    assert numa.gpu_addresses((0, 1)) == ["GPU 0", "GPU 0"]
    engine = object.__new__(CudaCopyEngine)
    assert engine.can_access_peer(0)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert not engine.can_access_peer(0)
