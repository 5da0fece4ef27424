"""Trains by transformers and torch alone, in one process on one device: the yardstick for the losses of a pipeline run.

    python scripts/plain_training.py --output losses.json [the options of main.py]

The same data in the same order, the same microbatches (but samples of packed rows one by one), fp32 masters, gradients
accumulated in fp32, AdamW, clipping.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.optim import Optimizer  # noqa: E402
from torch.optim.lr_scheduler import LambdaLR  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Trainer,
    get_scheduler,
)

from mobius.config.cli import parse_args  # noqa: E402
from mobius.config.config import Config, OptimConfig  # noqa: E402
from mobius.config.validation import resolve_epochs  # noqa: E402
from mobius.data.batches import Batch, TrainingBatches  # noqa: E402
from mobius.hardware.devices import TORCH_DTYPES  # noqa: E402
from mobius.models.families import softcap_attention_implementation  # noqa: E402
from mobius.training.data import RunData  # noqa: E402


def make_batches(config: Config) -> TrainingBatches:
    """The batches of the run that `config` describes."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.model_path, trust_remote_code=False)
    tokenizer.pad_token_id = tokenizer.pad_token_id or 0
    return RunData.of(config, tokenizer, is_first=True).batches


def load_model(folder: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model of `folder`, with all that its configuration says of attention."""
    attention = softcap_attention_implementation(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, trust_remote_code=False
    )
    return model


def parts_of(batch: Batch, num_chunks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels [b, L] that a model takes at a time: a microbatch, or a sample of a packed row by itself."""
    tokens, labels = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.labels)
    if batch.document_lengths is None:
        yield from zip(tokens.chunk(num_chunks), labels.chunk(num_chunks), strict=True)
        return
    for row, lengths in enumerate(batch.document_lengths):
        ends = accumulate(lengths, initial=0)
        for start, end in pairwise(ends):
            yield tokens[row : row + 1, start:end], labels[row : row + 1, start:end]


def scheduler_of(optim: OptimConfig, optimizer: Optimizer) -> LambdaLR:
    """Transformers' schedule, moved on by one step where its first one, in a warm-up, has a rate of zero."""
    name = optim.lr_scheduler_type.value
    shift = min(1, optim.num_warmup_steps)
    scheduler: LambdaLR = get_scheduler(
        "constant_with_warmup" if name == "constant" else name,
        optimizer,
        num_warmup_steps=optim.num_warmup_steps,
        num_training_steps=optim.num_steps + shift,
        scheduler_specific_kwargs=optim.schedule_arguments,
    )
    for _ in range(shift):
        optimizer.step()  # without gradients it does nothing, but torch warns if the scheduler is the first to step
        scheduler.step()
    return scheduler


class PlainRun(NamedTuple):
    """What a run by transformers and torch leaves."""

    losses: list[float]
    grad_norms: list[float]
    """L2 norm of all gradients of each step, before clipping."""
    before: dict[str, Tensor]
    """Trained parameters by name before the first step, in fp32."""
    after: dict[str, Tensor]
    """The fp32 masters after the last step."""


def train(config: Config, device: torch.device, model: PreTrainedModel | None = None) -> PlainRun:
    """Train the parameters of `model` that require gradients; without one, all of the model of --model_path."""
    batches = make_batches(config)
    if batches.num_steps is not None:
        config = resolve_epochs(config, batches.num_steps)
    model = model or load_model(config.model.model_path, TORCH_DTYPES[config.model.dtype])
    model = model.to(device).eval()
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    masters = {name: torch.nn.Parameter(weight.detach().float().clone()) for name, weight in weights.items()}
    before = {name: master.detach().cpu().clone() for name, master in masters.items()}
    optim = config.optim
    by_trainer = set(Trainer.get_decay_parameter_names(cast(Any, None), model))
    decayed = {name for name, weight in weights.items() if name in by_trainer and weight.ndim >= 2}
    groups = [
        {"params": [masters[name] for name in masters if name in decayed], "weight_decay": optim.weight_decay},
        {"params": [masters[name] for name in masters if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=optim.learning_rate, betas=(optim.adam_beta1, optim.adam_beta2), eps=optim.adam_epsilon
    )
    scheduler = scheduler_of(optim, optimizer)
    losses, norms = [], []
    for _ in range(optim.num_steps):
        batch = next(batches)
        for master in masters.values():
            master.grad = torch.zeros_like(master)
        total = 0.0
        for tokens, labels in parts_of(batch, config.pipeline.num_microbatches):
            given = {"input_ids": tokens.to(device), "labels": labels.to(device)}
            loss = model(**given, num_items_in_batch=batch.num_targets).loss
            loss.backward()
            total += loss.item()
            for name, master in masters.items():
                assert master.grad is not None
                gradient = weights[name].grad
                assert gradient is not None
                master.grad += gradient
                weights[name].grad = None
        limit = optim.max_grad_norm or torch.inf  # the norm is measured in any case
        norms.append(float(torch.nn.utils.clip_grad_norm_(masters.values(), limit)))
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for name, master in masters.items():
                weights[name].copy_(master)
        losses.append(total)
        print(f"step {len(losses)} loss {total:.4f}", flush=True)
    return PlainRun(losses, norms, before, {name: master.detach().cpu() for name, master in masters.items()})


def main() -> None:
    """Train and write the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    arguments, options = parser.parse_known_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arguments.output.write_text(json.dumps(train(parse_args(options), device).losses))


if __name__ == "__main__":
    main()
