"""Launches the Triton kernels of expert products (`triton_grouped_matmul.py`), where they are usable."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mobius.errors import first_line

logger = logging.getLogger(__name__)


class ExpertKernels:
    """Triton kernels, compiled at first launch; after a failure, which is logged once, they are off."""

    def __init__(self) -> None:
        self._module: Any = None
        self._is_broken = False

    def multiply(self, rows: Tensor, weight: Tensor, expert_offsets: Tensor) -> Tensor | None:
        """`grouped_matmul.grouped_matmul`, or None if kernels are unusable. Never synchronizes with the GPU."""
        num_experts, num_in, num_out = weight.shape
        output = rows.new_empty(len(rows), num_out)

        def launch(kernels: Any) -> None:
            grid = _parts(num_out, kernels.OUT), _parts(len(rows), kernels.ROWS) + num_experts
            kernels.grouped_rows[grid](
                *(rows.contiguous(), weight, expert_offsets, output, num_experts, num_in, num_out, *weight.stride()),
                experts_block=_power_of_two(num_experts),
                rows_block=kernels.ROWS,
                out_block=kernels.OUT,
                in_block=kernels.IN,
                **kernels.SETTINGS,
            )

        return output if len(rows) == 0 or self._launch(launch, rows.device) else None

    def add_factors(self, total: Tensor, left: Tensor, right: Tensor, expert_offsets: Tensor) -> bool:
        """`grouped_matmul.add_weight_gradient` in one pass over `total`; False if kernels are unusable."""

        def launch(kernels: Any) -> None:
            is_half = left.element_size() == 2 and _has_large_shared_memory(left.device)
            tiles = _parts(left.shape[1], kernels.LEFT) * _parts(right.shape[1], kernels.RIGHT)
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
                from mobius.models.experts import triton_grouped_matmul  # fails on machines without GPUs

                self._module = triton_grouped_matmul
            with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
                launch(self._module)
        except Exception as error:  # Triton and its compilers raise arbitrary types
            self._is_broken = True
            told = "experts run one after another, which is slower: Triton kernels cannot be used: %s"
            logger.warning(told, first_line(error))
        return not self._is_broken


@functools.cache
def expert_kernels() -> ExpertKernels:
    """The kernels of this process."""
    return ExpertKernels()


@functools.cache
def _has_large_shared_memory(device: torch.device) -> bool:
    """Whether a program may use 96 KiB of shared memory: Ampere and later, and Triton's interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def _parts(length: int, size: int) -> int:
    return -(-length // size)


def _power_of_two(number: int) -> int:
    """Smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
