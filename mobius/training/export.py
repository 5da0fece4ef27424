"""Writes what a finished run leaves, the model folder and the single parameter file, and reads it back.

In this order, so that nothing that is complete depends on what comes later:

    small files -> weights -> every tensor is read back -> config.json -> the folder gets its name -> the single file
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mobius.checkpoints.files import StageParameter
from mobius.errors import CheckpointError, MobiusError, NoResultError
from mobius.memory.stage_state import CHUNK_ELEMENTS, StageState
from mobius.models.adapters.peft_folder import AdapterBase
from mobius.models.blocks import ModelParts
from mobius.models.model_files import ModelFiles
from mobius.models.weight_conversion.parameter_pieces import stored_shapes, stored_views
from mobius.models.weights import WeightSource, read_in_pieces
from mobius.output.adapters.folder import verify_adapter, write_adapter
from mobius.output.hf_folder import (
    SavedParameter,
    plan_shards,
    verify_folder,
    write_index,
    write_model_files,
    write_params_file,
    write_shards,
)
from mobius.output.output_folder import OutputFolder
from mobius.planning.run_setup import RunSetup
from mobius.signal_handling import RunStatus
from mobius.training.session import Session
from mobius.training.trainer import all_gather_numbers

_UNCHECKED = "config.json.unchecked"
"""The name of config.json until the weights are checked: a folder that has config.json counts as complete."""


def saved_parameters(run_setup: RunSetup) -> list[StageParameter]:
    """Parameters that are saved in forward order with their stage: all of the model's, or the trained ones of adapters.

    A tied head is saved once.
    """
    parts, plan = run_setup.parts, run_setup.plan
    blocks = [(parts.embedding, 0)]
    blocks += [(parts.layers[layer], cut.stage) for cut in plan.cuts for layer in cut.layers]
    blocks += [(parts.norm, plan.num_stages - 1)]
    blocks += [] if parts.is_tied else [(parts.head, plan.num_stages - 1)]
    frozen = frozenset[str]().union(*(block.frozen_names() for block, _ in blocks))
    return [
        StageParameter(name, shape, stage, name not in frozen, _piece_names(parts, name))
        for block, stage in blocks
        for name, shape in block.parameter_shapes().items()
        if name not in frozen or not parts.adapters.is_lora
    ]


def _piece_names(parts: ModelParts, name: str) -> tuple[str, ...] | None:
    return None if name not in parts.parameter_pieces else tuple(piece.name for piece in parts.parameter_pieces[name])


def export_bytes(run_setup: RunSetup) -> int:
    """Bytes of the weights in one of the two forms they are saved in."""
    return sum(parameter.num_elements for parameter in saved_parameters(run_setup)) * run_setup.dtype.itemsize


def check_trained_weights(session: Session, *, num_updates: int, num_steps: int, folder: Path) -> None:
    """Raise NoResultError, on all ranks alike, if what was trained is not worth saving; collective.

    `folder` has the metrics. Reads every weight once, at the speed of memory: 0.2 s for 3.5 GB on one core.
    """
    flaws = torch.zeros(session.run_setup.plan.num_stages, dtype=torch.float64)
    for stage, own in session.stages.memory.items():
        views = own.state.layout.views(own.state.weights).values()
        flaws[stage] = sum(not bool(torch.isfinite(torch.stack(torch.aminmax(view))).all()) for view in views)
    stages = [str(stage) for stage, number in enumerate(session.transport.sum_over_ranks(flaws).tolist()) if number]
    if num_updates == 0:
        problem = (
            f"none of the {num_steps} steps was taken: each had a loss or gradients that are not finite, so the "
            "weights are still those that were loaded"
        )
    elif stages:
        problem = f"after {num_steps} steps the weights of stage(s) {', '.join(stages)} are not finite"
    else:
        return
    raise NoResultError(
        f"{problem}. Nothing is saved; every step's numbers are in {folder / 'metrics.jsonl'}. Lower --learning_rate, "
        "use --bf16 or --fp32 instead of --fp16, or look at the data and at the weights that training began with."
    )


def has_changed(session: Session, before: WeightSource) -> bool:
    """Whether training has changed any parameter from its value in `before`, in the format of the weights; collective.

    Each rank reads its smallest parameters first and stops at a difference, so that a usual run reads next to nothing.
    If `before` can no longer be read, because its files are gone, the parameters count as changed.
    """
    states = [own.state for own in session.stages.memory.values()]
    trained = [(state, name) for state in states for name in state.layout.offsets if state.layout.is_trained(name)]
    trained.sort(key=lambda each: torch.Size(each[0].layout.offsets[each[1]][1]).numel())
    try:
        is_changed = any(_differs(state, name, before) for state, name in trained)
    except MobiusError:  # a checkpoint is removed when newer ones are saved; the result must not depend on it
        is_changed = True
    return bool(all_gather_numbers(session.all_ranks, [float(is_changed)]).any())


def _differs(state: StageState, name: str, before: WeightSource) -> bool:
    place, shape = state.layout.slice_of(name), state.layout.offsets[name][1]
    for offset, value in read_in_pieces(before, name, shape):
        first, flat = place.start + offset, value.reshape(-1)
        weights = state.weights[first : first + len(flat)]
        for chunk, own in zip(flat.split(CHUNK_ELEMENTS), weights.split(CHUNK_ELEMENTS), strict=True):
            if not torch.equal(chunk.float().to(own.dtype), own.cpu()):
                return True
    return False


def export_model(
    session: Session,
    output: OutputFolder,
    *,
    model_files: ModelFiles,
    run_status: RunStatus,
    base: AdapterBase | None = None,
) -> None:
    """Save and verify; collective. Each rank writes and checks its own stages, rank 0 all that is shared.

    With `base` adapters are saved, which are for that. The folder appears under its final name only after every tensor
    was read back equal. `run_status` is told from where on that may have happened. Raises CheckpointError.
    """
    run_setup, all_ranks = session.run_setup, session.all_ranks
    rank, folder = all_ranks.rank, output.export_folder  # all replicas have all weights: the first one writes
    parameter_pieces = run_setup.parts.parameter_pieces
    parameters = [
        SavedParameter(name, shape, each.stage % run_setup.plan.num_ranks)
        for each in saved_parameters(run_setup)
        for name, shape in stored_shapes(each.name, each.shape, parameter_pieces)
    ]
    itemsize = run_setup.dtype.itemsize
    shards = plan_shards(parameters, itemsize)
    states = [own.state for own in session.stages.memory.values()]
    values: dict[str, Tensor] = {}
    for state in states:
        values |= stored_views(state.layout.views(state.weights), parameter_pieces)

    def read(name: str) -> Tensor:
        session.activity.progress()
        return values[name].cpu().contiguous()

    if rank == 0:
        output.begin_export()
        write_model_files(folder, model_files, run_setup.parts.config, dtype=run_setup.dtype)
        (folder / "config.json").rename(folder / _UNCHECKED)
    all_ranks.barrier()
    write_shards(folder, shards, rank, read)
    all_ranks.barrier()  # an adapter's file is made of all ranks' shards
    if rank == 0 and base is None:
        write_index(folder, shards, parameters, itemsize)
    elif rank == 0 and base is not None:
        written = [folder / shard.file_name for shard in shards]
        write_adapter(folder, written, run_setup.parts, base)
        for path in written:
            path.unlink()
    all_ranks.barrier()
    own = [parameter.name for parameter in parameters if parameter.owner_rank == rank]
    verify = verify_folder if base is None else verify_adapter
    if run_setup.rank_context.ranks.replica == 0:  # other nodes need not see the folder
        verify(folder, ((name, partial(read, name)) for name in own))
    all_ranks.barrier()
    if rank == 0:
        run_status.set_status(
            f"while the checked model got its name {output.save_dir}: if it is not there, it is in {folder}, and the "
            "next start with the same --save_dir tells what to do"
        )
        (folder / _UNCHECKED).rename(folder / "config.json")
        output.commit()
        if base is not None:  # or transformers would look for a model beside it, not for the base
            (output.save_dir / "config.json").unlink()
    all_ranks.barrier()


def write_single_file(params_file: Path, output: OutputFolder, *, progress: Callable[[], None] = lambda: None) -> None:
    """Make the single file from the committed folder; raises CheckpointError that tells how to do that later.

    `progress` is called whenever some of it is written.
    """
    try:
        params_file.parent.mkdir(parents=True, exist_ok=True)
        write_params_file(params_file, output.save_dir, progress=progress)
    except (CheckpointError, OSError) as error:
        names = f"Path({str(params_file.resolve())!r}), Path({str(output.save_dir)!r})"
        older = " The older file is as it was." if params_file.exists() else ""
        raise CheckpointError(
            f"--save_params: {error}.{older} Make room, and make it from the model, in "
            'the folder of main.py: python -c "from pathlib import Path; from mobius.output.hf_folder import '
            f'write_params_file; write_params_file({names})"'
        ) from error
