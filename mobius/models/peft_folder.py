"""An adapter's folder in peft's format, and the identity of its base model.

    adapter_config.json          kind, rank, strength, targets, name of the base
    adapter_model.safetensors    `base_model.model.` + our name of each trained parameter -> value
    base_model.json              the weights on which the adapter was trained, and the format in which they were kept;
                                 only Mobius writes this file

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import Tensor

from mobius.config.config import (
    ADAPTER_OPTIONS,
    AdapterConfig,
    BaseDtype,
    FinetuningType,
    options,
    pattern_value,
    split_names,
)
from mobius.config.options import Columns
from mobius.errors import CheckpointError, listed, reason_of
from mobius.files.regular_files import open_regular
from mobius.models.adapters import NO_LINEARS, adapted_linear, end_of, taken_for_experts
from mobius.models.blocks import ModelParts
from mobius.models.experts import adapted_matrices
from mobius.models.families import ADAPTER_FILE
from mobius.models.model_files import format_json_value, read_json_object
from mobius.models.reward_head import SCORE, SCORE_WEIGHT, is_reward_model
from mobius.models.tensor_file import StoredTensor
from mobius.models.weights import (
    InitialAdapterWeights,
    ValueCheck,
    WeightSource,
    folder_has_weights,
    read_file,
)

CONFIG_FILE: Final = ADAPTER_FILE
WEIGHTS_FILE: Final = "adapter_model.safetensors"
BASE_MODEL_FILE: Final = "base_model.json"
_PREFIX: Final = "base_model.model."
TEXT_PREFIX: Final = "model."
_OF_WHOLE: Final = re.compile(r"^model(\\?)\.(language_model|text_model)\\?\.")
"""Prefix of the text's modules in models with more than text, or a pattern of it, which escapes dots."""
_COMPARED_LATER: Final = ("lora_target", "lora_target_parameters", "additional_target", "lora_dropout")
"""Options of adapters whose effect is compared, or that may differ."""
_WEIGHT: Final = ".weight"
_WEIGHT_IN_PATTERN: Final = r"(\.weight)?"
"""End of names in peft's patterns that are for a linear layer or for its weight."""
_BASE_DTYPE: Final = "base_dtype"
"""Field of base_model.json with the format in which the base's matrices were kept, an option's value."""
_SAMPLED_BYTES: Final = 65_536
"""Number of bytes at the start and at the end of each base file that go into the fingerprint."""


@dataclass(frozen=True)
class AdapterBase:
    """The base model of an adapter."""

    name: str
    """Hub id, or path of a folder."""
    revision: str | None
    """Commit on the hub, if known."""
    fingerprint: str | None
    """Checksum of samples of the weight files; None without weights."""
    folder: Path
    """Folder of the base model's files."""
    text_prefix: str = TEXT_PREFIX
    """Prefix of the text's modules in the class that loads the base."""

    def name_of(self, name: str) -> str:
        """Return our name of a module or parameter, or a name in peft's file, as the class that loads the base has it.

        They differ if the base has more than text.
        """
        for prefix in (f"{_PREFIX}{TEXT_PREFIX}", TEXT_PREFIX):
            if name.startswith(prefix):
                return prefix.removesuffix(TEXT_PREFIX) + self.text_prefix + name.removeprefix(prefix)
        return name

    @classmethod
    def of(cls, model_path: str, folder: Path) -> AdapterBase:
        """Return the base in `folder`, which the user gave as `model_path`. Raises CheckpointError."""
        name = str(Path(model_path).expanduser().resolve()) if Path(model_path).expanduser().is_dir() else model_path
        revision = folder.name if folder.parent.name == "snapshots" else None
        return cls(name, revision, weights_fingerprint(folder), folder)


def is_text_prefix(prefix: str) -> bool:
    """Whether names of an adapter's modules may begin with `prefix`, so that they are found again."""
    return prefix == TEXT_PREFIX or _OF_WHOLE.fullmatch(prefix) is not None


