import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harness.forked import Ranks
from transformers import PreTrainedTokenizerBase

from mobius.data.datasets import PreparedDataset, SampleCounts, describe_sample
from mobius.errors import DataError

WriteLines = Callable[..., Path]
Prepare = Callable[..., PreparedDataset]

PAIRS = [{"prompt": f"{number} plus one is", "completion": f" {number + 1}"} for number in range(6)]


def tokens(prepared: PreparedDataset) -> list[tuple[list[int], list[bool]]]:
    rows = (prepared.tokenized.sample(index) for index in range(len(prepared.tokenized)))
    return [(ids.tolist(), is_target.tolist()) for ids, is_target in rows]


def test_every_record_becomes_a_sample_in_its_order(
    prepare: Prepare, write_lines: WriteLines, tokenizer: PreTrainedTokenizerBase
) -> None:
    prepared = prepare(write_lines(PAIRS))
    assert prepared.format_name == "prompt-completion"
    assert prepared.warnings == ()
    assert [tokenizer.decode(ids) for ids, _ in tokens(prepared)] == [
        f"{number} plus one is {number + 1}<|im_end|>" for number in range(6)
    ]
    ids, is_target = prepared.tokenized.sample(0)
    assert (ids.dtype, is_target.dtype) == (np.int32, np.bool_)


def test_kept_cut_dropped_and_empty_records_are_counted(prepare: Prepare, write_lines: WriteLines) -> None:
    records = [
        *PAIRS,
        {"prompt": "long " * 200, "completion": "short"},
        {"prompt": "no answer", "completion": ""},
        {"prompt": "", "completion": None},
        {"prompt": " ", "completion": "\n"},
    ]
    prepared = prepare(write_lines(records))
    assert prepared.counts == SampleCounts(read=10, kept=7, cut=1, dropped=1, empty=2)
    assert str(prepared.counts) == (
        "10 records read, 7 kept (1 of them cut to the sequence length), 1 dropped without targets, 2 empty"
    )
    assert len(prepared.tokenized) == 7


def test_text_fills_its_rows(prepare: Prepare, write_lines: WriteLines) -> None:
    prepared = prepare(write_lines([{"text": "some words " * 20}, {"text": ""}, {"text": "more"}]), seq_length=16)
    lengths = np.diff(prepared.tokenized.offsets).tolist()
    assert prepared.counts == SampleCounts(read=3, kept=2, cut=0, dropped=0, empty=1)
    assert set(lengths[:-1]) == {16}
    assert lengths[-1] <= 16


def test_max_samples_takes_the_first_records(prepare: Prepare, write_lines: WriteLines) -> None:
    path = write_lines(PAIRS)
    assert tokens(prepare(path, max_samples=2)) == tokens(prepare(path))[:2]
    assert prepare(path, max_samples=100).counts.read == 6


