"""Owns when bytes become visible under their final names: a results folder and single files appear whole or not at all.

A run that saves its model once, at the end:

    prepare   save_ckpt (old, if any)          save_ckpt.partial (made, locked)
    a run     save_ckpt (old, if any)          save_ckpt.partial <- every file of the run, config.json as the last
    commit    save_ckpt -> save_ckpt.replaced  save_ckpt.partial -> save_ckpt   then save_ckpt.replaced is removed

A run that keeps checkpoints, or goes on from one of its own folder:

    prepare   save_ckpt (old, if any)          save_ckpt.partial (made, locked)
    begin     save_ckpt -> save_ckpt.replaced  save_ckpt.partial -> save_ckpt   (resumed: its files move into save_ckpt)
    a run     save_ckpt <- logs, and each checkpoint-<step> when it is whole
    `remove_older_results`, when there is a checkpoint or the model:                   save_ckpt.replaced is removed
    commit    save_ckpt/final.partial -> save_ckpt, file by file, config.json as the last (run_folder/final_weights.py)

A process can be killed between any two of these; the next run's `prepare` settles what it finds, as the table in
run_folder/recovery.py says.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from mobius.atomic_files import sync_to_disk
from mobius.checkpoint import final_weights, recovery
from mobius.checkpoint.folder_contents import (
    REPLACES_MARK,
    SETTINGS,
    checkpoints_in,
    has_model,
    has_results,
    is_empty,
    shown,
)
from mobius.errors import CheckpointError, reason_of
from mobius.units import format_bytes

logger = logging.getLogger(__name__)


class OutputFolder:
    """The folder `--save_dir` of one run, and the files that are saved beside it.

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

        `keeps_checkpoints`: the run saves as it goes. `resumes`: it goes on from a checkpoint in `save_dir` itself,
        whose other checkpoints and logs stay, and whose single files may be replaced. Raises CheckpointError for what
        cannot be the name of a folder.
        """
        self.save_dir = _resolved("--save_dir", save_dir)
        if not self.save_dir.name:
            raise CheckpointError("--save_dir / is the root of all folders. Use a folder inside it.")
        self.partial = self.save_dir.with_name(f"{self.save_dir.name}.partial")
        self._replaced = self.save_dir.with_name(f"{self.save_dir.name}.replaced")
        self._overwrite, self._resumes = overwrite, resumes
        self._is_in_place = keeps_checkpoints or resumes
        self._has_begun = self._has_older = False
        self._files = files
        self._locks: dict[Path, int] = {}

    @property
    def folder(self) -> Path:
        """Where the files of the run are now, on the rank that prepared it."""
        return self.save_dir if self._has_begun else self.partial

    @property
    def training_folder(self) -> Path:
        """Where the files of the run are from the first step on, known on every rank from the start."""
        return self.save_dir if self._is_in_place else self.partial

    @property
    def export_folder(self) -> Path:
        """Where the model is written and checked after the last step, on every rank."""
        return self.save_dir / final_weights.EXPORT_NAME if self._is_in_place else self.partial

    @property
    def is_renamed_at_commit(self) -> bool:
        """Whether `training_folder` gets another name with the result."""
        return not self._is_in_place

    @property
    def older_results(self) -> Path | None:
        """Where the results are now that this run is to replace, if there are any; None but on the first rank.

        They were in `save_dir` when the run was prepared, and its own are not complete.
        """
        older = self._replaced if self._has_begun else self.save_dir
        return older if self._has_older and has_results(older) else None

    @property
    def older_results_message(self) -> str | None:
        """Sentence about `older_results` for the end of a run that failed."""
        older = self.older_results
        if older is None:
            return None
        if older == self.save_dir:
            return f"The results that were to be replaced are in {older}, as they were."
        return f"The results that were to be replaced are in {older}; the next start puts them back."

    def path_in_folder(self, path: Path) -> Path:
        """Return where to write what the user wants at `path`: inside `folder` if `path` is inside `save_dir`."""
        resolved = path.resolve()
        if resolved.is_relative_to(self.save_dir):
            return self.folder / resolved.relative_to(self.save_dir)
        return resolved

    def prepare(self, needed_bytes: Mapping[str, int]) -> None:
        """Make `partial`, or say before training what would make saving fail after it; raises CheckpointError.

        `needed_bytes` maps options (`--save_dir` and those of `files`) to the bytes that will be written there. What a
        crashed run left is removed if it is torn, and kept or given its name if it is complete. From here on until the
        process ends, or `close`, no other run can use `save_dir`.
        """
        try:
            self._recover()
            _refuse([*self._folder_problems(), *self._file_problems()])
            self._claim()
        except CheckpointError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise CheckpointError(
                f"--save_dir {self.save_dir}: cannot write there ({reason_of(error)}). Choose another folder."
            ) from error
        try:
            _refuse(self._unwritable_files())
            _refuse(self._space_problems(needed_bytes))
        except CheckpointError:
            self.discard()
            raise
        self._has_older = not self._resumes and has_results(self.save_dir)

    def discard(self) -> None:
        """Remove `partial`, if this process made it and has not begun; an older `save_dir` stays as it was."""
        if self.partial in self._locks:
            shutil.rmtree(self.partial)
            self.close()

    def begin(self) -> None:
        """Make `save_dir` the folder of the run, just before its first step; nothing for a run that saves at the end.

        Raises CheckpointError, with everything as it was before, if that is not possible (any more).
        """
        if not self._is_in_place:
            return
        _refuse(self._folder_problems())
        try:
            if self._resumes:
                final_weights.move_files(self.partial, self.save_dir, last=SETTINGS[0])
                shutil.rmtree(self.partial)
            else:
                self._take_the_name()
        except OSError as error:
            raise CheckpointError(
                f"--save_dir {self.save_dir}: {error}. Nothing is trained yet. Choose another folder."
            ) from error
        self._has_begun = True
        lock = self._locks.pop(self.partial)
        if self._resumes:
            os.close(lock)
        else:
            self._locks[self.save_dir] = lock  # it goes with the folder, whatever its name

    def remove_older_results(self) -> None:
        """Remove the older results that this run replaces: its first checkpoint or its model is complete.

        Fast if there are none. What cannot be removed is told, and ends nothing.
        """
        self._has_older = False
        mark = self.save_dir / REPLACES_MARK
        if not mark.exists():
            return
        try:
            if self._replaced.exists():
                recovery.remove_results(self._replaced)
            mark.unlink()
        except OSError as error:
            logger.warning("the older results in %s cannot be removed (%s)", self._replaced, reason_of(error))

    def recreate_if_removed(self) -> bool:
        """Whether somebody has removed the folder since the run is at it; it is there and locked again then.

        Costs two looks at the disk. Raises CheckpointError where another run is in its place, or it cannot be made.
        """
        folder = self.folder
        if (lock := self._locks.get(folder)) is None or _is_still(folder, lock):
            return False
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"--save_dir {self.save_dir} was removed while the run was at it, and {folder} cannot be made anew "
                f"({error})."
            ) from error
        self._locks[folder] = self._lock_folder(folder)
        os.close(lock)
        if self._has_begun and self._has_older:
            (folder / REPLACES_MARK).touch()
        logger.warning(
            "%s was removed while the run was at it, and is made anew: its settings, its logs and what is still to "
            "come are there; checkpoints before this are lost",
            folder,
        )
        return True

    def begin_export(self) -> None:
        """Make `export_folder` for the model, before any rank writes there; raises CheckpointError."""
        if self._is_in_place:
            try:
                final_weights.make_export_folder(self.save_dir)
            except OSError as error:
                raise CheckpointError(f"--save_dir {self.save_dir}: cannot write there ({error}).") from error

    def commit(self) -> None:
        """Give the model in `export_folder`, synced to the disk, its final name; older results are removed after that.

        Raises CheckpointError, with the model left where it is, if the name has been taken in the meantime. A run that
        keeps checkpoints stays the owner of `save_dir` until `close`.
        """
        if self._is_in_place:
            try:
                final_weights.publish_model(self.save_dir)
            except OSError as error:
                raise CheckpointError(
                    f"--save_dir {self.save_dir}: {error}. The model is complete in there; its files get their places "
                    "when a run is started with the same --save_dir."
                ) from error
            self.remove_older_results()
            return
        left = f"The results of this run are in {self.partial}."
        if problems := self._folder_problems():
            _refuse([*problems, left])
        try:
            final_weights.sync_tree(self.partial)
            self._swap()
        except OSError as error:
            raise CheckpointError(f"--save_dir {self.save_dir}: {error}. {left}") from error
        self.close()

    def close(self) -> None:
        """Let other runs use the folder, as the end of the process does. A second call does nothing."""
        while self._locks:
            os.close(self._locks.popitem()[1])

    def _swap(self) -> None:
        had_older = self.save_dir.exists()
        if had_older:
            self.save_dir.rename(self._replaced)
        try:
            self.partial.rename(self.save_dir)
        except OSError:
            if had_older:
                self._replaced.rename(self.save_dir)
            raise
        self._has_older = False
        sync_to_disk(self.save_dir.parent)
        if had_older:
            recovery.remove_results(self._replaced)

    def _take_the_name(self) -> None:
        """Rename `partial` to `save_dir`; an older one waits in `.replaced`, and the mark says whose it is."""
        mark, had_older = self.partial / REPLACES_MARK, self.save_dir.exists() and not is_empty(self.save_dir)
        if had_older:
            os.close(self._lock_folder(self.save_dir))  # another run may have come there since `prepare`
            mark.touch()
            final_weights.sync_tree(self.partial)
            self.save_dir.rename(self._replaced)
        try:
            self.partial.rename(self.save_dir)  # takes the place of an empty folder
        except OSError:
            if had_older:
                self._replaced.rename(self.save_dir)
                mark.unlink()
            raise
        sync_to_disk(self.save_dir.parent)

    def _recover(self) -> None:
        """Bring what a killed run left into order; raises CheckpointError where the user has to decide."""
        with contextlib.ExitStack() as held:  # what is under way is nobody else's business
            for folder in (self.partial, self.save_dir):
                if folder.is_dir():
                    held.callback(os.close, self._lock_folder(folder))
            _refuse(recovery.recover_folder(self.save_dir, self.partial, self._replaced, resumes=self._resumes))

    def _folder_problems(self) -> list[str]:
        folder, checkpoints = self.save_dir, checkpoints_in(self.save_dir)
        if self._resumes and not checkpoints:
            problem = "holds no checkpoint to go on from. Give the one that has it, or start without resuming."
        elif not folder.exists():
            return []
        elif not folder.is_dir():
            problem = "is a file. Choose another name."
        elif self._resumes and folder.is_mount():
            problem = (
                "is a mount point, beside which a run's files cannot be made. Mount the folder above it, or go on in "
                f"another --save_dir with --resume_from_checkpoint {folder / checkpoints[0]} instead."
            )
        elif folder.is_mount():  # cannot be renamed; in a container this is the usual mistake
            problem = "is a mount point and cannot be replaced as a whole. Use a folder inside it."
        elif self._resumes:
            return []
        elif Path.cwd().is_relative_to(folder):
            problem = "is the current folder or contains it. Use a folder inside the current one."
        elif is_empty(folder) or (self._overwrite and has_results(folder)):
            return []
        elif checkpoints:
            also = ", and a complete model" if has_model(folder) else ""
            next_steps_hint = recovery.next_steps_hint(folder)
            problem = (
                f"holds the checkpoints of an earlier run{also}. The newest is {checkpoints[0]}. {next_steps_hint}"
            )
        elif not self._overwrite:
            problem = "exists and is not empty. Choose another folder, or add --overwrite_output_dir to replace it."
        else:
            problem = (
                f"holds something other than a saved model ({shown(folder)}), and --overwrite_output_dir replaces "
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

    def _claim(self) -> None:
        """Make an empty `partial` and lock it, and a `save_dir` that is gone on with, while this process lives."""
        self.save_dir.parent.mkdir(parents=True, exist_ok=True)
        if self.partial.exists():
            stale = self._lock_folder(self.partial)
            recovery.remove_results(self.partial)
            os.close(stale)
        if self._resumes:
            self._locks[self.save_dir] = self._lock_folder(self.save_dir)
            with tempfile.TemporaryFile(dir=self.save_dir):
                pass
        with contextlib.suppress(FileExistsError):  # two runs start at the same moment: the lock decides
            self.partial.mkdir()
        self._locks[self.partial] = self._lock_folder(self.partial)

    def _lock_folder(self, folder: Path) -> int:
        if (descriptor := _locked(folder)) is None:
            raise CheckpointError(
                f"--save_dir {self.save_dir}: another run is writing to {folder}. Choose another folder, or wait."
            )
        return descriptor

    def _unwritable_files(self) -> Iterator[str]:
        for option, path in self._files.items():
            folder = self.path_in_folder(path).parent
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    pass
            except OSError as error:
                yield f"{option} {path}: cannot write to {folder} ({reason_of(error)}). Choose another place."

    def _space_problems(self, needed_bytes: Mapping[str, int]) -> Iterator[str]:
        folders = {option: self.path_in_folder(path).parent for option, path in self._files.items()}
        folders["--save_dir"] = self.save_dir.parent
        options_of: dict[int, list[str]] = {}
        for option in needed_bytes:
            options_of.setdefault(folders[option].stat().st_dev, []).append(option)
        for options in options_of.values():
            needed, folder = sum(needed_bytes[option] for option in options), folders[options[0]]
            free = shutil.disk_usage(folder).free
            if free < needed:
                yield (
                    f"{' and '.join(options)} need {format_bytes(needed)} in {folder}, {format_bytes(free)} is "
                    "free. Free "
                    "some space, or choose another place."
                )


@contextlib.contextmanager
def lock_if_free(save_dir: Path) -> Iterator[bool]:
    """Tell whether no run is writing to `save_dir`, and let none begin within; True for one that does not exist."""
    folder = _resolved("--save_dir", save_dir)
    descriptor = _locked(folder) if folder.is_dir() else None
    try:
        yield descriptor is not None or not folder.exists()
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _resolved(option: str, path: Path) -> Path:
    """`path` without links in it. Raises CheckpointError where they lead in a circle."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{option} {path} is a link that leads back to itself. Choose another name.") from error


def _locked(folder: Path) -> int | None:
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
