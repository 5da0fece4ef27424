"""One of two processes that prepare the same dataset at the same time; prints how often it tokenized, and what it got.

Arguments: the tokenizer's folder, the dataset, the cache.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from mobius.data import datasets


def main() -> None:
    """Load the tokenizer, wait until the other process has too, and prepare."""
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
    prepared = datasets.prepare_dataset(
        dataset=dataset, tokenizer=tokenizer, seq_length=64, max_samples=None, num_workers=1, cache_dir=Path(cache)
    )
    told = [num_tokenizations, len(prepared.tokenized), int(prepared.tokenized.input_ids.sum())]
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
