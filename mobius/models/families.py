"""Locates a model, reads its configuration, and decides whether its family is supported."""

from __future__ import annotations

import copy
import dataclasses
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, cast

from transformers import PretrainedConfig, __version__
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from mobius.config.config import ModelConfig, options
from mobius.errors import CheckpointError, ConfigError, excerpt, first_line
from mobius.files.regular_files import similar_path
from mobius.models.config_rules import find_inconsistent_fields, find_invalid_fields
from mobius.models.family_support import (
    checked_families,
    checked_text_parts,
    is_text_config_supported,
    supported_text_config,
    unsplittable_reason,
)
from mobius.models.layer_config import layer_configs
from mobius.models.model_files import describe_error, format_json_value, read_json_object
from mobius.models.published_shapes import PublishedShape, find_published_shape
from mobius.models.quantized_folder import find_quantization, without_quantization
from mobius.models.weights import LM_HEAD_WEIGHT, folder_has_weights, has_untied_head
from mobius.process.log import RANK_ZERO_ONLY

logger = logging.getLogger(__name__)

HUB_TIMEOUT_SECONDS, LOOK_UP_SECONDS = 10.0, 5.0
"""Seconds without an answer after which the hub counts as unreachable, for an upload and for the look-up of a model."""

_SHAPE_OPTIONS = {
    "embedding_dim": "hidden_size",
    "ff_dim": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
}

_OF_EACH_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "num_attention_heads_per_layer")
"""Fields that are lists with one entry per layer."""
_FIELDS_THAT_CHANGE = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_hidden_layers", *_OF_EACH_LAYER, "tie_word_embeddings"),
    *("architectures", "id2label", "label2id", "pad_token_id"),
)
"""Fields that `load_model_config` and `set_head` may change from the values in the file."""

_NOISE = ("dropout", "pdrop", "jitter_noise")
"""Suffixes of fields that make training random."""


ADAPTER_FILE = "adapter_config.json"
"""File that marks an adapter's folder, in our format and in peft's."""


def locate_model(model_path: str, *, with_weights: bool = True, option: str = "--model_path") -> Path:
    """Return the local folder of `model_path`, which is a folder, or a Hugging Face id in the cache or on the hub.

    Without `with_weights`, weights are not downloaded, and a cached model may lack them. If the model is not found,
    raises a CheckpointError that begins with `option` and lists every place searched.
    """
    folder, given = Path(model_path).expanduser(), f"{option} {model_path}".lstrip()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            if (folder / ADAPTER_FILE).is_file():
                raise CheckpointError(_is_adapter(given, folder))
            raise CheckpointError(f"{given}: the folder has no config.json, so it is not a Hugging Face model.")
        return folder
    advice = "Give a folder with a config.json, or an id such as meta-llama/Llama-2-7b-hf."
    known = find_published_shape(model_path)
    if known is not None and not known.is_on_hub:
        name = f", or {known.model}" if "/" in known.model else ""
        raise CheckpointError(
            f"{given}: this is a shape to plan for (--dry_run) and has no weights, and there is "
            f"no folder {folder.absolute()}. {advice.removesuffix('.')}{name}."
        )
    similar = similar_path(folder, folders_only=True)
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError

    try:
        return _fetch(model_path, with_weights)
    except HFValidationError as error:
        raise CheckpointError(
            f"{given}: there is no folder {folder.absolute()}{similar}, and this is not a Hugging Face id. {advice}"
        ) from error
    except Exception as error:
        # The hub client raises many unrelated types for a missing model; the user needs the same advice for all.
        is_default = model_path == options()["model_path"].default
        to_try = " To try Mobius without a network: bash train.sh configs/quickstart.yaml" * is_default
        raise CheckpointError(
            f"{given}: not found. Looked for a folder {folder.absolute()}{similar}, for the model in the "
            f"cache {constants.HF_HUB_CACHE}, and on the hub ({type(error).__name__}: {first_line(error)}). Without a "
            f"network, run `hf download {model_path} --local-dir MODEL` on a machine that has one, copy the folder and "
            f"give {f'{option} MODEL'.lstrip()}.{to_try}"
        ) from error


