"""Finds results of earlier runs in a folder, and the names that a new run cannot use because of them.

This module reads names and manifests and changes nothing; `checkpoint/run_folder.py` makes changes.
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
from mobius.files.regular_files import read_json

MANIFEST_FILE: Final = "checkpoint.json"
"""Manifest of a checkpoint (`checkpoint/manifest.py`)."""
CHECKPOINT_NAME: Final = re.compile(r"checkpoint-(?P<step>0|[1-9][0-9]*)(?P<ending>\.partial|\.replaced|\.removed)?")
"""Name of a checkpoint; a name with an ending is not final. Mobius no longer creates names with `.removed`."""
OPTIONS_FILE: Final = "training_args.yaml"
PLAN_FILE: Final = "plan.json"
SETTINGS: Final = {OPTIONS_FILE, PLAN_FILE}
"""Files that a run writes first into its folder."""
MODEL_MARK: Final = "config.json"
ADAPTER_MARK: Final = "adapter_config.json"
"""File that marks a complete adapter; config.json would make transformers look for a model."""
REPLACES_MARK: Final = ".replaces_older"
"""File of a run that has moved older results aside; it allows a later start of the run to remove these results."""
EXPORT: Final = "final.partial"
MOVING: Final = "final.moving"
"""Name of the checked model's folder once the files of an older model are removed."""
LEFT_BEHIND: Final = re.compile(
    r"(training_args\.yaml|plan\.json|\.replaces_older"
    r"|events\.jsonl|metrics\.jsonl|trainer_log\.jsonl|trainer_state\.json|\w+_results\.json"
    r"|reference\.scores|scores\.jsonl|training_loss\.png|README\.md|trace(\.rank\d+)?\.json|timeline\.png)(?:(?:\.\d+)?\.partial)?"
    r"|profile|runs|checkpoint-\d+\.(partial|removed|replaced)|final\.(partial|moving)"
)
"""Names of files and folders that a run may create before its first checkpoint or model."""
_SAFE: Final = {
    "--save_params": "none (the model is in --save_dir)",
    "--save_results": "auto (a file in --save_dir)",
}
"""Option -> value with which a run does not write this file, so that the earlier file stays."""


def folder_problems(folder: Path, *, overwrite: bool) -> list[str]:
    """Return the reasons why a new run, one that does not resume, cannot use `folder` as its --save_dir."""
    problems = [*_aside_problems(folder)]
    if (reason := _folder_problem(folder, overwrite=overwrite)) is not None:
        problems.append(f"--save_dir {folder} {reason}")
    return problems


def _folder_problem(folder: Path, *, overwrite: bool) -> str | None:
    if not folder.exists() or is_empty(folder) or has_come_to_nothing(folder):
        return None
    if not folder.is_dir():
        return "is a file. Choose another name."
    if folder.is_mount():  # a mount cannot be renamed; often tried in containers
        return "is a mount point and cannot be replaced as a whole. Use a folder inside it."
    if Path.cwd().is_relative_to(folder):
        return "is the current folder or contains it. Use a folder inside the current one."
    if not has_results(folder):
        return (
            f"holds something other than a saved model ({listed(names_in(folder))}), and --overwrite_output_dir "
            "replaces only saved models. Choose another folder, or empty this one."
        )
    if overwrite:
        return None
    if checkpoints := checkpoints_in(folder):
        also = ", and a complete model" if has_model(folder) else ""
        newest = f"holds the checkpoints of an earlier run{also}. The newest is {checkpoints[0]}."
        return f"{newest} {next_steps_hint(folder)}"
    return "exists and is not empty. Choose another folder, or add --overwrite_output_dir to replace it."


def _aside_problems(save_dir: Path) -> Iterator[str]:
    """Yield a problem if a run was killed while it replaced older results: the user must choose which to keep."""
    aside = folder_aside(save_dir)
    if aside.exists() and not has_come_to_nothing(aside):
        holds = "has results, too" if has_results(save_dir) else "has no result"
        yield (
            f"--save_dir {save_dir}: a run that was to replace the results in {aside} was interrupted; {save_dir} "
            f"{holds}. Keep one of both: remove {aside}, or rename it to {save_dir} or another name. Or choose another "
            "folder."
        )


def file_problems(files: Mapping[str, Path], save_dir: Path, *, may_replace: bool) -> Iterator[str]:
    """Yield why `files` (by option) cannot be written; `folder_problems` checks older files inside `save_dir`."""
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
    """Raise CheckpointError if results of an earlier run are at the paths of this run's results.

    A run's first process calls it before it imports or reads anything else. `OutputFolder.prepare` checks the rest: the
    checkpoint to resume from, and the model of a killed run, which it renames first.
    """
    output, trains = config.output, config.evaluation.do_train
    if config.saving.resume_from_checkpoint is not None:
        return
    folder = resolved("--save_dir", Path(output.save_dir))
    files = output_files(config) if trains else {}
    problems = [*file_problems(files, folder, may_replace=output.overwrite_output_dir)]
    if not has_unmoved_model(folder):
        with lock_if_free(folder) as is_free:
            taken = folder_problems(folder, overwrite=output.overwrite_output_dir)
            if not is_free and folder.is_dir():
                reason = "is in use: another run is still writing there. Choose another folder, or wait."
                taken = [f"--save_dir {folder} {reason}"]
        problems = [*taken, *problems]
    if problems:
        raise CheckpointError("\n".join(problems))


