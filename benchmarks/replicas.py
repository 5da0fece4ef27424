"""Times replicas of a pipeline beside one pipeline on the same GPUs, over their links and over sockets.

    python benchmarks/replicas.py 7b --batch_size 64 --seq_length 512 [--ranks 2] [-- the options of main.py]
    python benchmarks/replicas.py 7b --share_gpus --ranks 2 ...

All GPUs as one pipeline, then as two replicas of half as many ranks: with sums in fp32 and in bf16, over the links that
the GPUs have, and over sockets (NCCL_P2P_DISABLE, NCCL_SHM_DISABLE, NCCL_NET) as a stand-in for a network, over which
messages within a pipeline of several ranks then go, too. Each of the links is measured alone, too (replica_link.py).
All rows train the same batches; a pipeline's microbatches are equally large. One table last:

predicted   the plan's seconds per step
weights, optim, neighb    waits in seconds per step, by cause, of the worst rank; for reductions neighbours wait
host        GiB of a replica's processes, the sum of their largest resident sets
planned     GiB that the plan says of them
most        2 + 12/R bytes per parameter and 2.5 GiB per process
sums, weights   GB/s that each GPU sends and receives when nothing else runs

With --share_gpus one GPU is enough: each replica takes itself for a node of its own, on the same GPUs, and speaks to
the other over sockets; the one pipeline has as many ranks as a replica. Where that are more than GPUs, all ranks are on
the first (shared_gpu.py). Where NVIDIA's multi-process service runs and CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is 50, each
process has half of a GPU's processors, whoever else computes. With --socket_rate no TCP connection is faster, so that
sockets have a rate of their own, as a network has, and not what the processors have left (paced_sockets.py).
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "scripts"))

from benchmark import gpu_names
from launch import end_runs_when_terminated, run_ranks, split_words
from make_model import SIZES, num_parameters, write_config
from rows import Measurement, Workload, markdown_table, mobius_measurement

from mobius.units import GIB

FOLDER = Path(__file__).parent
NUM_REPLICAS = 2
PROCESS_GIB = 2.5
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"}
ON_FIRST_GPU = {"NCCL_NET": "Socket"}
"""Messages within a pipeline are copied in that GPU's memory then, as over the links of a node."""
TITLES = (
    *("run", "s/step", "predicted", "tokens/s", "weights", "optim", "neighb", "GPU GiB", "host", "planned", "most"),
    *("sums GB/s", "weights GB/s", "loss"),
)


@dataclass(frozen=True)
class Case:
    """A row: how many pipelines, and by what way replicas speak."""

    name: str
    num_replicas: int = NUM_REPLICAS
    dtype: str = "float32"
    """Format in which sums travel."""
    is_socket: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its processes."""
        return SOCKETS if self.is_socket else {}


CASES = (
    Case("one pipeline", num_replicas=1),
    Case("replicas"),
    Case("replicas, bf16 sums", dtype="bfloat16"),
    Case("replicas over sockets", is_socket=True),
    Case("the same, bf16 sums", dtype="bfloat16", is_socket=True),
)


@dataclass(frozen=True)
class Result:
    """Numbers of a row."""

    measurement: Measurement
    planned_gib: float
    """Host memory of a replica's processes."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; what stands behind ` -- ` is `mobius_options`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--layers", type=int, help="another number of layers than the size's own")
    parser.add_argument("--ranks", type=int, help="processes, one per GPU (default: all GPUs)")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--seq_length", type=int, default=512)
    parser.add_argument("--num_chunks", type=int, default=8, help="microbatches of all pipelines together")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2, help="steps at the start that the medians leave out")
    parser.add_argument("--elements", type=int, default=2**28, help="of the sums by which a link is measured")
    parser.add_argument("--case", type=int, action="append", choices=range(len(CASES)), help="only these rows, from 0")
    parser.add_argument("--share_gpus", action="store_true", help="replicas as nodes that have the same GPUs")
    parser.add_argument("--socket_rate", type=float, help="GB/s that each TCP connection sends at most")
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which a run is ended")
    own, options = split_words(argv)
    arguments = parser.parse_args(own)
    arguments.ranks = arguments.ranks or len(gpu_names())
    if arguments.ranks < NUM_REPLICAS or arguments.ranks % NUM_REPLICAS:
        parser.error(f"--ranks {arguments.ranks}: must be a multiple of {NUM_REPLICAS}, the replicas")
    cases = [CASES[number] for number in arguments.case or range(len(CASES))]
    shareable = [case for case in cases if case.is_socket or case.num_replicas == 1]
    arguments.cases = shareable if arguments.share_gpus else cases
    if not arguments.cases:
        parser.error(f"--case {arguments.case}: goes over links, which --share_gpus does not have")
    if arguments.num_chunks % NUM_REPLICAS:
        parser.error(f"--num_chunks {arguments.num_chunks}: must be a multiple of {NUM_REPLICAS}, the replicas")
    if arguments.steps <= arguments.warmup:
        parser.error(f"--steps {arguments.steps}: must be more than the {arguments.warmup} steps of --warmup")
    arguments.mobius_options = options
    is_crowded = arguments.share_gpus and 0 < len(gpu_names()) < arguments.ranks // NUM_REPLICAS
    arguments.on_first_gpu = ["--share_gpu"] if is_crowded else []
    arguments.own_options = [*arguments.on_first_gpu]
    if arguments.socket_rate is not None:
        arguments.own_options += ["--socket_rate", str(arguments.socket_rate)]
    return arguments


