"""Owns where records come from: a local file or folder, a known name, or the Hugging Face Hub."""

import csv
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mobius.errors import DataError, first_line
from mobius.excerpt import excerpt, listed, quoted

KNOWN_DATASETS: Mapping[str, str] = {"xsum": "EdinburghNLP/xsum"}
"""Names that the user may type instead of a hub id."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TRAIN_SPLIT = re.compile(r"(^|[^a-z])train(ing)?([^a-z]|$)", re.IGNORECASE)
# Dataset cards and their companions are JSON too, but hold no records.
_NOT_RECORDS = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})


@dataclass(frozen=True, slots=True)
class Record:
    """One raw record; `where` is its place for messages, e.g. `train.jsonl, line 7`."""

    fields: Mapping[str, object]
    where: str

    def __post_init__(self) -> None:
        if not isinstance(self.fields, dict):
            kind = type(self.fields).__name__
            raise DataError(f"{self.where}: a record must be a JSON object with named columns, not {kind}")


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
    path = Path(dataset)
    with suppress(RuntimeError):  # `~name` of a user that there is not
        path = path.expanduser()
    given = f"--dataset {excerpt(dataset)}"
    try:
        if path.is_file() or path.is_dir():
            return _open_files(path)
        if path.exists():
            raise DataError(f"{given}: is neither a file nor a folder but a pipe or device; give a file")
    except (OSError, ValueError) as error:  # no right to look there, or a name that no file can have
        raise DataError(
            f"{given}: cannot be looked up: {getattr(error, 'strerror', None) or first_line(error)}"
        ) from error
    hub_id = KNOWN_DATASETS.get(dataset, dataset)
    is_hub_id = _HUB_ID.fullmatch(hub_id) and len(hub_id) <= 96  # the Hub's own limit
    if path.suffix.lower() in _READERS or not is_hub_id:
        raise DataError(
            f"{given}: there is no file or folder {excerpt(str(path.absolute()), 300)}. Give an "
            f"existing file ({_SUFFIXES}), a folder of such files, or a dataset on the Hugging Face Hub such as "
            "EdinburghNLP/xsum"
        )
    return _open_hub(dataset, hub_id, path.absolute(), show_progress)


def _files_of(folder: Path) -> list[Path]:
    """The folder's data files, sorted; if some belong to a `train` split by their name or folder, only those."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in _READERS and path.is_file())
    inside = [
        path
        for path in sorted(path.relative_to(folder) for path in found)
        if path.name.lower() not in _NOT_RECORDS and not any(part[0] == "." for part in path.parts)
    ]
    chosen = [path for path in inside if _TRAIN_SPLIT.search(str(path.with_suffix("")))] or inside
    if not chosen:
        raise DataError(
            f"--dataset {folder}: no data files in {folder.absolute()}; looked for {_SUFFIXES} at any depth"
        )
    return [folder / path for path in chosen]


def _open_files(place: Path) -> Source:
    """A file, or the data files of a folder."""
    files = [place] if place.is_file() else _files_of(place)
    digest, num_lines = hashlib.sha256(), 0
    for path in files:
        suffix = path.suffix.lower()
        if suffix not in _READERS:
            raise DataError(
                f"--dataset {path}: files of the kind {quoted(path.suffix or '(none)')} cannot be read; use {_SUFFIXES}"
            )
        block = b"\n"
        try:
            digest.update(f"{suffix} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                while more := file.read(1 << 22):
                    block = more
                    digest.update(block)
                    num_lines += block.count(b"\n")
        except OSError as error:
            raise DataError(f"--dataset {place}: cannot read {path.absolute()}: {error.strerror}") from error
        num_lines += not block.endswith(b"\n")

    def read() -> Iterator[Record]:
        for path in files:
            try:
                yield from _READERS[path.suffix.lower()](path)
            except UnicodeDecodeError as error:
                with path.open("rb") as file:  # the decoder knows the place in its buffer only
                    lines = enumerate(file, start=1)
                    number = next(number for number, line in lines if line.decode("utf-8", "ignore").encode() != line)
                raise DataError(
                    f"{path}, line {number}: is not UTF-8 text ({error.reason}); convert the file to UTF-8"
                ) from error
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror or first_line(error)}") from error

    is_counted = all(path.suffix.lower() == ".jsonl" for path in files)
    return Source(str(place), digest.hexdigest(), num_lines if is_counted else None, read)


