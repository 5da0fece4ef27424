"""A peer for objective_rows.py: TRL's DPOTrainer on one GPU, on a model with random weights.

    python benchmarks/peers/trl_dpo.py FOLDER PAIRS.jsonl --batch_size 16 --microbatch 2 --seq_length 1024 --dtype bf16

The settings are TRL's own (bf16 products, recomputed layers), with log-probabilities of the reference before step 1 and
the fused AdamW. In fp32 the weights are masters; in bf16 weights and moments are bf16, and small updates are rounded
away. Prints one line of JSON: the median seconds of a step without the first ones, the largest GPU memory in GiB, and
the seconds of the reference pass.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-not-found, unused-ignore]
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer  # type: ignore[import-not-found, unused-ignore]

SKIPPED = 2
"""Steps at the start that the median leaves out."""


class Clock(TrainerCallback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds = list[float]()
        self._start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the step's time."""
        torch.cuda.synchronize()
        self._start = time.monotonic()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop it."""
        torch.cuda.synchronize()
        self.seconds.append(time.monotonic() - self._start)


def parse() -> argparse.Namespace:
    """Options of one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--batch_size", type=int, default=16, help="pairs of a step")
    parser.add_argument("--microbatch", type=int, default=2, help="pairs that are computed together")
    parser.add_argument("--seq_length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--gpu_memory_limit", type=float)
    return parser.parse_args()


def main() -> None:
    """Train, and print the numbers."""
    arguments = parse()
    if arguments.gpu_memory_limit:
        share = arguments.gpu_memory_limit * 2**30 / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(share)
    torch.manual_seed(1)
    pairs = [json.loads(line) for line in arguments.pairs.read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder, trust_remote_code=False)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    dtype = torch.float32 if arguments.dtype == "fp32" else torch.bfloat16
    config = AutoConfig.from_pretrained(arguments.folder, trust_remote_code=False)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    settings = DPOConfig(
        output_dir=str(arguments.pairs.parent / "trl"),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.microbatch,
        per_device_eval_batch_size=arguments.microbatch,
        gradient_accumulation_steps=arguments.batch_size // arguments.microbatch,
        max_length=arguments.seq_length,
        optim="adamw_torch_fused",
        precompute_ref_log_probs=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    clock, start = Clock(), time.monotonic()
    trainer = DPOTrainer(
        model,
        args=settings,
        train_dataset=Dataset.from_list(pairs[: arguments.batch_size * arguments.steps]),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    torch.cuda.synchronize()
    before = time.monotonic() - start
    trainer.train()
    result = {
        "step_seconds": statistics.median(clock.seconds[SKIPPED:]),
        "gpu_gib": torch.cuda.max_memory_reserved() / 2**30,
        "before_step_1_seconds": before,
        "first_loss": next(log["loss"] for log in trainer.state.log_history if "loss" in log),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
