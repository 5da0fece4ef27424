"""Creates, finds and removes the checkpoints in the folder of a run, and recovers after a kill.

    begin     checkpoint-8 (older, if any)           checkpoint-8.partial (new)
    writing   checkpoint-8 (older, if any)           checkpoint-8.partial <- files, each synced; checkpoint.json last
    complete  checkpoint-8 -> checkpoint-8.replaced  checkpoint-8.partial -> checkpoint-8   then .replaced is removed
    removing  checkpoint-8 -> checkpoint-8.replaced  then .replaced is removed

There is an older checkpoint-8 if a run was resumed from an earlier step. Only the name `checkpoint-STEP` counts as a
checkpoint. A process may be killed between any two changes, so `recover_interrupted_saves` runs before a run looks for
checkpoints: a .partial that is complete and newer than checkpoint-STEP replaces it. Everything else without a final
name is removed.

Callers that write or remove hold the lock of the run's folder (run_folder.py); this module does not lock.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from mobius.checkpoint.manifest import Manifest, OtherFile
from mobius.checkpoint.reader import CheckpointReader
from mobius.checkpoint.slot_reader import SlotReader, is_durable_step
from mobius.checkpoint.tensor_files import FileRecord, Files, translate_file_errors, write_indexes
from mobius.config.earlier_results import CHECKPOINT_NAME, MANIFEST_FILE
from mobius.errors import CheckpointError, listed, reason_of
from mobius.files.atomic_files import publish_folder, remove_folder, sync_to_disk
from mobius.models.model_files import read_json_object

logger = logging.getLogger(__name__)

NAMES: Final = threading.Lock()
"""Lock that threads hold while they create or remove a name that both a save and a durable step may use."""
_PARTIAL, _REPLACED = ".partial", ".replaced"


@dataclass(frozen=True)
class FoundCheckpoints:
    """Checkpoints of a folder: the valid ones, the newest first, and the invalid ones, each with the reason."""

    valid: tuple[tuple[Path, Manifest], ...]
    invalid: tuple[tuple[Path, str], ...]

    @property
    def newest_save_number(self) -> int:
        """Largest save number; 0 without checkpoints."""
        return max((manifest.save_number for _, manifest in self.valid), default=0)


def checkpoint_path(save_dir: Path, step: int) -> Path:
    """Final place of the checkpoint of `step`."""
    return save_dir / f"checkpoint-{step}"


def partial_path(save_dir: Path, step: int) -> Path:
    """Place of the checkpoint of `step` while it is written."""
    return save_dir / f"checkpoint-{step}{_PARTIAL}"


def create_partial(save_dir: Path, step: int) -> Path:
    """Create an empty `partial_path`, and `save_dir` if it does not exist. Raises CheckpointError.

    From the start, an empty manifest marks the folder as belonging to a run.
    """
    partial = partial_path(save_dir, step)
    discard(partial)
    with translate_file_errors("make", partial):
        partial.mkdir(parents=True)
        (partial / MANIFEST_FILE).touch()
    return partial


def commit_checkpoint(partial: Path, manifest: Manifest, planned: Sequence[Files], *, weight_bytes: int) -> Path:
    """Write the indexes and the manifest, sync everything, and rename `partial`; returns its final path.

    `weight_bytes` is the size of all weights. `manifest` has the records of all `planned` files; records of the other
    files in the folder (model files, texts) are added. Raises CheckpointError; then an older checkpoint of the step is
    still there, and `partial` can be discarded.
    """
    names = {name for files in planned for names in files.values() for name in names}
    if missing := names ^ manifest.tensor_files.keys():
        raise CheckpointError(f"{partial} lacks tensors, or has too many: {listed(sorted(missing))}.")
    _check_sizes(partial, manifest)
    stored = {record.file_name: tuple(record.checksums) for record in manifest.files}
    write_indexes(partial, stored, num_parameters=manifest.num_parameters, num_bytes=weight_bytes)
    path = partial / MANIFEST_FILE
    with translate_file_errors("write", path):
        text = with_others(partial, manifest).to_json()
        path.write_text(text, encoding="utf-8")  # a partly written file is invalid JSON or has a wrong checksum
        sync_to_disk(path)
        sync_to_disk(partial)
    return _publish(partial)


def with_others(folder: Path, manifest: Manifest, *, skipped: Collection[str] = ()) -> Manifest:
    """Sync all other files of `folder` to the disk, and return the manifest with these files added; raises OSError.

    Files with a suffix in `skipped` are left out.
    """
    others = tuple(_synced_others(folder, manifest, skipped))
    for each in (*filter(Path.is_dir, folder.rglob("*")), folder):
        sync_to_disk(each)
    return replace(manifest, others=others)


def discard(partial: Path) -> None:
    """Remove the folder of an unfinished checkpoint, if it exists; raises CheckpointError."""
    with translate_file_errors("remove", partial):
        _remove(partial)


def find_checkpoints(save_dir: Path) -> FoundCheckpoints:
    """Find the checkpoints in `save_dir`, which need not exist.

    If a run may have been killed, call `recover_interrupted_saves` first. Only names and sizes of files are checked.
    Raises CheckpointError if the folder cannot be listed.
    """
    valid, invalid = [], []
    for path in _entries(save_dir):
        if CHECKPOINT_NAME.fullmatch(path.name) and not _has_ending(path):
            try:
                valid.append((path, _read_manifest(path)))
            except CheckpointError as error:
                invalid.append((path, str(error)))
    valid.sort(key=lambda found: (found[1].save_number, found[1].step), reverse=True)
    return FoundCheckpoints(tuple(valid), tuple(invalid))


def find_whole(paths: Iterable[Path]) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the first undamaged checkpoint, and the damaged checkpoints before it, each with the reason.

    All bytes of a durable step are read, because a drive may lose its power in the middle of a write.
    """
    damaged = list[tuple[Path, str]]()
    for path in paths:
        try:
            if is_durable_step(path):
                open_checkpoint(path, names_others=False).verify_all()
        except CheckpointError as error:
            damaged.append((path, str(error)))
        else:
            return path, damaged
    return None, damaged


