"""Owns README.md of a saved model: its base, its training data, options and results.

The card holds only options and numbers. It shows only the last part of a path on this machine, and nothing about the
environment.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePath
from typing import Final

import yaml

import mobius
from mobius.config.config import ADAPTER_OPTIONS, Config
from mobius.config.objective import ObjectiveName
from mobius.config.validation import options_without_effect
from mobius.models.adapter_kinds import KINDS
from mobius.reporting.trainer_state import TrainerState

_HUB_ID: Final = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_PICTURE: Final = "![Loss, gradient norm, learning rate and tokens/s of every step](training_loss.png)"
_PACKAGES: Final = ("torch", "transformers", "datasets", "safetensors")
_MAX_EVALUATIONS: Final = 20
"""Maximum number of rows of the table of evaluations."""
_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "model": ("num_layers", "dtype"),
    "data": ("seq_length", "packing", "max_samples", "train_on_prompt", "mask_history"),
    "pipeline": ("batch_size",),
    "adapters": (
        *("finetuning_type", *ADAPTER_OPTIONS, "loraplus_lr_ratio"),
        *("num_virtual_tokens", "prompt_init_text", "encoder_type", "encoder_hidden_size", "freeze"),
    ),
    "optim": (
        *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay"),
        *("adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "seed"),
    ),
}
"""Section -> options that the result depends on."""


@dataclass(frozen=True)
class Origin:
    """Origin of the weights before the first step of a run, even if the run was resumed."""

    model_path: str
    """--model_path as the user gave it."""
    is_pretrained: bool | None
    """Whether this model had weights; None if the checkpoint does not say."""

    @classmethod
    def from_json(cls, value: object, *, model_path: str) -> Origin:
        """Origin from its `asdict` form; for any other value, an unknown origin with `model_path`."""
        if (
            isinstance(value, dict)
            and type(value.get("is_pretrained")) is bool
            and type(value.get("model_path")) is str
        ):
            return cls(value["model_path"], value["is_pretrained"])
        return cls(model_path, None)


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """Facts of a finished training run that a card shows."""

    config: Config
    """Options, with numbers in place of auto."""
    origin: Origin
    is_changed: bool = True
    """Whether training changed any parameter."""
    num_parameters: int
    num_trained: int
    num_active: int
    """Number of parameters that a token uses: all parameters except those in unselected experts."""
    first_loss: float
    last_loss: float
    state: TrainerState
    others: str | None = None
    """Fate of the base's tensors that are no part of the text; None without such tensors."""
    evaluation: Mapping[str, object]
    """Numbers of the last evaluation by name; empty without an evaluation."""
    has_picture: bool = True
    """Whether training_loss.png is in the card's folder."""


