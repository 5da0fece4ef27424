"""Times Mobius on a Llama shape with random weights and tokens, with other options, and beside its peers.

    python benchmarks/benchmark.py 7b --batch_size 64 --seq_length 512 --peer fsdp2-offload --output rows.jsonl \\
        --variant no_offload="--no_offload" [-- the options of main.py, such as --num_stages 32 --num_chunks 4]

Each row is a run of its own with one process per GPU; it is printed as soon as it is known, and all of them as a
Markdown table at the end. Medians leave the first steps out (--warmup).

ratio       Mobius's tokens per second over the row's
MFU         6 floating-point operations per parameter and token (recompute is no useful work) of the GPUs' bf16 rate
weights, optim, neighb    Mobius's waits in seconds per step, by cause, of the worst rank
alloc, resvd              GiB that torch has allocated and reserved on the worst rank's GPU
host        GiB, the sum of the processes' largest resident sets
machine     GiB that the machine's used memory grew by, what a driver holds for a process included
load s      from the launch to the first step
"""

import argparse
import dataclasses
import datetime
import importlib.util
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "scripts"))

from launch import end_runs_when_terminated, run_ranks, split_words
from make_model import SIZES, num_active, num_parameters, write_config
from predicted import remarks
from rows import (
    Measurement,
    Row,
    Workload,
    header,
    line,
    markdown,
    mobius_measurement,
    peer_measurement,
    record,
)
from service import Service

FOLDER = Path(__file__).parent
WORKER_WORDS = 3
"""Number of words of a command of Mobius's before its options: Python, worker.py and its output."""
ABLATION = {
    "optimizer not hidden": "--no_overlap_optimizer",
    "no prefetch": "--no_prefetch",
    "messages over NCCL": "--no_copy_messages",
    "layers not compiled": "--compile off",
    "torch's AdamW": "--torch_adamw",
}
"""Each switches one part off."""


@dataclass(frozen=True)
class Peer:
    """A system beside Mobius."""

    script: str
    options: str = ""
    package: str | None = None
    """Python package that may be missing."""
    is_one_process: bool = False
    """Whether one process drives all GPUs, with all cores."""

    @property
    def has_accumulations(self) -> bool:
        """Whether --peer_accumulations are for it: one process has none, and those with adapters choose."""
        return not (self.is_one_process or self.script.startswith("lora_"))


PEERS = {
    "fsdp2": Peer("fsdp2.py"),
    "fsdp2-compile": Peer("fsdp2.py", "--compile"),
    "fsdp2-rowwise": Peer("fsdp2.py", "--compile --float8 rowwise", package="torchao"),
    "fsdp2-rowwise-gw-hp": Peer("fsdp2.py", "--compile --float8 rowwise_with_gw_hp", package="torchao"),
    "fsdp2-offload": Peer("fsdp2.py", "--offload"),
    "fsdp2-offload-sync": Peer("fsdp2.py", "--offload --sync"),
    "deepspeed-zero2": Peer("deepspeed_offload.py", "--zero_stage 2", package="deepspeed"),
    "deepspeed-zero3": Peer("deepspeed_offload.py", "--zero_stage 3", package="deepspeed"),
    "roundpipe": Peer("roundpipe_async.py", package="roundpipe", is_one_process=True),
    "lora-zero3": Peer("lora_deepspeed.py", package="deepspeed"),
    "lora-fsdp2-chunked": Peer("lora_fsdp2.py", "--loss_chunk_tokens 2048"),
    "lora-fsdp2-offload": Peer("lora_fsdp2.py", "--offload"),
    "lora-bitsandbytes": Peer("lora_bitsandbytes.py", package="bitsandbytes"),
    "lora-bitsandbytes-chunked": Peer("lora_bitsandbytes.py", "--loss_chunk_tokens 2048", package="bitsandbytes"),
}
"""Those with adapters choose their microbatch themselves (peers/microbatch_search.py); chunked: their loss is."""


