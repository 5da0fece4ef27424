"""Owns the files of a fine-tuned model: the files that transformers and peft need, and the single `.pt` file.

Weights are written by `tensor_files.write_stage`, so that no rank ever holds the whole model. Adapters are written in
peft's format, from files that use our parameter names.
"""

import io
import json
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from mobius.checkpoint.tensor_files import Parts, translate_file_errors, write_stage, write_text
from mobius.checkpoint.whole_model import TEXT_ALONE, SavedLayout
from mobius.engine.stage_memory import parts_of
from mobius.errors import CheckpointError
from mobius.files.atomic_files import atomic_write
from mobius.files.regular_files import open_regular
from mobius.models.adapter_kinds import KINDS
from mobius.models.blocks import ModelParts
from mobius.models.families import changed_fields
from mobius.models.model_files import ModelFiles
from mobius.models.peft_folder import BASE_MODEL_FILE, CONFIG_FILE, WEIGHTS_FILE, AdapterBase, base_fields
from mobius.models.reward_head import SCORE_WEIGHT
from mobius.models.tensor_file import StoredTensor, map_file
from mobius.models.weights import EMBEDDING_WEIGHT, LM_HEAD_WEIGHT, read_file, read_stored, read_text

if TYPE_CHECKING:
    from typing_extensions import Buffer

_MAX_HELD_BYTES = 64 * 2**20
_SAME_SIZE_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def write_model_files(
    folder: Path,
    base: ModelFiles,
    model_config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    layout: SavedLayout = TEXT_ALONE,
) -> None:
    """Write the files that transformers needs besides the weights, whose format is `dtype`; raises CheckpointError.

    These files are copies of the base's files, byte by byte, and its configuration with the fields that the run
    changed; a `layout` with a whole model has the whole model's. The configuration is written last, atomically.
    """
    whole = layout.whole
    if layout.text_of is not None:
        record = json.dumps(base_fields(layout.text_of), indent=2, sort_keys=True)
        write_text(folder / BASE_MODEL_FILE, record + "\n")
    others = {} if whole is None else whole.processors
    for name, contents in {**others, **base.copied}.items():
        path = folder / name
        with translate_file_errors("write", path):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(contents)
    content = _text_config(base, model_config, dtype) if whole is None else whole.config_with(model_config, dtype)
    path = folder / "config.json"
    with translate_file_errors("write", path), atomic_write(path) as temporary:
        temporary.write_bytes(content)


