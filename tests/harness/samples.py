"""Tokenized datasets in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mobius.data.token_store import TokenizedDataset, TokenizedSample


def dataset_of(rows: Sequence[TokenizedSample]) -> TokenizedDataset:
    """A dataset of these rows, at least one."""
    input_ids, is_target = zip(*rows, strict=True)
    offsets = np.cumsum([0, *map(len, input_ids)], dtype=np.int64)
    return TokenizedDataset(np.concatenate(input_ids), np.concatenate(is_target), offsets)