@dataclass(frozen=True)
class Run:
    """One row to be measured."""

    name: str
    options: str
    """Options that only this row has, for the record."""
    command: Sequence[str]
    num_processes: int
    threads: int
    """OMP_NUM_THREADS of each process."""
    package: str | None
    measure: Callable[[Mapping[str, Any], Workload, int], Measurement]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; what stands behind ` -- ` is `mobius_options`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--layers", type=int, help="another number of layers than the size's own")
    parser.add_argument("--ranks", type=int, help="processes, one per GPU (default: all GPUs)")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--seq_length", type=int, default=512)
    parser.add_argument("--lengths", type=Path, help="JSON list of token counts: packed samples, beside FSDP2 alone")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2, help="steps at the start that the medians leave out")
    parser.add_argument("--max_grad_norm", type=float, default=1.0, help="0: no clipping")
    parser.add_argument("--gpu_memory_limit", type=float, help="GiB of each GPU that any system may take")
    parser.add_argument(
        "--no_mobius", action="store_true", help="leave Mobius's first row out; there are no ratios then"
    )
    parser.add_argument(
        "--variant", type=variant, action="append", default=[], help='NAME="options": one more Mobius row'
    )
    parser.add_argument("--ablation", action="store_true", help="variants with one part switched off each")
    parser.add_argument("--peer", choices=PEERS, action="append", default=[], help="may be given several times")
    parser.add_argument("--peer_accumulations", type=int, default=1, help="of the peers with one process per GPU")
    parser.add_argument("--env", type=setting, action="append", default=[], help="NAME=VALUE for all runs")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which a run is ended")
    parser.add_argument("--total_seconds", type=float, default=math.inf, help="seconds after which all of it is")
    parser.add_argument(
        "--same_processes", action="store_true", help="make Mobius's rows one after the other without starting anew"
    )
    parser.add_argument("--output", type=Path, help="JSON-lines file that each row is appended to")
    own, options = split_words(argv)
    arguments = parser.parse_args(own)
    if arguments.steps <= arguments.warmup:
        parser.error(f"--steps {arguments.steps}: must be more than the {arguments.warmup} steps of --warmup")
    arguments.mobius_options = options
    return arguments


def variant(text: str) -> tuple[str, str]:
    """`NAME=options` as a pair."""
    name, equals, options = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=options")
    return name, options


