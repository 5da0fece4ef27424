"""The folder `--save_dir` of a run: who may use it, when its files get their names, and what a killed run leaves there.

    prepare   save_ckpt (older, if any)         save_ckpt.partial (made and locked; the settings are written there)
    begin     save_ckpt -> save_ckpt.replaced   save_ckpt.partial -> save_ckpt
    training  save_ckpt <- logs, and each checkpoint-<step> once it is whole (folders.py)
    commit    save_ckpt/final.partial -> save_ckpt, file by file, config.json last (`publish_model`)

The first checkpoint or the model removes the older folder. A run that saves no checkpoints begins at its commit, and
checks its model in save_ckpt.partial. A run that resumes from a checkpoint of the folder locks it and works in place.
A process may be killed between any two changes; the next `prepare` recovers:

    a model in final.partial        gets its place; the run is refused with that message, unless it resumes
    save_ckpt, marked and complete  .replaced is removed: the run that moved it aside was asked to replace it
    save_ckpt with logs at most     is removed, and .replaced gets its name back
    no save_ckpt                    .partial with a model gets the name, and the run is refused; else .replaced gets it
    complete .partial or .replaced  the run is refused with their paths
    torn .partial or .replaced      is removed; a folder that no run has left is never touched

A folder is complete if it has a whole model or a checkpoint (save_ckpt and .replaced also: scores of a run that does
not train). A model is whole if there are weights and config.json, which is written last and removed first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from mobius.atomic_files import atomic_write, publish_folder, remove_folder, sync_to_disk, sync_tree
from mobius.config.earlier_results import (
    EXPORT,
    MODEL_MARK,
    MOVING,
    OPTIONS_FILE,
    REMOVED_MARK,
    REPLACES_MARK,
    SETTINGS,
    checkpoints_in,
    file_problems,
    folder_problem,
    folders_beside,
    has_model,
    has_results,
    is_empty,
    is_still,
    is_worth_keeping,
    names_in,
    next_steps_hint,
    resolved,
    shown_names,
    try_lock,
)
from mobius.errors import CheckpointError, reason_of
from mobius.units import format_bytes

logger = logging.getLogger(__name__)

_OLDER_MODEL: Final = (
    *("model*.safetensors", "model.safetensors.index.json"),
    *("adapter_config.json", "adapter_model.safetensors", "base_model.json"),
)
_ANSWERS: Final = ("generated_predictions.jsonl", "predict_results.json")
"""Files of `--do_predict`, which are written after the model that answered."""
_LEFT_BEHIND: Final = re.compile(
    r"(training_args\.yaml|plan\.json|\.replaces_older"
    r"|events\.jsonl|metrics\.jsonl|trainer_log\.jsonl|trainer_state\.json|\w+_results\.json"
    r"|training_loss\.png|README\.md|trace(\.rank\d+)?\.json|timeline\.png)(?:(?:\.\d+)?\.partial)?"
    r"|profile|runs|checkpoint-\d+\.(partial|removed|replaced)|final\.(partial|moving)"
)
"""Files and folders in the folder of a run before it has a checkpoint or a model."""


class OutputFolder:
    """The folder `--save_dir` of one run, and the files that are saved next to it.

    Every rank may make one and ask for paths; only the first rank calls what changes the disk.
    """

    def __init__(
        self,
        save_dir: Path,
        *,
        overwrite: bool,
        files: Mapping[str, Path],
        keeps_checkpoints: bool = False,
        resumes: bool = False,
    ) -> None:
        """`files` maps an option as typed (`--save_params`) to the single file it names; those are written apart.

        `keeps_checkpoints`: the run saves checkpoints. `resumes`: it goes on from a checkpoint in `save_dir` itself,
        whose other checkpoints and logs stay, and whose single files may be replaced. Raises CheckpointError for what
        cannot be the name of a folder.
        """
        self.save_dir = resolved("--save_dir", save_dir)
        if not self.save_dir.name:
            raise CheckpointError("--save_dir / is the root of all folders. Use a folder inside it.")
        self._partial, self._replaced = folders_beside(self.save_dir)
        self._overwrite, self._resumes, self._files = overwrite, resumes, files
        self.is_renamed_at_commit = not (keeps_checkpoints or resumes)
        """Whether `training_folder` gets another name with the result."""
        self.training_folder = self._partial if self.is_renamed_at_commit else self.save_dir
        """Place of the run's files from the first step on, known on every rank from the start."""
        self.export_folder = self._partial if self.is_renamed_at_commit else self.save_dir / EXPORT
        """Place where the model is written and checked after the last step, on every rank."""
        self._has_begun = self._has_older = False
        self._settings: Mapping[str, str] = {}
        self._lock: int | None = None
        """Descriptor that holds the lock of `folder`."""

    @property
    def folder(self) -> Path:
        """Place of the run's files now, on the rank that prepared it; until `begin` it is right on every rank."""
        return self.save_dir if self._resumes or self._has_begun else self._partial

    @property
    def older_results(self) -> Path | None:
        """Place of the results that this run is to replace, until its own are complete; None on all other ranks."""
        older = self._replaced if self._has_begun else self.save_dir
        return older if self._has_older and has_results(older) else None

    @property
    def older_results_message(self) -> str | None:
        """Sentence about `older_results` for the end of a run that failed."""
        if (older := self.older_results) is None:
            return None
        now = "as they were" if older == self.save_dir else "and the next start puts them back"
        return f"The results that were to be replaced are in {older}, {now}."

    def prepare(self, needed_bytes: Mapping[str, int]) -> None:
        """Recover what a killed run left, then make and lock `folder`. Raises CheckpointError.

        Finds what would make saving fail after the training. `needed_bytes` maps options (`--save_dir` and those of
        `files`) to the bytes that will be written there. Until `close` or the end of the process no other run can use
        `save_dir`.
        """
        try:
            with self._explained("Choose another folder."):
                with contextlib.ExitStack() as held:
                    for folder in (self._partial, self.save_dir):
                        if folder.is_dir():
                            held.callback(os.close, self._locked(folder))
                    _refuse(_recover(self.save_dir, resumes=self._resumes))
                    may_replace = self._overwrite or self._resumes
                    files = file_problems(self._files, self.save_dir, may_replace=may_replace)
                    _refuse([*self._folder_problems(), *files])
                    if self._partial.exists():
                        _remove_results(self._partial)
                if not self._resumes:
                    self._partial.parent.mkdir(parents=True, exist_ok=True)
                    with contextlib.suppress(FileExistsError):  # two runs start at the same moment: the lock decides
                        self._partial.mkdir()
                self._lock = self._locked(self.folder)
                with tempfile.TemporaryFile(dir=self.folder):
                    pass
        except CheckpointError:
            self.close()
            raise
        try:
            _refuse([*self._unwritable_files()] or self._space_problems(needed_bytes))
        except CheckpointError:
            self.discard()
            raise
        self._has_older = not self._resumes and has_results(self.save_dir)

    def write_settings(self, settings: Mapping[str, str]) -> None:
        """Write texts by file name into `folder`; those of a run that resumes appear in `begin`.

        Raises CheckpointError.
        """
        self._settings = settings
        for name, text in () if self._resumes and not self._has_begun else settings.items():
            advice = "Free some space, or choose another folder."
            with self._explained(advice), atomic_write(self.folder / name) as temporary:
                temporary.write_text(text, encoding="utf-8")

    def discard(self) -> None:
        """Remove what `prepare` made, unless the run has begun; an older `save_dir` stays as it was."""
        if self._lock is not None and not self._has_begun:
            if not self._resumes:
                _remove_results(self._partial)
            self.close()

    def begin(self) -> None:
        """Make `save_dir` the folder of the run, just before its first step; nothing for a run that saves at the end.

        Raises CheckpointError, with everything as it was before, if that is no longer possible.
        """
        if self._resumes:
            self._has_begun = True
            self.write_settings(self._settings)
        elif not self.is_renamed_at_commit:
            self._take_name("Nothing is trained yet.")

    def remove_older_results(self) -> None:
        """Remove the older results that this run replaces: its first checkpoint or its model is complete.

        Fast if there are none. Logs a warning for what cannot be removed.
        """
        self._has_older = False
        mark = self.save_dir / REPLACES_MARK
        if not mark.exists():
            return
        try:
            if self._replaced.exists():
                _remove_results(self._replaced)
            mark.unlink()
        except OSError as error:
            logger.warning("the older results in %s cannot be removed (%s)", self._replaced, reason_of(error))

    def recreate_if_removed(self) -> None:
        """Make the folder again, with its lock and its settings, if somebody has removed it during the run.

        Costs two looks at the disk. Raises CheckpointError if another run is in its place, or it cannot be made.
        """
        if self._lock is None or is_still(self.folder, self._lock):
            return
        with self._explained("The folder was removed while the run was at it, and cannot be made anew."):
            self.folder.mkdir(parents=True, exist_ok=True)
        older, self._lock = self._lock, self._locked(self.folder)
        os.close(older)
        if self._has_begun and self._has_older:
            (self.folder / REPLACES_MARK).touch()
        logger.warning(
            "%s was removed while the run was at it, and is made anew: its settings, its logs and what is still to "
            "come are there; checkpoints before this are lost",
            self.folder,
        )
        self.write_settings(self._settings)

    def begin_export(self) -> None:
        """Make `export_folder` for the model, before any rank writes there. Raises CheckpointError."""
        if self.is_renamed_at_commit:
            return
        with self._explained("Free some space there."):
            shutil.rmtree(self.export_folder, ignore_errors=True)
            self.export_folder.mkdir()

    def commit(self) -> None:
        """Give the model in `export_folder` its final name, synced to the disk, then remove older results.

        A run that keeps checkpoints owns `save_dir` until `close`. Raises CheckpointError, with the model left where
        it is, if another run has taken the name.
        """
        if self.is_renamed_at_commit:
            self._take_name(f"The results of this run are in {self._partial}.")
        else:
            advice = "The model is complete in there; the next start with the same --save_dir moves its files to their "
            with self._explained(advice + "places."):
                publish_model(self.save_dir)
                for path in self.save_dir.glob("*.partial"):  # of a start that was killed in the middle of one
                    if path.is_file() and _LEFT_BEHIND.fullmatch(path.name):
                        path.unlink()
        self.remove_older_results()
        if self.is_renamed_at_commit:
            self.close()

    def close(self) -> None:
        """Let other runs use the folder, as the end of the process does. A second call does nothing."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_name(self, advice: str) -> None:
        """Rename the partial folder to `save_dir`; an older one waits in `.replaced`, and the mark says whose it is."""
        if problems := self._folder_problems():
            _refuse([*problems, advice])
        mark, had_older = self._partial / REPLACES_MARK, self.save_dir.exists() and not is_empty(self.save_dir)
        with self._explained(advice):
            if had_older:
                os.close(self._locked(self.save_dir))  # another run may have come there since `prepare`
                mark.touch()
            sync_tree(self._partial)
            try:
                publish_folder(self._partial, self.save_dir, aside=self._replaced if had_older else None)
            except OSError:
                mark.unlink(missing_ok=True)
                raise
        self._has_begun = True

    @contextlib.contextmanager
    def _explained(self, advice: str) -> Iterator[None]:
        """Raise CheckpointError with the option, the reason and `advice` for an error of the file system."""
        try:
            yield
        except OSError as error:
            reason = ": ".join(map(str, filter(None, (reason_of(error), error.filename))))
            raise CheckpointError(f"--save_dir {self.save_dir}: cannot write there ({reason}). {advice}") from error

    def _locked(self, folder: Path) -> int:
        if (descriptor := try_lock(folder)) is None:
            raise CheckpointError(
                f"--save_dir {self.save_dir}: another run is writing to {folder}. Choose another folder, or wait."
            )
        return descriptor

    def _folder_problems(self) -> list[str]:
        if not self._resumes:
            problem = folder_problem(self.save_dir, overwrite=self._overwrite)
        elif checkpoints_in(self.save_dir):
            problem = None
        else:
            problem = "holds no checkpoint to go on from. Give the one that has it, or start without resuming."
        return [] if problem is None else [f"--save_dir {self.save_dir} {problem}"]

    def _parent_folder(self, path: Path) -> Path:
        """The folder to write the user's `path` to now: inside `folder` if `path` is inside `save_dir`."""
        parent = path.resolve().parent
        return self.folder / parent.relative_to(self.save_dir) if parent.is_relative_to(self.save_dir) else parent

    def _unwritable_files(self) -> Iterator[str]:
        for option, path in self._files.items():
            folder = self._parent_folder(path)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    pass
            except OSError as error:
                yield f"{option} {path}: cannot write to {folder} ({reason_of(error)}). Choose another place."

    def _space_problems(self, needed_bytes: Mapping[str, int]) -> Iterator[str]:
        folders = {"--save_dir": self.folder, **{o: self._parent_folder(path) for o, path in self._files.items()}}
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

    The older model goes while the new one is whole in final.partial, which is called final.moving from then on.
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
            logger.info("answers of the model before are removed: %s", ", ".join(map(str, answers)))
        sync_to_disk(folder)  # an older file that came back after a loss of power would be taken for one of the model
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


