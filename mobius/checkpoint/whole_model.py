"""Owns the layout of a base that has more than the trained text, such as a vision tower or layers `mtp.*`.

The trained text goes back into this layout: its tensors get the base's names and places in the base's files. All other
tensors, config.json, and the files of processors are the base's, byte for byte.

    base      model-1: model.language_model.layers.0...   model-2: model.visual.blocks.0...  mtp.layers.0...
    created   model-1: room of the trained tensors        model-2: copied
    filled    model-1: the trained tensors                by each rank its own, one tensor at a time
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PretrainedConfig

from mobius.checkpoint.tensor_files import Parts, header_bytes, translate_file_errors
from mobius.config.config import ExportAs
from mobius.engine.stage_memory import parts_of
from mobius.errors import CheckpointError, ConfigError, listed
from mobius.files.regular_files import open_regular, read_bytes
from mobius.models.blocks import ModelParts
from mobius.models.families import changed_fields
from mobius.models.family_support import supported_text_config
from mobius.models.model_files import format_json_value, read_json_object
from mobius.models.peft_folder import BASE_MODEL_FILE, AdapterBase, weights_fingerprint
from mobius.models.quantized_folder import find_quantization
from mobius.models.tensor_file import DTYPES, StoredTensor, read_header_fields
from mobius.models.weights import EMBEDDING_WEIGHT, is_computed, read_stored, text_weight_names

PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files that turn images, sound or videos into inputs."""
_INDEX: Final = "model.safetensors.index.json"
_COPIED_BYTES: Final = 8 * 2**20
_TIE: Final = "tie_word_embeddings"


