"""Bytes that a run maps and allocates are those of its memory layout, pool by pool and rank by rank, to the byte."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.live_bytes import LiveBytes
from harness.plan_requests import request_of
from torch import Tensor
from transformers import LlamaConfig

from mobius.config.config import (
    AdapterConfig,
    BaseDtype,
    Dtype,
    DurableSteps,
    FinetuningType,
    MatmulDtype,
    OptimizerStates,
    Order,
)
from mobius.engine import host_arena
from mobius.engine.slot_files import DiskFolders, SlotPlace
from mobius.engine.update_queue import UpdateQueue
from mobius.hardware.devices import TORCH_DTYPES
from mobius.models.blocks import ModelParts
from mobius.planner.request import Machine, PlanRequest
from mobius.schedule.memory_layout import Part, Place, RankLayout, Residence
from mobius.schedule.plan import MemoryUse, Plan
from mobius.training.stages import RankStages, StageOptions

CPU = torch.device("cpu")
IMPOSSIBLE = {
    *((Part.CODES, place) for place in (Place.HOST, Place.DISKS, Place.BUFFER)),
    *((Part.SUMS, place) for place in (Place.DISKS, Place.BUFFER)),
    *((Part.WEIGHTS, Place.BUFFER), (Part.GRADIENTS, Place.DISKS)),
}
"""Codes are on GPUs, sums never on disks; gradients that wait on disks come and go in buffers."""
ODD = LlamaConfig(  # so that parameters are padded
    hidden_size=80, intermediate_size=208, num_hidden_layers=6, num_attention_heads=4, vocab_size=333
)
TIED = LlamaConfig(**{**ODD.to_dict(), "tie_word_embeddings": True})
METHODS = (
    AdapterConfig(),
    AdapterConfig(finetuning_type=FinetuningType.LORA, lora_rank=3),
    AdapterConfig(finetuning_type=FinetuningType.LORA, lora_rank=3, use_dora=True),
    AdapterConfig(freeze="embedding,layers.0-1"),
    AdapterConfig(finetuning_type=FinetuningType.LORA, lora_rank=3, base_dtype=BaseDtype.NF4),
    AdapterConfig(finetuning_type=FinetuningType.LORA, lora_rank=3, use_dora=True, base_dtype=BaseDtype.INT8),
)
NUM_SETTINGS = 200


class Counterparts:
    """Replicas of which only the number is asked."""

    def __init__(self, index: int, num_replicas: int) -> None:
        self.index, self.num_replicas = index, num_replicas


@cache
def parts_of(tied: bool, method: int, matmul_dtype: MatmulDtype, has_fp32: bool) -> ModelParts:
    config = TIED if tied else ODD
    parts = ModelParts(config, torch.device("cpu"), adapters=METHODS[method], matmul_dtype=matmul_dtype)
    if has_fp32:  # a trained and, with adapters, a frozen matrix, and norms, as routers and their constants are
        ends = ("input_layernorm.weight", *(["o_proj.weight"] if matmul_dtype is MatmulDtype.BF16 else []))
        names = frozenset(name for name in parts.base_shapes() if name.endswith(ends))
        parts._in_fp32.update(dict.fromkeys((torch.bfloat16, torch.float16), names))
    return parts


def draw_setting(draw: random.Random, folder: Path) -> tuple[ModelParts, PlanRequest, Plan]:
    """A model, a request and a plan: formats, replicas, disks, methods, residents, orders, tied, clipped."""
    dtype, method = draw.choice([*Dtype]), draw.choice([0, 0, 0, 1, 2, 3])
    can_quantize = dtype is Dtype.BF16 and method != 3
    matmul_dtype = draw.choice([MatmulDtype.BF16, MatmulDtype.INT8]) if can_quantize else MatmulDtype.BF16
    parts = parts_of(draw.random() < 0.4, method, matmul_dtype, draw.random() < 0.4)
    num_ranks, num_replicas = draw.choice([1, 2, 3]), draw.choice([1, 1, 1, 2, 3])
    options: dict[str, Any] = {
        "num_stages": num_ranks * draw.randint(1, 8 // num_ranks),
        "batch_size": 36,
        "num_chunks": 12,
        "num_rounds": draw.choice([1, 2, 4]),
        "compute_order": draw.choice([Order.BREADTH_FIRST, Order.DEPTH_FIRST]),
        "dtype": dtype,
        "fp32_gradients": draw.random() < 0.3,
        "max_grad_norm": draw.choice([0.0, 1.0]),
        "overlap_optimizer": draw.random() < 0.7,
    }
    if dtype is Dtype.BF16 and method not in (1, 3):
        options["optimizer_states"] = draw.choice([*OptimizerStates])
    if num_replicas == 1 and draw.random() < 0.5:
        options |= {"offload_states_to": str(folder), "weights_on_disks": draw.random() < 0.4}
        options["durable_steps"] = draw.choice([DurableSteps.ON, DurableSteps.OFF])
        options["gradients_on_disks"] = options["overlap_optimizer"] and draw.random() < 0.5
    request = request_of(parts.shape(), Machine(num_ranks, num_replicas=num_replicas), **options)
    per_rank = request.plan.stages_per_rank
    resident = draw.randint(0, per_rank)
    streamed = per_rank - resident
    slots = streamed if request.plan.is_depth_first else draw.randint(min(1, streamed), streamed)
    buffers = draw.choice([0, 0, streamed, draw.randint(0, streamed)])
    return parts, request, request.plan.with_same_use(MemoryUse(resident, 0, slots, num_sum_buffers=buffers))


class DeviceBytes(LiveBytes):
    """Sizes of the storages that are left: those of the device, as the host's are mapped."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = Counter[int]()

    def _count(self, tensor: Tensor, known: set[int]) -> None:
        if not tensor.is_meta and tensor.untyped_storage()._cdata not in self._seen | known:
            super()._count(tensor, known)
            self.sizes[tensor.untyped_storage().nbytes()] += 1

    def _forget(self, key: int, size: int) -> None:
        super()._forget(key, size)
        self.sizes[size] -= 1


