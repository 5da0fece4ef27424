"""Finds the records of a dataset: in a local file or folder, by an alias, or on the Hugging Face Hub."""

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mobius.config.options import DatasetEntry
from mobius.data.readers import (
    COMPRESSED,
    SUFFIXES,
    RecordBlock,
    find_reader,
    table_blocks,
)
from mobius.errors import DataError, excerpt, first_line, listed, quoted, reason_of
from mobius.files.atomic_files import atomic_write
from mobius.files.regular_files import open_regular, read_json, similar_path

logger = logging.getLogger(__name__)

DATASET_ALIASES: Final[Mapping[str, str]] = {"xsum": "EdinburghNLP/xsum"}
"""Aliases that users may type -> hub ids."""

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_LONGEST_HUB_ID: Final = 96  # the Hub's limit
_SPLIT_NAMES: Final = {
    "train": "train(?:ing)?",
    "validation": "validation|valid|val|dev|eval(?:uation)?",
    "test": "test(?:ing)?",
}
_WORD: Final = r"(?<![^\W\d_])(?:{})(?![^\W\d_])"
"""Matches a whole word, without a letter before or after it."""
_TRAIN_ALONE: Final = re.compile(r"train(ing)?([-_. ]?\d+([-_. ]of[-_. ]\d+)?)?", re.IGNORECASE)
"""Matches the name of the training split, with or without shard numbers; a folder with such a name has splits."""
# Dataset cards and similar files are JSON without records.
_NOT_RECORDS: Final = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
_OF_A_RUN: Final = ("training_args.yaml", "plan.json")
"""Files that identify the folder of a Mobius run, whose metrics and records are not samples."""
_REMEMBERED_BYTES: Final = 1 << 26
_SETTLED_SECONDS: Final = 60


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """Records of a dataset; `fingerprint` changes with the content; `num_records` is None if unknown before reading."""

    label: str
    fingerprint: str
    num_records: int | None
    num_bytes: int
    read: Callable[[], Iterator[RecordBlock]]
    folder: Path | None = None
    """Folder where relative paths of images begin; None for a dataset of the hub."""


def open_source(
    entry: DatasetEntry, *, option: str = "--dataset", show_progress: bool = False, hash_cache: Path | None = None
) -> DatasetSource:
    """Find the data that `entry` names: an existing path, else an alias, else a hub id.

    Local files are hashed now and read later; the folder `hash_cache` stores the hashes of large files.
    `show_progress` is for downloads. Raises DataError, which begins with `option`, if nothing is found or the file type
    is not supported.
    """
    path = Path(entry.name)
    with suppress(RuntimeError):  # `~name` for a user that does not exist
        path = path.expanduser()
    given = f"{option} {excerpt(entry.name)}"
    try:
        if path.is_file() or path.is_dir():
            if entry.subset is not None:
                raise DataError(
                    f"{given}: subset {excerpt(entry.subset)} is for datasets of the Hugging Face Hub, and this is a "
                    "local file or folder; leave it out, or give the subset's own folder"
                )
            files = _files_of(path, entry.split, given, is_evaluated=option == "--eval_dataset")
            return _open_files(files, path, given, hash_cache)
        if path.exists():
            raise DataError(f"{given}: is neither a file nor a folder but a pipe or device; give a file")
    except (OSError, ValueError) as error:  # raised without permission, or for an invalid file name
        raise DataError(f"{given}: cannot be accessed: {reason_of(error)}") from error
    hub_id = DATASET_ALIASES.get(entry.name, entry.name)
    is_hub_id = _HUB_ID.fullmatch(hub_id) and len(hub_id) <= _LONGEST_HUB_ID
    if find_reader(path) is not None or not is_hub_id:
        raise DataError(
            f"{given}: there is no file or folder {excerpt(str(path.absolute()), 300)}{similar_path(path)}. Give an "
            f"existing file ({SUFFIXES}), a folder of such files, or a dataset on the Hugging Face Hub such as "
            "EdinburghNLP/xsum"
        )
    return _open_hub(entry, hub_id, f"{given}: there is no file or folder {path.absolute()}, and", show_progress)


