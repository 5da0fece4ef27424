"""A peer for benchmark.py: peft's adapters with DeepSpeed's ZeRO-3, the parameters on the CPU; run by torchrun.

    torchrun --nproc_per_node 1 benchmarks/peers/lora_deepspeed.py FOLDER --batch_size 16 --seq_length 2048 ...

The base is bf16 in page-locked memory, partitioned over the ranks. Adapters are bf16 with fp32 masters, which torch's
AdamW updates on the GPU: they are few, and nothing has to be built for it. Recomputed layers are loaded once more.
"""

import argparse
import importlib
import os
from typing import Any

import torch
import torch.distributed as dist
from lora import adapt, make_base, make_lora_parser, read_base_config
from microbatch_search import Microbatches, MicrobatchSearch
from peer import choose_device
from torch import Tensor

NO_LIMIT = 10**9
PREFETCHED_PARAMETERS = 3 * 10**8
"""About a layer of 14B: the next one is loaded while one computes."""
SMALL_PARAMETERS = 2 * 10**5
"""Parameters of a tensor that stays on the GPU: all adapters do."""


def engine_settings(arguments: argparse.Namespace, num_ranks: int) -> dict[str, Any]:
    """DeepSpeed's own configuration.

    Its number of accumulations is 1 and its batch a row per rank: the peer itself says where a step ends.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": num_ranks,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": NO_LIMIT,
            "stage3_prefetch_bucket_size": PREFETCHED_PARAMETERS,
            "stage3_max_live_parameters": NO_LIMIT,
            "stage3_max_reuse_distance": NO_LIMIT,
            "stage3_param_persistence_threshold": SMALL_PARAMETERS,
        },
        "gradient_clipping": arguments.max_grad_norm,
        "steps_per_print": NO_LIMIT,
        "wall_clock_breakdown": False,
    }


def main() -> None:
    """Train; rank 0 writes one JSON object with every step's seconds and the memory it took."""
    arguments = make_lora_parser(__doc__).parse_args()
    try:
        deepspeed: Any = importlib.import_module("deepspeed")
    except ImportError as error:
        raise SystemExit(f"this peer needs deepspeed ({error}): pip install deepspeed==0.19.8") from None
    device = choose_device(arguments.gpu_memory_limit)
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")
    settings, config = engine_settings(arguments, dist.get_world_size()), read_base_config(arguments)
    with deepspeed.zero.Init(config_dict_or_path=settings):  # each layer goes to the CPU as soon as it is made
        base = make_base(config)
    model = adapt(base, arguments, has_fp32_adapters=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.0, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def train_step(microbatches: Microbatches) -> Tensor:
        for index, tokens in enumerate(microbatches):
            engine.set_gradient_accumulation_boundary(index == len(microbatches) - 1)
            loss: Tensor = engine(tokens)
            engine.backward(loss / len(microbatches))
        engine.step()
        return loss.detach()

    MicrobatchSearch(arguments, train_step, device, config.vocab_size).run()
    dist.destroy_process_group()
    os._exit(0)  # stage 3 leaves threads that abort an ordinary exit


if __name__ == "__main__":
    main()
