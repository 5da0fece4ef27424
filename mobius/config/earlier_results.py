"""Results of earlier runs: what a folder holds, and the names that a run cannot have because of them.

It reads names and manifests and changes nothing; `checkpoint/run_folder.py` recovers what a killed run has left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from mobius.config.config import Config
from mobius.errors import CheckpointError, listed
from mobius.regular_files import read_json

MANIFEST_FILE: Final = "checkpoint.json"
"""Manifest of a checkpoint (`checkpoint/manifest.py`)."""
CHECKPOINT_NAME: Final = re.compile(r"checkpoint-(?P<step>0|[1-9][0-9]*)(?P<ending>\.partial|\.replaced|\.removed)?")
"""Name of a checkpoint. With an ending it does not count; earlier versions gave the last one to what they removed."""
OPTIONS_FILE: Final = "training_args.yaml"
PLAN_FILE: Final = "plan.json"
SETTINGS: Final = {OPTIONS_FILE, PLAN_FILE}
"""Files that every folder of a run begins with."""
MODEL_MARK: Final = "config.json"
_ADAPTER_MARK: Final = "adapter_config.json"
"""Mark of a committed adapter: a config.json would make transformers look for a model."""
REPLACES_MARK: Final = ".replaces_older"
"""File of a run that has moved older results aside."""
REMOVED_MARK: Final = ".removed"
"""First file to be written to a folder that is being removed, and the last one to go."""
EXPORT: Final = "final.partial"
MOVING: Final = "final.moving"
"""Name of the checked model once no file of an older one is left in the folder."""
_SAFE: Final = {
    "--save_params": "none (the model is in --save_dir)",
    "--save_results": "auto (a file in --save_dir)",
}
"""Values of options with which an earlier file stays."""


def folder_problem(folder: Path, *, overwrite: bool) -> str | None:
    """Return why a run that does not resume cannot have `folder` as its --save_dir; None if it can."""
    checkpoints = checkpoints_in(folder)
    if not folder.exists():
        return None
    if not folder.is_dir():
        return "is a file. Choose another name."
    if folder.is_mount():  # cannot be renamed; in a container this is the usual mistake
        return "is a mount point and cannot be replaced as a whole. Use a folder inside it."
    if Path.cwd().is_relative_to(folder):
        return "is the current folder or contains it. Use a folder inside the current one."
    if is_empty(folder) or (overwrite and has_results(folder)):
        return None
    if checkpoints:
        also = ", and a complete model" if has_model(folder) else ""
        newest = f"holds the checkpoints of an earlier run{also}. The newest is {checkpoints[0]}."
        return f"{newest} {next_steps_hint(folder)}"
    if not overwrite:
        return "exists and is not empty. Choose another folder, or add --overwrite_output_dir to replace it."
    return (
        f"holds something other than a saved model ({shown_names(folder)}), and --overwrite_output_dir replaces "
        "only saved models. Choose another folder, or empty this one."
    )


def file_problems(files: Mapping[str, Path], save_dir: Path, *, may_replace: bool) -> Iterator[str]:
    """Return why single files, by option, cannot be written beside `save_dir`; inside it they share its fate."""
    for option, path in files.items():
        place = resolved(option, path)
        if place == save_dir or path.is_dir():
            yield f"{option} {path} is a folder. Name a file."
        elif path.exists() and not path.is_file():
            yield f"{option} {path} is a device or a pipe. Name a file, or none."
        elif path.exists() and not may_replace and not place.is_relative_to(save_dir):
            yield (
                f"{option} {path} exists. Use {option} {_SAFE[option]}, or another name; --overwrite_output_dir would "
                "replace this file, and all of --save_dir."
            )


def refuse_taken_names(config: Config) -> None:
    """Raise CheckpointError if results of an earlier run are where those of this one would be.

    For a run's first process, before anything is imported or read. Left to `OutputFolder.prepare`: what a run has to
    resume from, and what a killed run has left, which is recovered first. Changes nothing.
    """
    output, trains = config.output, config.evaluation.do_train
    if config.saving.resume_from_checkpoint is not None:
        return
    folder = resolved("--save_dir", Path(output.save_dir))
    files = output_files(config) if trains else {}
    problems = [*file_problems(files, folder, may_replace=output.overwrite_output_dir)]
    leftovers = (*folders_beside(folder), folder / REPLACES_MARK, folder / EXPORT, folder / MOVING)
    has_come_to_nothing = {*names_in(folder)} >= SETTINGS and not has_results(folder)
    if not has_come_to_nothing and not any(map(Path.exists, leftovers)):
        with lock_if_free(folder) as is_free:
            problem = folder_problem(folder, overwrite=output.overwrite_output_dir)
            if not is_free:
                problem = "is that of another run, which is still writing there. Choose another folder, or wait."
        problems = [*([f"--save_dir {folder} {problem}"] if problem else []), *problems]
    if problems:
        raise CheckpointError("\n".join(problems))


def output_files(config: Config) -> dict[str, Path]:
    """Single files of a training by their options."""
    named = {"--save_params": config.output.params_file, "--save_results": config.output.results_file}
    return {option: Path(name) for option, name in named.items() if name is not None}


def has_model(folder: Path) -> bool:
    """Whether `folder` holds a whole model or adapter, also of another origin."""
    has_mark = (folder / MODEL_MARK).exists() or (folder / _ADAPTER_MARK).exists()
    return has_mark and any(folder.glob("*.safetensors")) and not (folder / REMOVED_MARK).exists()


def checkpoints_in(folder: Path) -> list[str]:
    """Names of the checkpoints in `folder`, the one that was saved last comes first; only manifests are read.

    Also of those without a final name: their run was killed, or another one of their step took it.
    """
    found, names = [], names_in(folder)
    for name in () if REMOVED_MARK in names else names:
        match, mark = CHECKPOINT_NAME.fullmatch(name), folder / name / MANIFEST_FILE
        if match is None or match["ending"] == ".removed":
            continue
        if mark.is_file() and mark.stat().st_size:  # it is empty until all else is written
            found.append((match["ending"] is None, _save_number(mark), int(match["step"]), name))
    return [name for *_, name in sorted(found, reverse=True)]


def has_results(folder: Path) -> bool:
    """Whether `folder` holds what a run was made for: a model, checkpoints, or scores without any training."""
    names = names_in(folder)
    has_scores = any(name.endswith("_results.json") for name in names) and "train_results.json" not in names
    return is_worth_keeping(folder) or (has_scores and {*names} >= SETTINGS and REMOVED_MARK not in names)


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


def folders_beside(save_dir: Path) -> tuple[Path, Path]:
    """Place of a run's files before it has its name, and that of older results while they are replaced."""
    return save_dir.with_name(f"{save_dir.name}.partial"), save_dir.with_name(f"{save_dir.name}.replaced")


