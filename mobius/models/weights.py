"""Initial parameter values, tensor by tensor, from a safetensors checkpoint or the family's initialization.

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
from mobius.models.adapters import LORA_A, MAGNITUDE, adapted_linear
from mobius.models.blocks import ModelParts
from mobius.models.family_support import supported_text_config
from mobius.models.model_files import format_json_value, read_json_object
from mobius.models.parameter_pieces import ParameterPiece
from mobius.models.quantized_folder import decoded_tensors, log_decoded
from mobius.models.reward_head import SCORE_WEIGHT
from mobius.models.tensor_file import PLAIN_DTYPES, StoredTensor, read_header
from mobius.models.weight_codecs import WeightCodec
from mobius.process.log import RANK_ZERO_ONLY

logger = logging.getLogger(__name__)

EMBEDDING_WEIGHT, LM_HEAD_WEIGHT = "model.embed_tokens.weight", "lm_head.weight"
"""Names of the two matrices that may be tied. All supported families use these names."""

_QUANTIZED = re.compile(
    r"(weight_scale|weight_scale_inv|weight_packed|weight_zero_point|weight_shape|qweight|qzeros|scales|g_idx|SCB"
    r"|absmax|nested_absmax|quant_map|nested_quant_map|quant_state\.\w+|weight_format|scale_weight)$"
)
"""Name suffixes of quantizers' tensors: GPTQ, AWQ, bitsandbytes, compressed-tensors, FP8."""

_HARMLESS = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Rotary tables that older versions stored. Today they are computed."""

MAX_PLAUSIBLE_WEIGHT: Final = torch.finfo(torch.float16).max
"""65504. A model released in fp16 cannot have larger weights. Products with larger weights are too large: all other
summands are rounded away, so gradients become zero or non-finite."""

_PART_ELEMENTS = 2**22
"""Maximum number of elements processed at a time, so that no whole tensor is copied."""


def is_computed(name: str) -> bool:
    """Whether a stored tensor is a table that models compute themselves."""
    return _HARMLESS.search(name) is not None


class WeightSource(Protocol):
    """Source of parameters, which are read to the CPU one by one, by Hugging Face name."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the value of parameter `name`, of `shape`; the caller owns the tensor."""


def folder_has_weights(folder: Path) -> bool:
    """Whether the folder holds safetensors. Raises CheckpointError if it has only pickled `.bin` weights."""
    if any(folder.glob("*.safetensors")):
        return True
    if pickled := sorted(folder.glob("*.bin")):
        raise CheckpointError(
            f"{folder} holds its weights as {pickled[0].name}; only safetensors are read. Convert them once, on a "
            f'machine with enough memory: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')\""
        )
    return False


def read_file(path: Path) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file: its tensors by name. Raises CheckpointError."""
    try:
        return read_header(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged or not a safetensors file: {error}") from error


def _read_headers(folder: Path, *, in_fp32: bool = False) -> dict[str, StoredTensor]:
    """Tensors of the checkpoint in `folder` by name; codes are decoded when they are read (`decoded_tensors`).

    Tensors of a text part have the names of a text model.
    """
    tensors = decoded_tensors(folder, read_stored(folder), in_fp32=in_fp32)
    renamed = text_weight_names(tensors)
    return {renamed.get(name, name): tensor for name, tensor in tensors.items()}


def read_text(folder: Path) -> dict[str, StoredTensor]:
    """Stored tensors of the text in `folder`, by their names in a text model. Raises CheckpointError."""
    stored, config = read_stored(folder), folder / "config.json"
    if not config.is_file() or supported_text_config(read_json_object(config)) is None:
        return stored
    renamed = text_weight_names(stored)
    own = renamed.keys() or {name for name in stored if name.startswith(_OWN)}
    return {renamed.get(name, name): tensor for name, tensor in stored.items() if name in own or name == LM_HEAD_WEIGHT}


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
                    f"{index.name} that selects one. Remove the files that do not belong to the model."
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


def check_model_weights(
    folder: Path, parts: ModelParts, options: ModelConfig, *, has_score_elsewhere: bool = False
) -> None:
    """Check the headers of the weights in `folder`, if any, against `parts`.

    Call this before data is prepared or memory is allocated. Warns about tensors that the model does not have, except
    layers that --num_layers removes. `has_score_elsewhere`: an adapter or checkpoint has the head of the reward model,
    which is new otherwise. Raises CheckpointError for a quantized, missing or wrongly shaped tensor.
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
    has_new_head = SCORE_WEIGHT in shapes and SCORE_WEIGHT not in stored
    for name, shape in shapes.items():
        if name != SCORE_WEIGHT or not has_new_head:
            checkpoint.find_pieces(name, shape)
    log_decoded(folder, stored)
    # Other files may belong to an adapter. Names of a second copy of the model, as in Mistral's folders, are expected.
    others = {*folder.glob("*.safetensors")} - {tensor.path for tensor in stored.values()}
    unread = sorted(path.name for path in others if not path.name.startswith(("consolidated", "optimizer")))
    _warn(folder, "%d safetensors file(s) are not part of the model and not read", unread)
    left_out = parts.layers[0].prefix.removesuffix("0.") if options.num_layers is not None else "\0"
    _warn(
        folder,
        f"%d of the checkpoint's {len(stored)} tensors do not belong to the text model of its config.json and are not "
        "trained",
        [
            name
            for name in unknown
            if not (is_computed(name) or name.startswith(left_out) or (has_new_head and name == LM_HEAD_WEIGHT))
        ],
    )
    if has_new_head and not has_score_elsewhere:
        text = "%s: the head %s of the reward model is new, from --seed%s"
        dropped = f"; {LM_HEAD_WEIGHT} is left out" if LM_HEAD_WEIGHT in stored else ""
        logger.info(text, folder, SCORE_WEIGHT, dropped, extra=RANK_ZERO_ONLY)


