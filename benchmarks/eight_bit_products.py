"""Times the linears' products of 7B on one GPU, in bf16, fp8 and int8, and the making of a weight's codes.

    python benchmarks/eight_bit_products.py [--tokens 4096 16384] [--tile 128,128,128,8,3]...

Products: TFLOP/s without the making of codes, fp8 with fast sums and with exact ones. A --tile is another tile of int8
products, as in models/triton_products.py. Then GB/s of making codes, and what fp8 sums lose: the root mean square error
in that of the output, for inputs of both signs and of one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor
from torch.nn import functional as F

from mobius.models.quantization import FORMATS, FP8, INT8, QuantizedMatrix

SHAPES = [(4096, 4096), (11008, 4096), (4096, 11008)]
"""Widths out and in of the linears of 7B."""
REPEATS = 15


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--tile", action="append", default=[], help="rows,out,in,warps,stages")
    return parser.parse_args()


def seconds_of(work: Callable[[], object]) -> float:
    """Median seconds on the GPU of `work`, after three rounds that compile and warm up."""
    times = []
    for _ in range(3 + REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # the launches of `work` are enqueued before the first one runs
        start.record()
        work()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in times[3:])) / 1000


def quantized(weight: Tensor, name: str) -> QuantizedMatrix:
    """Memory for the codes of `weight`, not filled."""
    codes = partial(torch.empty, dtype=FORMATS[name].codes, device=weight.device)
    scales = [torch.empty(size, device=weight.device) for size in weight.shape]
    return QuantizedMatrix(codes(weight.shape), scales[0], codes(weight.t().shape), scales[1])


def fp8_product(inputs: Tensor, weight: Tensor, fast: bool) -> Callable[[], Tensor]:
    """Product of both as fp8, to be called, with sums in the tensor cores' own precision (`fast`) or promoted."""
    (rows, row_scales), (codes, scales) = FP8.quantize(inputs), FP8.quantize(weight)
    return lambda: torch._scaled_mm(
        rows, codes.t(), row_scales, scales.t(), out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def int8_product(inputs: Tensor, weight: Tensor, tile: tuple[int, ...] | None) -> Callable[[], Tensor]:
    """Product of both as int8, to be called, by the tile that a run would choose, or by `tile`."""
    from mobius.models import triton_products

    (rows, row_scales), (codes, scales) = INT8.quantize(inputs), INT8.quantize(weight)
    flat = scales.flatten()
    usual = triton_products.TILES

    def multiply() -> Tensor:
        triton_products.TILES = usual if tile is None else dict.fromkeys(range(8, 16), (triton_products.Tile(*tile),))
        try:
            return triton_products.int8_product(rows, row_scales, codes, flat)
        finally:
            triton_products.TILES = usual

    return multiply


def main() -> None:
    """Print the tables."""
    arguments = parse()
    if not torch.cuda.is_available():
        sys.exit(
            "benchmarks/eight_bit_products.py times kernels of a GPU, and torch sees none here: run it where one is"
        )
    has_fp8 = torch.cuda.get_device_capability() >= (8, 9)
    tiles = [tuple(int(number) for number in tile.split(",")) for tile in arguments.tile]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: TFLOP/s")
    names = ["bf16", *(["fp8 fast", "fp8"] if has_fp8 else []), "int8", *arguments.tile]
    print(f"{'out x in, tokens':24}" + "".join(f"{name:>{max(10, len(name) + 2)}}" for name in names))
    for out, width in SHAPES:
        weight = torch.randn(out, width, device="cuda", dtype=torch.bfloat16)
        for tokens in arguments.tokens:
            inputs = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
            works: list[Callable[[], Tensor]] = [partial(F.linear, inputs, weight)]
            works += [fp8_product(inputs, weight, fast) for fast in (True, False) if has_fp8]
            works += [int8_product(inputs, weight, tile) for tile in (None, *tiles)]
            rates = [2e-12 * tokens * out * width / seconds_of(work) for work in works]
            numbers = (f"{rate:{max(10, len(name) + 2)}.0f}" for name, rate in zip(names, rates, strict=True))
            print(f"{f'{out} x {width}, {tokens}':24}" + "".join(numbers), flush=True)
    formats = list(FORMATS) if has_fp8 else ["int8"]
    print("codes of a weight: ms, GB/s of reading it twice and writing 2 bytes per parameter")
    for out, width in SHAPES:
        weight = torch.randn(out, width, device="cuda", dtype=torch.bfloat16)
        seconds = {name: seconds_of(partial(quantized(weight, name).fill, weight)) for name in formats}
        each = (f"{name} {1000 * own:.3f} {6e-9 * weight.numel() / own:.0f}" for name, own in seconds.items())
        print(f"{f'{out} x {width}':24}  " + "   ".join(each))
    if has_fp8:
        print("root mean square of what fp8 sums lose, in that of the output (bf16 alone: 0.0017): fast, promoted")
        for signs in ("both signs", "one sign"):
            inputs, weight = (torch.randn(1024, 11008, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            if signs == "one sign":
                inputs, weight = inputs.abs(), weight.abs()
            (rows, row_scales), (codes, scales) = FP8.quantize(inputs), FP8.quantize(weight)
            exact = (rows.double() * row_scales) @ (codes.double() * scales).t()
            off = [(fp8_product(inputs, weight, fast)() - exact).square().mean().sqrt() for fast in (True, False)]
            print(f"{signs:24}  " + "   ".join(f"{float(each / exact.square().mean().sqrt()):.5f}" for each in off))


if __name__ == "__main__":
    main()
