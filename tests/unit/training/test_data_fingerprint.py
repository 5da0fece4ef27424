"""The fingerprint of the training data, by which a resumed run knows them, covers all that is trained on."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from mobius.data.token_store import TokenizedDataset, TokenizedSample
from mobius.training.data import RunData

IDS, MASK = np.arange(6, dtype=np.int32), np.ones(6, np.bool_)
PLAIN = TokenizedSample.plain(IDS, MASK)
PAIR = replace(PLAIN, lengths=(2, 4))


def fingerprint(sample: TokenizedSample) -> str:
    dataset: Any = SimpleNamespace(tokenized=TokenizedDataset.of_samples([sample]))
    prepared: Any = SimpleNamespace(training=[dataset])
    nothing: Any = None
    return RunData(nothing, nothing, prepared, [np.arange(1)], []).fingerprint()


def test_every_part_of_a_sample_counts() -> None:
    different = [
        PLAIN,
        replace(PLAIN, is_target=~MASK),
        replace(PLAIN, token_values={"weight": np.full(6, 0.5, np.float32)}),
        replace(PLAIN, token_values={"weight": np.full(6, 2, np.float32)}),
        replace(PLAIN, sequence_values={"label": np.ones(1, np.float32)}),
        replace(PLAIN, sequence_values={"label": np.zeros(1, np.float32)}),
        PAIR,
        replace(PAIR, lengths=(3, 3)),
        replace(PAIR, sequence_values={"margin": np.ones(2, np.float32)}),
    ]
    assert len({fingerprint(sample) for sample in different}) == len(different)
    assert len({fingerprint(sample) for sample in [*different, *different]}) == len(different)
