"""Bytes of slots, sums and states that are planned are those that a run allocates, to the byte."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.plan_requests import request_of
from transformers import LlamaConfig

from mobius.config.config import AdapterConfig, Dtype, DurableSteps, FinetuningType, MatmulDtype, OptimizerStates, Order
from mobius.engine.slot_files import DiskFolders
from mobius.engine.update_queue import UpdateQueue
from mobius.limits import MIN_GRADIENT_SUMS
from mobius.models.blocks import ModelParts
from mobius.planner.memory_estimates import estimate_host_memory, state_bytes
from mobius.planner.request import Machine, PlanRequest
from mobius.schedule.action import ActionKind
from mobius.schedule.build import build_unchecked
from mobius.schedule.plan import MemoryUse, Plan
from mobius.schedule.weight_streaming import num_loads
from mobius.training.stages import RankStages, StageOptions

DTYPES = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16, Dtype.FP32: torch.float32}
META = torch.device("meta")
"""Stands for a GPU: what is on the device is told apart from the host's memory, and takes none."""
WIDE = LlamaConfig(  # of multiples of 128, so that no parameter is padded
    hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4, vocab_size=384
)


@pytest.fixture(scope="module")
def parts() -> ModelParts:
    parts = ModelParts(WIDE, torch.device("cpu"))
    # What other tests of this process have left is looked at no more: with it this file takes a minute.
    gc.collect()
    gc.freeze()
    return parts


def device_bytes() -> dict[int, int]:
    """Bytes of each storage of the device."""
    tensors = (each for each in gc.get_objects() if type(each) is torch.Tensor and each.device == META)
    return {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}


def allocated_bytes(
    parts: ModelParts, request: PlanRequest, plan: Plan, rank: int, folders: Sequence[Path] = ()
) -> tuple[int, int]:
    """Bytes of a rank's stages on the device and on the host."""
    gc.collect()
    before = device_bytes()
    stages = RankStages.allocate(
        parts,
        plan,
        rank,
        StageOptions(
            dtype=DTYPES[request.config.model.dtype],
            rules=request.memory_rules,
            loss_chunk_tokens=64,
            reduced_format=request.reduced_format,
        ),
        device=META,
        updates=UpdateQueue(has_thread=False),
        disks=DiskFolders(folders),
    )
    after = device_bytes()
    host = 0 if stages.arena is None else stages.arena.num_bytes
    stages.close()
    return sum(number for storage, number in after.items() if storage not in before), host


