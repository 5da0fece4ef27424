"""A peer for benchmark.py: torch's FSDP2 on a Llama-shaped model with random weights and tokens; run by torchrun.

    torchrun --nproc_per_node 4 scripts/peers/fsdp2.py FOLDER --batch_size 64 --seq_length 512 --output row.json

Layers are sharded one by one and recomputed in backward, weights move in bf16 and gradients in fp32, masters are fp32,
as the FSDP2 tutorial recommends; with --offload parameters, gradients and optimizer states are in page-locked memory.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def build_model(folder: Path, device: torch.device, *, offload: bool, compile_layers: bool) -> PreTrainedModel:
    """The sharded model with random weights."""
    config = AutoConfig.from_pretrained(folder)
    config.use_cache = False
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    layers = model.model.layers
    for layer in layers:
        if compile_layers:
            layer.compile()
        fully_shard(layer, mp_policy=precision, offload_policy=policy)
    fully_shard(model, mp_policy=precision, offload_policy=policy)
    model.to_empty(device="cpu" if offload else device)
    for parameter in model.parameters():
        local = parameter.to_local()
        local.copy_(torch.randn(local.shape, device=device) * 0.02)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config).to(device)  # its buffers were made on the meta device
    return model


def parse() -> argparse.Namespace:
    """Options of one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch_size", type=int, required=True, help="sequences per step, over all ranks")
    parser.add_argument("--seq_length", type=int, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--accumulations", type=int, default=1)
    parser.add_argument("--max_grad_norm", type=float, default=0.0)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def connect() -> torch.device:
    """Meet the other ranks and return this one's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def train(model: PreTrainedModel, arguments: argparse.Namespace, device: torch.device) -> list[float]:
    """Train on random tokens; returns the seconds of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    accumulations = arguments.accumulations
    size = arguments.batch_size // dist.get_world_size() // accumulations
    seconds = []
    for _ in range(arguments.steps):
        shape = (accumulations, size, arguments.seq_length)
        tokens = torch.randint(0, model.config.vocab_size, shape, device=device)
        _synchronize(device)
        start = time.perf_counter()
        for index, part in enumerate(tokens):
            model.set_requires_gradient_sync(index == accumulations - 1)
            (model(input_ids=part, labels=part).loss / accumulations).backward()
        if arguments.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Train; rank 0 writes one JSON object with every step's seconds and the memory it took."""
    arguments = parse()
    device = connect()
    with torch.no_grad():
        model = build_model(arguments.folder, device, offload=arguments.offload, compile_layers=arguments.compile)
    row: dict[str, object] = {"step_seconds": train(model, arguments, device), "peak_allocated": 0, "peak_reserved": 0}
    if device.type == "cuda":
        row["peak_allocated"] = torch.cuda.max_memory_allocated(device)
        row["peak_reserved"] = torch.cuda.max_memory_reserved(device)
    if dist.get_rank() == 0:
        arguments.output.write_text(json.dumps(row))
    dist.destroy_process_group()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


if __name__ == "__main__":
    main()