def _text_config(base: ModelFiles, model_config: PretrainedConfig, dtype: torch.dtype) -> bytes:
    """Contents of a text model's config.json."""
    fields = {**base.config, **changed_fields(base.config, model_config)}
    # Older versions of transformers read `torch_dtype`, newer versions write `dtype`.
    names = [name for name in ("torch_dtype", "dtype") if name in fields] or ["dtype"]
    fields.update(dict.fromkeys(names, str(dtype).removeprefix("torch.")))
    if not fields.get("architectures"):
        fields["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)].__name__]
    return (json.dumps(fields, indent=2) + "\n").encode()


def adapter_tensors(
    folder: Path, parts: ModelParts, values: Mapping[str, Tensor], base: AdapterBase
) -> dict[str, Tensor]:
    """Return what tensors of the adapter or prompt in `folder` must be, by peft's names.

    `values` are some of its parameters by our names; the others are as in the file.
    """
    kind, written, made = KINDS[parts.adapters.finetuning_type], read_file(folder / WEIGHTS_FILE), dict[str, Tensor]()
    for name, sources in kind.sources(values).items():
        stored = base.name_of(name)
        made[stored] = kind.made_of({source: values[source] for source in sources}, written.get(stored))
    return made


def write_adapter(folder: Path, files: Sequence[Path], parts: ModelParts, base: AdapterBase) -> None:
    """Write the adapter or prompt whose parameters are in `files`, under our names. Raises CheckpointError."""
    stored = {tensor.name: tensor for file in files for tensor in read_file(file).values()}
    kind = KINDS[parts.adapters.finetuning_type]
    sources = {base.name_of(name): names for name, names in kind.sources(stored).items()}

    def read(name: str) -> Tensor:
        return kind.made_of({source: stored[source].read() for source in sources[name]})

    write_stage(folder, {WEIGHTS_FILE: tuple(sources)}, read)
    base_file = base_fields(base, parts.adapters)
    for name, fields in ((CONFIG_FILE, kind.config_fields(parts, base)), (BASE_MODEL_FILE, base_file)):
        write_text(folder / name, json.dumps(fields, indent=2, sort_keys=True) + "\n")


def write_params_file(path: Path, folder: Path, *, progress: Callable[[], None] = lambda: None) -> None:
    """Write all weights of `folder` to the single file `path`: a dict from name to tensor, as `torch.load` reads it.

    Of a model with more than text, these are the text's, by their names in a text model.
    The folder does not store a tied head. The dict has it, because `load_state_dict` needs its name; the tied bytes are
    in the file once. Other tensors have separate storages, so that `torch.load(path, weights_only=True, mmap=True)`
    reads only the tensors that are used. The file appears only when it is complete and synced to the disk. `progress`
    is called after each write. Raises CheckpointError.
    """
    stored = read_text(folder)
    files = {path: map_file(path) for path in {each.path for each in stored.values()}}
    tensors = {name: each.of(files[each.path]) for name, each in stored.items()}
    if EMBEDDING_WEIGHT in tensors and SCORE_WEIGHT not in tensors:
        tensors.setdefault(LM_HEAD_WEIGHT, tensors[EMBEDDING_WEIGHT])
    with (
        translate_file_errors("write", path),
        atomic_write(path) as temporary,
        _ReleasingFile(temporary, [*files.values()], progress) as file,
    ):
        try:
            torch.save(tensors, file)
        except RuntimeError as error:  # torch hides the system's error (no space left) behind a RuntimeError
            raise file.failure or error from error


def verify_folder(
    folder: Path, expected: Mapping[str, Tensor], *, parts: Parts = lambda name, tensor: parts_of(tensor)
) -> None:
    """Reopen `folder` and compare each `expected` tensor, whose values `parts` yields, with the stored one, bit by bit.

    A rank may pass only its parameters; parameters of adapters have peft's names. All files of the index are opened.
    Raises CheckpointError that names the first tensor or file that is wrong.
    """
    found = read_stored(folder)
    for name, trained in expected.items():
        if name not in found:
            raise CheckpointError(f"{folder} has no tensor {name!r}.")
        path = found[name].path
        with translate_file_errors("read", path):
            problem = _describe_difference(found[name], trained, parts(name, trained))
        if problem:
            raise CheckpointError(f"{path}: {name!r} was not saved as it was trained: {problem}.")


def _describe_difference(stored: StoredTensor, trained: Tensor, parts: Iterable[Tensor]) -> str | None:
    """Describe how a stored tensor differs from the `parts` of `trained`, bit by bit; None if they are equal."""
    if (stored.shape, stored.dtype) != (trained.shape, trained.dtype):
        return f"{stored.dtype} {tuple(stored.shape)} instead of {trained.dtype} {tuple(trained.shape)}"
    # Compared as integers: as floats, a NaN would differ from itself, and 0.0 would equal -0.0.
    integers, differing = _SAME_SIZE_INTEGERS[trained.element_size()], 0
    with open_regular(stored.path) as file:
        file.seek(stored.start)
        for part in filter(len, parts):
            found = torch.frombuffer(bytearray(file.read(part.nbytes)), dtype=integers)
            differing += int((found != part.cpu().view(integers)).sum())
    return f"{differing:,} of {trained.numel():,} elements differ" if differing else None


class _ReleasingFile(io.BufferedWriter):
    """A file for `torch.save` that releases pages of the mapped files while it writes, to keep few in memory."""

    def __init__(self, path: Path, mapped: Sequence[mmap.mmap], progress: Callable[[], None]) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._mapped, self._progress = mapped, progress
        self._held_bytes = 0
        self.failure: OSError | None = None

    def write(self, data: "Buffer") -> int:
        """Write all of `data`."""
        try:
            num_bytes = super().write(data)
        except OSError as error:
            self.failure = error
            raise
        self._progress()
        self._held_bytes += num_bytes
        if self._held_bytes > _MAX_HELD_BYTES:
            for mapped in self._mapped:
                mapped.madvise(mmap.MADV_DONTNEED)  # a released page would be read again if it were used
            self._held_bytes = 0
        return num_bytes
