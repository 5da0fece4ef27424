"""Processes that prepare a dataset: two at the same time, one that dies, or one that tells its memory."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from mobius.config.config import DataConfig, DatasetEntry
from mobius.data import datasets
from mobius.data.messages import Document
from mobius.data.token_store import DatasetWriter
from mobius.data.tokenization import SampleEncoder


def main() -> None:
    """Load the tokenizer, wait until the other process has too, and prepare.

    Arguments: the tokenizer's folder, the dataset, the cache. Prints how often this process tokenized, and what it got.
    """
    folder, dataset, cache = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    original, num_tokenizations = datasets._Tokenization.run, 0

    def counting(*arguments: Any, **options: Any) -> Any:
        nonlocal num_tokenizations
        num_tokenizations += 1
        return original(*arguments, **options)

    datasets._Tokenization.run = counting  # type: ignore[method-assign]
    rank = os.environ["RANK"]
    Path(f"ready-{rank}").touch()
    while not all(Path(f"ready-{other}").exists() for other in "01"):
        time.sleep(0.001)
    config = DataConfig(dataset=(DatasetEntry(dataset),), seq_length=64, preprocessing_num_workers=1)
    (prepared,) = datasets.prepare_data(config, tokenizer, cache_dir=Path(cache)).training
    report = [num_tokenizations, len(prepared.tokenized), int(prepared.tokenized.input_ids.sum())]
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


def prepare_until_killed(folder: str, config: DataConfig, cache: str, num_parts: int) -> None:
    """Prepare what `config` says with a part for each block, and die with what follows so many parts written."""
    datasets._PART_RECORDS = 1  # type: ignore[misc]
    append, num_blocks = DatasetWriter.append, 0

    def append_or_die(*given: Any, **options: Any) -> None:
        nonlocal num_blocks
        append(*given, **options)
        if num_blocks == num_parts:
            os.kill(os.getpid(), signal.SIGKILL)
        num_blocks += 1

    DatasetWriter.append = append_or_die  # type: ignore[method-assign]
    datasets.prepare_data(config, AutoTokenizer.from_pretrained(folder), cache_dir=Path(cache))


def tell_peak(folder: str, num_characters: int) -> None:
    """Print how many KiB more a document of so many characters takes at the most."""
    encoder = SampleEncoder(AutoTokenizer.from_pretrained(folder), seq_length=8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = "some words of text\n"
    encoder.encode(Document(line * (num_characters // len(line))), "here")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
