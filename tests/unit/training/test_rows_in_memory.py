"""Rows that a Python caller holds in memory train as those of a file do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from harness.runs import assert_equal_tensors, evaluations_of, steps_of

from mobius.errors import DataError
from mobius.program import train

SMALL = """--model_path model --device cpu --dtype fp32 --num_stages 2 --num_chunks 2 --batch_size 4 --seq_length 16
    --num_iterations 3 --learning_rate 1e-3 --save_params none --do_eval"""
ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "user" / "data.md").read_text(encoding="utf-8")


def test_rows_in_memory_give_the_bits_of_a_file_that_has_them(workplace: Path) -> None:
    lines = Path("data.jsonl").read_text().splitlines(keepends=True)
    Path("first.jsonl").write_text("".join(lines[:16]))
    Path("rest.jsonl").write_text("".join(lines[16:]))
    rows = [json.loads(line) for line in lines]

    train(f"{SMALL} --dataset first.jsonl:2 --eval_dataset rest.jsonl --save_dir file --save_results a".split(), {})
    words = f"{SMALL} --dataset first:2 --eval_dataset rest --save_dir memory --save_results b"
    train(words.split(), {"first": iter(rows[:16]), "rest": rows[16:]})

    assert steps_of(Path("memory")) == steps_of(Path("file"))
    assert evaluations_of(Path("memory")) == evaluations_of(Path("file"))
    assert_equal_tensors(Path("file"), Path("memory"))


def test_the_example_of_the_page_trains(workplace: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

    example = example.replace("assets/tiny-llama", str(ROOT / "assets" / "tiny-llama"))
    exec(example.replace("--seq_length", "--device cpu --save_params none --seq_length"))

    assert len(steps_of(Path("save_ckpt"))) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"mine": [{"text": "a"}, {"text": {1, 2}}]}, "mine, record 1: is no row of named columns"),
        ({"mine": [{"text": "a"}], "yours": []}, "rows are given for yours: name it in --dataset or --eval_dataset"),
        ({"mine": []}, "mine: the dataset is empty"),
        ({"mine": [{"txet": "a"}]}, "the columns txet match no known format"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused(
    workplace: Path, rows: dict[str, list[dict[str, object]]], message: str
) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        train(f"{SMALL} --dataset mine --val_size 1 --save_dir out".split(), rows)
    assert not list(workplace.glob("out*"))
