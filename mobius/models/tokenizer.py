"""Loads the tokenizer of a model folder; errors name the broken file."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mobius.errors import CheckpointError, first_line
from mobius.models.model_files import describe_error, format_json_value, read_json_object

_SETTINGS, _BACKEND = "tokenizer_config.json", "tokenizer.json"
_TEXT = "A text."


def load_tokenizer(folder: Path, vocab_size: int) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `folder` and test it on a short text. Custom code in the folder is not run.

    Raises CheckpointError for a broken tokenizer, or one with more tokens than the model's `vocab_size`.
    """
    _check_settings(folder / _SETTINGS)
    try:
        tokenizer = cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
        num_ids = max([len(tokenizer), *(token + 1 for token in tokenizer.added_tokens_decoder)])
        tokenizer(_TEXT)
        pad_token_id(tokenizer)
    except Exception as error:  # the Rust library raises plain Exception for a broken file
        raise CheckpointError(f"--model_path: {_reason(folder, error)}") from error
    if num_ids > vocab_size:
        raise CheckpointError(
            f"--model_path: the tokenizer of {folder} has {num_ids} tokens, the model only {vocab_size} (vocab_size)."
        )
    return tokenizer


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Id of a padding token; any id works, because padding is masked by length."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(int(token) for token in candidates if token is not None)


def _check_settings(path: Path) -> None:
    """Refuse custom code, for which transformers would prompt on the terminal."""
    if not path.is_file():
        return
    fields = read_json_object(path)
    auto_map = fields.get("auto_map")
    code = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
    if code is not None:
        raise CheckpointError(
            f"--model_path: {path} names custom code ('auto_map': {format_json_value(code)}), which is not run. If "
            f"the folder's {_BACKEND} does the same, remove 'auto_map' from the file. If not, save such a file where "
            "you trust the code (`AutoTokenizer.from_pretrained(..., trust_remote_code=True).save_pretrained(...)`)."
        )


def _reason(folder: Path, error: Exception) -> str:
    """Message that names the first broken file, or the files whose values do not work together."""
    backend = folder / _BACKEND
    others = [folder / name for name in (_SETTINGS, "special_tokens_map.json", "added_tokens.json")]
    try:
        for path in (backend, *others):
            if path.is_file():
                read_json_object(path)
        if backend.is_file():
            Tokenizer.from_file(str(backend)).encode(_TEXT)
    except CheckpointError as broken:
        return str(broken)
    except Exception as broken:
        return f"{backend} is not a valid tokenizer: {first_line(broken):.400}. Get the file again."
    settings = [str(path) for path in others if path.is_file()]
    if settings:
        return f"{' or '.join(settings)} has values that do not describe a tokenizer: {describe_error(error)}"
    return f"{folder} has no tokenizer that transformers can load: {describe_error(error)}"
