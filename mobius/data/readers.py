"""Reads data files, compressed or not, into blocks of consecutive unparsed records, in constant memory.

Parsing often runs in another process, so the reader only finds the ends of records. Block boundaries depend only on the
file's content.
"""

import csv
import io
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from mobius.data.formats import describe_object
from mobius.errors import DataError, excerpt, first_line, listed, quoted, reason_of
from mobius.files.regular_files import open_regular

if TYPE_CHECKING:
    import pyarrow

MAX_BLOCK_RECORDS: Final = 256
"""Maximum number of records in a block."""
_BLOCK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """A record; `where` names its place in messages, e.g. `train.jsonl, line 7`."""

    fields: Mapping[str, object]
    where: str

    def __post_init__(self) -> None:
        if not isinstance(self.fields, dict):
            kind = type(self.fields).__name__
            raise DataError(f"{self.where}: a record must be a JSON object with named columns, not {kind}")


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """Consecutive unparsed records; picklable."""

    parse: Callable[[Any, int], Iterator[Record]]
    """Function (content, number n) -> the first n records, parsed."""
    content: Any
    num_records: int
    num_bytes: int
    """Bytes of the file that were read since the previous block."""

    def __len__(self) -> int:
        return self.num_records

    def first(self, number: int) -> "RecordBlock":
        """Return a block of only the first `number` records."""
        return replace(self, num_records=number)

    def records(self) -> Iterator[Record]:
        """Parse the records. Raises DataError that names the place of a broken record."""
        return self.parse(self.content, self.num_records)


def text_blocks(
    items: Iterable[tuple[Any, int, str]], parse: Callable[[Any, str], Any], advance: Callable[[], int]
) -> Iterator[RecordBlock]:
    """Yield blocks of items (text or row, size, place); `parse` maps a text or row and its place to columns.

    `advance` returns the bytes of the file read since its last call.
    """
    held, num_held = list[tuple[Any, str]](), 0
    for item, size, place in items:
        held.append((item, place))
        num_held += size
        if len(held) == MAX_BLOCK_RECORDS or num_held >= _BLOCK_BYTES:
            yield RecordBlock(partial(_parse_items, parse), held, len(held), advance())
            held, num_held = [], 0
    if held:
        yield RecordBlock(partial(_parse_items, parse), held, len(held), advance())


def _parse_items(parse: Callable[[Any, str], Any], items: Sequence[tuple[Any, str]], number: int) -> Iterator[Record]:
    return (Record(parse(item, where), where) for item, where in items[:number])


def table_blocks(batches: Iterable[tuple["pyarrow.RecordBatch", int]], label: str, kind: str) -> Iterator[RecordBlock]:
    """Yield blocks of a table's batches; each batch comes with the number of file bytes read for it."""
    import pyarrow.ipc

    index = 0
    try:
        for batch, num_bytes in batches:
            step = max(1, min(MAX_BLOCK_RECORDS, _BLOCK_BYTES * batch.num_rows // max(batch.nbytes, 1)))
            for start in range(0, batch.num_rows, step):
                rows, parse = batch.slice(start, step), partial(_parse_table, label, kind, index)
                sink = pyarrow.BufferOutputStream()
                with pyarrow.ipc.new_stream(sink, rows.schema) as stream:
                    stream.write_batch(rows)
                num_bytes_here = num_bytes * len(rows) // batch.num_rows
                yield RecordBlock(parse, sink.getvalue().to_pybytes(), len(rows), num_bytes_here)
                index += len(rows)
    except Exception as error:
        raise _unreadable(label, kind, index, error) from error


def _parse_table(label: str, kind: str, first: int, table: bytes, number: int) -> Iterator[Record]:
    """Yield records of a table in Arrow's stream format; the table begins at record `first` of `label`."""
    import pyarrow.ipc

    try:
        with pyarrow.ipc.open_stream(table) as stream:
            part = stream.read_all().slice(0, number)
        types = {field.name: field.type for field in part.schema if _is_nested(field.type)}
        rows = part.to_pylist()
    except Exception as error:  # pyarrow's errors, and ValueError, OverflowError, ... for values that Python lacks
        raise _unreadable(label, kind, first, error) from error
    for index, row in enumerate(rows, start=first):
        where = f"{label}, record {index}"
        yield Record(row | {name: _parsed(row[name], of_type, where) for name, of_type in types.items()}, where)


def parse_json(content: str | bytes, where: str) -> Any:
    """Parse JSON. Raises DataError that begins with `where`."""
    try:
        return json.loads(content if isinstance(content, str) else content.decode())
    except UnicodeDecodeError as error:
        raise _not_utf8(where, error) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}, column {error.colno}: broken JSON: {error.msg.removesuffix(' at')}. Each line must hold one "
            f"whole JSON object; the line begins with {quoted(error.doc.strip()[:60])}"
        ) from error


