import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mobius.config.config import DataConfig, DatasetEntry
from mobius.data.datasets import PreparedData, PreparedDataset, prepare_data, with_derived_values
from mobius.data.tokenization import NO_IMAGES

ASSETS = Path(__file__).parents[3] / "assets"

WriteLines = Callable[..., Path]
Prepare = Callable[..., PreparedDataset]
PrepareAll = Callable[..., PreparedData]


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
def prepare_all(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> PrepareAll:
    """Call `prepare_data`; options are fields of the data's section, or the function's own, or `derive`."""

    def run(*datasets: DatasetEntry | Path | str, **changes: Any) -> PreparedData:
        entries = tuple(each if isinstance(each, DatasetEntry) else DatasetEntry(str(each)) for each in datasets)
        own: dict[str, Any] = {"tokenizer": tokenizer, "cache_dir": tmp_path / "cache", "show_progress": False}
        own |= {"rows": "samples", "images": NO_IMAGES}
        own |= {name: changes.pop(name) for name in own if name in changes}
        derive = changes.pop("derive", None)
        options: dict[str, Any] = {"seq_length": 64, "preprocessing_num_workers": 1} | changes
        prepared = prepare_data(DataConfig(dataset=entries, **options), **own)
        return prepared if derive is None else with_derived_values(prepared, derive)

    return run


@pytest.fixture
def prepare(prepare_all: PrepareAll) -> Prepare:
    """The only dataset of `prepare_all`."""
    return lambda dataset, **changes: prepare_all(dataset, **changes).training[0]
