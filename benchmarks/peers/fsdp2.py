"""A peer for benchmark.py: torch's FSDP2 on a Llama-shaped model with random weights and tokens; run by torchrun.

    torchrun --nproc_per_node 4 benchmarks/peers/fsdp2.py FOLDER --batch_size 64 --seq_length 512 --output row.json

Layers are sharded one by one and recomputed in backward, weights move in bf16 and gradients in fp32, masters are fp32,
as the FSDP2 tutorial recommends; with --offload parameters, gradients and optimizer states are in page-locked memory.
"""

import argparse
import os

import torch
import torch.distributed as dist
from peer import choose_device, fill, make_parser, read_config, time_steps, write_result
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel


def parse() -> argparse.Namespace:
    """Options of one run."""
    parser = make_parser(__doc__)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def build_model(arguments: argparse.Namespace, device: torch.device) -> PreTrainedModel:
    """The sharded model with random weights."""
    config = read_config(arguments.folder)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if arguments.offload else OffloadPolicy()
    for layer in model.model.layers:
        if arguments.compile:
            layer.compile()
        fully_shard(layer, mp_policy=precision, offload_policy=policy)
    fully_shard(model, mp_policy=precision, offload_policy=policy)
    model.to_empty(device="cpu" if arguments.offload else device)
    fill(model, device)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config).to(device)  # its buffers were made on the meta device
    return model


def main() -> None:
    """Train; rank 0 writes one JSON object with every step's seconds and the memory it took."""
    arguments = parse()
    device = choose_device(arguments.gpu_memory_limit)
    if device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    model = build_model(arguments, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def train_step(tokens: Tensor) -> Tensor:
        for index, part in enumerate(tokens):
            model.set_requires_gradient_sync(index == len(tokens) - 1)
            loss: Tensor = model(input_ids=part, labels=part).loss
            (loss / len(tokens)).backward()
        if arguments.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    measured = time_steps(train_step, arguments, device, model.config.vocab_size)
    write_result(arguments, measured, [device])
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads abort an ordinary exit now and then


if __name__ == "__main__":
    main()
