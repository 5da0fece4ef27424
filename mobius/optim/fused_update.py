"""AdamW on a GPU over flat arrays with a split master, as one function that torch.compile makes one kernel of.

It is `update` and `split` of adamw.c in torch, with the same constants and order of operations: gradient in, moments,
weight and remainder updated, 26 bytes of memory traffic per parameter with bf16 gradients and 28 with fp32 ones. Beside
its arrays it takes no memory. Where it cannot be compiled there is torch's own update in pieces (adamw.py).

Compiled code may multiply and add in one rounding and divide to 2 ulp. So after a step

    |moment - its value in C| <= 2**-22 times the largest of moment and gradient (or their squares)
    |master - its value in C| <= 1 ulp of the master + 2**-20 of the update, moments being equal
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mobius.memory.stage_state import Remainder, StageState
from mobius.models.compiled import CompiledFunction

MAX_ELEMENTS = 2**28
"""Parameters per call: indices stay within 32 bits."""
_BF16_NAN = 0x7FC0
_HALF_ULP = 0x7FFF


class Constants(NamedTuple):
    """fp32 scalars on the device: numbers of a step that are not to be compiled in."""

    gradient_factor: Tensor
    decay: Tensor
    beta2: Tensor
    one_minus_beta1: Tensor
    one_minus_beta2: Tensor
    step_size: Tensor
    root_correction: Tensor
    epsilon: Tensor
    found_inf: Tensor


def update_split(
    weights: Tensor, remainder: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, gradient: Tensor, c: Constants
) -> None:
    """Update all but `gradient` in place, all [elements] long; nothing where `c.found_inf` is not 0.

    `weights` are the bits of bf16 numbers as int16, `remainder` is int16, the moments fp32, the gradient bf16 or fp32.
    """
    master = ((weights.to(torch.int32) << 16) + remainder).view(torch.float32)
    scaled = gradient.float() * c.gradient_factor
    mean = exp_avg + (scaled - exp_avg) * c.one_minus_beta1
    square = exp_avg_sq * c.beta2 + c.one_minus_beta2 * scaled * scaled
    updated = master * c.decay - c.step_size * mean / (square.sqrt() / c.root_correction + c.epsilon)
    # Rounded to nearest even by its bits: compilers leave out conversions to bf16 and back.
    bits = updated.view(torch.int32)
    rounded = (bits + _HALF_ULP + ((bits >> 16) & 1)) >> 16
    rest = (bits - (rounded << 16)).clamp(max=2**15 - 1)
    is_nan = updated.isnan()
    is_kept = c.found_inf != 0
    weights.copy_(torch.where(is_kept, weights, torch.where(is_nan, _BF16_NAN, rounded).to(torch.int16)))
    remainder.copy_(torch.where(is_kept, remainder, torch.where(is_nan, 0, rest).to(torch.int16)))
    exp_avg.copy_(torch.where(is_kept, exp_avg, mean))
    exp_avg_sq.copy_(torch.where(is_kept, exp_avg_sq, square))


class FusedUpdate:
    """Owns the compiled function; the first call of each kind of gradient compiles, which takes seconds."""

    def __init__(self) -> None:
        self._run = CompiledFunction(update_split, name="updates of resident stages", dynamic=True)

    def supports(self, state: StageState) -> bool:
        """Whether it can update such a state: on a GPU, with a split master, and compiling has not failed."""
        return state.weights.is_cuda and isinstance(state.master, Remainder) and not self._run.is_broken

    def update(
        self,
        state: StageState,
        part: slice,
        *,
        step: int,
        learning_rate: float,
        gradient_factor: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
        found_inf: Tensor | None,
    ) -> None:
        """Update the elements in `part`; `state` is one that it `supports`, `step` counts from 1.

        Enqueues and returns; `found_inf` is an fp32 scalar on the device, and where it is not 0 nothing changes.
        """
        assert isinstance(state.master, Remainder)
        device = state.weights.device

        def scalar(value: float) -> Tensor:
            return torch.full((), value, dtype=torch.float32, device=device)

        constants = Constants(
            gradient_factor=scalar(gradient_factor),
            decay=scalar(1.0 - learning_rate * weight_decay),
            beta2=scalar(beta2),
            one_minus_beta1=scalar(1.0 - beta1),
            one_minus_beta2=scalar(1.0 - beta2),
            step_size=scalar(learning_rate / (1.0 - beta1**step)),
            root_correction=scalar((1.0 - beta2**step) ** 0.5),
            epsilon=scalar(epsilon),
            found_inf=scalar(0.0) if found_inf is None else found_inf,
        )
        bits, remainder = state.weights.view(torch.int16), state.master.bits
        for start in range(part.start, part.stop, MAX_ELEMENTS):
            chunk = slice(start, min(start + MAX_ELEMENTS, part.stop))
            moments = state.exp_avg[chunk], state.exp_avg_sq[chunk]
            self._run(bits[chunk], remainder[chunk], *moments, state.gradients[chunk], constants)
