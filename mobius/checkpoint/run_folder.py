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
import fcntl
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from mobius.atomic_files import atomic_write, publish_folder, remove_folder, sync_to_disk, sync_tree
from mobius.checkpoint.folders import NAME
from mobius.checkpoint.manifest import MANIFEST_FILE
from mobius.errors import CheckpointError, listed, reason_of
from mobius.regular_files import read_json
from mobius.units import format_bytes

logger = logging.getLogger(__name__)

OPTIONS_FILE: Final = "training_args.yaml"
PLAN_FILE: Final = "plan.json"
SETTINGS: Final = {OPTIONS_FILE, PLAN_FILE}
"""Files that every folder of a run begins with."""
_MODEL_MARK: Final = "config.json"
_ADAPTER_MARK: Final = "adapter_config.json"
"""Mark of a committed adapter: a config.json would make transformers look for a model."""
_REPLACES_MARK: Final = ".replaces_older"
"""File of a run that has moved older results aside."""
_REMOVED_MARK: Final = ".removed"
"""First file to be written to a folder that is being removed, and the last one to go."""
_EXPORT: Final = "final.partial"
_MOVING: Final = "final.moving"
"""Name of the checked model once no file of an older one is left in the folder."""
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
        self.save_dir = _resolved("--save_dir", save_dir)
        if not self.save_dir.name:
            raise CheckpointError("--save_dir / is the root of all folders. Use a folder inside it.")
        self._partial, self._replaced = _folders_beside(self.save_dir)
        self._overwrite, self._resumes, self._files = overwrite, resumes, files
        self.is_renamed_at_commit = not (keeps_checkpoints or resumes)
        """Whether `training_folder` gets another name with the result."""
        self.training_folder = self._partial if self.is_renamed_at_commit else self.save_dir
        """Place of the run's files from the first step on, known on every rank from the start."""
        self.export_folder = self._partial if self.is_renamed_at_commit else self.save_dir / _EXPORT
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
                    _refuse([*self._folder_problems(), *self._file_problems()])
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
        mark = self.save_dir / _REPLACES_MARK
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
        if self._lock is None or _is_still(self.folder, self._lock):
            return
        with self._explained("The folder was removed while the run was at it, and cannot be made anew."):
            self.folder.mkdir(parents=True, exist_ok=True)
        older, self._lock = self._lock, self._locked(self.folder)
        os.close(older)
        if self._has_begun and self._has_older:
            (self.folder / _REPLACES_MARK).touch()
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
        mark, had_older = self._partial / _REPLACES_MARK, self.save_dir.exists() and not _is_empty(self.save_dir)
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
        if (descriptor := _try_lock(folder)) is None:
            raise CheckpointError(
                f"--save_dir {self.save_dir}: another run is writing to {folder}. Choose another folder, or wait."
            )
        return descriptor

    def _folder_problems(self) -> list[str]:
        folder, checkpoints = self.save_dir, checkpoints_in(self.save_dir)
        if (self._resumes and checkpoints) or not (self._resumes or folder.exists()):
            return []
        if self._resumes:
            problem = "holds no checkpoint to go on from. Give the one that has it, or start without resuming."
        elif not folder.is_dir():
            problem = "is a file. Choose another name."
        elif folder.is_mount():  # cannot be renamed; in a container this is the usual mistake
            problem = "is a mount point and cannot be replaced as a whole. Use a folder inside it."
        elif Path.cwd().is_relative_to(folder):
            problem = "is the current folder or contains it. Use a folder inside the current one."
        elif _is_empty(folder) or (self._overwrite and has_results(folder)):
            return []
        elif checkpoints:
            also = ", and a complete model" if has_model(folder) else ""
            problem = f"holds the checkpoints of an earlier run{also}. The newest is {checkpoints[0]}. "
            problem += _next_steps_hint(folder)
        elif not self._overwrite:
            problem = "exists and is not empty. Choose another folder, or add --overwrite_output_dir to replace it."
        else:
            problem = (
                f"holds something other than a saved model ({_shown(folder)}), and --overwrite_output_dir replaces "
                "only saved models. Choose another folder, or empty this one."
            )
        return [f"--save_dir {folder} {problem}"]

    def _file_problems(self) -> Iterator[str]:
        may_be_replaced = self._overwrite or self._resumes
        for option, path in self._files.items():
            resolved = _resolved(option, path)
            if resolved == self.save_dir or path.is_dir():
                yield f"{option} {path} is a folder. Name a file."
            elif path.exists() and not path.is_file():
                yield f"{option} {path} is a device or a pipe. Name a file."
            elif path.exists() and not may_be_replaced and not resolved.is_relative_to(self.save_dir):
                yield f"{option} {path} exists. Choose another name, or add --overwrite_output_dir to replace it."

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


