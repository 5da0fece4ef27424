"""AdamW over a stage's flat state, on whatever device the state lives; when it runs is the stepper's business."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from mobius.memory.layout import FlatRange
from mobius.memory.split_master import join_master, split_master
from mobius.memory.stage_state import Remainder, StageState
from mobius.optim.kernel import AdamWKernel

GPU_CHUNK_ELEMENTS = 2**24
"""Parameters updated at a time by torch on a GPU: bounds the fp32 copy of the gradient to 64 MiB."""
HOST_CHUNK_ELEMENTS = 2**20
"""The same on the host: large pieces joined and split are four times slower there."""


@dataclass(frozen=True)
class AdamWSettings:
    """AdamW's constants; decay applies to matrices only."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


class FlatAdamW:
    """AdamW on flat fp32 masters: by the C kernel on the host if there is one, else by torch's fused update.

    The kernel takes one pass, torch several: the gradient in fp32, a split master joined, the update, the working copy
    rounded from the master.
    """

    def __init__(self, settings: AdamWSettings, kernel: AdamWKernel | None = None) -> None:
        self._settings = settings
        self._kernel = kernel
        self._scratch: dict[tuple[str, torch.device, int], Tensor] = {}

    @torch.no_grad()
    def update(
        self,
        state: StageState,
        *,
        step: int,
        learning_rate: float,
        gradient_factor: float,
        pieces: Iterable[FlatRange] | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Update master, moments and working copy in place from `state.gradients * gradient_factor`.

        Gradients that are stored in fp32 may be scaled in place. Where `found_inf` (fp32 scalar on the state's device)
        is 1, nothing changes; the C kernel does not know it.

        `pieces` are ranges of the layout, by default all; `step` is the number of this update, from 1, for the bias
        correction. Formula: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2, as
        torch.optim.AdamW has it.
        """
        kernel = self._kernel if self._kernel is not None and self._kernel.supports(state) else None
        length = _chunk_elements(state.weights.device)
        for part in state.layout.ranges if pieces is None else pieces:
            if kernel is not None:
                self._update_by_kernel(kernel, state, part, step, learning_rate, gradient_factor)
                continue
            for start in range(part.start, part.end, length):
                chunk = slice(start, min(start + length, part.end))
                self._update_chunk(state, chunk, step, learning_rate, gradient_factor, part.has_decay, found_inf)

    def _update_by_kernel(
        self,
        kernel: AdamWKernel,
        state: StageState,
        part: FlatRange,
        step: int,
        learning_rate: float,
        gradient_factor: float,
    ) -> None:
        settings = self._settings
        kernel.update(
            state,
            slice(part.start, part.end),
            gradient_factor=gradient_factor,
            step=step,
            learning_rate=learning_rate,
            beta1=settings.beta1,
            beta2=settings.beta2,
            epsilon=settings.epsilon,
            weight_decay=settings.weight_decay if part.has_decay else 0.0,
        )

    def _update_chunk(
        self,
        state: StageState,
        chunk: slice,
        step: int,
        learning_rate: float,
        gradient_factor: float,
        has_decay: bool,
        found_inf: Tensor | None,
    ) -> None:
        weights, gradient, settings = state.weights[chunk], state.gradients[chunk], self._settings
        if gradient.dtype != torch.float32:
            gradient = self._scratch_like(weights, "gradient").copy_(gradient)
        if gradient_factor != 1.0:
            gradient.mul_(gradient_factor)
        if isinstance(state.master, Remainder):
            remainder = state.master.bits[chunk]
            master = join_master(weights, remainder, out=self._scratch_like(weights, "master"))
        else:
            master = state.master[chunk]
        adamw(
            [master],
            [gradient],
            [state.exp_avg[chunk]],
            [state.exp_avg_sq[chunk]],
            [],
            [torch.full((), float(step - 1), device=master.device)],  # torch counts it up before use
            fused=True,
            amsgrad=False,
            beta1=settings.beta1,
            beta2=settings.beta2,
            lr=learning_rate,
            weight_decay=settings.weight_decay if has_decay else 0.0,
            eps=settings.epsilon,
            maximize=False,
            found_inf=found_inf,
        )
        if isinstance(state.master, Remainder):
            split_master(master, weights=weights, remainder=remainder)
        elif state.master is not state.weights:
            weights.copy_(master)

    def _scratch_like(self, tensor: Tensor, use: str) -> Tensor:
        """fp32 memory for as many elements as `tensor` has, on its device; the same for the same `use` and thread.

        On a CPU the main thread updates resident stages while the optimizer's thread updates streamed ones.
        """
        key = (use, tensor.device, threading.get_ident())
        if key not in self._scratch:
            length = _chunk_elements(tensor.device)
            self._scratch[key] = torch.empty(length, dtype=torch.float32, device=tensor.device)
        return self._scratch[key][: tensor.numel()]


def _chunk_elements(device: torch.device) -> int:
    return HOST_CHUNK_ELEMENTS if device.type == "cpu" else GPU_CHUNK_ELEMENTS
