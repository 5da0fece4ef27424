"""Translates transformers' TrainingArguments, which LLaMA-Factory and TRL share, and keys that all tools have."""

import json
from collections.abc import Sequence
from typing import Final

from mobius.config.config import ADAPTER_OPTIONS
from mobius.config.objective import ObjectiveName
from mobius.config.options import PARTS
from mobius.config.recipes.recipe import TheirFile

PER_DEVICE: Final = "per_device_train_batch_size"
PARTS_BY_MODULE: Final = {
    **dict.fromkeys(("embed_tokens", "model.embed_tokens", "embedding", "wte"), "embedding"),
    **dict.fromkeys(("lm_head", "head"), "head"),
    **dict.fromkeys(("norm", "norms"), "norms"),
}
"""Modules for which Mobius has other words."""


def take_trainer(file: TheirFile, *, rows: float = 8, epochs: str = "3", logging_steps: str = "500") -> None:
    """Translate the keys of TrainingArguments that depend on each other; the defaults are the tool's."""
    take_batch(file, PER_DEVICE, rows)
    take_length(file, "num_train_epochs", epochs)
    kind = file.text("lr_scheduler_type", "linear")
    file.put("lr_scheduler_type", kind, "lr_scheduler_type")
    take_schedule_arguments(file)
    warmup = file.number("warmup_steps", 0) or file.number("warmup_ratio", 0)
    file.put("warmup_steps", f"{0 if kind == 'constant' else warmup:g}", "warmup_steps", "warmup_ratio")
    every = file.text("eval_steps") or file.text("logging_steps") or logging_steps
    file.put("eval_steps", every, "eval_steps")
    take_resume(file)
    if file.names("report_to"):
        file.put("report_to", ",".join(file.names("report_to")), "report_to")
    if file.is_on("use_cpu") or file.is_on("no_cuda"):
        file.put("device", "cpu", "use_cpu", "no_cuda")


