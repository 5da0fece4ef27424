"""Settings and machines that plans are asked for."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from itertools import combinations
from typing import Any

import torch

from mobius.config.config import ActivationOffloading, ModelConfig, config_from
from mobius.hardware.topology import Ancestor, Gpu, Link, Topology
from mobius.models.blocks import ModelParts
from mobius.models.families import load_planned_config
from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.request import Machine, PlanRequest
from mobius.schedule.packed_rows import PackedRows
from mobius.schedule.partition import ModelShape

USUAL = {
    "batch_size": 64,
    "seq_length": 512,
    "num_stages": 32,
    "num_chunks": 8,
    "num_slices": 1,
    "activation_offloading": ActivationOffloading.OFF,
}
"""Activations stay on the GPU, and sequences whole, where a test does not ask for more: its arithmetic is of that."""
H200 = Machine(4, GPU_SPECS["H200"])


def request_of(
    shape: ModelShape, machine: Machine = H200, *, packed: PackedRows | None = None, **options: Any
) -> PlanRequest:
    """The question of a run of 64 x 512 tokens in 32 stages and 8 chunks, or as `options` of main.py say."""
    return PlanRequest.of(config_from(USUAL | options), shape, machine, packed)


@cache
def find_published_shape(name: str) -> ModelShape:
    """The sizes of a published shape, such as `7b`."""
    return ModelParts(load_planned_config(ModelConfig(model_path=name))[0], torch.device("cpu")).shape()


def num_stages_with(table: str, text: str) -> int:
    """Stages whose line says `text` in a plan's table, in which stages that are alike share a line."""
    spans = re.findall(rf"^  (\d+)(?:-(\d+))? .*{re.escape(text)}", table, re.MULTILINE)
    return sum(int(last or first) - int(first) + 1 for first, last in spans)


def make_box(
    num_gpus: int,
    *groups: tuple[int, Ancestor],
    nvlinks: int = 0,
    bridged: Collection[tuple[int, int]] | None = None,
    has_p2p: bool = False,
) -> Topology:
    """GPUs in groups of neighbours, smallest first: `(2, PHB)` puts 0 and 1 under one root complex; else SYS.

    `nvlinks` join every pair, or those `bridged`, which can then reach each other.
    """
    links = []
    for one, other in combinations(range(num_gpus), 2):
        ancestors = (ancestor for size, ancestor in groups if one // size == other // size)
        count = nvlinks if bridged is None or (one, other) in bridged else 0
        links.append(Link(one, other, next(ancestors, Ancestor.SYS), count, has_p2p or count > 0))
    gpus = (Gpu(index, address=f"0000:{index + 1:x}1:00.0") for index in range(num_gpus))
    return Topology(tuple(gpus), tuple(links))


TWO_PER_ROOT_COMPLEX = make_box(4, (2, Ancestor.PHB), has_p2p=True)
FLAT_VIRTUAL_MACHINE = make_box(4, (4, Ancestor.PHB))
TWO_SOCKETS = make_box(4, (2, Ancestor.NODE), has_p2p=True)
BRIDGED_PAIRS = make_box(4, (4, Ancestor.NODE), nvlinks=4, bridged={(0, 1), (2, 3)})
ONE_SWITCH = make_box(4, (4, Ancestor.PIX), has_p2p=True)
SWITCHES_ON_TWO_SOCKETS = make_box(8, (2, Ancestor.PIX), (4, Ancestor.PXB), has_p2p=True)
NVSWITCH_ON_TWO_SOCKETS = make_box(8, (4, Ancestor.NODE), nvlinks=18)
NVSWITCH_IN_PAIRS = make_box(8, (2, Ancestor.PXB), nvlinks=12)
