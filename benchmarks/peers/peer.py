"""Parts that all peers of benchmark.py share: options, the device, the clock, the memory meter and the result.

A peer hands in a function that trains one step.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

Batch = TypeVar("Batch")

STANDARD_DEVIATION = 0.02
"""Width of the random weights, as transformers initializes Llama."""


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every peer has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="model folder; its config.json is used")
    parser.add_argument("--batch_size", type=int, required=True, help="sequences per step, over all ranks")
    parser.add_argument("--seq_length", type=int, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--accumulations", type=int, default=1, help="parts of a rank's batch whose gradients are added"
    )
    parser.add_argument("--max_grad_norm", type=float, default=0.0, help="0: no clipping")
    parser.add_argument("--gpu_memory_limit", type=float, help="GiB that torch may take of each GPU")
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the result")
    return parser


def read_config(folder: Path) -> PretrainedConfig:
    """The model's configuration, for training."""
    config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config.use_cache = False  # nor would transformers look for samples packed in a row
    return config


def choose_device(limit_gib: float | None) -> torch.device:
    """This rank's GPU, or the CPU; torch may take `limit_gib` of the GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    limit_gpu_memory(device, limit_gib)
    return device


def limit_gpu_memory(device: torch.device, limit_gib: float | None) -> None:
    """Let torch take no more than `limit_gib` of `device`; None: all of it."""
    if limit_gib is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(limit_gib * 2**30 / total, device)


@torch.no_grad()
def fill(model: nn.Module, source: torch.device) -> None:
    """Give all parameters random values made on `source`, vectors (norms) ones; sharded ones, this rank's part.

    What that took of the GPU is given back and does not count in its peak.
    """
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if local.dim() == 1:
            local.fill_(1)
        elif local.numel() > 0:
            local.copy_(torch.randn(local.shape, device=source) * STANDARD_DEVIATION)
    if source.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(source)


def split_batch(arguments: argparse.Namespace, num_ranks: int) -> int:
    """Sequences of one rank's microbatch. Raises SystemExit if the batch cannot be split so."""
    parts = num_ranks * arguments.accumulations
    if arguments.batch_size % parts:
        raise SystemExit(
            f"--batch_size {arguments.batch_size} is not a multiple of {num_ranks} ranks x "
            f"{arguments.accumulations} accumulations"
        )
    return int(arguments.batch_size // parts)


def random_tokens(arguments: argparse.Namespace, device: torch.device, vocab_size: int) -> Callable[[], Tensor]:
    """A maker of a rank's random tokens for one step: [accumulations, sequences, length]."""
    shape = (arguments.accumulations, split_batch(arguments, dist.get_world_size()), arguments.seq_length)
    return lambda: torch.randint(0, vocab_size, shape, device=device)


def time_steps(
    train_step: Callable[[Batch], Tensor], make_batch: Callable[[], Batch], num_steps: int, device: torch.device
) -> dict[str, Any]:
    """Train all steps, each on what `make_batch` returns, which is not timed; `train_step` returns the last loss.

    Returns the seconds of every step, from all ranks ready to all ranks done, and what came before the first.
    """
    seconds, loss = [], torch.zeros(())
    load_seconds = seconds_since_launch()
    for _ in range(num_steps):
        batch = make_batch()
        _wait_for_all(device)
        start = time.perf_counter()
        loss = train_step(batch)
        _wait_for_all(device)
        seconds.append(time.perf_counter() - start)
    return {"step_seconds": seconds, "load_seconds": load_seconds, "loss": float(loss)}


def seconds_since_launch() -> float:
    """Seconds since benchmark.py started this run; 0 where something else did."""
    now = time.monotonic()
    return now - float(os.environ.get("BENCHMARK_START", now))


def write_result(arguments: argparse.Namespace, measured: dict[str, Any], devices: list[torch.device]) -> None:
    """Write `measured` and the memory in bytes: the worst GPU's, and the host's, summed over ranks; collective.

    `devices` are the ones this process uses.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    peaks = [
        float(max((torch.cuda.max_memory_allocated(gpu) for gpu in gpus), default=0)),
        float(max((torch.cuda.max_memory_reserved(gpu) for gpu in gpus), default=0)),
    ]
    host = float(peak_host_bytes())
    if dist.is_initialized():
        worst = torch.tensor(peaks, dtype=torch.float64, device=devices[0])
        total = torch.tensor(host, dtype=torch.float64, device=devices[0])
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        dist.all_reduce(total)
        peaks, host = worst.tolist(), total.item()
    if not dist.is_initialized() or dist.get_rank() == 0:
        memory = {"peak_allocated": peaks[0], "peak_reserved": peaks[1], "peak_host": host}
        arguments.output.write_text(json.dumps({**measured, **memory}))


def peak_host_bytes() -> int:
    """The largest resident set of this process so far, as Mobius measures its own."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line")


def _wait_for_all(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
