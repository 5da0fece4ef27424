"""AdamW on a GPU over flat arrays with a split master, in one pass of one kernel (triton_adamw.py).

It reads the gradient and updates moments, weight and remainder: 26 bytes of memory traffic per parameter with bf16
gradients, 28 with fp32 ones. It allocates no memory and is bit-identical to the C kernel (adamw.c). If Triton is
missing or cannot compile, torch updates in chunks (adamw.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mobius.engine.stage_state import StageState
from mobius.engine.state_codec import SplitMaster

logger = logging.getLogger(__name__)

MAX_ELEMENTS = 2**28
"""Parameters per launch: indices stay within 32 bits."""


class GPUAdamW:
    """AdamW kernel on a GPU; its first launch per gradient dtype compiles, which takes a second."""

    def __init__(self) -> None:
        self._kernel: Any = None
        self._block = 0
        self._is_broken = False
        self._nothing_found: dict[torch.device, Tensor] = {}

    def supports(self, state: StageState) -> bool:
        """Whether it can update the state: on a GPU, with a split master, and compilation has not failed."""
        return state.weights.is_cuda and type(state.codec) is SplitMaster and self._is_there()

    def _is_there(self) -> bool:
        if self._kernel is None and not self._is_broken:
            try:
                from mobius.engine import triton_adamw  # missing on machines without GPUs
            except ImportError as error:
                self._give_up(error)
            else:
                self._kernel, self._block = triton_adamw.adamw_split, triton_adamw.BLOCK
        return not self._is_broken

    def _give_up(self, error: Exception) -> None:
        self._is_broken = True
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        logger.warning("GPU AdamW uses torch, which is slower: the Triton kernel cannot be used: %s", reason)

    def warm_up(self, state: StageState, constants: Mapping[str, float]) -> None:
        """Compile and load the kernel for states like `state`, without changing it; requires `supports(state)`.

        If that fails, log a warning and support no state from then on.
        """
        found = torch.ones((), dtype=torch.float32, device=state.weights.device)
        part = slice(0, state.layout.num_trained)
        try:
            self.update(state, part, constants, found_inf=found)
        except Exception as error:  # any error of Triton or its C compiler
            self._give_up(error)

    def update(
        self, state: StageState, part: slice, constants: Mapping[str, float], *, found_inf: Tensor | None
    ) -> None:
        """Update the elements in `part`; requires `supports(state)`, and constants of `UpdateArguments`.

        Returns after enqueuing. Changes nothing if `found_inf` (fp32 scalar on the device) is not 0.
        """
        device = state.weights.device
        if device not in self._nothing_found:
            self._nothing_found[device] = torch.zeros((), dtype=torch.float32, device=device)
        remainder = state.parts["master_low"]
        arrays = (state.weights.view(torch.int16), remainder, state.exp_avg, state.exp_avg_sq, state.gradients)
        for start in range(part.start, part.stop, MAX_ELEMENTS):
            chunk = slice(start, min(start + MAX_ELEMENTS, part.stop))
            count = chunk.stop - chunk.start
            self._kernel[(-(-count // self._block),)](
                *(array[chunk] for array in arrays),
                self._nothing_found[device] if found_inf is None else found_inf,
                count,
                **constants,
                block=self._block,
                enable_fp_fusion=False,
            )
