"""Loads the tokenizer of a model folder; what is wrong with one of its files is told by the file's name."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mobius.errors import CheckpointError, first_line
from mobius.models.model_files import describe_error, format_json_value, read_json_object

_SETTINGS, _BACKEND = "tokenizer_config.json", "tokenizer.json"
_TEXT = "A text."


def load_tokenizer(folder: Path, vocab_size: int) -> PreTrainedTokenizerBase:
    """The tokenizer of `folder`, after a first text went through it. Its custom code, if it has any, is not run.

    Raises CheckpointError, also where it has tokens that a model of `vocab_size` has no row for.
    """
    _check_settings(folder / _SETTINGS)
    with _panics_kept_quiet():
        try:
            tokenizer = cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
            num_ids = max([len(tokenizer), *(token + 1 for token in tokenizer.added_tokens_decoder)])
            tokenizer(_TEXT)
            pad_token_id(tokenizer)
        except BaseException as error:  # what is below raises plain Exception for a broken tokenizer.json, or panics
            if not _is_of_the_tokenizer(error):
                raise
            raise CheckpointError(f"--model_path: {_reason(folder, error)}") from error
    if num_ids > vocab_size:
        raise CheckpointError(
            f"--model_path: the tokenizer of {folder} has {num_ids} tokens, the model only {vocab_size} (vocab_size)."
        )
    return tokenizer


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Id of a token to pad with; any does, because padding is masked by length."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(int(token) for token in candidates if token is not None)


def _check_settings(path: Path) -> None:
    """Refuse what transformers would ask about on the terminal, or find only when a chat is rendered."""
    if not path.is_file():
        return
    fields = read_json_object(path, may_repeat=True)
    auto_map = fields.get("auto_map")
    code = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
    if code is not None:
        raise CheckpointError(
            f"--model_path: {path} names custom code ('auto_map': {format_json_value(code)}), which is not run. If "
            "the folder's "
            f"{_BACKEND} does the same, remove 'auto_map' from the file; if not, save one with transformers "
            "(`AutoTokenizer.from_pretrained(..., trust_remote_code=True).save_pretrained(...)`) where you trust it."
        )
    template = fields.get("chat_template")
    is_list = isinstance(template, list) and all(
        isinstance(named, dict) and {type(named.get("name")), type(named.get("template"))} == {str}
        for named in template or [None]
    )
    if not (template is None or isinstance(template, str) or is_list):
        raise CheckpointError(
            f"--model_path: {path}: 'chat_template' is {format_json_value(template)}, it must be a text, or a list "
            "of objects with "
            "'name' and 'template'. Mend it, or remove it."
        )


def _is_of_the_tokenizer(error: BaseException) -> bool:
    """Whether an error is no interruption: a panic in Rust comes as a class that derives from BaseException alone."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextlib.contextmanager
def _panics_kept_quiet() -> Iterator[None]:
    """Hold standard error back, and pass on what came unless a CheckpointError says it: Rust tells a panic there."""
    with tempfile.TemporaryFile() as held:
        before = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        except CheckpointError:
            held.truncate(0)
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)
            held.seek(0)
            os.write(2, held.read())


def _reason(folder: Path, error: BaseException) -> str:
    """Words that name the first file that is broken by itself, or those whose values do not do."""
    backend = folder / _BACKEND
    others = [folder / name for name in (_SETTINGS, "special_tokens_map.json", "added_tokens.json")]
    try:
        for path in (backend, *others):
            if path.is_file():
                read_json_object(path, may_repeat=True)
        if backend.is_file():
            Tokenizer.from_file(str(backend)).encode(_TEXT)
    except CheckpointError as broken:
        return str(broken)
    except BaseException as broken:
        if not _is_of_the_tokenizer(broken):
            raise
        return f"{backend} is no tokenizer: {first_line(broken):.400}. Get the file anew."
    settings = [str(path) for path in others if path.is_file()]
    if settings:
        return f"{' or '.join(settings)} has values that no tokenizer can be made of: {describe_error(error)}"
    return f"{folder} has no tokenizer that transformers can load: {describe_error(error)}"
