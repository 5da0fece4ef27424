"""AdamW for a stage's flat state, on the device that has the state.

The update uses the first of these ways that supports the state:

    one pass      for a split master: the C kernel on the host (adamw.c), or a compiled kernel on a GPU (adamw_gpu.py)
    step by step  for states in a reduced format: torch's operations one by one, with the same bits as the kernels
    in chunks     for all other states: torch's fused update
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from mobius.engine.adamw_cpu import CPUAdamW
from mobius.engine.adamw_gpu import GPUAdamW
from mobius.engine.reduced_states import NoisePlace, ReducedStates, noise_key
from mobius.engine.stage_state import StageState
from mobius.models.layout import FlatRange, StageLayout, within

GPU_CHUNK_ELEMENTS = 2**24
"""Parameters of one torch update on a GPU; limits the fp32 copy of the gradient to 64 MiB."""
HOST_CHUNK_ELEMENTS = 2**20
"""Parameters of one torch update on the host, where joining and splitting larger chunks is four times slower."""


@dataclass(frozen=True)
class AdamWSettings:
    """AdamW's constants; weight decay applies only to ranges of the layout that have decay."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    seed: int = 0
    """Seed of the noise for rounding states in a reduced format."""


@dataclass(frozen=True, kw_only=True)
class UpdateArguments(AdamWSettings):
    """Arguments of one update of parameters that share weight decay and learning rate."""

    step: int
    """Number of this update, from 1."""
    learning_rate: float
    gradient_factor: float
    """Factor by which gradients are multiplied before use."""

    def constants(self, *, is_reduced: bool = False) -> dict[str, float]:
        """Return the arguments of the kernels (adamw.c, triton_adamw.py), by name.

        For states in a reduced format, the correction of the root is part of other constants, which saves a division.
        """
        correction = (1.0 - self.beta2**self.step) ** 0.5
        moved, kept = (correction, 1.0) if is_reduced else (1.0, correction)
        constants = {
            "gradient_factor": self.gradient_factor,
            "decay": 1.0 - self.learning_rate * self.weight_decay,
            "beta2": self.beta2,
            "one_minus_beta1": 1.0 - self.beta1,
            "one_minus_beta2": 1.0 - self.beta2,
            "step_size": moved * self.learning_rate / (1.0 - self.beta1**self.step),
            "root_correction": kept,
            "epsilon": moved * self.epsilon,
        }
        return {name: float(value) for name, value in constants.items()}  # with an int, Triton compiles again

    def noise_key(self, name: str) -> int:
        """Return the key of the noise for parameter `name`."""
        return noise_key(self.seed, self.step, name)