def _not_utf8(where: str, error: UnicodeDecodeError) -> DataError:
    return DataError(f"{where}: is not UTF-8 text ({error.reason}); convert the file to UTF-8")


def _parse_row(header: Sequence[str], row: Sequence[str], where: str) -> Mapping[str, str]:
    if len(row) != len(header):
        raise DataError(f"{where}: the row has more or fewer fields than the header ({listed(header)})")
    return dict(zip(header, row, strict=True))


def _is_nested(kind: "pyarrow.DataType") -> bool:
    """Whether values of this type may have JSON text, or null keys that Arrow filled in."""
    import pyarrow

    lists = pyarrow.ListType | pyarrow.LargeListType | pyarrow.FixedSizeListType
    return isinstance(kind, pyarrow.JsonType | pyarrow.StructType) or (
        isinstance(kind, lists) and _is_nested(kind.value_type)
    )


def _parsed(value: Any, kind: "pyarrow.DataType", where: str) -> Any:
    """Return `value` without null keys of structs, and with text of Arrow's JSON type parsed.

    A struct has the keys of all records of its column; keys that a record lacks are null. Nulls in JSON text are kept.
    """
    import pyarrow

    if value is None or not _is_nested(kind):
        return value
    if isinstance(kind, pyarrow.JsonType):
        return parse_json(value, where)
    if isinstance(value, dict):
        return {name: _parsed(each, kind.field(name).type, where) for name, each in value.items() if each is not None}
    return [_parsed(each, kind.value_type, where) for each in value]


def _unreadable(label: str, kind: str, index: int, error: Exception) -> DataError:
    if isinstance(error, DataError):
        return error
    return DataError(f"{label}: cannot be read as {kind} after {index} records: {excerpt(first_line(error), 300)}")


SUFFIXES: Final = ".json, .jsonl, .csv, .parquet, .arrow, .txt, each also compressed as .gz or .zst"
"""Suffixes of files that can be read, for messages."""
_LONGEST_LINE = 1 << 28
_LONGEST_FIELD = 1 << 26  # characters; the csv module's default of 128 KiB is too short for long documents
_READ_CHARACTERS = 1 << 20


def find_reader(path: Path) -> Callable[[Path], Iterator[RecordBlock]] | None:
    """Return the reader for files with this name, or None. The reader's DataErrors name file and place."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    read = _READERS.get(suffixes[-1]) if suffixes else None
    return None if read is None else partial(_read, read)


class _File:
    """Decompressed bytes of a file; counts the bytes of the file that were read."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, path.stat().st_size
        self._raw = open_regular(path)
        self._reported = 0
        compression = _COMPRESSIONS.get(path.suffix.lower())
        self.stream: BinaryIO = self._raw
        if compression is not None:
            import pyarrow

            self.stream = io.BufferedReader(pyarrow.CompressedInputStream(self._raw, compression), 1 << 20)

    def text(self) -> io.TextIOWrapper:
        self._text = io.TextIOWrapper(self.stream, encoding="utf-8-sig", newline="")  # self._text keeps the stream open
        return self._text

    def with_places(self, *, is_mapped: bool) -> "pyarrow.NativeFile":
        """Return the bytes as a seekable file: a temporary file if compressed, else memory-mapped if `is_mapped`.

        If another process shortens a mapped file, this process crashes.
        """
        import pyarrow

        if self.stream is self._raw:
            return (pyarrow.memory_map if is_mapped else pyarrow.OSFile)(str(self.path))
        spool = tempfile.TemporaryFile()  # noqa: SIM115 -- Arrow closes it
        shutil.copyfileobj(self.stream, spool, 1 << 20)
        spool.seek(0)
        return pyarrow.PythonFile(spool, "r")

    def advance(self) -> int:
        """Return the number of bytes of the file that were read since the last call."""
        before, self._reported = self._reported, self._raw.tell()
        return self._reported - before

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()


