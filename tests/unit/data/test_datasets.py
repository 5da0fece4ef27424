import gzip
import json
import logging
import multiprocessing
import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from harness.forked import Ranks
from harness.samples import row_of
from tokenizers.normalizers import Replace
from transformers import PreTrainedTokenizerBase

from mobius.config.config import DataConfig, DatasetEntry, Packing
from mobius.data.datasets import PreparedData, PreparedDataset, SampleCounts
from mobius.data.token_store import DatasetWriter
from mobius.errors import DataError
from mobius.units import format_bytes

WriteLines = Callable[..., Path]
Prepare = Callable[..., PreparedDataset]
PrepareAll = Callable[..., PreparedData]

PAIRS = [{"prompt": f"{number} plus one is", "completion": f" {number + 1}"} for number in range(6)]


def tokens(prepared: PreparedDataset) -> list[tuple[list[int], list[bool]]]:
    rows = (prepared.tokenized.sample(index) for index in range(len(prepared.tokenized)))
    return [(ids.tolist(), is_target.tolist()) for ids, is_target in map(row_of, rows)]


def test_every_record_becomes_a_sample_in_its_order(
    prepare: Prepare, write_lines: WriteLines, tokenizer: PreTrainedTokenizerBase
) -> None:
    prepared = prepare(write_lines(PAIRS))
    assert prepared.format_name == "prompt-completion"
    assert prepared.warnings == ()
    assert [tokenizer.decode(ids) for ids, _ in tokens(prepared)] == [
        f"{number} plus one is {number + 1}<|im_end|>" for number in range(6)
    ]
    ids, is_target = row_of(prepared.tokenized.sample(0))
    assert (ids.dtype, is_target.dtype) == (np.int32, np.bool_)


NO_TOKEN = [{"prompt": "", "completion": "--"}, {"prompt": "a", "completion": ""}, {"prompt": "a", "completion": "b"}]
"""Minus signs are no token to the tokenizer of the test."""
ALL_KINDS = [
    *PAIRS,
    {"prompt": "long " * 200, "completion": "short"},
    {"prompt": "no answer", "completion": ""},
    {"prompt": "", "completion": None},
    {"prompt": " ", "completion": "\n"},
]


@pytest.mark.parametrize(
    ("records", "packing", "read", "kept", "others"),
    [
        (ALL_KINDS, Packing.AUTO, 10, 7, {"cut": 1, "dropped": 1, "empty": 2, "unanswered": 1}),
        (NO_TOKEN, Packing.AUTO, 3, 1, {"dropped": 2, "unanswered": 1}),
        (NO_TOKEN, Packing.ON, 3, 1, {"dropped": 2, "unanswered": 1}),
        ([{"text": "--"}, {"text": "a b"}], Packing.ON, 2, 1, {"dropped": 1}),
        ([{"text": "--"}, {"text": "a b"}], Packing.AUTO, 2, 2, {}),  # joined, its end is a token of the stream
        ([{"text": "some words " * 20}, {"text": ""}, {"text": "more"}], Packing.AUTO, 3, 2, {"empty": 1}),
    ],
)
def test_kept_cut_dropped_and_empty_records_are_counted(
    prepare: Prepare,
    write_lines: WriteLines,
    tokenizer: PreTrainedTokenizerBase,
    records: list[dict[str, object]],
    packing: Packing,
    read: int,
    kept: int,
    others: dict[str, int],
) -> None:
    tokenizer.backend_tokenizer.normalizer = Replace("-", "")
    counts = prepare(write_lines(records), packing=packing).counts
    assert counts == SampleCounts(read=read, kept=kept, **{"cut": 0, "dropped": 0, "empty": 0} | others)


def test_records_are_dropped_for_two_reasons() -> None:
    assert str(SampleCounts(read=10, kept=7, cut=1, dropped=1, empty=2, unanswered=1)) == (
        "10 records read, 7 kept (1 of them cut to the sequence length), 1 dropped (1 without an answer), 2 empty"
    )
    counts = SampleCounts(read=9, kept=2, cut=0, dropped=7, empty=0, unanswered=4)
    assert counts.dropped_by_reason == {"without an answer": 4, "without a token to train on": 3}
    assert str(counts).endswith("7 dropped (4 without an answer, 3 without a token to train on), 0 empty")


