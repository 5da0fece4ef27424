"""benchmarks/make_dataset.py: records of the lengths that were drawn, the same for the same seed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import make_dataset
import numpy as np
import pytest
from harness.runs import TOKENIZER
from transformers import AutoTokenizer

from mobius.data.formats import detect_format, parse_record
from mobius.data.tokenization import SampleEncoder


def make(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["make_dataset.py", *words])
    make_dataset.main()


def test_lengths_have_a_long_tail() -> None:
    lengths = make_dataset.draw_lengths(np.random.default_rng(1), 200_000, mean=700, largest=4096)

    # A log-normal distribution of this width has its median at mean / sqrt(e); the bound takes a little of the mean.
    assert np.median(lengths) == pytest.approx(700 / math.sqrt(math.e), rel=0.02)
    assert 0.95 * 700 < lengths.mean() < 700
    assert lengths.max() == 4096


@pytest.mark.parametrize("format_name", ["prompt-completion", "messages"])
def test_a_record_has_as_many_tokens_as_were_drawn(
    format_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, numbers = tmp_path / "data.jsonl", tmp_path / "lengths.json"
    make(monkeypatch, str(file), "--samples", "40", "--format", format_name, "--lengths", str(numbers))
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    encoder = SampleEncoder(tokenizer, seq_length=10_000)

    records = [json.loads(line) for line in file.read_text().splitlines()]
    record_format = detect_format(list(records[0]), "here")
    samples = [parse_record(record_format, record, "here") for record in records]
    tokens = [len(encoder.encode(sample, "here").rows[0][0]) for sample in samples]

    drawn = json.loads(numbers.read_text())
    if format_name == "messages":  # a chat template's marks may take fewer tokens than are left for them
        assert all(length - 16 < count <= length for count, length in zip(tokens, drawn, strict=True))
    else:
        assert tokens == drawn


def test_a_seed_makes_the_same_file_and_another_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        make(monkeypatch, str(tmp_path / name), "--samples", "5", "--seed", seed)

    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


def test_a_size_is_kept_to_within_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "data.jsonl"

    make(monkeypatch, str(file), "--gigabytes", "0.002", "--largest", "500")

    assert 2_000_000 <= file.stat().st_size < 2_010_000
    num_records = len(file.read_text().splitlines())
    assert f"{num_records:,} samples, 0.00 GB" in capsys.readouterr().out
