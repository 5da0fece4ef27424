"""Times Mobius on a Llama shape with random tokens, with parts switched off in turn and beside a peer.

    python scripts/benchmark.py 7b --ranks 4 --batch_size 64 --seq_length 512 [--steps 8] [--ablation]
        [--peer fsdp2-offload] [-- the options of main.py, such as --num_stages 32 --num_chunks 4]

Each row is a run of its own under torchrun; medians leave the first two steps out. MFU counts 6 floating-point
operations per parameter and token (recompute is no useful work) of the GPUs' dense bf16 rate.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from make_model import SIZES

SCRIPTS = Path(__file__).parent
PEAK_BF16 = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L20": 119.5e12,
    "L40S": 362e12,
    "4090": 165e12,
}
"""Dense bf16 operations per second by the vendors' datasheets, by a part of the device's name."""
ABLATION = {
    "all on": ["--overlap_optimizer", "--compile", "on"],
    "optimizer not overlapped": ["--no_overlap_optimizer", "--compile", "on"],
    "layers not compiled": ["--overlap_optimizer", "--compile", "off"],
    "no prefetch": ["--overlap_optimizer", "--compile", "on", "--no_prefetch"],
    "no offload": ["--no_offload", "--compile", "on"],
}
PEERS = {
    "fsdp2": [],
    "fsdp2-compile": ["--compile"],
    "fsdp2-offload": ["--offload"],
    "fsdp2-offload-compile": ["--offload", "--compile"],
}
HEADER = (
    f"{'system':26} {'s/step':>7} {'tokens/s':>9} {'MFU':>6} {'weights':>7} {'optim':>7} {'neighb':>7} "
    f"{'alloc':>6} {'resvd':>6} {'host':>6} {'ratio':>6}"
)


def launch(num_ranks: int, script: str, arguments: Sequence[str], threads: int, output: Path) -> Any:
    """Run `script` under torchrun and return the JSON it wrote, None if it failed (the end of its output is shown)."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        str(num_ranks),
        "--master_port",
        "29517",
    ]
    finished = subprocess.run(
        [*command, str(SCRIPTS / script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if finished.returncode == 0 and output.is_file():
        return json.loads(output.read_text())
    print("\n".join(finished.stdout.splitlines()[-15:]))
    return None


def num_parameters(size: str) -> int:
    """Parameters of a Llama of this shape: attention and feed-forward matrices, norms, embedding and head."""
    hidden, intermediate, layers, _ = SIZES[size]
    return layers * (4 * hidden**2 + 3 * hidden * intermediate + 2 * hidden) + 2 * 32000 * hidden + hidden


def mfu(size: str, tokens_per_second: float, num_ranks: int) -> str:
    """Share of the GPUs' bf16 rate that useful work takes; "-" for devices not in the table."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    peak = next((rate for part, rate in PEAK_BF16.items() if part in name), None)
    return "-" if peak is None else f"{6 * num_parameters(size) * tokens_per_second / (num_ranks * peak):.1%}"


def mobius_row(name: str, steps: list[dict[str, Any]], tokens: int, arguments: argparse.Namespace) -> tuple[str, float]:
    """A table row without its ratio, and tokens/s."""
    steady = steps[2:]
    seconds = statistics.median(step["step_seconds"] for step in steady)
    causes = ("weights", "optimizer", "neighbours")
    waits = [statistics.median(step["wait_seconds"][cause] for step in steady) for cause in causes]
    last = steps[-1]
    memory = [last[key] or 0.0 for key in ("peak_gpu_memory_gib", "reserved_gpu_memory_gib", "peak_host_memory_gib")]
    return _row(name, seconds, tokens, waits, memory, arguments)


def peer_row(name: str, result: dict[str, Any], tokens: int, arguments: argparse.Namespace) -> tuple[str, float]:
    """The same for a peer, which tells no waits and no host memory."""
    seconds = statistics.median(result["step_seconds"][2:])
    memory = [result["peak_allocated"] / 2**30, result["peak_reserved"] / 2**30, float("nan")]
    return _row(name, seconds, tokens, [float("nan")] * 3, memory, arguments)


def _row(
    name: str,
    seconds: float,
    tokens: int,
    waits: Sequence[float],
    memory: Sequence[float],
    arguments: argparse.Namespace,
) -> tuple[str, float]:
    rate = tokens / seconds
    waited = " ".join(f"{wait:7.3f}" for wait in waits)
    used = " ".join(f"{value:6.2f}" for value in memory)
    return (
        f"{name:26} {seconds:7.3f} {rate:9,.0f} {mfu(arguments.size, rate, arguments.ranks):>6} {waited} {used}",
        rate,
    )


def main() -> None:
    """Run everything that was asked for and print one table; ratios are Mobius's first row over each other row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--seq_length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8, help="at least 3")
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--ablation", action="store_true", help="switch each part off in turn")
    parser.add_argument("--peer", choices=PEERS, action="append", default=[], help="may be given several times")
    own, _, options = " ".join(sys.argv[1:]).partition(" -- ")
    arguments = parser.parse_args(own.split())
    threads = max(1, len(os.sched_getaffinity(0)) // arguments.ranks)
    tokens = arguments.batch_size * arguments.seq_length
    shared = f"--batch_size {arguments.batch_size} --seq_length {arguments.seq_length} "
    shared += f"--max_grad_norm {arguments.max_grad_norm}"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model, output = Path(folder, "model"), Path(folder, "output.json")
        subprocess.run(
            [sys.executable, str(SCRIPTS / "make_model.py"), arguments.size, str(model), "--config_only"], check=True
        )
        variants = ABLATION if arguments.ablation else {"Mobius": []}
        for name, variant in variants.items():
            output.unlink(missing_ok=True)
            given = f"--model_path {model} --num_iterations {arguments.steps} {shared} {options}".split()
            steps = launch(arguments.ranks, "benchmark_worker.py", [str(output), *given, *variant], threads, output)
            rows.append((f"{name:26} failed", 0.0) if steps is None else mobius_row(name, steps, tokens, arguments))
        for peer in arguments.peer:
            output.unlink(missing_ok=True)
            given = f"{model} --steps {arguments.steps} {shared} --output {output}".split()
            result = launch(arguments.ranks, "peers/fsdp2.py", [*given, *PEERS[peer]], threads, output)
            rows.append((f"{peer:26} failed", 0.0) if result is None else peer_row(peer, result, tokens, arguments))
    print(HEADER)
    for text, rate in rows:
        print(text + (f" {rows[0][1] / rate:6.2f}" if rate else ""))


if __name__ == "__main__":
    main()
