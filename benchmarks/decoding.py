"""Measures how fast a GPU decodes frozen weights from codes: bytes of its memory per weight and second.

    python benchmarks/decoding.py

Prints for each format the seconds of the matrices of a layer of 7B, and the bytes of traffic a weight that this is at
the memory's rate, which a copy of 1 GiB measures. `DECODING_BYTES` in mobius/planner/gpu_specs.py is the largest.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from mobius.models.weight_codecs import CODECS, WeightCodec
from mobius.units import format_columns

SHAPES = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)]
TURNS, REPEATS = 7, 20


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call, which runs `REPEATS` times between two waits."""
    found = []
    for _ in range(TURNS + 1):
        wait(device)
        start = time.perf_counter()
        for _ in range(REPEATS):
            work()
        wait(device)
        found.append((time.perf_counter() - start) / REPEATS)
    return statistics.median(found[1:])  # the first compiles kernels


def wait(device: torch.device) -> None:
    """Wait for all work of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def decode(codec: WeightCodec, tensors: Sequence[tuple[Tensor, tuple[int, int], Tensor]]) -> None:
    """Decode codes of a shape into values, for each of `tensors`."""
    for raw, shape, out in tensors:
        codec.decode(raw, shape, out)


def main() -> None:
    """Print the table."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_bytes = 2**30 if device.type == "cuda" else 2**26
    source, target = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    rate = 2 * num_bytes / seconds_of(lambda: target.copy_(source), device)
    weights = sum(map(math.prod, SHAPES))
    rows = [["format", "ms", "weights/s", "bytes of traffic a weight"]]
    for name in ("fp8", "int8", "nf4"):
        codec = CODECS[name]
        raw = [torch.zeros(codec.num_bytes(shape), dtype=torch.uint8, device=device) for shape in SHAPES]
        out = [torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in SHAPES]
        seconds = seconds_of(partial(decode, codec, list(zip(raw, SHAPES, out, strict=True))), device)
        rows.append([name, f"{1e3 * seconds:.3f}", f"{weights / seconds:.3g}", f"{seconds * rate / weights:.2f}"])
    print(f"{device}: {rate / 1e9:,.0f} GB/s of a copy, read and written")
    print(format_columns(rows, num_left=1, indent=""))


if __name__ == "__main__":
    main()
