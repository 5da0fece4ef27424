"""Reads the files of a model folder other than its weights; errors name file and place.

Files that training does not change are held as read and saved again unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig

from mobius.errors import CheckpointError, excerpt, reason_of
from mobius.files.regular_files import read_bytes, read_json
from mobius.models.family_support import supported_text_config

GENERATION_SETTINGS, TOKENIZER_SETTINGS = "generation_config.json", "tokenizer_config.json"
COPIED_FILES = (
    GENERATION_SETTINGS,
    *("tokenizer.json", "tokenizer.*.json", TOKENIZER_SETTINGS, "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja", "vocab.json", "vocab.txt"),
    *("merges.txt", "tokenizer.model*", "spiece.model", "sentencepiece.bpe.model", "*.tiktoken", "tekken.json"),
)
"""Generation defaults, and the files that transformers builds tokenizers from."""
_OLDER_TEMPLATES = ("chat_template.json", "additional_chat_templates/")
"""Further places of chat templates; the folder holds templates for tools and the like."""


@dataclass(frozen=True)
class ModelFiles:
    """Files of the base model for the export, held in memory because the folder may change; some 20 to 40 MB."""

    config: Mapping[str, Any]
    """config.json as read; for the text part of a multimodal model, the text part's configuration."""
    copied: Mapping[str, bytes]
    """Path within the folder -> contents: generation defaults, tokenizer, chat template."""

    def with_chat_template(self, template: str | None) -> ModelFiles:
        """Files in which `template`, if given, is the only chat template, wherever programs read one."""
        if template is None:
            return self
        copied = {name: content for name, content in self.copied.items() if not name.startswith(_OLDER_TEMPLATES)}
        fields = json.loads(copied.get(TOKENIZER_SETTINGS, b"{}"))
        if "chat_template" in fields:  # gguf reads this one first
            copied[TOKENIZER_SETTINGS] = _as_json(fields | {"chat_template": template})
        return replace(self, copied=copied | {"chat_template.jinja": template.encode()})

    def with_end_token(self, token: int, config: PretrainedConfig) -> ModelFiles:
        """Files in which `token` is one of the tokens that end an answer, added as transformers' Trainer does."""
        if token in (ends := self.end_tokens(config)):
            return self
        fields = json.loads(self.copied.get(GENERATION_SETTINGS) or _defaults_of(config).to_json_string())
        fields |= {"eos_token_id": [token, *ends] if ends else token}
        # With this mark transformers would ignore these settings and derive them from config.json again.
        fields.pop("_from_model_config", None)
        return replace(self, copied={**self.copied, GENERATION_SETTINGS: _as_json(fields)})

    def end_tokens(self, config: PretrainedConfig) -> list[int]:
        """Ids of the tokens that end an answer: by generation_config.json, or without it by `config`."""
        content = self.copied.get(GENERATION_SETTINGS)
        settings = _defaults_of(config) if content is None else GenerationConfig.from_dict(json.loads(content))
        given = settings.eos_token_id
        return [token for token in (given if isinstance(given, list) else [given]) if token is not None]


def _defaults_of(config: PretrainedConfig) -> GenerationConfig:
    """Settings with which transformers generates if there is no generation_config.json."""
    return GenerationConfig.from_model_config(config)


def _as_json(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()


def read_model_files(folder: Path) -> ModelFiles:
    """Read the files of `folder` that are saved again. Raises CheckpointError for invalid generation defaults."""
    generation = folder / GENERATION_SETTINGS
    if generation.exists():
        fields = read_json_object(generation)
        try:
            GenerationConfig.from_dict(fields).to_json_string()
        except Exception as error:  # transformers raises arbitrary types for bad values
            raise CheckpointError(
                f"{generation} is refused by transformers: {describe_error(error)}. Correct the file, or remove it: "
                "the defaults of generation do not matter for training."
            ) from error
    copied = read_copied_files(folder)
    fields = read_json_object(folder / "config.json")
    part = supported_text_config(fields)
    return ModelFiles(fields if part is None else part.fields, copied)


def read_copied_files(folder: Path) -> dict[str, bytes]:
    """Path within `folder` -> contents of those files that it has: generation defaults, tokenizer, chat template.

    Raises CheckpointError.
    """
    paths = [path for pattern in COPIED_FILES for path in sorted(folder.glob(pattern)) if path.is_file()]
    try:
        return {path.relative_to(folder).as_posix(): read_bytes(path) for path in paths}
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder} cannot be read: {reason_of(error)}.") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError that names the file for anything else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object but {format_json_value(value)}. Get the file again.")
    return value


def describe_error(error: BaseException) -> str:
    """A library's error as class and message on one line, at most 400 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def format_json_value(value: object) -> str:
    """A value as JSON, truncated if long."""
    return excerpt(json.dumps(value, ensure_ascii=False, default=str))