def _parse_json(text: str, path: Path, line: int | None = None) -> Any:
    """The value; raises DataError that names the line where it is known."""
    where = f"{path}" if line is None else f"{path}, line {line}"
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        problem = f"{path}, line {line or error.lineno}, column {error.colno}: broken JSON: {error.msg}"
        if line is not None:
            problem += f". Each line must hold one whole JSON object; the line begins with {quoted(text.strip()[:60])}"
        raise DataError(problem) from error
    except RecursionError as error:
        raise DataError(f"{where}: lists or objects are nested too deeply to be a record") from error
    except ValueError as error:  # Python reads whole numbers of up to 4300 digits
        raise DataError(f"{where}: a number of too many digits: {first_line(error)}") from error


def _read_json(path: Path) -> Iterator[Record]:
    """A file of one array of objects, or of one object per line."""
    with path.open(encoding="utf-8-sig") as file:
        while (start := file.read(1)).isspace():
            pass
    if start == "[":
        values = _parse_json(path.read_text(encoding="utf-8-sig"), path)
        yield from (Record(value, f"{path}, record {index}") for index, value in enumerate(values))
    else:
        yield from _read_json_lines(path)


def _read_json_lines(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield Record(_parse_json(line, path, number), f"{path}, line {number}")


def _read_csv(path: Path) -> Iterator[Record]:
    """Comma-separated with a header line; every value is text."""
    csv.field_size_limit(1 << 30)  # the default of 128 KiB is shorter than a long document
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        try:
            for row in rows:
                where = f"{path}, line {rows.line_num}"
                if None in row or None in row.values():
                    header = listed(rows.fieldnames or ())
                    raise DataError(f"{where}: the row has more or fewer fields than the header ({header})")
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
            for fields in chain.from_iterable(batch.to_pylist() for batch in file.iter_batches(batch_size=1024)):
                yield Record(fields, f"{path}, record {index}")
                index += 1
    except FileNotFoundError:
        raise
    except Exception as error:  # pyarrow's own, and ValueError, OverflowError, ... of values Python does not have
        reason = excerpt(first_line(error), 300)
        raise DataError(f"{path}: cannot be read as Parquet after {index} records: {reason}") from error


_READERS = {".json": _read_json, ".jsonl": _read_json_lines, ".csv": _read_csv, ".parquet": _read_parquet}
_SUFFIXES = ", ".join(_READERS)


def _open_hub(dataset: str, hub_id: str, looked_up_path: Path, show_progress: bool) -> Source:
    """The `train` split as the `datasets` library downloads or caches it."""
    missing = f"--dataset {dataset}: there is no file or folder {looked_up_path}, and"
    folder = hub_id.rpartition("/")[2]
    advice = (
        f"Without network: on a machine that has it, run `hf download --repo-type dataset {hub_id} --local-dir "
        f"{folder}`, copy the folder {folder} here and give `--dataset {folder}/`"
    )
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{missing} reading {hub_id} from the Hugging Face Hub needs the package datasets: `pip install datasets`. "
            f"{advice}"
        ) from error
    if not show_progress:
        datasets.disable_progress_bars()
    try:
        split = datasets.load_dataset(hub_id, split="train")
    except Exception as error:  # network, permission, missing split, old script: each has its own type
        cause = excerpt(first_line(error), 300)
        raise DataError(
            f"{missing} the `train` split of {hub_id} could not be had from the Hugging Face Hub or its local cache: "
            f"{cause}. {advice}"
        ) from error

    def read() -> Iterator[Record]:
        index = 0
        try:
            for fields in split:
                yield Record(fields, f"{hub_id}, record {index}")
                index += 1
        except Exception as error:  # a column that cannot be decoded, a shard that is damaged: types of all kinds
            reason = excerpt(first_line(error), 300)
            raise DataError(f"{hub_id}, record {index}: cannot be read: {reason}") from error

    return Source(hub_id, str(split._fingerprint), len(split), read)
