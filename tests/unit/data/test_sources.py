import gzip
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from mobius.config.config import DatasetEntry
from mobius.data import sources
from mobius.data.sources import open_source
from mobius.errors import DataError

RECORDS: list[dict[str, object]] = [{"text": "one"}, {"text": "two, with a comma"}, {"text": "dreißig 三十"}]


def write(path: Path, records: list[dict[str, object]] = RECORDS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    match path.name.partition(".")[2].lower():
        case "jsonl" | "lines.json":
            path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        case "jsonl.gz":
            path.write_bytes(gzip.compress(json.dumps(records[0]).encode()))
        case "json":
            path.write_text("\n " + json.dumps(records, indent=1), encoding="utf-8")
        case "csv":
            path.write_text("text\n" + "".join(f'"{record["text"]}"\n' for record in records), encoding="utf-8")
        case "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def entry(dataset: Path | str, **changes: Any) -> DatasetEntry:
    return DatasetEntry(str(dataset), **changes)


def fields(dataset: Path | str, **changes: Any) -> list[dict[str, object]]:
    blocks = open_source(entry(dataset, **changes)).read()
    return [dict(record.fields) for block in blocks for record in block.records()]


@pytest.mark.parametrize("name", ["a.JSONL", "a.Jsonl", "a.JSON", "a.lines.Json", "a.CSV", "a.Parquet"])
def test_capitals_in_a_suffix_make_no_difference(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    assert fields(path) == fields(tmp_path) == RECORDS
    assert open_source(entry(path)).num_records == (3 if name.lower() == "a.jsonl" else None)


def test_the_train_split_and_what_holds_no_records_are_known_in_capitals_too(tmp_path: Path) -> None:
    for name in ("TRAIN.JSONL", "Test.JSONL", "Dataset_Infos.JSON"):
        write(tmp_path / name, [{"text": name}])
    assert fields(tmp_path) == [{"text": "TRAIN.JSONL"}]


def test_a_folder_gives_all_its_files_in_order(tmp_path: Path) -> None:
    write(tmp_path / "b.csv", [{"text": "second"}])
    write(tmp_path / "a" / "z.jsonl", [{"text": "first"}])
    write(tmp_path / ".cache" / "hidden.jsonl", [{"text": "no"}])
    write(tmp_path / "dataset_infos.json", [{"text": "no"}])
    (tmp_path / "README.md").write_text("no")
    assert fields(tmp_path) == [{"text": "first"}, {"text": "second"}]


def test_text_files_of_a_folder_are_data_where_there_are_no_others(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second\n")
    (tmp_path / "a.TXT.gz").write_bytes(gzip.compress(b"first\n\n"))
    assert fields(tmp_path) == [{"text": "first"}, {"text": "second"}]
    write(tmp_path / "c.jsonl")
    assert fields(tmp_path) == RECORDS


def test_the_folder_of_a_run_inside_the_data_is_none_of_the_data(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"text": "first"}])
    write(tmp_path / "saves" / "b.jsonl", [{"text": "second"}])
    run = tmp_path / "saves" / "first"
    (run / "training_args.yaml").parent.mkdir()
    (run / "training_args.yaml").touch()
    for name in ("plan.json", "metrics.jsonl", "checkpoint-1/trainer_state.json"):
        write(run / name, [{"text": "no"}])
    assert fields(tmp_path) == [{"text": "first"}, {"text": "second"}]


def test_a_folder_with_splits_gives_the_train_split(tmp_path: Path) -> None:
    for split in ("test", "train", "validation"):
        write(tmp_path / "data" / f"{split}-00000-of-00001.parquet", [{"text": split}])
    assert fields(tmp_path) == [{"text": "train"}]


@pytest.mark.parametrize(
    ("split", "name"),
    [
        ("test", "test-00000.parquet"),
        ("validation", "valid.jsonl"),
        ("validation", "dev/a.jsonl"),
        ("hard", "a/hard_2.csv"),
    ],
)
def test_a_folder_gives_the_split_that_is_asked_for(tmp_path: Path, split: str, name: str) -> None:
    for path in ("train-00000.parquet", name, "other.jsonl"):
        write(tmp_path / "data" / path, [{"text": path}])
    assert fields(tmp_path, split=split) == [{"text": name}]


@pytest.mark.parametrize(
    ("names", "used"),
    [
        ("a.jsonl test.jsonl validation.jsonl b-dev.jsonl c_eval_2.jsonl val.jsonl.gz TEST/d.jsonl", "a.jsonl"),
        ("train_extra.jsonl a.jsonl b.jsonl test-1.jsonl", "a.jsonl b.jsonl train_extra.jsonl"),
        ("train.jsonl train_extra.jsonl notes.jsonl test.jsonl", "train.jsonl train_extra.jsonl"),
        ("train/a.jsonl test/a.jsonl notes.jsonl", "train/a.jsonl"),
        (
            "data/train-0-of-2.jsonl data/train-1-of-2.jsonl more.jsonl",
            "data/train-0-of-2.jsonl data/train-1-of-2.jsonl",
        ),
        ("test/train.jsonl train/test.jsonl", "test/train.jsonl"),
        ("train_val.jsonl val.jsonl", "train_val.jsonl"),
        (
            "contest.jsonl latest.jsonl devices.jsonl values.jsonl",
            "contest.jsonl devices.jsonl latest.jsonl values.jsonl",
        ),
    ],
)
def test_files_of_other_splits_are_left_out_of_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: str, used: str
) -> None:
    for name in names.split():
        write(tmp_path / name, [{"text": name}])
    expected = used.split()
    with caplog.at_level(logging.INFO, "mobius.data.sources"):
        assert fields(tmp_path) == [{"text": name} for name in expected]
    (line,) = caplog.messages
    taken, _, left_out = line.partition("; not used, because of their split: ")
    assert taken.rpartition(": ")[2].split(", ") == expected
    assert sorted(filter(None, left_out.split(", "))) == sorted(set(names.split()) - set(expected))