def _files_of(place: Path, split: str, given: str, *, is_evaluated: bool) -> list[Path]:
    """Return `place` if it is a file, or the folder's data files of the split, sorted."""
    if place.is_file():
        if split != "train":
            raise DataError(f"{given}: split {excerpt(split)} is for folders and datasets of the hub; this is a file")
        if find_reader(place) is None:
            kind = quoted(place.suffix or "(none)")
            raise DataError(f"{given}: files of the kind {kind} cannot be read; use {SUFFIXES}")
        return [place]
    if (place / "dataset_dict.json").is_file():  # written by `save_to_disk` with all splits
        saved = sorted(state.parent.name for state in place.glob("*/state.json"))
        if split not in saved:
            raise DataError(f"{given}: has no split {excerpt(split)}; it has {listed(saved)}")
        place = place / split
    if (place / "state.json").is_file():
        return _saved_files(place)
    found = (path for path in place.rglob("*") if find_reader(path) is not None and path.is_file())
    inside = [
        path
        for path in sorted(path.relative_to(place) for path in found)
        if path.name.lower() not in _NOT_RECORDS and not any(part[0] == "." for part in path.parts)
    ]
    folders = {folder for path in inside for folder in path.parents[:-1]}
    runs = {folder for folder in folders if all((place / folder / name).is_file() for name in _OF_A_RUN)}
    inside = [path for path in inside if runs.isdisjoint(path.parents)]
    # If there are other data files, text files are most likely notes on them: README.txt, LICENSE.txt.
    inside = [path for path in inside if _kind(path) != ".txt"] or inside
    if not inside:
        raise DataError(f"{given}: no data files in {place.absolute()}; looked for {SUFFIXES} at any depth")
    chosen = _of_split(inside, split)
    if not chosen and is_evaluated:
        chosen = _of_split(inside, "validation") or _of_split(inside, "test")
    if not chosen:
        asked = "that a run could be trained on" if split == "train" else f"of the split {excerpt(split)}"
        raise DataError(
            f"{given}: no file {asked} in {place.absolute()}, judging by the names of files and folders; it has "
            f"{listed(map(str, inside))}. Name the file itself, as in --dataset {place / inside[0]}, rename it, or "
            "choose a split in a YAML file"
        )
    unused = [path for path in inside if path not in set(chosen)]
    left_out = f"; not used, because of their split: {listed(map(str, unused))}" if unused else ""
    logger.info("%s: files used: %s%s", given, listed(map(str, chosen)), left_out)
    return [place / path for path in chosen]


def _of_split(paths: Sequence[Path], split: str) -> list[Path]:
    """Return the files of a split: the file's name, or else a folder's name, has the split's name as a whole word.

    The training split also includes files that name no split, unless a file or folder has the bare name `train`.
    """
    splits = {path: _splits_of(path, split) for path in paths}
    has_train = any(_TRAIN_ALONE.fullmatch(part) for path in paths for part in (*path.parent.parts, _stem(path)))
    takes_unnamed = split == "train" and not has_train
    return [path for path in paths if split in splits[path] or (takes_unnamed and not splits[path])]


def _splits_of(path: Path, asked: str) -> set[str]:
    """Return the splits in the file's name or, if there are none, in the name of the nearest folder that has any."""
    for name in (_stem(path), *reversed(path.parent.parts)):
        known = {asked: re.escape(asked)} | _SPLIT_NAMES
        found = {split for split, words in known.items() if re.search(_WORD.format(words), name, re.IGNORECASE)}
        if found:
            return found
    return set()


def _stem(path: Path) -> str:
    """Return the file's name without the suffixes of type and compression."""
    return _uncompressed(path).stem


def _kind(path: Path) -> str:
    return _uncompressed(path).suffix.lower()


def _uncompressed(path: Path) -> Path:
    return path.with_suffix("") if path.suffix.lower() in COMPRESSED else path