def output_files(config: Config) -> dict[str, Path]:
    """Single files that a training run writes, by option."""
    named = {"--save_params": config.output.params_file, "--save_results": config.output.results_file}
    return {option: Path(name) for option, name in named.items() if name is not None}


def has_model(folder: Path) -> bool:
    """Whether `folder` holds a complete model or adapter, also one that Mobius did not write."""
    has_mark = (folder / MODEL_MARK).exists() or (folder / ADAPTER_MARK).exists()
    return has_mark and any(folder.glob("*.safetensors"))


def has_unmoved_model(folder: Path) -> bool:
    """Whether a killed run has left a checked model in `folder` that does not have its final name yet."""
    return any((folder / name / MODEL_MARK).is_file() for name in (EXPORT, MOVING))


def checkpoints_in(folder: Path) -> list[str]:
    """Names of the checkpoints in `folder`, the latest save first; only manifests are read.

    Includes checkpoints without a final name: their run was killed, or another checkpoint of the step has the name.
    """
    found = []
    for name in names_in(folder):
        match, mark = CHECKPOINT_NAME.fullmatch(name), folder / name / MANIFEST_FILE
        if match is None or match["ending"] == ".removed":
            continue
        if mark.is_file() and mark.stat().st_size:  # a manifest is empty until all other files are written
            found.append((match["ending"] is None, _save_number(mark), int(match["step"]), name))
    return [name for *_, name in sorted(found, reverse=True)]


def has_results(folder: Path) -> bool:
    """Whether `folder` holds results of a run: a model, checkpoints, or the scores of a run without training.

    A link to a durable step counts, too, even if its target is missing: the disk may be absent only for now.
    """
    names = names_in(folder)
    if has_model(folder) or checkpoints_in(folder) or any(is_step_link(folder / name) for name in names):
        return True
    has_scores = any(name.endswith("_results.json") for name in names) and "train_results.json" not in names
    return has_scores and {*names} >= SETTINGS


def has_come_to_nothing(folder: Path) -> bool:
    """Whether `folder` belongs to a run that ended before its first result, and holds nothing else."""
    begins = {OPTIONS_FILE, f"{OPTIONS_FILE}.partial", REPLACES_MARK}
    return not begins.isdisjoint(names_in(folder)) and not has_results(folder) and all(map(_is_left, folder.iterdir()))


def _is_left(path: Path) -> bool:
    if path.is_symlink():
        return False
    if path.is_dir() and all(inner.is_dir() for inner in path.rglob("*")):
        return True  # an empty folder that a run made for --save_params or --save_results
    return LEFT_BEHIND.fullmatch(path.name) is not None


def is_step_link(path: Path) -> bool:
    """Whether `path` is a link with the name of a checkpoint: a link to a durable step."""
    return path.is_symlink() and CHECKPOINT_NAME.fullmatch(path.name) is not None


def next_steps_hint(folder: Path) -> str:
    """End of a message: how a user can continue if `folder` holds a model or checkpoints."""
    if checkpoints_in(folder):
        return (
            "Continue with --resume_from_checkpoint true, or start again: choose another folder, or start once more "
            "with --overwrite_output_dir to replace this whole folder."
        )
    return "To train anyway, choose another folder, or start again with --overwrite_output_dir to replace that model."


def folder_aside(save_dir: Path) -> Path:
    """Folder that holds older results while a run replaces them."""
    return save_dir.with_name(f"{save_dir.name}.replaced")


def names_in(folder: Path) -> list[str]:
    """Names in `folder`, sorted; empty if it is not a folder."""
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def is_empty(folder: Path) -> bool:
    """Whether `folder` is an empty folder."""
    return folder.is_dir() and not names_in(folder)


def _save_number(mark: Path) -> int:
    """Number of a checkpoint among all saves of its run; 0 if its manifest has no number."""
    with contextlib.suppress(CheckpointError):
        contents = read_json(mark)
        number = contents.get("save_number") if isinstance(contents, dict) else None
        return number if type(number) is int else 0
    return 0


def resolved(option: str, path: Path) -> Path:
    """`path` with its links resolved. Raises CheckpointError if they form a circle."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{option} {path} is a link that leads back to itself. Choose another name.") from error


@contextlib.contextmanager
def lock_if_free(save_dir: Path) -> Iterator[bool]:
    """Whether `save_dir` does not exist or no run is writing there; no run can start there within the block."""
    folder = resolved("--save_dir", save_dir)
    descriptor = try_lock(folder) if folder.is_dir() else None
    try:
        yield descriptor is not None or not folder.exists()
    finally:
        if descriptor is not None:
            os.close(descriptor)


def try_lock(folder: Path) -> int | None:
    """Descriptor that holds the lock of `folder` until it is closed; None if another process locked or replaced it."""
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
    """Whether `folder` is still the folder that was opened as `descriptor`."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False
