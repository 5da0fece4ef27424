"""Formats of files: the same records whatever the format, in blocks of bounded size, and errors with their place."""

import gzip
import io
import json
import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from mobius.data import readers
from mobius.data.readers import RecordBlock, find_reader
from mobius.errors import DataError

RECORDS: list[dict[str, object]] = [{"text": "one"}, {"text": "two, with a comma"}, {"text": "dreißig 三十"}]


def table(write: Callable[[io.BytesIO, pyarrow.Table], object], records: list[dict[str, object]]) -> bytes:
    file = io.BytesIO()
    write(file, pyarrow.Table.from_pylist(records))
    return file.getvalue()


def arrow_file(file: io.BytesIO, content: pyarrow.Table) -> None:
    with pyarrow.ipc.new_file(file, content.schema) as writer:
        writer.write_table(content, max_chunksize=2)


def arrow_stream(file: io.BytesIO, content: pyarrow.Table) -> None:
    with pyarrow.ipc.new_stream(file, content.schema) as writer:
        writer.write_table(content, max_chunksize=2)


CONTENTS: dict[str, Callable[[list[dict[str, object]]], bytes]] = {
    "a.jsonl": lambda records: "".join(json.dumps(record) + "\n" for record in records).encode(),
    "lines.json": lambda records: "\r\n".join(json.dumps(record, ensure_ascii=False) for record in records).encode(),
    "a.json": lambda records: ("\n " + json.dumps(records, indent=1)).encode(),
    "a.csv": lambda records: ("text\n" + "".join(f'"{record["text"]}"\n' for record in records)).encode(),
    "a.txt": lambda records: "".join(f"{record['text']}\r\n" for record in records).encode(),
    "a.parquet": lambda records: table(lambda file, content: pyarrow.parquet.write_table(content, file), records),
    "file.arrow": lambda records: table(arrow_file, records),
    "stream.arrow": lambda records: table(arrow_stream, records),
}
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".zst": lambda content: pyarrow.compress(content, codec="zstd", asbytes=True),
}


def blocks(path: Path) -> list[RecordBlock]:
    read = find_reader(path)
    assert read is not None
    return list(read(path))


def fields(path: Path) -> list[dict[str, object]]:
    return [dict(record.fields) for block in blocks(path) for record in block.records()]


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("name", CONTENTS)
def test_every_kind_of_file_gives_the_same_records(tmp_path: Path, name: str, compression: str) -> None:
    path = tmp_path / f"{name}{compression}"
    path.write_bytes(COMPRESSIONS[compression](CONTENTS[name](RECORDS)))
    assert fields(path) == RECORDS


@pytest.mark.parametrize("name", ["a.text", "a", "a.gz", "json", ".jsonl", "a.jsonl.bz2", "a.jsonl.gz.gz"])
def test_other_names_have_no_reader(name: str) -> None:
    assert find_reader(Path(name)) is None


@pytest.mark.parametrize("name", CONTENTS)
def test_blocks_are_bounded_and_know_their_records_and_their_share_of_the_file(tmp_path: Path, name: str) -> None:
    records: list[dict[str, object]] = [{"text": f"{number} " * 2000} for number in range(1500)]
    path = tmp_path / name
    path.write_bytes(CONTENTS[name](records))
    found = blocks(path)
    assert fields(path) == records
    assert sum(map(len, found)) == 1500
    assert max(len(pickle.dumps(block)) for block in found) < 1.2 * 2**20
    assert [dict(record.fields) for record in found[0].first(2).records()] == records[:2]
    assert sum(block.num_bytes for block in found) == pytest.approx(path.stat().st_size, rel=0.02)


def test_members_and_frames_one_behind_the_other_are_one_file(tmp_path: Path) -> None:
    for compression in (".gz", ".zst"):
        path = tmp_path / f"a.jsonl{compression}"
        path.write_bytes(b"".join(COMPRESSIONS[compression](CONTENTS["a.jsonl"]([record])) for record in RECORDS))
        assert fields(path) == RECORDS


def test_a_parquet_file_that_is_shortened_while_it_is_read_is_told(tmp_path: Path) -> None:
    """If it were mapped, the process would be killed by the signal SIGBUS."""
    path = tmp_path / "a.parquet"
    long = pyarrow.table({"text": [str(number) * 500 for number in range(4000)]})
    pyarrow.parquet.write_table(long, path, row_group_size=100, compression="none", use_dictionary=False)
    read = find_reader(path)
    assert read is not None
    begun = read(path)
    next(begun)
    os.truncate(path, 1000)
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as Parquet after \d+ records"):
        list(begun)


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"text": "one"}\n\n{"text": "two"}')
    assert fields(path) == [{"text": "one"}, {"text": "two"}]


def test_a_long_csv_field_is_read_whole(tmp_path: Path) -> None:
    long = "word " * 100_000
    (tmp_path / "a.csv").write_bytes(CONTENTS["a.csv"]([{"text": long}]))
    assert fields(tmp_path / "a.csv") == [{"text": long}]


def test_parquet_text_that_is_none_is_told_with_its_place(tmp_path: Path) -> None:
    binary = pyarrow.array([b"one", b"\xff"], type=pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), 2, binary.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as Parquet after 0 records"):
        fields(tmp_path / "a.parquet")