def _read(read: Callable[[_File], Iterator[RecordBlock]], path: Path) -> Iterator[RecordBlock]:
    try:
        with _File(path) as file:
            yield from read(file)
    except UnicodeDecodeError as error:
        with _File(path) as file:  # find the line: the decoder knows only the position in its buffer
            lines = enumerate(file.stream, start=1)
            number = next(number for number, line in lines if line.decode("utf-8", "ignore").encode() != line)
        raise _not_utf8(f"{path}, line {number}", error) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {excerpt(reason_of(error), 300)}") from error


def _read_json(file: _File) -> Iterator[RecordBlock]:
    """Read a file with one JSON array of objects, or with one object per line."""
    start = file.stream.peek(1 << 12) if isinstance(file.stream, io.BufferedReader) else b""
    start = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start[:1] == b"[":
        return text_blocks(_JsonArray(file).items(), parse_json, file.advance)
    line, line_end, _ = start.partition(b"\n")
    if line[:1] == b"{" and line_end and not _is_json(line):
        _refuse_object(file.path)
    return _read_json_lines(file)


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except ValueError:
        return False
    return True


def _refuse_object(path: Path) -> None:
    """Raise DataError if the file is one JSON object over several lines."""
    with _File(path) as file:
        content = file.stream.read(_LONGEST_LINE)
    if len(content) < _LONGEST_LINE and _is_json(content.removeprefix(b"\xef\xbb\xbf")):
        raise DataError(f"{path}: {describe_object(json.loads(content.decode('utf-8-sig')))}")


def _read_text(file: _File) -> Iterator[RecordBlock]:
    """Read plain text with one record per line, like the `text` builder of the datasets library."""
    return text_blocks(_lines(file), _parse_line, file.advance)


def _parse_line(line: bytes, where: str) -> Mapping[str, str]:
    try:
        return {"text": line.decode().rstrip("\r\n")}
    except UnicodeDecodeError as error:
        raise _not_utf8(where, error) from error


def _read_json_lines(file: _File) -> Iterator[RecordBlock]:
    return text_blocks(_lines(file), parse_json, file.advance)


def _lines(file: _File) -> Iterator[tuple[bytes, int, str]]:
    for number, line in enumerate(iter(partial(file.stream.readline, _LONGEST_LINE), b""), start=1):
        if len(line) == _LONGEST_LINE:
            size = f"{_LONGEST_LINE >> 20} MiB"
            raise DataError(f"{file.path}, line {number}: is longer than {size}; each line must hold one record")
        content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if content.strip():
            yield content, len(content), f"{file.path}, line {number}"


