"""Losses of LLaMA-Factory or TRL from one file of theirs: `make`, then `tool`.

    python tests/harness/other_trainers.py make FOLDER
    python tests/harness/other_trainers.py tool trl FOLDER              # in an environment with the tool
    python tests/harness/other_trainers.py tool llamafactory FOLDER     # under torchrun --nproc_per_node 1

A tiny Llama in fp32 on a CPU takes 20 steps of the whole data each, so that their order does not matter. `tool` writes
FOLDER/TOOL.losses.json; tests/pipeline/other_trainers.json has those that tests compare with.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 20
NUM_PARTS = 2
QUESTIONS = ("How tall is a giraffe?", "Name a river.", "What is two plus three?", "Which colour has grass?")
ANSWERS = ("Five metres, more or less.", "The Rhine.", "Five.", "Green, in spring.")
PLAIN = {
    "learning_rate": 1e-3,
    "max_steps": NUM_STEPS,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": NUM_PARTS,
    "logging_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
}
FILES: dict[str, dict[str, Any]] = {
    "llamafactory": {
        "model_name_or_path": "model",
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "talks",
        "dataset_dir": "data",
        "template": "mistral",
        "cutoff_len": 48,
        "output_dir": "llamafactory_out",
        "overwrite_output_dir": True,
        "lr_scheduler_type": "cosine",
        **PLAIN,
    },
    "trl": {
        "model_name_or_path": "model",
        "dataset_name": "pairs",
        "max_length": 32,
        "output_dir": "trl_out",
        "weight_decay": 0.1,
        **PLAIN,
    },
}
"""Files by tool; keys that are left out have the tool's defaults."""


def make_model(folder: Path) -> None:
    """Write a model of random weights, the same everywhere, with the quickstart tokenizer."""
    from safetensors.numpy import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=4096, num_hidden_layers=2, bos_token_id=1, eos_token_id=2, **sizes)
    config.architectures, config.dtype = ["LlamaForCausalLM"], "float32"
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    generator = np.random.default_rng(7)
    tensors = {
        name: (1 + generator.normal(0, 0.1, value.shape) if value.ndim == 1 else generator.normal(0, 0.1, value.shape))
        for name, value in sorted(LlamaForCausalLM(config).state_dict().items())
    }
    weights = {name: value.astype(np.float32) for name, value in tensors.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((ROOT / "assets" / "tiny-llama" / name).read_bytes())


def make(folder: Path) -> None:
    """Write a model of random weights, eight records in two forms, and the files."""
    make_model(folder / "model")
    contexts = ("", "Say it in one word.")
    rows = [
        (question, context, answer) for context in contexts for question, answer in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    talks = [{"instruction": question, "input": context, "output": answer} for question, context, answer in rows]
    pairs = [{"prompt": f"{context} {question}\n", "completion": answer} for question, context, answer in rows]
    for place, lines in (("data/talks.jsonl", talks), ("pairs/train.jsonl", pairs)):
        (folder / place).parent.mkdir()
        (folder / place).write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    info = {"talks": {"file_name": "talks.jsonl"}}
    (folder / "data" / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    for tool, keys in FILES.items():
        (folder / f"{tool}.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))


def run_tool(tool: str, folder: Path) -> None:
    """Train by the tool itself, and write the loss of every step: the sum over its accumulated parts."""
    from transformers import Trainer

    losses, step = list[float](), Trainer.training_step

    def recorded(self: Any, *arguments: Any, **options: Any) -> Any:
        loss = step(self, *arguments, **options)
        losses.append(float(loss))
        return loss

    Trainer.training_step = recorded
    os.chdir(folder)
    if tool == "trl":
        script: Any = importlib.import_module("trl.scripts.sft")
        sys.argv = ["sft", "--config", "trl.yaml"]
        script.main(*script.make_parser().parse_args_and_config(fail_with_unknown_args=False))
    else:
        settings: Any = importlib.import_module("omegaconf").OmegaConf
        keys = settings.to_container(settings.load("llamafactory.yaml"))
        importlib.import_module("llamafactory.train.tuner").run_exp(keys)
    sums = [sum(losses[first : first + NUM_PARTS]) for first in range(0, len(losses), NUM_PARTS)]
    versions = {name: importlib.metadata.version(name) for name in (tool, "transformers", "torch")}
    result = {"versions": versions, "losses": sums}
    Path(f"{tool}.losses.json").write_text(f"{json.dumps(result, indent=1)}\n", encoding="utf-8")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make", folder]:
            make(Path(folder))
        case ["tool", tool, folder]:
            run_tool(tool, Path(folder))
        case _:
            sys.exit(__doc__)
