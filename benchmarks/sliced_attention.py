"""Times causal attention of one long sequence in slices beside the same in one piece, by each kernel.

    python benchmarks/sliced_attention.py                      # heads of an 8B model, 131,072 tokens
    python benchmarks/sliced_attention.py --length 512 --slices 128 256 --heads 4 --key_heads 2 --head_size 16

Forward runs through all slices, backward through all in reverse, gradients of keys and values taken after each. A
row's TFLOP/s count 4 x heads x head size x pairs of a query and a key that it sees for forward, 2.5 times that for
backward. The ratio is the time in one piece by the same kernel, divided by the slices' time; the last column is the
most memory of a pass beside the sequence itself, on GPUs.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "scripts"))

from mobius.ranks import prepare_environment

prepare_environment()  # before torch is imported

import torch  # noqa: E402
from sweep_results import print_table  # noqa: E402
from torch import Tensor  # noqa: E402

from mobius.limits import KEYS_PER_CALL  # noqa: E402
from mobius.models.slice_attention import (  # noqa: E402
    SequenceKVCache,
    attend_slice,
    attend_slice_backward,
)
from mobius.models.slice_pieces import (  # noqa: E402
    AttentionKernel,
    SlicedAttentionSettings,
    is_kernel_available,
    takes_settings,
)

TITLES = ["kernel", "slice", "forward, s", "TFLOP/s", "backward, s", "TFLOP/s", "ratio", "GPU GiB"]
SLOW_BACKWARD = 2.5
"""Five products of matrices instead of two."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=131072, help="tokens of the sequence")
    parser.add_argument("--slices", type=int, nargs="+", default=[8192, 16384, 32768], help="tokens of a slice")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key_heads", type=int, default=8)
    parser.add_argument("--head_size", type=int, default=128)
    parser.add_argument("--window", type=int, help="tokens that a query sees (default: all before it)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--kernels", type=AttentionKernel, nargs="+", help="default: all that can, but tiles on a GPU")
    parser.add_argument("--keys_per_call", type=int, default=KEYS_PER_CALL, help="most keys of a rectangle")
    parser.add_argument("--repeats", type=int, default=3, help="of which the median is told")
    arguments = parser.parse_args(argv)
    if wrong := [each for each in arguments.slices if not 0 < each <= arguments.length]:
        parser.error(f"slices of {wrong} tokens in a sequence of {arguments.length}")
    if arguments.heads % arguments.key_heads:
        parser.error(f"{arguments.key_heads} key heads do not divide {arguments.heads} heads")
    return arguments


def num_pairs(length: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees."""
    seen = min(window or length, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


class Work:
    """One sequence on a device, and what its passes need; outputs are kept from forward to backward."""

    def __init__(self, arguments: argparse.Namespace, kernel: AttentionKernel, device: torch.device, size: int) -> None:
        dtype, length = getattr(torch, arguments.dtype), arguments.length
        shape = 1, arguments.key_heads, length, arguments.head_size
        self.cache = SequenceKVCache(shape, dtype=dtype, device=device)
        self.settings = SlicedAttentionSettings(
            kernel, arguments.head_size**-0.5, window=arguments.window, keys_per_call=arguments.keys_per_call
        )
        self.starts = range(0, length, size)
        ends = [min(start + size, length) for start in self.starts]
        tokens = [end - start for start, end in zip(self.starts, ends, strict=True)]

        def normal(heads: int) -> list[Tensor]:
            # As a projection leaves them: [1, T, heads, D] in memory.
            return [torch.randn(1, own, heads, arguments.head_size, device=device, dtype=dtype) for own in tokens]

        self.queries = [each.transpose(1, 2) for each in normal(arguments.heads)]
        self.keys, self.values = ([each.transpose(1, 2) for each in normal(arguments.key_heads)] for _ in range(2))
        self.d_outputs = normal(arguments.heads)
        self.outputs: list[tuple[Tensor, Tensor]] = []

    def forward(self) -> None:
        """All slices in order."""
        self.outputs = []
        for start, query, key, value in zip(self.starts, self.queries, self.keys, self.values, strict=True):
            self.cache.put(start, key, value)
            self.outputs.append(attend_slice(query, self.cache, start, self.settings))

    def backward(self) -> None:
        """All slices in reverse."""
        given = list(zip(self.starts, self.queries, self.d_outputs, self.outputs, strict=True))
        for start, query, d_output, (output, lse) in reversed(given):
            attend_slice_backward(d_output, query, output, lse, self.cache, start, self.settings)
            self.cache.take_gradients(start, start + query.shape[2])


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of `work`, the device idle before and after it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure(
    arguments: argparse.Namespace, kernel: AttentionKernel, device: torch.device, size: int
) -> tuple[float, float, int]:
    """Median seconds of forward and of backward, and the most bytes beside the sequence (0 on a CPU)."""
    work = Work(arguments, kernel, device, size)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    work.forward()  # plans and workspaces are made
    work.backward()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = [(seconds_of(work.forward, device), seconds_of(work.backward, device)) for _ in range(arguments.repeats)]
    peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    forward, backward = (statistics.median(own) for own in zip(*times, strict=True))
    return forward, backward, peak


def rows_of(arguments: argparse.Namespace, kernel: AttentionKernel, device: torch.device) -> list[list[str]]:
    """A row for the sequence in one piece, and one for each size of slices."""
    operations = 4 * arguments.heads * arguments.head_size * num_pairs(arguments.length, arguments.window)
    rows, whole = [], 0.0
    for size in (arguments.length, *arguments.slices):
        forward, backward, peak = measure(arguments, kernel, device, size)
        whole = whole or forward + backward
        rates = [operations / forward / 1e12, SLOW_BACKWARD * operations / backward / 1e12]
        memory = f"{peak / 2**30:.2f}" if peak else "-"
        cells = [f"{forward:.4f}", f"{rates[0]:.3g}", f"{backward:.4f}", f"{rates[1]:.3g}"]
        rows.append([kernel.value, f"{size:,}", *cells, f"{whole / (forward + backward):.3f}", memory])
    return rows


def kernels_of(arguments: argparse.Namespace, device: torch.device) -> list[AttentionKernel]:
    """The kernels that are asked for, or all that can."""
    dtype = getattr(torch, arguments.dtype)
    able = [
        kernel
        for kernel in AttentionKernel
        if takes_settings(kernel, window=arguments.window, softcap=None)
        and is_kernel_available(kernel, device, dtype, arguments.head_size)
    ]
    if arguments.kernels is None:
        return [kernel for kernel in able if kernel is not AttentionKernel.TILES or device.type == "cpu"] or able
    if missing := [kernel.value for kernel in arguments.kernels if kernel not in able]:
        sys.exit(f"{', '.join(missing)} cannot do this here; {', '.join(able)} can")
    return list(arguments.kernels)


def main(argv: Sequence[str]) -> None:
    """Print a table."""
    arguments = parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {arguments.dtype}")
    print(f"{arguments.length:,} tokens, {arguments.heads} heads on {arguments.key_heads} of {arguments.head_size}")
    rows = [row for kernel in kernels_of(arguments, device) for row in rows_of(arguments, kernel, device)]
    print_table([TITLES, *rows])


if __name__ == "__main__":
    main(sys.argv[1:])