def options_of(case: Case, arguments: argparse.Namespace) -> list[str]:
    """Options of a row's run, but for the model; later ones count."""
    num_pipeline_ranks = num_ranks(case.num_replicas, arguments) // case.num_replicas
    words = ["--batch_size", str(arguments.batch_size), "--seq_length", str(arguments.seq_length)]
    words += ["--num_iterations", str(arguments.steps), "--num_chunks", str(arguments.num_chunks // case.num_replicas)]
    words += ["--resident_stages", "0", "--pipeline_ranks", str(num_pipeline_ranks), *arguments.own_options]
    words += arguments.mobius_options
    return [*words, *(["--reduce_dtype", "bf16"] if case.dtype == "bfloat16" else [])]


def num_ranks(num_replicas: int, arguments: argparse.Namespace) -> int:
    """Processes of so many pipelines."""
    ranks: int = arguments.ranks
    return ranks // NUM_REPLICAS * num_replicas if arguments.share_gpus else ranks


def most_gib(parameters: int, case: Case, num_processes: int) -> float:
    """Host memory of a replica with all stages streamed, that of its processes in it."""
    bytes_each = 2 + 12 / case.num_replicas
    return parameters * bytes_each / GIB + PROCESS_GIB * num_processes / case.num_replicas


def cells(
    case: Case, result: Result | None, rates: Mapping[str, float] | None, parameters: int, num_processes: int
) -> list[str]:
    """A row of the table; a dash where there is nothing."""
    found = rates or {}
    alone = case.num_replicas == 1
    link = ["-" if alone or key not in found else f"{found[key]:.2f}" for key in (f"sums in {case.dtype}", "weights")]
    if result is None:
        return [case.name, "failed", *["-"] * (len(TITLES) - 5), *link, "-"]
    run, plan = result.measurement, result.measurement.plan or {}
    predicted, waits = plan.get("step_seconds"), run.wait_seconds or {}
    return [
        case.name,
        f"{run.step_seconds:.3f}",
        "-" if predicted is None else f"{predicted:.3f}",
        f"{run.tokens_per_second:,.0f}",
        *(f"{waits.get(cause, 0.0):.3f}" for cause in ("weights", "optimizer", "neighbours")),
        "-" if run.allocated_gib is None else f"{run.allocated_gib:.2f}",
        f"{run.host_gib / case.num_replicas:.1f}",
        f"{result.planned_gib:.1f}",
        f"{most_gib(parameters, case, num_processes):.1f}",
        *link,
        f"{run.loss:.4f}",
    ]


def measure_link(arguments: argparse.Namespace, folder: Path, *, is_socket: bool) -> dict[str, float] | None:
    """Rates of the link between replicas; None where that failed."""
    output = folder / "link.json"
    command = [sys.executable, str(FOLDER / "replica_link.py"), str(output)]
    command += ["--pipeline_ranks", str(arguments.ranks // NUM_REPLICAS), "--elements", str(arguments.elements)]
    command += arguments.own_options
    result = _run(command, NUM_REPLICAS, arguments, output, SOCKETS if is_socket else {})
    return None if result is None else dict(result[0])


def measure(case: Case, arguments: argparse.Namespace, folder: Path, workload: Workload) -> Result | None:
    """One run of the model's shape; None where it failed, whose last lines are printed."""
    output = folder / "run.json"
    command = [sys.executable, str(FOLDER / "worker.py"), str(output), "--model_path", str(folder / "model")]
    words = [*command, *options_of(case, arguments)]
    result = _run(words, case.num_replicas, arguments, output, case.environment)
    if result is None:
        return None
    told, machine_bytes = result
    return Result(mobius_measurement(told, workload, machine_bytes), told["planned_host_gib"])


def _run(
    command: Sequence[str],
    num_replicas: int,
    arguments: argparse.Namespace,
    output: Path,
    environment: Mapping[str, str],
) -> tuple[Any, int] | None:
    threads = str(max(1, len(os.sched_getaffinity(0)) // arguments.ranks))
    result = run_ranks(
        command,
        num_ranks=num_ranks(num_replicas, arguments),
        num_nodes=num_replicas if arguments.share_gpus else 1,
        environment={"OMP_NUM_THREADS": threads, **(ON_FIRST_GPU if arguments.on_first_gpu else environment)},
        output=output,
        timeout_seconds=arguments.timeout,
    )
    if result.problem is not None:
        print(f"{result.problem} after {result.seconds:.0f} s", result.log_end, sep="\n", flush=True)
        return None
    return result.output, result.machine_bytes


def main() -> None:
    """Measure the links, then row after row, and print them as one table."""
    arguments = parse(sys.argv[1:])
    names = gpu_names()
    parameters = num_parameters(arguments.size, arguments.layers)
    workload = Workload(
        num_parameters=parameters,
        tokens=arguments.batch_size * arguments.seq_length,
        num_gpus=arguments.ranks,
        gpu_name=names[0] if names else "",
        warmup=arguments.warmup,
    )
    end_runs_when_terminated()
    cases = arguments.cases
    table, has_failed = [], False
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_config(folder / "model", arguments.size, arguments.layers)
        rates: dict[bool, dict[str, float] | None] = {}
        for is_socket in sorted({case.is_socket for case in cases if case.num_replicas > 1}):
            rates[is_socket] = measure_link(arguments, folder, is_socket=is_socket)
            print("sockets" if is_socket else "links", json.dumps(rates[is_socket]), flush=True)
        for case in cases:
            result = measure(case, arguments, folder, workload)
            has_failed |= result is None
            row = cells(case, result, rates.get(case.is_socket), parameters, num_ranks(case.num_replicas, arguments))
            print(*row, sep="  ", flush=True)
            table.append(row)
    print("", markdown_table(TITLES, table), sep="\n")
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