def _recover_export(folder: Path) -> bool:
    """Finish or remove the export of a killed run; True if a model came out of it."""
    export, moving = folder / EXPORT, folder / MOVING
    if (export / MODEL_MARK).is_file() or (moving / MODEL_MARK).is_file():
        publish_model(folder)
        return True
    was_moved = moving.is_dir()  # config.json was the last one: nothing but folders is left
    for path in filter(Path.is_dir, (export, moving)):
        shutil.rmtree(path)
    return was_moved and (folder / MODEL_MARK).is_file()


def _recover(save_dir: Path, *, resumes: bool) -> list[str]:
    """Do what the module's table says; returns what the user has to decide. The caller holds the locks.

    Raises OSError.
    """
    (partial, replaced), given = folders_beside(save_dir), f"--save_dir {save_dir}"
    problems, has_found_model = [], _recover_export(save_dir)
    _recover_named(save_dir, resumes=resumes)
    if not save_dir.exists() or is_empty(save_dir):
        if has_model(partial):
            publish_folder(partial, save_dir)
            _recover_named(save_dir, resumes=resumes)
            has_found_model = True
        elif has_results(replaced):
            logger.warning("An interrupted run had moved %s aside; it is put back.", save_dir)
            replaced.rename(save_dir)
    if has_found_model:
        found = f"{given}: an interrupted run had left a complete, checked model, which is now in {save_dir}."
        if resumes:
            logger.warning("%s", found)
        else:
            problems.append(f"{found} {next_steps_hint(save_dir)}")
    for folder in (partial, replaced):
        if is_worth_keeping(folder) or (folder == replaced and has_results(folder)):
            checkpoints = checkpoints_in(folder)
            others = f"checkpoints, the newest {checkpoints[0]}" if checkpoints else "results"
            held = "a complete model" if has_model(folder) else others
            problems.append(
                f"{given}: {folder} holds {held}, which an interrupted run has left there. Rename or remove it, or "
                "choose another folder."
            )
        elif folder.exists() and not _is_incomplete(folder):
            problems.append(
                f"{given}: {folder} holds something other than results ({shown_names(folder)}). Rename it, or choose "
                "another folder."
            )
    if not problems and replaced.exists():
        _remove_results(replaced)
    return problems


