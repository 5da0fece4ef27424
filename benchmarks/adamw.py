"""Times the CPU AdamW of a streamed bf16 stage, in one run: torch's fused update with its casts, and the C kernel.

Torch's is timed twice: in three passes over a whole fp32 master, and as it stands in for the kernel, on a split one.
The kernel is timed with each format of optimizer states, and compared with the former, and with itself in fp32.

python benchmarks/adamw.py [--parameters 1e8] [--threads 16] [--gradients fp32]
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from mobius.engine.adamw import AdamWSettings, FlatAdamW
from mobius.engine.adamw_cpu import CPUAdamW, load_adamw_cpu
from mobius.engine.host_arena import HostArena
from mobius.engine.reduced_states import REDUCED
from mobius.engine.stage_state import StageState
from mobius.engine.state_codec import SeparateMaster
from mobius.models.layout import StageLayout
from mobius.ranks import cache_folder

GRADIENTS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def make_state(count: int, gradient_dtype: torch.dtype, states: str = "") -> StageState:
    """A streamed bf16 stage of one matrix with `count` random parameters."""
    layouts = {0: StageLayout.of({"weight": (count, 1)}, reduced={"weight"} if states else (), reduced_format=states)}
    arena = HostArena(layouts, dtype=torch.bfloat16, register=False, gradient_dtype=gradient_dtype)
    state = arena.states[0]
    state.write_master(slice(None), torch.randn(state.layout.num_elements))
    state.gradients.normal_()
    return state


def with_whole_master(state: StageState) -> StageState:
    """A copy of the stage with an fp32 master of its own."""
    layouts = {0: state.layout}
    master = HostArena(layouts, dtype=torch.float32, register=False).states[0].weights
    parts = {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq, "master": master.copy_(state.read_master())}
    return replace(state, blocks=(replace(state.blocks[0], parts=parts, codec=SeparateMaster()),))


def bytes_of(state: StageState) -> tuple[float, float]:
    """Bytes per parameter in memory, and moved by one pass: everything read, and all but the gradient written."""
    held = sum(tensor.nbytes for tensor in state.tensors)
    return held / state.layout.num_trained, (2 * held - state.gradients.nbytes) / state.layout.num_trained


def rate_of(state: StageState, kernel: CPUAdamW | None, *, repeats: int) -> float:
    """Parameters per second: the median of `repeats` updates after two unmeasured ones."""
    adamw = FlatAdamW(AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01), kernel)
    seconds = []
    for step in range(1, repeats + 3):
        start = time.perf_counter()
        adamw.update(state, step=step, learning_rate=1e-5, gradient_factor=0.5)
        seconds.append(time.perf_counter() - start)
    return state.layout.num_elements / statistics.median(seconds[2:])


def main() -> None:
    """Print the rate of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gradients", choices=sorted(GRADIENTS), default="bf16", help="as they come from the GPU")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kernel = load_adamw_cpu(cache_folder(), num_threads=arguments.threads)
    if kernel is None:
        raise SystemExit("the kernel cannot be built here: is there a C compiler (`cc`)?")
    count, gradients, repeats = int(arguments.parameters), GRADIENTS[arguments.gradients], arguments.repeats
    state = make_state(count, gradients)
    torch_rate = rate_of(with_whole_master(state), None, repeats=repeats)
    stand_in_rate = rate_of(state, None, repeats=repeats)
    print(f"{arguments.threads} threads, {arguments.gradients} gradients")
    print(f"torch, whole master     {torch_rate / 1e9:6.3f} Gparam/s")
    print(f"torch, split master     {stand_in_rate / 1e9:6.3f} Gparam/s")
    rates = {}
    for name in ("fp32", *REDUCED):
        state = make_state(count, gradients, name) if name in REDUCED else state
        rates[name] = rate_of(state, kernel, repeats=repeats)
        held, moved = bytes_of(state)
        print(
            f"kernel, {name:7} states  {rates[name] / 1e9:6.3f} Gparam/s, {rates[name] * moved / 1e9:5.1f} GB/s; "
            f"{rates[name] / torch_rate:.2f} times torch, {rates['fp32'] / rates[name]:.2f} times fp32's seconds; "
            f"{held:.4g} bytes a parameter in memory, {moved:.4g} moved"
        )


if __name__ == "__main__":
    main()
