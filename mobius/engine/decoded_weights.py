"""Decodes a stage's frozen weights from codes to the working format, in memory that the stages of a rank share.

    slot or resident    | trained | frozen values | codes of matrices |
    shared memory       | values of these matrices |       of the stage that computes

Codes are decoded when compute turns to another stage or to newly loaded codes: once for all microbatches of a stage's
turn. A graph that is kept until backward refers to this memory; before the stage's backward the same values are there
again, because a matrix always has the same place.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

from mobius.models.layout import ALIGNMENT, StageLayout
from mobius.schedule.memory_layout import aligned


class WeightDecoder:
    """Shared memory of a rank for decoded weights."""

    def __init__(self, num_elements: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate room for `num_elements` values (`num_decoded` of the largest stage)."""
        self._values = torch.empty(num_elements, dtype=dtype, device=device)
        self._key: Hashable = None
        self._views = dict[str, Tensor]()
        """Views of the stage whose values stand in the memory, for `_key`."""

    def views(self, key: Hashable, layout: StageLayout, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `views` of a stage's weights with values in place of codes; work is on the current stream.

        `key` stands for the stage and the load of its codes; with the same key, nothing is decoded again.
        """
        if key == self._key:
            return self._views
        found, start = dict(views), 0
        for name in layout.coded_names:
            codec, shape = layout.codec_of(name), layout.offsets[name][1]
            assert codec is not None
            count = torch.Size(shape).numel()
            found[name] = values = self._values[start : start + count].view(shape)
            # `data` has a version of its own: the same values again change no saved tensor of a graph.
            codec.decode(views[name], shape, values.data)
            start += aligned(count, ALIGNMENT)
        self._key, self._views = key, found
        return found


def num_decoded(layout: StageLayout) -> int:
    """Return the number of values of a stage's codes, with the padding of each matrix."""
    return sum(aligned(torch.Size(layout.offsets[name][1]).numel(), ALIGNMENT) for name in layout.coded_names)
