"""TRL: files of `trl sft` and `trl dpo`, names and defaults of version 1.16."""

from collections.abc import Mapping
from typing import Final

from mobius.config.options import shown
from mobius.config.recipes.preferences import take_trl_objective
from mobius.config.recipes.recipe import Recipe, TheirFile
from mobius.config.recipes.trainer import (
    refuse_adapters,
    refuse_quantization,
    take_adapters,
    take_precision,
    take_trainer,
)
from mobius.errors import listed

_LOADING: Final = {"attn_implementation", "dtype", "torch_dtype", "device_map", "low_cpu_mem_usage", "use_cache"}
"""Arguments of `from_pretrained` that change nothing here."""
_PREPARING: Final = {"add_special_tokens", "append_concat_token"}
"""Arguments of data preparation that change nothing here: tokens that the data have are not added again."""
_QUANTIZED: Final = ("load_in_8bit", "load_in_4bit")


def _translate(file: TheirFile) -> None:
    take_trainer(file, logging_steps="10")
    take_precision(file, is_bf16_default=True)
    _take_data(file)
    length = next((key for key in ("max_length", "max_seq_length") if key in file.keys), "max_length")
    if length in file.keys and file.keys[length] is None and "seq_length" not in file.launch.typed:
        file.refuse(length, "rows need a length; give the number of tokens of the longest sample")
    else:
        file.put("seq_length", file.text(length, "1024"), length)
    if not take_trl_objective(file):
        _take_targets(file)
    is_cut = file.text("packing_strategy") == "wrapped"
    file.put("packing", ("joined" if is_cut else "on") if file.is_on("packing") else "off", "packing")
    if file.is_on("use_peft"):
        take_adapters(file, "lora_target_modules", "lora_modules_to_save", _QUANTIZED, dropout=0.05)
        if not file.names("lora_target_modules") and not file.names("lora_target_parameters"):
            file.put("lora_target", "q_proj,v_proj")
    else:
        refuse_adapters(file, "use_peft", "true")
        refuse_quantization(file, _QUANTIZED)
    if token := file.text("eos_token"):
        file.tell(
            f"`eos_token: {shown(token)}`: the tokenizer's end token is trained on; if it differs, change the "
            "tokenizer in a copy of the model's folder"
        )
    preparing = file.keys.get("dataset_kwargs")
    if others := set(preparing) - _PREPARING if isinstance(preparing, dict) else {*filter(None, [preparing])}:
        file.refuse("dataset_kwargs", f"{listed(sorted(map(str, others)))} cannot be given; the data are prepared here")
    loading = file.keys.get("model_init_kwargs")
    if others := set(loading) - _LOADING if isinstance(loading, dict) else set():
        file.refuse("model_init_kwargs", f"{', '.join(sorted(others))} cannot be given; change the model's folder")


def _take_data(file: TheirFile) -> None:
    """Translate the mixture, or the single dataset and its splits."""
    mixture = file.keys.get("dataset_mixture") or {}
    if not isinstance(mixture, dict) or not isinstance(mixture.get("datasets", []), list):
        file.refuse("dataset_mixture", "it must be a mapping with a list of `datasets`")
        mixture = {}
    entries = [_dataset(file, entry) for entry in file.mappings("datasets")]
    entries += [_mixed(file, entry) for entry in mixture.get("datasets", []) if isinstance(entry, dict)]
    if name := file.text("dataset_name") if not entries else "":
        subset = {"subset": file.text("dataset_config")} if file.text("dataset_config") else {}
        entries = [{"path": name, "split": file.text("dataset_train_split", "train"), **subset}]
        is_split = file.text("test_split_size") or file.text("val_size")
        if not is_split and file.text("eval_strategy", file.text("evaluation_strategy", "no")) != "no":
            held_out = {"path": name, "split": file.text("dataset_test_split", "test"), **subset}
            file.put("eval_dataset", [held_out], "dataset_name", "dataset_test_split")
    if entries:
        file.put("dataset", entries, "dataset_name", "datasets", "dataset_mixture")
    if num_held_out := mixture.get("test_split_size") or file.text("test_split_size"):
        file.put("val_size", num_held_out, "dataset_mixture", "test_split_size")
    if file.text("dataset_text_field", "text") != "text":
        file.put("columns", {"text": file.text("dataset_text_field")}, "dataset_text_field")


def _dataset(file: TheirFile, entry: Mapping[str, object]) -> dict[str, object]:
    for key in ("fraction", "columns", "data_dir"):
        if entry.get(key):
            file.refuse("datasets", f"{key} of a dataset is not read; use Mobius' `dataset` with weight or columns")
    path = entry.get("data_files") or entry.get("path")
    names = (("subset", "name"), ("split", "split"))
    return {"path": path, **{ours: entry[theirs] for ours, theirs in names if entry.get(theirs)}}


def _mixed(file: TheirFile, entry: Mapping[str, object]) -> dict[str, object]:
    """Dataset of alignment-handbook's mixture; its `columns` list the columns to keep."""
    if unknown := set(entry) - {"id", "config", "split", "columns", "weight"}:
        file.refuse("dataset_mixture", f"{', '.join(sorted(unknown))} of a dataset is not read")
    names = (("path", "id"), ("subset", "config"), ("split", "split"), ("weight", "weight"))
    if str(entry.get("weight") or 1) not in ("1", "1.0"):
        file.tell("a `weight` below 1 draws other samples in each epoch; alignment-handbook draws them once")
    return {ours: entry[theirs] for ours, theirs in names if entry.get(theirs)}


def _take_targets(file: TheirFile) -> None:
    """Translate which tokens are trained on; TRL's default depends on the format of the data."""
    answers_only = file.is_on("assistant_only_loss") or file.is_on("completion_only_loss")
    if file.is_off("completion_only_loss") and file.text("completion_only_loss"):
        file.put("train_on_prompt", "true", "completion_only_loss")
    elif not answers_only:
        file.put("train_on_all_turns", "true")


TRL: Final = Recipe(
    name="TRL",
    signs="dataset_name+model_name_or_path dataset_name+per_device_train_batch_size dataset_name+max_length "
    "max_length+per_device_train_batch_size max_seq_length+per_device_train_batch_size use_peft+model_name_or_path "
    "assistant_only_loss+model_name_or_path completion_only_loss+model_name_or_path dataset_name+learning_rate "
    "dataset_name+output_dir dataset_mixture+model_name_or_path dataset_mixer+model_name_or_path",
    tables=(
        "trainer",
        "trl",
    ),
    translate=_translate,
)
"""TRL."""