def open_checkpoint(path: Path, *, names_others: bool = True) -> CheckpointReader:
    """Reader of the checkpoint `path`.

    Raises CheckpointError if it is missing, partly written, of another program or format, or if a file without tensors
    was changed. With `names_others`, this message names the newest good checkpoint of the folder; so does the reader's
    message about a damaged tensor.
    """

    def hint() -> str:
        return _describe_others(path) if names_others else ""

    try:
        if _has_ending(path):
            raise CheckpointError(f"{path} is an incomplete checkpoint, left by a killed run.")
        kind = SlotReader if is_durable_step(path) else CheckpointReader
        reader = kind(path, _read_manifest(path), hint=hint)
    except CheckpointError as error:
        raise CheckpointError(f"{error} {hint()}".rstrip()) from error
    reader.verify_texts()
    return reader


def rotate_checkpoints(save_dir: Path, *, keep: int, protected: Collection[Path]) -> list[Path]:
    """Remove all complete checkpoints except the `keep` newest (0: keep all) and `protected`; return the removed paths.

    Each checkpoint is renamed before it is deleted, so that nobody sees it with half of its files. Damaged checkpoints
    are not removed. Raises CheckpointError.
    """
    if not keep:
        return []
    protected_paths = {path.resolve() for path in protected}
    found = [path for path, _ in find_checkpoints(save_dir).valid if not is_durable_step(path)]
    old = [path for path in found[keep:] if path.resolve() not in protected_paths]
    for path in old:
        aside = path.with_name(path.name + _REPLACED)
        with translate_file_errors("remove", path):
            _remove(aside)
            path.rename(aside)
            sync_to_disk(path.parent)
            _remove(aside)
    return old


def recover_interrupted_saves(save_dir: Path) -> list[str]:
    """Complete or remove the folders that killed runs left; returns a line for each folder.

    A folder that does not come from a run is never changed. Raises CheckpointError.
    """
    lines: list[str] = []
    for path in _entries(save_dir):
        if _has_ending(path) and path.exists():  # an earlier entry's recovery may have removed this path
            with translate_file_errors("recover", path):
                lines.append(f"{path}: {_recover(path)}")
    return lines


def _recover(path: Path) -> str:
    """Give a folder its final name, or remove it; returns a text of what was done."""
    if not _is_of_a_run(path):
        return "not a part of a checkpoint, so it stays as it is."
    final = path.with_name(path.stem)
    written, current = map(manifest_or_none, (path, final))
    if path.suffix == _PARTIAL and written and (current is None or current.save_number < written.save_number):
        _publish(path)
        return f"a killed run had completed it, and it is now {final.name}."
    _remove(path)
    return "a killed run had left it; it was removed."


