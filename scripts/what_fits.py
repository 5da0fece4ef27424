"""Makes the table of docs/user/what_fits.md again: predicted tokens per second by model, options and host memory.

    python scripts/what_fits.py [--model_path 7b 14b] [--gigabytes 64 128]

Each number is a dry run of four RTX 4090 and four drives that read 7 and write 2 GB/s, as

    python main.py --dry_run OPTIONS --host_memory_limit GIB --model_path MODEL

prints it for the options below. A box of 64 GB has 59 GiB; a plan that takes no more than a smaller box has is not made
again for that one. The whole table takes half an hour on a core.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

if importlib.util.find_spec("mobius") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from mobius.config.cli import parse_args
from mobius.errors import MobiusError
from mobius.models.blocks import ModelParts
from mobius.models.families import load_planned_config
from mobius.planner.forecast import machine_to_plan_for, planned_ranks
from mobius.planner.memory_estimates import estimated_layer
from mobius.planner.request import PlanRequest
from mobius.planner.solver import PlanResult, solve
from mobius.ranks import Ranks
from mobius.units import GIB

BOX = "--card RTX4090 --num_ranks 4 --num_stages auto --num_chunks auto --batch_size 32 --seq_length 2048"
DISKS = "--offload_states_to /a,/b,/c,/d --disk_rate 7,2 --durable_steps off"
WAYS = {
    "fp32": "",
    "bf16": "--optimizer_states bf16",
    "compact": "--optimizer_states compact",
    "fp32 on disks": DISKS,
    "compact on disks": f"{DISKS} --optimizer_states compact",
    "compact on disks, unclipped": f"{DISKS} --optimizer_states compact --max_grad_norm 0",
    "compact, weights, too": f"{DISKS} --optimizer_states compact --gradients_on_disks --weights_on_disks",
    "compact, weights, too, unclipped": f"{DISKS} --optimizer_states compact --max_grad_norm 0 --weights_on_disks",
    "LoRA": "--use_lora",
}
"""Rows of a model, and their options."""


def plan(words: Sequence[str]) -> PlanResult | None:
    """What a dry run of these options plans; None if it does not fit."""
    config = parse_args(["--dry_run", *words])
    machine = machine_to_plan_for(config, planned_ranks(config, Ranks(0, 1, 0)))
    shape = ModelParts.of(config, load_planned_config(config.model).config).shape()
    try:
        found = solve(PlanRequest.of(config, shape, machine), layer=estimated_layer)
    except MobiusError:
        return None
    return found if found.host_estimate.total <= (found.request.host_bytes or 0) else None


def cells(words: Sequence[str], gigabytes: Sequence[int]) -> list[str]:
    """Predicted tokens per second for each size of memory; a dash where the run does not fit."""
    found: dict[int, PlanResult | None] = {}
    for size in sorted(gigabytes, reverse=True):
        gib = size * 10**9 // GIB
        larger = next(reversed(found.values()), None)
        if found and larger is None:
            found[size] = None  # a larger box has no room either
        elif larger is not None and larger.host_estimate.total <= gib * GIB:
            found[size] = larger
        else:
            found[size] = plan([*words, "--host_memory_limit", str(gib)])
    return ["-" if (own := found[size]) is None else f"{own.tokens_per_second:,.0f}" for size in gigabytes]


def main() -> None:
    """Print the rows, each as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", nargs="+", default=["7b", "14b", "32b", "70b"])
    parser.add_argument("--gigabytes", nargs="+", type=int, default=[64, 128, 256, 512])
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=[*WAYS], help="rows (default: all)")
    arguments = parser.parse_args()
    print(f"| model | states | {' | '.join(f'{size} GB' for size in arguments.gigabytes)} |")
    print(f"|---|---|{'---:|' * len(arguments.gigabytes)}")
    for model in arguments.model_path:
        for way in arguments.ways:
            words = [*BOX.split(), "--model_path", model, *WAYS[way].split()]
            print(f"| {model} | {way} | {' | '.join(cells(words, arguments.gigabytes))} |", flush=True)


if __name__ == "__main__":
    main()