def _recover_named(save_dir: Path, *, resumes: bool) -> None:
    """Remove what a complete `save_dir` replaces, or `save_dir` itself if its run came to nothing."""
    (partial, replaced), mark = folders_beside(save_dir), save_dir / REPLACES_MARK
    if is_worth_keeping(save_dir) and mark.exists():
        if has_results(replaced):
            logger.warning("The older results in %s, which those in %s replace, are removed.", replaced, save_dir)
            _remove_results(replaced)
        mark.unlink()
    is_fixed = resumes or save_dir.is_mount() or Path.cwd().is_relative_to(save_dir)
    is_free = not partial.exists() or (_is_incomplete(partial) and not is_worth_keeping(partial))
    came_to_nothing = {*names_in(save_dir)} >= SETTINGS and not has_results(save_dir)
    if came_to_nothing and is_free and not is_fixed and _is_all_left_behind(save_dir):
        logger.warning("%s is removed: a run ended there before its first checkpoint.", save_dir)
        if partial.exists():
            _remove_results(partial)
        save_dir.rename(partial)  # `prepare` removes it there


def _remove_results(folder: Path) -> None:
    """Remove `folder`, marked, so that a kill leaves nothing that looks whole or like somebody else's.

    Raises OSError.
    """
    (folder / REMOVED_MARK).touch()
    remove_folder(folder, last=REMOVED_MARK)


def _is_incomplete(folder: Path) -> bool:
    """Whether `folder` is what a kill leaves of a run's folder while it is made, or removed."""
    return not {OPTIONS_FILE, REMOVED_MARK}.isdisjoint(names_in(folder)) or _is_all_left_behind(folder)


def _is_all_left_behind(folder: Path) -> bool:
    """Whether `folder` holds only what a run writes before its first result."""
    return folder.is_dir() and all(map(_is_left_behind, folder.iterdir()))


def _is_left_behind(path: Path) -> bool:
    if path.is_symlink():
        return False
    if path.is_dir() and all(inner.is_dir() for inner in path.rglob("*")):
        return True  # made in advance for files of the user's choice
    return _LEFT_BEHIND.fullmatch(path.name) is not None


def _refuse(problems: Iterable[str]) -> None:
    """Raise CheckpointError with all `problems`, if there are any."""
    if text := "\n".join(problems):
        raise CheckpointError(text)
