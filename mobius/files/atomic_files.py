"""Atomic writes of files and folders: under its final name, a file or folder is complete or absent."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


def sync_to_disk(path: Path) -> None:
    """Wait until `path`, a file or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Wait until all files and folders below `folder` are on the disk."""
    for path in (*folder.rglob("*"), folder):
        sync_to_disk(path)


def publish_folder(partial: Path, final: Path, *, aside: Path | None = None) -> None:
    """Rename `partial`, which is on the disk, to `final`, which may be an empty folder; raises OSError.

    An existing `final` is first renamed to `aside`, and gets its name back if the second rename fails.
    """
    if aside is not None:
        final.rename(aside)
    try:
        partial.rename(final)
    except OSError:
        if aside is not None:
            aside.rename(final)
        raise
    sync_to_disk(final.absolute().parent)


def remove_folder(folder: Path, *, last: str) -> None:
    """Remove `folder`; its file `last` goes last, so that an interrupted removal leaves this file. Raises OSError."""
    for path in [path for path in folder.iterdir() if path.name != last]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    (folder / last).unlink(missing_ok=True)
    folder.rmdir()


@contextlib.contextmanager
def atomic_write(path: Path, *, has_many_writers: bool = False) -> Iterator[Path]:
    """Yield a temporary path next to `path` to write to; on success it is synced and renamed to `path` in one step.

    On an exception the temporary file is removed and an older `path` does not change. `has_many_writers`: several
    processes may write `path` at once, as in a cache; the last one counts. Raises OSError if `path` is a device, pipe
    or folder, which a file would replace.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file, so it cannot be replaced", str(path))
    own = f".{secrets.token_hex(4)}" if has_many_writers else ""  # no process number: two containers may share it
    temporary = path.with_name(f"{path.name}{own}.partial")
    try:
        yield temporary
        sync_to_disk(temporary)
        temporary.replace(path)
        sync_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def nearest_folder(path: Path) -> Path:
    """`path` itself, or the nearest folder above it that exists; links are followed."""
    folder = path.resolve()
    while not os.path.exists(folder):  # also False in a folder without permission
        folder = folder.parent
    return folder