def test_a_folder_of_other_splits_alone_is_evaluated_on(tmp_path: Path) -> None:
    for name in ("test.jsonl", "validation.jsonl"):
        write(tmp_path / name, [{"text": name}])
    blocks = open_source(entry(tmp_path), option="--eval_dataset").read()
    assert [record.fields for block in blocks for record in block.records()] == [{"text": "validation.jsonl"}]


def test_a_folder_that_the_datasets_library_saved_is_read(tmp_path: Path) -> None:
    import datasets

    splits = {
        name: datasets.Dataset.from_list([{"text": f"{name} {n}"} for n in range(9)]) for name in ("train", "test")
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "all", num_shards={"train": 3, "test": 1})
    shuffled = splits["train"].select([8, 0, 3])
    shuffled.save_to_disk(tmp_path / "one")
    shutil.copy(next((tmp_path / "one").glob("*.arrow")), tmp_path / "one" / "cache-0123456789.arrow")
    assert fields(tmp_path / "all") == [{"text": f"train {n}"} for n in range(9)]
    assert fields(tmp_path / "all", split="test") == [{"text": f"test {n}"} for n in range(9)]
    assert fields(tmp_path / "one") == [{"text": f"train {n}"} for n in (8, 0, 3)]


def test_the_hash_of_a_large_file_is_remembered_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hash_cache = write(tmp_path / "a.jsonl"), tmp_path / "memory"

    def opened() -> tuple[str, int | None]:
        source = open_source(entry(path), hash_cache=hash_cache)
        return source.fingerprint, source.num_records

    whole = opened()
    assert not hash_cache.exists(), "a small file is hashed each time"
    monkeypatch.setattr(sources, "_REMEMBERED_BYTES", 1)
    assert opened() == whole
    assert not hash_cache.exists(), "a file of this minute may change once more without a new time"
    monkeypatch.setattr(sources, "_SETTLED_SECONDS", -1)
    assert opened() == whole
    (note,) = hash_cache.iterdir()
    note.write_text(note.read_text().replace('"lines": 3', '"lines": 4'))
    assert opened() == (whole[0], 4), "the note is what is read"
    facts, content = path.stat(), path.read_bytes()
    path.write_bytes(content.replace(b"one", b"two"))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    changed = opened()
    assert changed[0] != whole[0]
    assert changed[1] == 3
    note.write_text("nonsense")
    assert opened() == changed