def _saved_files(place: Path) -> list[Path]:
    """Return the files that the datasets library's `save_to_disk` wrote; caches of the library may be next to them."""
    try:
        state = read_json(place / "state.json", DataError)
        return [place / Path(file["filename"]).name for file in state["_data_files"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{place / 'state.json'}: does not list the files of a dataset as `save_to_disk` does; save it again"
        ) from error


def _open_files(files: list[Path], place: Path, given: str, hash_cache: Path | None) -> DatasetSource:
    digest, num_lines, num_bytes, states = hashlib.sha256(), 0, 0, list[os.stat_result]()
    for path in files:
        try:
            states.append(path.stat())
            content, lines, size = _content(path, hash_cache)
        except OSError as error:
            raise DataError(f"{given}: cannot read {path.absolute()}: {reason_of(error)}") from error
        digest.update(f"{[suffix.lower() for suffix in path.suffixes[-2:]]} {content}\n".encode())
        num_lines, num_bytes = num_lines + lines, num_bytes + size

    def read() -> Iterator[RecordBlock]:
        for path, state in zip(files, states, strict=True):
            yield from _read_unchanged(path, state)

    is_counted = all(path.suffix.lower() == ".jsonl" for path in files)
    folder = place if place.is_dir() else place.parent
    number = num_lines if is_counted else None
    return DatasetSource(str(place), digest.hexdigest(), number, num_bytes, read, folder.absolute())


def _read_unchanged(path: Path, before: os.stat_result) -> Iterator[RecordBlock]:
    """Yield a file's blocks. Raises DataError if the file changed after it was hashed: the hash is the cache key."""
    reader, problem = find_reader(path), None
    assert reader is not None
    try:
        yield from reader(path)
    except DataError as error:
        problem = error
    with suppress(OSError):  # stat fails for a deleted file: it was read completely, or `problem` is raised below
        now = path.stat()
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise DataError(f"{path}: has changed since this run began; start again when it is complete") from problem
    if problem is not None:
        raise problem


def _content(path: Path, hash_cache: Path | None) -> tuple[str, int, int]:
    """Return hash, number of lines and size of a file.

    For a large file these values are cached as long as its inode, size and times are unchanged; a user can set back all
    times except the change time (ctime). A file that changed within the last minute is hashed again, because clocks are
    coarse.
    """
    facts = path.stat()
    identity = [facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]
    note = None
    if hash_cache is not None and facts.st_size >= _REMEMBERED_BYTES:
        note = hash_cache / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"
        with suppress(DataError, ValueError, KeyError, TypeError):
            known = read_json(note, DataError)
            if known["identity"] == identity:
                return str(known["hash"]), int(known["lines"]), facts.st_size
    digest, num_lines, block = hashlib.sha256(), 0, b"\n"
    with open_regular(path) as file:
        while more := file.read(1 << 22):
            block = more
            digest.update(block)
            num_lines += block.count(b"\n")
    num_lines += not block.endswith(b"\n")
    if note is not None and time.time() - max(facts.st_mtime, facts.st_ctime) > _SETTLED_SECONDS:
        text = json.dumps({"identity": identity, "hash": digest.hexdigest(), "lines": num_lines})
        with suppress(OSError):  # without a cached hash, the next run hashes again
            note.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(note, has_many_writers=True) as temporary:
                temporary.write_text(text, encoding="utf-8")
    return digest.hexdigest(), num_lines, facts.st_size


def _open_hub(entry: DatasetEntry, hub_id: str, missing: str, show_progress: bool) -> DatasetSource:
    """Open a split, which the `datasets` library downloads or has cached."""
    folder = hub_id.rpartition("/")[2]
    advice = (
        f"Without network: on a machine that has it, run `hf download --repo-type dataset {hub_id} --local-dir "
        f"{folder}`, copy the folder {folder} here and give `--dataset {folder}/`"
    )
    import datasets

    if not show_progress:
        datasets.disable_progress_bars()
    try:
        split = datasets.load_dataset(hub_id, entry.subset, split=entry.split)
    except Exception as error:  # network, permission, missing split, old script: each has its own type
        subset = "" if entry.subset is None else f" of the subset {quoted(entry.subset)}"
        raise DataError(
            f"{missing} the `{excerpt(entry.split)}` split{subset} of {hub_id} is available neither from the Hugging "
            f"Face Hub nor in its local cache: {excerpt(first_line(error), 300)}. {advice}"
        ) from error

    def batches() -> Iterator[tuple[Any, int]]:
        for table in split.with_format("arrow").iter(batch_size=1000):
            yield from ((batch, batch.nbytes) for batch in table.combine_chunks().to_batches())

    def read() -> Iterator[RecordBlock]:
        return table_blocks(batches(), hub_id, "a dataset of the Hugging Face Hub")

    return DatasetSource(hub_id, str(split._fingerprint), len(split), int(split.data.nbytes), read)