@contextlib.contextmanager
def lock_if_free(save_dir: Path) -> Iterator[bool]:
    """Whether no run is writing to `save_dir`; none can begin within the block. True for one that does not exist."""
    folder = _resolved("--save_dir", save_dir)
    descriptor = _try_lock(folder) if folder.is_dir() else None
    try:
        yield descriptor is not None or not folder.exists()
    finally:
        if descriptor is not None:
            os.close(descriptor)


def has_model(folder: Path) -> bool:
    """Whether `folder` holds a whole model or adapter, also of another origin."""
    has_mark = (folder / _MODEL_MARK).exists() or (folder / _ADAPTER_MARK).exists()
    return has_mark and any(folder.glob("*.safetensors")) and not (folder / _REMOVED_MARK).exists()


def checkpoints_in(folder: Path) -> list[str]:
    """Names of the checkpoints in `folder`, the one that was saved last comes first; only manifests are read.

    Also of those without a final name: their run was killed, or another one of their step took it.
    """
    found, names = [], _names_in(folder)
    for name in () if _REMOVED_MARK in names else names:
        match, mark = NAME.fullmatch(name), folder / name / MANIFEST_FILE
        if match is None or match["ending"] == ".removed":
            continue
        if mark.is_file() and mark.stat().st_size:  # it is empty until all else is written
            found.append((match["ending"] is None, _save_number(mark), int(match["step"]), name))
    return [name for *_, name in sorted(found, reverse=True)]


def has_results(folder: Path) -> bool:
    """Whether `folder` holds what a run was made for: a model, checkpoints, or scores without any training."""
    names = _names_in(folder)
    has_scores = any(name.endswith("_results.json") for name in names) and "train_results.json" not in names
    return _is_worth_keeping(folder) or (has_scores and {*names} >= SETTINGS and _REMOVED_MARK not in names)


def publish_model(folder: Path) -> None:
    """Move the checked model of `folder`/final.partial into `folder`; may be repeated after a kill. Raises OSError.

    The older model goes while the new one is whole in final.partial, which is called final.moving from then on.
    """
    export, moving = folder / _EXPORT, folder / _MOVING
    if not (moving / _MODEL_MARK).is_file():
        assert (export / _MODEL_MARK).is_file(), "only a checked model gets its place"
        sync_tree(export)
        (folder / _MODEL_MARK).unlink(missing_ok=True)
        answers = [path for name in _ANSWERS if (path := folder / name).exists()]
        for path in (*(path for pattern in _OLDER_MODEL for path in sorted(folder.glob(pattern))), *answers):
            path.unlink()
        if answers:
            logger.info("answers of the model before are removed: %s", ", ".join(map(str, answers)))
        sync_to_disk(folder)  # an older file that came back after a loss of power would be taken for one of the model
        export.rename(moving)
    mark, folders = moving / _MODEL_MARK, {folder}
    for path in sorted(path for path in moving.rglob("*") if path != mark):
        place = folder / path.relative_to(moving)
        if path.is_dir():
            place.mkdir(exist_ok=True)
            folders.add(place)
        else:
            path.replace(place)
    for inner in folders:
        sync_to_disk(inner)
    mark.replace(folder / _MODEL_MARK)
    sync_to_disk(folder)
    shutil.rmtree(moving)


def _recover_export(folder: Path) -> bool:
    """Finish or remove the export of a killed run; True if a model came out of it."""
    export, moving = folder / _EXPORT, folder / _MOVING
    if (export / _MODEL_MARK).is_file() or (moving / _MODEL_MARK).is_file():
        publish_model(folder)
        return True
    was_moved = moving.is_dir()  # config.json was the last one: nothing but folders is left
    for path in filter(Path.is_dir, (export, moving)):
        shutil.rmtree(path)
    return was_moved and (folder / _MODEL_MARK).is_file()


def _recover(save_dir: Path, *, resumes: bool) -> list[str]:
    """Do what the module's table says; returns what the user has to decide. The caller holds the locks.

    Raises OSError.
    """
    (partial, replaced), given = _folders_beside(save_dir), f"--save_dir {save_dir}"
    problems, has_found_model = [], _recover_export(save_dir)
    _recover_named(save_dir, resumes=resumes)
    if not save_dir.exists() or _is_empty(save_dir):
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
            problems.append(f"{found} {_next_steps_hint(save_dir)}")
    for folder in (partial, replaced):
        if _is_worth_keeping(folder) or (folder == replaced and has_results(folder)):
            checkpoints = checkpoints_in(folder)
            others = f"checkpoints, the newest {checkpoints[0]}" if checkpoints else "results"
            held = "a complete model" if has_model(folder) else others
            problems.append(
                f"{given}: {folder} holds {held}, which an interrupted run has left there. Rename or remove it, or "
                "choose another folder."
            )
        elif folder.exists() and not _is_incomplete(folder):
            problems.append(
                f"{given}: {folder} holds something other than results ({_shown(folder)}). Rename it, or choose "
                "another folder."
            )
    if not problems and replaced.exists():
        _remove_results(replaced)
    return problems


