"""Settles what a killed run left of its folder and beside it, before the next run of the same name trains.

Complete is a folder with a whole model or a checkpoint in it (contents.py); save_ckpt and .replaced also with scores
of a run that does not train. The names are those of output_folder.py:

    save_ckpt   .partial    .replaced
    -           complete    any         .partial gets its name; the run is refused and told so
    -           none, torn  complete    .replaced gets its name back
    any         complete    any         the run is refused and told where the folders are
    any         any         complete    the same, but for the marked one below
    any         torn        torn        what is torn is removed; a folder that no run has left is never touched
    unfinished  none, torn  any         save_ckpt, with logs at most, is removed; .replaced gets its name back
    complete and marked     complete    .replaced is removed: the run that moved it aside was told to replace it
    a model in final.partial            the model gets its place; the run is refused and told so, unless it resumes
"""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from mobius.atomic_files import sync_to_disk
from mobius.checkpoint import final_weights
from mobius.checkpoint.folder_contents import (
    ADAPTER_MARK,
    CHECKPOINT_MARK,
    MODEL_MARK,
    REMOVED_MARK,
    REPLACES_MARK,
    checkpoints_in,
    has_model,
    has_results,
    is_empty,
    is_incomplete,
    is_unfinished_run,
    is_worth_keeping,
    shown,
)

logger = logging.getLogger(__name__)


def recover_folder(save_dir: Path, partial: Path, replaced: Path, *, resumes: bool) -> list[str]:
    """Do what the table says; returns what the user has to decide, each as a message that names `--save_dir`.

    `resumes`: a run is about to go on in `save_dir`. Nobody else may be writing to these folders. Raises OSError.
    """
    problems = [*_settle_save_dir(save_dir, partial, replaced, resumes), *_settle_names(save_dir, partial, replaced)]
    problems += _problems_beside(save_dir, partial, replaced)
    if not problems and replaced.exists():
        remove_results(replaced)
    return problems


def remove_results(folder: Path) -> None:
    """Remove `folder` so that a kill leaves nothing that looks whole, and nothing that looks like somebody else's.

    The marks go first, and one that says so goes last. Raises OSError.
    """
    is_removed = folder / REMOVED_MARK
    is_removed.touch()
    marks = [folder / MODEL_MARK, folder / ADAPTER_MARK]
    for mark in (*marks, *(folder / name / CHECKPOINT_MARK for name in checkpoints_in(folder))):
        mark.unlink(missing_ok=True)
    for path in [*folder.iterdir()]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != is_removed:
            path.unlink()
    is_removed.unlink()
    folder.rmdir()


def next_steps_hint(folder: Path) -> str:
    """How a user can go on where `folder` holds a model or checkpoints: the end of a message."""
    if checkpoints_in(folder):
        return (
            "Go on from there with --resume_from_checkpoint true, or start anew: choose another folder, or replace all "
            "of this one with --overwrite_output_dir in a further start."
        )
    return (
        "To train all the same, choose another folder, or replace that model with --overwrite_output_dir in a further "
        "start."
    )


def _settle_save_dir(folder: Path, partial: Path, replaced: Path, resumes: bool) -> Iterator[str]:
    if final_weights.recover_export(folder):
        found = f"an interrupted run had left a complete, checked model, which is now in {folder}"
        if resumes:
            logger.warning("--save_dir: %s", found)
        else:
            yield f"--save_dir {folder}: {found}. {next_steps_hint(folder)}"
    mark = folder / REPLACES_MARK
    if is_worth_keeping(folder) and mark.exists():
        if has_results(replaced):
            logger.warning("The older results in %s, which those in %s replace, are removed.", replaced, folder)
            remove_results(replaced)
        mark.unlink()
    is_fixed = folder.is_mount() or Path.cwd().is_relative_to(folder)
    is_free = not partial.exists() or (is_incomplete(partial) and not is_worth_keeping(partial))
    if is_unfinished_run(folder) and is_free and not is_fixed and not resumes:
        logger.warning("%s is removed: a run ended there before its first checkpoint.", folder)
        if partial.exists():
            remove_results(partial)
        folder.rename(partial)  # where it is removed; half of it would not be recognized under its own name


def _settle_names(save_dir: Path, partial: Path, replaced: Path) -> Iterator[str]:
    """Give a complete folder the name `save_dir` if that is free."""
    if save_dir.exists() and not is_empty(save_dir):
        return
    if has_model(partial):
        partial.rename(save_dir)
        sync_to_disk(save_dir.parent)
        yield (
            f"--save_dir {save_dir}: an interrupted run had left a complete, checked model, which now has its name: "
            f"{save_dir}. {next_steps_hint(save_dir)}"
        )
    elif has_results(replaced):
        logger.warning("An interrupted run had moved %s aside; it is put back.", save_dir)
        replaced.rename(save_dir)


def _problems_beside(save_dir: Path, partial: Path, replaced: Path) -> Iterator[str]:
    for folder in (partial, replaced):
        given = f"--save_dir {save_dir}: {folder} holds"
        if is_worth_keeping(folder) or (folder == replaced and has_results(folder)):
            checkpoints = checkpoints_in(folder)
            others = f"checkpoints, the newest {checkpoints[0]}" if checkpoints else "results"
            held = "a complete model" if has_model(folder) else others
            yield (
                f"{given} {held}, which an interrupted run has left there. Rename or remove it, or choose another "
                "folder."
            )
        elif folder.exists() and not is_incomplete(folder):
            yield f"{given} something other than results ({shown(folder)}). Rename it, or choose another folder."