@dataclass(frozen=True)
class WholeModel:
    """A base that has more than the trained text."""

    base: AdapterBase
    config: bytes
    """Contents of config.json."""
    processors: Mapping[str, bytes]
    """Path within the folder -> contents of the files of processors."""
    stored: Mapping[str, StoredTensor]
    """All tensors of the base."""
    owners: Mapping[str, str]
    """Name of a trained tensor in the base -> its name in a text model: of a parameter, or of a piece of one."""
    pieces: Mapping[str, str]
    """Name of a piece in a text model -> its parameter."""
    refusal: str | None
    """Reason (a clause) why the trained text cannot go back into the base, or None."""

    @property
    def num_others(self) -> int:
        """Number of tensors that are not trained."""
        return len(self.stored) - len(self.owners)

    @property
    def other_bytes(self) -> int:
        """Bytes of the tensors that are not trained."""
        found = 0
        for path in self._paths():
            trained = self._trained_in(path)
            found += sum(size for name, (_, _, size) in _laid_out(path, {})[1].items() if name not in trained)
        return found

    @property
    def dtype(self) -> torch.dtype | None:
        """Number format of the embedding in the base."""
        return next((self.stored[name].dtype for name, own in self.owners.items() if own == EMBEDDING_WEIGHT), None)

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the base's weights are no longer the weights that were read, or are gone."""
        found = weights_fingerprint(self.base.folder)
        if found != self.base.fingerprint:
            now = "are gone" if found is None else f"have the fingerprint {found}, and had {self.base.fingerprint}"
            raise CheckpointError(
                f"{self.base.folder}, whose other tensors belong into the result, is no longer the model that was "
                f"trained: its weights {now}."
            )

    def create(self, folder: Path, parts: ModelParts, dtype: torch.dtype) -> None:
        """Write the base's files into `folder`, with room for the trained tensors in the format `dtype`.

        Raises CheckpointError.
        """
        words = {kind: word for word, kind in DTYPES.items()}
        formats = {
            name: words[parts.weight_dtype(self.pieces.get(own, own), dtype)] for name, own in self.owners.items()
        }
        num_bytes = 0
        for path in self._paths():
            target = folder / path.name
            with translate_file_errors("write", target, path.stat().st_size), open_regular(path) as source:
                trained = self._trained_in(path)
                header, places = _laid_out(path, {name: formats[name] for name in trained})
                with target.open("wb") as file:
                    file.write(header)
                    for name, (start, place, size) in places.items():
                        num_bytes += size
                        if name not in trained:
                            source.seek(start)
                            file.seek(place)
                            _copy(source.read, file.write, size)
                    file.truncate(max((place + size for _, place, size in places.values()), default=len(header)))
                    file.flush()
                    os.fsync(file.fileno())
        index = self.base.folder / _INDEX
        if index.is_file():
            with translate_file_errors("write", folder / _INDEX):
                (folder / _INDEX).write_bytes(_index_with(read_bytes(index), num_bytes))

    def fill(
        self,
        folder: Path,
        read: Callable[[str], Tensor],
        *,
        own: Collection[str] | None = None,
        parts: Parts = lambda name, tensor: parts_of(tensor),
    ) -> None:
        """Write trained tensors to their places in `folder`, which `create` made, synced to the disk.

        `read` returns a tensor by its name in a text model; the values come from `parts`. `own`: parameters of this
        rank; None: all. Raises CheckpointError.
        """
        stored, by_file = read_stored(folder), dict[Path, list[str]]()
        for name in self.names_of(own):
            by_file.setdefault(stored[name].path, []).append(name)
        for path, names in by_file.items():
            with translate_file_errors("write", path), path.open("r+b") as file:
                for name in names:
                    place, tensor = stored[name], read(self.owners[name])
                    assert (place.shape, place.dtype) == (tuple(tensor.shape), tensor.dtype), (name, tensor.dtype)
                    file.seek(place.start)
                    for part in parts(self.owners[name], tensor):
                        file.write(part.detach().cpu().contiguous().view(torch.uint8).numpy().data)
                file.flush()
                os.fsync(file.fileno())

    def names_of(self, own: Collection[str] | None) -> list[str]:
        """Names in the base of the tensors of parameters in `own`, None for all; pieces of a parameter in a row."""
        named = {name: self.pieces.get(text_name, text_name) for name, text_name in self.owners.items()}
        return sorted((name for name in named if own is None or named[name] in own), key=named.__getitem__)

    def check_copied(self, folder: Path) -> None:
        """Compare all tensors in `folder` that are not trained with the base, byte by byte. Raises CheckpointError."""
        found = read_stored(folder)
        for path in self._paths():
            trained = self._trained_in(path)
            for name, (start, _, size) in _laid_out(path, {})[1].items():
                if name in trained or name not in self.stored or self.stored[name].path != path:
                    continue
                own = found[name]
                with (
                    translate_file_errors("read", path),
                    open_regular(path) as source,
                    open_regular(own.path) as copied,
                ):
                    source.seek(start)
                    copied.seek(own.start)
                    is_same = all(source.read(number) == copied.read(number) for number in _numbers(size))
                if not is_same:
                    raise CheckpointError(f"{own.path}: {name!r} was not copied as it is in {path}.")

    def config_with(self, model_config: PretrainedConfig, dtype: torch.dtype) -> bytes:
        """Contents of config.json with the fields of `model_config`, the text's, that training changed.

        The base's own bytes if nothing changed.
        """
        before, fields = json.loads(self.config), json.loads(self.config)
        nested = fields.get("text_config")
        text = nested if isinstance(nested, dict) else fields
        for name, value in changed_fields(_text_fields(before), model_config).items():
            for place in (text, fields) if name in fields or name == _TIE else (text,):
                place[name] = value
        if dtype is not self.dtype:
            # Older versions of transformers read `torch_dtype`, newer versions write `dtype`.
            named = [(each, name) for each in (text, fields) for name in ("torch_dtype", "dtype") if each.get(name)]
            for each, name in named or [(fields, "dtype")]:
                each[name] = str(dtype).removeprefix("torch.")
        return self.config if fields == before else (json.dumps(fields, indent=2) + "\n").encode()

    def _paths(self) -> list[Path]:
        return sorted({tensor.path for tensor in self.stored.values()})

    def _trained_in(self, path: Path) -> set[str]:
        return {name for name in self.owners if self.stored[name].path == path}


