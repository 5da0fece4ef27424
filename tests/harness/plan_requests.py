"""Settings and machines that plans are asked for, and a profile by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from mobius.config.config import ActivationOffloading, ModelConfig, Order, config_from
from mobius.hardware.topology import Gpu
from mobius.models.blocks import ModelParts
from mobius.models.families import load_planned_config
from mobius.planner.fit import DoesNotFitError
from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.memory_estimates import GpuMemoryEstimate, estimate_gpu_memory_of_ranks
from mobius.planner.peak_memory import LayerBytes
from mobius.planner.profile import CopyRates, LayerSeconds, MessageRates, Profile, Source
from mobius.planner.remedies import gpu_refusal
from mobius.planner.request import Machine, PlanRequest
from mobius.schedule.packed_rows import PackedRows
from mobius.schedule.partition import ModelShape
from mobius.schedule.plan import Plan

USUAL = {
    "batch_size": 64,
    "seq_length": 512,
    "num_stages": 32,
    "num_chunks": 8,
    "num_slices": 1,
    "compute_order": Order.BREADTH_FIRST,
    "activation_offloading": ActivationOffloading.OFF,
}
"""Breadth first, activations stay on the GPU, and sequences whole, where a test does not ask for more: its arithmetic
is of that."""
H200 = Machine(4, GPU_SPECS["H200"])
SLOW_COPIES = CopyRates(*(10,) * 6)


def request_of(
    shape: ModelShape, machine: Machine = H200, *, packed: PackedRows | None = None, **options: Any
) -> PlanRequest:
    """The question of a run of 64 x 512 tokens in 32 stages and 8 chunks, or as `options` of main.py say."""
    return PlanRequest.of(config_from(USUAL | options), shape, machine, packed)


def estimate_gpu_memory(
    request: PlanRequest, plan: Plan, *, rank: int, layer: LayerBytes | None = None
) -> GpuMemoryEstimate:
    """The GPU memory of one rank."""
    (need,) = estimate_gpu_memory_of_ranks(request, plan, layer, [rank])
    return need


def refusal_by(plan: Callable[[], object]) -> str:
    """What a user is told where `plan` fits no GPU."""
    with pytest.raises(DoesNotFitError) as caught:
        plan()
    return str(gpu_refusal(caught.value))


def plain_profile(num_ranks: int = 1, **changes: object) -> Profile:
    """Copies of 10 bytes/s, CPU updates of 5 and GPU updates of 100 parameters/s, host memory and messages for free."""
    profile = Profile(
        source=Source.ESTIMATED,
        basis="by hand",
        num_ranks=num_ranks,
        microbatch_tokens=1,
        layer_kinds=(LayerSeconds(1, 2, 3),),
        kind_of_layer=(0,) * 8,
        embedding_forward=0,
        embedding_backward=0,
        loss=0.5,
        copies=SLOW_COPIES,
        messages=MessageRates(1e12, 0, is_through_host=False),
        cpu_adamw=5,
        cpu_adamw_together=5,
        cpu_adamw_beside_copies=5,
        copies_beside_cpu_adamw=10,
        cpu_adamw_bytes=1,
        gpu_adamw=100,
        host_bandwidth=1e12,
        gpu_bandwidth=1e12,
        step_overhead=0,
    )
    return replace(profile, **changes)  # type: ignore[arg-type]


@cache
def find_published_shape(name: str) -> ModelShape:
    """The sizes of a published shape, such as `7b`."""
    return ModelParts(load_planned_config(ModelConfig(model_path=name))[0], torch.device("cpu")).shape()


def num_stages_with(table: str, text: str) -> int:
    """Stages whose line says `text` in a plan's table, in which stages that are alike share a line."""
    spans = re.findall(rf"^  (\d+)(?:-(\d+))? .*{re.escape(text)}", table, re.MULTILINE)
    return sum(int(last or first) - int(first) + 1 for first, last in spans)


def make_box(
    num_gpus: int, *, node: int | None = None, complex_of: int = 1, bridge: int = 1, switch: int = 1
) -> list[Gpu]:
    """GPUs in groups of neighbours: so many below one NUMA node, root complex, PCIe bridge and switch.

    Without `node` each root complex has its own.
    """
    complex_of, bridge = max(complex_of, bridge, switch), max(bridge, switch)
    return [
        Gpu(
            index,
            address=f"0000:{index + 1:x}1:00.0",
            numa_node=index // (node or complex_of),
            bridges=(
                f"host {index // complex_of}",
                f"bridge {index // bridge}",
                f"switch {index // switch}",
                f"port {index}",
            ),
        )
        for index in range(num_gpus)
    ]


TWO_PER_ROOT_COMPLEX = make_box(4, complex_of=2)
FLAT_VIRTUAL_MACHINE = make_box(4, complex_of=4)
TWO_SOCKETS = make_box(4, node=2)
ONE_SWITCH = make_box(4, switch=4)
SWITCHES_ON_TWO_SOCKETS = make_box(8, switch=2, bridge=4)
FOUR_PER_SOCKET = make_box(8, node=4)
TWO_PER_BRIDGE = make_box(8, bridge=2)
