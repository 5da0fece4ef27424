"""Steps of learning_after_sft.py that use a model: train by Mobius, TRL or peft, and sample.

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
    """Return the tokenizer, which pads on the left, and the model in fp32, on the GPU if there is one.

    The folder of a prompt is that of a model with this prompt.
    """
    file = Path(folder, "adapter_config.json")
    base = json.loads(file.read_text())["base_model_name_or_path"] if file.exists() else folder
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left", trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
    if base != folder:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder, trust_remote_code=False)
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


def train_by_peft(words: Sequence[str]) -> list[float]:
    """Train a prompt by peft in the steps of the run of Mobius by `words`: the same samples in the same order.

    Returns the loss of each step.
    """
    from peft import PromptEncoderConfig, PromptTuningConfig, TaskType, get_peft_model

    from mobius.config.cli import parse_args
    from mobius.config.config import FinetuningType
    from mobius.training.data import RunData

    config = parse_args(words, num_ranks=1)
    adapters, optim, losses = config.adapters, config.optim, list[float]()
    tokenizer, model = load(config.model.model_path)
    torch.manual_seed(optim.seed)
    count = adapters.num_virtual_tokens
    common: dict[str, Any] = {"task_type": TaskType.CAUSAL_LM, "num_virtual_tokens": count}
    settings: Any = PromptTuningConfig(**common)
    if adapters.finetuning_type is FinetuningType.P_TUNING:
        settings = PromptEncoderConfig(**common, encoder_hidden_size=adapters.encoder_hidden_size)
    prompted = get_peft_model(model, settings)
    trained = [each for each in prompted.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=optim.learning_rate,
        betas=(optim.adam_beta1, optim.adam_beta2),
        eps=optim.adam_epsilon,
        weight_decay=optim.weight_decay,
    )
    for batch in RunData.of(config, tokenizer, is_first=True).batches:
        assert batch.row_lengths is not None, "one sample in each row, behind the places of the prompt"
        ids, labels = (torch.from_numpy(each[:, count:]).to(model.device) for each in (batch.input_ids, batch.labels))
        lengths = torch.tensor(batch.row_lengths, device=model.device)[:, None] - count
        mask = (torch.arange(ids.shape[1], device=model.device) < lengths).long()
        loss = prompted(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    prompted.save_pretrained(config.output.save_dir)
    return losses


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