def find_whole_model(name: str, folder: Path, parts: ModelParts) -> WholeModel | None:
    """Return the base in `folder`, given as `name`, of the text model `parts`; None if it has nothing more than text.

    Raises CheckpointError if its weights are damaged or do not have the parameters of `parts`.
    """
    fields = read_json_object(folder / "config.json")
    is_part = _text_fields(fields) is not fields
    base = AdapterBase.of(name, folder)
    if base.fingerprint is None or (find_quantization(fields) is not None and not is_part):
        return None
    stored = read_stored(folder)
    pieces = {piece.name: whole for whole, each in parts.parameter_pieces.items() for piece in each}
    known, tied, renamed = parts.base_shapes().keys() | pieces.keys(), parts.stored_names, text_weight_names(stored)
    text_names = {name: renamed.get(name, name) for name in stored}
    owners = {name: tied.get(text_name, text_name) for name, text_name in text_names.items() if text_name in known}
    if not is_part and all(name in owners or is_computed(name) for name in stored):
        return None
    refusal = _why_not(fields, stored, folder, parts.config)
    processors = {path: read_bytes(folder / path) for path in PROCESSOR_FILES if (folder / path).is_file()}
    whole = WholeModel(base, read_bytes(folder / "config.json"), processors, stored, owners, pieces, refusal)
    if refusal is None:
        _check_complete(whole, parts)
    return whole


def recorded_base(folder: Path) -> Mapping[str, Any]:
    """Fields of the file that names the base from which the text in `folder` was taken; empty without the file."""
    path = folder / BASE_MODEL_FILE
    return read_json_object(path) if path.is_file() else {}


def check_recorded(recorded: Mapping[str, Any], base: AdapterBase | None, *, option: str) -> None:
    """Raise CheckpointError unless `base`, given as `option`, is the one from which a text was taken."""
    if base is None or base.fingerprint != recorded.get("fingerprint"):
        given = "no model with more than text" if base is None else f"one with the fingerprint {base.fingerprint}"
        raise CheckpointError(
            f"{option}: the text was taken from {format_json_value(recorded.get('name'))} with the fingerprint "
            f"{format_json_value(recorded.get('fingerprint'))}, and this is {given}. Give the same base, or use "
            "--export_as text."
        )


def _text_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields of the text part as a text model; `fields` themselves for a text model."""
    part = supported_text_config(fields)
    return fields if part is None else part.fields


def _why_not(
    fields: Mapping[str, Any], stored: Mapping[str, StoredTensor], folder: Path, config: PretrainedConfig
) -> str | None:
    """Reason (a clause) why the text cannot go back into the base with the configuration `fields`, or None."""
    if find_quantization(fields) is not None:
        return "its weights are quantized, and trained weights are not"
    if changed := changed_fields(_text_fields(fields), config).keys() - {_TIE}:
        return f"the trained text has other values of {listed(sorted(changed))}"
    paths = {tensor.path for tensor in stored.values()}
    if foreign := sorted(str(path) for path in paths if path.parent != folder or not path.name.startswith("model")):
        return f"its weights are in {foreign[0]}, and files of weights are named model*.safetensors"
    return None


def _check_complete(whole: WholeModel, parts: ModelParts) -> None:
    """Raise CheckpointError if the base lacks a tensor of the text, or has one of another shape."""
    shapes = parts.base_shapes()
    of_pieces = {piece.name: piece.shape for each in parts.parameter_pieces.values() for piece in each}
    found = {own: whole.stored[name].shape for name, own in whole.owners.items()}
    for name, shape in shapes.items():
        name = parts.stored_names.get(name, name)
        names = [name] if name in found else [each for each, own in whole.pieces.items() if own == name] or [name]
        for each in names:
            if found.get(each) != (expected := of_pieces.get(each, shape)):
                raise CheckpointError(
                    f"{whole.base.folder} has {each!r} of shape {found.get(each)}, the trained text of {expected}: it "
                    "is not the model from which the text was taken."
                )


@dataclass(frozen=True)
class SavedLayout:
    """Layout of a saved model."""

    base: WholeModel | None = None
    """Base whose text is saved; None if it has nothing more than text."""
    is_whole: bool = False
    """Whether the text goes back into the base's files; else it is saved alone."""
    max_file_bytes: int = 2_000_000_000
    """Bytes of a file of an exported text."""

    @property
    def whole(self) -> WholeModel | None:
        """Base into whose files the text goes back."""
        return self.base if self.is_whole else None

    @property
    def text_of(self) -> AdapterBase | None:
        """Base to be recorded with a text that is saved alone."""
        return None if self.base is None or self.is_whole else self.base.base

    @property
    def other_bytes(self) -> int:
        """Bytes of tensors that are saved with the text."""
        return 0 if self.whole is None else self.whole.other_bytes

    @property
    def others(self) -> str | None:
        """Fate of the base's other tensors, for the model card; None without others."""
        if self.base is None:
            return None
        return f"{self.base.num_others}, {'copied' if self.is_whole else 'left out'}"

    def __str__(self) -> str:
        if self.base is None:
            return "a text model"
        others = f"{self.base.num_others} other tensors of {self.base.base.name}"
        return f"the text with {others}, copied" if self.is_whole else f"the text alone, without {others}"


