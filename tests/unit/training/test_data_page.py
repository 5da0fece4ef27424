"""docs/user/data.md: every example is a file that trains, and what the page shows of a file is in it."""

from __future__ import annotations

import csv
import gzip
import json
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from mobius.config.cli import parse_args
from mobius.process.ranks import Ranks
from mobius.training.run import run_training

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "user" / "data.md").read_text(encoding="utf-8")
FOLDER = ROOT / "docs" / "data"
FILES = sorted(FOLDER.iterdir())
OPTIONS = {
    "articles": "--columns prompt=article,completion=headline",
    "tools.jsonl": f"--chat_template {FOLDER / 'tools.jinja'}",
    "pairs.jsonl": "--objective dpo",
    "rollouts.jsonl": "--objective policy --policy_loss grpo",
}
DATASETS = [path for path in FILES if path.suffix not in (".jinja", ".yaml")]
SHOWN = re.findall(r"`(docs/data/[\w.]+)`(?:| holds one file, `train.csv`):\n\n```(\w+)\n(.*?)```", PAGE, re.DOTALL)

Run = Callable[..., None]


def losses(workplace: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (workplace / "out" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("path", DATASETS, ids=lambda path: path.name)
def test_an_example_trains(path: Path, run: Run, workplace: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    options = OPTIONS.get(path.name, "").split()

    run("--dataset", str(path), "--seq_length", "192", "--num_iterations", "1", *options)

    assert len(losses(workplace)) == 1
    if path.name == "pairs.jsonl":
        assert losses(workplace)[0] == pytest.approx(math.log(2), abs=1e-7)
    elif path.name == "rollouts.jsonl":  # the advantages of a group add up to 0
        assert losses(workplace)[0] == pytest.approx(0.0, abs=1e-6)
    else:  # 4096 tokens are guessed by chance before the first update: ln 4096 = 8.3.
        assert losses(workplace)[0] == pytest.approx(8.3, abs=0.2)
    num_records = num_records_of(path)
    said = f"{num_records} records read, {num_records} kept (0 of them cut to the sequence length), 0 dropped"
    assert said in caplog.text


def num_records_of(path: Path) -> int:
    if path.suffix == ".parquet":
        return int(pyarrow.parquet.read_metadata(path).num_rows)
    if path.is_dir():
        return len((path / "train.csv").read_text(encoding="utf-8").splitlines()) - 1
    lines = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return lines.count(b"\n")


def test_the_mixture_trains_for_two_epochs(workplace: Path) -> None:
    for name in ("docs", "assets"):
        (workplace / name).symlink_to(ROOT / name)
    options = "--config docs/data/mixture.yaml --model_path model --save_dir out --save_params out.pt"

    run_training(parse_args([*options.split(), "--save_results", "out.txt"], num_ranks=1), Ranks(0, 1, 0))

    steps = [json.loads(line) for line in (workplace / "out" / "metrics.jsonl").read_text().splitlines()]
    # As the page says: 8 conversations once, 8 prompts twice and half of 6 articles, in each of two epochs.
    assert "8 × 1 + 8 × 2 + 6 × 0.5 = 27 samples" in PAGE
    assert sum(step["num_samples"] for step in steps) == 2 * 27
    assert len(steps) == 4
    assert "two epochs are 16 rows, that is 4 steps" in PAGE.replace("\n", " ")


def test_every_example_is_named_on_the_page() -> None:
    assert [path.name for path in FILES if f"`docs/data/{path.name}`" not in PAGE] == []


@pytest.mark.parametrize(("name", "language", "text"), SHOWN, ids=[name for name, *_ in SHOWN])
def test_what_the_page_shows_of_a_file_is_in_it(name: str, language: str, text: str) -> None:
    path = ROOT / name
    lines = (path / "train.csv" if path.is_dir() else path).read_text(encoding="utf-8").splitlines()
    if language == "json":
        assert json.loads(text) in [json.loads(line) for line in lines]
    else:  # YAML and CSV, as they are
        assert set(text.splitlines()) <= set(lines)


def test_the_page_shows_a_record_of_every_file_of_records() -> None:
    packed = {FOLDER / "prompts.parquet", FOLDER / "conversations.jsonl.gz"}
    assert {ROOT / name for name, *_ in SHOWN} >= {*DATASETS} - packed


def test_the_compressed_and_the_columnar_file_hold_the_same_as_the_plain_ones() -> None:
    assert (
        gzip.decompress((FOLDER / "conversations.jsonl.gz").read_bytes())
        == (FOLDER / "conversations.jsonl").read_bytes()
    )
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(FOLDER / "prompts.parquet").to_pylist()
    assert rows == [json.loads(line) for line in (FOLDER / "prompts.jsonl").read_text().splitlines()]
    with (FOLDER / "articles" / "train.csv").open(encoding="utf-8", newline="") as file:
        assert all(row["article"] and row["headline"] for row in csv.DictReader(file))
