"""Reads the files of a model folder except weights; errors name the file and the place in it.

Files that training does not change stay in memory and are saved again unchanged.
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
from mobius.models.quantized_folder import without_quantization

GENERATION_SETTINGS, TOKENIZER_SETTINGS = "generation_config.json", "tokenizer_config.json"
COPIED_FILES = (
    GENERATION_SETTINGS,
    *("tokenizer.json", "tokenizer.*.json", TOKENIZER_SETTINGS, "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja", "vocab.json", "vocab.txt"),
    *("merges.txt", "tokenizer.model*", "spiece.model", "sentencepiece.bpe.model", "*.tiktoken", "tekken.json"),
)
"""Names or patterns of the files for generation defaults and tokenizers."""
_OLDER_TEMPLATES = ("chat_template.json", "additional_chat_templates/")
"""Other places of chat templates: a file, and a folder with templates for tools and other purposes."""


@dataclass(frozen=True)
class ModelFiles:
    """Files of the base model for the export, 20 to 40 MB. They are in memory because the folder may change."""

    config: Mapping[str, Any]
    """config.json as read, without the format of quantized weights; for the text part of a multimodal model, the text
    part's configuration."""
    copied: Mapping[str, bytes]
    """Path within the folder -> contents: generation defaults, tokenizer, chat template."""

    def with_chat_template(self, template: str | None) -> ModelFiles:
        """Return files in which `template` is the only chat template, in every place where programs read it."""
        if template is None:
            return self
        copied = {name: content for name, content in self.copied.items() if not name.startswith(_OLDER_TEMPLATES)}
        fields = json.loads(copied.get(TOKENIZER_SETTINGS, b"{}"))
        if "chat_template" in fields:  # gguf reads this field first, so replace it, too
            copied[TOKENIZER_SETTINGS] = _as_json(fields | {"chat_template": template})
        return replace(self, copied=copied | {"chat_template.jinja": template.encode()})

    def with_end_token(self, token: int, config: PretrainedConfig) -> ModelFiles:
        """Return files in which `token` ends an answer, added to the other end tokens as transformers' Trainer does."""
        if token in (ends := self.end_tokens(config)):
            return self
        fields = json.loads(self.copied.get(GENERATION_SETTINGS) or _defaults_of(config).to_json_string())
        fields |= {"eos_token_id": [token, *ends] if ends else token}
        # With this field, transformers would ignore these settings and derive new ones from config.json.
        fields.pop("_from_model_config", None)
        return replace(self, copied={**self.copied, GENERATION_SETTINGS: _as_json(fields)})

    def end_tokens(self, config: PretrainedConfig) -> list[int]:
        """Ids of the tokens that end an answer, from generation_config.json, or without this file from `config`."""
        content = self.copied.get(GENERATION_SETTINGS)
        settings = _defaults_of(config) if content is None else GenerationConfig.from_dict(json.loads(content))
        given = settings.eos_token_id
        return [token for token in (given if isinstance(given, list) else [given]) if token is not None]


def _defaults_of(config: PretrainedConfig) -> GenerationConfig:
    """Settings that transformers uses for generation if there is no generation_config.json."""
    return GenerationConfig.from_model_config(config)


def _as_json(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()


def read_model_files(folder: Path) -> ModelFiles:
    """Read the files of `folder` that an export saves. Raises CheckpointError for invalid generation defaults."""
    generation = folder / GENERATION_SETTINGS
    if generation.exists():
        fields = read_json_object(generation)
        try:
            GenerationConfig.from_dict(fields).to_json_string()
        except Exception as error:  # transformers raises arbitrary types for bad values
            raise CheckpointError(
                f"{generation} is refused by transformers: {describe_error(error)}. Correct the file, or remove it: "
                "training does not need the defaults of generation."
            ) from error
    copied = read_copied_files(folder)
    fields = without_quantization(read_json_object(folder / "config.json"))
    part = supported_text_config(fields)
    return ModelFiles(fields if part is None else part.fields, copied)


def read_copied_files(folder: Path) -> dict[str, bytes]:
    """Read generation defaults, tokenizer and chat template if `folder` has them: path within `folder` -> contents.

    Raises CheckpointError.
    """
    paths = [path for pattern in COPIED_FILES for path in sorted(folder.glob(pattern)) if path.is_file()]
    try:
        return {path.relative_to(folder).as_posix(): read_bytes(path) for path in paths}
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder} cannot be read: {reason_of(error)}.") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`. For any other content, raises a CheckpointError that names the file."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {format_json_value(value)}. Get the file again.")
    return value


def describe_error(error: BaseException) -> str:
    """Format a library's error as class and message on one line, at most 400 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def format_json_value(value: object) -> str:
    """Format a value as JSON, truncated if long."""
    return excerpt(json.dumps(value, ensure_ascii=False, default=str))