def trained_shapes(parts: ModelParts) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every trained parameter, in forward order."""
    named = {name: shape for block in parts.blocks for name, shape in block.parameter_shapes().items()}
    frozen = frozenset[str]().union(*(block.frozen_names() for block in parts.blocks))
    return {name: shape for name, shape in named.items() if name not in frozen}


def lora_fields(parts: ModelParts, base: AdapterBase) -> dict[str, Any]:
    """Contents of an adapter's adapter_config.json."""
    config, trained, is_text = parts.adapters, trained_shapes(parts), base.text_prefix == TEXT_PREFIX
    matrices = {name: matrix.name for name, matrix in adapted_matrices(parts.model).items()}
    holders = dict.fromkeys(filter(None, map(adapted_linear, trained)))
    linears = [name for name in holders if name not in matrices]
    adapted = [matrices.get(name, name) for name in holders]
    whole = [name.rpartition(".")[0] for name in trained if adapted_linear(name) is None]
    alpha, parameters = config.lora_alpha, [*split_names(config.lora_target_parameters)]
    if not is_text:  # other parts of a larger model have modules with the same short names
        parameters = [*map(base.name_of, matrices.values())]
    elif parameters == ["all"]:
        parameters = list(dict.fromkeys(map(end_of, matrices.values())))
    # A weight is also a parameter, and as such it is not taken for that of an expert.
    by_weight = [] if config.use_dora or config.lora_dropout else taken_for_experts(parts.model, linears)
    modules = [name for name in linears if name not in by_weight]
    parameters += [f"{base.name_of(name)}{_WEIGHT}" for name in by_weight]
    end = _WEIGHT_IN_PATTERN if by_weight else ""
    ranks, strengths = (
        {f"{name}{end}": float(value) for name, value in _unordered(pattern, adapted, base)}
        for pattern in (config.lora_rank_pattern, config.lora_alpha_pattern)
    )
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if is_reward_model(parts.config) else "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "revision": base.revision,
        "inference_mode": True,
        "r": config.lora_rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": config.lora_dropout,
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "rank_pattern": {name: int(rank) for name, rank in ranks.items()},
        "alpha_pattern": strengths,
        "target_modules": _short_names(modules, parts) if is_text else [*map(base.name_of, modules)],
        "target_parameters": parameters or None,
        "modules_to_save": (_short_ends(whole, parts) if is_text else [*map(base.name_of, whole)]) or None,
    }


def base_fields(base: AdapterBase, adapters: AdapterConfig = AdapterConfig()) -> dict[str, Any]:
    """Contents of base_model.json, also of a text part that was taken out of a base."""
    own = {"name": base.name, "revision": base.revision, "fingerprint": base.fingerprint}
    return {**own, _BASE_DTYPE: adapters.base_dtype.value}


def check_base(folder: Path, base: AdapterBase) -> None:
    """Raise CheckpointError if the adapter in `folder` was trained on a base with another fingerprint."""
    path = folder / BASE_MODEL_FILE
    if not path.is_file():
        return  # a folder that peft wrote has no fingerprint
    fields = read_json_object(path)
    if base.fingerprint is not None and fields.get("fingerprint") not in (None, base.fingerprint):
        raise CheckpointError(
            f"{folder} was trained on other weights than {base.name}: on {format_json_value(fields.get('name'))} "
            f"with the fingerprint {format_json_value(fields.get('fingerprint'))}, but this base has "
            f"{base.fingerprint}. Use the base on which the adapter was trained."
        )


