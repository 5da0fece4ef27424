"""Owns where records come from: a local file or folder, a known name, or the Hugging Face Hub.

Does not own what a record means (formats.py) nor what becomes of it.
"""

import csv
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mobius.errors import DataError

# Names the user may type instead of a hub id.
KNOWN_DATASETS: Mapping[str, str] = MappingProxyType({"xsum": "EdinburghNLP/xsum"})

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TRAIN_SPLIT = re.compile(r"(^|[^a-z])train(ing)?([^a-z]|$)", re.IGNORECASE)
# Dataset cards and their companions are JSON too, but hold no records.
_NOT_RECORDS = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
_HASH_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Record:
    """One raw record; `where` is its place for messages, e.g. `train.jsonl, line 7`."""

    fields: Mapping[str, object]
    where: str


@dataclass(frozen=True, slots=True)
class Source:
    """`fingerprint` changes with the content; `num_records` is None where only reading everything would tell."""

    label: str
    fingerprint: str
    num_records: int | None
    read: Callable[[], Iterator[Record]]


def open_source(dataset: str, *, show_progress: bool = False) -> Source:
    """Find what `--dataset` names: an existing path first, then a known name, then a hub id (its `train` split).

    Local files are hashed here and read later; `show_progress` is for downloads. Raises DataError if nothing is found
    or the kind is not supported.
    """
    path = Path(dataset).expanduser()
    if path.is_file():
        return _open_files(str(path), [path])
    if path.is_dir():
        return _open_files(str(path), _files_of(path))
    hub_id = KNOWN_DATASETS.get(dataset, dataset)
    if path.suffix in _READERS or not _HUB_ID.fullmatch(hub_id):
        raise DataError(
            f"--dataset {dataset}: there is no file or folder {path.absolute()}. Give an existing file "
            f"({_SUFFIXES}), a folder of such files, or a dataset on the Hugging Face Hub such as EdinburghNLP/xsum"
        )
    return _open_hub(dataset, hub_id, path.absolute(), show_progress)


def _files_of(folder: Path) -> list[Path]:
    """The folder's data files, sorted; if some belong to a `train` split by their name or folder, only those."""
    inside = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.suffix in _READERS)
    inside = [
        path for path in inside if path.name not in _NOT_RECORDS and not any(part[0] == "." for part in path.parts)
    ]
    chosen = [path for path in inside if _TRAIN_SPLIT.search(str(path.with_suffix("")))] or inside
    if not chosen:
        raise DataError(
            f"--dataset {folder}: no data files in {folder.absolute()}; looked for {_SUFFIXES} at any depth"
        )
    return [folder / path for path in chosen]


def _open_files(label: str, files: list[Path]) -> Source:
    digest = hashlib.sha256()
    num_lines = 0
    for path in files:
        if path.suffix not in _READERS:
            raise DataError(
                f"--dataset {path}: files of the kind {path.suffix or '(none)'!r} cannot be read; use {_SUFFIXES}"
            )
        block = b"\n"
        digest.update(f"{path.suffix} {path.stat().st_size}\n".encode())
        try:
            with path.open("rb") as file:
                while more := file.read(_HASH_BLOCK_BYTES):
                    block = more
                    digest.update(block)
                    num_lines += block.count(b"\n")
        except OSError as error:
            raise DataError(f"--dataset {label}: cannot read {path.absolute()}: {error.strerror}") from error

        num_lines += not block.endswith(b"\n")

    def read() -> Iterator[Record]:
        for path in files:
            yield from _READERS[path.suffix](path)

    is_counted = all(path.suffix == ".jsonl" for path in files)
    return Source(label, digest.hexdigest(), num_lines if is_counted else None, read)


def _as_record(value: object, where: str) -> Record:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a record must be a JSON object with named columns, not {type(value).__name__}")
    return Record(value, where)


def _read_json(path: Path) -> Iterator[Record]:
    """A file of one array of objects, or of one object per line."""
    with _utf8(path), path.open(encoding="utf-8-sig") as file:
        start = file.read(1)
        while start.isspace():
            start = file.read(1)
        if start != "[":
            yield from _read_json_lines(path)
            return
        try:
            values = json.loads(start + file.read())
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {error.lineno}, column {error.colno}: broken JSON: {error.msg}") from error
    for index, value in enumerate(values):
        yield _as_record(value, f"{path}, record {index}")


def _read_json_lines(path: Path) -> Iterator[Record]:
    with _utf8(path), path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{where}, column {error.colno}: broken JSON: {error.msg}. Each line must hold one whole JSON "
                    f"object; the line begins with {line.strip()[:60]!r}"
                ) from error
            yield _as_record(value, where)


def _read_csv(path: Path) -> Iterator[Record]:
    """Comma-separated with a header line; every value is text."""
    csv.field_size_limit(1 << 30)  # the default of 128 KiB is shorter than a long document
    with _utf8(path), path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        try:
            for row in rows:
                where = f"{path}, line {rows.line_num}"
                if None in row or None in row.values():
                    raise DataError(f"{where}: the row has more or fewer fields than the header ({rows.fieldnames})")
                yield Record(row, where)
        except csv.Error as error:
            raise DataError(f"{path}, line {rows.reader.line_num}: broken CSV: {error}") from error


def _read_parquet(path: Path) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs the package pyarrow: `pip install pyarrow`") from error
    index = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for fields in batch.to_pylist():
                    yield Record(fields, f"{path}, record {index}")
                    index += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet after {index} records: {error}") from error


@contextmanager
def _utf8(path: Path) -> Iterator[None]:
    """Name the file when its bytes are not text."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}); convert it to UTF-8"
        ) from error


_READERS: Mapping[str, Callable[[Path], Iterator[Record]]] = MappingProxyType(
    {".json": _read_json, ".jsonl": _read_json_lines, ".csv": _read_csv, ".parquet": _read_parquet}
)
_SUFFIXES = ", ".join(_READERS)


def _open_hub(dataset: str, hub_id: str, looked_up_path: Path, show_progress: bool) -> Source:
    """The `train` split as the `datasets` library downloads or caches it."""
    folder = hub_id.rpartition("/")[2]
    advice = (
        "Without network: on a machine that has it, run "
        f"`hf download --repo-type dataset {hub_id} --local-dir {folder}`, "
        f"copy the folder {folder} here and give `--dataset {folder}/`"
    )
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"--dataset {dataset}: there is no file or folder {looked_up_path}, and reading {hub_id} from the Hugging "
            f"Face Hub needs the package datasets: `pip install datasets`. {advice}"
        ) from error
    if not show_progress:
        datasets.disable_progress_bars()
    try:
        split = datasets.load_dataset(hub_id, split="train")
    except Exception as error:  # network, permission, missing split, old script: each has its own type
        cause = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(
            f"--dataset {dataset}: there is no file or folder {looked_up_path}, and the `train` split of {hub_id} "
            f"could not be had from the Hugging Face Hub or its local cache: {cause}. {advice}"
        ) from error

    def read() -> Iterator[Record]:
        for index, fields in enumerate(split):
            yield Record(fields, f"{hub_id}, record {index}")

    return Source(hub_id, str(split._fingerprint), len(split), read)
