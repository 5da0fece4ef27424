"""Steps of learning_after_sft.py that use a model: train by Mobius or TRL, and sample.

Each runs in a process of its own, so no GPU memory stays in use; arguments and results are JSON.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mobius.__main__ import main as run_mobius

AT_ONCE = 256
"""Sequences that are generated together."""
NUM_TOKENS = 16
"""Most tokens of an answer."""


def train(words: Sequence[str]) -> list[float]:
    """Train by a command line of Mobius; returns the loss of each step."""
    has_gpu = torch.cuda.is_available()
    sys.argv = ["main.py", *words, "--compile", "off", *(["--resident_stages", "all"] if has_gpu else [])]
    run_mobius()
    file = Path(words[list(words).index("--save_dir") + 1]) / "metrics.jsonl"
    return [json.loads(line)["loss"] for line in file.read_text(encoding="utf-8").splitlines()]


def load(folder: str) -> tuple[Any, Any]:
    """Return the tokenizer, which pads on the left, and the model in fp32, on the GPU if there is one."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    return tokenizer, model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


@torch.no_grad()
def complete(tokenizer: Any, model: Any, prompts: Sequence[str], seed: int | None) -> list[dict[str, Any]]:
    """Return a completion of each prompt, as `--objective policy` reads it, and its text; seed None: the likeliest."""
    made, end = list[dict[str, Any]](), tokenizer.eos_token_id
    torch.manual_seed(seed or 0)
    for start in range(0, len(prompts), AT_ONCE):
        given = tokenizer(list(prompts[start : start + AT_ONCE]), return_tensors="pt", padding=True).to(model.device)
        output = model.generate(
            **given,
            max_new_tokens=NUM_TOKENS,
            pad_token_id=tokenizer.pad_token_id,
            output_logits=True,
            return_dict_in_generate=True,
            **({"do_sample": False} if seed is None else {"do_sample": True, "top_k": 0}),
        )
        tokens = output.sequences[:, given.input_ids.shape[1] :]
        logps = torch.stack(output.logits, 1).float().log_softmax(-1).gather(2, tokens[:, :, None])[:, :, 0]
        for row, ids in enumerate(tokens.tolist()):
            length, prompt = ids.index(end) + 1 if end in ids else len(ids), given.input_ids[row]
            rollout = {"prompt_ids": prompt[given.attention_mask[row] == 1].tolist(), "completion_ids": ids[:length]}
            text = tokenizer.decode(ids[:length], skip_special_tokens=True)
            made.append({**rollout, "logprobs": logps[row, :length].tolist(), "text": text})
    return made


def answer(folder: str, asked: Sequence[tuple[Sequence[str], int | None]]) -> list[list[dict[str, Any]]]:
    """Return the completions of each list of prompts with its seed."""
    model = load(folder)
    return [complete(*model, prompts, seed) for prompts, seed in asked]


def train_by_trl(words: Sequence[str]) -> list[float]:
    """Train by TRL in the steps of the run of Mobius by `words`: the same pairs in the same order; returns losses."""
    from datasets import Dataset  # type: ignore[import-not-found, unused-ignore]
    from torch.utils.data import DataLoader
    from trl import DPOConfig, DPOTrainer  # type: ignore[import-not-found, unused-ignore]

    from mobius.config.cli import parse_args
    from mobius.training.data import RunData

    class InOrder(DPOTrainer):  # type: ignore[misc, valid-type, unused-ignore]
        """The trainer on these steps."""

        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_sampler=steps, collate_fn=self.data_collator)

    config = parse_args(words, num_ranks=1)
    tokenizer, model = load(config.model.model_path)
    numbers = [batch.sequence_numbers for batch in RunData.of(config, tokenizer, is_first=True).batches]
    steps = [[int(number) // 2 for number in each[each >= 0][::2]] for each in numbers if each is not None]
    pairs = [json.loads(line) for line in Path(config.data.dataset[0].name).read_text(encoding="utf-8").splitlines()]
    settings = DPOConfig(
        output_dir=config.output.save_dir,
        max_steps=len(steps),
        per_device_train_batch_size=len(steps[0]),
        max_length=config.data.seq_length // 2,
        learning_rate=config.optim.learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        precompute_ref_log_probs=True,
        gradient_checkpointing=False,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = InOrder(model, args=settings, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]
