"""Images through a frozen tower: loss and every gradient of the text are those of transformers' whole model."""

from __future__ import annotations

import copy

import pytest
from harness.pipelines import Pipeline
from harness.rounding import assert_both_round
from harness.vision_models import VisionRows, pictures, text_of, vision_model

from mobius.models.vision import TOWERS

SMALL, WIDE, TALL, SQUARE = pictures((8, 16), (12, 40), (40, 16), (24, 24))
CASES = {  # ranks, stages per rank, microbatches, slots, whether everything is saved
    "resident": (1, 1, 2, None, False),
    "everything saved": (1, 2, 1, None, True),
    "streamed": (2, 2, 4, 1, False),
}
ALONE = [[[3, SMALL, 9]], [[17]], [[2, WIDE, TALL, 6]], [[4, SQUARE, 3, SMALL, 2]]]
PACKED = [[[3, SMALL, 4], [6]], [[2, WIDE, TALL, 6], [5, SMALL, 3]], [[17], [4]], [[9, SQUARE, 7]]]
"""Documents of each row: images of several sizes, two in a row, none."""


@pytest.mark.parametrize("family", TOWERS)
@pytest.mark.parametrize("is_packed", [False, True], ids=["one document", "packed"])
def test_rows_with_and_without_images_are_exact(family: str, *, is_packed: bool) -> None:
    whole = vision_model(family)
    rows, text = VisionRows(whole, PACKED if is_packed else ALONE, 48), text_of(whole)
    batch = rows.batch(1, is_packed=is_packed)
    expected = rows.alone(whole, batch.num_targets)
    double = copy.deepcopy(whole).double()
    double.set_experts_implementation("eager")  # products of groups exist up to fp32
    exact = rows.alone(double, batch.num_targets)
    for num_ranks, per_rank, microbatches, slots, keeps_graphs in CASES.values():
        batch = rows.batch(microbatches, is_packed=is_packed)
        found = Pipeline(text, num_ranks, per_rank, microbatches, slots, keeps_graphs).step(batch)
        assert_both_round(found, expected, exact)
    if not is_packed:
        sliced = Pipeline(text, 2, 1, 8, 1, num_slices=2).step(rows.batch(4, is_packed=False))
        assert_both_round(sliced, expected, exact)
