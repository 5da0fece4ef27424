"""Writes the model folder and the single parameter file of a finished run, and reads them back.

Steps are in this order, so that a complete part never depends on a later step:

    weights -> every tensor is read back -> small files, config.json last -> the folder gets its name -> the single file
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from mobius.checkpoint.merged_model import merged_folder, write_model
from mobius.checkpoint.model_folder import (
    adapter_tensors,
    verify_folder,
    write_adapter,
    write_model_files,
    write_params_file,
)
from mobius.checkpoint.run_folder import OutputFolder
from mobius.checkpoint.saved_model import SavedModel
from mobius.checkpoint.saved_stage import OpenRun, export_bytes, saved_parameters
from mobius.checkpoint.tensor_files import plan_files, write_indexes, write_stage
from mobius.checkpoint.whole_model import TEXT_ALONE, SavedLayout, WholeModel
from mobius.distributed.transport import all_gather_numbers
from mobius.engine.stage_memory import StageMemory, parts_of
from mobius.errors import CheckpointError
from mobius.models.model_files import ModelFiles
from mobius.models.parameter_pieces import stored_views
from mobius.models.peft_folder import AdapterBase, AdapterFolder
from mobius.process.signal_handling import RunStatus

logger = logging.getLogger(__name__)


class _RankWeights:
    """The weights of this rank's stages by stored name, and the rank that writes each parameter."""

    def __init__(self, session: OpenRun) -> None:
        run_setup, self._activity = session.run_setup, session.activity
        num_ranks, self.rank = run_setup.plan.num_ranks, session.all_ranks.rank
        # All replicas have all weights, so only the first replica writes; each of its ranks writes one file or several.
        self.parameters = [replace(each, stage=each.stage % num_ranks) for each in saved_parameters(run_setup)]
        self.is_first_replica = run_setup.ranks.replica == 0
        self.views = dict[str, Tensor]()
        self._owners = dict[str, StageMemory]()
        for own in session.memory.values():
            whole = own.state.layout.views(own.state.weights)
            views = whole | stored_views(whole, run_setup.parts.parameter_pieces)
            self.views |= views
            self._owners |= dict.fromkeys(views, own)

    @property
    def own(self) -> frozenset[str]:
        """Parameters that this rank writes."""
        return frozenset(each.name for each in self.parameters if each.stage == self.rank)

    def parts(self, name: str, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the values of a tensor that is stored as `name`."""
        self._activity.progress()
        # Adapters have peft's names.
        return self._owners[name].parts(tensor) if name in self._owners else parts_of(tensor)


def export_model(
    session: OpenRun,
    output: OutputFolder,
    *,
    model_files: ModelFiles,
    run_status: RunStatus,
    base: AdapterBase | None = None,
    layout: SavedLayout = TEXT_ALONE,
) -> None:
    """Save the model and verify it; collective. Each rank writes and checks its stages, rank 0 also the shared files.

    With `base`, adapters for the base are saved instead. The folder gets its final name only after every tensor was
    read back and found equal; from then on `run_status` says where the model is. Raises CheckpointError.
    """
    run_setup, all_ranks = session.run_setup, session.all_ranks
    rank, folder = all_ranks.rank, output.export_folder
    weights = _RankWeights(session)
    if rank == 0:
        output.begin_export()
    all_ranks.barrier()
    if layout.whole is None:
        _write_text(session, weights, folder, base)
    else:
        _write_whole(session, weights, folder, layout.whole)
    all_ranks.barrier()
    if rank == 0:
        run_status.set_status(
            f"while the checked model was moved to {output.save_dir}: if it is not there, it is in {folder}, and the "
            "next start with the same --save_dir says what to do"
        )
        write_model_files(
            folder, model_files, run_setup.parts.config, dtype=run_setup.dtype, layout=layout
        )  # last, because config.json marks the folder as complete
        output.commit()
        if base is not None:  # otherwise transformers would load a model from this folder instead of the base
            (output.save_dir / "config.json").unlink()
    all_ranks.barrier()


def _write_text(session: OpenRun, weights: _RankWeights, folder: Path, base: AdapterBase | None) -> None:
    """Write and check the weights as those of a text model, or of adapters for `base`; collective."""
    run_setup, all_ranks, rank = session.run_setup, session.all_ranks, weights.rank
    files = plan_files(weights.parameters, dtype=run_setup.dtype, has_optimizer=False)
    all_files = {file_name: names for each in files for file_name, names in each.items()}
    if rank < len(files):
        write_stage(folder, files[rank], weights.views.__getitem__, parts=weights.parts)
    all_ranks.barrier()  # the first rank makes an adapter's file from all ranks' files
    if rank == 0 and base is None:
        num_parameters = sum(parameter.num_elements for parameter in weights.parameters)
        write_indexes(folder, all_files, num_parameters=num_parameters, num_bytes=export_bytes(run_setup))
    elif rank == 0 and base is not None:
        written = sorted(folder / file_name for file_name in all_files)
        write_adapter(folder, written, run_setup.parts, base)
        for path in written:
            path.unlink()
    all_ranks.barrier()
    if weights.is_first_replica and rank < len(files):  # other nodes may not see the folder
        own_names = [name for names in files[rank].values() for name in names]
        stored = {name: weights.views[name] for name in own_names}
        expected = stored if base is None else adapter_tensors(folder, run_setup.parts, stored, base)
        verify_folder(folder, expected, parts=weights.parts)


def _write_whole(session: OpenRun, weights: _RankWeights, folder: Path, whole: WholeModel) -> None:
    """Write and check the files of `whole` with the trained weights; collective."""
    own = weights.own if weights.is_first_replica else frozenset()
    if weights.rank == 0:
        whole.create(folder, session.run_setup.parts, session.run_setup.dtype)
    session.all_ranks.barrier()
    if own:
        whole.fill(folder, weights.views.__getitem__, own=own, parts=weights.parts)
    session.all_ranks.barrier()
    if own:
        expected = {name: weights.views[whole.owners[name]] for name in whole.names_of(own)}
        verify_folder(folder, expected, parts=lambda name, tensor: weights.parts(whole.owners[name], tensor))
    if weights.rank == 0:
        whole.check_copied(folder)


def save_model(
    session: OpenRun,
    output: OutputFolder,
    model_files: ModelFiles,
    run_status: RunStatus,
    base: AdapterBase | None = None,
    layout: SavedLayout = TEXT_ALONE,
) -> list[str]:
    """Export the model, then merge adapters and write the single file if the options ask for them; collective.

    With `base`, adapters for the base are exported instead; `layout` is that of the whole model. If the base into which
    a text goes back is no longer as it was, the text is saved alone. A failed export raises CheckpointError. Problems
    after the export are returned, because the model is complete despite them.
    """
    config, problems, own = session.run_setup.config, list[str](), layout if base is None else TEXT_ALONE
    session.activity.start_action("the export of the model")
    if own.whole is not None and (problem := _why_changed(session, output, own.whole)) is not None:
        problems, own = [problem], replace(own, is_whole=False)
    export_model(session, output, model_files=model_files, run_status=run_status, base=base, layout=own)
    if session.all_ranks.rank != 0:
        return []
    what = "model" if base is None else "adapter"
    logger.info("%s saved to %s (checked tensor by tensor)", what, output.save_dir)
    if own.base is not None:
        logger.info("saved: %s", own)
    if base is not None and config.adapters.merge:
        problems += _merge(session, output, base, model_files, layout)
    saved = f"after the last step: the {what} is complete and checked in {output.save_dir}"
    if config.output.params_file is not None:
        failed = _write_params(session, output, Path(config.output.params_file), run_status, saved)
        problems += failed
        saved += "" if failed else f" and in {config.output.params_file}"
    report = config.output.results_file
    run_status.set_status(saved if report is None else f"{saved}; {report} was not written")
    return problems


def _write_params(session: OpenRun, output: OutputFolder, params: Path, run_status: RunStatus, saved: str) -> list[str]:
    """Write the single file of the committed folder; returns the problem, if any, with the command for later."""
    session.activity.start_action("the single file of all parameters")
    run_status.set_status(
        f"{saved}; {params} was not written", clean_up=params.with_name(f"{params.name}.partial").unlink
    )
    try:
        params.parent.mkdir(parents=True, exist_ok=True)
        write_params_file(params, output.save_dir, progress=session.activity.progress)
    except (CheckpointError, OSError) as error:
        names = f"Path({str(params.resolve())!r}), Path({str(output.save_dir)!r})"
        older = " The older file is as it was." if params.exists() else ""
        return [
            f"--save_params: {error}.{older} Free some space, then create the file from the model, in "
            'the folder of main.py: python -c "from pathlib import Path; from mobius.checkpoint.model_folder import '
            f'write_params_file; write_params_file({names})"'
        ]
    # These words are in the first version's manual: its users and their scripts look for them.
    logger.info("模型已保存到 %s (parameters saved to one file)", params)
    return []


def _why_changed(session: OpenRun, output: OutputFolder, whole: WholeModel) -> str | None:
    """Problem with the files of `whole`, which a user may have moved during the training; None if they are as before.

    Collective. Only the first rank, which copies them, has the reason.
    """
    problem = ""
    if session.all_ranks.rank == 0:
        try:
            whole.check_unchanged()
        except CheckpointError as error:
            problem = (
                f"--export_as: {error} The text is saved alone. To put it back into BASE, the model as it was, later: "
                f"mobius export {output.save_dir} FOLDER --base BASE"
            )
    return problem if all_gather_numbers(session.all_ranks, [float(bool(problem))]).any() else None


def _merge(
    session: OpenRun, output: OutputFolder, base: AdapterBase, model_files: ModelFiles, layout: SavedLayout
) -> list[str]:
    """Write the merged model next to the adapter; returns the problem, if any, with the command to merge later."""
    session.activity.start_action("the merged model")
    run_setup, folder = session.run_setup, merged_folder(session.run_setup.config)
    try:
        write_model(
            *(SavedModel(base.folder, AdapterFolder(output.save_dir)), run_setup.parts, folder),
            dtype=run_setup.dtype,
            model_files=model_files,
            layout=layout,
            progress=session.activity.progress,
        )
    except CheckpointError as error:
        command = f"mobius export {output.save_dir} FOLDER --merge"
        return [f"--merge: {error} The adapter is complete; to merge it later: {command}"]
    logger.info("merged model saved to %s", folder)
    return []
