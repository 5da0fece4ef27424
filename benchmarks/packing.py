"""Times packed rows beside one sample in a row and beside full rows, in turns: real tokens per second.

    python benchmarks/make_dataset.py long.jsonl --samples 6000 --lengths long.json
    python benchmarks/packing.py 8b long.json --batch_size 16 --seq_length 4096 -- --num_stages 32 --num_chunks 4

LENGTHS is a JSON list of samples' token counts; tokens are random. Padding to the longest sample of each microbatch is
told by arithmetic, for samples in random order. `--peer OPTIONS` adds FSDP2 with packing like TRL's (peers/packed.py);
OPTIONS may be "". What stands behind ` -- ` goes to every run of Mobius.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "scripts"))

from benchmark import gpu_names
from launch import end_runs_when_terminated, run_ranks, split_words
from make_model import SIZES, write_config
from service import Service
from sweep_results import print_table

FOLDER = Path(__file__).parent
WARMUP = 2
TITLES = [
    "rows",
    "s/step",
    "positions/s",
    "tokens/s",
    "padding",
    "samples",
    "packed is faster by",
    "GPU GiB",
    "predicted, s",
]
FULL, SINGLE, PACKED = "full, one sequence each", "one sample each", "packed"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; what stands behind ` -- ` is `mobius_options`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("lengths", type=Path)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--seq_length", type=int, default=512)
    parser.add_argument("--gpus", type=int, help="processes, one per GPU (default: all GPUs)")
    parser.add_argument("--steps", type=int, default=7, help=f"of which the first {WARMUP} and the last are not timed")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--run_seconds", type=float, default=180, help="after which a run is ended")
    parser.add_argument("--peer", action="append", default=[], help="options of peers/fsdp2.py, such as --compile")
    own, options = split_words(argv)
    arguments = parser.parse_args(own)
    if arguments.steps < WARMUP + 2:
        parser.error(f"--steps {arguments.steps}: at least {WARMUP + 2} are needed for one that is timed")
    arguments.gpus = arguments.gpus or max(1, len(gpu_names()))
    arguments.mobius_options = options
    return arguments


def padding_to_longest(lengths: Sequence[int], rows: int, seq_length: int) -> float:
    """Share of the positions if each microbatch of `rows` samples is as wide as its longest."""
    drawn = np.random.default_rng(0).permutation(np.minimum(lengths, seq_length))
    batches = drawn[: len(drawn) // rows * rows].reshape(-1, rows)
    return 1 - float(batches.sum() / (batches.max(axis=1) * rows).sum())


def mobius_row(steps: Sequence[Sequence[dict[str, Any]]], plan: dict[str, Any], positions: int) -> dict[str, float]:
    """Numbers of the runs of one kind, by their steps but the first two and the last of each."""
    steady = [step for run in steps for step in run[WARMUP:-1]]
    seconds = statistics.median(step["step_seconds"] for step in steady)
    return {
        "seconds": seconds,
        "positions": positions / seconds,
        "tokens": statistics.mean(step["num_tokens"] for step in steady) / seconds,
        "padding": statistics.mean(step["padding"] for step in steady),
        "samples": statistics.mean(step["num_samples"] for step in steady),
        "gpu": max(step["reserved_gpu_memory_gib"] or 0.0 for run in steps for step in run),
        "predicted": plan["step_seconds"] or 0.0,
    }


def run_peer(arguments: argparse.Namespace, model: Path, options: str, environment: dict[str, str]) -> dict[str, float]:
    """Numbers of FSDP2 on the same lengths."""
    output = model.parent / "peer.json"
    command = [sys.executable, str(FOLDER / "peers" / "fsdp2.py"), str(model), "--output", str(output)]
    command += ["--steps", str(arguments.steps), "--batch_size", str(arguments.batch_size)]
    command += ["--seq_length", str(arguments.seq_length), "--lengths", str(arguments.lengths), *options.split()]
    result = run_ranks(
        command,
        num_ranks=arguments.gpus,
        environment=environment,
        output=output,
        timeout_seconds=arguments.run_seconds,
    )
    if result.problem is not None:
        print(f"fsdp2 {options}: {result.problem}\n{result.log_end}", flush=True)
        return {}
    told = result.output
    seconds = statistics.median(told["step_seconds"][WARMUP:])
    return {
        "seconds": seconds,
        "positions": statistics.mean(told["step_positions"]) / seconds,
        "tokens": told["real_tokens_per_second"],
        "padding": told["padding"],
        "gpu": told["peak_reserved"] / 2**30,
    }


def line(name: str, found: dict[str, float], packed: float) -> list[str]:
    """The row of one kind; `packed` are the real tokens per second of packed rows."""
    looks = {"seconds": ".3f", "positions": ",.0f", "tokens": ",.0f", "padding": ".1%", "samples": ".0f"}
    values = [format(found[key], look) if key in found else "-" for key, look in looks.items()]
    values.append(f"{packed / found['tokens']:.2f}" if found else "-")
    return [name, *values, *(f"{found[key]:.2f}" if key in found else "-" for key in ("gpu", "predicted"))]


def main(argv: Sequence[str] | None = None) -> None:
    """Run all kinds in turns and print the table."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    end_runs_when_terminated()
    environment = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // arguments.gpus))}
    lengths = ["--lengths", str(arguments.lengths.absolute())]
    kinds = {FULL: [], SINGLE: [*lengths, "--packing", "off"], PACKED: lengths}
    steps: dict[str, list[Any]] = {name: [] for name in kinds}
    plans: dict[str, Any] = {}
    positions = arguments.batch_size * arguments.seq_length
    shared = ["--batch_size", str(arguments.batch_size), "--seq_length", str(arguments.seq_length)]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, arguments.size)
        write_config(model, arguments.size)
        with Service(num_ranks=arguments.gpus, environment=environment) as service:
            for name, own in [*kinds.items()] * arguments.turns:
                words = ["--model_path", str(model), "--num_iterations", str(arguments.steps), *shared, *own]
                told = service.run([*words, *arguments.mobius_options], timeout_seconds=arguments.run_seconds)
                if told.problem is not None:
                    sys.exit(f"{name}: {told.problem}\n{told.log_end}")
                steps[name].append(told.output["steps"])
                plans[name] = told.output["plan"]
                print(name, [round(step["step_seconds"], 4) for step in steps[name][-1]], plans[name], flush=True)
        found = {name: mobius_row(steps[name], plans[name], positions) for name in kinds}
        for options in arguments.peer:
            found[f"FSDP2 {options}"] = run_peer(arguments, model, options, environment)
    rows = arguments.batch_size // plans[PACKED]["num_chunks"]
    share = padding_to_longest(json.loads(arguments.lengths.read_text()), rows, arguments.seq_length)
    print_table([TITLES, *(line(name, each, found[PACKED]["tokens"]) for name, each in found.items())])
    print(f"padding to the longest of each microbatch of {rows} samples: {share:.1%}")
    ratio = found[PACKED]["tokens"] / found[SINGLE]["tokens"]
    filled = (1 - found[PACKED]["padding"]) / (1 - found[SINGLE]["padding"])
    cost = found[FULL]["positions"] / found[PACKED]["positions"] - 1
    print(f"packed over one sample each: {ratio:.2f}, {ratio / filled:.3f} of the ratio of filled positions")
    print(f"a position of packed rows takes {cost:+.1%} beside full rows")


if __name__ == "__main__":
    main()
