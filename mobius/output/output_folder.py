"""Owns when bytes become visible under their final names: a results folder and single files appear whole or not at all.

    prepare   save_ckpt (old, if any)          save_ckpt.partial (made, locked)
    a run     save_ckpt (old, if any)          save_ckpt.partial <- every file of the run, config.json as the last
    commit    save_ckpt -> save_ckpt.replaced  save_ckpt.partial -> save_ckpt   then save_ckpt.replaced is removed

A process can be killed between any two of these. A folder is complete if it has weights and config.json, which is the
last file to come (export.py) and the first to go. The next run's `prepare` looks at what it finds before it trains:

    save_ckpt   .partial    .replaced
    -           complete    any         .partial gets its name; the run is refused and told so
    -           none, torn  complete    .replaced gets its name back
    any         complete    any         the run is refused and told where the folders are
    any         any         complete    the same
    any         torn        torn        what is torn is removed; a folder that no run has left is never touched
"""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from mobius.errors import CheckpointError
from mobius.units import bytes_text
from mobius.writing import sync_to_disk

logger = logging.getLogger(__name__)

_RUN_FILES = {"training_args.yaml", "plan.json", "metrics.jsonl", "trace.json", "tokenizer.json"}
"""Files of which a torn folder of a run has at least one, if it has no weights yet."""


