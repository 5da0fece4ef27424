"""Tiny models with adapters of peft, and their parameters by our names."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from harness.pipelines import make_model
from harness.runs import plain_training
from harness.sessions import in_sessions
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from plain_training import parts_of
from torch import Tensor
from transformers import PreTrainedModel

from mobius.config.config import AdapterConfig
from mobius.data.batches import Batch, TrainingBatches
from mobius.data.token_store import TokenizedDataset
from mobius.training.session import Session

ALL = "all-linear"


def adapted(family: str, config: AdapterConfig, *, num_layers: int = 4, **options: Any) -> PeftModel:
    """A model of `family` with adapters as `config` says, whose factors are both random."""
    return adapt_by_peft(make_model(family, num_layers), config, **options)


def adapt_by_peft(model: PreTrainedModel, config: AdapterConfig, **options: Any) -> PeftModel:
    """`model` with adapters as `config` says, whose factors are both random; `options` are peft's own."""
    words = [] if config.lora_target == "none" else config.lora_target.split(",")
    parameters = config.lora_target_parameters
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        rank_pattern={name: int(rank) for name, rank in config.lora_rank_pattern or ()},
        alpha_pattern={name: float(alpha) for name, alpha in config.lora_alpha_pattern or ()},
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        target_modules=ALL if config.lora_target == "all" else words,
        target_parameters=None if parameters is None else parameters.split(","),
        lora_dropout=config.lora_dropout,
        task_type="CAUSAL_LM",
        **options,
    )
    model = get_peft_model(copy.deepcopy(model), settings)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
            elif "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def our_name(name: str) -> str:
    """Name of a parameter of peft's model as it is in ours, and in peft's files but for their prefix."""
    name = re.sub(r"\.base_layer(?!\.lora_)|\.default|\.modules_to_save", "", name)
    name = name.removeprefix("base_model.model.")
    return name.removesuffix(".weight") if "lora_magnitude_vector" in name else name


def parameters_of(model: PeftModel) -> dict[str, Tensor]:
    """Values by our names, copies; a matrix that is trained in full is the trained copy."""
    named = [(name, each) for name, each in model.named_parameters(remove_duplicate=False)]
    return {our_name(name): each.detach().clone() for name, each in named if ".original_module" not in name}


def gradients_of(model: PeftModel) -> dict[str, Tensor]:
    """Gradients of what is trained, by our names."""
    named = [(name, each.grad) for name, each in model.named_parameters()]
    return {our_name(name): gradient for name, gradient in named if gradient is not None}


class GivenValues:
    """A source of parameters that are there."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.values = values

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.values[name]


def give(model: PeftModel, values: dict[str, Tensor]) -> PeftModel:
    """Set the model's parameters, which `values` has by our names."""
    with torch.no_grad():
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if ".original_module" not in name:
                parameter.copy_(values[our_name(name)])
    return model


def train(
    num_ranks: int, folder: Path, options: str, samples: TokenizedDataset
) -> tuple[list[float], dict[str, Tensor], list[Batch]]:
    """Losses of a run in rank-threads, its parameters by name at the end, and its batches."""

    def work(session: Session, batches: TrainingBatches) -> tuple[list[float], dict[str, Tensor], list[Batch]]:
        seen = [
            next(given)
            for given in [iter(copy.deepcopy(batches))]
            for _ in range(session.run_setup.config.optim.num_steps)
        ]
        trainer = session.trainer(batches, has_kernel=False)
        losses = [metrics.loss for metrics in trainer.train()]
        trainer.drain()
        values = {}
        for memory in session.stages.memory.values():
            for state in (memory.weights.state, memory.state):
                values |= {name: view.clone() for name, view in state.layout.views(state.weights).items()}
        return losses, values, seen

    results = in_sessions(num_ranks, folder, options, samples, work)
    return results[0][0], {name: value for _, values, _ in results for name, value in values.items()}, results[0][2]


def train_by_peft(
    model: PeftModel, batches: list[Batch], *, num_microbatches: int = 3, ratio: float | None = None
) -> list[float]:
    """Losses of the same steps by torch's own AdamW and clipping; with `ratio`, by peft's optimizer for LoRA+."""
    steps = [[*parts_of(batch, num_microbatches)] for batch in batches]
    settings: dict[str, Any] = {"lr": 2e-3, "loraplus_lr_ratio": ratio, "loraplus_weight_decay": 0.1}
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, **settings) if ratio else None
    return plain_training(model, steps, learning_rate=2e-3, decay=0.1, clip=0.2, optimizer=optimizer)
