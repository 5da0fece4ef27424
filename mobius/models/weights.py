"""Initial parameter values, tensor by tensor, from a safetensors checkpoint or the family's own initialization.

The headers are checked against config.json (names, shapes, plain float dtypes) before any value is read.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import re
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mobius.config.config import ModelConfig
from mobius.errors import CheckpointError
from mobius.models.adapters import LORA_A, adapted_linear
from mobius.models.blocks import ModelParts
from mobius.models.model_files import format_json_value, read_json_object
from mobius.models.parameter_pieces import ParameterPiece
from mobius.models.tensor_file import StoredTensor, read_header
from mobius.process.log import RANK_ZERO_ONLY

logger = logging.getLogger(__name__)

PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
"""Trainable dtypes, by their safetensors names; others are quantized or not weights."""

EMBEDDING_WEIGHT, LM_HEAD_WEIGHT = "model.embed_tokens.weight", "lm_head.weight"
"""Names of the two matrices that may be tied, equal in all supported families."""

_QUANTIZED = re.compile(
    r"(weight_scale|weight_scale_inv|weight_packed|weight_zero_point|weight_shape|qweight|qzeros|scales|g_idx|SCB"
    r"|absmax|nested_absmax|quant_map|nested_quant_map|quant_state\.\w+|weight_format|scale_weight)$"
)
"""Name suffixes of quantizers' tensors: GPTQ, AWQ, bitsandbytes, compressed-tensors, FP8."""

_HARMLESS = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Tables that older versions stored and that are computed today."""

MAX_PLAUSIBLE_WEIGHT: Final = torch.finfo(torch.float16).max
"""65504. A model released in fp16 cannot have larger weights. Products with larger weights swamp everything to which
they are added: gradients become zero or non-finite."""

_PART_ELEMENTS = 2**22
"""Elements processed at a time, to avoid copying a whole tensor."""


class WeightSource(Protocol):
    """Source of parameters, read one by one by Hugging Face name to the CPU; the caller owns the tensor."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Value of parameter `name`, of `shape`."""


def folder_has_weights(folder: Path) -> bool:
    """Whether the folder holds safetensors. Raises CheckpointError if it has pickled `.bin` weights instead."""
    if any(folder.glob("*.safetensors")):
        return True
    if pickled := sorted(folder.glob("*.bin")):
        raise CheckpointError(
            f"{folder} holds its weights as {pickled[0].name}; only safetensors are read. Convert once, where it fits "
            f'in memory: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')\""
        )
    return False