class OutputFolder:
    """The folder `--save_dir` of one run, and the files that are saved beside it.

    Every rank may make one and ask for paths; only the first rank calls `prepare` and `commit`.
    """

    def __init__(self, save_dir: Path, *, overwrite: bool, files: Mapping[str, Path]) -> None:
        """`files` maps an option as typed (`--save_params`) to the single file it names; those are written apart."""
        self.save_dir = save_dir.resolve()
        self.partial = self.save_dir.with_name(f"{self.save_dir.name}.partial")
        self._replaced = self.save_dir.with_name(f"{self.save_dir.name}.replaced")
        self._overwrite = overwrite
        self._files = files
        self._lock: int | None = None

    def place(self, path: Path) -> Path:
        """Return where to write what the user wants at `path`: inside `partial` if `path` is inside `save_dir`."""
        resolved = path.resolve()
        if resolved.is_relative_to(self.save_dir):
            return self.partial / resolved.relative_to(self.save_dir)
        return resolved

    def prepare(self, needed_bytes: Mapping[str, int]) -> None:
        """Make `partial`, or say before training what would make saving fail after it; raises CheckpointError.

        `needed_bytes` maps options (`--save_dir` and those of `files`) to the bytes that will be written there. What a
        crashed run left is removed if it is torn, and kept or given its name if it is complete.
        """
        try:
            self._settle_interrupted_commit()
            _refuse([*self._folder_problems(), *self._file_problems()])
            self._claim_partial()
        except OSError as error:
            raise CheckpointError(
                f"--save_dir {self.save_dir}: cannot write there ({error.strerror}). Choose another folder."
            ) from error
        try:
            _refuse(self._unwritable_files())
            _refuse(self._space_problems(needed_bytes))
        except CheckpointError:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove `partial`, if this process made it; an older `save_dir` stays as it was."""
        if self._lock is not None:
            shutil.rmtree(self.partial)
            self._release()

    def commit(self) -> None:
        """Give `partial`, synced to the disk, the name `save_dir`; an older one is removed only after that.

        Raises CheckpointError, with the results left in `partial`, if the name has been taken in the meantime.
        """
        left = f"The results of this run are in {self.partial}."
        if problems := self._folder_problems():
            _refuse([*problems, left])
        try:
            for folder, _, names in os.walk(self.partial):
                for name in names:
                    sync_to_disk(Path(folder, name))
                sync_to_disk(Path(folder))
            self._swap()
        except OSError as error:
            raise CheckpointError(f"--save_dir {self.save_dir}: {error}. {left}") from error
        self._release()

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
        sync_to_disk(self.save_dir.parent)
        if had_older:
            # First: a kill here leaves nothing that looks whole.
            (self._replaced / "config.json").unlink(missing_ok=True)
            shutil.rmtree(self._replaced)

    def _settle_interrupted_commit(self) -> None:
        """Bring what a killed run left into order, as the table above says; raises CheckpointError where it may not."""
        for folder in (self.partial, self.save_dir):  # a commit that is under way is nobody else's business
            if folder.is_dir():
                os.close(self._lock_folder(folder))
        given, problems = f"--save_dir {self.save_dir}:", []
        if not self.save_dir.exists() or _is_empty(self.save_dir):
            if _is_complete(self.partial):
                self.partial.rename(self.save_dir)
                sync_to_disk(self.save_dir.parent)
                problems.append(
                    f"{given} an interrupted run had left a complete, checked model, which now has its name: "
                    f"{self.save_dir}. To train all the same, choose another folder, or replace that model with "
                    "--overwrite_output_dir in a further start."
                )
            elif _is_complete(self._replaced):
                logger.warning("An interrupted run had moved %s aside; it is put back.", self.save_dir)
                self._replaced.rename(self.save_dir)
        for folder in (self.partial, self._replaced):
            if _is_complete(folder):
                problems.append(
                    f"{given} {folder} holds a complete model, which an interrupted run has left there. Rename or "
                    "remove it, or choose another folder."
                )
            elif folder.exists() and not _is_torn(folder):
                problems.append(
                    f"{given} {folder} holds something other than results ({_shown(folder)}). Rename it, or choose "
                    "another folder."
                )
        _refuse(problems)
        if self._replaced.exists():
            shutil.rmtree(self._replaced)

    def _folder_problems(self) -> list[str]:
        folder = self.save_dir
        if not folder.exists():
            return []
        if not folder.is_dir():
            problem = "is a file. Choose another name."
        elif folder.is_mount():  # cannot be renamed; in a container this is the usual mistake
            problem = "is a mount point and cannot be replaced as a whole. Use a folder inside it."
        elif Path.cwd().is_relative_to(folder):
            problem = "is the current folder or contains it. Use a folder inside the current one."
        elif _is_empty(folder) or (self._overwrite and _is_complete(folder)):
            return []
        elif not self._overwrite:
            problem = "exists and is not empty. Choose another folder, or add --overwrite_output_dir to replace it."
        else:
            problem = (
                f"holds something other than a saved model ({_shown(folder)}), and --overwrite_output_dir replaces "
                "only saved models. Choose another folder, or empty this one."
            )
        return [f"--save_dir {folder} {problem}"]

    def _file_problems(self) -> Iterator[str]:
        for option, path in self._files.items():
            resolved = path.resolve()
            if resolved == self.save_dir or path.is_dir():
                yield f"{option} {path} is a folder. Name a file."
            elif path.exists() and not path.is_file():
                yield f"{option} {path} is a device or a pipe. Name a file."
            elif path.exists() and not self._overwrite and not resolved.is_relative_to(self.save_dir):
                yield f"{option} {path} exists. Choose another name, or add --overwrite_output_dir to replace it."

    def _claim_partial(self) -> None:
        """Make an empty `partial` and lock it for as long as this process lives."""
        self.save_dir.parent.mkdir(parents=True, exist_ok=True)
        if self.partial.exists():
            stale = self._lock_folder(self.partial)
            shutil.rmtree(self.partial)
            os.close(stale)
        self.partial.mkdir()
        self._lock = self._lock_folder(self.partial)

    def _lock_folder(self, folder: Path) -> int:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise CheckpointError(
                f"--save_dir {self.save_dir}: another run is writing to {folder}. Choose another folder, or wait."
            ) from None
        return descriptor

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _unwritable_files(self) -> Iterator[str]:
        for option, path in self._files.items():
            folder = self.place(path).parent
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    pass
            except OSError as error:
                yield f"{option} {path}: cannot write to {folder} ({error.strerror}). Choose another place."

    def _space_problems(self, needed_bytes: Mapping[str, int]) -> Iterator[str]:
        folders = {option: self.place(path).parent for option, path in self._files.items()}
        folders["--save_dir"] = self.save_dir.parent
        options_of: dict[int, list[str]] = {}
        for option in needed_bytes:
            options_of.setdefault(folders[option].stat().st_dev, []).append(option)
        for options in options_of.values():
            needed, folder = sum(needed_bytes[option] for option in options), folders[options[0]]
            free = shutil.disk_usage(folder).free
            if free < needed:
                yield (
                    f"{' and '.join(options)} need {bytes_text(needed)} in {folder}, {bytes_text(free)} is free. Free "
                    "some space, or choose another place."
                )


def _refuse(problems: Iterable[str]) -> None:
    """Raise CheckpointError with all `problems`, if there are any."""
    if text := "\n".join(problems):
        raise CheckpointError(text)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _shown(folder: Path) -> str:
    names = _names(folder) or ["a file"]
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not _names(folder)


def _is_complete(folder: Path) -> bool:
    """Whether `folder` holds a whole model, also of another origin: config.json comes last and is removed first."""
    return (folder / "config.json").exists() and any(folder.glob("*.safetensors"))


def _is_torn(folder: Path) -> bool:
    """Whether `folder` is what a run leaves that ends in the middle of making it, or of removing it."""
    return _is_empty(folder) or any(folder.glob("*.safetensors")) or not _RUN_FILES.isdisjoint(_names(folder))
