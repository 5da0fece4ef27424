"""Axolotl: the YAML files of `axolotl train`, names and defaults of version 0.19."""

import math
from collections.abc import Mapping
from typing import Final

from mobius.config.config import TRACKERS
from mobius.config.objective import ObjectiveName
from mobius.config.recipes.preferences import take_axolotl_objective
from mobius.config.recipes.recipe import Recipe, TheirFile
from mobius.config.recipes.trainer import (
    refuse_adapters,
    refuse_quantization,
    take_adapters,
    take_batch,
    take_length,
    take_precision,
    take_resume,
    take_schedule_arguments,
)
from mobius.errors import excerpt

TEMPLATES: Final = ("chatml", "llama3", "gemma", "alpaca")
"""Axolotl's templates for which a built-in template has the same name."""
_QUANTIZED: Final = ("load_in_8bit", "load_in_4bit")
_SHARING: Final = ("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree")
"""Keys whose values are numbers of processes that share a batch."""
_HARMLESS_PLUGINS: Final = (
    "LigerPlugin",
    "CutCrossEntropyPlugin",
    "KernelsPlugin",
    "ExpertParallelPlugin",
    "SwanLabPlugin",
)
_USUAL_TOKENS: Final = {"bos_token": ("<s>",), "eos_token": ("</s>",), "unk_token": ("<unk>",)}
"""Special tokens that every Llama 2 tokenizer has."""
_MESSAGE_KEYS: Final = ({"role": "role", "content": "content"}, {"role": "from", "content": "value"})
_SAME_PLACE: Final = ("json", "csv", "parquet", "text", "arrow")
_ANSWER: Final = {"output": "completion"}
_COLUMNS: Final[Mapping[str, Mapping[str, Mapping[str, str]]]] = {
    "pairs": {
        "argilla": {"chosen": "chosen_response", "rejected": "rejected_response"},
        "argilla_chat": {},
        "icr": {"instruction": "input"},
        "intel": {"instruction": "question"},
        "prompt_pairs": {"instruction": "prompt"},
        "ultra": {},
    },
    "kto": {
        "argilla": _ANSWER,
        "argilla_chat": {"messages": "completion"},
        "intel": {"instruction": "question", **_ANSWER},
        "prompt_pairs": {"instruction": "prompt", **_ANSWER},
        "ultra": {"instruction": "prompt", **_ANSWER},
    },
}
"""Form of the data -> type of Axolotl's chatml and llama3 -> columns, by the names of the formats that read them."""
_UNREAD: Final = {"shards", "preprocess_shards", "skip", "revision", "drop_system_message", "roles"}
"""Keys of a dataset that would change the data, but are not supported."""


def _translate(file: TheirFile) -> None:
    take_batch(file, "micro_batch_size", 1, per_batch=math.prod(int(file.number(key, 1)) for key in _SHARING))
    take_length(file, "num_epochs", "1")
    _take_schedule(file)
    file.put("packing", "on" if file.is_on("sample_packing") else "off", "sample_packing")
    _take_data(file, take_axolotl_objective(file))
    take_precision(file, is_bf16_default=True, bf16_keys=("bf16", "bfloat16"))
    if "learning_rate" not in file.keys:
        file.problems.append("Axolotl has no default of learning_rate; give one")
    match file.text("adapter"):
        case "lora" | "qlora":
            take_adapters(file, "lora_target_modules", "lora_modules_to_save", _QUANTIZED)
        case "":
            file.put("finetuning_type", "full")
            refuse_adapters(file, "adapter", "lora")
            refuse_quantization(file, _QUANTIZED)
        case _:
            file.refuse("adapter", "it must be lora or qlora")
    _take_saves(file)
    take_resume(file)
    if file.is_on("auto_resume_from_checkpoints"):
        file.put("resume_from_checkpoint", "true", "auto_resume_from_checkpoints")
    trackers = [
        name for name in TRACKERS if file.is_on(f"use_{name}") or (name == "wandb" and file.text("wandb_project"))
    ]
    if trackers:
        file.put("report_to", ",".join(trackers), "wandb_project", *(f"use_{name}" for name in trackers))
    if name := file.text("hub_model_id"):
        file.put("push_to_hub", "true", "hub_model_id")
        file.put("hub_model_id", name, "hub_model_id")
    tokens = file.keys.get("special_tokens")
    given = {**tokens, "pad_token": None} if isinstance(tokens, dict) else {}
    if others := {name for name, token in given.items() if token not in (None, *_USUAL_TOKENS.get(name, ()))}:
        file.refuse("special_tokens", f"{', '.join(sorted(others))}: change the tokenizer's own files instead")
    if file.is_on("fp8"):
        file.put("matmul_dtype", "fp8", "fp8")
    if others := {name for name in file.names("plugins") if name.rpartition(".")[2] not in _HARMLESS_PLUGINS}:
        file.refuse("plugins", f"{', '.join(sorted(others))} cannot run here; plugins of kernels are not needed")