TEXT_ALONE: Final = SavedLayout()


def chosen_layout(whole: WholeModel | None, export_as: ExportAs) -> SavedLayout:
    """Return the layout that `--export_as` asks for. Raises ConfigError if it is not possible."""
    if whole is None or export_as is ExportAs.TEXT:
        return SavedLayout(whole)
    if whole.refusal is not None and export_as is ExportAs.ORIGINAL:
        raise ConfigError(
            f"--export_as original: the text cannot go back into {whole.base.name}: {whole.refusal}. Use --export_as "
            "text."
        )
    return SavedLayout(whole, is_whole=whole.refusal is None)


def _laid_out(path: Path, formats: Mapping[str, str]) -> tuple[bytes, dict[str, tuple[int, int, int]]]:
    """Header of a file like `path` with tensors in `formats`, and tensor -> its start there, its start here, its bytes.

    Without another format, the header is the same. Raises OSError, CheckpointError.
    """
    try:
        data_start, fields = read_header_fields(path)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged or not a safetensors file: {error}") from error
    metadata, entries = fields.pop("__metadata__", None), fields
    starts = {name: data_start + entry["data_offsets"][0] for name, entry in entries.items()}
    if all(entry["dtype"] == formats.get(name, entry["dtype"]) for name, entry in entries.items()):
        sizes = {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in entries.items()}
        return _read_head(path, data_start), {name: (starts[name], starts[name], sizes[name]) for name in starts}
    order, laid, end = [*DTYPES], dict[str, tuple[str, list[int], int, int]](), 0
    words = {name: formats.get(name, entry["dtype"]) for name, entry in entries.items()}
    # Wide formats come first, so that every tensor begins at a multiple of its format's bytes.
    for name in sorted(entries, key=lambda name: order.index(words[name]) if words[name] in order else len(order)):
        first, last = entries[name]["data_offsets"]
        size = math.prod(entries[name]["shape"]) * DTYPES[words[name]].itemsize if name in formats else last - first
        laid[name] = words[name], entries[name]["shape"], end, end + size
        end += size
    header = header_bytes(laid, metadata)
    places = {name: (starts[name], len(header) + first, last - first) for name, (_, _, first, last) in laid.items()}
    return header, places


def _read_head(path: Path, num_bytes: int) -> bytes:
    """First bytes of a file. Raises OSError."""
    with open_regular(path) as file:
        return file.read(num_bytes)


def _numbers(size: int) -> Iterator[int]:
    """Numbers of bytes to copy at a time."""
    for start in range(0, size, _COPIED_BYTES):
        yield min(_COPIED_BYTES, size - start)


def _copy(read: Callable[[int], bytes], write: Callable[[bytes], object], size: int) -> None:
    for number in _numbers(size):
        write(read(number))


def _index_with(content: bytes, num_bytes: int) -> bytes:
    """Index with the total size `num_bytes`; the same bytes if it is the one that it has."""
    index = json.loads(content)
    metadata = index.get("metadata")
    if not isinstance(metadata, dict) or metadata.get("total_size") in (None, num_bytes):
        return content
    index["metadata"] = {**metadata, "total_size": num_bytes}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