def test_a_word_that_contains_train_is_no_split(tmp_path: Path) -> None:
    write(tmp_path / "constraints.jsonl", [{"text": "a"}])
    write(tmp_path / "other.jsonl", [{"text": "b"}])
    assert fields(tmp_path) == [{"text": "a"}, {"text": "b"}]


def test_the_fingerprint_follows_the_content_and_not_the_place(tmp_path: Path) -> None:
    first, same = write(tmp_path / "a" / "x.jsonl"), write(tmp_path / "b" / "x.jsonl")
    other = write(tmp_path / "c" / "x.jsonl", RECORDS[:2])
    prints = [open_source(entry(path)).fingerprint for path in (first, same, other)]
    assert prints[0] == prints[1] != prints[2]


def test_the_number_of_lines_is_known_before_reading(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    assert open_source(entry(path)).num_records == 3
    path.write_text(path.read_text().rstrip("\n"))
    assert open_source(entry(path)).num_records == 3


def test_what_is_neither_file_nor_folder_is_none_of_a_folders_data(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    write(tmp_path / "a.jsonl")
    assert fields(tmp_path) == RECORDS


def test_a_file_that_is_gone_when_it_is_read_is_told(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json", "a.csv", "a.parquet"):
        path = write(tmp_path / name)
        source = open_source(entry(path))
        path.unlink()
        with pytest.raises(DataError, match=f"{name}: cannot be read"):
            [list(block.records()) for block in source.read()]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_file_that_changes_before_it_is_read_whole_is_told(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    source = open_source(entry(path))
    write(path, RECORDS[:2])
    with pytest.raises(DataError, match=rf"{name}: has changed since this run began"):
        list(source.read())
    source = open_source(entry(path))
    blocks = source.read()
    next(blocks)
    write(path, RECORDS)
    with pytest.raises(DataError, match=rf"{name}: has changed since this run began"):
        list(blocks)


def test_a_local_folder_of_a_known_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "xsum" / "data" / "train-00000.parquet", [{"document": "d", "summary": "s"}])
    assert fields("xsum") == fields("xsum/") == [{"document": "d", "summary": "s"}]


@pytest.fixture
def offline_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub and no network; both libraries read their variables while they are imported."""
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.mark.parametrize(
    ("dataset", "hub_id"), [("xsum", "EdinburghNLP/xsum"), ("some-body/some.set", "some-body/some.set")]
)
def test_an_unreachable_hub_dataset_says_where_it_looked_and_how_to_get_it(
    tmp_path: Path, offline_cache: Path, dataset: str, hub_id: str
) -> None:
    with pytest.raises(DataError) as caught:
        open_source(entry(dataset))
    message = str(caught.value)
    folder = hub_id.split("/")[1]
    assert str(tmp_path / dataset) in message
    assert f"hf download --repo-type dataset {hub_id} --local-dir {folder}" in message
    assert f"--dataset {folder}/" in message


def test_the_split_and_the_subset_of_a_hub_dataset_are_named(offline_cache: Path) -> None:
    with pytest.raises(
        DataError, match=r"the `test` split of the subset 'de' of some-body/some.set is available neither"
    ):
        open_source(entry("some-body/some.set", split="test", subset="de"))


def test_xsum_is_the_train_split_of_its_hub_id(tmp_path: Path, offline_cache: Path) -> None:
    """Offline, the library reads what an earlier download left in its cache, here laid out by the library itself."""
    import datasets

    downloaded = tmp_path / "download" / "xsum"
    for split in ("train", "test"):
        write(downloaded / f"{split}.jsonl", [{"document": f"{split} document", "summary": "summary"}])
    loaded = datasets.load_dataset(str(downloaded), split="train", cache_dir=str(tmp_path / "build"))
    built = Path(loaded.cache_files[0]["filename"]).parent
    shutil.copytree(built, offline_cache / "EdinburghNLP___xsum" / "default" / "0.0.0" / ("0" * 40))
    source = open_source(entry("xsum"))
    assert source.label == "EdinburghNLP/xsum"
    assert source.num_records == 1
    assert [dict(record.fields) for block in source.read() for record in block.records()] == [
        {"document": "train document", "summary": "summary"}
    ]
    assert open_source(entry("xsum")).fingerprint == source.fingerprint