def _take_schedule(file: TheirFile) -> None:
    kind = file.text("lr_scheduler", "cosine")
    if (ratio := file.number("cosine_min_lr_ratio", 0)) >= 1:
        file.put("lr_scheduler_type", "constant_with_warmup", "lr_scheduler", "cosine_min_lr_ratio")
    elif ratio:
        file.put("lr_scheduler_type", "cosine_with_min_lr", "lr_scheduler", "cosine_min_lr_ratio")
        file.put("lr_scheduler_kwargs", {"min_lr_rate": f"{ratio:g}"}, "cosine_min_lr_ratio")
    else:
        file.put("lr_scheduler_type", kind, "lr_scheduler")
        take_schedule_arguments(file)
    share = file.number("warmup_ratio", 0.03 if "warmup_ratio" not in file.keys else 0)
    warmup = file.number("warmup_steps", 0) if file.text("warmup_steps") else share
    file.put("warmup_steps", f"{0 if kind == 'constant' else warmup:g}", "warmup_steps", "warmup_ratio")


def _take_saves(file: TheirFile) -> None:
    """Translate when to save and when to evaluate: after a number of steps, or a number of times per epoch."""
    epochs = file.number("num_epochs", 1)
    has_data = bool(file.number("val_set_size", 0) or file.mappings("test_datasets"))
    for word, per_epoch in (("save", "saves_per_epoch"), ("eval", "evals_per_epoch")):
        every, times, asked = file.text(f"{word}_steps"), file.number(per_epoch, 0), file.text(f"{word}_strategy")
        if word == "eval" and not has_data:
            file.put("eval_strategy", "no", "eval_strategy")
        elif every or (times > 1 and epochs > 0):
            file.put(f"{word}_strategy", "steps", f"{word}_steps", per_epoch)
            file.put(f"{word}_steps", every or f"{1 / (times * epochs):.6g}", f"{word}_steps", per_epoch)
        else:
            file.put(f"{word}_strategy", asked or "epoch", f"{word}_strategy", per_epoch)


def _take_data(file: TheirFile, objective: ObjectiveName) -> None:
    templates = set[str]()
    for key, option in (("datasets", "dataset"), ("test_datasets", "eval_dataset"), ("pretraining_dataset", "dataset")):
        value = file.keys.get(key)
        if isinstance(value, str):
            file.put(option, [{"path": value}], key)
        elif entries := file.mappings(key):
            kind = "completion" if key == "pretraining_dataset" else ""
            parts = (_datasets(file, key, entry, kind, templates, objective) for entry in entries)
            file.put(option, [each for part in parts for each in part], key)
    if file.keys.get("pretraining_dataset"):
        file.put("packing", "joined", "pretraining_dataset")
    if len(templates) > 1:
        file.refuse("datasets", f"a run has one chat template, but the datasets ask for {', '.join(sorted(templates))}")
    elif (name := "".join(templates)) and "chat_template" not in file.launch.typed:
        file.put("chat_template", name, "chat_template")


