import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mobius.data.datasets import PreparedDataset, prepare_dataset

ASSETS = Path(__file__).parents[3] / "assets"

WriteLines = Callable[..., Path]
Prepare = Callable[..., PreparedDataset]


@pytest.fixture(scope="session")
def assets() -> Path:
    return ASSETS


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    """The quick start's, a fresh one: tests change its template."""
    return AutoTokenizer.from_pretrained(ASSETS / "tiny-llama")


@pytest.fixture
def write_lines(tmp_path: Path) -> WriteLines:
    def write(records: Sequence[Mapping[str, object]], name: str = "train.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return path

    return write


@pytest.fixture
def prepare(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Prepare:
    def run(dataset: Path | str, **changes: Any) -> PreparedDataset:
        options: dict[str, Any] = {
            "tokenizer": tokenizer,
            "seq_length": 64,
            "max_samples": None,
            "num_workers": 1,
            "cache_dir": tmp_path / "cache",
        }
        return prepare_dataset(dataset=str(dataset), **(options | changes))

    return run