def as_documents(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    return [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in texts if text.strip()]


TEXTS = [f"{number}" + " word" * (number * 7 % 150) for number in range(40)] + ["", "one"]


def test_joined_text_is_one_stream_whatever_the_parts(
    prepare: Prepare,
    write_lines: WriteLines,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("mobius.data.readers.MAX_BLOCK_RECORDS", 3)
    monkeypatch.setattr("mobius.data.datasets._PART_RECORDS", 7)
    stream = [token for document in as_documents(tokenizer, TEXTS) for token in document]
    for seq_length in (2, 16, len(stream), len(stream) - 1, len(stream) + 5):
        prepared = prepare(write_lines([{"text": text} for text in TEXTS]), seq_length=seq_length)
        rows = [stream[first : first + seq_length] for first in range(0, len(stream), seq_length)]
        assert [ids for ids, _ in tokens(prepared)] == [row for row in rows if len(row) > 1]
        assert all(all(is_target) for _, is_target in tokens(prepared))
        assert prepared.tokenized.lengths.tolist() == [len(row) for row in rows if len(row) > 1]


@pytest.mark.parametrize("packing", [Packing.ON, Packing.OFF])
def test_text_that_is_not_joined_is_cut_into_pieces_of_one_document_each(
    prepare: Prepare, write_lines: WriteLines, tokenizer: PreTrainedTokenizerBase, packing: Packing
) -> None:
    prepared = prepare(write_lines([{"text": text} for text in TEXTS]), packing=packing, seq_length=16)
    pieces = [
        document[first : first + 16]
        for document in as_documents(tokenizer, TEXTS)
        for first in range(0, len(document), 16)
    ]
    assert [ids for ids, _ in tokens(prepared)] == [piece for piece in pieces if len(piece) > 1]
    assert prepared.counts == SampleCounts(read=42, kept=41, cut=0, dropped=0, empty=1)


def test_every_dataset_of_a_mixture_has_its_own_format_columns_and_number(
    prepare_all: PrepareAll, write_lines: WriteLines, tmp_path: Path
) -> None:
    table = tmp_path / "table.csv"
    table.write_text("q,a\n" + "".join(f"{number}?,{number}!\n" for number in range(5)))
    text = write_lines([{"text": "some words"}] * 4, "text.jsonl")
    prepared = prepare_all(
        DatasetEntry(str(write_lines(PAIRS)), weight=0.5),
        DatasetEntry(str(table), columns=(("prompt", "q"), ("completion", "a")), max_samples=2),
        text,
        max_samples=3,
        eval_dataset=(DatasetEntry(str(text), max_samples=1),),
    )
    assert [each.format_name for each in prepared.training] == ["prompt-completion", "prompt-completion", "text"]
    assert [each.counts.read for each in prepared.training] == [3, 2, 3]
    assert [each.is_text for each in prepared.training] == [False, False, True]
    assert [each.entry.weight for each in prepared.training] == [0.5, 1.0, 1.0]
    assert [each.counts.read for each in prepared.evaluation] == [1]
    assert prepared.is_packed
    assert len({each.cache_folder for each in (*prepared.training, *prepared.evaluation)}) == 4
    for each in prepared.training:
        assert each.cache_bytes == sum(file.stat().st_size for file in each.cache_folder.iterdir()) > 0


@pytest.mark.parametrize(
    ("packing", "of_text", "of_pairs"),
    [
        (Packing.AUTO, False, True),
        (Packing.ON, True, True),
        (Packing.OFF, False, False),
    ],
)
def test_rows_are_shared_as_asked_and_by_default_where_not_all_is_text(
    prepare_all: PrepareAll, write_lines: WriteLines, packing: Packing, of_text: bool, of_pairs: bool
) -> None:
    text, pairs = write_lines([{"text": "some words"}], "text.jsonl"), write_lines(PAIRS)
    assert prepare_all(text, packing=packing).is_packed is of_text
    assert prepare_all(pairs, packing=packing).is_packed is of_pairs
    assert prepare_all(text, pairs, packing=packing).is_packed is of_pairs


def test_the_number_of_processes_is_told_and_one_does_little_work(
    prepare: Prepare, write_lines: WriteLines, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines([{"text": "some words"}] * 1000)
    with caplog.at_level(logging.INFO, logger="mobius"):
        prepare(path, preprocessing_num_workers=None)
        assert f"tokenizing --dataset {path} in this process" in caplog.text
        monkeypatch.setattr("mobius.data.datasets._BYTES_WORTH_A_WORKER", 1000)
        monkeypatch.setattr("mobius.data.datasets.num_cpus_per_rank", lambda num_ranks: 2 // num_ranks)
        monkeypatch.setattr(
            "mobius.data.workers._encode_in_processes", lambda blocks, encoder, _: map(encoder.encode, blocks)
        )
        prepare(path, preprocessing_num_workers=None, max_samples=1000)
        assert "in 2 processes (--preprocessing_num_workers)" in caplog.text
        caplog.clear()
        prepare(path, preprocessing_num_workers=None, max_samples=1)
        assert "in this process" in caplog.text


def test_max_samples_takes_the_first_records(prepare: Prepare, write_lines: WriteLines) -> None:
    path = write_lines(PAIRS)
    assert tokens(prepare(path, max_samples=2)) == tokens(prepare(path))[:2]
    assert prepare(path, max_samples=100).counts.read == 6


def test_what_the_template_made_necessary_is_told_with_its_dataset_where_there_are_several(
    prepare: Prepare, prepare_all: PrepareAll, write_lines: WriteLines, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    turns = [{"role": role, "content": "words"} for role in ("user", "assistant", "user", "assistant")]
    path = write_lines([{"messages": turns}, {"messages": turns[:2]}], "chat.jsonl")
    for _ in range(2):  # tokenized, then from the cache
        prepared = prepare(path)
        assert len(prepared.tokenized) == 3
        assert prepared.counts.kept == 2
        (told,) = (text for text in prepared.warnings if "each assistant turn became a sample of its own" in text)
        assert told.startswith("1 of 2 records: ")
    assert any(text.endswith(f"/chat.jsonl: {told}") for text in prepare_all(write_lines(PAIRS), path).warnings)


class CountingTokenizer:
    """Passes everything on to a tokenizer and counts its calls."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.num_calls = 0
        type(self).__name__ = type(tokenizer).__name__  # a part of the cache's key

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: object, **options: object) -> object:
        self.num_calls += 1
        return self._tokenizer(*args, **options)


def test_the_second_call_reads_the_cache(
    prepare: Prepare, write_lines: WriteLines, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_lines(PAIRS)
    first, second = CountingTokenizer(tokenizer), CountingTokenizer(tokenizer)
    tokenized, cached = prepare(path, tokenizer=first), prepare(path, tokenizer=second)
    assert first.num_calls > len(PAIRS)
    assert second.num_calls == 1, "one call tells whether the tokenizer adds a beginning token"
    assert tokens(cached) == tokens(tokenized)
    assert cached.counts == tokenized.counts
    assert isinstance(cached.tokenized.input_ids, np.memmap)


def test_the_place_and_the_size_of_the_cache_are_told_in_a_line(
    prepare_all: PrepareAll, write_lines: WriteLines, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    one, other = write_lines(PAIRS), write_lines([{"text": "some words"}], "text.jsonl")
    with caplog.at_level(logging.DEBUG, logger="mobius"):
        prepared = prepare_all(one)
        assert f"tokenized data: {format_bytes(prepared.training[0].cache_bytes)} in " in caplog.messages[-1]
        assert caplog.messages[-1].endswith(str(prepared.training[0].cache_folder))
        prepared = prepare_all(one, other, one)
        num_bytes = sum(each.cache_bytes for each in prepared.training[:2])
        assert caplog.messages[-1] == f"tokenized data: {format_bytes(num_bytes)} in {tmp_path / 'cache' / 'tokenized'}"


def test_another_content_rule_tokenizer_or_length_is_tokenized_anew_and_makes_room_first(
    prepare: Prepare, write_lines: WriteLines, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    turns = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]
    talks = write_lines([{"messages": turns}] * 4, "talks.jsonl")
    pairs = write_lines([each | {"other": "words"} for each in PAIRS])
    text = write_lines([{"text": "some words"}], "text.jsonl")
    changes: list[tuple[Path, dict[str, Any]]] = [
        (talks, {}),
        (talks, {"train_on_prompt": True}),
        (talks, {"mask_history": True}),
        (talks, {"default_system": "Be brief."}),
        (talks, {"chat_template": "chatml"}),
        (talks, {"seq_length": 32}),
        (talks, {"max_samples": 3}),
        (pairs, {}),
        (pairs, {"train_on_prompt": True}),
        (pairs, {"columns": (("prompt", "other"),)}),
        (text, {"packing": Packing.JOINED}),
        (text, {"packing": Packing.ON}),
    ]
    folders = [prepare(path, **change).cache_folder for path, change in changes]
    assert prepare(text, packing=Packing.AUTO).cache_folder == folders[-2]
    assert prepare(text, packing=Packing.OFF).cache_folder == folders[-1]
    write_lines([{"messages": turns}] * 5, "talks.jsonl")
    folders.append(prepare(talks).cache_folder)
    tokenizer.chat_template = None
    folders.append(prepare(talks).cache_folder)
    abandoned = tmp_path / "cache" / "tokenized" / "0000.partial"
    abandoned.mkdir()
    os.utime(abandoned, (0, 0))
    assert prepare(talks).cache_folder == folders[-1]
    assert abandoned.exists(), "nothing is tokenized"
    tokenizer.add_tokens(["plus one"])
    folders.append(prepare(talks).cache_folder)
    assert not abandoned.exists()
    assert len(set(folders)) == len(folders) == len(changes) + 3


def test_who_tokenizes_shows_a_bar_and_who_finds_it_done_shows_none(
    prepare: Prepare, write_lines: WriteLines, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(PAIRS)
    prepare(path, show_progress=True)
    assert "tokenizing: 100%" in capsys.readouterr().err
    prepare(path, show_progress=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("damaged", ["input_ids.bin", "offsets.bin", "facts.json"])
def test_a_damaged_cache_is_made_anew(
    prepare: Prepare, write_lines: WriteLines, tmp_path: Path, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_lines(PAIRS)
    expected = tokens(prepare(path))
    (stored,) = [entry for entry in (tmp_path / "cache" / "tokenized").iterdir() if entry.is_dir()]
    whole = (stored / damaged).read_bytes()
    contents = [b"", b"nonsense", whole[:-3]]
    contents += [whole.replace(b"kept", b"kelt"), whole.replace(b"completion", b"competition")] * (
        damaged == "facts.json"
    )
    for content in contents:
        (stored / damaged).write_bytes(content)
        caplog.clear()
        assert tokens(prepare(path)) == expected
        assert f"the tokenized dataset in {stored} is damaged and is made again" in caplog.text


@pytest.mark.parametrize(("packing", "num_workers"), [(Packing.JOINED, 1), (Packing.ON, 2)])
def test_what_a_killed_run_has_finished_is_not_done_again(
    prepare: Prepare,
    tokenizer: PreTrainedTokenizerBase,
    assets: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    packing: Packing,
    num_workers: int,
) -> None:
    monkeypatch.setattr("mobius.data.datasets._PART_RECORDS", 300)  # what goes on takes several parts, too
    path = tmp_path / "train.jsonl"
    path.write_text("".join(f'{{"text": "{number}{" word" * (number % 90)}"}}\n' for number in range(2_000)))
    config = DataConfig(
        (DatasetEntry(str(path)),), seq_length=64, packing=packing, preprocessing_num_workers=num_workers
    )
    given = [str(assets / "tiny-llama"), config, str(tmp_path / "cache"), 3]
    process = Ranks(
        "harness.tokenizing_worker",
        "prepare_until_killed",
        given,
        num_ranks=1,
        folder=tmp_path,
        environment=dict(os.environ),
    )
    assert process.wait() == -signal.SIGKILL, process.output()
    (journal,) = (tmp_path / "cache" / "tokenized").glob("*.partial/journal.jsonl")
    parts = [json.loads(line) for line in journal.read_text().splitlines()]
    assert len(parts) == 3
    num_done = parts[-1]["progress"]["tally"]["read"]

    counting = CountingTokenizer(tokenizer)
    with caplog.at_level(logging.INFO, logger="mobius"):
        resumed = prepare(path, packing=packing, tokenizer=counting)
    assert f"{num_done} records were tokenized by an earlier run that did not finish" in caplog.text
    assert counting.num_calls == 1 + 2_000 - num_done
    expected = prepare(path, packing=packing, cache_dir=tmp_path / "other")
    assert resumed.counts == expected.counts
    for name in ("input_ids", "is_target", "offsets"):
        assert np.array_equal(getattr(resumed.tokenized, name), getattr(expected.tokenized, name)), name
    assert [entry.suffix for entry in (tmp_path / "cache" / "tokenized").iterdir() if entry.is_dir()] == [""]


def test_a_run_that_fails_before_its_first_part_leaves_no_folder(
    prepare: Prepare, write_lines: WriteLines, tmp_path: Path
) -> None:
    with pytest.raises(DataError):
        prepare(write_lines([*PAIRS, {"prompt": "a", "completion": 7}]))
    assert [entry for entry in (tmp_path / "cache" / "tokenized").iterdir() if entry.is_dir()] == []


def test_workers_change_nothing_but_the_time(prepare: Prepare, write_lines: WriteLines, tmp_path: Path) -> None:
    path = write_lines([{"prompt": f"question {index}", "completion": f"{index % 6}"} for index in range(600)])
    alone = prepare(path)
    together = prepare(path, preprocessing_num_workers=2, cache_dir=tmp_path / "other")
    assert tokens(together) == tokens(alone)


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork workers, which have imported all then; that they can be spawned is the claim above."""
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr("mobius.data.workers.multiprocessing", SimpleNamespace(get_context=lambda _: context))


@pytest.mark.usefixtures("forked_workers")
def test_an_error_in_a_worker_names_its_line(prepare: Prepare, write_lines: WriteLines) -> None:
    records: list[dict[str, object]] = [{"prompt": "a", "completion": "b"} for _ in range(600)]
    records[555] = {"prompt": "a", "completion": 7}
    with pytest.raises(DataError, match=r"train.jsonl, line 556: `completion` must be text, not int"):
        prepare(write_lines(records), preprocessing_num_workers=2)


def test_workers_that_die_before_they_take_their_work_are_told(
    prepare: Prepare, write_lines: WriteLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a limit on memory ends them while they import: what they are sent is larger than a pipe holds."""
    multiprocessing.resource_tracker.ensure_running()  # a program that is to live
    monkeypatch.setattr(multiprocessing.spawn, "get_executable", lambda: b"/bin/false")
    path = write_lines([{"text": f"text number {number}"} for number in range(600)])

    def end(*_: object) -> NoReturn:
        raise AssertionError("it waits for a worker that has ended")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    try:
        with pytest.raises(DataError, match="a tokenization worker died.*lower --preprocessing_num_workers 2"):
            prepare(path, preprocessing_num_workers=2)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_workers_that_die_while_work_is_handed_out_are_told(
    prepare: Prepare, write_lines: WriteLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool's thread closes the pipe by which it is told of work."""

    def submit(*_: object) -> NoReturn:
        raise OSError("handle is closed")

    monkeypatch.setattr(ProcessPoolExecutor, "submit", submit)
    path = write_lines([{"text": f"text number {number}"} for number in range(600)])
    with pytest.raises(DataError, match="a tokenization worker died.*lower --preprocessing_num_workers 2"):
        prepare(path, preprocessing_num_workers=2)


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_that_dies_is_told_with_the_option_to_lower(
    prepare: Prepare, write_lines: WriteLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mobius.data.readers.MAX_BLOCK_RECORDS", 8)
    path = write_lines([{"text": "some words"} for _ in range(1_000)])  # of 125 blocks, eight are under way at a time
    append = DatasetWriter.append

    def append_and_kill(writer: DatasetWriter, *given: Any, **options: Any) -> None:
        append(writer, *given, **options)
        for worker in multiprocessing.active_children():
            worker.kill()

    monkeypatch.setattr(DatasetWriter, "append", append_and_kill)
    with pytest.raises(DataError, match="a tokenization worker died.*lower --preprocessing_num_workers 2"):
        prepare(path, preprocessing_num_workers=2)


@pytest.mark.parametrize("name", ["train.csv", "train.jsonl.gz", "train.parquet"])
def test_the_bar_counts_bytes_where_the_number_of_records_is_not_known(
    prepare: Prepare, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = tmp_path / name
    texts = [f"some words {number}" for number in range(500)]
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    else:
        lines = [json.dumps({"text": text}) for text in texts] if name.endswith(".gz") else ["text", *texts]
        path.write_bytes((gzip.compress if name.endswith(".gz") else bytes)("\n".join(lines).encode()))
    prepare(path, show_progress=True)
    told = capsys.readouterr().err
    assert "100%" in told
    assert "B/s]" in told


def test_of_two_processes_at_once_one_tokenizes_and_both_get_the_same(
    assets: Path, write_lines: WriteLines, tmp_path: Path
) -> None:
    path = write_lines([{"prompt": f"question {index}", "completion": "answer"} for index in range(500)])
    given = [str(assets / "tiny-llama"), str(path), str(tmp_path / "cache")]
    processes = Ranks(
        "harness.tokenizing_worker", "main", given, num_ranks=2, folder=tmp_path, environment=dict(os.environ)
    )
    assert processes.wait() == 0, processes.output()
    results = [json.loads(line) for line in processes.output().splitlines()]
    assert sorted(result[0] for result in results) == [0, 1]
    assert results[0][1:] == results[1][1:]
    assert results[0][1] == 500


def test_a_worker_whose_parent_ended_while_it_started_says_nothing(tmp_path: Path) -> None:
    code = "from pathlib import Path; from mobius.data.workers import _start_worker; "
    code += f"_start_worker(None, Path({str(tmp_path / 'gone')!r}))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout + done.stderr) == (0, "")
