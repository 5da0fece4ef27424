"""Trains by transformers' Trainer, in one process: the yardstick for what a run of the pipeline makes of the same data.

    pip install accelerate
    python scripts/trainer_training.py output/trainer -- [options of main.py]

Each step gets the samples that the pipeline's step has, as rows of their own, filled up to the longest of them. The
folder gets the model in fp32 and `losses.json`.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if importlib.util.find_spec("mobius") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from plain_training import load_model, make_batches, parts_of, scheduler_of
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset
from transformers import AutoTokenizer, Trainer, TrainingArguments

from mobius.config.cli import parse_args
from mobius.config.config import Config, OptimConfig
from mobius.config.validation import resolve_epochs
from mobius.data.batches import IGNORE_INDEX, TrainingBatches


class StepsOfSamples(IterableDataset[dict[str, Tensor]]):
    """Tokens and labels [n, L] of the n samples of each step, those of the pipeline's batches."""

    def __init__(self, batches: TrainingBatches, num_steps: int) -> None:
        self._batches, self._num_steps = batches, num_steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for _ in range(self._num_steps):
            batch = next(self._batches)
            samples = [(tokens[0], labels[0]) for tokens, labels in parts_of(batch, len(batch.input_ids))]
            yield {
                "input_ids": pad_sequence([tokens for tokens, _ in samples], batch_first=True),
                "labels": pad_sequence([own for _, own in samples], batch_first=True, padding_value=IGNORE_INDEX),
            }


class _Trainer(Trainer):
    """The Trainer with the pipeline's learning rates, which begin one step later in transformers' curve."""

    def __init__(self, optim: OptimConfig, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._optim = optim

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LambdaLR:
        self.lr_scheduler = scheduler_of(self._optim, optimizer or self.optimizer)
        return self.lr_scheduler


def train(config: Config, output: Path) -> list[float]:
    """Train, write the model to `output` and return the loss of every step."""
    batches = make_batches(config)
    if batches.num_steps is not None:
        config = resolve_epochs(config, batches.num_steps)
    source, optim = config.model.model_path, config.optim
    trainer = _Trainer(
        optim,
        load_model(source, torch.float32),
        TrainingArguments(
            str(output),
            per_device_train_batch_size=1,  # what the dataset gives is a step's batch
            max_steps=optim.num_steps,
            learning_rate=optim.learning_rate,
            adam_beta1=optim.adam_beta1,
            adam_beta2=optim.adam_beta2,
            adam_epsilon=optim.adam_epsilon,
            weight_decay=optim.weight_decay,
            max_grad_norm=optim.max_grad_norm,
            dataloader_pin_memory=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            seed=optim.seed,
        ),
        train_dataset=StepsOfSamples(batches, optim.num_steps),
        data_collator=lambda batches: batches[0],
    )
    trainer.train()
    trainer.save_model(str(output))
    AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(output)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    """Train, and write the losses beside the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the model that is left")
    parser.add_argument("options", nargs="*", help="options of main.py, behind --")
    given = parser.parse_args()
    losses = train(parse_args(given.options), given.folder)
    (given.folder / "losses.json").write_text(json.dumps(losses), encoding="utf-8")


if __name__ == "__main__":
    main()