class FlatAdamW:
    """AdamW on flat fp32 masters.

    Torch's update needs several passes: convert the gradient to fp32, join a split master, update, round the master.
    """

    def __init__(self, settings: AdamWSettings, kernel: CPUAdamW | None = None, fused: GPUAdamW | None = None) -> None:
        """`kernel` updates states on the host; `fused` updates states on a GPU."""
        self._settings, self._fused = settings, fused
        self._one_pass = [each for each in (kernel, fused) if each is not None]
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

        May scale fp32 gradients in place. Changes nothing if `found_inf` (fp32 scalar on the state's device) is 1.

        `pieces` are ranges of the layout, by default all; `step` is the number of this update, from 1, for the bias
        correction. Formula: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2, as in
        torch.optim.AdamW.
        """
        decayed = UpdateArguments(
            **vars(self._settings), step=step, learning_rate=learning_rate, gradient_factor=gradient_factor
        )
        wanted = state.layout.ranges if pieces is None else tuple(pieces)
        for own in state.owned:
            self._update(own.state, within(wanted, own.place), decayed, found_inf)

    def _update(
        self, state: StageState, ranges: Iterable[FlatRange], decayed: UpdateArguments, found_inf: Tensor | None
    ) -> None:
        one_pass = next((each for each in self._one_pass if each.supports(state)), None)
        length = _chunk_elements(state.weights.device)
        for part in ranges:
            numbers = replace(
                decayed,
                weight_decay=decayed.weight_decay if part.has_decay else 0.0,
                learning_rate=decayed.learning_rate * part.rate,
            )
            noise = None if part.name is None else (numbers.noise_key(part.name), part.offset)
            constants = numbers.constants(is_reduced=noise is not None)
            if one_pass is not None:
                place = slice(part.start, part.end)
                one_pass.update(state, place, constants, found_inf=found_inf, noise=noise)
                continue
            for start in range(part.start, part.end, length):
                chunk = slice(start, min(start + length, part.end))
                if noise is None:
                    self._update_chunk(state, chunk, numbers, found_inf)
                elif found_inf is None or not bool(found_inf):  # sync, but only without Triton
                    _update_reduced(state, chunk, constants, (noise[0], noise[1] + start - part.start))

    def warm_up(self, states: Iterable[StageState]) -> None:
        """Compile and load the kernels for `states` on a GPU, and allocate their scratch memory.

        During a step, loading kernels could wait for the device, which a posted receive may block. Changes no state.
        """
        by_size = sorted((own.state for state in states for own in state.owned), key=lambda s: s.layout.num_trained)
        kinds = {(type(s.codec), s.weights.dtype, s.gradients.dtype): s for s in by_size if s.weights.is_cuda}
        numbers = UpdateArguments(**vars(self._settings), step=1, learning_rate=0.0, gradient_factor=0.5)
        for state in kinds.values():
            if self._fused is not None and self._fused.supports(state):
                self._fused.warm_up(state, numbers.constants())
                if self._fused.supports(state):
                    continue
            if isinstance(state.codec, ReducedStates):
                continue
            count = min(state.layout.num_trained, GPU_CHUNK_ELEMENTS)
            layout = StageLayout({}, count, count, (FlatRange(0, count, has_decay=True),))
            device, gradients = state.weights.device, torch.zeros_like(state.gradients[:count])
            blank = StageState.on_device(layout, device, state.weights.dtype, gradients)
            nothing = torch.zeros((), dtype=torch.float32, device=device)
            self.update(blank, step=1, learning_rate=0.0, gradient_factor=0.5, found_inf=nothing)

    def _update_chunk(
        self, state: StageState, chunk: slice, numbers: UpdateArguments, found_inf: Tensor | None
    ) -> None:
        weights, gradient = state.weights[chunk], state.gradients[chunk]
        if gradient.dtype != torch.float32:
            gradient = self._scratch_like(weights, "gradient").copy_(gradient)
        if numbers.gradient_factor != 1.0:
            gradient.mul_(numbers.gradient_factor)
        parts = {name: part[chunk] for name, part in state.parts.items()}
        master = state.codec.decode_master(weights, parts, partial(self._scratch_like, use="master"))
        moments = state.codec.decode_moments(parts)
        adamw(
            [master],
            [gradient],
            [moments[0]],
            [moments[1]],
            [],
            [torch.full((), float(numbers.step - 1), device=master.device)],  # torch adds 1 before use
            fused=True,
            amsgrad=False,
            beta1=numbers.beta1,
            beta2=numbers.beta2,
            lr=numbers.learning_rate,
            weight_decay=numbers.weight_decay,
            eps=numbers.epsilon,
            maximize=False,
            found_inf=found_inf,
        )
        state.codec.encode_moments(moments, parts)
        state.codec.encode_master(master, weights, parts)

    def _scratch_like(self, tensor: Tensor, use: str) -> Tensor:
        """Return fp32 scratch memory with as many elements as `tensor`, on its device; one buffer per `use` and thread.

        On a CPU the main thread updates resident stages while the optimizer's thread updates streamed stages.
        """
        key = (use, tensor.device, threading.get_ident())
        if key not in self._scratch:
            length = _chunk_elements(tensor.device)
            self._scratch[key] = torch.empty(length, dtype=torch.float32, device=tensor.device)
        return self._scratch[key][: tensor.numel()]


def _update_reduced(state: StageState, chunk: slice, constants: Mapping[str, float], place: NoisePlace) -> None:
    """Update the elements in `chunk` (whole groups) by the operations of adamw.c, in the same order.

    torch's fused update may round differently on another CPU. `constants` come from `UpdateArguments.constants` for a
    reduced format.
    """
    codec, weights, parts = state.codec, state.weights[chunk], state.codec.part_of(state.parts, chunk)
    assert isinstance(codec, ReducedStates)
    mean, square = codec.decode_moments(parts)
    scaled = state.gradients[chunk].float() * constants["gradient_factor"]
    mean = mean + (scaled - mean) * constants["one_minus_beta1"]
    square = square * constants["beta2"] + scaled * constants["one_minus_beta2"] * scaled
    root = square.double().sqrt().float()  # correctly rounded, unlike torch's vectorized root of fp32
    rate = mean * constants["step_size"] / (root + constants["epsilon"])
    master = codec.decode_master(weights, parts) * constants["decay"] - rate
    words = codec.noise(*place, len(weights), weights.device)
    codec.encode_moments((mean, square), parts, words)
    codec.encode_master(master, weights, parts, words)


def _chunk_elements(device: torch.device) -> int:
    return HOST_CHUNK_ELEMENTS if device.type == "cpu" else GPU_CHUNK_ELEMENTS
