"""A peer for benchmark.py: torch's FSDP2 on a Llama-shaped model with random weights and tokens; run by torchrun.

    torchrun --nproc_per_node 4 benchmarks/peers/fsdp2.py FOLDER --batch_size 64 --seq_length 512 --output row.json

Layers are sharded one by one and recomputed in backward, weights move in bf16 and gradients in fp32, masters are fp32,
as the FSDP2 tutorial recommends; with --offload parameters, gradients and optimizer states are in page-locked memory.
With several accumulations whole gradients stay on each GPU, in fp32, until the last one; with --sync they are reduced
behind each one, and with --offload sent home and added up there. With --lengths it trains on samples of these token
counts, packed as TRL packs them (packed.py), and tells real tokens. With --float8 torchao makes the layers' linears
multiply in FP8, by one of its recipes.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from packed import ATTENTIONS, Microbatch, PackedSteps, best_attention, read_lengths
from peer import (
    choose_device,
    fill,
    make_parser,
    random_tokens,
    read_config,
    split_batch,
    time_steps,
    write_result,
)
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel


def parse() -> argparse.Namespace:
    """Options of one run."""
    parser = make_parser(__doc__)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--float8", choices=("tensorwise", "rowwise", "rowwise_with_gw_hp"), help="torchao's recipe")
    parser.add_argument("--sync", action="store_true", help="reduce gradients behind each accumulation")
    parser.add_argument("--lengths", type=Path, help="JSON list of samples' token counts; rows are then packed")
    parser.add_argument(
        "--attention", choices=ATTENTIONS, help="for packed rows (default: flash_attention_2 if installed)"
    )
    parser.add_argument("--warmup", type=int, default=2, help="steps that the real tokens per second leave out")
    return parser.parse_args()


def build_model(arguments: argparse.Namespace, device: torch.device) -> PreTrainedModel:
    """The sharded model with random weights."""
    config = read_config(arguments.folder)
    if arguments.lengths is not None:
        config._attn_implementation = arguments.attention
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    if arguments.float8 is not None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe = Float8LinearConfig.from_recipe_name(arguments.float8)
        convert_to_float8_training(model, config=recipe, module_filter_fn=lambda _, name: ".layers." in name)
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


def packed_steps(arguments: argparse.Namespace, device: torch.device, vocab_size: int) -> PackedSteps:
    """This rank's packed steps."""
    num_ranks = dist.get_world_size()
    return PackedSteps(
        read_lengths(arguments.lengths, arguments.seq_length),
        seq_length=arguments.seq_length,
        rows_per_microbatch=split_batch(arguments, num_ranks),
        accumulations=arguments.accumulations,
        rank=dist.get_rank(),
        num_ranks=num_ranks,
        vocab_size=vocab_size,
        attention=arguments.attention,
        device=device,
    )


def full_steps(arguments: argparse.Namespace, device: torch.device, vocab_size: int) -> Callable[[], list[Microbatch]]:
    """A maker of steps of full rows."""
    make_tokens = random_tokens(arguments, device, vocab_size)
    return lambda: [{"input_ids": part, "labels": part} for part in make_tokens()]


def main() -> None:
    """Train; rank 0 writes one JSON object with every step's seconds and the memory it took."""
    arguments = parse()
    device = choose_device(arguments.gpu_memory_limit)
    arguments.attention = arguments.attention or best_attention(device)
    if device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    model = build_model(arguments, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def train_step(microbatches: Sequence[Microbatch]) -> Tensor:
        for index, part in enumerate(microbatches):
            model.set_requires_gradient_sync(arguments.sync or index == len(microbatches) - 1)
            loss: Tensor = model(**part).loss
            (loss / len(microbatches)).backward()
        if arguments.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    packed = None if arguments.lengths is None else packed_steps(arguments, device, model.config.vocab_size)
    make_step = full_steps(arguments, device, model.config.vocab_size) if packed is None else packed.next
    measured = time_steps(train_step, make_step, arguments.steps, device)
    if packed is not None:
        measured |= packed.facts(measured["step_seconds"], arguments.warmup) | {"attention": arguments.attention}
    write_result(arguments, measured, [device])
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads abort an ordinary exit now and then


if __name__ == "__main__":
    main()
