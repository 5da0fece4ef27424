"""Tells from names what a folder holds: a model, checkpoints, what a run left that came to nothing, or something else.

Nothing is written here. A model is complete if its folder has weights and config.json, which is the last file to come
and the first to go; a checkpoint if its folder, checkpoint-<step>, has checkpoint.json. Whether their contents are
whole is for those to find out who read them.
"""

import contextlib
import re
from pathlib import Path
from typing import Final

from mobius.errors import CheckpointError
from mobius.regular_files import read_json

MODEL_MARK: Final = "config.json"
ADAPTER_MARK: Final = "adapter_config.json"
"""Mark of adapters, once they have their place; there is no config.json, or transformers would look for a model."""
CHECKPOINT_MARK: Final = "checkpoint.json"
REPLACES_MARK: Final = ".replaces_older"
"""File of a run that has moved older results aside, which are removed as soon as its own are safe."""
REMOVED_MARK: Final = ".removed"
"""File of a folder that is being removed."""
SETTINGS: Final = ("training_args.yaml", "plan.json")
"""Files that every folder of a run begins with."""

_RUN_FILES: Final = {*SETTINGS, REMOVED_MARK, "metrics.jsonl", "trace.json", "tokenizer.json"}
"""Files of which a torn folder of a run has at least one, if it has no weights yet."""
_CHECKPOINT: Final = re.compile(r"checkpoint-(\d+)(\.replaced|\.partial)?")
"""A checkpoint, also where its run was killed before it had its name, or while another one of its step took that."""
_LEFT_BEHIND: Final = re.compile(
    r"training_args\.yaml|plan\.json|\.replaces_older"
    r"|events\.jsonl|metrics\.jsonl|trainer_log\.jsonl|trainer_state\.json|\w+_results\.json"
    r"|training_loss\.png|README\.md|trace(\.rank\d+)?\.json|timeline\.png|profile|runs"
    r"|checkpoint-\d+\.(partial|removed|replaced)|final\.(partial|moving)"
)
"""Files and folders that are in the folder of a run before it has a checkpoint or a model."""
_HALF_WRITTEN: Final = re.compile(r"(\.\d+)?\.partial$")


def names_in(folder: Path) -> list[str]:
    """Names in `folder`, sorted; none if it is no folder."""
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def shown(folder: Path) -> str:
    """A few of the names in `folder`, for a message."""
    names = names_in(folder) or ["a file"]
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def is_empty(folder: Path) -> bool:
    """Whether `folder` is one and has nothing in it."""
    return folder.is_dir() and not names_in(folder)


def has_model(folder: Path) -> bool:
    """Whether `folder` holds a whole model or adapter, also of another origin."""
    has_mark = (folder / MODEL_MARK).exists() or (folder / ADAPTER_MARK).exists()
    return has_mark and any(folder.glob("*.safetensors"))


def checkpoints_in(folder: Path) -> list[str]:
    """Names of the checkpoints in `folder`, the one that was saved last comes first."""
    found = []
    for name in names_in(folder):
        match, mark = _CHECKPOINT.fullmatch(name), folder / name / CHECKPOINT_MARK
        if match is not None and mark.is_file() and mark.stat().st_size:  # it is empty until all else is written
            found.append((match[2] is None, _save_number(mark), int(match[1]), name))
    return [name for *_, name in sorted(found, reverse=True)]


def is_worth_keeping(folder: Path) -> bool:
    """Whether there is a whole model or a checkpoint in `folder`, which nobody but the user may give up."""
    return has_model(folder) or bool(checkpoints_in(folder))


def has_results(folder: Path) -> bool:
    """Whether `folder` holds what a run was made for: a model, checkpoints, or scores without any training."""
    names = names_in(folder)
    has_scores = any(name.endswith("_results.json") for name in names) and "train_results.json" not in names
    return is_worth_keeping(folder) or (has_scores and _has_settings(folder) and REMOVED_MARK not in names)


def is_incomplete(folder: Path) -> bool:
    """Whether `folder` is what a run leaves that ends in the middle of making it, or of removing it."""
    names = names_in(folder)
    is_of_a_run = not _RUN_FILES.isdisjoint(names) or any(folder.glob("*.safetensors"))
    return is_empty(folder) or is_of_a_run or (folder.is_dir() and all(_is_left_behind(folder / n) for n in names))


def is_unfinished_run(folder: Path) -> bool:
    """Whether `folder` is that of a run that saves checkpoints and has come to none, with nothing of anybody else."""
    return (
        _has_settings(folder)
        and not has_results(folder)
        and all(_is_left_behind(folder / name) for name in names_in(folder))
    )


def _has_settings(folder: Path) -> bool:
    return all((folder / name).is_file() for name in SETTINGS)


def _is_left_behind(path: Path) -> bool:
    if path.is_symlink():
        return False
    if path.is_dir() and all(inner.is_dir() for inner in path.rglob("*")):
        return True  # made in advance for files of the user's choice
    return _LEFT_BEHIND.fullmatch(path.name) is not None or (
        path.is_file() and _LEFT_BEHIND.fullmatch(_HALF_WRITTEN.sub("", path.name)) is not None
    )


def _save_number(mark: Path) -> int:
    """Number of a checkpoint among all that its run saved; 0 if it tells none."""
    with contextlib.suppress(CheckpointError):
        contents = read_json(mark)
        number = contents.get("save_number") if isinstance(contents, dict) else None
        return number if type(number) is int else 0
    return 0
