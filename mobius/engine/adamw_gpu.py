"""AdamW on a GPU for flat arrays with a split master, in one pass of one kernel (triton_adamw.py).

The kernel reads the gradient and updates moments, weight and remainder. It moves 26 bytes per parameter with bf16
gradients, and 28 with fp32 gradients. With bf16 gradients and states in a reduced format, it moves 18 (bf16) or 12.1
(compact). The kernel allocates no memory. It computes the same bits as the C kernel (adamw.c). If Triton is missing or
cannot compile, torch updates in chunks (adamw.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from mobius.engine.reduced_states import Bf16States, CompactStates, NoisePlace, ReducedStates
from mobius.engine.stage_state import StageState
from mobius.engine.state_codec import SplitMaster, StateCodec

logger = logging.getLogger(__name__)

MAX_ELEMENTS = 2**28
"""Maximum number of parameters per launch, so that indices fit into 32 bits."""
_KERNELS: Final = {SplitMaster: "adamw_split", Bf16States: "adamw_bf16_states", CompactStates: "adamw_compact"}
"""Format of the states -> name of the kernel. A subclass of a format stores different data, and has no kernel."""


class GPUAdamW:
    """AdamW kernel on a GPU; the first launch for each gradient dtype compiles, which takes a second."""

    def __init__(self) -> None:
        self._kernels: dict[type[StateCodec], Any] = {}
        self._block = 0
        self._is_broken = False
        self._nothing_found: dict[torch.device, Tensor] = {}

    def supports(self, state: StageState) -> bool:
        """Whether the state is on a GPU with a split master, and compilation has not failed."""
        return state.weights.is_cuda and type(state.codec) in _KERNELS and self._is_there()

    def _is_there(self) -> bool:
        if not self._kernels and not self._is_broken:
            try:
                from mobius.engine import triton_adamw  # Triton is missing on machines without GPUs
            except ImportError as error:
                self._give_up(error)
            else:
                self._kernels = {kind: getattr(triton_adamw, name) for kind, name in _KERNELS.items()}
                self._block = triton_adamw.BLOCK
        return not self._is_broken

    def _give_up(self, error: Exception) -> None:
        self._is_broken = True
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        logger.warning("GPU AdamW uses torch, which is slower: the Triton kernel cannot be used: %s", reason)

    def warm_up(self, state: StageState, constants: Mapping[str, float]) -> None:
        """Compile and load the kernel for states like `state`, without changing it; requires `supports(state)`.

        If that fails, logs a warning and supports no state afterwards.
        """
        found = torch.ones((), dtype=torch.float32, device=state.weights.device)
        part = slice(0, state.layout.num_trained)
        try:
            noise = (0, 0) if isinstance(state.codec, ReducedStates) else None
            self.update(state, part, constants, found_inf=found, noise=noise)
        except Exception as error:  # any error of Triton or its C compiler
            self._give_up(error)

    def update(
        self,
        state: StageState,
        part: slice,
        constants: Mapping[str, float],
        *,
        found_inf: Tensor | None,
        noise: NoisePlace | None = None,
    ) -> None:
        """Update the elements in `part`; requires `supports(state)`, and constants of `UpdateArguments`.

        Only enqueues work. Changes nothing if `found_inf` (fp32 scalar on the device) is not 0. `noise` is for
        states in a reduced format; `part` then consists of whole groups.
        """
        device = state.weights.device
        if device not in self._nothing_found:
            self._nothing_found[device] = torch.zeros((), dtype=torch.float32, device=device)
        kernel = self._kernels[type(state.codec)]
        for start in range(part.start, part.stop, MAX_ELEMENTS):
            chunk = slice(start, min(start + MAX_ELEMENTS, part.stop))
            count = chunk.stop - chunk.start
            places = [] if noise is None else [_signed(noise[0]), _signed(noise[1] + start - part.start)]
            parts = state.codec.part_of(state.parts, chunk)
            rest = [parts[name] for name in sorted(parts, key=lambda name: not name.startswith("master"))]
            kernel[(-(-count // self._block),)](
                state.weights[chunk].view(torch.int16),
                *rest,
                state.gradients[chunk],
                self._nothing_found[device] if found_inf is None else found_inf,
                count,
                *places,
                **constants,
                block=self._block,
                enable_fp_fusion=False,
            )


def _signed(word: int) -> int:
    """Return the low 32 bits as a signed number; for a larger number, Triton would compile another kernel."""
    return (word & 0xFFFFFFFF ^ 0x80000000) - 0x80000000