def _recover_named(save_dir: Path, *, resumes: bool) -> None:
    """Remove what a complete `save_dir` replaces, or `save_dir` itself if its run came to nothing."""
    (partial, replaced), mark = _folders_beside(save_dir), save_dir / _REPLACES_MARK
    if _is_worth_keeping(save_dir) and mark.exists():
        if has_results(replaced):
            logger.warning("The older results in %s, which those in %s replace, are removed.", replaced, save_dir)
            _remove_results(replaced)
        mark.unlink()
    is_fixed = resumes or save_dir.is_mount() or Path.cwd().is_relative_to(save_dir)
    is_free = not partial.exists() or (_is_incomplete(partial) and not _is_worth_keeping(partial))
    came_to_nothing = {*_names_in(save_dir)} >= SETTINGS and not has_results(save_dir)
    if came_to_nothing and is_free and not is_fixed and _is_all_left_behind(save_dir):
        logger.warning("%s is removed: a run ended there before its first checkpoint.", save_dir)
        if partial.exists():
            _remove_results(partial)
        save_dir.rename(partial)  # `prepare` removes it there


def _remove_results(folder: Path) -> None:
    """Remove `folder`, marked, so that a kill leaves nothing that looks whole or like somebody else's.

    Raises OSError.
    """
    (folder / _REMOVED_MARK).touch()
    remove_folder(folder, last=_REMOVED_MARK)


def _next_steps_hint(folder: Path) -> str:
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


def _folders_beside(save_dir: Path) -> tuple[Path, Path]:
    """Place of a run's files before it has its name, and that of older results while they are replaced."""
    return save_dir.with_name(f"{save_dir.name}.partial"), save_dir.with_name(f"{save_dir.name}.replaced")


def _names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not _names_in(folder)


def _shown(folder: Path) -> str:
    """A few of the names in `folder`, for a message."""
    return listed(_names_in(folder) or ["a file"])


def _is_worth_keeping(folder: Path) -> bool:
    """Whether there is a whole model or a checkpoint in `folder`, which nobody but the user may give up.

    A link to a durable step counts, too, wherever it leads: its disk may be missing now only.
    """
    has_link = any(NAME.fullmatch(name) and (folder / name).is_symlink() for name in _names_in(folder))
    return has_model(folder) or has_link or bool(checkpoints_in(folder))


def _is_incomplete(folder: Path) -> bool:
    """Whether `folder` is what a kill leaves of a run's folder while it is made, or removed."""
    return not {OPTIONS_FILE, _REMOVED_MARK}.isdisjoint(_names_in(folder)) or _is_all_left_behind(folder)


def _is_all_left_behind(folder: Path) -> bool:
    """Whether `folder` holds only what a run writes before its first result."""
    return folder.is_dir() and all(map(_is_left_behind, folder.iterdir()))


def _is_left_behind(path: Path) -> bool:
    if path.is_symlink():
        return False
    if path.is_dir() and all(inner.is_dir() for inner in path.rglob("*")):
        return True  # made in advance for files of the user's choice
    return _LEFT_BEHIND.fullmatch(path.name) is not None


def _save_number(mark: Path) -> int:
    """Number of a checkpoint among all that its run saved; 0 if its manifest has none."""
    with contextlib.suppress(CheckpointError):
        contents = read_json(mark)
        number = contents.get("save_number") if isinstance(contents, dict) else None
        return number if type(number) is int else 0
    return 0


def _resolved(option: str, path: Path) -> Path:
    """`path` without links in it. Raises CheckpointError if they lead in a circle."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{option} {path} is a link that leads back to itself. Choose another name.") from error


def _try_lock(folder: Path) -> int | None:
    """Descriptor that holds the lock of `folder` until it is closed; None if somebody else has it or replaced it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_still(folder, descriptor):
            return descriptor
    os.close(descriptor)
    return None


def _is_still(folder: Path, descriptor: int) -> bool:
    """Whether `folder` is the one that was opened as `descriptor`."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False


def _refuse(problems: Iterable[str]) -> None:
    """Raise CheckpointError with all `problems`, if there are any."""
    if text := "\n".join(problems):
        raise CheckpointError(text)