def _warn(folder: Path, text: str, names: Sequence[str]) -> None:
    """Log a warning with `text`, the number of `names` and the first three of them; nothing without names."""
    if names:
        shown_names = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        logger.warning(f"%s: {text}: %s", folder, len(names), shown_names, extra=RANK_ZERO_ONLY)


def _refuse_quantized(folder: Path, own: Iterable[StoredTensor], unknown: Iterable[str]) -> None:
    way_out = (
        "Use the checkpoint from before quantization, or dequantize it with transformers "
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
            f"its weights cannot be used. {way_out}"
        )


def has_untied_head(folder: Path) -> bool:
    """Whether the checkpoint stores a head that differs from the embedding; transformers unties such a head."""
    stored = _read_headers(folder)
    if EMBEDDING_WEIGHT not in stored or LM_HEAD_WEIGHT not in stored:
        return False
    embedding, head = stored[EMBEDDING_WEIGHT], stored[LM_HEAD_WEIGHT]
    if embedding.shape != head.shape or len(head.shape) != 2 or not {embedding.word, head.word} <= {*PLAIN_DTYPES}:
        return False  # check_model_weights then raises an error that names the tensor
    step = max(1, _PART_ELEMENTS // max(head.shape[1], 1))
    for start in range(0, head.shape[0], step):
        rows = slice(start, start + step)
        ours, theirs = embedding.read(rows), head.read(rows)
        wide = torch.promote_types(ours.dtype, theirs.dtype)
        if not torch.equal(ours.to(wide), theirs.to(wide)):
            return True
    return False


class CheckpointWeights:
    """Parameters from a folder with one or several safetensors files; only requested tensors are read."""

    def __init__(
        self,
        folder: Path,
        aliases: Mapping[str, str],
        pieces: Mapping[str, tuple[ParameterPiece, ...]] = MappingProxyType({}),
        *,
        dtype: torch.dtype = torch.float32,
        initial: WeightSource | None = None,
        decodes_in_fp32: bool = False,
    ) -> None:
        """Read the headers in `folder`. `aliases` maps tied names; `pieces` has parameters stored as several tensors.

        Values must fit into `dtype`. `decodes_in_fp32`: values of codes are not rounded, because they become codes
        again. `initial` has the head of a reward model, for a checkpoint of a language model.
        Raises CheckpointError.
        """
        self._folder, self._pieces, self._initial = folder, pieces, initial
        self._aliases = {**aliases, **{other: name for name, other in aliases.items()}}
        self._check = ValueCheck(dtype)
        self.stored = _read_headers(folder, in_fp32=decodes_in_fp32)

    def find(self, name: str) -> StoredTensor | None:
        """Return the tensor `name`, or the tensor to which it is tied; None if both are missing."""
        return self.stored.get(name) or self.stored.get(self._aliases.get(name, name))

    def find_shaped(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Return the tensor `name`. Raises CheckpointError if it is missing or has another shape."""
        tensor = self.find(name)
        if tensor is None:
            raise CheckpointError(
                f"{self._folder} has no tensor {name!r} (it has {len(self.stored)} tensors, for example "
                f"{next(iter(self.stored), None)!r}). The checkpoint belongs to another model than its config.json, or "
                "is incomplete."
            )
        if tensor.shape != shape:
            raise CheckpointError(
                f"{tensor.path}: {tensor.name!r} has shape {tensor.shape}, but the configuration needs {shape}."
            )
        return tensor

    def find_pieces(self, name: str, shape: tuple[int, ...]) -> list[tuple[ParameterPiece | None, StoredTensor]]:
        """Return the stored tensors of a parameter, each with its piece, or with None for the whole parameter.

        A checkpoint may store a parameter whole even if the family stores pieces. Raises CheckpointError like
        `find_shaped`.
        """
        if self.find(name) is not None or name not in self._pieces:
            return [(None, self.find_shaped(name, shape))]
        return [(piece, self.find_shaped(piece.name, piece.shape)) for piece in self._pieces[name]]

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a parameter. Raises CheckpointError like `find_shaped`, and for non-finite or too large values.

        Pieces are read one at a time, each into its position.
        """
        if self._initial is not None and name == SCORE_WEIGHT and name not in self.stored:
            return self._initial.read(name, shape)
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
        """Yield the reads of a parameter. Raises CheckpointError like `find_shaped`; the reads raise it like `read`.

        There is one read per stored piece if each piece is contiguous in the parameter, else one read for all.
        """
        is_new = self._initial is not None and name == SCORE_WEIGHT and name not in self.stored
        found = [] if is_new else self.find_pieces(name, shape)
        if is_new or not all(piece is None or piece.is_contiguous for piece, _ in found):
            yield WeightRead(0, math.prod(shape), functools.partial(self.read, name, shape))
            return
        for piece, stored in found:
            offset = 0 if piece is None else piece.offset
            yield WeightRead(offset, math.prod(stored.shape), functools.partial(self._check.read, stored))


class ValueCheck:
    """Checks values of stored tensors, and warns once about an implausible value."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Values must fit into `dtype`."""
        self._dtype = dtype
        self._has_warned = False

    def read(self, stored: StoredTensor) -> Tensor:
        """Read a tensor. Raises CheckpointError for non-finite or too large values; warns of implausible values."""
        tensor = stored.read()
        if not tensor.numel():
            return tensor
        # Minimum and maximum suffice: a NaN makes both NaN, and rounding is monotonic. This pass makes no copy and
        # reads 20 GB/s on one core; `isfinite` on all values would allocate, and read 0.4 GB/s.
        extremes = torch.stack(torch.aminmax(tensor))
        if not extremes.to(self._dtype).isfinite().all():
            raise CheckpointError(f"{stored.path}: {stored.name!r} {_describe_misfits(tensor, self._dtype)}")
        largest = max(map(float, extremes), key=abs)
        if abs(largest) > MAX_PLAUSIBLE_WEIGHT and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: %r holds the value %g; with weights beyond %g, the largest number of fp16, gradients become zero "
                "or not finite. The checkpoint is likely damaged: get it again. Other tensors are not listed",
                *(stored.path, stored.name, largest, MAX_PLAUSIBLE_WEIGHT),
            )
        return tensor


MAX_READERS = 8
"""Maximum number of threads with which a rank reads weights."""
MAX_AHEAD_ELEMENTS = 2**28
"""Maximum number of elements that are read before they are needed, unless one tensor has more: 1 GiB in fp32."""


@dataclass(frozen=True)
class WeightRead:
    """A future read of a parameter, or of one of its pieces; any thread may call `read`."""

    offset: int
    """Index of the read's first element in the parameter."""
    num_elements: int
    read: Callable[[], Tensor]


def read_ahead(reads: Iterable[WeightRead], *, num_threads: int) -> Iterator[Tensor]:
    """Yield the values of `reads` in order, while `num_threads` threads read the next values."""
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
    """Reads that together return a parameter, in the order of their elements.

    A checkpoint yields a layer's experts one by one, so they are never all copied at once.
    """
    if isinstance(source, CheckpointWeights):
        return source.reads_of(name, shape)
    return [WeightRead(0, math.prod(shape), functools.partial(source.read, name, shape))]


def _describe_misfits(tensor: Tensor, dtype: torch.dtype) -> str:
    """Text with the number of values that do not fit into `dtype`, and the first such value."""
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
            "its training diverged: get it again, or use an earlier checkpoint."
        )
    return (
        f"has {count} values that are too large for {str(dtype).removeprefix('torch.')}, {where}. Use --dtype bf16 or "
        "--dtype fp32, which can hold these values."
    )