def model_card(facts: CardFacts) -> str:
    """Card as Markdown, with the front matter that the Hugging Face Hub reads."""
    config, state, optim = facts.config, facts.state, facts.config.optim
    adapters = config.adapters
    origin, entries = facts.origin, config.data.dataset
    base = origin.model_path
    library = "peft" if adapters.has_frozen_base else "transformers"
    task = "text-classification" if config.objective.objective is ObjectiveName.REWARD else "text-generation"
    head: dict[str, object] = {"library_name": library, "pipeline_tag": task, "tags": ["mobius"]}
    if _is_on_hub(base) and origin.is_pretrained:
        head["base_model"] = base
    if hub := [entry.name for entry in entries if _is_on_hub(entry.name)]:
        head["datasets"] = hub
    results = {
        "parameters": f"{facts.num_parameters:,}",
        "trained parameters": f"{facts.num_trained:,}",
        **({"active for a token": f"{facts.num_active:,}"} if facts.num_active != facts.num_parameters else {}),
        **({} if facts.others is None else {"other tensors of the base": facts.others}),
        "steps": f"{state.global_step:,}",
        "epochs": f"{state.epoch:.3f}",
        "tokens without padding": f"{state.num_input_tokens_seen:,}",
        "loss, first step": f"{facts.first_loss:.4f}",
        "loss, last step": f"{facts.last_loss:.4f}",
    }
    judged = [*(config.data.eval_dataset or ()), *entries]
    rows = [*results.items(), *_evaluation_rows(facts.evaluation, [entry.name for entry in judged])]
    idle = options_without_effect(config)
    options = {name: getattr(getattr(config, section), name) for section, names in _OPTIONS.items() for name in names}
    options = {name: value for name, value in options.items() if name not in idle}
    for name in (name for name, value in options.items() if isinstance(value, tuple)):
        options[name] = ", ".join(map("=".join, options[name]))
    options |= {"num_iterations": optim.num_steps, "num_train_epochs": optim.num_train_epochs}
    versions = {"mobius": mobius.__version__, **{name: metadata.version(name) for name in _PACKAGES}}
    trained = "A part of the parameters fine-tuned from" if adapters.freeze else "All parameters fine-tuned from"
    kind = "The weights of"
    if adapters.has_frozen_base:
        trained = kind = KINDS[adapters.finetuning_type].title
    if origin.is_pretrained is False:
        trained, kind = "Trained from fresh weights in the shape of", "Fresh weights in the shape of"
    elif origin.is_pretrained is None:  # a checkpoint of an older version stores the name alone
        trained, kind = "Trained in the shape of", "Weights in the shape of"
    data = ", ".join(_shown(entry.name) + (f" x {entry.weight:g}" if entry.weight != 1 else "") for entry in entries)
    made = f"{trained} {_shown(base)} on {data}, with Mobius."
    if not facts.is_changed:
        steps = "one step" if state.global_step == 1 else f"{state.global_step:,} steps"
        made = f"{kind} {_shown(base)} as they were: {steps} on {data} changed no parameter."
    return "\n\n".join(
        (
            f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---",
            f"# {_plain(config.output.name)}",
            f"{made} Every step is in `metrics.jsonl`.",
            *([_PICTURE] if facts.has_picture else []),
            _table("result", rows),
            *_evaluations(state),
            _table("option", [(name, value) for name, value in options.items() if value is not None]),
            _table("version", versions.items()),
        )
    )


def _is_on_hub(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def _table(title: str, rows: Iterable[tuple[str, object]]) -> str:
    return "\n".join((f"| {title} | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows))) + "\n"


def _evaluations(state: TrainerState) -> Iterator[str]:
    """Yield a table if there were several evaluations; if too many, with evenly spaced ones up to the last."""
    every = list(state.evaluations())
    chosen = every[:: -(-len(every) // _MAX_EVALUATIONS) or 1][::-1]
    columns = {"eval_loss": "loss", "eval_perplexity": "perplexity", "eval_token_accuracy": "token accuracy"}
    if len(chosen) > 1:
        rows = [[entry["step"], *(f"{float(entry.get(name, math.nan)):.4f}" for name in columns)] for entry in chosen]
        lines = [["evaluation after step", *columns.values()], ["---"] * (1 + len(columns)), *rows]
        yield "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def _evaluation_rows(evaluation: Mapping[str, object], datasets: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Numbers of an evaluation by name; a dataset has the same name as elsewhere in the card."""
    longest_first = sorted(datasets, key=len, reverse=True)
    for name, value in evaluation.items():
        if isinstance(value, float):
            of_dataset = next((each for each in longest_first if name.startswith(f"eval_{each}")), "")
            yield _plain(name.replace(of_dataset, _public(of_dataset), 1)), f"{value:.4f}"


def _shown(name: str) -> str:
    """Name of a model or dataset, formatted as code."""
    return f"`{_plain(_public(name))}`"


def _public(name: str) -> str:
    """Name, or only the last part of a path that is absolute, starts with ~ or contains `..`."""
    path = PurePath(name)
    return path.name if path.is_absolute() or name.startswith("~") or ".." in path.parts else name


def _plain(text: str) -> str:
    """Return one line of text that cannot end a code span or open a tag."""
    return " ".join(re.sub(r"[`<>|\x00-\x1f\x7f]", " ", text).split())