def setting(text: str) -> tuple[str, str]:
    """`NAME=VALUE` as a pair."""
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def plan_runs(arguments: argparse.Namespace, *, model: Path, output: Path, num_cores: int) -> list[Run]:
    """All rows in their order: Mobius, its variants, the peers."""
    shared = ["--batch_size", str(arguments.batch_size), "--seq_length", str(arguments.seq_length)]
    shared += ["--max_grad_norm", str(arguments.max_grad_norm)]
    if arguments.gpu_memory_limit is not None:
        shared += ["--gpu_memory_limit", str(arguments.gpu_memory_limit)]
    if arguments.lengths is not None:
        shared += ["--lengths", str(arguments.lengths.resolve())]
    threads = max(1, num_cores // arguments.ranks)
    variants = [*arguments.variant, *(ABLATION.items() if arguments.ablation else [])]
    if not arguments.no_mobius:
        variants.insert(0, ("Mobius", ""))
    runs = []
    for name, options in variants:
        command = [sys.executable, str(FOLDER / "worker.py"), str(output), "--model_path", str(model)]
        command += ["--num_iterations", str(arguments.steps), *shared, *arguments.mobius_options, *shlex.split(options)]
        runs.append(Run(name, options, command, arguments.ranks, threads, None, mobius_measurement))
    for name in arguments.peer:
        peer = PEERS[name]
        options = peer.options
        if peer.has_accumulations and arguments.peer_accumulations > 1:
            options = f"{options} --accumulations {arguments.peer_accumulations}".strip()
        command = [sys.executable, str(FOLDER / "peers" / peer.script), str(model), "--output", str(output)]
        command += ["--steps", str(arguments.steps), *shared, *shlex.split(options)]
        processes, cores = (1, num_cores) if peer.is_one_process else (arguments.ranks, threads)
        runs.append(Run(name, options, command, processes, cores, peer.package, peer_measurement))
    return runs


def measure(
    run: Run,
    workload: Workload,
    arguments: argparse.Namespace,
    output: Path,
    service: Service | None = None,
    *,
    ends: float = math.inf,
) -> Row:
    """Run it, by `service` if there is one, no longer than may be; its last lines are printed if it fails."""
    timeout_seconds = min(arguments.timeout, ends - time.monotonic())
    problem = None
    if run.package is not None and importlib.util.find_spec(run.package) is None:
        problem = "not installed"
    elif timeout_seconds <= 0:
        problem = "no time left"
    if problem is not None:
        return Row(name=run.name, options=run.options, measurement=None, problem=problem, run_seconds=0.0)
    if service is not None:
        result = service.run(run.command[WORKER_WORDS:], timeout_seconds=timeout_seconds)
    else:
        result = run_ranks(
            run.command,
            num_ranks=run.num_processes,
            environment=environment_of(run, arguments),
            output=output,
            timeout_seconds=timeout_seconds,
        )
    if result.problem is not None:
        print(result.log_end, flush=True)
    return Row(
        name=run.name,
        options=run.options,
        measurement=None if result.problem else run.measure(result.output, workload, result.machine_bytes),
        problem=result.problem,
        run_seconds=result.seconds,
    )


def environment_of(run: Run, arguments: argparse.Namespace) -> dict[str, str]:
    """Variables that the processes of a run get beside this process's own."""
    return {"OMP_NUM_THREADS": str(run.threads), **dict(arguments.env)}


def gpu_names() -> list[str]:
    """The names of the GPUs that a run sees; asked without torch, which would take memory on the first."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name", "--format=csv,noheader"]
    finished = subprocess.run(query, capture_output=True, text=True, check=False)
    names = finished.stdout.splitlines() if finished.returncode == 0 else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if visible is None else names[: len([part for part in visible.split(",") if part.strip()])]


def describe_machine(names: Sequence[str], num_cores: int) -> str:
    """Hardware and versions, for the record."""
    gpus = f"{len(names)} x {names[0]}" if names else "no GPU"
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
    return f"{gpus}, {num_cores} cores, Python {platform.python_version()}, {versions}"


def main() -> None:
    """Measure and print row after row."""
    arguments = parse(sys.argv[1:])
    names, num_cores = gpu_names(), len(os.sched_getaffinity(0))
    arguments.ranks = arguments.ranks or max(1, len(names))
    facts = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "hardware": describe_machine(names, num_cores),
        "command": shlex.join(["python", "benchmarks/benchmark.py", *sys.argv[1:]]),
    }
    workload = Workload(
        num_parameters=num_parameters(arguments.size, arguments.layers),
        tokens=arguments.batch_size * arguments.seq_length,
        num_gpus=arguments.ranks,
        gpu_name=names[0] if names else "",
        warmup=arguments.warmup,
        num_active=num_active(arguments.size, arguments.layers),
    )
    end_runs_when_terminated()
    ends = time.monotonic() + arguments.total_seconds
    print("\n".join(facts.values()), header(), sep="\n", flush=True)
    rows: list[Row] = []
    reference: float | None = None
    with tempfile.TemporaryDirectory() as folder, ExitStack() as kept:
        model, output = Path(folder, "model"), Path(folder, "output.json")
        write_config(model, arguments.size, arguments.layers)
        service: Service | None = None
        for run in plan_runs(arguments, model=model, output=output, num_cores=num_cores):
            is_own = run.measure is mobius_measurement
            if is_own and arguments.same_processes and service is None:
                own = Service(num_ranks=run.num_processes, environment=environment_of(run, arguments))
                service = kept.enter_context(own)
            elif not is_own and service is not None:
                kept.close()  # a peer has the machine to itself
                service = None
            row = measure(run, workload, arguments, output, service, ends=ends)
            if row.measurement is not None:
                rate = row.measurement.tokens_per_second
                reference = rate if run.name == "Mobius" else reference
                row = dataclasses.replace(row, ratio=None if reference is None else reference / rate)
            rows.append(row)
            print(line(row), flush=True)
            if arguments.output is not None:
                with arguments.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record(row, facts), allow_nan=False) + "\n")
    print("", markdown(rows), "", *remarks(rows, workload.num_parameters), sep="\n")


if __name__ == "__main__":
    main()
