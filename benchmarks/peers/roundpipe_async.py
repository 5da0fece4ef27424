"""A peer for benchmark.py: RoundPipe, one process for all GPUs, with its default: weights that are one step stale.

    python benchmarks/peers/roundpipe_async.py FOLDER --batch_size 64 --seq_length 512 --output row.json

Set OMP_NUM_THREADS to nearly all cores. Its steps overlap, so that single ones cannot be timed: after a warm-up, in
which it also measures its layers, all steps are timed as one and every step is given their mean.
"""

import argparse
import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peer import fill, limit_gpu_memory, make_parser, read_config, seconds_since_launch, write_result
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, masking_utils

WARMUP_STEPS = 5


def parse() -> argparse.Namespace:
    """Options of one run."""
    parser = make_parser(__doc__)
    parser.add_argument("--microbatches", type=int, help="default: two per GPU")
    return parser.parse_args()


def import_roundpipe() -> Any:
    """RoundPipe 0.1.1, which is written for transformers 4, made to ask transformers 5 for its attention mask."""
    try:
        roundpipe = importlib.import_module("roundpipe")
        llama: Any = importlib.import_module("roundpipe.models.llama")
    except ImportError as error:
        raise SystemExit(f"this peer needs roundpipe ({error}): pip install roundpipe==0.1.1") from None

    def create_causal_mask(*, input_embeds: Tensor, cache_position: Tensor, **others: Any) -> Any:
        return masking_utils.create_causal_mask(inputs_embeds=input_embeds, **others)

    llama.create_causal_mask = create_causal_mask
    return roundpipe


def build_model(folder: Path, source: torch.device) -> PreTrainedModel:
    """The model in CPU memory, in bf16, with random weights made on `source`."""
    config = read_config(folder)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    model.to_empty(device="cpu")
    fill(model, source)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers were made on the meta device
    model.train()
    return model


def main() -> None:
    """Train and write one JSON object with the seconds of a step and the memory it took."""
    arguments = parse()
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if not devices:
        raise SystemExit("RoundPipe needs a GPU")
    roundpipe = import_roundpipe()
    for device in devices:
        limit_gpu_memory(device, arguments.gpu_memory_limit)
    microbatches = arguments.microbatches or 2 * len(devices)
    plain = build_model(arguments.folder, devices[0])
    model = roundpipe.wrap_model_to_roundpipe(
        plain,
        use_sequential_preset=True,
        optim_dtype=torch.float32,
        model_run_config=roundpipe.RoundPipeRunConfig(num_microbatch=microbatches),
    )
    parameters = list(model.optim_parameters())
    optimizer = roundpipe.optim.Adam(parameters, lr=1e-5, decoupled_weight_decay=True)

    def update() -> None:
        if arguments.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(parameters, arguments.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    def train_step() -> Tensor:
        tokens = torch.randint(0, plain.config.vocab_size, (arguments.batch_size, arguments.seq_length))
        loss: Tensor = model.forward_backward(
            input_kwargs={"input_ids": tokens, "labels": tokens, "return_logits": False},
            loss_fn=lambda outputs, _: outputs.loss / microbatches,
        )
        model.step(update)
        return loss

    load_seconds = seconds_since_launch()
    measured = time_all_steps(train_step, arguments.steps, devices)
    write_result(arguments, {**measured, "load_seconds": load_seconds}, devices)
    os._exit(0)  # its threads would keep the process for a while


def time_all_steps(train_step: Callable[[], Tensor], num_steps: int, devices: list[torch.device]) -> dict[str, Any]:
    """The mean seconds of a step, for every step, and the last loss.

    An update is on its way when the clock starts and when it ends, so that as many are counted as there are steps.
    """
    for _ in range(WARMUP_STEPS):
        train_step()
    _synchronize(devices)
    start = time.perf_counter()
    for _ in range(num_steps):
        loss = train_step()
    _synchronize(devices)
    mean = (time.perf_counter() - start) / num_steps
    return {"step_seconds": [mean] * num_steps, "loss": float(loss)}


def _synchronize(devices: list[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
