"""A peer for benchmark.py: peft's adapters with torch's FSDP2, on random weights and tokens; run by torchrun.

    torchrun --nproc_per_node 2 benchmarks/peers/lora_fsdp2.py FOLDER --batch_size 16 --seq_length 2048 ...

The frozen base is bf16; adapters are fp32, as peft makes them, and compute in bf16. Layers and the embedding are
sharded one by one; the head is gathered once per microbatch. With --offload all of it is in page-locked memory.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from lora import ModelWithLoss, adapt, fill_adapters, make_base, make_lora_parser, read_base_config, update
from microbatch_search import Microbatches, MicrobatchSearch
from peer import choose_device, fill
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard


def parse() -> argparse.Namespace:
    """Options of one run."""
    parser = make_lora_parser(__doc__)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def build_model(arguments: argparse.Namespace, device: torch.device) -> ModelWithLoss:
    """The sharded model with random weights."""
    config = read_base_config(arguments)
    with torch.device("meta"):
        whole = adapt(make_base(config), arguments, has_fp32_adapters=True)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if arguments.offload else OffloadPolicy()
    decoder = whole.model.model
    for layer in decoder.layers:
        if arguments.compile:
            layer.compile()
        fully_shard(layer, mp_policy=precision, offload_policy=policy)
    fully_shard(decoder.embed_tokens, mp_policy=precision, offload_policy=policy)
    fully_shard(whole, mp_policy=precision, offload_policy=policy)
    whole.to_empty(device="cpu" if arguments.offload else device)
    fill(whole, device)
    fill_adapters(whole)
    decoder.rotary_emb = type(decoder.rotary_emb)(config).to(device)  # its buffers were made on the meta device
    return whole


def main() -> None:
    """Train; rank 0 writes one JSON object with every step's seconds and the memory it took."""
    arguments = parse()
    torch._dynamo.config.automatic_dynamic_shapes = False  # each microbatch that is tried has kernels of its own
    device = choose_device(arguments.gpu_memory_limit)
    if device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    model: Any = build_model(arguments, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)

    def train_step(microbatches: Microbatches) -> Tensor:
        for index, tokens in enumerate(microbatches):
            model.set_requires_gradient_sync(index == len(microbatches) - 1)
            loss: Tensor = model(tokens)
            (loss / len(microbatches)).backward()
        update(optimizer, arguments.max_grad_norm)
        return loss.detach()

    MicrobatchSearch(arguments, train_step, device, model.model.config.vocab_size).run()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads abort an ordinary exit now and then


if __name__ == "__main__":
    main()
