"""The files of a model folder beside its weights, kept as they were read so that they can be saved again unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from mobius.errors import CheckpointError
from mobius.models.json_files import read_json_object, told

GENERATION_FILE = "generation_config.json"

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.*.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja", "vocab.json", "vocab.txt"),
    *("merges.txt", "tokenizer.model*", "spiece.model", "sentencepiece.bpe.model", "*.tiktoken", "tekken.json"),
)
"""Everything that a tokenizer of transformers is made from."""


@dataclass(frozen=True)
class BaseFiles:
    """Files of the base for the export, whatever happens to its folder in the meantime; some 20 to 40 MB."""

    config: Mapping[str, Any]
    """config.json as it is."""
    copied: Mapping[str, bytes]
    """Path within the folder -> contents: generation defaults, tokenizer, chat template."""


def read_base_files(folder: Path) -> BaseFiles:
    """Read the files of `folder` that are saved again. Raises CheckpointError for broken generation defaults."""
    paths = [folder / GENERATION_FILE] if (folder / GENERATION_FILE).exists() else []
    for path in paths:
        fields = read_json_object(path, may_repeat=True)
        try:
            GenerationConfig.from_dict(fields).to_json_string()
        except Exception as error:  # transformers raises whatever a value makes it stumble over
            raise CheckpointError(
                f"{path} is refused by transformers: {told(error)}. Mend it, or remove it: the defaults of generation "
                "do not matter for training."
            ) from error
    paths += [path for pattern in _TOKENIZER_FILES for path in sorted(folder.glob(pattern)) if path.is_file()]
    try:
        copied = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}.") from error
    return BaseFiles(read_json_object(folder / "config.json"), copied)
