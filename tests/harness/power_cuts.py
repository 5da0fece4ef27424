"""Power cuts, simulated: processes note what they change before it is synced to the disk, and a cut takes some back.

    a process   pwritev, write_text, rename, unlink, link -> the old bytes, in a journal of its own
                fdatasync, fsync                          -> what came before is on the disk
    cut         after the processes are killed: of what was not synced, some writes are taken back, some of them half,
                and the last changes of names

Stricter than a real disk: a folder that another process syncs does not count. Only paths that are `watched` are noted.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_State = tuple[str, Any] | None
"""A file with its bytes, a link with its target, or nothing."""


class Journals:
    """The journals of all processes that were forked after `install`, in a folder."""

    def __init__(self, folder: Path, is_watched: Callable[[str], bool]) -> None:
        self._folder, self._is_watched = folder, is_watched
        self._owner, self._file = 0, None
        folder.mkdir()

    def install(self) -> None:
        """Note changes in this process and those that are forked from it."""
        unlink = os.unlink
        for name in ("replace", "rename", "unlink", "symlink"):
            setattr(os, name, self._noting_names(getattr(os, name)))
        for name in ("fsync", "fdatasync"):
            setattr(os, name, self._noting_sync(getattr(os, name), unlink))
        write, open_file, write_text = os.pwritev, os.open, Path.write_text

        def noted_write(file: int, views: Any, offset: int, *flags: int) -> int:
            path = os.readlink(f"/proc/self/fd/{file}")
            if self._is_watched(path) and os.path.exists(path):
                with open(path, "rb") as old:
                    old.seek(offset)
                    self._note("write", path, offset, old.read(sum(view.nbytes for view in views)))
                (self._folder / f"{os.getpid()}.dirty").touch()
            return write(file, views, offset, *flags)

        def noted_open(path: Any, flags: int, *more: Any, **words: Any) -> int:
            if flags & os.O_CREAT:
                self._note_name(path)
            return open_file(path, flags, *more, **words)

        def noted_text(path: Path, *texts: Any, **words: Any) -> int:
            if self._is_watched(str(path.absolute())):
                self._note("text", str(path.absolute()))
            return write_text(path, *texts, **words)

        os.pwritev, os.open = noted_write, noted_open
        Path.write_text = noted_text  # type: ignore[method-assign,assignment]

    def are_dirty(self) -> bool:
        """Whether a process has written what it has not synced."""
        return any(self._folder.glob("*.dirty"))

    def cut(self, draw: random.Random) -> dict[str, int]:
        """Take back some of what dead processes have not synced; returns how much of each kind."""
        counts = {"writes": 0, "texts": 0, "names": 0}
        for path in sorted(path for path in self._folder.iterdir() if not path.suffix):
            records = list(_records(path))
            for number, (kind, *facts) in reversed([*enumerate(records)]):
                later = records[number + 1 :]
                if kind == "write" and ("sync", facts[0]) not in later and Path(facts[0]).exists():
                    name, offset, old = facts
                    if keep := draw.choice([0.0, 0.5, 1.0] if counts["writes"] else [0.5, 1.0]):
                        with open(name, "r+b") as file:
                            file.seek(offset)
                            file.write(old[: int(keep * len(old))])
                        counts["writes"] += 1
                elif kind == "text" and ("sync", facts[0]) not in later and Path(facts[0]).is_file():
                    os.truncate(facts[0], Path(facts[0]).stat().st_size // 2)
                    counts["texts"] += 1
            names = [
                facts
                for number, (kind, *facts) in enumerate(records)
                if kind == "name" and ("sync", str(Path(facts[0]).parent)) not in records[number + 1 :]
            ]
            for name, old in reversed(names[draw.randint(0, len(names)) :]):
                _put(Path(name), old)
                counts["names"] += 1
        self.forget()
        return counts

    def forget(self) -> None:
        """Forget all journals: the processes have ended well."""
        for path in self._folder.iterdir():
            path.unlink()

    def _note(self, *record: Any) -> None:
        if self._owner != os.getpid():  # of a fork
            self._owner, self._file = os.getpid(), open(self._folder / str(os.getpid()), "ab", buffering=0)  # noqa: SIM115
        assert self._file is not None
        self._file.write(pickle.dumps(record))

    def _note_name(self, path: Any) -> None:
        name = os.path.join(os.path.realpath(os.path.dirname(os.path.abspath(path))), os.path.basename(path))
        if self._is_watched(name):
            self._note("name", name, _state_of(Path(name)))

    def _noting_names(self, call: Callable[..., None]) -> Callable[..., None]:
        def noted(*paths: Any, **words: Any) -> None:
            if "dir_fd" not in words:  # within a tree that is removed
                for path in reversed(paths[-2:] if call.__name__ != "symlink" else paths[1:2]):
                    self._note_name(path)
            call(*paths, **words)

        return noted

    def _noting_sync(self, call: Callable[[int], None], unlink: Callable[[Path], None]) -> Callable[[int], None]:
        def noted(file: int) -> None:
            call(file)
            path = os.readlink(f"/proc/self/fd/{file}")
            self._note("sync", path)
            if path.endswith(".raw"):
                with contextlib.suppress(FileNotFoundError):
                    unlink(self._folder / f"{os.getpid()}.dirty")

        return noted


def _records(path: Path) -> Iterator[tuple[Any, ...]]:
    with path.open("rb") as file, contextlib.suppress(EOFError, pickle.UnpicklingError):  # killed while it wrote
        while True:
            yield pickle.load(file)


def _state_of(path: Path) -> _State:
    if path.is_symlink():
        return "link", os.readlink(path)
    return ("file", path.read_bytes()) if path.is_file() else None


def _put(path: Path, state: _State) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    if state is None or not path.parent.is_dir():
        return
    kind, value = state
    path.symlink_to(value) if kind == "link" else path.write_bytes(value)