class _JsonArray:
    """Reads a JSON array; holds at most one record or buffer in memory."""

    _SPACE = re.compile(r"[ \t\r\n]*")
    _NEAR_THE_END = 16  # characters: longer than any word or escape, which the end of the buffer may split

    def __init__(self, file: _File) -> None:
        self._path, self._text = file.path, file.text()
        self._buffer, self._position = "", 0
        self._lines_before, self._columns_before = 0, 0  # lines and characters before the buffer
        self._decoder = json.JSONDecoder()

    def items(self) -> Iterator[tuple[str, int, str]]:
        self._peek()
        for index in count():
            self._position += 1  # skip the opening bracket, or a comma
            if self._peek() == "]" and index == 0:
                break
            value = self._value()
            yield value, len(value), f"{self._path}, record {index}"
            if (mark := self._peek()) == "]":
                break
            if mark != ",":
                raise self._broken("Expecting ',' delimiter", self._position)
        self._position += 1
        if self._peek():
            raise self._broken("Extra data", self._position)

    def _peek(self) -> str:
        """Skip white space and return the next character; an empty text at the end of the file."""
        while True:
            space = self._SPACE.match(self._buffer, self._position)
            assert space is not None
            self._position = space.end()
            if self._position < len(self._buffer) or not self._read_on():
                return self._buffer[self._position : self._position + 1]

    def _value(self) -> str:
        while True:
            try:
                _, end = self._decoder.raw_decode(self._buffer, self._position)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or error.pos > len(self._buffer) - self._NEAR_THE_END
                if is_cut and self._read_on():
                    continue
                raise self._broken(error.msg, error.pos) from error
            if end == len(self._buffer) and self._read_on():  # the next buffer may continue a number
                continue
            value = self._buffer[self._position : end]
            self._position = end
            return value

    def _read_on(self) -> bool:
        """Read more text and drop the text before the position; False at the end of the file."""
        more = self._text.read(max(_READ_CHARACTERS, len(self._buffer) - self._position))
        if more:
            past = self._buffer[: self._position]
            lines = past.count("\n")
            self._lines_before += lines
            self._columns_before = len(past) - past.rfind("\n") - 1 if lines else self._columns_before + len(past)
            self._buffer, self._position = self._buffer[self._position :] + more, 0
        return bool(more)

    def _broken(self, message: str, position: int) -> DataError:
        lines = self._buffer.count("\n", 0, position)
        columns = position - self._buffer.rfind("\n", 0, position) - 1 if lines else self._columns_before + position
        place = f"line {self._lines_before + lines + 1}, column {columns + 1}"
        return DataError(f"{self._path}, {place}: broken JSON: {message.removesuffix(' at')}")


def _read_csv(file: _File) -> Iterator[RecordBlock]:
    """Read comma-separated values with a header line; all values are text."""
    csv.field_size_limit(_LONGEST_FIELD)
    rows = csv.reader(file.text(), strict=True)

    def filled_rows() -> Iterator[tuple[list[str], int, str]]:
        for row in filter(None, rows):
            yield row, sum(map(len, row)), f"{file.path}, line {rows.line_num}"

    try:
        yield from text_blocks(filled_rows(), partial(_parse_row, next(rows, [])), file.advance)
    except csv.Error as error:
        raise DataError(f"{file.path}, line {rows.line_num}: broken CSV: {error}") from error


def _read_parquet(file: _File) -> Iterator[RecordBlock]:
    import pyarrow.parquet

    def batches() -> Iterator[tuple["pyarrow.RecordBatch", int]]:
        source = file.with_places(is_mapped=False)
        with pyarrow.parquet.ParquetFile(source, buffer_size=_READ_CHARACTERS, pre_buffer=False) as table:
            num_rows, num_read = max(table.metadata.num_rows, 1), 0
            for batch in table.iter_batches(batch_size=MAX_BLOCK_RECORDS):
                num_read += batch.num_rows
                yield batch, file.size * batch.num_rows // num_rows
            if num_read < table.metadata.num_rows:  # Arrow accepts a truncated buffered stream as complete
                raise ValueError(f"the file ends early: it should have {num_rows} rows")

    return table_blocks(batches(), str(file.path), "Parquet")


def _read_arrow(file: _File) -> Iterator[RecordBlock]:
    """Read Arrow's file or stream format, as saved by the datasets library."""
    import pyarrow.ipc

    def batches() -> Iterator[tuple["pyarrow.RecordBatch", int]]:
        source = file.with_places(is_mapped=True)  # mapped, because one batch may be as large as the table
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            with pyarrow.ipc.open_file(source) as table:
                ends = [file.size * index // table.num_record_batches for index in range(table.num_record_batches + 1)]
                for index, (start, end) in enumerate(pairwise(ends)):
                    yield table.get_batch(index), end - start
            return
        with pyarrow.ipc.open_stream(source) as stream:
            start = 0
            for batch in stream:
                yield batch, source.tell() - start
                start = source.tell()

    return table_blocks(batches(), str(file.path), "Arrow")


_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
COMPRESSED: Final = tuple(_COMPRESSIONS)
"""Suffixes of compressed files."""
_READERS: Mapping[str, Callable[[_File], Iterator[RecordBlock]]] = {
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".txt": _read_text,
}
