"""Chooses the class of transformers that loads a model, also one that has more than text."""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

from mobius.models.reward_head import is_reward_model


def class_of(config: PretrainedConfig, *, is_whole: bool = False) -> Any:
    """Return the automatic class for models of `config`, which give text, or scores if it is a reward model's.

    `is_whole`: with all parts of the model, where transformers also has a class for its text alone.
    """
    if is_reward_model(config):
        return AutoModelForSequenceClassification
    kinds = {
        AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoModelForMultimodalLM: MODEL_FOR_MULTIMODAL_LM_MAPPING,
    }
    ordered = [*kinds][::-1] if is_whole else [*kinds]
    return next((kind for kind in ordered if type(config) in kinds[kind]), AutoModelForCausalLM)
