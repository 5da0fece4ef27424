"""Measuring a profile on one GPU: plausible rates, all memory given back, and not for long."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import LlamaConfig

from mobius.distributed.transport import SingleRankTransport
from mobius.models.blocks import ModelParts
from mobius.planner.layer_bench import MicrobatchShape
from mobius.planner.measure import measure_profile
from mobius.planner.timer import CollectiveTimer

pytestmark = pytest.mark.gpu


def test_one_gpu_is_measured_within_thirty_seconds_and_gives_its_memory_back() -> None:
    torch.use_deterministic_algorithms(False)  # the embedding's backward is slower with them
    device = torch.device("cuda", 0)
    config = LlamaConfig(num_hidden_layers=4, use_cache=False)  # Llama-2-7B's widths
    config._attn_implementation = "sdpa"
    parts = ModelParts(config, device)
    shape = MicrobatchShape(batch=8, seq_length=512, dtype=torch.bfloat16, loss_chunk_tokens=2048)
    before = torch.cuda.memory_allocated(device)

    start = time.perf_counter()
    profile = measure_profile(CollectiveTimer(device, SingleRankTransport()), parts, shape, None)
    seconds = time.perf_counter() - start

    print(profile.to_json())
    assert seconds < 30
    assert torch.cuda.memory_allocated(device) - before < 2**26
    (layer,) = profile.layer_kinds
    assert layer.forward < layer.backward < layer.recomputed_backward < 5 * layer.forward
    assert profile.copies.host_to_device > 2e9
    assert profile.gpu_bandwidth > profile.copies.host_to_device
    assert profile.cpu_adamw_beside_copies <= 1.2 * profile.cpu_adamw