def draw_request(draw: random.Random, parts: ModelParts) -> PlanRequest:
    num_ranks = draw.choice([1, 2, 3])
    options: dict[str, Any] = {
        "num_stages": num_ranks * draw.randint(1, 8 // num_ranks),
        "num_chunks": 12,
        "num_rounds": draw.choice([1, 2, 4]),
        "compute_order": draw.choice([Order.BREADTH_FIRST, Order.DEPTH_FIRST]),
        "dtype": draw.choice([*Dtype]),
        "fp32_gradients": draw.random() < 0.3,
        "max_grad_norm": draw.choice([0.0, 1.0]),
    }
    return request_of(parts.shape(), Machine(num_ranks), **options)


def test_planned_bytes_are_those_that_are_allocated(parts: ModelParts) -> None:
    draw, kinds = random.Random(7), set[tuple[bool, ...]]()
    for _ in range(60):
        request = draw_request(draw, parts)
        per_rank = request.plan.stages_per_rank
        resident = draw.randint(0, per_rank)
        streamed = per_rank - resident
        slots = streamed if request.plan.is_depth_first else draw.randint(min(1, streamed), streamed)
        buffers = draw.choice([0, 0, streamed, draw.randint(0, streamed)])
        plan = request.plan.with_same_use(MemoryUse(resident, 0, slots, num_sum_buffers=buffers))
        host = 0
        for rank in range(plan.num_ranks):
            on_device, on_host = allocated_bytes(parts, request, plan, rank)
            planned = state_bytes(request, plan, rank)
            assert sum(planned.values()) == on_device, (plan, rank, planned)
            host += on_host
            own_slots = 1 < slots == streamed
            kinds.add((plan.has_partial_sums, plan.offloads_gradient_sums(rank), own_slots, resident > 0))
        assert estimate_host_memory(request, plan).streamed == host
    # Sums that stay and that travel, slots alike and of each stage's own, with residents and without.
    assert len(kinds) >= 10


def test_a_sum_for_each_streamed_stage_spares_the_host_two_bytes_of_each_parameter(parts: ModelParts) -> None:
    options: dict[str, Any] = {"num_stages": 8, "num_chunks": 4, "num_rounds": 2, "max_grad_norm": 0.0}
    request = request_of(parts.shape(), Machine(2), **options)
    few, own = (
        request.plan.with_same_use(MemoryUse(0, 0, 4, num_sum_buffers=number)) for number in (MIN_GRADIENT_SUMS, 4)
    )
    hosts = [estimate_host_memory(request, plan).streamed for plan in (few, own)]
    assert hosts[0] - hosts[1] == 2 * request.shape.num_parameters
    gpus = [state_bytes(request, plan, 1)["gradients"] for plan in (few, own)]
    sizes = [own.cuts[stage].num_parameters(request.shape) for stage in own.local_stages(1)]
    assert gpus == [4 * (max(sizes[::2]) + max(sizes[1::2])), 4 * sum(sizes)]


@pytest.mark.parametrize("adapters", [AdapterConfig(), AdapterConfig(finetuning_type=FinetuningType.LORA)])
def test_planned_bytes_of_codes_and_scales_are_those_that_are_allocated(adapters: AdapterConfig) -> None:
    both = [
        ModelParts(WIDE, torch.device("cpu"), adapters=adapters, matmul_dtype=each)
        for each in (MatmulDtype.BF16, MatmulDtype.INT8)
    ]
    for resident, slots in ((0, 2), (0, 4), (1, 2), (3, 1), (4, 0)):
        found, planned = [], []
        for parts in both:
            request = request_of(parts.shape(), Machine(2), num_stages=8, dtype=Dtype.BF16)
            plan = request.plan.with_same_use(MemoryUse(resident, 0, slots))
            found.append([allocated_bytes(parts, request, plan, rank)[0] for rank in (0, 1)])
            planned.append([state_bytes(request, plan, rank)["quantized_copies"] for rank in (0, 1)])
        assert [more - less for less, more in zip(*found, strict=True)] == planned[1], (resident, slots)
        assert planned[0] == [0, 0] < planned[1]


@pytest.mark.parametrize("states", [OptimizerStates.BF16, OptimizerStates.COMPACT])
def test_planned_bytes_of_reduced_states_are_those_that_are_allocated(
    parts: ModelParts, states: OptimizerStates
) -> None:
    """The plan counts a layer's norms as reduced, which are in fp32."""
    for resident in (0, 1, 2):
        request = request_of(parts.shape(), Machine(2), num_stages=4, dtype=Dtype.BF16, optimizer_states=states)
        plan = request.plan.with_same_use(MemoryUse(resident, 0, min(2, 2 - resident)))
        norms = 2 * 128 * 8 * (10 - sum(request.memory_rules.reduced_parts))
        device = host = 0
        for rank in range(plan.num_ranks):
            on_device, on_host = allocated_bytes(parts, request, plan, rank)
            device, host = device + on_device - sum(state_bytes(request, plan, rank).values()), host + on_host
        assert device + host - estimate_host_memory(request, plan).streamed == pytest.approx(norms, abs=8)


@pytest.mark.parametrize("has_weights", [False, True])
def test_planned_bytes_of_what_is_on_disks_are_those_that_are_allocated(
    parts: ModelParts, tmp_path: Path, has_weights: bool
) -> None:
    for resident in (0, 1, 3):
        options: dict[str, Any] = {"dtype": Dtype.BF16, "offload_states_to": str(tmp_path), "num_stages": 8}
        options |= {"durable_steps": DurableSteps.OFF, "overlap_optimizer": False, "weights_on_disks": has_weights}
        request = request_of(parts.shape(), Machine(2), **options)
        plan = request.plan.with_same_use(MemoryUse(resident, 0, min(2, 4 - resident)))
        host = sum(allocated_bytes(parts, request, plan, rank, [tmp_path])[1] for rank in range(plan.num_ranks))
        planned = estimate_host_memory(request, plan)
        buffers = planned.state_buffers + planned.load_buffers
        assert planned.streamed + buffers == pytest.approx(host, abs=16 * 4096)  # whole pages
        assert planned.disk == (12 if has_weights else 10) * planned.streamed_parameters
        assert planned.streamed == (2 if has_weights else 4) * planned.streamed_parameters


@pytest.mark.parametrize("order", [Order.BREADTH_FIRST, Order.DEPTH_FIRST])
def test_loads_are_counted_as_the_schedule_has_them(parts: ModelParts, order: Order) -> None:
    for rounds, resident in ((1, 0), (1, 2), (2, 0), (4, 1)):
        options: dict[str, Any] = {"num_stages": 10, "num_chunks": 4, "num_rounds": rounds, "compute_order": order}
        request = request_of(parts.shape(), Machine(2), **options)
        streamed = 5 - resident
        for slots in (streamed,) if order is Order.DEPTH_FIRST else range(1, streamed + 1):
            plan = request.plan.with_same_use(MemoryUse(resident, 0, slots))
            actions = [action for rank in build_unchecked(plan).actions for action in rank]
            loads = Counter(action.stage for action in actions if action.kind is ActionKind.LOAD)
            for rank in range(2):
                own = plan.streamed_stages(rank)
                assert tuple(loads[stage] for stage in own) == num_loads(len(own), slots, rounds), (rounds, resident)
            assert len(loads) == 2 * streamed