NESTED = [
    {"a": [1, -2.5e3, True, None, {"b": 'x"\\\n}]'}], "\U0001f600": "é\ud83d"},
    {},
    {"": ""},
    {"n": 10**9},
    {"long": "word " * 99},
] * 3


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1 << 20])
def test_an_array_is_read_the_same_whatever_a_buffer_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(readers, "_READ_CHARACTERS", size)
    for indent in (None, 2):
        (tmp_path / "a.json").write_text(json.dumps(NESTED, indent=indent))
        assert fields(tmp_path / "a.json") == NESTED
    for empty in ("[]", " [ ] \n"):
        (tmp_path / "a.json").write_text(empty)
        assert fields(tmp_path / "a.json") == []


@pytest.mark.parametrize("size", [1, 50, 1 << 20])
def test_a_broken_array_is_told_with_the_place_that_the_json_module_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(readers, "_READ_CHARACTERS", size)
    whole = '[\n{"a": "x y",\n "b": [1, 2]},\n  {"c": null, "d": {"e": "\\u00e9"}} ,\n{}]'
    broken = [whole[:end] for end in range(1, len(whole))]
    broken += [whole[:at] + "~" + whole[at + 1 :] for at in range(1, len(whole)) if whole[at] not in 'xy cdeab"\\']
    broken += [whole + " ,", whole.replace(",\n{}", ",\n")]
    for text in broken:
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(json.JSONDecodeError) as expected:
            json.loads(text)
        with pytest.raises(DataError) as caught:
            fields(tmp_path / "a.json")
        problem = expected.value.msg.removesuffix(" at")  # as in "Unterminated string starting at", line and column
        place = f"line {expected.value.lineno}, column {expected.value.colno}: broken JSON: {problem}"
        assert str(caught.value).endswith(place), text


def test_the_rest_of_a_broken_array_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a slip at the start of a file that is larger than memory would end in a kill."""
    monkeypatch.setattr(readers, "_READ_CHARACTERS", 1000)
    (tmp_path / "a.json").write_bytes(b'[{"a" 1},' + b" " * 5000 + b"\xff")
    with pytest.raises(DataError, match="line 1, column 7: broken JSON: Expecting ':' delimiter"):
        fields(tmp_path / "a.json")


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.json", "a.csv", "a.parquet", "file.arrow"])
def test_reading_needs_the_memory_of_a_few_blocks(tmp_path: Path, name: str) -> None:
    compression = Path(name).suffix if name.endswith(".zst") else ""
    records: list[dict[str, object]] = [{"text": f"{number} word" * 2000} for number in range(1500)]
    path = tmp_path / name
    path.write_bytes(COMPRESSIONS[compression](CONTENTS[name.removesuffix(compression)](records)))
    read = find_reader(path)
    assert read is not None
    num_bytes = 0
    del records
    tracemalloc.start()
    try:
        for block in read(path):
            num_bytes += len(pickle.dumps(block))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert num_bytes > 15 * 2**20
    assert peak < 12 * 2**20


def test_a_line_that_does_not_end_is_refused_before_memory_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_LONGEST_LINE", 1 << 20)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' + bytes(3 << 20))
    with pytest.raises(DataError, match=r"a.jsonl, line 2: is longer than 1 MiB"):
        fields(tmp_path / "a.jsonl")


def test_a_csv_has_fields_of_two_lines_and_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('a,b\n"1\n2",3\n\n4,5\n')
    assert fields(tmp_path / "a.csv") == [{"a": "1\n2", "b": "3"}, {"a": "4", "b": "5"}]


def test_what_arrow_stores_as_json_text_is_read_as_its_value(tmp_path: Path) -> None:
    texts = pyarrow.array(['{"city": "Paris"}', None], pyarrow.string()).cast(pyarrow.json_(pyarrow.string()))
    lists = pyarrow.ListArray.from_arrays([0, 1, 2], texts)
    content = pyarrow.table({"plain": texts, "listed": lists, "text": ["{}", "[]"]})
    with (tmp_path / "a.arrow").open("wb") as file, pyarrow.ipc.new_stream(file, content.schema) as writer:
        writer.write_table(content)
    assert fields(tmp_path / "a.arrow") == [
        {"plain": {"city": "Paris"}, "listed": [{"city": "Paris"}], "text": "{}"},
        {"plain": None, "listed": [None], "text": "[]"},
    ]


def test_nulls_are_kept_as_written_and_those_that_arrow_fills_in_are_not(tmp_path: Path) -> None:
    """A struct column gives each record the keys of all records; JSON text in a column is as it was written."""

    def record(**arguments: object) -> dict[str, object]:
        call = {"name": "f", "arguments": arguments}
        return {"messages": [{"role": "user"}, {"role": "assistant", "calls": [call]}], "tools": '{"default": null}'}

    written = [record(x=1), record(y=2, z=None), record(x=3, z="a")]
    read = {}
    for name in ("a.jsonl", "a.json", "a.parquet", "file.arrow"):
        (tmp_path / name).write_bytes(CONTENTS[name](written))
        read[name] = fields(tmp_path / name)
    assert read["a.jsonl"] == read["a.json"] == written
    assert read["a.parquet"] == read["file.arrow"] == [record(x=1), record(y=2), record(x=3, z="a")]


def test_a_line_of_text_is_a_record_and_an_empty_line_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone two \n\n  \n three\nfour")
    assert fields(tmp_path / "a.txt") == [{"text": "one two "}, {"text": " three"}, {"text": "four"}]
