"""Shows how this machine's GPUs are attached, and which rank would get which of them. Does not train.

python scripts/show_topology.py
"""

import argparse
import importlib.util
import logging
import sys
from pathlib import Path

if importlib.util.find_spec("mobius") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mobius.log import printable
from mobius.ranks import visible_devices


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Show the GPUs, what they share, and the order they would get.")
    parser.add_argument("--num_ranks", type=int, help="GPUs to look at (default: all visible ones)")
    parser.add_argument("--num_chunks", type=int, default=4, help="microbatches per step (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("mobius").setLevel(logging.DEBUG)
    import torch

    from mobius.hardware.topology import choose_order, describe_topology, read_topology

    found = torch.cuda.device_count()
    num_gpus = found if arguments.num_ranks is None else arguments.num_ranks
    if not 1 <= num_gpus <= found:
        print(f"error: torch sees {found} GPUs; {num_gpus} cannot be shown", file=sys.stderr)
        return 2
    gpus = read_topology(num_gpus)
    print(printable(describe_topology(gpus), sys.stdout))
    names = [str(gpu.index) for gpu in gpus]
    if visible_devices():
        print(f"GPU numbers are places in CUDA_VISIBLE_DEVICES={visible_devices()}")
    _, line = choose_order(gpus, num_microbatches=arguments.num_chunks, names=names, is_given=False)
    print(line or f"devices in their own order {','.join(names)}: none is better")
    return 0


if __name__ == "__main__":
    sys.exit(main())
