"""Questions to the planner, as a run and a dry run ask them: a model's sizes, a machine's facts, options of main.py."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch

from mobius.config.config import ActivationOffloading, ModelConfig, config_from
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