def names_in(folder: Path) -> list[str]:
    """Names in `folder`, in order; none if it is no folder."""
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def is_empty(folder: Path) -> bool:
    """Whether `folder` is one without anything in it."""
    return folder.is_dir() and not names_in(folder)


def shown_names(folder: Path) -> str:
    """A few of the names in `folder`, for a message."""
    return listed(names_in(folder) or ["a file"])


def is_worth_keeping(folder: Path) -> bool:
    """Whether there is a whole model or a checkpoint in `folder`, which nobody but the user may give up.

    A link to a durable step counts, too, wherever it leads: its disk may be missing now only.
    """
    has_link = any(CHECKPOINT_NAME.fullmatch(name) and (folder / name).is_symlink() for name in names_in(folder))
    return has_model(folder) or has_link or bool(checkpoints_in(folder))


def _save_number(mark: Path) -> int:
    """Number of a checkpoint among all that its run saved; 0 if its manifest has none."""
    with contextlib.suppress(CheckpointError):
        contents = read_json(mark)
        number = contents.get("save_number") if isinstance(contents, dict) else None
        return number if type(number) is int else 0
    return 0


def resolved(option: str, path: Path) -> Path:
    """`path` without links in it. Raises CheckpointError if they lead in a circle."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{option} {path} is a link that leads back to itself. Choose another name.") from error


@contextlib.contextmanager
def lock_if_free(save_dir: Path) -> Iterator[bool]:
    """Whether no run is writing to `save_dir`; none can begin within the block. True for one that does not exist."""
    folder = resolved("--save_dir", save_dir)
    descriptor = try_lock(folder) if folder.is_dir() else None
    try:
        yield descriptor is not None or not folder.exists()
    finally:
        if descriptor is not None:
            os.close(descriptor)


def try_lock(folder: Path) -> int | None:
    """Descriptor that holds the lock of `folder` until it is closed; None if somebody else has it or replaced it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_still(folder, descriptor):
            return descriptor
    os.close(descriptor)
    return None


def is_still(folder: Path, descriptor: int) -> bool:
    """Whether `folder` is the one that was opened as `descriptor`."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False