class InitialWeights:
    """Parameters from transformers' initialization of the family, for a model without weights.

    The seed of a leaf module depends on its name, so values do not depend on the partition or the number of ranks.
    Several threads may read: for one tensor, torch uses one core, which draws 150 million normal numbers per second.
    """

    def __init__(self, parts: ModelParts, *, seed: int) -> None:
        self._model, self._aliases, self._seed = parts.model, parts.stored_names, seed
        self._lock = threading.Lock()
        self._modules: dict[str, _InitializedModule] = {}
        """The last modules that were initialized, by path; all experts of a layer are one module."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Initialize the leaf module that owns the parameter `name`, on the CPU in fp32, and return this parameter.

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
"""Maximum number of modules whose initialized parameters wait to be read."""


@dataclass
class _InitializedModule:
    lock: threading.Lock = field(default_factory=threading.Lock)
    unread: dict[str, Tensor] = field(default_factory=dict)


class _ThreadGenerator(TorchDispatchMode):
    """Makes random operations of this thread use a separate CPU generator, not torch's global generator."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            if all(argument.name != "generator" for argument in func._schema.arguments):
                func = func.overloadpacket.generator  # functions such as rand_like have an overload with a generator
            kwargs["generator"] = self._generator
        return func(*args, **kwargs)


