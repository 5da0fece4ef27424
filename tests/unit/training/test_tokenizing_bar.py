"""Of all ranks, the one that tokenizes shows the bar: no rank knows beforehand which one that is."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from mobius.config.cli import parse_args
from mobius.process.ranks import Ranks
from mobius.training.data import read_data


@pytest.mark.parametrize("winner", [0, 1])
def test_the_rank_that_is_first_at_the_lock_shows_the_only_bar(
    workplace: Path, capsys: pytest.CaptureFixture[str], winner: int
) -> None:
    config = parse_args(["--model_path", "model", "--dataset", "data.jsonl", "--device", "cpu", "--seq_length", "16"])
    tokenizer = AutoTokenizer.from_pretrained("model")
    shown = []
    for rank in (winner, 1 - winner):
        read_data(config, Ranks(rank, 2, rank), tokenizer)
        shown.append("tokenizing: 100%" in capsys.readouterr().err)
    assert shown == [True, False]
