"""A peer for benchmark.py: DeepSpeed's ZeRO with the optimizer on the CPU, on random weights and tokens; by torchrun.

    torchrun --nproc_per_node 4 benchmarks/peers/deepspeed_offload.py FOLDER --zero_stage 2 --batch_size 64 ...

Stage 2 keeps bf16 weights on the GPU, stage 3 in page-locked memory; both keep fp32 masters and moments there and
update them with DeepSpeed's CPU Adam, which is built at the first use (about 40 s). Settings are those of its
ZeRO-Offload tutorial. Layers are recomputed in backward. With `--nvme FOLDER`, stage 3 keeps masters and moments in
files there; that needs libaio's header, and TORCH_CUDA_ARCH_LIST where torch names an architecture like 9.0a.
"""

import argparse
import importlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peer import choose_device, make_parser, random_tokens, read_config, split_batch, time_steps, write_result
from torch import Tensor
from transformers import AutoModelForCausalLM

NO_LIMIT = 10**9


def parse() -> argparse.Namespace:
    """Options of one run."""
    parser = make_parser(__doc__)
    parser.add_argument("--zero_stage", type=int, choices=(2, 3), default=2)
    parser.add_argument("--nvme", type=Path, metavar="FOLDER", help="with --zero_stage 3: of the optimizer's states")
    return parser.parse_args()


def engine_settings(arguments: argparse.Namespace, num_ranks: int) -> dict[str, Any]:
    """DeepSpeed's own configuration."""
    pinned = {"device": "cpu", "pin_memory": True}
    zero: dict[str, Any] = {
        "stage": arguments.zero_stage,
        "offload_optimizer": pinned,
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if arguments.zero_stage == 3:
        zero |= {
            "offload_param": pinned,
            "sub_group_size": NO_LIMIT,
            "stage3_max_live_parameters": NO_LIMIT,
            "stage3_max_reuse_distance": NO_LIMIT,
        }
    if arguments.nvme is not None:
        states = {"device": "nvme", "nvme_path": str(arguments.nvme), "pin_memory": True, "buffer_count": 5}
        zero |= {"offload_optimizer": states, "sub_group_size": 100_000_000}
    return {
        "train_micro_batch_size_per_gpu": split_batch(arguments, num_ranks),
        "gradient_accumulation_steps": arguments.accumulations,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "gradient_clipping": arguments.max_grad_norm,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.0}},
        "steps_per_print": NO_LIMIT,
        "wall_clock_breakdown": False,
        "aio": {"block_size": 2**20, "queue_depth": 32, "intra_op_parallelism": 8},
    }


def main() -> None:
    """Train; rank 0 writes one JSON object with every step's seconds and the memory it took."""
    arguments = parse()
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")  # the CPU kernel that it builds has no CUDA in it
    try:
        deepspeed: Any = importlib.import_module("deepspeed")
    except ImportError as error:
        raise SystemExit(f"this peer needs deepspeed ({error}): pip install deepspeed==0.19.8") from None
    device = choose_device(arguments.gpu_memory_limit)
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")
    settings = engine_settings(arguments, dist.get_world_size())
    config = read_config(arguments.folder)
    if arguments.zero_stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    else:
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def train_step(tokens: Tensor) -> Tensor:
        for part in tokens:
            loss: Tensor = engine(input_ids=part, labels=part).loss
            engine.backward(loss)  # divided by the accumulations there
            engine.step()  # does nothing before the last
        return loss.detach()

    tokens = random_tokens(arguments, device, config.vocab_size)
    measured = time_steps(train_step, tokens, arguments.steps, device)
    write_result(arguments, measured, [device])
    dist.destroy_process_group()
    os._exit(0)  # stage 3 leaves threads that abort an ordinary exit


if __name__ == "__main__":
    main()