def _is_adapter(given: str, folder: Path) -> str:
    """Error message if the user passes an adapter's folder as a model."""
    fields = read_json_object(folder / ADAPTER_FILE)
    base, number = fields.get("base_model_name_or_path"), fields.get("num_virtual_tokens")
    name = excerpt(base) if isinstance(base, str) and base else "BASE"
    if isinstance(number, int):
        kind = "prefix" if fields.get("peft_type") == "PREFIX_TUNING" else "prompt"
        return (
            f"{given}: the folder holds a trained {kind}. To continue its training or to evaluate it, use --model_path "
            f"{name} --finetuning_type {kind} --adapter_path {folder}."
        )
    return (
        f"{given}: the folder holds an adapter. To continue its training, use --model_path {name} --use_lora "
        f"--adapter_path {folder}. To evaluate it or to train all parameters, run mobius export {folder} FOLDER "
        "--merge, and give --model_path FOLDER."
    )


def _fetch(model_path: str, with_weights: bool) -> Path:
    """Download the model from the hub; if the hub is unreachable or refuses, use an earlier download.

    With `with_weights`, an earlier download without weights is not used: the run would start from fresh weights.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        _look_up(model_path)
    except Exception as error:
        try:
            folder = Path(snapshot_download(model_path, local_files_only=True))
        except LocalEntryNotFoundError:
            raise error from None
        if with_weights and not folder_has_weights(folder):
            raise
        return folder
    patterns = ["*.json", "*.model", "*.jinja", "*.txt", *(["*.safetensors"] if with_weights else [])]
    return Path(snapshot_download(model_path, allow_patterns=patterns))


def _look_up(model_path: str) -> None:
    """Ask the hub for the model; raises the hub's error if the model is not there, or TimeoutError.

    If a firewall drops packets, snapshot_download waits for minutes. The client's time limit applies to each address of
    the hub separately, and not to the DNS look-up. So a thread asks, and after LOOK_UP_SECONDS nobody waits for it.
    """
    from huggingface_hub import HfApi

    answer: SimpleQueue[Exception | None] = SimpleQueue()

    def ask() -> None:
        try:
            HfApi().model_info(model_path, timeout=LOOK_UP_SECONDS)
            answer.put(None)
        except Exception as error:
            answer.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        error = answer.get(timeout=LOOK_UP_SECONDS)
    except Empty:
        raise TimeoutError(f"no answer in {LOOK_UP_SECONDS:g} s") from None
    if error is not None:
        raise error


def load_model_config(folder: Path, options: ModelConfig) -> PretrainedConfig:
    """Read `folder`'s configuration and apply the shape options.

    If the folder has weights, only `num_layers` may shrink the model; other shape options that differ from the
    checkpoint are ignored with a warning. Without weights all shape options apply. Raises CheckpointError for
    unsupported families and for invalid values.
    """
    config = _own_config(folder, options)
    has_weights = folder_has_weights(folder)
    _apply_options(config, options, has_weights=has_weights)
    if has_weights and config.tie_word_embeddings and has_untied_head(folder):
        text = (
            "%s ties the head to the embedding (tie_word_embeddings), but the checkpoint stores two matrices: they are "
            "trained separately, as transformers loads them, and saved with tie_word_embeddings false"
        )
        logger.warning(text, folder / "config.json", extra=RANK_ZERO_ONLY)
        config.tie_word_embeddings = False
    return config


def softcap_attention_implementation(config: PretrainedConfig) -> str | None:
    """Name of the transformers attention that applies the model's softcap; None if the model has no softcap.

    Other attention of transformers silently omits the softcap; before 5.23, it was the default for such models.
    """
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None


def plain_attention(config: PretrainedConfig) -> str:
    """Name of the transformers attention for rows that are one document: sdpa if the model's family runs it."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return softcap_attention_implementation(config) or ("sdpa" if getattr(kind, "_supports_sdpa", True) else "eager")


