"""Measures how far reduced optimizer states lead the weights from fp32 ones, by the product's own update on the CPU.

    python benchmarks/state_formats.py                      # takes half a minute

2,000 steps with a cosine schedule; gradients of an element have a mean and a spread of their own, log-normal within a
group (sigma 1.2), and fall to a fifth at half time. Synthetic: it ranks formats, and real training decides. The table
has, for the master and for the bf16 weight that the GPU computes with, the length of the difference to fp32 states'
whole update over the length of that update; the largest element's update over fp32's largest; and the mean of second
moments over fp32's. In sparse rows a gradient is zero in 98 % of the steps, as in an embedding.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from mobius.engine.adamw import AdamWSettings, FlatAdamW
from mobius.engine.adamw_cpu import load_adamw_cpu
from mobius.engine.host_arena import HostArena
from mobius.engine.reduced_states import REDUCED
from mobius.engine.stage_state import StageState
from mobius.models.layout import StageLayout
from mobius.ranks import cache_folder
from mobius.units import format_columns

STEPS, COUNT = 2000, 2**15


@dataclass(frozen=True)
class Case:
    """A learning rate, a decay of second moments, the size of gradients, and the share of steps that have one."""

    learning_rate: float
    beta2: float
    scale: float
    share: float = 1.0

    def describe(self) -> str:
        """Text for a table."""
        rows = "" if self.share == 1 else f", {self.share:.0%} of rows"
        return f"lr {self.learning_rate:g}, beta2 {self.beta2:g}, gradients {self.scale:g}{rows}"


CASES = (
    *(Case(1e-5, 0.999, scale) for scale in (1.0, 1e-5, 1e-7)),
    Case(1e-6, 0.999, 1e-5),
    Case(1e-5, 0.95, 1e-5),
    Case(1e-5, 0.999, 1e-5, share=0.02),
    Case(1e-6, 0.999, 1e-7, share=0.02),
)


@dataclass(frozen=True)
class Trained:
    """Updates of the master and of the bf16 weight, and second moments, of all elements."""

    master: torch.Tensor
    weight: torch.Tensor
    square: torch.Tensor


def train(case: Case, reduced: str) -> Trained:
    """Train by `case` with states in a format; fp32 if it is empty. Gradients are the same in all formats."""
    layout = StageLayout.of({"matrix": (COUNT, 1)}, reduced={"matrix"} if reduced else (), reduced_format=reduced)
    arena = HostArena({0: layout}, dtype=torch.bfloat16, register=False, gradient_dtype=torch.float32)
    state: StageState = arena.states[0]
    random = np.random.default_rng(0)
    spread = np.exp(random.normal(0, 1.2, COUNT)).astype(np.float32)
    mean = random.normal(0, 0.15, COUNT).astype(np.float32) * spread
    state.write_master(slice(None), torch.from_numpy(random.normal(0, 0.02, COUNT).astype(np.float32)))
    state.write_master(slice(None), state.weights.clone())  # of a bf16 model
    before, kernel = state.read_master().clone(), load_adamw_cpu(cache_folder(), num_threads=1)
    adamw = FlatAdamW(AdamWSettings(0.9, case.beta2, 1e-8, 0.0, seed=99), kernel)
    for step in range(1, STEPS + 1):
        size = case.scale * (1.0 if step < STEPS // 2 else 0.2)
        gradient = (mean + spread * random.normal(0, 1, COUNT).astype(np.float32)) * np.float32(size)
        if case.share < 1:
            gradient *= random.random(COUNT) < case.share
        state.gradients.copy_(torch.from_numpy(gradient))
        rate = case.learning_rate * 0.5 * (1 + np.cos(np.pi * step / STEPS))
        adamw.update(state, step=step, learning_rate=float(rate), gradient_factor=1.0)
    square = state.codec.decode_moments(state.parts)[1].double()
    return Trained((state.read_master() - before).double(), (state.weights.float() - before).double(), square)


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = [["case", "states", "master", "weight", "largest", "second moment"]]
    for case in CASES:
        exact = train(case, "")
        for name in REDUCED:
            found = train(case, name)
            off = [
                float((getattr(found, each) - getattr(exact, each)).norm() / getattr(exact, each).norm())
                for each in ("master", "weight")
            ]
            largest = float(found.master.abs().max() / exact.master.abs().max())
            moment = float(found.square.sum() / exact.square.sum())
            shown = [*(f"{100 * each:.2f} %" for each in off), f"{largest:.2f}", f"{moment:.3f}"]
            rows.append([case.describe(), name, *shown])
    print(format_columns(rows, num_left=2, indent=""))


if __name__ == "__main__":
    main()