_OWN = "model."
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head."
_PARTS = ("language_model", "text_model")


def text_weight_names(stored: Collection[str]) -> dict[str, str]:
    """Stored name -> name in a text model, if the two differ; empty for a text model.

    Also empty if several parts embed tokens, or if two weights would get the same name.
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


def decoded(value: Tensor, codec: WeightCodec, dtype: torch.dtype) -> Tensor:
    """Return what a run in `dtype` decodes from the codes of `value`: what it computes with."""
    shape = tuple(value.shape)
    raw = torch.empty(codec.num_bytes(shape), dtype=torch.uint8, device=value.device)
    codec.encode(value, raw)
    return codec.decode(raw, shape, torch.empty(shape, dtype=dtype, device=value.device))


class InitialAdapterWeights:
    """Initial values of adapters: A is uniform as in a new linear layer, B is zero, a magnitude is the norm of its row.

    The seed of A depends on its name, so values do not depend on the partition or the number of ranks.
    """

    def __init__(
        self,
        base: WeightSource,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        seed: int,
        codecs: Mapping[str, WeightCodec] = MappingProxyType({}),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`base` has all other values, in `shapes`; those of `codecs` are decoded from codes in a run in `dtype`."""
        self._base, self._shapes, self._seed, self._codecs, self._dtype = base, shapes, seed, codecs, dtype

    @classmethod
    def of(cls, base: WeightSource, parts: ModelParts, *, seed: int, dtype: torch.dtype) -> InitialAdapterWeights:
        """Return the values of a run in `dtype`."""
        return cls(base, parts.base_shapes(), seed=seed, codecs=parts.codecs_in(dtype), dtype=dtype)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the value of parameter `name`; an adapter's value is in fp32."""
        if (linear := adapted_linear(name)) is None:
            return self._base.read(name, shape)
        if name.endswith(f".{MAGNITUDE}"):
            weight = self._base.read(f"{linear}.weight", self._shapes[f"{linear}.weight"])
            if (codec := self._codecs.get(f"{linear}.weight")) is not None:
                weight = decoded(weight, codec, self._dtype)
            norms: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)
            return norms
        values = torch.zeros(shape)
        if name.endswith(f".{LORA_A}.weight"):
            # One hash of seed and name: the CPU generator uses only the low 32 bits of a seed.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        return values
