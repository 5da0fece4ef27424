"""Stages whose optimizer states are in a reduced format, with any bits, and their updates."""

from __future__ import annotations

import torch

from mobius.engine.adamw import AdamWSettings, FlatAdamW, UpdateArguments
from mobius.engine.adamw_cpu import CPUAdamW
from mobius.engine.adamw_gpu import GPUAdamW
from mobius.engine.host_arena import HostArena
from mobius.engine.reduced_states import REDUCED
from mobius.engine.stage_state import StageState
from mobius.engine.state_codec import GROUP
from mobius.models.layout import StageLayout

FORMATS = sorted(REDUCED)
SEED = 7


def state_of(reduced: str, count: int, gradient_dtype: torch.dtype = torch.bfloat16) -> StageState:
    """A stage of one matrix, all zeros."""
    layout = StageLayout.of({"matrix": (count, 1)}, reduced={"matrix"}, reduced_format=reduced)
    return HostArena({0: layout}, dtype=torch.bfloat16, register=False, gradient_dtype=gradient_dtype).states[0]


def fill(state: StageState, seed: int) -> None:
    """Random weights, gradients of very different sizes, and any bits as moments that are finite and not negative."""
    generator = torch.Generator().manual_seed(seed)
    count = state.layout.num_units
    state.write_master(slice(None), torch.randn(count, generator=generator))
    groups = 10.0 ** torch.randint(-12, 3, (count // GROUP,), generator=generator)
    spread = 10.0 ** (torch.rand(count, generator=generator) * 6 - 3)
    state.gradients.copy_(torch.randn(count, generator=generator) * spread * groups.repeat_interleave(GROUP))
    for name, part in state.parts.items():
        if part.dtype == torch.uint8:
            bounds = (32, 160) if name.endswith("exponents") else (0, 256)  # no update overflows
            part.copy_(torch.randint(*bounds, part.shape, generator=generator))
        elif part.dtype == torch.bfloat16:
            signs = 2 if name == "exp_avg" else 1
            words = torch.randint(0, 0x5F00, part.shape, generator=generator)
            part.view(torch.int16).copy_(words - 32768 * torch.randint(0, signs, part.shape, generator=generator))
        else:
            limits = torch.iinfo(part.dtype)
            part.copy_(torch.randint(limits.min, limits.max, part.shape, generator=generator))
            part[state.weights == 0] &= 0x7F  # with a negative one, which no update leaves, the master would be a NaN


def arguments(step: int, *, decay: float = 0.1) -> UpdateArguments:
    return UpdateArguments(
        step=step,
        learning_rate=1e-3 / step,
        gradient_factor=0.25,
        beta1=0.9,
        beta2=0.999,
        epsilon=1e-8,
        weight_decay=decay,
        seed=SEED,
    )


def run(state: StageState, step: int, kernel: CPUAdamW | GPUAdamW | None) -> None:
    """Update once: by the kernel, or without one by torch."""
    numbers = arguments(step)
    settings = AdamWSettings(numbers.beta1, numbers.beta2, numbers.epsilon, numbers.weight_decay, SEED)
    own = {"fused" if isinstance(kernel, GPUAdamW) else "kernel": kernel}
    FlatAdamW(settings, **own).update(
        state, step=step, learning_rate=numbers.learning_rate, gradient_factor=numbers.gradient_factor
    )


def same(mine: StageState, other: StageState) -> bool:
    """Whether all bits are equal; a NaN may have any."""
    return all(
        bool(((a == b) | (a.isnan() & b.isnan())).all()) if a.is_floating_point() else torch.equal(a, b)
        for a, b in zip(mine.tensors, other.tensors, strict=True)
    )
