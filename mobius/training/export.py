"""Writes what a finished run leaves, the model folder and the single parameter file, and reads it back.

How the files look is checkpoint.py's business, how they get their final names output_folder.py's.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from mobius.memory.stage_memory import StageMemory
from mobius.runtime.transport import Transport
from mobius.training.blueprint import Blueprint
from mobius.training.build import RankState
from mobius.training.checkpoint import (
    SavedParameter,
    plan_shards,
    verify_folder,
    write_index,
    write_model_files,
    write_params_file,
    write_shards,
)
from mobius.training.output_folder import OutputFolder


def saved_parameters(blueprint: Blueprint) -> list[SavedParameter]:
    """Every parameter of the model in forward order with the rank that has it; a tied head is saved once."""
    parts, plan = blueprint.parts, blueprint.plan
    blocks = [(parts.embedding, 0)]
    blocks += [(parts.layers[layer], span.stage) for span in plan.spans for layer in span.layers]
    blocks += [(parts.norm, plan.num_stages - 1)]
    blocks += [] if parts.is_tied else [(parts.head, plan.num_stages - 1)]
    return [
        SavedParameter(name, shape, stage % plan.num_ranks)
        for block, stage in blocks
        for name, shape in block.full_shapes().items()
    ]


def export_bytes(blueprint: Blueprint) -> int:
    """Bytes of the weights in one of the two forms they are saved in."""
    return blueprint.shape.num_parameters * blueprint.dtype.itemsize


def export_model(
    blueprint: Blueprint,
    state: RankState,
    transport: Transport,
    output: OutputFolder,
    *,
    tokenizer: PreTrainedTokenizerBase,
    generation_config: GenerationConfig | None,
    params_file: Path,
) -> None:
    """Save and verify; collective. Each rank writes and checks its own stages, rank 0 all that is shared.

    The folder appears under its final name only after every tensor was read back equal. Raises CheckpointError.
    """
    rank, folder = transport.rank, output.partial
    parameters = saved_parameters(blueprint)
    shards = plan_shards(parameters, blueprint.dtype.itemsize)
    values = _views(state.memory)

    def read(name: str) -> Tensor:
        return values[name].cpu()

    write_shards(folder, shards, rank, read)
    if transport.rank == 0:
        write_index(folder, shards, parameters, blueprint.dtype.itemsize)
        write_model_files(folder, blueprint.parts.config, tokenizer, generation_config, dtype=blueprint.dtype)
    transport.barrier()
    own = [parameter.name for parameter in parameters if parameter.owner_rank == rank]
    verify_folder(folder, ((name, partial(read, name)) for name in own))
    transport.barrier()
    if transport.rank == 0:
        write_params_file(output.place(params_file), folder)
        output.commit()
    transport.barrier()


def _views(memory: StageMemory) -> dict[str, torch.Tensor]:
    """Hugging Face name -> this rank's trained values, where they live."""
    return {name: view for state in memory.states.values() for name, view in state.layout.views(state.weights).items()}
