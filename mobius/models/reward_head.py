"""Reward models: a base model with a head `score` of one number per token, which transformers reads at the last token.

The class is the family's `...ForSequenceClassification` with one label. A run makes it of a causal language model: the
matrix `score.weight` [1, H] is new, and the language model's head is left out.
"""

from __future__ import annotations

from typing import Final

import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from mobius.config.config import Config
from mobius.config.objective import ObjectiveName
from mobius.errors import CheckpointError

SCORE: Final = "score"
"""Name of the head."""
SCORE_WEIGHT: Final = f"{SCORE}.weight"


def is_reward_model(config: PretrainedConfig) -> bool:
    """Whether a configuration is that of a model with labels in place of a vocabulary."""
    named = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    return named is not None and config.architectures == [named]


def gives_scores(model: PreTrainedModel) -> bool:
    """Whether a model's head is `score`, which reads the hidden states of the norm as they are."""
    return isinstance(model, GenericForSequenceClassification)


def set_head(config: PretrainedConfig, run: Config, *, pad_token_id: int | None = None) -> PretrainedConfig:
    """Return the model's configuration, changed to a reward model's if this is the objective of the `run`.

    Raises CheckpointError if the model has another head than the run needs: a reward model for another objective, or a
    classifier with several labels. Also for a family without such models.
    """
    model_path = run.model.model_path
    if run.objective.objective is not ObjectiveName.REWARD:
        if is_reward_model(config):
            raise CheckpointError(
                f"--model_path {model_path} is a reward model: it has no head that predicts tokens. Train it with "
                "--objective reward, or give a causal language model."
            )
        return config
    if is_reward_model(config) and config.num_labels != 1:
        raise CheckpointError(
            f"--model_path {model_path} is a classifier with {config.num_labels} labels (id2label); a reward model has "
            "one. Give a causal language model, or a reward model."
        )
    return as_reward_model(config, pad_token_id=pad_token_id)


def as_reward_model(config: PretrainedConfig, *, pad_token_id: int | None) -> PretrainedConfig:
    """Return the configuration, changed to that of the family's reward model.

    transformers reads the score at the last token that is not `pad_token_id`. Raises CheckpointError for a family
    without such models.
    """
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type, "")
    if not issubclass(getattr(transformers, name, object), GenericForSequenceClassification):
        raise CheckpointError(
            f"--objective reward: transformers has no reward model of the family {config.model_type!r} "
            "(AutoModelForSequenceClassification with a head `score`). Use a model of another family, such as llama, "
            "qwen2 or qwen3."
        )
    config.architectures, config.num_labels, config.tie_word_embeddings = [name], 1, False
    config.pad_token_id = pad_token_id
    return config