class AdapterFiles(Protocol):
    """Files in peft's format of what was trained beside a frozen base.

    `adapter_kinds.KINDS` chooses the class. Nothing else asks for the kind, except that only an `AdapterFolder` can be
    merged, and that a `PromptFolder` stands before a model's tokens.
    """

    noun: ClassVar[str]
    """With an article, for messages."""
    title: ClassVar[str]
    """Begins the first sentence of a model card; the name of the base follows."""
    peft_types: ClassVar[tuple[str, ...]]
    """Values of `peft_type` in adapter_config.json."""
    folder: Path
    fields: Mapping[str, Any]
    """Contents of adapter_config.json."""
    stored: Mapping[str, StoredTensor]
    """Tensors of the folder by our names."""
    is_reward_model: bool = False
    """Whether the folder has the head of a reward model, which its base lacks."""

    def __init__(self, folder: Path) -> None:
        """Read `folder`. Raises CheckpointError."""
        self.folder = folder
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (folder / name).is_file():
                raise CheckpointError(f"{folder} has no {name}, so it is not the folder of {self.noun}.")
        self.fields = read_json_object(folder / CONFIG_FILE)

    @property
    def dtype(self) -> torch.dtype:
        """Working format of the run that left the folder; in 16-bit runs, some parameters are fp32."""
        found = (tensor.dtype or torch.float32 for tensor in self.stored.values())
        return min(found, key=lambda dtype: dtype.itemsize, default=torch.float32)

    @property
    def base_dtype(self) -> BaseDtype:
        """Format of the base's matrices in that run. Raises CheckpointError."""
        path = self.folder / BASE_MODEL_FILE
        value = (read_json_object(path) if path.is_file() else {}).get(_BASE_DTYPE, BaseDtype.BF16)
        if value not in {*BaseDtype}:
            raise CheckpointError(
                f"{path}: {_BASE_DTYPE!r} is {format_json_value(value)}; it must be one of {', '.join(BaseDtype)}. Get "
                "the file again."
            )
        return BaseDtype(value)

    def complete(self, config: AdapterConfig, given: Collection[str] | None) -> AdapterConfig:
        """Return `config` with the folder's values of the options that are not in `given`.

        `given` None: options that differ from their defaults are given. Raises CheckpointError if another given option
        differs from the folder.
        """

    def check(self, parts: ModelParts, base: AdapterBase) -> None:
        """Raise CheckpointError if the folder does not fit the run, or belongs to another base."""

    def values(self, parts: ModelParts) -> Mapping[str, StoredTensor]:
        """Return the parameters of a run that goes on from the folder, by our names."""

    @classmethod
    def initial(
        cls, base: WeightSource, parts: ModelParts, folder: Path, *, seed: int, dtype: torch.dtype
    ) -> WeightSource:
        """Return the source of the first values of a new run in `dtype`; `folder` holds the base's tokenizer."""

    @classmethod
    def config_fields(cls, parts: ModelParts, base: AdapterBase) -> dict[str, Any]:
        """Return the contents of adapter_config.json."""

    @classmethod
    def sources(cls, names: Iterable[str]) -> dict[str, list[str]]:
        """Return tensor of peft's file -> the parameters among `names` of which it is made."""

    @classmethod
    def made_of(cls, values: Mapping[str, Tensor], written: StoredTensor | None = None) -> Tensor:
        """Return the tensor of peft's file that is made of these parameters, and of the others in a `written` file."""