def _datasets(
    file: TheirFile, key: str, entry: Mapping[str, object], kind: str, templates: set[str], objective: ObjectiveName
) -> list[dict[str, object]]:
    """Datasets of one entry, one for each of its files; adds the entry's chat template to `templates`."""
    columns, kind = dict[str, str](), kind or str(entry.get("type") or "")
    kind, _, field = kind.partition(":") if kind.startswith("completion") else (kind, "", "")
    if others := {name for name in entry if entry[name]} & _UNREAD:
        file.refuse(key, f"{', '.join(sorted(others))} of a dataset cannot be taken")
    match kind:
        case _ if objective is not ObjectiveName.SFT:
            columns = _preference_columns(file, key, entry, kind, templates, objective)
        case "completion" | "pretrain":
            field = field or str(entry.get("field") or entry.get("text_column") or "text")
            columns = {} if field == "text" else {"text": field}
        case "alpaca":
            templates.add("alpaca")
            file.tell("`type: alpaca`: an input stands below the instruction, without a heading of its own")
        case "chat_template" | "sharegpt":
            _check_messages(file, key, entry)
            messages = str(entry.get("field_messages") or ("conversations" if kind == "sharegpt" else "messages"))
            columns = {} if messages in ("messages", "conversations") else {"messages": messages}
            templates.add(_template_of(file, entry))
        case _:
            file.refuse(key, f"type {excerpt(kind or 'of its own')}: use chat_template, alpaca or completion")
    paths = entry.get("path")
    if entry.get("data_files") and paths in _SAME_PLACE:
        paths = entry["data_files"]
    elif entry.get("data_files"):
        file.refuse(key, "data_files of a dataset of the hub cannot be taken; give the files themselves as path")
    names = (("subset", "name"), ("subset", "subset"), ("split", "split"))
    rest: dict[str, object] = {ours: entry[theirs] for ours, theirs in names if entry.get(theirs)}
    rest |= {"columns": columns} if columns else {}
    return [{"path": path, **rest} for path in (paths if isinstance(paths, list) else [paths])]


def _preference_columns(
    file: TheirFile, key: str, entry: Mapping[str, object], kind: str, templates: set[str], objective: ObjectiveName
) -> dict[str, str]:
    """Columns of pairs, or of answers with a label; adds the template that the type names to `templates`."""
    family, _, name = kind.partition(".")
    is_kto, form = objective is ObjectiveName.KTO, "kto" if objective is ObjectiveName.KTO else "pairs"
    if family == "chat_template" and not is_kto and name in ("", "default", "argilla", "argilla_chat"):
        _check_messages(file, key, entry)
        templates.add(_template_of(file, entry))
        fields = ("chosen", "rejected") if name.startswith("argilla") else ("messages", "chosen", "rejected")
        named = {field: str(entry.get(f"field_{field}") or field) for field in fields}
        return {field: column for field, column in named.items() if field != column}
    columns = _COLUMNS[form].get(name) if family in ("chatml", "llama3") else None
    if columns is None or objective is ObjectiveName.ORPO:
        known = "chat_template.argilla" if objective is ObjectiveName.ORPO else f"chatml.{', '.join(_COLUMNS[form])}"
        file.refuse(key, f"type {excerpt(kind or 'of its own')} cannot be taken for {objective}: use {known}")
        return {}
    templates.add(family)
    return dict(columns)


def _template_of(file: TheirFile, entry: Mapping[str, object]) -> str:
    template = str(entry.get("chat_template") or file.text("chat_template"))
    given = entry.get("chat_template_jinja") or file.text("chat_template_jinja")
    return _check_template(file, str(given) if template in ("", "jinja") and given else template)


def _check_messages(file: TheirFile, key: str, entry: Mapping[str, object]) -> None:
    """Refuse messages if Mobius would read their keys or roles differently."""
    mapping = entry.get("message_property_mappings")
    given = {name: str(entry[old]) for name in ("role", "content") if entry.get(old := f"message_field_{name}")}
    given |= {str(name): str(theirs) for name, theirs in mapping.items()} if isinstance(mapping, dict) else {}
    if given and not any(given.items() <= known.items() for known in _MESSAGE_KEYS):
        file.refuse(key, "messages must have role and content, or from and value")
    trained = entry.get("roles_to_train")
    if trained not in (None, ["assistant"], ["gpt"], ["gpt", "assistant"], ["assistant", "gpt"]):
        file.refuse(key, "roles_to_train: only answers are trained on; --train_on_prompt trains on all")
    if entry.get("train_on_eos") not in (None, "turn", "all"):
        file.refuse(key, "train_on_eos: each answer ends with the end-of-sequence token, which is trained on (turn)")


def _check_template(file: TheirFile, name: str) -> str:
    """Name or path of a chat template; for a name that is not built in, the tokenizer's is used, with a notice."""
    if name in TEMPLATES or name.endswith((".jinja", ".jinja2", ".j2")):
        return name
    if name and not name.startswith("tokenizer_default"):
        file.tell(f"`chat_template: {excerpt(name)}`: the tokenizer's template is used, whose text may differ")
    return ""


AXOLOTL: Final = Recipe(
    name="Axolotl",
    signs="base_model+datasets base_model+micro_batch_size base_model+sequence_len base_model+pretraining_dataset "
    "base_model+adapter micro_batch_size+sequence_len",
    tables=("axolotl",),
    translate=_translate,
)
"""Axolotl."""