def changed_fields(base: Mapping[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    """Fields in which `config`, from `load_model_config`, differs from `base`, the contents of its file."""
    before = type(config).from_dict(copy.deepcopy(dict(base)))
    by_layer = getattr(config, "per_layer_attributes", None) or ()
    changed = {
        field: getattr(config, field)
        for field in _FIELDS_THAT_CHANGE
        if field not in by_layer and hasattr(config, field) and getattr(config, field) != getattr(before, field)
    }
    layers, layers_before = (each.to_dict().get("per_layer_config") for each in (config, before))
    return changed if layers == layers_before else changed | {"per_layer_config": layers}


def _own_config(folder: Path, options: ModelConfig) -> PretrainedConfig:
    """Read the folder's configuration, without applying options. Raises a CheckpointError that names --model_path."""
    try:
        config = _read_config(folder / "config.json")
    except CheckpointError as error:
        raise CheckpointError(f"--model_path {options.model_path}: {error}") from error
    _warn_of_noise(config, folder)
    return config


def _warn_of_noise(config: PretrainedConfig, folder: Path) -> None:
    """Warn that dropout and router noise in the configuration are not applied."""
    fields = {name: value for name, value in config.to_dict().items() if name.endswith(_NOISE)}
    fields.pop("classifier_dropout", None)  # not part of a language model
    if noise := [f"{name} {value}" for name, value in fields.items() if isinstance(value, float) and value]:
        text = (
            "%s sets %s: training ignores this, because backward recomputes layers and would draw other random "
            "numbers; the saved configuration keeps it"
        )
        logger.warning(text, folder / "config.json", " and ".join(noise), extra=RANK_ZERO_ONLY)


def _read_config(path: Path) -> PretrainedConfig:
    """Read a configuration; raise CheckpointError unless its family is supported and its fields are valid."""
    fields = _fields_of_text(path)
    family = fields.get("model_type")
    checked = checked_families()
    supported = f"Supported: {checked.names}."
    if not isinstance(family, str):
        raise CheckpointError(f"{path} names no family ('model_type' is {format_json_value(family)}). {supported}")
    if (reason := _why_not(family, fields)) is not None:
        raise CheckpointError(f"{path} is of the family {family!r}, which is not supported: {reason}. {supported}")
    if family not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{path} is of the family {family!r}, which the installed transformers {__version__} does not know; "
            f"{checked.transformers} does."
        )
    family_class = cast(type[PretrainedConfig], CONFIG_MAPPING[family])
    problems = find_invalid_fields(fields, {field.name for field in dataclasses.fields(family_class)})
    if not problems:
        try:
            config = family_class.from_dict(copy.deepcopy(fields))
            config._name_or_path = str(path.parent)  # replaces the name stored in the file
            problems = find_inconsistent_fields(config)
        except Exception as error:  # transformers and its validators raise arbitrary types for bad values
            raise CheckpointError(f"{path} is refused by transformers: {describe_error(error)}") from error
    if problems:
        raise CheckpointError(f"{path}: {'; '.join(problems)}. Correct the file, or get it again.")
    if reason := unsplittable_reason(config):
        raise CheckpointError(f"{path}: {reason}")
    return config


def _why_not(family: str, fields: Mapping[str, Any]) -> str | None:
    """Reason (a clause) why models of `family` cannot be trained, or None if they can."""
    checked = checked_families()
    reason = checked.unsupported_reason(family)
    if reason is None or is_text_config_supported(family):
        return None
    if (of_part := checked_text_parts().get(family)) is not None:
        return f"it is more than a text model, and its text part {of_part['refused']}"
    if (text := _family_of_text(fields)) in checked.supported:
        return (
            f"it is more than a text model. Its text part ('text_config') is of the family {text!r}, which is "
            "supported: save only that part with transformers, and use its folder"
        )
    return reason


def _fields_of_text(path: Path) -> dict[str, Any]:
    """Fields of the file; for a multimodal model, the fields of its text part as a text model.

    Raises CheckpointError.
    """
    fields = read_json_object(path)
    _refuse_foreign(path, fields)
    fields = without_quantization(fields)
    try:
        part = supported_text_config(fields)
    except Exception as error:  # transformers and its validators raise arbitrary types for bad values
        raise CheckpointError(f"{path} is refused by transformers: {describe_error(error)}") from error
    if part is None:
        if is_text_config_supported(family := fields.get("model_type")) and family in CONFIG_MAPPING:
            raise CheckpointError(
                f"{path} describes more than a text model ({family}), and its 'text_config' is of the family "
                f"{format_json_value(_family_of_text(fields))}, which is not a causal language model. Supported: "
                f"{checked_families().names}."
            )
        return fields
    logger.warning(
        "%s describes more than a text model (%s): its text part (%s) is trained as a text model; not trained: %s",
        *(path, part.full_model_type, part.fields["model_type"], ", ".join(part.ignored_configs) or "its other parts"),
        extra=RANK_ZERO_ONLY,
    )
    return part.fields


def _family_of_text(fields: Mapping[str, Any]) -> object:
    text = fields.get("text_config")
    return text.get("model_type") if isinstance(text, dict) else None


def _refuse_foreign(path: Path, fields: Mapping[str, Any]) -> None:
    """Raise CheckpointError for models with custom code and for quantized models whose format is not read."""
    auto_map = fields.get("auto_map")
    if isinstance(auto_map, dict) and (code := auto_map.get("AutoModelForCausalLM") or auto_map.get("AutoConfig")):
        raise CheckpointError(
            f"{path} names custom code ('auto_map': {format_json_value(code)}), which is not run. If transformers' own "
            f"{format_json_value(fields.get('model_type'))} is the same model, remove 'auto_map' from the file; if "
            f"not, the model cannot be trained. Supported: {checked_families().names}."
        )

    quantization = find_quantization(fields)
    if quantization is not None and quantization.refusal is not None:
        raise CheckpointError(
            f"{path} describes a quantized model ({quantization.field!r}, method "
            f"{format_json_value(quantization.method)}), which is not read: {quantization.refusal}. Give the "
            "unquantized checkpoint it was made from, or dequantize it with transformers (`model.dequantize()`, then "
            "`save_pretrained`)."
        )


def _apply_options(config: PretrainedConfig, options: ModelConfig, *, has_weights: bool) -> None:
    """Apply the shape options; a model with weights allows only a smaller `num_layers`. Raises ConfigError."""
    config._attn_implementation = plain_attention(config)
    width, asked = (config.hidden_size, config.num_attention_heads), list[str]()
    for option, field in _SHAPE_OPTIONS.items():
        wanted, own = getattr(options, option), getattr(config, field, None)
        if wanted is None or wanted == own:
            continue
        if has_weights and option != "num_layers":
            text = "--%s %s differs from the checkpoint's %s %s: the checkpoint's is used"
            logger.warning(text, option, wanted, field, own, extra=RANK_ZERO_ONLY)
            continue
        if has_weights and wanted > own:
            raise ConfigError(
                f"--num_layers {wanted} is more than the {own} layers of --model_path {options.model_path}."
            )
        if has_weights:
            text = "--num_layers %s: only the first %s of the checkpoint's %s layers are used"
            logger.warning(text, wanted, wanted, own, extra=RANK_ZERO_ONLY)
        if problems := find_invalid_fields({field: wanted}, {field}):
            raise ConfigError(f"--{option} {wanted} describes no model: {problems[0]}.")
        if own is None:
            raise ConfigError(
                f"--{option} {wanted} would change nothing: the family {config.model_type!r} has no {field}. Leave it "
                "out, or change config.json."
            )
        _set_shape(config, field, wanted)
        asked.append(f"--{option} {wanted}")
    is_width_new = width != (config.hidden_size, config.num_attention_heads)
    if is_width_new and _head_follows(config):
        if config.hidden_size % (2 * config.num_attention_heads):  # even, as rotary embeddings rotate pairs
            raise ConfigError(
                f"--embedding_dim {config.hidden_size} does not divide into {config.num_attention_heads} attention "
                f"heads (--num_heads) of equal, even width. Use a multiple of {2 * config.num_attention_heads}."
            )
        if hasattr(config, "head_dim"):  # families without this field derive the head size
            config.head_dim = config.hidden_size // config.num_attention_heads
    if asked:
        _check_shape(config, " ".join(asked))


def _check_shape(config: PretrainedConfig, asked: str) -> None:
    """Raise ConfigError if transformers could not read the saved configuration, or would change its layers."""
    kinds = list(getattr(config, "layer_types", None) or ())
    try:
        read = type(config).from_dict(config.to_dict())
    except Exception as error:  # validators raise arbitrary types
        raise ConfigError(f"{asked} describes no model of {config.model_type!r}: {describe_error(error)}") from error
    if kinds != list(getattr(read, "layer_types", None) or ()):
        raise ConfigError(
            f"{asked} describes no model of {config.model_type!r}: its last layer must be of the kind "
            f"{read.layer_types[-1]!r}, here it is {kinds[-1]!r}. Choose a --num_layers that ends with such a layer."
        )


def _head_follows(config: PretrainedConfig) -> bool:
    """Whether the family derives the head size from hidden size and number of heads."""
    own = {field.name: field.default for field in dataclasses.fields(cast(Any, config))}
    return own.get("head_dim") is None and "qk_nope_head_dim" not in own


def _set_shape(config: PretrainedConfig, field: str, value: int) -> None:
    """Set one dimension and the fields derived from it. Raises ConfigError."""
    if field == "num_attention_heads":
        key_value_heads = {getattr(layer, "num_key_value_heads", None) for layer in layer_configs(config)}
        if key_value_heads == {config.num_attention_heads}:
            config.num_key_value_heads = value
        elif wrong := [number for number in key_value_heads if number and value % number]:
            raise ConfigError(f"--num_heads {value} is not a multiple of the model's {wrong[0]} key-value heads.")
    own, number = config.to_dict().get("per_layer_config") or {}, config.num_hidden_layers
    setattr(config, field, value)
    if field == "num_hidden_layers" and own:
        by_layer = {int(layer): fields for layer, fields in own.items()}
        config.per_layer_config = {
            layer: by_layer[layer % number] for layer in range(value) if layer % number in by_layer
        }
    for name in _OF_EACH_LAYER if field == "num_hidden_layers" else ():
        if kinds := getattr(config, name, None):
            setattr(config, name, [kinds[layer % len(kinds)] for layer in range(value)])


class PlannedModel(NamedTuple):
    """The model to plan for."""

    config: PretrainedConfig
    folder: Path | None = None
    """Folder of the model's files; None for a shape without files."""
    undownloaded_bytes: int = 0
    """Bytes of hub weights that were not downloaded."""
    name: str | None = None
    """Display name of a shape without files, including a model with this shape."""


def load_planned_config(options: ModelConfig) -> PlannedModel:
    """The model to plan for, with shape options applied as in a run.

    A local folder takes precedence over a short name (`7b`, `Qwen3-8B`). If a hub model is unavailable and its shape is
    known, the shape is used and a log line says so. Hub weights are downloaded only if their index is not enough for a
    plan. Raises CheckpointError like `locate_model` and `load_model_config`.
    """
    name = options.model_path
    known = None if Path(name).expanduser().is_dir() else find_published_shape(name)
    if known is not None and not known.is_on_hub:
        return _of_shape(known, options)
    try:
        folder = locate_model(name, with_weights=False)
    except CheckpointError:
        if known is None:
            raise
        logger.info("%s is not available here: planning for its known shape (training needs the model)", name)
        return _of_shape(known, options)
    if not Path(name).expanduser().is_dir():
        if (unseen := _by_index(folder, options)) is not None:
            return unseen
        folder = locate_model(name)
    return PlannedModel(load_model_config(folder, options), folder)


def _by_index(folder: Path, options: ModelConfig) -> PlannedModel | None:
    """Planned model from the index of its weights; None if the folder has the weights, or if a plan must read them.

    If the model ties embedding and head but stores both, only their values show whether they are one matrix.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file() or (folder / "model.safetensors").is_file():
        return None
    listed = read_json_object(index)
    files, metadata = listed.get("weight_map"), listed.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(files, dict) or not isinstance(size, int):
        return None
    config = _own_config(folder, options)
    is_ambiguous = config.tie_word_embeddings and any(name.endswith(LM_HEAD_WEIGHT) for name in files)
    if is_ambiguous or all((folder / str(file)).is_file() for file in files.values()):
        return None
    _apply_options(config, options, has_weights=True)
    return PlannedModel(config, folder, size)


def _of_shape(known: PublishedShape, options: ModelConfig) -> PlannedModel:
    """Planned model of a `known` shape; the shape of a hub model restricts shape options as its weights would."""
    config: PretrainedConfig = CONFIG_MAPPING[str(known.fields["model_type"])].from_dict(dict(known.fields))
    _apply_options(config, options, has_weights=known.is_on_hub)
    return PlannedModel(config, name=known.describe(options.model_path))
