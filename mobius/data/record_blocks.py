"""Blocks of consecutive unparsed records, on their way to the code that parses them.

Parsing often runs in another process, so the reading process only finds where records end.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from mobius.errors import DataError, excerpt, first_line, listed, quoted

if TYPE_CHECKING:
    import pyarrow

MAX_BLOCK_RECORDS: Final = 256
"""Maximum number of records in a block."""
_BLOCK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """A record; `where` is its place for messages, e.g. `train.jsonl, line 7`."""

    fields: Mapping[str, object]
    where: str

    def __post_init__(self) -> None:
        if not isinstance(self.fields, dict):
            kind = type(self.fields).__name__
            raise DataError(f"{self.where}: a record must be a JSON object with named columns, not {kind}")


class RecordBlock(Protocol):
    """Some consecutive records; picklable."""

    @property
    def num_bytes(self) -> int: ...  # bytes of the file since the previous block

    def __len__(self) -> int: ...

    def first(self, number: int) -> "RecordBlock":
        """A block of the first `number` records only."""

    def records(self) -> Iterator[Record]:
        """Parse the records. Raises DataError that names the place of a broken one."""


@dataclass(frozen=True, slots=True)
class TextBlock:
    """Text records with their places; `parse` maps (text, place) to columns."""

    parse: Callable[[Any, str], Any]
    items: Sequence[tuple[Any, str]]
    num_bytes: int

    def __len__(self) -> int:
        return len(self.items)

    def first(self, number: int) -> "TextBlock":
        """A block of the first `number` records only."""
        return replace(self, items=self.items[:number])

    def records(self) -> Iterator[Record]:
        """Parse the records."""
        return (Record(self.parse(item, where), where) for item, where in self.items)


@dataclass(frozen=True, slots=True)
class TableBlock:
    """Table rows in Arrow's stream format; the first one is record `index` of `label`."""

    label: str
    kind: str
    index: int
    num_rows: int
    table: bytes
    num_bytes: int

    def __len__(self) -> int:
        return self.num_rows

    def first(self, number: int) -> "TableBlock":
        """A block of the first `number` records only."""
        return replace(self, num_rows=number)

    def records(self) -> Iterator[Record]:
        """Parse the records."""
        import pyarrow.ipc

        try:
            with pyarrow.ipc.open_stream(self.table) as stream:
                table = stream.read_all().slice(0, self.num_rows)
            types = {field.name: field.type for field in table.schema if _holds_json(field.type)}
            rows = table.to_pylist()
        except Exception as error:  # pyarrow's errors, and ValueError, OverflowError, ... of values beyond Python's
            raise _unreadable(self.label, self.kind, self.index, error) from error
        for index, row in enumerate(rows, start=self.index):
            where = f"{self.label}, record {index}"
            yield Record(row | {name: _parsed(row[name], kind, where) for name, kind in types.items()}, where)


def text_blocks(
    items: Iterable[tuple[Any, int, str]], parse: Callable[[Any, str], Any], advance: Callable[[], int]
) -> Iterator[TextBlock]:
    """Blocks of items (value, size, place); `advance` returns the bytes read since its last call."""
    held: list[tuple[Any, str]] = []
    num_held = 0
    for item, size, place in items:
        held.append((item, place))
        num_held += size
        if len(held) == MAX_BLOCK_RECORDS or num_held >= _BLOCK_BYTES:
            yield TextBlock(parse, held, advance())
            held, num_held = [], 0
    if held:
        yield TextBlock(parse, held, advance())


def table_blocks(batches: Iterable[tuple["pyarrow.RecordBatch", int]], label: str, kind: str) -> Iterator[TableBlock]:
    """Blocks of a table's batches, each batch with the number of file bytes read for it."""
    import pyarrow.ipc

    index = 0
    try:
        for batch, num_bytes in batches:
            step = max(1, min(MAX_BLOCK_RECORDS, _BLOCK_BYTES * batch.num_rows // max(batch.nbytes, 1)))
            for start in range(0, batch.num_rows, step):
                rows = batch.slice(start, step)
                sink = pyarrow.BufferOutputStream()
                with pyarrow.ipc.new_stream(sink, rows.schema) as stream:
                    stream.write_batch(rows)
                table = sink.getvalue().to_pybytes()
                yield TableBlock(label, kind, index, len(rows), table, num_bytes * len(rows) // batch.num_rows)
                index += len(rows)
    except Exception as error:
        raise _unreadable(label, kind, index, error) from error


def parse_line(line: bytes, where: str) -> Any:
    """Parse a line of JSON. Raises DataError that begins with `where`."""
    try:
        return parse_text(line.decode(), where)
    except UnicodeDecodeError as error:
        raise not_utf8(where, error) from error


def parse_text(text: str, where: str) -> Any:
    """Parse JSON text. Raises DataError that begins with `where`."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}, column {error.colno}: broken JSON: {error.msg.removesuffix(' at')}. Each line must hold one "
            f"whole JSON object; the line begins with {quoted(text.strip()[:60])}"
        ) from error
    except (RecursionError, ValueError) as error:
        raise beyond_python(where, error) from error


def beyond_python(where: str, error: Exception) -> DataError:
    """DataError for a value that Python cannot hold, from a RecursionError or ValueError."""
    if isinstance(error, RecursionError):
        return DataError(f"{where}: lists or objects are nested too deeply to be a record")
    # Python parses integers of up to 4300 digits.
    return DataError(f"{where}: a number has too many digits: {first_line(error)}")


def not_utf8(where: str, error: UnicodeDecodeError) -> DataError:
    """DataError for bytes that are not UTF-8."""
    return DataError(f"{where}: is not UTF-8 text ({error.reason}); convert the file to UTF-8")


def parse_row(header: Sequence[str], row: Sequence[str], where: str) -> Mapping[str, str]:
    """Columns of a row in a table of text. Raises DataError if the number of fields differs from the header."""
    if len(row) != len(header):
        raise DataError(f"{where}: the row has more or fewer fields than the header ({listed(header)})")
    return dict(zip(header, row, strict=True))


def _holds_json(kind: "pyarrow.DataType") -> bool:
    import pyarrow

    if isinstance(kind, pyarrow.JsonType):
        return True
    return any(_holds_json(kind.field(index).type) for index in range(kind.num_fields))


def _parsed(value: Any, kind: "pyarrow.DataType", where: str) -> Any:
    """`value` with JSON text of Arrow's JSON type parsed."""
    import pyarrow

    if value is None or not _holds_json(kind):
        return value
    if isinstance(kind, pyarrow.JsonType):
        return parse_text(value, where)
    if isinstance(value, dict):
        return {name: _parsed(each, kind.field(name).type, where) for name, each in value.items()}
    return [_parsed(each, kind.field(0).type, where) for each in value]


def _unreadable(label: str, kind: str, index: int, error: Exception) -> DataError:
    if isinstance(error, DataError):
        return error
    return DataError(f"{label}: cannot be read as {kind} after {index} records: {excerpt(first_line(error), 300)}")
