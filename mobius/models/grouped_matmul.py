"""Grouped matrix products: each row times the matrix of its expert; rows are sorted by expert.

    rows        0 0 0 1 1 3        experts of 6 rows
    offsets     3     5 5 6        int32: end of each expert's rows; expert 2 has none

In a graph, each product is one operation. It reads the offsets when it runs, on a GPU without the host.

    GPU     rows x matrices: torch's grouped_mm if it is one kernel (bf16 on Hopper, Blackwell), else Triton
            gradient factors: Triton adds their product to the fp32 sum in place
    CPU     one matrix product per expert
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from mobius.errors import first_line

_NAME = "mobius::grouped_product"
_WITH_ONE_KERNEL = (9, 10)
"""Major compute capabilities where torch's grouped_mm does not synchronize with the host to read the offsets."""


def grouped_matmul(rows: Tensor, weight: Tensor, expert_offsets: Tensor) -> Tensor:
    """Multiply each row by its expert's matrix: [rows, in], [experts, in, out], int32 [experts] -> [rows, out].

    `weight` may be a transposed view. Not differentiable. Asynchronous on a GPU.
    """
    return _operations()[0](rows, weight, expert_offsets)


def grouped_weight_gradient(left: Tensor, right: Tensor, expert_offsets: Tensor) -> Tensor:
    """Compute left^T right for each expert's rows: [rows, out], [rows, in], int32 [experts] -> [experts, out, in]."""
    return _operations()[1](left, right, expert_offsets)


def add_weight_gradient(total: Tensor, left: Tensor, right: Tensor, expert_offsets: Tensor) -> None:
    """Add left^T right for each expert's rows to `total`, fp32 [experts, out, in].

    `left` [rows, out] and `right` [rows, in] have the working dtype. A GPU accumulates in fp32 in one kernel; a CPU
    rounds each expert's product to the working dtype first.
    """
    if total.device.type == "cuda" and expert_kernels().add_factors(total, left, right, expert_offsets):
        return
    for expert, own in expert_rows(expert_offsets):
        total[expert].add_(torch.mm(left[own].t(), right[own]))


class ExpertRows(NamedTuple):
    """Rows of one expert, at least one row."""

    expert: int
    rows: slice


def expert_rows(expert_offsets: Tensor) -> Iterator[ExpertRows]:
    """Rows of each expert, except experts without rows. Synchronizes with a GPU."""
    start = 0
    for expert, end in enumerate(expert_offsets.tolist()):
        if end > start:
            yield ExpertRows(expert, slice(start, end))
        start = end


@functools.cache
def _operations() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Custom operations for grouped products and weight gradients, registered at first use."""

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
    """Compute `grouped_matmul` in one kernel; None if no kernel is available."""
    if 1 not in weight.stride()[1:]:  # an adapter's second factor; kernels would read each number from another line
        weight = weight.contiguous()
    is_aligned = all(width * rows.element_size() % 16 == 0 for width in weight.shape[1:])
    if rows.dtype == torch.bfloat16 and is_aligned and _capability(rows.device) in _WITH_ONE_KERNEL:
        return cast(Tensor, _of_torch()(rows, weight, offs=expert_offsets))
    return expert_kernels().multiply(rows, weight, expert_offsets)


@functools.cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


@functools.cache
def _of_torch() -> Callable[..., Any]:
    """Return torch's grouped product, whose name depends on torch's version."""
    return getattr(F, "grouped_mm", None) or torch._grouped_mm


logger = logging.getLogger(__name__)


class ExpertKernels:
    """Triton kernels, compiled at first launch. The first failure is logged and turns them off."""

    def __init__(self) -> None:
        self._module: Any = None
        self._is_broken = False

    def multiply(self, rows: Tensor, weight: Tensor, expert_offsets: Tensor) -> Tensor | None:
        """Compute `grouped_matmul`; None if kernels are unusable. Never synchronizes with the GPU."""
        num_experts, num_in, num_out = weight.shape
        output = rows.new_empty(len(rows), num_out)

        def launch(kernels: Any) -> None:
            cdiv = kernels.triton.cdiv
            grid = cdiv(num_out, kernels.OUT), cdiv(len(rows), kernels.ROWS) + num_experts
            kernels.grouped_rows[grid](
                *(rows.contiguous(), weight, expert_offsets, output, num_experts, num_in, num_out, *weight.stride()),
                experts_block=kernels.triton.next_power_of_2(num_experts),
                rows_block=kernels.ROWS,
                out_block=kernels.OUT,
                in_block=kernels.IN,
                **kernels.SETTINGS,
            )

        return output if len(rows) == 0 or self._launch(launch, rows.device) else None

    def add_factors(self, total: Tensor, left: Tensor, right: Tensor, expert_offsets: Tensor) -> bool:
        """Run `add_weight_gradient` in one pass over `total`; False if kernels are unusable."""

        def launch(kernels: Any) -> None:
            is_half = left.element_size() == 2 and _has_large_shared_memory(left.device)
            cdiv = kernels.triton.cdiv
            tiles = cdiv(left.shape[1], kernels.LEFT) * cdiv(right.shape[1], kernels.RIGHT)
            kernels.add_factors[(tiles, len(expert_offsets))](
                *(left.contiguous(), right.contiguous(), expert_offsets, total, left.shape[1], right.shape[1]),
                left_block=kernels.LEFT,
                right_block=kernels.RIGHT,
                **(kernels.ADD_SETTINGS_OF_HALVES if is_half else kernels.ADD_SETTINGS),
            )

        return self._launch(launch, total.device)

    def _launch(self, launch: Callable[[Any], None], device: torch.device) -> bool:
        if self._is_broken:
            return False
        try:
            if self._module is None:
                from mobius.models import triton_grouped_matmul  # this import fails on machines without GPUs

                self._module = triton_grouped_matmul
            with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
                launch(self._module)
        except Exception as error:  # Triton and its compilers raise arbitrary types
            self._is_broken = True
            text = "experts run one after another, which is slower, because Triton kernels cannot be used: %s"
            logger.warning(text, first_line(error))
        return not self._is_broken


@functools.cache
def expert_kernels() -> ExpertKernels:
    """The kernels of this process."""
    return ExpertKernels()


@functools.cache
def _has_large_shared_memory(device: torch.device) -> bool:
    """Whether a Triton program may use 96 KiB of shared memory: on Ampere and later, and in Triton's interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