class AdapterFolder(AdapterFiles):
    """An adapter on disk, written by Mobius or peft."""

    noun, title, peft_types = "an adapter", "LoRA adapters of", ("LORA",)

    def __init__(self, folder: Path) -> None:
        """Read `folder`. Raises CheckpointError if it has no adapter, or one that is not plain LoRA or rsLoRA."""
        super().__init__(folder)
        _refuse_variants(folder, self.fields)
        stored = read_file(folder / WEIGHTS_FILE)
        self.stored = {_own_name(name.removeprefix(_PREFIX)): tensor for name, tensor in stored.items()}
        self.is_reward_model = SCORE_WEIGHT in self.stored

    @cached_property
    def adapters(self) -> AdapterConfig:
        """Options with which the adapter was trained."""
        fields = self.fields
        targets, whole = fields.get("target_modules"), [*map(_own_name, fields.get("modules_to_save") or ())]
        parameters = [*map(_own_name, fields.get("target_parameters") or ())]
        is_all = targets == "all-linear" or (targets is None and not parameters)
        by_weight = [name.removesuffix(_WEIGHT) for name in parameters if name.endswith(_WEIGHT)]
        matrices = [name for name in parameters if not name.endswith(_WEIGHT)]
        return AdapterConfig(
            FinetuningType.LORA,
            lora_rank=fields["r"],
            lora_alpha=float(fields["lora_alpha"]),
            lora_rank_pattern=_pattern(fields.get("rank_pattern")),
            lora_alpha_pattern=_pattern(fields.get("alpha_pattern")),
            lora_target="all"
            if is_all
            else targets
            if isinstance(targets, str)
            else ",".join([*map(_own_name, targets or ()), *by_weight]) or NO_LINEARS,
            lora_target_parameters=",".join(matrices) or None,
            use_rslora=bool(fields.get("use_rslora")),
            use_dora=bool(fields.get("use_dora")),
            lora_dropout=float(fields.get("lora_dropout") or 0),
            additional_target=",".join(name for name in whole if name != SCORE) or None,
            base_dtype=self.base_dtype,
        )

    def complete(self, config: AdapterConfig, given: Collection[str] | None) -> AdapterConfig:
        """As in `AdapterFiles`, but given targets are compared later, by `check`."""
        adopted = dict[str, Any]()
        for name in ADAPTER_OPTIONS:
            own, value = getattr(config, name), getattr(self.adapters, name)
            if own == options()[name].default if given is None else name not in given:
                adopted[name] = value
            elif name not in _COMPARED_LATER and _written(own) != _written(value):
                raise CheckpointError(
                    f"--adapter_path {self.folder} has {name} {format_json_value(_written(value))}, the run has "
                    f"{format_json_value(_written(own))}. Leave --{name} out: it is the adapter's then."
                )
        return replace(config, **adopted)

    def check(self, parts: ModelParts, base: AdapterBase) -> None:
        wanted = trained_shapes(parts)
        if SCORE_WEIGHT in wanted and not self.is_reward_model:
            raise CheckpointError(
                f"--adapter_path {self.folder} has no head of a reward model. Merge it into its base, and train the "
                f"result with --objective reward: mobius export {self.folder} FOLDER --merge"
            )
        if SCORE_WEIGHT not in wanted and self.is_reward_model:
            raise CheckpointError(f"--adapter_path {self.folder} is a reward model. Train it with --objective reward.")
        if missing := [name for name in wanted if name not in self.stored]:
            self._refuse_set(f"lacks {listed(missing)}")
        if more := [name for name in self.stored if name not in wanted]:
            self._refuse_set(f"also has {listed(more)}")
        for name, shape in wanted.items():
            if self.stored[name].shape != shape:
                self._refuse_set(f"has {name} of shape {self.stored[name].shape}, not {shape}: its base is another")
        check_base(self.folder, base)

    def values(self, parts: ModelParts) -> Mapping[str, StoredTensor]:
        return self.stored

    @classmethod
    def initial(
        cls, base: WeightSource, parts: ModelParts, folder: Path, *, seed: int, dtype: torch.dtype
    ) -> WeightSource:
        return InitialAdapterWeights.of(base, parts, seed=seed, dtype=dtype)

    @classmethod
    def config_fields(cls, parts: ModelParts, base: AdapterBase) -> dict[str, Any]:
        return lora_fields(parts, base)

    @classmethod
    def sources(cls, names: Iterable[str]) -> dict[str, list[str]]:
        return {f"{_PREFIX}{name}": [name] for name in names}

    @classmethod
    def made_of(cls, values: Mapping[str, Tensor], written: StoredTensor | None = None) -> Tensor:
        (value,) = values.values()
        return value

    def _refuse_set(self, problem: str) -> None:
        raise CheckpointError(
            f"--adapter_path {self.folder} {problem}. Its targets are "
            f"{format_json_value(self.fields.get('target_modules'))}, "
            f"{format_json_value(self.fields.get('target_parameters'))} of experts, and "
            f"{format_json_value(self.fields.get('modules_to_save'))} in full: use the same for --lora_target, "
            "--lora_target_parameters and --additional_target."
        )


