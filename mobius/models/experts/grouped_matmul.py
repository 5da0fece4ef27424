"""Grouped products: rows sorted by expert, times their experts' matrices.

    rows        0 0 0 1 1 3        experts of 6 rows
    offsets     3     5 5 6        int32: end of each expert's rows; expert 2 has none

Each product is one operation in a graph and reads the offsets when it runs, on a GPU without the host.

    GPU     rows x matrices: torch's grouped_mm where it is one kernel (bf16 on Hopper, Blackwell), else Triton
            gradient factors: Triton, which adds to the fp32 sum in place
    CPU     one matrix product per expert
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from mobius.models.experts.kernel_launch import expert_kernels

_NAME = "mobius::grouped_product"
_WITH_ONE_KERNEL = (9, 10)
"""Major compute capabilities where torch's grouped_mm does not synchronize with the host to read the offsets."""


def grouped_matmul(rows: Tensor, weight: Tensor, expert_offsets: Tensor) -> Tensor:
    """Multiply each row by its expert's matrix: [rows, in], [experts, in, out], int32 [experts] -> [rows, out].

    `weight` may be a transposed view. Not differentiable. Asynchronous on a GPU.
    """
    return _operations()[0](rows, weight, expert_offsets)


def grouped_weight_gradient(left: Tensor, right: Tensor, expert_offsets: Tensor) -> Tensor:
    """left^T right over each expert's rows: [rows, out], [rows, in], int32 [experts] -> [experts, out, in]."""
    return _operations()[1](left, right, expert_offsets)


def add_weight_gradient(total: Tensor, left: Tensor, right: Tensor, expert_offsets: Tensor) -> None:
    """Add left^T right over each expert's rows to `total`, fp32 [experts, out, in].

    `left` [rows, out] and `right` [rows, in] have the working dtype. A GPU accumulates in fp32 in one kernel; a CPU
    rounds each expert's product to the working dtype first.
    """
    if total.device.type == "cuda" and expert_kernels().add_factors(total, left, right, expert_offsets):
        return
    for expert, own in expert_rows(expert_offsets):
        total[expert].add_(torch.mm(left[own].t(), right[own]))


class ExpertRows(NamedTuple):
    """The rows of an expert that has any."""

    expert: int
    rows: slice


def expert_rows(expert_offsets: Tensor) -> Iterator[ExpertRows]:
    """Rows of each expert that has any. Synchronizes with a GPU."""
    start = 0
    for expert, end in enumerate(expert_offsets.tolist()):
        if end > start:
            yield ExpertRows(expert, slice(start, end))
        start = end


@functools.cache
def _operations() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The two custom operations, registered at first use."""

    @torch.library.custom_op(_NAME, mutates_args=())
    def multiply(rows: Tensor, weight: Tensor, expert_offsets: Tensor) -> Tensor:
        if rows.device.type == "cuda" and (output := _multiply_on_gpu(rows, weight, expert_offsets)) is not None:
            return output
        output = rows.new_empty(len(rows), weight.shape[2])
        for expert, own in expert_rows(expert_offsets):
            torch.mm(rows[own], weight[expert], out=output[own])
        return output

    @torch.library.custom_op(f"{_NAME}_of_weight", mutates_args=())
    def multiply_factors(left: Tensor, right: Tensor, expert_offsets: Tensor) -> Tensor:
        total = torch.zeros(len(expert_offsets), left.shape[1], right.shape[1], device=left.device)
        add_weight_gradient(total, left, right, expert_offsets)
        return total.to(left.dtype, copy=True)

    multiply.register_fake(lambda rows, weight, expert_offsets: rows.new_empty(len(rows), weight.shape[2]))
    multiply_factors.register_fake(
        lambda left, right, expert_offsets: left.new_empty(len(expert_offsets), left.shape[1], right.shape[1])
    )
    return multiply, multiply_factors


def _multiply_on_gpu(rows: Tensor, weight: Tensor, expert_offsets: Tensor) -> Tensor | None:
    """The product in one kernel, or None if no kernel is available."""
    is_aligned = all(width * rows.element_size() % 16 == 0 for width in weight.shape[1:])
    if rows.dtype == torch.bfloat16 and is_aligned and _capability(rows.device) in _WITH_ONE_KERNEL:
        return cast(Tensor, _of_torch()(rows, weight, offs=expert_offsets))
    return expert_kernels().multiply(rows, weight, expert_offsets)


@functools.cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


@functools.cache
def _of_torch() -> Callable[..., Any]:
    """Grouped product of torch, under the name that this version has."""
    return getattr(F, "grouped_mm", None) or torch._grouped_mm
