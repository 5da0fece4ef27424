"""Moves the checked model of a run that saves as it goes into the run's own folder, file by file.

    export     final.partial <- every file, config.json last: from here on it is a whole, checked model
    1 clear    config.json, weights and index of an older model, and its answers, are removed from the folder
    2 rename   final.partial -> final.moving
    3 move     each file of final.moving takes its place in the folder
    4 mark     config.json as the last one: the folder holds the model; the empty final.moving is removed

A process can be killed between any two of these changes. `recover_export` is called before anybody looks at the folder:

    final.partial      final.moving        the folder itself
    no config.json     -                   as it was; final.partial is a torn export and is removed
    config.json        -                   goes on with 1: none of the files to clear is a new one yet
    -                  config.json         goes on with 3: none of the files that are there is an old one
    -                  only folders        the model is complete; final.moving is removed
"""

import logging
import os
import shutil
from pathlib import Path
from typing import Final

from mobius.atomic_files import sync_to_disk
from mobius.checkpoint.folder_contents import MODEL_MARK

logger = logging.getLogger(__name__)

EXPORT_NAME: Final = "final.partial"
_MOVING_NAME: Final = "final.moving"
_OLDER_WEIGHTS: Final = (
    *("model*.safetensors", "model.safetensors.index.json"),
    *("adapter_config.json", "adapter_model.safetensors", "base_model.json"),
)
_ANSWERS: Final = ("generated_predictions.jsonl", "predict_results.json")
"""Files of `--do_predict`, which come behind the model that answered."""


def make_export_folder(folder: Path) -> Path:
    """An empty final.partial in `folder`; raises OSError."""
    export = folder / EXPORT_NAME
    if export.exists():
        shutil.rmtree(export)
    export.mkdir()
    return export


def publish_model(folder: Path) -> None:
    """Move the files of final.partial, which are synced first, into `folder`; raises OSError, and can be repeated."""
    export, moving = folder / EXPORT_NAME, folder / _MOVING_NAME
    assert (export / MODEL_MARK).is_file(), "only a checked model is handed over"
    sync_tree(export)
    (folder / MODEL_MARK).unlink(missing_ok=True)
    for pattern in _OLDER_WEIGHTS:
        for path in sorted(folder.glob(pattern)):
            path.unlink()
    if answers := [path for name in _ANSWERS if (path := folder / name).exists()]:
        for path in answers:
            path.unlink()
        logger.info("answers of the model before are removed: %s", ", ".join(map(str, answers)))
    sync_to_disk(folder)  # an older file that came back after a loss of power would be taken for one of the model
    export.rename(moving)
    _move(moving, folder)


def recover_export(folder: Path) -> bool:
    """Bring what a killed run left of an export or its handover into order; True if a model came out of it.

    Raises OSError.
    """
    export, moving = folder / EXPORT_NAME, folder / _MOVING_NAME
    if (moving / MODEL_MARK).is_file():
        _move(moving, folder)
        return True
    if moving.is_dir() and all(path.is_dir() for path in moving.rglob("*")):
        shutil.rmtree(moving)
        return (folder / MODEL_MARK).is_file()
    if (export / MODEL_MARK).is_file():
        publish_model(folder)
        return True
    if export.is_dir():
        shutil.rmtree(export)
    return False


def sync_tree(folder: Path) -> None:
    """Return when all files and folders below `folder` are on the disk."""
    for inner, _, names in os.walk(folder):
        for name in names:
            sync_to_disk(Path(inner, name))
        sync_to_disk(Path(inner))


def move_files(source: Path, target: Path, *, last: str) -> None:
    """Rename every file below `source` to its place below `target`, one at a time; `last` of `source` comes last."""
    mark = source / last
    for path in sorted(path for path in source.rglob("*") if path != mark):
        place = target / path.relative_to(source)
        if path.is_dir():
            place.mkdir(exist_ok=True)
        else:
            path.replace(place)
    for inner in {target, *(target / path.relative_to(source) for path in source.rglob("*") if path.is_dir())}:
        sync_to_disk(inner)
    if mark.exists():
        mark.replace(target / last)
        sync_to_disk(target)


def _move(moving: Path, folder: Path) -> None:
    move_files(moving, folder, last=MODEL_MARK)
    shutil.rmtree(moving)