def check_rank(
    parts: ModelParts, request: PlanRequest, plan: Plan, rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> RankLayout:
    """Compare what is allocated for a rank with its layout, and return that."""
    mapped, map_zeros = Counter[int](), host_arena.map_zeros

    def noting(num_elements: int, dtype: torch.dtype) -> Tensor:
        mapped[num_elements * dtype.itemsize] += 1
        return map_zeros(num_elements, dtype)

    disks, rules = None, request.memory_rules
    if rules.disks is not None:
        slots = SlotPlace([folder], f"rank-{rank}", rank) if rules.disks.keeps_steps else None
        disks = DiskFolders([folder], slots=slots)
    replicas: Any = None if rules.num_replicas == 1 else Counterparts(0, rules.num_replicas)
    with monkeypatch.context() as patched, DeviceBytes() as on_device:
        patched.setattr(host_arena, "map_zeros", noting)
        stages = RankStages.allocate(
            parts,
            plan,
            rank,
            StageOptions(
                dtype=TORCH_DTYPES[request.config.model.dtype],
                rules=rules,
                loss_chunk_tokens=64,
                reduced_format=request.reduced_format,
            ),
            device=CPU,
            updates=UpdateQueue(has_thread=rules.overlaps_optimizer),
            disks=disks,
            replicas=replicas,
        )
    layout, arena_bytes = stages.rank_layout, 0 if stages.arena is None else stages.arena.num_bytes
    stages.close()
    # Squared norms of streamed stages arrive on the host, in a few numbers.
    norms = [
        4 * len(memory.state.layout.trained_names)
        for stage, memory in stages.memory.items()
        if layout.stages[stage].residence is Residence.STREAMED
    ]
    assert on_device.now - sum(norms) == layout.gpu_bytes
    pools = [rules.weight * each for each in layout.slots] + [4 * each for each in layout.sum_buffers]
    assert not Counter(filter(None, pools)) - on_device.sizes, (pools, on_device.sizes)
    assert sum(size * number for size, number in mapped.items()) == arena_bytes == layout.host_bytes
    for pool in (layout.state_buffers, layout.load_buffers):
        assert pool.num_bytes == 0 or mapped[pool.num_bytes] >= pool.number, (pool, mapped)
    return layout


def test_all_bytes_are_those_of_the_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, seen = random.Random(11), Counter[tuple[Part, Place]]()
    for _ in range(NUM_SETTINGS):
        parts, request, plan = draw_setting(draw, tmp_path)
        for rank in range(plan.num_ranks):
            layout = check_rank(parts, request, plan, rank, tmp_path, monkeypatch)
            seen.update({(region.part, region.place) for stage in layout.stages.values() for region in stage.regions})
            seen.update({(Part.STATES, Place.BUFFER)} if layout.state_buffers.number else ())
    everywhere = {(part, place) for part in Part for place in Place} - IMPOSSIBLE
    assert everywhere == seen.keys(), everywhere ^ seen.keys()
    assert min(seen.values()) >= 5