def _publish(partial: Path) -> Path:
    """Give a complete `partial` its final name; then remove an older checkpoint of this name."""
    final = partial.with_name(partial.stem)
    replaced = final.with_name(final.name + _REPLACED)
    with translate_file_errors("rename", partial), NAMES:
        has_older = final.exists()
        if has_older:
            _remove(replaced)
        publish_folder(partial, final, aside=replaced if has_older else None)
        sync_to_disk(final.absolute().parent.parent)  # save_dir may be a new name in its parent folder
    try:
        _remove(replaced)  # also a folder that an earlier start left
    except OSError as error:  # the checkpoint is complete; the next start removes the older one
        logger.warning("%s cannot be removed: %s", replaced, reason_of(error))
    return final


def _read_manifest(path: Path) -> Manifest:
    """Manifest of a complete checkpoint. Raises CheckpointError."""
    file = path / MANIFEST_FILE
    if not path.is_dir():
        missing = "does not exist"
        if path.is_symlink():
            missing = f"is a link to {os.path.normpath(path.parent / os.readlink(path))}, which does not exist"
        raise CheckpointError(f"{path} {'is a file, no checkpoint' if path.exists() else missing}.")
    if not file.exists():
        raise CheckpointError(f"{path} is no complete checkpoint of Mobius: it has no {MANIFEST_FILE}.")
    try:
        manifest = Manifest.from_json(read_json_object(file))
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be used. {file}: {str(error).removesuffix('.')}.") from error
    _check_sizes(path, manifest)
    return manifest


def manifest_or_none(path: Path) -> Manifest | None:
    """Return the manifest of a complete checkpoint; None for anything else."""
    try:
        return _read_manifest(path)
    except CheckpointError:
        return None


def _check_sizes(path: Path, manifest: Manifest) -> None:
    records: tuple[FileRecord | OtherFile, ...] = (*manifest.files, *manifest.others)
    for record in records:
        file = path / record.file_name
        with translate_file_errors("read", file):
            if not file.is_file():
                raise CheckpointError(f"{path} is incomplete: {record.file_name} is missing.")
            if (size := file.stat().st_size) != record.num_bytes:
                raise CheckpointError(
                    f"{path} is damaged: {record.file_name} has {size:,} bytes instead of {record.num_bytes:,}."
                )


def _describe_others(path: Path) -> str:
    """Sentence that names the newest other good checkpoint in `path` or its parent folder."""
    for folder in (path, path.absolute().parent):
        try:
            valid = [other for other, _ in find_checkpoints(folder).valid if other.resolve() != path.resolve()]
        except CheckpointError:
            continue
        if (good := find_whole(valid)[0]) is not None:
            return f"The newest good checkpoint there is {good}: --resume_from_checkpoint {good}"
    return f"There is no other good checkpoint in {path.absolute().parent}."


def _synced_others(partial: Path, manifest: Manifest, skipped: Collection[str]) -> Iterator[OtherFile]:
    """Files that are not in the manifest yet, after each is synced to the disk."""
    recorded = {record.file_name for record in manifest.files} | {MANIFEST_FILE}
    for path in sorted(partial.rglob("*")):
        name = path.relative_to(partial).as_posix()
        if path.is_file() and name not in recorded and path.suffix not in skipped:
            sync_to_disk(path)
            content = path.read_bytes()
            yield OtherFile(name, len(content), zlib.crc32(content))


def _has_ending(path: Path) -> bool:
    match = CHECKPOINT_NAME.fullmatch(path.name)
    return match is not None and match["ending"] is not None


def _entries(save_dir: Path) -> list[Path]:
    with translate_file_errors("list", save_dir):
        return sorted(save_dir.iterdir()) if save_dir.is_dir() else []


def _is_of_a_run(path: Path) -> bool:
    """Whether `path` can come from a run that was killed while it created or removed a checkpoint."""
    if path.is_symlink() or not path.is_dir():
        return False
    return (path / MANIFEST_FILE).exists() or not any(path.iterdir())


def _remove(path: Path) -> None:
    """Remove a folder of a run, or a link to one, if it exists; the manifest, which marks the folder, is removed last.

    Raises OSError.
    """
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        if not _is_of_a_run(path):
            raise OSError(errno.EEXIST, "it holds something other than a checkpoint; rename it", str(path))
        remove_folder(path, last=MANIFEST_FILE)