def read_file(path: Path) -> dict[str, StoredTensor]:
    """Tensors of a safetensors file, by name. Raises CheckpointError."""
    try:
        return read_header(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: is damaged or no safetensors file: {error}") from error


def _read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Tensors of the checkpoint in `folder`; tensors of a text part have the names of its text model."""
    tensors = read_stored(folder)
    renamed = text_weight_names(tensors)
    return {renamed.get(name, name): tensor for name, tensor in tensors.items()}


def read_stored(folder: Path) -> dict[str, StoredTensor]:
    """Tensors of the checkpoint in `folder`, by name, from the files that transformers would read.

    Raises CheckpointError.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not single.is_file() and index.is_file():
        return _read_indexed(folder, index)
    tensors: dict[str, StoredTensor] = {}
    for path in [single] if single.is_file() else sorted(folder.glob("*.safetensors")):
        for name, tensor in read_file(path).items():
            if name in tensors:
                raise CheckpointError(
                    f"{folder} stores {name!r} twice, in {tensors[name].path.name} and {path.name}, and has no "
                    f"{index.name} that says which counts. Remove the files that are not the model's."
                )
            tensors[name] = tensor
    return tensors


def _read_indexed(folder: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no 'weight_map' of tensor names to files. Get the file again.")
    for name, file in weight_map.items():
        is_name = isinstance(file, str) and file.endswith(".safetensors") and "\0" not in file
        if not is_name or file.startswith("/") or ".." in file.split("/"):  # links are fine: hub caches have them
            raise CheckpointError(
                f"{index}: 'weight_map' says that {name!r} is in {format_json_value(file)}; it must name a safetensors "
                "file in the same folder. Get the index again."
            )
    files = sorted(set(weight_map.values()))
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise CheckpointError(
            f"{folder} is incomplete: {index.name} names {missing[0]} ({len(missing)} file(s) missing)."
        )
    found = {(file, name): tensor for file in files for name, tensor in read_file(folder / file).items()}
    for name, file in weight_map.items():
        if (file, name) not in found:
            raise CheckpointError(f"{index} says that {name!r} is in {file}, which has no such tensor. Get both again.")
    return {name: found[file, name] for name, file in weight_map.items()}


def check_model_weights(folder: Path, parts: ModelParts, options: ModelConfig) -> None:
    """Check the headers of the weights in `folder`, if any, against `parts`.

    Call this before data is prepared or memory is allocated. Warns about tensors that the model does not have, except
    layers that the user left out. Raises CheckpointError for a quantized, missing or wrongly shaped tensor.
    """
    if not folder_has_weights(folder):
        return
    checkpoint = CheckpointWeights(folder, parts.stored_names, parts.parameter_pieces)
    stored = checkpoint.stored
    shapes = parts.base_shapes()
    known = {
        piece.name for parameter_pieces in parts.parameter_pieces.values() for piece in parameter_pieces
    } | shapes.keys()
    unknown = [name for name in stored if name not in known]
    _refuse_quantized(folder, filter(None, map(checkpoint.find, sorted(known))), unknown)
    for name, shape in shapes.items():
        checkpoint.find_pieces(name, shape)
    # Other files may be an adapter's. Mistral's second copy of the model is expected.
    others = {*folder.glob("*.safetensors")} - {tensor.path for tensor in stored.values()}
    unread = sorted(path.name for path in others if not path.name.startswith(("consolidated", "optimizer")))
    _warn(folder, "%d safetensors file(s) are not part of the model and not read", unread)
    left_out = parts.layers[0].prefix.removesuffix("0.") if options.num_layers is not None else "\0"
    _warn(
        folder,
        f"%d of the checkpoint's {len(stored)} tensors do not belong to the model of its config.json and are neither "
        "trained nor saved",
        [name for name in unknown if not _HARMLESS.search(name) and not name.startswith(left_out)],
    )


def _warn(folder: Path, text: str, names: Sequence[str]) -> None:
    """Log a warning with the first of `names`, if there are any; `text` is formatted with their number."""
    if names:
        shown_names = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        logger.warning(f"%s: {text}: %s", folder, len(names), shown_names, extra=RANK_ZERO_ONLY)


def _refuse_quantized(folder: Path, own: Iterable[StoredTensor], unknown: Iterable[str]) -> None:
    way_out = (
        "Give the unquantized checkpoint it was made from, or dequantize it with transformers "
        "(`model.dequantize()`, then `save_pretrained`)."
    )
    for tensor in own:
        if tensor.word not in PLAIN_DTYPES:
            raise CheckpointError(
                f"{tensor.path}: {tensor.name!r} is stored as {tensor.word}; only {', '.join(PLAIN_DTYPES)} are "
                f"trained. The checkpoint is quantized. {way_out}"
            )
    if scales := [name for name in unknown if _QUANTIZED.search(name)]:
        raise CheckpointError(
            f"{folder} holds {len(scales)} tensors of a quantized model ({scales[0]!r}, for example), without which "
            f"its weights mean nothing. {way_out}"
        )


def has_untied_head(folder: Path) -> bool:
    """Whether the checkpoint stores a head that differs from the embedding; transformers unties such a head."""
    stored = _read_headers(folder)
    if EMBEDDING_WEIGHT not in stored or LM_HEAD_WEIGHT not in stored:
        return False
    embedding, head = stored[EMBEDDING_WEIGHT], stored[LM_HEAD_WEIGHT]
    if embedding.shape != head.shape or len(head.shape) != 2 or not {embedding.word, head.word} <= {*PLAIN_DTYPES}:
        return False  # check_model_weights refuses it by name
    step = max(1, _PART_ELEMENTS // max(head.shape[1], 1))
    for start in range(0, head.shape[0], step):
        rows = slice(start, start + step)
        ours, theirs = embedding.read(rows), head.read(rows)
        wide = torch.promote_types(ours.dtype, theirs.dtype)
        if not torch.equal(ours.to(wide), theirs.to(wide)):
            return True
    return False


class CheckpointWeights:
    """Parameters from a folder of safetensors, single or sharded; reads only what is requested."""

    def __init__(
        self,
        folder: Path,
        aliases: Mapping[str, str],
        pieces: Mapping[str, tuple[ParameterPiece, ...]] = MappingProxyType({}),
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Index `folder`. `aliases` maps tied names, `pieces` lists parameters stored as several tensors.

        Values must fit into `dtype`. Raises CheckpointError.
        """
        self._folder, self._pieces = folder, pieces
        self._aliases = {**aliases, **{other: name for name, other in aliases.items()}}
        self._check = ValueCheck(dtype)
        self.stored = _read_headers(folder)

    def find(self, name: str) -> StoredTensor | None:
        """The tensor of this name, or of the name that it is tied to."""
        return self.stored.get(name) or self.stored.get(self._aliases.get(name, name))

    def find_shaped(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """The tensor of this name. Raises CheckpointError if it is missing or has another shape."""
        tensor = self.find(name)
        if tensor is None:
            raise CheckpointError(
                f"{self._folder} has no tensor {name!r} (it has {len(self.stored)} tensors, for example "
                f"{next(iter(self.stored), None)!r}). The checkpoint belongs to another model than its config.json, or "
                "is incomplete."
            )
        if tensor.shape != shape:
            raise CheckpointError(
                f"{tensor.path}: {tensor.name!r} has shape {tensor.shape}, the configuration asks for {shape}."
            )
        return tensor

    def find_pieces(self, name: str, shape: tuple[int, ...]) -> list[tuple[ParameterPiece | None, StoredTensor]]:
        """The tensors that make up a parameter, each with its piece; piece None: the whole parameter.

        A checkpoint may store a parameter whole even if the family stores pieces. Raises CheckpointError like
        `find_shaped`.
        """
        if self.find(name) is not None or name not in self._pieces:
            return [(None, self.find_shaped(name, shape))]
        return [(piece, self.find_shaped(piece.name, piece.shape)) for piece in self._pieces[name]]

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The parameter. Raises CheckpointError like `find_shaped`, and for values that are non-finite or do not fit.

        Pieces are read one at a time, each into its position.
        """
        found = self.find_pieces(name, shape)
        if found[0][0] is None:
            return self._check.read(found[0][1])
        dtypes = {stored.dtype or torch.float32 for _, stored in found}
        whole = torch.empty(shape, dtype=functools.reduce(torch.promote_types, dtypes))
        for piece, stored in found:
            assert piece is not None, name
            piece.of(whole).copy_(self._check.read(stored))
        return whole

    def reads_of(self, name: str, shape: tuple[int, ...]) -> Iterator[WeightRead]:
        """Reads of the parameter in parts. Raises CheckpointError like `find_shaped`; the reads raise it like `read`.

        The parts are the stored pieces if each is contiguous in the parameter, else there is one part for everything.
        """
        found = self.find_pieces(name, shape)
        if not all(piece is None or piece.is_contiguous for piece, _ in found):
            yield WeightRead(0, math.prod(shape), functools.partial(self.read, name, shape))
            return
        for piece, stored in found:
            offset = 0 if piece is None else piece.offset
            yield WeightRead(offset, math.prod(stored.shape), functools.partial(self._check.read, stored))


class ValueCheck:
    """Checks values of stored tensors; warns about the first implausible one."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Values must fit into `dtype`."""
        self._dtype = dtype
        self._has_warned = False

    def read(self, stored: StoredTensor) -> Tensor:
        """Read the tensor. Raises CheckpointError for non-finite values or overflow; warns about implausible ones."""
        tensor = stored.read()
        if not tensor.numel():
            return tensor
        # The extremes suffice: a NaN makes both NaN, and rounding is monotonic. One pass without a copy runs at some
        # 20 GB/s on one core; `isfinite` on everything would allocate, and run at 0.4 GB/s.
        extremes = torch.stack(torch.aminmax(tensor))
        if not extremes.to(self._dtype).isfinite().all():
            raise CheckpointError(f"{stored.path}: {stored.name!r} {_describe_misfits(tensor, self._dtype)}")
        largest = max(map(float, extremes), key=abs)
        if abs(largest) > MAX_PLAUSIBLE_WEIGHT and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: %r holds the value %g; weights beyond %g, the largest number of fp16, leave gradients that are "
                "zero or not finite. The checkpoint is likely damaged: get it again. Other tensors are not listed",
                *(stored.path, stored.name, largest, MAX_PLAUSIBLE_WEIGHT),
            )
        return tensor


MAX_READERS = 8
"""Maximum number of threads that read weights of a rank."""
MAX_AHEAD_ELEMENTS = 2**28
"""Maximum number of elements that are read before they are needed, unless one value has more: 1 GiB in fp32."""


@dataclass(frozen=True)
class WeightRead:
    """A read of a parameter, or of one of its pieces, that has not begun; any thread may call `read`."""

    offset: int
    """Index of its first element in the parameter."""
    num_elements: int
    read: Callable[[], Tensor]


def read_ahead(reads: Iterable[WeightRead], *, num_threads: int) -> Iterator[Tensor]:
    """Yield the values of `reads` in order, while `num_threads` threads read the next ones."""
    coming: deque[tuple[int, Future[Tensor]]] = deque()
    readers = ThreadPoolExecutor(num_threads, thread_name_prefix="weights")
    try:
        for each in reads:
            while coming and sum(size for size, _ in coming) + each.num_elements > MAX_AHEAD_ELEMENTS:
                yield coming.popleft()[1].result()
            coming.append((each.num_elements, readers.submit(each.read)))
        while coming:
            yield coming.popleft()[1].result()
    finally:
        readers.shutdown(cancel_futures=True)


def reads_of(source: WeightSource, name: str, shape: tuple[int, ...]) -> Iterable[WeightRead]:
    """The reads that make up a parameter, in the order of their elements.

    A checkpoint yields a layer's experts one by one, so all of them are never copied at once.
    """
    if isinstance(source, CheckpointWeights):
        return source.reads_of(name, shape)
    return [WeightRead(0, math.prod(shape), functools.partial(source.read, name, shape))]


def _describe_misfits(tensor: Tensor, dtype: torch.dtype) -> str:
    """Text with the number of values that do not fit, and the first of them."""
    flat = tensor.reshape(-1)
    count, num_nonfinite, first = 0, 0, flat.numel()
    for number, part in enumerate(flat.split(_PART_ELEMENTS)):
        misfits = (~part.to(dtype).isfinite()).nonzero()
        if len(misfits) and count == 0:
            first = number * _PART_ELEMENTS + int(misfits[0])
        count += len(misfits)
        num_nonfinite += int((~part.isfinite()).sum())
    place = [int(index) for index in torch.unravel_index(torch.tensor(first), tensor.shape)]
    where = f"the first at {place} is {float(flat[first]):g}"
    if num_nonfinite:
        return (
            f"has {num_nonfinite} values that are not finite (NaN or infinite), {where}. The checkpoint is damaged, or "
            "its training diverged: get it again, or take an earlier one."
        )
    return (
        f"has {count} values that are too large for {str(dtype).removeprefix('torch.')}, {where}. Use --dtype bf16 or "
        "--dtype fp32, which can hold these values."
    )


class InitialWeights:
    """Parameters from transformers' own initialization of the family, for a model without weights.

    Each leaf module is seeded by its name, so values depend neither on the partition nor on the number of ranks.
    Several threads may read: torch draws some 150 million normal numbers per second on a core, and uses one core for a
    draw.
    """

    def __init__(self, parts: ModelParts, *, seed: int) -> None:
        self._model, self._aliases, self._seed = parts.model, parts.stored_names, seed
        self._lock = threading.Lock()
        self._modules: dict[str, _InitializedModule] = {}
        """Modules initialized last, by path; all experts of a layer are one module."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Initialize the leaf module that owns `name` on the CPU in fp32 and return that parameter.

        Raises CheckpointError if the family's initialization leaves the parameter unset.
        """
        name = self._aliases.get(name, name)
        path = name.rpartition(".")[0]
        with self._lock:
            module = self._modules.setdefault(path, _InitializedModule())
            while len(self._modules) > _MAX_INITIALIZED_MODULES:
                del self._modules[next(iter(self._modules))]
        with module.lock:
            if name not in module.unread:
                module.unread.update(self._draw(path))
            tensor = module.unread.pop(name)
        assert tuple(tensor.shape) == shape, (name, tensor.shape, shape)
        if tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
            raise CheckpointError(
                f"transformers draws no initial values for {name!r} in this family, so it cannot be trained from fresh "
                "weights. Give a model with weights."
            )
        return tensor

    def _draw(self, path: str) -> dict[str, Tensor]:
        leaf = copy.deepcopy(self._model.get_submodule(path)).to_empty(device="cpu")
        # One hash of seed and name: the CPU generator uses only the low 32 bits of a seed.
        with torch.no_grad(), _ThreadGenerator(zlib.crc32(f"{self._seed} {path}".encode())):
            for parameter in leaf.parameters(recurse=False):
                parameter.fill_(torch.nan)
            self._model._init_weights(leaf)
        return {f"{path}.{local}": parameter.detach() for local, parameter in leaf.named_parameters(recurse=False)}


_MAX_INITIALIZED_MODULES = 2 * MAX_READERS
"""Maximum number of modules with parameters that are initialized and not read yet."""


@dataclass
class _InitializedModule:
    lock: threading.Lock = field(default_factory=threading.Lock)
    unread: dict[str, Tensor] = field(default_factory=dict)


class _ThreadGenerator(TorchDispatchMode):
    """Makes random operations of this thread use a separate CPU generator instead of torch's global one."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            if all(argument.name != "generator" for argument in func._schema.arguments):
                func = func.overloadpacket.generator  # rand_like and the like have a variant that takes a generator
            kwargs["generator"] = self._generator
        return func(*args, **kwargs)


_OWN = "model."
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head."
_PARTS = ("language_model", "text_model")


def text_weight_names(stored: Collection[str]) -> dict[str, str]:
    """Stored name -> text model's name, for names that differ; empty for a text model.

    Empty also if several parts embed tokens, or if two weights would get one name.
    """
    prefixes = [name.removesuffix(_EMBEDDING) for name in stored if name.endswith(f".{_EMBEDDING}")]
    of_text = [prefix for prefix in prefixes if any(part in prefix.split(".") for part in _PARTS)]
    if len(of_text) != 1 or _OWN in prefixes:
        return {}
    renamed = dict(_renamed(stored, of_text[0]))
    others = set(stored) - renamed.keys()
    return {} if len({*renamed.values(), *others}) < len(stored) else renamed


def _renamed(stored: Collection[str], prefix: str) -> Iterator[tuple[str, str]]:
    for name in stored:
        before, found, local = name.rpartition(_HEAD)
        if name.startswith(prefix) and not found:
            yield name, _OWN + name.removeprefix(prefix)
        elif found and before and prefix.startswith(before):
            yield name, _HEAD + local


class InitialAdapterWeights:
    """Initial values of adapters: A is uniform in the bounds of a linear layer, B is zero; others are from `base`.

    A is seeded by its name, so values depend neither on the partition nor on the number of ranks.
    """

    def __init__(self, base: WeightSource, *, seed: int) -> None:
        self._base, self._seed = base, seed

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Value of parameter `name`; an adapter's is in fp32."""
        if adapted_linear(name) is None:
            return self._base.read(name, shape)
        values = torch.zeros(shape)
        if name.endswith(f".{LORA_A}.weight"):
            # One hash of seed and name: the CPU generator uses only the low 32 bits of a seed.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        return values
