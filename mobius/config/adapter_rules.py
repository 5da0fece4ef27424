"""Owns which options about adapters and frozen parts go together."""

from collections.abc import Iterator
from dataclasses import fields

from mobius.config.adapters import AdapterConfig
from mobius.config.config import Config
from mobius.excerpt import excerpt

_OF_LORA = tuple(field.name for field in fields(AdapterConfig) if field.name not in ("finetuning_type", "freeze"))


def find_adapter_conflicts(config: Config) -> Iterator[tuple[str, str]]:
    """Names of options that do not go together, and a line that says so."""
    adapters, usual = config.adapters, AdapterConfig()
    if adapters.lora_dropout:
        yield (
            "lora_dropout",
            f"`--lora_dropout` {adapters.lora_dropout:g} is not available: backward computes layers again and would "
            "draw other numbers; leave it out, or give 0",
        )
    if not adapters.is_lora:
        given = [
            name for name in _OF_LORA if name != "lora_dropout" and getattr(adapters, name) != getattr(usual, name)
        ]
        for name in given:
            told = "is for adapters, and all of the model is trained; add --use_lora, or remove it"
            yield f"{name} finetuning_type", f"`--{name}` {told}"
        return
    if adapters.freeze is not None:
        told = "is for training without adapters; beside them all is frozen but --additional_target. Remove it"
        yield "freeze finetuning_type", f"`--freeze` {excerpt(adapters.freeze)} {told}"
    if config.evaluation.do_train and config.evaluation.predicts and not adapters.merge:
        name = "do_predict" if config.evaluation.do_predict else "predict_with_generate"
        yield f"{name} merge", f"`--{name}` answers by a whole model, which adapters are none of; add --merge"
    if not config.evaluation.do_train:
        told = (
            "trains adapters, which `--no_do_train` does not; remove one of them, and merge an adapter to evaluate it"
        )
        yield "finetuning_type do_train", f"`--finetuning_type lora` {told} (scripts/merge_adapter.py)"
    if config.pipeline.fp32_gradients:
        told = "has no effect with adapters, whose gradients are always handed over in fp32; remove it"
        yield "fp32_gradients finetuning_type", f"`--fp32_gradients` {told}"
