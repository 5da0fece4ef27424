"""Times this tree beside another one of the project, in turns: whether a change made steps slower or larger.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py ../before 7b --gpus 4 --seconds 500 -- --host_memory_limit 400

Each setting runs in both trees before the next one begins, and all of them again in the other order until the time is
up; each tree keeps its processes. The table has the medians of the runs, each the median of its steps but the first two
and the last, and whether runs that came to the same plan had the same losses, to the bit. SETTING... takes only those
whose name contains one of the words. What stands behind ` -- ` goes to every run.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from benchmark import gpu_names
from launch import end_runs_when_terminated, split_words
from make_model import SIZES, write_config
from rows import markdown_table
from service import WORKER, Service

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_OPTIONS = ["--batch_size", "64", "--seq_length", "512", "--num_stages", "32", "--num_chunks", "4"]
SETTINGS = {
    "streamed": ["--resident_stages", "0", "--max_grad_norm", "0"],
    "24 GiB": ["--gpu_memory_limit", "24", "--max_grad_norm", "0"],
    "no limit": ["--max_grad_norm", "0"],
    "clipping": ["--gpu_memory_limit", "24", "--max_grad_norm", "1"],
    "12 GiB": ["--gpu_memory_limit", "12", "--max_grad_norm", "1"],
    "LoRA": ["--gpu_memory_limit", "12", "--finetuning_type", "lora"],
    **{
        f"auto {rows} x {length}, {limit or 'no'} GiB": [
            *("--num_stages", "auto", "--num_chunks", "auto", "--max_grad_norm", "1", "--batch_size", rows),
            *("--seq_length", length, *(["--gpu_memory_limit", limit] if limit else [])),
        ]
        for rows, length, limits in (
            ("256", "1024", ("24", "16", "")),
            ("128", "1024", ("24",)),
            ("64", "512", ("24", "16", "12")),
        )
        for limit in limits
    },
    "auto LoRA 16 x 2048, 12 GiB": [
        *("--num_stages", "auto", "--num_chunks", "auto", "--max_grad_norm", "1", "--batch_size", "16"),
        *("--seq_length", "2048", "--gpu_memory_limit", "12", "--finetuning_type", "lora"),
    ],
    "131072 tokens": ["--gpu_memory_limit", "24", "--seq_length", "131072", "--batch_size", "1", "--num_chunks", "1"],
}
TITLES = [
    "setting",
    "before, s",
    "after, s",
    "ratio",
    "GPU GiB: before / after",
    "host GiB",
    "runs",
    "losses of equal plans",
]


@dataclass(frozen=True)
class Run:
    """Numbers of one run."""

    step_seconds: float
    gpu_gib: float
    host_gib: float
    losses: tuple[float, ...]
    start_seconds: float
    """From the request to the end of the first step."""
    plan: str
    """Residency, kept activations and slots: runs with another plan add up in another order."""


def runs_in_turn(
    services: Sequence[Service], arguments: argparse.Namespace, model: Path
) -> Iterator[tuple[str, int, Run]]:
    """Setting, number of the tree and numbers of each run that ended well, until the time is up."""
    end = time.monotonic() + arguments.seconds
    names = [name for name in SETTINGS if not arguments.setting or any(word in name for word in arguments.setting)]
    for turn in range(arguments.turns):
        for name in names:
            for tree in (0, 1) if turn % 2 == 0 else (1, 0):
                begun = time.monotonic()
                if time.monotonic() > end:
                    return
                words = [
                    "--model_path",
                    str(model),
                    "--num_iterations",
                    str(arguments.steps),
                    *DEFAULT_OPTIONS,
                    *SETTINGS[name],
                ]
                told = services[tree].run([*words, *arguments.mobius_options], timeout_seconds=arguments.run_seconds)
                if told.problem is not None:
                    sys.exit(f"{name}, {('before', 'after')[tree]}: {told.problem}\n{told.log_end}")
                steps, plan = told.output["steps"], told.output["plan"]
                run = Run(
                    statistics.median(step["step_seconds"] for step in steps[2:-1]),
                    max(step["reserved_gpu_memory_gib"] or 0.0 for step in steps),
                    max(step["peak_host_memory_gib"] for step in steps),
                    tuple(step["loss"] for step in steps),
                    time.monotonic() - begun - sum(step["step_seconds"] for step in steps[1:]),
                    f"{plan['num_stages']} stages, {plan['num_chunks']} chunks, resident {plan['resident']}, "
                    f"kept {plan['kept']}, slots {plan['slots']}{', ' + plan['order'] if 'order' in plan else ''}",
                )
                planned = plan["step_seconds"] or 0.0
                waits = ", ".join(f"{cause} {value:.3f}" for cause, value in steps[-2]["wait_seconds"].items())
                took = f"{run.step_seconds:.4f} s (planned {planned:.4f}), start {run.start_seconds:.1f} s, "
                took += f"GPU {run.gpu_gib:.2f} (planned {plan['gpu_gib']:.2f}), host {run.host_gib:.1f} GiB; {waits}"
                print(f"{name:9} {('before', 'after')[tree]:6} {took}, {run.plan}", flush=True)
                yield name, tree, run


def row_of(name: str, before: Sequence[Run], after: Sequence[Run]) -> list[str]:
    """The row of one setting."""
    seconds = [statistics.median(run.step_seconds for run in runs) for runs in (before, after)]
    ranges = [
        f"{min(r.step_seconds for r in runs):.3f}-{max(r.step_seconds for r in runs):.3f}" for runs in (before, after)
    ]
    peaks = [statistics.median(run.gpu_gib for run in runs) for runs in (before, after)]
    hosts = [statistics.median(run.host_gib for run in runs) for runs in (before, after)]
    across = [(one, other) for one in before for other in after]
    within = [pair for runs in (before, after) for pair in combinations(runs, 2)]
    return [
        name,
        *(f"{value:.4f} ({spread})" for value, spread in zip(seconds, ranges, strict=True)),
        f"{seconds[1] / seconds[0]:.3f}",
        f"{peaks[0]:.2f} / {peaks[1]:.2f}",
        f"{hosts[0]:.1f} / {hosts[1]:.1f}",
        f"{len(before)}, {len(after)}",
        f"{loss_differences(across)}; within a tree {loss_differences(within)}",
    ]


def loss_differences(pairs: Sequence[tuple[Run, Run]]) -> str:
    """How many pairs of runs that came to the same plan had the same losses, and the largest relative difference.

    GPUs add up the gradients of attention in an order of their own, so runs of one tree differ, too, from the second
    step on: what a change does shows against that.
    """
    same_plan = [(one.losses, other.losses) for one, other in pairs if one.plan == other.plan]
    if not same_plan:
        return "no equal plans"
    largest = max(abs(a - b) / abs(a) for one, other in same_plan for a, b in zip(one, other, strict=True))
    return f"{sum(one == other for one, other in same_plan)} of {len(same_plan)} equal, within {largest:.1e}"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; what stands behind ` -- ` is `mobius_options`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="folder of the other tree")
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("setting", nargs="*", help=f"words of {', '.join(SETTINGS)} (default: all)")
    parser.add_argument("--gpus", type=int, help="processes, one per GPU (default: all GPUs)")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--turns", type=int, default=9, help="runs of each tree and setting (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=500, help="no run begins behind them (default: %(default)s)")
    parser.add_argument("--run_seconds", type=float, default=180, help="after which a run is ended")
    own, options = split_words(argv)
    arguments = parser.parse_args(own)
    arguments.worker = arguments.before.resolve() / WORKER.relative_to(ROOT)
    if not arguments.worker.is_file():
        parser.error(f"{arguments.before} is no tree of this project: it has no {WORKER.relative_to(ROOT)}")
    if arguments.steps < 4:
        parser.error(f"--steps {arguments.steps}: the first two and the last do not count; use 4 or more")
    arguments.mobius_options = options
    arguments.gpus = arguments.gpus or max(1, len(gpu_names()))
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Run both trees in turns, and print the table at the end."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    end_runs_when_terminated()
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // arguments.gpus))}
    got: dict[tuple[str, int], list[Run]] = {}
    with ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory()), arguments.size)
        write_config(model, arguments.size)
        services = [
            stack.enter_context(
                Service(num_ranks=arguments.gpus, environment=threads | {"PYTHONPATH": str(root)}, worker=worker)
            )
            for root, worker in ((arguments.before.resolve(), arguments.worker), (ROOT, WORKER))
        ]
        for name, tree, run in runs_in_turn(services, arguments, model):
            got.setdefault((name, tree), []).append(run)
    both = [name for name in SETTINGS if (name, 0) in got and (name, 1) in got]
    print(markdown_table(TITLES, [row_of(name, got[name, 0], got[name, 1]) for name in both]))


if __name__ == "__main__":
    main()