def take_batch(file: TheirFile, rows_key: str, default: float, *, per_batch: int = 1) -> None:
    """Translate batch and accumulation of a process, or of `per_batch` processes with one batch, to a step's batch."""
    launch, accumulation = file.launch, "gradient_accumulation_steps"
    rows = int(file.number(rows_key, default))
    steps = int(file.number(accumulation, file.number("batch_size", 0) // rows if rows else 1)) or 1
    processes = max(1, launch.num_processes // max(1, per_batch))
    batch, chunks = rows * steps * processes, steps * max(1, launch.pipeline_ranks // max(1, per_batch))
    file.put("batch_size", str(batch), rows_key, accumulation)
    if "batch_size" not in launch.typed:
        if PARTS.allow(chunks):
            file.put("num_chunks", str(chunks), accumulation)
        file.facts.append(f"batch_size {batch} = {rows_key} {rows} x {accumulation} {steps} x {processes} processes")


def take_length(file: TheirFile, epochs_key: str, default: str) -> None:
    """Translate steps or epochs; steps have priority."""
    if (steps := file.number("max_steps", -1)) > 0:
        file.put("num_iterations", f"{steps:.0f}", "max_steps")
    else:
        file.put("num_train_epochs", file.text(epochs_key, default), epochs_key)


def take_schedule_arguments(file: TheirFile) -> None:
    """Translate the arguments of the schedule: a mapping, or the text of a JSON object."""
    given = file.keys.get("lr_scheduler_kwargs")
    if isinstance(given, str):
        try:
            given = {str(name): str(value) for name, value in json.loads(given).items()}
        except (ValueError, AttributeError, RecursionError):
            file.refuse("lr_scheduler_kwargs", "it must be a mapping, such as min_lr: 1e-6")
    if given:
        file.put("lr_scheduler_kwargs", given, "lr_scheduler_kwargs")


def take_resume(file: TheirFile) -> None:
    """Translate the checkpoint to resume from."""
    if file.text("resume_from_checkpoint").lower() not in ("", "false"):
        given = "true" if file.is_on("resume_from_checkpoint") else file.text("resume_from_checkpoint")
        file.put("resume_from_checkpoint", given, "resume_from_checkpoint")


def take_precision(file: TheirFile, *, is_bf16_default: bool, bf16_keys: Sequence[str] = ("bf16",)) -> None:
    """Translate the format of computation; fp32 if all formats are off, as in the tool."""
    if any(file.is_on(key) or file.text(key) in ("auto", "full") for key in bf16_keys):
        dtype = "bf16"
    elif file.is_on("fp16") or file.is_on("float16"):
        dtype = "fp16"
    else:
        dtype = "bf16" if is_bf16_default and not any(file.is_off(key) for key in bf16_keys) else "fp32"
    file.put("dtype", dtype, *bf16_keys, "fp16")


def refuse_quantization(file: TheirFile, keys: Sequence[str]) -> None:
    """Refuse a quantized model without adapters: its quantized weights would be trained."""
    for key in filter(file.asks_for, keys):
        file.refuse(key, "Mobius does not train quantized weights; this key is accepted only with adapters")


def refuse_adapters(file: TheirFile, key: str, on: str) -> None:
    """Refuse settings of adapters if no key says whether adapters are trained; `key: on` would say so."""
    settings = ("lora_r", "lora_alpha", "lora_target_modules", "lora_target_linear", "lora_target_parameters")
    if key not in file.keys and (given := next(filter(file.asks_for, settings), "")):
        off = f"{key}: {'false' if on == 'true' else 'null'}"
        file.refuse(given, f"adapters are not on; `{key}: {on}` trains them, and `{off}` all parameters")


_BASE_FORMATS: Final = {"4": "nf4", "8": "int8", "load_in_4bit": "nf4", "load_in_8bit": "int8"}
"""Number of bits, or key that asks for it -> --base_dtype."""


def take_adapters(
    file: TheirFile, target: str, modules_key: str, quantized: Sequence[str], *, dropout: float = 0.0
) -> None:
    """Translate the layers with adapters, the modules trained with them, and the format of the frozen base.

    `quantized` are the tool's keys of this format, and `dropout` is its default.
    """
    for key in filter(file.asks_for, quantized):
        base_dtype = _BASE_FORMATS.get(key) or _BASE_FORMATS.get(file.text(key))
        if base_dtype is None:
            file.refuse(key, "a frozen base has 4 bits (--base_dtype nf4) or 8 (int8) here")
        else:
            file.put("base_dtype", base_dtype, key)
    file.put("finetuning_type", "lora")
    names = file.names(target)
    parameters = file.names("lora_target_parameters")
    all_or_none = "none" if parameters and not file.asks_for("lora_target_linear") else "all"
    file.put("lora_target", "all" if names in (["all"], ["all-linear"]) else ",".join(names) or all_or_none, target)
    if parameters:
        file.put("lora_target_parameters", ",".join(parameters), "lora_target_parameters")
    modules = file.names(modules_key)
    found = file.given.get("objective", (file.text("objective"), ""))[0]
    objective = file.launch.typed.get("objective", found) or ObjectiveName.SFT
    if objective == ObjectiveName.SFT:
        file.put("lora_dropout", f"{file.number('lora_dropout', dropout):g}", "lora_dropout")
    elif file.number("lora_dropout", 0):
        file.tell(f"`lora_dropout: {file.text('lora_dropout')}` is left out: trainers of preferences switch it off")
    if objective == ObjectiveName.REWARD:
        modules = [name for name in modules if name != "score"]  # the head of a reward model is always trained
    if modules:
        file.put("additional_target", ",".join(PARTS_BY_MODULE.get(name, name) for name in modules), modules_key)
    if "adapter_path" in file.given:  # the tools, too, use the adapter's own options then
        file.given = {name: each for name, each in file.given.items() if name not in ADAPTER_OPTIONS}
