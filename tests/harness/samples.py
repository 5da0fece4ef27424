"""Tokenized datasets in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mobius.data.token_store import TokenizedDataset, TokenizedSample

Row = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]
"""Token ids of a sample of one sequence, and whether each is a target."""


def dataset_of(rows: Sequence[Row]) -> TokenizedDataset:
    """A dataset of these rows, at least one."""
    return TokenizedDataset.of_samples([TokenizedSample.plain(*row) for row in rows])


def row_of(sample: TokenizedSample) -> Row:
    """The row of a sample of one sequence without values."""
    assert sample.lengths == (len(sample),)
    assert not sample.token_values
    assert not sample.sequence_values
    return sample.input_ids, sample.is_target
