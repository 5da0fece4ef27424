"""Checks that vLLM and llama.cpp can read a model folder: it must have the names of the family's transformers class."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from mobius.checkpoint.whole_model import WholeModel
from mobius.errors import CheckpointError, listed
from mobius.models.model_files import describe_error, read_json_object
from mobius.models.parameter_pieces import find_parameter_pieces, stored_shapes
from mobius.models.tokenizer import load_tokenizer
from mobius.models.weights import read_file, read_stored
from mobius.models.whole_class import class_of

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def check_folder(folder: Path, whole: WholeModel | None = None) -> list[str]:
    """Return a line for each check; raises CheckpointError with all lines if a check failed.

    With `whole`, the folder has the text of a model with more than text, in the model's layout.
    """
    try:
        checks = list(_checks(folder, whole))
    except CheckpointError:
        raise
    except Exception as error:  # transformers raises any error for a wrong value
        raise CheckpointError(f"transformers cannot read {folder}: {describe_error(error)}") from error
    lines = [f"{'wrong' if flaw else 'ok':6} {what:22}  {flaw or found}" for what, found, flaw in checks]
    if any(flaw for *_, flaw in checks):
        raise CheckpointError("\n".join([f"{folder} would not load elsewhere:", *lines]))
    return lines


def _checks(folder: Path, whole: WholeModel | None) -> Iterator[tuple[str, str, str]]:
    """Yield for each check its name, a text of what was found, and a text of what is wrong, empty if nothing is."""
    fields, config = (
        read_json_object(folder / "config.json"),
        AutoConfig.from_pretrained(folder, trust_remote_code=False),
    )
    model_class = class_of(config, is_whole=whole is not None)
    with torch.device("meta"):
        model = model_class.from_config(config, trust_remote_code=False)
    named, own, vocab_size = fields.get("architectures"), type(model).__name__, int(config.get_text_config().vocab_size)
    yield "config.json", f"architectures {own}", "" if named == [own] else f"architectures is {named}, not [{own!r}]"
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
    yield from _tensor_checks(folder, model, fields, whole)


def _tensor_checks(
    folder: Path, model: Any, fields: dict[str, Any], whole: WholeModel | None
) -> Iterator[tuple[str, str, str]]:
    stored = read_stored(folder)
    expected = _shapes_of_class(model) if whole is None else {n: each.shape for n, each in whole.stored.items()}
    whose = type(model).__name__ if whole is None else whole.base.name
    shaped = {name for name in expected.keys() & stored.keys() if stored[name].shape != expected[name]}
    flaws = {"missing": expected.keys() - stored.keys(), "not of the family": stored.keys() - expected.keys()}
    flaws["of another shape"] = shaped
    flaw = "; ".join(f"{flaw}: {listed(sorted(names))}" for flaw, names in flaws.items() if names)
    yield "tensors", f"{len(stored)} with the names and shapes of {whose}", flaw
    text = fields.get("text_config") or {}
    formats, said = (
        sorted({stored[name].word for name in (stored if whole is None else whole.owners)}),
        next((said for name in ("dtype", "torch_dtype") if (said := fields.get(name) or text.get(name))), None),
    )
    flaw = "" if [_DTYPES.get(each) for each in formats] == [said] else f"{formats}, and config.json says {said}"
    yield "number format", str(said), flaw
    files = sorted(folder.glob("*.safetensors"))
    in_files = {name for path in files for name in read_file(path)}
    flaw = f"not in the index: {listed(sorted(names))}" if (names := in_files - stored.keys()) else ""
    yield "files", f"{len(files)}, with the tensors that are listed", flaw


def _shapes_of_class(model: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that transformers stores for a model on the meta device."""
    every = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(every.items())}  # only one of several tied tensors is stored
    shapes = {name: tuple(every[name].shape) for name in first.values()}
    pieces = find_parameter_pieces(model, shapes)
    return dict(each for name, shape in shapes.items() for each in stored_shapes(name, shape, pieces))
