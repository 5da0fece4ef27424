"""A peer for benchmark.py: peft's adapters beside bitsandbytes' nf4 weights (QLoRA), one GPU; run by torchrun.

    torchrun --nproc_per_node 1 benchmarks/peers/lora_bitsandbytes.py FOLDER --batch_size 16 --seq_length 2048 ...

Layers' linears are codes on the GPU and are decoded at each use; embedding, head and norms are bf16. Adapters are fp32
and compute in bf16.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from bitsandbytes.nn import Linear4bit, Params4bit
from lora import ModelWithLoss, adapt, fill_adapters, make_base, make_lora_parser, read_base_config, update
from microbatch_search import Microbatches, MicrobatchSearch
from peer import STANDARD_DEVIATION, choose_device
from torch import Tensor, nn


def parse() -> argparse.Namespace:
    """Options of one run."""
    parser = make_lora_parser(__doc__)
    parser.add_argument("--double", action="store_true", help="scales are quantized, too")
    return parser.parse_args()


def build_model(arguments: argparse.Namespace, device: torch.device) -> ModelWithLoss:
    """The model with random weights, one linear after the other; the whole is never in bf16."""
    config = read_base_config(arguments)
    with torch.device("meta"):
        base = make_base(config)
    for name, linear in list(base.named_modules()):
        if type(linear) is nn.Linear and name != "lm_head":
            base.set_submodule(name, coded(linear, device, double=arguments.double))
    for module in base.modules():
        if not isinstance(module, Linear4bit):
            for name, parameter in module.named_parameters(recurse=False):
                values = torch.ones(parameter.shape, dtype=torch.bfloat16, device=device)
                values = values if parameter.dim() == 1 else values.normal_(0, STANDARD_DEVIATION)
                module.register_parameter(name, nn.Parameter(values, requires_grad=False))
    decoder: Any = base.model
    decoder.rotary_emb = type(decoder.rotary_emb)(config).to(device)
    whole = adapt(base, arguments, has_fp32_adapters=True)
    fill_adapters(whole)
    return whole


def coded(linear: nn.Linear, device: torch.device, *, double: bool) -> Linear4bit:
    """A linear of the same size with random codes."""
    values = torch.randn(linear.weight.shape, device=device, dtype=torch.bfloat16) * STANDARD_DEVIATION
    with torch.device("meta"):
        made = Linear4bit(
            *(linear.in_features, linear.out_features, linear.bias is not None, torch.bfloat16),
            compress_statistics=double,
            quant_type="nf4",
        )
    settings = {"requires_grad": False, "compress_statistics": double, "quant_type": "nf4"}
    made.weight = Params4bit(values.cpu() if device.type == "cuda" else values, **settings).to(device)
    if made.bias is not None:
        made.bias = nn.Parameter(torch.zeros(made.bias.shape, dtype=torch.bfloat16, device=device), requires_grad=False)
    return made


def main() -> None:
    """Train; writes one JSON object with every step's seconds and the memory it took."""
    arguments = parse()
    device = choose_device(arguments.gpu_memory_limit)
    dist.init_process_group("gloo")
    model: Any = build_model(arguments, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)

    def train_step(microbatches: Microbatches) -> Tensor:
        for tokens in microbatches:
            with torch.autocast(device.type, torch.bfloat16):
                loss: Tensor = model(tokens)
            (loss / len(microbatches)).backward()
        update(optimizer, arguments.max_grad_norm)
        return loss.detach()

    MicrobatchSearch(arguments, train_step, device, model.model.config.vocab_size).run()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads abort an ordinary exit now and then


if __name__ == "__main__":
    main()
