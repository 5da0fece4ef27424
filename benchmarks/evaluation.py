"""Times evaluation beside training at the same shape, in one run: the ratio of their tokens per second.

    python benchmarks/evaluation.py 7b --batch_size 64 --seq_length 512 -- --num_stages 32 --num_chunks 4

Weights and tokens are random. Evaluations are forward only, over 16 batches each, right behind the last step; the first
one is not timed. What stands behind ` -- ` goes to the run.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "scripts"))

from benchmark import gpu_names
from launch import end_runs_when_terminated, split_words
from make_model import SIZES, write_config
from service import Service
from sweep_results import print_table

WARMUP = 2
WANTED = 2.4
"""Least ratio: a step does three times the products of a forward, four with all layers run again, and an update."""
TITLES = ["what", "s/batch", "tokens/s", "ratio", "GPU GiB"]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; what stands behind ` -- ` is `mobius_options`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--seq_length", type=int, default=512)
    parser.add_argument("--gpus", type=int, help="processes, one per GPU (default: all GPUs)")
    parser.add_argument("--lengths", type=Path, help="JSON list of samples' token counts, which share rows")
    parser.add_argument("--steps", type=int, default=7, help=f"of which the first {WARMUP} and the last are not timed")
    parser.add_argument("--evaluations", type=int, default=4, help="of which the first is not timed")
    parser.add_argument("--run_seconds", type=float, default=300, help="after which the run is ended")
    own, options = split_words(argv)
    arguments = parser.parse_args(own)
    if arguments.steps < WARMUP + 2:
        parser.error(f"--steps {arguments.steps}: at least {WARMUP + 2} are needed for one that is timed")
    if arguments.evaluations < 2:
        parser.error(f"--evaluations {arguments.evaluations}: at least 2 are needed for one that is timed")
    arguments.gpus = arguments.gpus or max(1, len(gpu_names()))
    arguments.mobius_options = options
    return arguments


def rates(told: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Tokens per second, seconds for the tokens of a batch and GPU memory: of training and of evaluation."""
    steps, evaluations = told["steps"][WARMUP:-1], told["evaluations"][1:]
    batch = statistics.mean(step["num_tokens"] for step in steps)
    training = batch / statistics.median(step["step_seconds"] for step in steps)
    evaluation = statistics.median(each["num_tokens"] / each["seconds"] for each in evaluations)
    return (
        {
            "tokens": training,
            "seconds": batch / training,
            "gpu": max(step["peak_gpu_memory_gib"] or 0.0 for step in told["steps"]),
        },
        {
            "tokens": evaluation,
            "seconds": batch / evaluation,
            "gpu": max(each["gpu_gib"] or 0.0 for each in told["evaluations"]),
        },
    )


def line(name: str, found: Mapping[str, float], training: float) -> list[str]:
    """The row of one kind; `training` are the tokens per second of training."""
    ratio = found["tokens"] / training
    return [name, f"{found['seconds']:.3f}", f"{found['tokens']:,.0f}", f"{ratio:.2f}", f"{found['gpu']:.2f}"]


def verdict(ratio: float) -> str:
    """A sentence on the ratio."""
    return f"evaluation is {ratio:.2f} times as fast, {'at least' if ratio >= WANTED else 'less than'} {WANTED}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run, and print the table."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    end_runs_when_terminated()
    environment = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // arguments.gpus))}
    words = ["--num_iterations", str(arguments.steps), "--evaluations", str(arguments.evaluations)]
    words += ["--batch_size", str(arguments.batch_size), "--seq_length", str(arguments.seq_length)]
    words += ["--lengths", str(arguments.lengths.absolute())] if arguments.lengths else []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, arguments.size)
        write_config(model, arguments.size)
        with Service(num_ranks=arguments.gpus, environment=environment) as service:
            words += ["--model_path", str(model), *arguments.mobius_options]
            told = service.run(words, timeout_seconds=arguments.run_seconds)
    if told.problem is not None:
        sys.exit(f"{told.problem}\n{told.log_end}")
    training, evaluation = rates(told.output)
    print(told.output["plan"])
    names = {"training": training, "evaluation": evaluation}
    print_table([TITLES, *(line(name, found, training["tokens"]) for name, found in names.items())])
    print(verdict(evaluation["tokens"] / training["tokens"]))


if __name__ == "__main__":
    main()
