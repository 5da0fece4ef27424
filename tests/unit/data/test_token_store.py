"""Files of tokenized samples: they grow by parts, of which none is lost or doubled, and appear complete."""

import logging
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.samples import dataset_of

from mobius.data import token_store
from mobius.data.token_store import DatasetWriter, TokenizedDataset
from mobius.errors import DataError

SAMPLES = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]


def append(writer: DatasetWriter, samples: list[list[int]]) -> None:
    ids = np.array([token for sample in samples for token in sample], np.int32)
    offsets = np.cumsum([0, *map(len, samples)])
    writer.append(TokenizedDataset(ids, ids % 2 == 0, offsets))


def loaded(folder: Path) -> tuple[TokenizedDataset, dict[str, Any]]:
    found = token_store.load_tokenized(folder)
    assert found is not None
    return found


def as_lists(dataset: TokenizedDataset) -> list[list[int]]:
    return [dataset.sample(index).input_ids.tolist() for index in range(len(dataset))]


def test_samples_come_back_in_their_order_with_the_facts(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "a") as writer:
        append(writer, SAMPLES[:2])
        append(writer, SAMPLES[2:])
        writer.finish({"name": "value"})
    dataset, facts = loaded(tmp_path / "a")
    assert as_lists(dataset) == SAMPLES
    assert dataset.sample(3).is_target.tolist() == [False, True, False, True]
    assert (dataset.input_ids.dtype, dataset.is_target.dtype) == (np.int32, np.bool_)
    assert dataset.lengths.tolist() == [3, 2, 1, 4]
    assert dataset.lengths.dtype == np.int32
    assert facts["name"] == "value"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


@pytest.mark.parametrize("has_prefix", [False, True])
def test_a_prefix_predicts_no_token_and_a_prompt_the_first_of_each_sequence(has_prefix: bool) -> None:
    ids, offsets = np.arange(1, 8, dtype=np.int32), np.array([0, 7])
    dataset = TokenizedDataset(ids, ids > 0, offsets, np.array([0, 3, 7]), num_virtual_tokens=2, has_prefix=has_prefix)
    sample, first = dataset.sample(0), not has_prefix
    assert sample.input_ids.tolist() == [-1, -2, 1, 2, 3, -1, -2, 4, 5, 6, 7]
    assert sample.is_target.tolist() == [False, False, first, True, True, False, False, first, True, True, True]
    assert ids.all()


@pytest.mark.parametrize(
    ("row_length", "rows"),
    [
        (2, [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]),
        (3, [[1, 2, 3], [4, 5, 6], [7, 8, 9]]),
        (4, [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]),
        (11, [list(range(1, 11))]),
    ],
)
def test_a_stream_is_cut_into_rows_and_a_single_last_token_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row_length: int, rows: list[list[int]]
) -> None:
    monkeypatch.setattr(token_store, "_OFFSETS_AT_ONCE", 2)
    with DatasetWriter(tmp_path / "a") as writer:
        for sample in SAMPLES:
            row = np.array(sample, np.int32), np.ones(len(sample), np.bool_)
            writer.append(dataset_of([row]), is_joined=True)
        writer.finish({}, row_length=row_length)
    assert as_lists(loaded(tmp_path / "a")[0]) == rows


def test_finished_parts_are_taken_over_and_what_is_behind_them_is_cut_off(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "a") as writer:
        assert writer.progress is None
        append(writer, SAMPLES[:1])
        writer.commit_part({"done": 1})
        append(writer, SAMPLES[1:2])
        writer.commit_part({"done": 2})
        append(writer, [[77] * 100])
    assert token_store.load_tokenized(tmp_path / "a") is None
    with (tmp_path / "a.partial" / "journal.jsonl").open("a") as journal:
        journal.write('{"num_tokens": 105, "num_sam')  # the process was killed in the middle of a line
    with DatasetWriter(tmp_path / "a") as writer:
        assert (writer.progress, writer.num_tokens, writer.num_samples) == ({"done": 2}, 5, 2)
        append(writer, SAMPLES[2:3])
        writer.commit_part({"done": 3})
    with DatasetWriter(tmp_path / "a") as writer:
        assert writer.progress == {"done": 3}
        append(writer, SAMPLES[3:])
        writer.finish({})
    assert as_lists(loaded(tmp_path / "a")[0]) == SAMPLES


@pytest.mark.parametrize("damaged", ["input_ids.bin", "is_target.bin", "offsets.bin", "journal.jsonl"])
@pytest.mark.parametrize("content", [b"", b"\xff\n", None])
def test_parts_that_are_damaged_are_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: str, content: bytes | None
) -> None:
    with DatasetWriter(tmp_path / "a") as writer:
        append(writer, [[77] * 9] * 9)
        writer.commit_part({"done": 1})
    path = tmp_path / "a.partial" / damaged
    path.unlink() if content is None else path.write_bytes(content)
    with caplog.at_level(logging.WARNING, logger="mobius"), DatasetWriter(tmp_path / "a") as writer:
        assert (writer.progress, writer.num_tokens, writer.num_samples) == (None, 0, 0)
        append(writer, SAMPLES)
        writer.finish({})
    assert as_lists(loaded(tmp_path / "a")[0]) == SAMPLES
    is_told = damaged != "journal.jsonl" or content == b"\xff\n"
    assert (f"unfinished data in {tmp_path / 'a.partial'} is damaged" in caplog.text) is is_told


def test_without_a_finished_part_nothing_is_left(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "a") as writer:
        append(writer, SAMPLES)
    assert list(tmp_path.iterdir()) == []


def test_what_a_run_left_a_week_ago_is_removed_unless_a_run_works_on_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    week = 7 * 24 * 3600
    for name, age in (("old", week + 60), ("busy", week + 60), ("young", week - 60), ("goes_on", week + 60)):
        with DatasetWriter(tmp_path / name) as writer:
            append(writer, SAMPLES)
            writer.commit_part({})
        for path in (tmp_path / f"{name}.partial", *(tmp_path / f"{name}.partial").iterdir()):
            os.utime(path, (time.time() - age,) * 2)
    os.utime(tmp_path / "goes_on.partial" / "input_ids.bin")
    with token_store.tokenized_lock(tmp_path / "busy"), caplog.at_level(logging.INFO, logger="mobius"):
        token_store.remove_abandoned(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.partial")} == {"busy", "young", "goes_on"}
    (told,) = caplog.messages
    assert told.startswith(f"removed {tmp_path / 'old.partial'} (")
    with token_store.tokenized_lock(tmp_path / "old"), DatasetWriter(tmp_path / "old") as writer:
        assert writer.progress is None


def test_a_disk_that_is_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DatasetWriter(tmp_path / "a") as writer:
        append(writer, SAMPLES)
        writer.commit_part({"done": 1})
        with Path("/dev/full").open("ab") as full:
            monkeypatch.setitem(writer._arrays, "input_ids", full)
            with pytest.raises(DataError, match="cannot keep the tokenized dataset in .*: No space left on device"):
                append(writer, [[7] * 1_000_000])
            monkeypatch.undo()
    with DatasetWriter(tmp_path / "a") as writer:
        assert writer.progress == {"done": 1}
