"""Quantizes a stage's matrices to codes, which replace the bf16 weights or are stored next to them.

    in a slot    a matrix of n weights, 2 n bytes: codes by row, n bytes | codes by column, n bytes
    resident     the same codes in a separate buffer, because the optimizer needs the weights

The compute stream computes the codes when compute first needs the weights after a load or an update; all later
microbatches use these codes. In a slot, the matrix is first copied elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mobius.models.layout import StageLayout
from mobius.models.linear import QUANTIZED_PARTS
from mobius.models.quantization import QuantizedMatrix


class StageQuantizer:
    """Quantizes the matrices in `layout.quantized` of one stage."""

    def __init__(self, layout: StageLayout) -> None:
        assert layout.eight_bit is not None
        self._layout, self._codes, self._names = layout, layout.eight_bit.codes, layout.quantized

    @classmethod
    def of(cls, layout: StageLayout) -> StageQuantizer | None:
        """Return the quantizer of a stage; None if no weight is quantized."""
        return cls(layout) if layout.quantized else None

    def quantize_in_place(self, values: Tensor, scales: Tensor) -> dict[str, Tensor]:
        """Replace the weights in `values` by their codes, and return the `views` of the result.

        `scales`: fp32 [num_scales_of(layout) or more].
        """
        matrices = self._matrices({name: self._layout.weight(values, name).view(-1) for name in self._names}, scales)
        self.quantize(values, matrices)
        return self.views(values, matrices)

    def allocate(self, device: torch.device) -> dict[str, QuantizedMatrix]:
        """Return new memory for codes, by the name of the matrix."""
        sizes = [torch.Size(self._shape(name)).numel() for name in self._names]
        codes = torch.empty(sum(sizes), dtype=torch.bfloat16, device=device).split(sizes)
        scales = torch.empty(num_scales_of(self._layout), device=device)
        return self._matrices(dict(zip(self._names, codes, strict=True)), scales)

    def _matrices(self, codes: Mapping[str, Tensor], scales: Tensor) -> dict[str, QuantizedMatrix]:
        made, start = dict[str, QuantizedMatrix](), 0
        for name, both in codes.items():
            rows, columns = self._shape(name)
            by_rows, by_columns = both.view(self._codes).chunk(2)
            row_scales, column_scales = scales[start : start + rows + columns].split((rows, columns))
            made[name] = QuantizedMatrix(
                by_rows.view(rows, columns), row_scales, by_columns.view(columns, rows), column_scales
            )
            start += rows + columns
        return made

    def views(self, values: Tensor, matrices: Mapping[str, QuantizedMatrix]) -> dict[str, Tensor]:
        """Return views of the stage's weights in `values`; `matrices` replace quantized weights and their parts."""
        views = self._layout.views(values)
        for name, matrix in matrices.items():
            linear = name.removesuffix("weight")
            views[name] = matrix.by_rows
            views |= {f"{linear}{part}": getattr(matrix, part) for part in QUANTIZED_PARTS}
        return views

    def quantize(self, weights: Tensor, matrices: Mapping[str, QuantizedMatrix]) -> None:
        """Fill `matrices` with codes of the stage's bf16 `weights` on the current stream; both may share memory."""
        for name, matrix in matrices.items():
            source = self._layout.weight(weights, name).view(-1)
            if source.data_ptr() == matrix.by_rows.data_ptr():
                source = source.clone()
            matrix.fill(source.view(self._shape(name)))

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._layout.offsets[name][1]


def num_scales_of(layout: StageLayout) -> int:
    """Return the number of scales of the stage's quantized matrices: one per row and one per column."""
    return sum(sum(layout.offsets[name][1]) for name in layout.quantized)
