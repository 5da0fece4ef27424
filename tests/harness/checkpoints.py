"""Checkpoints of a few tensors, and programs that save one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mobius.checkpoint.folders import commit_checkpoint, create_partial
from mobius.checkpoint.manifest import Manifest
from mobius.checkpoint.reader import CheckpointReader
from mobius.checkpoint.tensor_files import StageParameter, plan_files, write_stage, write_text
from mobius.engine.state_codec import CODECS

PARAMETERS = (
    StageParameter("embed.weight", (7, 3), 0),
    StageParameter("layers.0.weight", (3, 5), 0),
    StageParameter("layers.0.scale", (), 0),
    StageParameter("layers.1.weight", (5, 3), 2),
    StageParameter("layers.1.frozen", (2,), 2, is_trained=False),
)
"""Stage 1 has none."""


def values_of(
    seed: int, dtype: torch.dtype, parameters: Sequence[StageParameter] = PARAMETERS, *, has_optimizer: bool = True
) -> dict[str, Tensor]:
    """Every tensor that a checkpoint has, by its full name."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for parameter in parameters:
        tensors[parameter.name] = torch.randn(parameter.shape, generator=generator).to(dtype)
        for part, stored in CODECS[dtype].parts.items() if has_optimizer and parameter.is_trained else ():
            state = torch.randn(parameter.shape, generator=generator) * 1000
            tensors[f"{parameter.name}.{part}"] = state.to(stored)
    return tensors


def save(
    save_dir: Path,
    step: int,
    *,
    number: int,
    seed: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    has_optimizer: bool = True,
    parameters: Sequence[StageParameter] = PARAMETERS,
    tensors: dict[str, Tensor] | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> Path:
    """Write `checkpoint-STEP` with the values of `seed` (the step's own unless given)."""
    if tensors is None:
        tensors = values_of(step if seed is None else seed, dtype, parameters, has_optimizer=has_optimizer)
    partial = create_partial(save_dir, step)
    write_text(partial / "LICENSE", "as is\n")  # nothing in its name says that it is a run's
    write_text(partial / "config.json", '{"model_type": "llama"}\n')
    plan = plan_files(parameters, dtype=dtype, has_optimizer=has_optimizer, max_file_bytes=max_file_bytes)
    records = [record for stage in plan for record in write_stage(partial, stage, tensors.__getitem__)]
    write_text(partial / "trainer_state.json", f'{{"global_step": {step}}}\n')
    manifest = Manifest(
        step=step,
        save_number=number,
        num_parameters=sum(parameter.num_elements for parameter in parameters),
        dtype=str(dtype).removeprefix("torch."),
        has_optimizer=has_optimizer,
        files=tuple(records),
        training={"num_updates": step, "loss_scale": 1024.0},
        data={"position": [step, 3]},
        options={"learning_rate": 1e-5},
        versions={"mobius": "0"},
    )
    return commit_checkpoint(partial, manifest, plan, weight_bytes=sum(each.num_bytes(dtype) for each in parameters))


def has_values(reader: CheckpointReader, seed: int, parameters: Sequence[StageParameter] = PARAMETERS) -> bool:
    """Whether weights and states are to the bit those of `seed`."""
    expected = values_of(seed, reader.dtype, parameters, has_optimizer=reader.manifest.has_optimizer)
    return all(same_bits(reader.read(name, torch.empty_like(value)), value) for name, value in expected.items())


def names(folder: Path) -> list[str]:
    """Sorted names of all that is in `folder`."""
    return sorted(path.name for path in folder.iterdir())


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether dtype, shape and every bit are equal."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
