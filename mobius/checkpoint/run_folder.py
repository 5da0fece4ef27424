"""Owns the folder `--save_dir` of a run: locks it, moves results to their places, handles what a killed run left.

    prepare   save_ckpt is locked, and created if it does not exist
    begin     save_ckpt -> save_ckpt.replaced, if it holds results to be replaced; save_ckpt <- settings
    training  save_ckpt <- logs, and each checkpoint-<step> after it is complete (folders.py)
    commit    save_ckpt/final.partial -> save_ckpt, file by file, config.json last (`publish_model`)

When the first checkpoint or the model is complete, .replaced is removed. A run that resumes from a checkpoint of the
folder works in place. A process may be killed between any two changes. The next start

    moves a checked model from final.partial to its place, then stops with a message, unless it resumes the run
    stops with a message if .replaced has results, so that the user chooses, unless it resumes the run
    uses the folder again if it only has files that a run writes before its first result

A model is complete if there are weights and config.json, which is written last and removed first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from mobius.config.earlier_results import (
    ADAPTER_MARK,
    CHECKPOINT_NAME,
    EXPORT,
    LEFT_BEHIND,
    MANIFEST_FILE,
    MODEL_MARK,
    MOVING,
    REPLACES_MARK,
    SETTINGS,
    checkpoints_in,
    file_problems,
    folder_aside,
    folder_problems,
    has_results,
    has_unmoved_model,
    is_step_link,
    is_still,
    next_steps_hint,
    resolved,
    try_lock,
)
from mobius.errors import CheckpointError, reason_of
from mobius.files.atomic_files import atomic_write, sync_to_disk, sync_tree
from mobius.units import format_bytes

logger = logging.getLogger(__name__)

_OLDER_MODEL: Final = (
    *("model*.safetensors", "model.safetensors.index.json"),
    *("adapter_config.json", "adapter_model.safetensors", "base_model.json"),
)
_ANSWERS: Final = ("generated_predictions.jsonl", "predict_results.json")
"""Files of `--do_predict`, which are written after the model that generated the answers."""


class OutputFolder:
    """The folder `--save_dir` of one run, and the single files that are saved in addition.

    Every rank may create this object and ask for paths; only the first rank calls methods that change the disk.
    """

    def __init__(self, save_dir: Path, *, overwrite: bool, files: Mapping[str, Path], resumes: bool = False) -> None:
        """Take the paths; `files` maps an option as typed (`--save_params`) to the single file that it names.

        `resumes`: the run resumes from a checkpoint in `save_dir` itself. Then other checkpoints and logs in the folder
        are kept, and single files may be replaced. Raises CheckpointError if `save_dir` cannot be a folder's name.
        """
        self.save_dir = resolved("--save_dir", save_dir)
        if not self.save_dir.name:
            raise CheckpointError("--save_dir / is the root of all folders. Use a folder inside it.")
        self._replaced = folder_aside(self.save_dir)
        self._overwrite, self._resumes, self._files = overwrite, resumes, files
        self.is_new = not self.save_dir.exists()
        """Whether the folder did not exist before."""
        self.export_folder = self.save_dir / EXPORT
        """Place where the model is written and checked after the last step, on every rank."""
        self._has_begun = self._has_older = False
        self._settings: Mapping[str, str] = {}
        self._lock: int | None = None
        """Descriptor that holds the lock of `save_dir`."""

    @property
    def older_results(self) -> Path | None:
        """Folder of the older results, until this run's results are complete; only on the first rank, else None."""
        return self._replaced if self._has_older else None

    def prepare(self, needed_bytes: Mapping[str, int]) -> None:
        """Check that the run may begin, and lock `save_dir`, which is created if it does not exist.

        Raises CheckpointError for problems that would make saving fail after the training. `needed_bytes` maps options
        (`--save_dir` and the options of `files`) to the bytes that will be written there. Until `close` or the end of
        the process no other run can use `save_dir`.
        """
        try:
            with self._explained("Choose another folder."):
                if self.save_dir.is_dir():
                    self._lock = self._locked()
                    _refuse(self._finish_export())
                _refuse(self._problems())
                if self._lock is None:
                    self.save_dir.mkdir(parents=True, exist_ok=True)  # if two runs start at once, the lock decides
                    self._lock = self._locked()
                with tempfile.TemporaryFile(dir=self.save_dir):
                    pass
            _refuse([*self._unwritable_files()] or self._space_problems(needed_bytes))
        except CheckpointError:
            self.discard()
            raise
        self._has_older = self._resumes and (self.save_dir / REPLACES_MARK).exists() and self._replaced.is_dir()

    def write_settings(self, settings: Mapping[str, str]) -> None:
        """Write texts by file name into the folder; before `begin`, only test the write. Raises CheckpointError."""
        self._settings = settings
        with self._explained("Free some space, or choose another folder."):
            if not self._has_begun:
                with tempfile.TemporaryFile("w", encoding="utf-8", dir=self.save_dir) as trial:
                    trial.writelines(settings.values())
                return
            for name, text in settings.items():
                with atomic_write(self.save_dir / name) as temporary:
                    temporary.write_text(text, encoding="utf-8")

    def discard(self) -> None:
        """Remove a folder that `prepare` created, unless the run has begun; an older `save_dir` does not change."""
        if self._lock is not None and not self._has_begun:
            if self.is_new:
                for folder in (*sorted(filter(Path.is_dir, self.save_dir.rglob("*")), reverse=True), self.save_dir):
                    with contextlib.suppress(OSError):
                        folder.rmdir()
            self.close()

    def begin(self) -> None:
        """Make `save_dir` the folder of the run, just before its first step. Raises CheckpointError."""
        if not self._resumes:
            _refuse(folder_problems(self.save_dir, overwrite=self._overwrite))
            with self._explained("Nothing is trained yet."):
                self._make_way()
        self._has_begun = True
        self.write_settings(self._settings)

    def remove_older_results(self) -> None:
        """Remove the older results that this run replaces; called when its first checkpoint or its model is complete.

        Returns at once without older results. Logs a warning if they cannot be removed.
        """
        if not self._has_older:
            return
        self._has_older = False
        try:
            _remove_results(self._replaced)
            (self.save_dir / REPLACES_MARK).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("the older results in %s cannot be removed (%s)", self._replaced, reason_of(error))

    def recreate_if_removed(self) -> None:
        """Create the folder again, with its lock and its settings, if a user has removed it during the run.

        The check is two system calls. Raises CheckpointError if another run uses the path, or if it cannot be created.
        """
        if self._lock is None or is_still(self.save_dir, self._lock):
            return
        with self._explained("The folder was removed during the run, and cannot be created again."):
            self.save_dir.mkdir(parents=True, exist_ok=True)
        older, self._lock = self._lock, self._locked()
        os.close(older)
        logger.warning(
            "%s was removed during the run and has been created again. It will hold the settings, the logs and all "
            "later results; earlier checkpoints are lost",
            self.save_dir,
        )
        self.write_settings(self._settings)

    def begin_export(self) -> None:
        """Create `export_folder` for the model, before any rank writes there. Raises CheckpointError."""
        with self._explained("Free some space there."):
            for folder in (self.export_folder, self.save_dir / MOVING):
                shutil.rmtree(folder, ignore_errors=True)
            self.export_folder.mkdir()

    def commit(self) -> None:
        """Move a model in `export_folder` to its place, synced to the disk, then remove older results.

        Raises CheckpointError; then the model is still in `export_folder`.
        """
        advice = "The model is complete in there; the next start with the same --save_dir moves its files to their "
        with self._explained(advice + "places."):
            if self.export_folder.is_dir():
                publish_model(self.save_dir)
            for path in self.save_dir.glob("*.partial"):  # left by a start that was killed during a write
                if path.is_file() and LEFT_BEHIND.fullmatch(path.name):
                    path.unlink()
        self.remove_older_results()

    def close(self) -> None:
        """Release the lock, so that other runs can use the folder. A second call does nothing."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _make_way(self) -> None:
        """Move older results aside, or remove the files of a run that ended without a result. Raises OSError."""
        if self._replaced.is_dir():
            shutil.rmtree(self._replaced)  # it has no results, otherwise the run would have been refused
        if not has_results(self.save_dir):
            for path in self.save_dir.iterdir():
                if path.name not in SETTINGS and LEFT_BEHIND.fullmatch(path.name):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            return
        assert self._lock is not None, "it is prepared"
        self.save_dir.rename(self._replaced)
        try:
            self.save_dir.mkdir()
        except OSError:
            self._replaced.rename(self.save_dir)
            raise
        older, self._lock = self._lock, self._locked()
        os.close(older)
        (self.save_dir / REPLACES_MARK).touch()
        for link in filter(is_step_link, self._replaced.iterdir()):
            link.unlink()  # this run's steps replace the steps that the link leads to
        for path in self._files.values():
            if path.resolve().is_relative_to(self.save_dir):
                path.resolve().parent.mkdir(parents=True, exist_ok=True)
        sync_to_disk(self.save_dir.parent)
        self._has_older = True

    def _finish_export(self) -> list[str]:
        """Move a checked model that a killed run left to its place; returns a message if the user must then decide."""
        if not has_unmoved_model(self.save_dir):
            return []
        publish_model(self.save_dir)
        found = "an interrupted run had left a complete, checked model, which is now in"
        found = f"--save_dir {self.save_dir}: {found} {self.save_dir}."
        if self._resumes:
            logger.warning("%s", found)
            return []
        return [f"{found} {next_steps_hint(self.save_dir)}"]

    @contextlib.contextmanager
    def _explained(self, advice: str) -> Iterator[None]:
        """Turn an error of the file system into CheckpointError with the option, the reason and `advice`."""
        try:
            yield
        except OSError as error:
            reason = ": ".join(map(str, filter(None, (reason_of(error), error.filename))))
            raise CheckpointError(f"--save_dir {self.save_dir}: cannot write there ({reason}). {advice}") from error

    def _locked(self) -> int:
        if (descriptor := try_lock(self.save_dir)) is None:
            raise CheckpointError(
                f"--save_dir {self.save_dir}: another run is writing to it. Choose another folder, or wait."
            )
        return descriptor

    def _problems(self) -> list[str]:
        """Reasons why the run cannot use the folder or its single files."""
        may_replace = self._overwrite or self._resumes
        files = file_problems(self._files, self.save_dir, may_replace=may_replace)
        if not self._resumes:
            return [*folder_problems(self.save_dir, overwrite=self._overwrite), *files]
        reason = "holds no checkpoint to resume from. Give the folder that has it, or start without resuming."
        return [*([] if checkpoints_in(self.save_dir) else [f"--save_dir {self.save_dir} {reason}"]), *files]

    def _unwritable_files(self) -> Iterator[str]:
        for option, path in self._files.items():
            folder = path.resolve().parent
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    pass
            except OSError as error:
                yield f"{option} {path}: cannot write to {folder} ({reason_of(error)}). Choose another place."

    def _space_problems(self, needed_bytes: Mapping[str, int]) -> Iterator[str]:
        folders = {"--save_dir": self.save_dir, **{o: path.resolve().parent for o, path in self._files.items()}}
        options_of: dict[int, list[str]] = {}
        for option in needed_bytes:
            options_of.setdefault(folders[option].stat().st_dev, []).append(option)
        for options in options_of.values():
            needed, folder = sum(needed_bytes[option] for option in options), folders[options[0]]
            free = shutil.disk_usage(folder).free
            if free < needed:
                yield (
                    f"{' and '.join(options)} need {format_bytes(needed)} in {folder}, {format_bytes(free)} is free. "
                    "Free some space, or choose another place."
                )


def publish_model(folder: Path) -> None:
    """Move the checked model of `folder`/final.partial into `folder`; may be repeated after a kill. Raises OSError.

    The older model is removed while the new one is complete in final.partial, which is then renamed to final.moving.
    """
    export, moving = folder / EXPORT, folder / MOVING
    if not (moving / MODEL_MARK).is_file():
        assert (export / MODEL_MARK).is_file(), "only a checked model gets its place"
        sync_tree(export)
        (folder / MODEL_MARK).unlink(missing_ok=True)
        answers = [path for name in _ANSWERS if (path := folder / name).exists()]
        for path in (*(path for pattern in _OLDER_MODEL for path in sorted(folder.glob(pattern))), *answers):
            path.unlink()
        if answers:
            logger.info("predictions of the older model are removed: %s", ", ".join(map(str, answers)))
        sync_to_disk(folder)  # an older file that came back after a power cut would count as a file of the new model
        export.rename(moving)
    mark, folders = moving / MODEL_MARK, {folder}
    for path in sorted(path for path in moving.rglob("*") if path != mark):
        place = folder / path.relative_to(moving)
        if path.is_dir():
            place.mkdir(exist_ok=True)
            folders.add(place)
        else:
            path.replace(place)
    for inner in folders:
        sync_to_disk(inner)
    mark.replace(folder / MODEL_MARK)
    sync_to_disk(folder)
    shutil.rmtree(moving)


def _remove_results(folder: Path) -> None:
    """Remove `folder`, first the files that mark it as complete; links are removed, not followed. Raises OSError."""
    inner = [path for path in folder.iterdir() if CHECKPOINT_NAME.fullmatch(path.name) and not path.is_symlink()]
    for mark in (folder / MODEL_MARK, folder / ADAPTER_MARK, *(path / MANIFEST_FILE for path in inner)):
        mark.unlink(missing_ok=True)
    shutil.rmtree(folder)


def _refuse(problems: Iterable[str]) -> None:
    """Raise CheckpointError with all `problems`, if there are any."""
    if text := "\n".join(problems):
        raise CheckpointError(text)