class AdapterWeights:
    """Source of parameters: it reads an adapter's parameters from the adapter, and all others from the base."""

    def __init__(self, base: WeightSource, stored: Mapping[str, StoredTensor], *, dtype: torch.dtype) -> None:
        """`stored` are the adapter's values by our names, which must fit into `dtype`."""
        self._base, self._stored, self._check = base, stored, ValueCheck(dtype)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the value of parameter `name`. Raises CheckpointError."""
        return self._check.read(self._stored[name]) if name in self._stored else self._base.read(name, shape)


def _refuse_variants(folder: Path, fields: Mapping[str, Any]) -> None:
    path = folder / CONFIG_FILE
    if fields.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{path} is of the kind {format_json_value(fields.get('peft_type'))}; only LORA can be trained and merged."
        )
    if not all(isinstance(fields.get(name), int | float) and fields[name] > 0 for name in ("r", "lora_alpha")):
        raise CheckpointError(f"{path} has no 'r' and 'lora_alpha' above 0. Get the file again.")
    for name, kind in (("rank_pattern", int), ("alpha_pattern", int | float)):
        values = (fields.get(name) or {}).values() if isinstance(fields.get(name) or {}, dict) else [None]
        if not all(isinstance(value, kind) and value > 0 for value in values):
            raise CheckpointError(f"{path}: {name!r} is no mapping of names to numbers above 0. Get the file again.")
    parameters = fields.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        raise CheckpointError(f"{path}: 'target_parameters' is no list of names. Get the file again.")
    usual = {"bias": "none", "fan_in_fan_out": False}
    for name, value in usual.items():
        if fields.get(name, value) not in (value, None):
            variant = f"{name} {format_json_value(fields[name])}"
            raise CheckpointError(f"{path}: an adapter with {variant} is not supported; LoRA, rsLoRA and DoRA are.")


def _pattern(values: Mapping[str, float] | None) -> Columns | None:
    """Return a pattern of peft as an option's value."""
    named = ((_own_name(name.removesuffix(_WEIGHT_IN_PATTERN)), value) for name, value in (values or {}).items())
    return tuple((name, f"{value:g}") for name, value in named) or None


def _own_name(name: str) -> str:
    """Return our name of a module or parameter, or a pattern of it, of a base that may have more than text."""
    return _OF_WHOLE.sub(r"model\1.", name)


def _unordered(pattern: Columns | None, adapted: Iterable[str], base: AdapterBase) -> Columns:
    """Return `pattern`, or full names in its place if its order matters: peft saves its patterns sorted by name.

    A base that has more than text always gets full names.
    """
    ordered, by_name = pattern or (), tuple(sorted(pattern or ()))
    values = [(linear, str(pattern_value(ordered, linear, ""))) for linear in adapted]
    is_short = all(pattern_value(by_name, linear, "") == value for linear, value in values)
    if is_short and base.text_prefix == TEXT_PREFIX:
        return ordered
    return tuple((re.escape(base.name_of(linear)), value) for linear, value in values if value)


def _written(value: Any) -> Any:
    """Return an option's value for comparisons and messages; a pattern becomes a mapping."""
    return {name: float(number) for name, number in value} if isinstance(value, tuple) else value


def _short_names(adapted: Sequence[str], parts: ModelParts) -> list[str]:
    """Last component of each adapted linear's name, or full names if such a component matches another linear."""
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in adapted))
    linears = [name.removesuffix(".weight") for layer in parts.layers for name in layer.parameter_shapes()]
    meant = [name for name in linears if name.rpartition(".")[2] in kinds]
    return kinds if set(meant) == set(adapted) else list(adapted)


def _short_ends(whole: Sequence[str], parts: ModelParts) -> list[str]:
    """Last components of the names of modules that are trained in full, or full names if such an end fits others, too.

    peft trains every module whose name ends with a name in modules_to_save, also without a dot before it.
    """
    modules = {name.rpartition(".")[0] for name in parts.base_shapes()}
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in whole))
    meant = {name for name in modules if name.endswith(tuple(ends))}
    return ends if meant == set(whole) else list(dict.fromkeys(whole))


def weights_fingerprint(folder: Path) -> str | None:
    """Checksum of names, sizes and samples of the weight files; None without weights. Raises CheckpointError."""
    if not folder_has_weights(folder):
        return None
    value = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with open_regular(path) as file:
                size = path.stat().st_size
                for start in (0, max(0, size - _SAMPLED_BYTES)):
                    file.seek(start)
                    value = zlib.crc32(file.read(_SAMPLED_BYTES), value)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {reason_of(error)}.") from error
        value = zlib.crc32(f"{path.name} {size}".encode(), value)
    return f"{value:08x}"