def test_what_the_template_made_necessary_is_told(
    prepare: Prepare, write_lines: WriteLines, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    turns = [{"role": role, "content": "words"} for role in ("user", "assistant", "user", "assistant")]
    path = write_lines([{"messages": turns}, {"messages": turns[:2]}])
    for _ in range(2):  # tokenized, then from the cache
        prepared = prepare(path)
        assert len(prepared.tokenized) == 3
        assert prepared.counts.kept == 2
        (told,) = (text for text in prepared.warnings if "each assistant turn became a sample of its own" in text)
        assert told.startswith("1 of 2 records: ")


@pytest.mark.parametrize(
    ("records", "complaint"),
    [
        ([], "the dataset is empty"),
        ([{"text": ""}, {"text": " "}], "no record has a token to train on (2 records read, 0 kept"),
        ([{"prompt": "a", "completion": ""}], "1 dropped without targets"),
        ([{"question": "a"}], "the columns question match no known format"),
    ],
)
def test_a_dataset_without_anything_to_train_on_is_refused(
    prepare: Prepare, write_lines: WriteLines, records: list[dict[str, str]], complaint: str
) -> None:
    with pytest.raises(DataError) as caught:
        prepare(write_lines(records))
    assert complaint in str(caught.value)


def test_a_sequence_too_short_for_any_target_is_refused(prepare: Prepare, write_lines: WriteLines) -> None:
    with pytest.raises(DataError, match="--seq_length 1 leaves room"):
        prepare(write_lines(PAIRS), seq_length=1)


class CountingTokenizer:
    """Passes everything on to a tokenizer and counts its calls."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.num_calls = 0

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


def test_another_content_tokenizer_or_length_is_tokenized_anew(
    prepare: Prepare, write_lines: WriteLines, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = write_lines(PAIRS)

    def num_stored() -> int:
        return len([entry for entry in (tmp_path / "cache" / "tokenized").iterdir() if entry.is_dir()])

    prepare(path)
    prepare(path, seq_length=32)
    prepare(path, max_samples=3)
    assert num_stored() == 3
    write_lines(PAIRS[1:])
    prepare(path)
    assert num_stored() == 4
    tokenizer.chat_template = None
    prepare(path)
    assert num_stored() == 5
    tokenizer.add_tokens(["plus one"])
    prepare(path)
    assert num_stored() == 6
    prepare(path)
    assert num_stored() == 6


def test_who_tokenizes_shows_a_bar_and_who_finds_it_done_shows_none(
    prepare: Prepare, write_lines: WriteLines, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(PAIRS)
    prepare(path, show_progress=True)
    assert "tokenizing: 100%" in capsys.readouterr().err
    prepare(path, show_progress=True)
    assert capsys.readouterr().err == ""


def test_deep_columns_beside_the_text_are_not_sent_to_workers(prepare: Prepare, tmp_path: Path) -> None:
    deep = "[" * 900 + "]" * 900
    line = f'{{"prompt": "a", "completion": "b", "tree": {deep}}}\n'
    (tmp_path / "deep.jsonl").write_text(line * 600)
    assert prepare(tmp_path / "deep.jsonl", preprocessing_num_workers=2).counts.kept == 600


@pytest.mark.parametrize("damaged", ["input_ids.bin", "offsets.bin", "facts.json"])
def test_a_damaged_cache_is_made_anew(prepare: Prepare, write_lines: WriteLines, tmp_path: Path, damaged: str) -> None:
    path = write_lines(PAIRS)
    expected = tokens(prepare(path))
    (stored,) = [entry for entry in (tmp_path / "cache" / "tokenized").iterdir() if entry.is_dir()]
    for content in (b"", b"nonsense", (stored / damaged).read_bytes()[:-3]):
        (stored / damaged).write_bytes(content)
        assert tokens(prepare(path)) == expected


def test_what_an_interrupted_run_left_is_replaced(prepare: Prepare, write_lines: WriteLines, tmp_path: Path) -> None:
    path = write_lines(PAIRS)
    expected = tokens(prepare(path))
    (stored,) = [entry for entry in (tmp_path / "cache" / "tokenized").iterdir() if entry.is_dir()]
    stored.rename(stored.with_name(stored.name + ".partial"))
    assert tokens(prepare(path)) == expected
    assert not stored.with_name(stored.name + ".partial").exists()


def test_a_cache_folder_that_cannot_be_made_is_named(prepare: Prepare, write_lines: WriteLines, tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("a file")
    with pytest.raises(DataError, match=r"cannot keep the tokenized dataset in .*occupied/tokenized"):
        prepare(write_lines(PAIRS), cache_dir=tmp_path / "occupied")


def test_workers_change_nothing_but_the_time(prepare: Prepare, write_lines: WriteLines, tmp_path: Path) -> None:
    path = write_lines([PAIRS[index % 6] | {"prompt": f"question {index}"} for index in range(600)])
    alone = prepare(path)
    together = prepare(path, preprocessing_num_workers=2, cache_dir=tmp_path / "other")
    assert tokens(together) == tokens(alone)


def test_an_error_in_a_worker_names_its_line(prepare: Prepare, write_lines: WriteLines) -> None:
    records: list[dict[str, object]] = [{"prompt": "a", "completion": "b"} for _ in range(600)]
    records[555] = {"prompt": "a", "completion": 7}
    with pytest.raises(DataError, match=r"train.jsonl, line 556: `completion` must be text, not int"):
        prepare(write_lines(records), preprocessing_num_workers=2)


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


def test_a_described_sample_tells_prompt_and_target_apart(
    prepare: Prepare, write_lines: WriteLines, tokenizer: PreTrainedTokenizerBase
) -> None:
    prepared = prepare(write_lines([{"instruction": "Name a colour.", "input": "", "output": "Red."}]))
    num_targets = len(tokenizer("Red.<|im_end|>").input_ids)
    num_tokens = len(prepared.tokenized.input_ids)
    assert describe_sample(prepared, tokenizer) == (
        f"sample 0: {num_tokens} tokens, {num_targets} of them targets\n"
        "  prompt | <|begin|><|im_start|>user\n"
        "  prompt | Name a colour.<|im_end|>\n"
        "  prompt | <|im_start|>assistant\n"
        "  prompt | \n"
        "  target | Red.<|im_end|>"
    )


def test_a_described_sample_is_not_a_wall_of_text(
    prepare: Prepare, write_lines: WriteLines, tokenizer: PreTrainedTokenizerBase
) -> None:
    prepared = prepare(write_lines([{"prompt": "words " * 1000, "completion": "end"}]), seq_length=2048)
    text = describe_sample(prepared, tokenizer)
    assert len(text) < 1500
    assert "[... 4800 characters ...]" in text
