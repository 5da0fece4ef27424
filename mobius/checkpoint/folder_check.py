"""Checks that other programs can read a model folder.

It must have names and shapes of the family's class in transformers, or of the base, if the text went back into one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from mobius.checkpoint.other_readers import reader_notes
from mobius.checkpoint.whole_model import WholeModel
from mobius.errors import CheckpointError, listed
from mobius.models.family_support import checked_families, text_config_of
from mobius.models.model_files import describe_error, read_json_object
from mobius.models.parameter_pieces import find_parameter_pieces, stored_shapes
from mobius.models.structure import freeze_persistent_buffers, names_in_fp32
from mobius.models.tensor_file import StoredTensor
from mobius.models.tokenizer import load_tokenizer
from mobius.models.weights import read_file, read_stored
from mobius.models.whole_class import class_of

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def check_folder(folder: Path, whole: WholeModel | None = None) -> list[str]:
    """Return a line for each check, and for llama.cpp and vLLM; raises CheckpointError with all if a check failed.

    With `whole`, the folder has the text of a model with more than text, in the model's layout.
    """
    try:
        checks = list(_checks(folder, whole))
        notes = list(_notes(folder, whole))
    except CheckpointError:
        raise
    except Exception as error:  # transformers raises any error for a wrong value
        raise CheckpointError(f"transformers cannot read {folder}: {describe_error(error)}") from error
    lines = [f"{'wrong' if flaw else 'ok':6} {what:22}  {flaw or found}" for what, found, flaw in checks]
    if any(flaw for *_, flaw in checks):
        raise CheckpointError("\n".join([f"{folder} would not load elsewhere:", *lines]))
    return [*lines, *(f"{'note':6} {what:22}  {found}" for what, found in notes)]


def _notes(folder: Path, whole: WholeModel | None) -> Iterator[tuple[str, str]]:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    (class_name,) = config.architectures or [""]
    names = read_stored(folder) if whole is None else whole.owners.values()
    yield from reader_notes(class_name, text_config_of(config), {*names})


def _checks(folder: Path, whole: WholeModel | None) -> Iterator[tuple[str, str, str]]:
    """Yield for each check its name, a text of what was found, and a text of what is wrong, empty if nothing is."""
    fields, config = (
        read_json_object(folder / "config.json"),
        AutoConfig.from_pretrained(folder, trust_remote_code=False),
    )
    named, vocab_size = fields.get("architectures"), int(config.get_text_config().vocab_size)
    if whole is None:
        with torch.device("meta"):
            model = class_of(config).from_config(config, trust_remote_code=False)
        own, expected = type(model).__name__, _shapes_of_class(model)
        flaw = "" if named == [own] else f"architectures is {named}, not [{own!r}]"
        yield "config.json", f"architectures {own}", flaw
    else:
        own, expected = whole.base.name, {name: tensor.shape for name, tensor in whole.stored.items()}
        yield "config.json", f"architectures {listed(named or [])}, as in {own}", ""
    kinds = [name for name in ("tokenizer.json", "tokenizer.model", "tekken.json") if (folder / name).is_file()]
    found, flaw = listed(kinds), "" if kinds else "neither tokenizer.json nor tokenizer.model"
    try:
        found += f": {len(load_tokenizer(folder, vocab_size))} tokens"
    except CheckpointError as error:
        flaw = str(error).removeprefix("--model_path: ")
    yield "tokenizer", found, flaw
    end = GenerationConfig.from_pretrained(folder, trust_remote_code=False).eos_token_id
    ends = end if isinstance(end, list) else [] if end is None else [end]
    flaw = "" if all(0 <= end < vocab_size for end in ends) else f"eos_token_id {ends} beyond {vocab_size} tokens"
    yield "generation_config.json", f"answers end with {ends or 'none'}", flaw
    stored = read_stored(folder)
    yield "tensors", f"{len(stored)} with the names and shapes of {own}", _wrong_names(stored, expected)
    text_names = {name: name for name in stored} if whole is None else whole.owners
    yield _format_check(stored, text_names, fields, text_config_of(config))
    files = sorted(folder.glob("*.safetensors"))
    in_files = {name for path in files for name in read_file(path)}
    flaw = f"not in the index: {listed(sorted(names))}" if (names := in_files - stored.keys()) else ""
    yield "files", f"{len(files)}, with the tensors that are listed", flaw


def _wrong_names(stored: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]]) -> str:
    """Text of what is wrong with names and shapes; empty if nothing is."""
    shaped = {name for name in expected.keys() & stored.keys() if stored[name].shape != expected[name]}
    flaws = {"missing": expected.keys() - stored.keys(), "not of the family": stored.keys() - expected.keys()}
    flaws["of another shape"] = shaped
    return "; ".join(f"{flaw}: {listed(sorted(names))}" for flaw, names in flaws.items() if names)


def _format_check(
    stored: Mapping[str, StoredTensor], text_names: Mapping[str, str], fields: dict[str, Any], config: PretrainedConfig
) -> tuple[str, str, str]:
    """Check of the number format of the text; `text_names`: its names here and in a text model of `config`."""
    nested = fields.get("text_config") or {}
    said = next((word for name in ("dtype", "torch_dtype") if (word := fields.get(name) or nested.get(name))), None)
    in_fp32 = _names_in_fp32(config, said)
    kept = [name for name, own in text_names.items() if own in in_fp32]
    words = {name: stored[name].word for name in text_names if name in stored}
    formats = sorted({words[name] for name in words.keys() - kept})
    is_right = [_DTYPES.get(each) for each in formats] == [said] and {words[name] for name in kept} <= {"F32"}
    found = f"{said}, and float32 of {len(kept)} as transformers keeps them" if kept else str(said)
    return "number format", found, "" if is_right else f"{sorted({*words.values()})}, and config.json says {said}"


def _names_in_fp32(config: PretrainedConfig, said: object) -> frozenset[str]:
    """Names of the stored tensors that transformers keeps in fp32 in a text model of the format `said`."""
    if said not in _DTYPES.values():
        return frozenset()
    with torch.device("meta"):
        model = class_of(config).from_config(config, trust_remote_code=False)
    freeze_persistent_buffers(model)
    kept = names_in_fp32(model, getattr(torch, str(said)), checked_families().made_in_fp32(config.model_type))
    pieces = find_parameter_pieces(model, {name: tuple(model.get_parameter(name).shape) for name in kept})
    return frozenset(each for name in kept for each, _ in stored_shapes(name, (), pieces))


def _shapes_of_class(model: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that transformers stores for a model on the meta device."""
    every = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(every.items())}  # only one of several tied tensors is stored
    shapes = {name: tuple(every[name].shape) for name in first.values()}
    pieces = find_parameter_pieces(model, shapes)
    return dict(each for name, shape in shapes.items() for each in stored_shapes(name, shape, pieces))
