"""Writes what a finished run leaves, the model folder and the single parameter file, and reads it back.

In this order, so that nothing that is complete depends on what comes later:

    small files -> weights -> every tensor is read back -> config.json -> the folder gets its name -> the single file
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from mobius.checkpoint.adapter_folder import verify_adapter, write_adapter
from mobius.checkpoint.merged_model import merge_adapter
from mobius.checkpoint.model_folder import (
    SavedParameter,
    plan_shards,
    verify_folder,
    write_index,
    write_model_files,
    write_params_file,
    write_shards,
)
from mobius.checkpoint.run_folder import OutputFolder
from mobius.checkpoint.run_settings import merged_folder
from mobius.checkpoint.saved_stage import OpenRun, saved_parameters
from mobius.errors import CheckpointError
from mobius.models.adapters.peft_folder import AdapterBase, AdapterFolder
from mobius.models.model_files import ModelFiles
from mobius.models.weight_conversion.parameter_pieces import stored_shapes, stored_views
from mobius.signal_handling import RunStatus

logger = logging.getLogger(__name__)

_UNCHECKED = "config.json.unchecked"
"""The name of config.json until the weights are checked: a folder that has config.json counts as complete."""


def export_model(
    session: OpenRun,
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
    states = [own.state for own in session.memory.values()]
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
            'the folder of main.py: python -c "from pathlib import Path; from mobius.checkpoint.model_folder import '
            f'write_params_file; write_params_file({names})"'
        ) from error


def save_model(
    session: OpenRun,
    output: OutputFolder,
    model_files: ModelFiles,
    run_status: RunStatus,
    base: AdapterBase | None = None,
) -> list[str]:
    """Save the model, say where it is, and make the single file of it; returns the problem of that, if there is one.

    With `base` adapters are saved, which are for that. Once the model has its name, nothing that fails may hide that.
    """
    session.activity.start_action("the export of the model")
    export_model(session, output, model_files=model_files, run_status=run_status, base=base)
    if session.all_ranks.rank != 0:
        return []
    config, problems = session.run_setup.config, list[str]()
    what = "model" if base is None else "adapter"
    logger.info("%s saved to %s (checked tensor by tensor)", what, output.save_dir)
    if base is not None and config.adapters.merge:
        problems = _merge(session, output, base, model_files)
    saved = f"after the last step: the {what} is complete and checked in {output.save_dir}"
    if config.output.params_file is None:
        run_status.set_status(f"{saved}; {config.output.save_results} was not written")
        return problems
    params = Path(config.output.params_file)
    unfinished = params.with_name(f"{params.name}.partial")
    run_status.set_status(f"{saved}; {params} was not written", clean_up=unfinished.unlink)
    try:
        session.activity.start_action("the single file of all parameters")
        write_single_file(params, output, progress=session.activity.progress)
    except CheckpointError as error:
        return [*problems, str(error)]
    run_status.set_status(f"{saved} and in {params}; {config.output.save_results} was not written")
    logger.info("模型已保存到 %s (parameters saved to one file)", params)
    return problems


def _merge(session: OpenRun, output: OutputFolder, base: AdapterBase, model_files: ModelFiles) -> list[str]:
    """Write the merged model beside the adapter; returns the problem of that, if there is one."""
    session.activity.start_action("the merged model")
    run_setup, folder = session.run_setup, merged_folder(session.run_setup.config)
    try:
        adapter = AdapterFolder(output.save_dir)
        given = adapter, base.folder, run_setup.parts, folder
        progress = session.activity.progress
        merge_adapter(*given, dtype=run_setup.dtype, model_files=model_files, progress=progress)
    except CheckpointError as error:
        command = f"python scripts/merge_adapter.py {output.save_dir} FOLDER"
        return [f"--merge: {error} The adapter is complete; to merge it later: {command}"]
    logger.info("merged model saved to %s", folder)
    return []
