"""Chooses the class of transformers that loads a model, also one that has more than text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from mobius.models.peft_folder import TEXT_PREFIX, is_text_prefix
from mobius.models.reward_head import is_reward_model
from mobius.models.weights import EMBEDDING_WEIGHT, LM_HEAD_WEIGHT, text_weight_names

_CLASSES: Final[Mapping[Any, Any]] = {
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForMultimodalLM: MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoModelForSeq2SeqLM: MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
}
"""Automatic class of models that give text -> configurations that it knows."""


def class_of(config: PretrainedConfig, *, is_whole: bool = False) -> Any:
    """Return the automatic class for models of `config`, which give text, or scores if it is a reward model's.

    `is_whole`: with all parts of the model, where transformers also has a class for its text alone.
    """
    if is_reward_model(config):
        return AutoModelForSequenceClassification
    ordered = sorted(_CLASSES, key=lambda kind: kind is AutoModelForCausalLM) if is_whole else [*_CLASSES]
    return next((kind for kind in ordered if type(config) in _CLASSES[kind]), AutoModelForCausalLM)


def text_prefix_of(folder: Path) -> str | None:
    """Prefix of the text's modules in the class that loads all parts of the model in `folder`; None if unknown."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        names = [*class_of(config, is_whole=True).from_config(config, trust_remote_code=False).state_dict()]
    renamed = text_weight_names(names)
    found = next((name for name, own in renamed.items() if own == EMBEDDING_WEIGHT), EMBEDDING_WEIGHT)
    prefix = found.removesuffix(EMBEDDING_WEIGHT.removeprefix(TEXT_PREFIX))
    has_own_head = any(own == LM_HEAD_WEIGHT for own in renamed.values())
    return None if has_own_head or found not in names or not is_text_prefix(prefix) else prefix
