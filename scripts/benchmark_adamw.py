"""Times the CPU AdamW of a streamed bf16 stage: torch's fused update with its casts, against the C kernel, in one run.

python scripts/benchmark_adamw.py [--parameters 1e8] [--threads 16]
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from mobius.memory.host_arena import HostArena
from mobius.memory.layout import StageLayout
from mobius.optim.adamw import AdamWSettings, FlatAdamW
from mobius.optim.kernel import load_kernel
from mobius.ranks import cache_folder

BYTES_PER_PARAMETER = 28
"""What one pass must read and write: gradient 2, master and moments 12 twice, working copy 2."""


def main() -> None:
    """Print the rate of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    count = int(arguments.parameters)
    state = HostArena({0: StageLayout.of({"weight": (count, 1)})}, dtype=torch.bfloat16, register=False).states[0]
    state.master.normal_()
    state.gradients.normal_()
    settings = AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01)
    rates = {}
    for name, kernel in (("torch", None), ("kernel", load_kernel(cache_folder(), num_threads=arguments.threads))):
        adamw = FlatAdamW(settings, kernel)
        seconds = []
        for step in range(1, arguments.repeats + 3):
            start = time.perf_counter()
            adamw.update(state, step=step, learning_rate=1e-5, gradient_factor=0.5)
            seconds.append(time.perf_counter() - start)
        rates[name] = count / statistics.median(seconds[2:])
        bandwidth = rates[name] * BYTES_PER_PARAMETER / 1e9
        print(f"{name:7} {rates[name] / 1e9:6.3f} Gparam/s ({bandwidth:5.1f} GB/s of {BYTES_PER_PARAMETER} bytes each)")
    print(f"kernel / torch = {rates['kernel'] / rates['torch']:.2f} with {arguments.threads} threads")


if __name__ == "__main__":
    main()
