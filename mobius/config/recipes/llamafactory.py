"""LLaMA-Factory: the YAML files of `llamafactory-cli train`, names and defaults of version 0.9.5."""

import difflib
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from mobius.config.recipes.dataset_info import Rows, read_dataset_info
from mobius.config.recipes.preferences import take_stage
from mobius.config.recipes.recipe import Recipe, TheirFile
from mobius.config.recipes.trainer import (
    refuse_quantization,
    take_adapters,
    take_precision,
    take_trainer,
)
from mobius.files.regular_files import read_text

NEARLY: Final = ("llama2", "vicuna", "alpaca")
"""Built-in templates whose text differs in white space from LLaMA-Factory's."""
_MEDIA: Final = "vl|llava|pixtral|omni|audio|paligemma|minicpm_|mllama|_mm|_v$"
"""Regular expression for names of templates for images, videos or audio."""
_QUANTIZED: Final = ("quantization_bit",)


@functools.cache
def templates() -> Mapping[str, tuple[str, str]]:
    """LLaMA-Factory's template -> built-in template (empty: the tokenizer's), and its system message (may be empty)."""
    text = read_text(Path(__file__).with_name("templates.txt"))
    lines = re.findall(r"^(\w*): ([^|\n]+?)(?: \| (.*))?$", text, re.MULTILINE)
    return {name: (ours, system) for ours, names, system in lines for name in names.split()}


def _translate(file: TheirFile) -> None:
    take_trainer(file)
    is_pretraining = file.text("stage", "sft") == "pt"
    _stop_at_other_commands(file)
    rows = Rows.SAMPLES if file.purpose else take_stage(file)
    for key in () if file.purpose else ("dataset", "eval_dataset"):
        if file.names(key) and (found := read_dataset_info(file, key, rows)):
            file.put(key, found, key)
    if not file.names("dataset") and (file.is_on("do_predict") or file.is_on("do_eval")):
        file.put("do_train", "true" if file.is_on("do_train") else "false", "do_train")
    if file.text("eval_strategy", file.text("evaluation_strategy", "no")) != "no":
        file.put("do_eval", "true", "eval_strategy", "evaluation_strategy")
    if rows in (Rows.SAMPLES, Rows.TEXTS):
        _take_packing(file, is_pretraining=is_pretraining)
    if not is_pretraining:
        _take_template(file)
    take_precision(file, is_bf16_default=False, bf16_keys=("bf16", "pure_bf16"))
    match file.text("finetuning_type", "lora"):
        case "lora":
            file.put("lora_alpha", file.text("lora_alpha") or f"{2 * file.number('lora_rank', 8):g}", "lora_alpha")
            take_adapters(file, "lora_target", "additional_target", _QUANTIZED)
        case "full":
            file.put("finetuning_type", "full", "finetuning_type")
            refuse_quantization(file, _QUANTIZED)
        case _:
            file.refuse("finetuning_type", "it must be lora or full")
    if file.is_on("fp8"):
        file.put("matmul_dtype", "fp8", "fp8")
    if file.is_on("use_swanlab"):
        trackers = [*file.names("report_to"), "swanlab"]
        file.put("report_to", ",".join(name for name in dict.fromkeys(trackers) if name != "none"), "use_swanlab")


def _stop_at_other_commands(file: TheirFile) -> None:
    """Stop at files of `llamafactory-cli export` and `chat`, and name Mobius' command for them."""
    model, adapter = file.text("model_name_or_path"), file.text("adapter_name_or_path")
    if folder := file.text("export_dir"):
        words = f"{adapter} {folder} --merge --base {model}" if adapter else f"{model} {folder}"
        file.stop("export_dir", f"another command: `mobius export {words}`")
    elif file.text("infer_backend") and not (file.names("dataset") or file.names("eval_dataset")):
        words = f"{adapter} --base {model}" if adapter else model
        file.stop("infer_backend", f"another command: `mobius chat {words}`")


def _take_packing(file: TheirFile, *, is_pretraining: bool) -> None:
    is_on = file.is_on("packing") or file.is_on("neat_packing")
    if is_pretraining:
        file.put("packing", "off" if file.is_off("packing") else "joined", "packing")
        return
    file.put("packing", "on" if is_on else "off", "packing", "neat_packing")
    if is_on and not file.is_on("neat_packing"):
        file.tell(
            "`packing: true`: samples in a row do not see each other here, as with neat_packing: true; in "
            "LLaMA-Factory they do"
        )


def _take_template(file: TheirFile) -> None:
    name = file.text("template")
    if not name or "chat_template" in file.launch.typed:
        return
    ours, system = templates().get(name, (None, ""))
    if ours is None and re.search(_MEDIA, name):
        file.stop("template", "another kind of model: Mobius trains on text, not on images, videos or audio")
        return
    if ours is None:
        near = difflib.get_close_matches(name, templates(), n=2)
        meant = f" (did you mean {' or '.join(near)}?)" if near else ""
        file.refuse("template", f"not known here{meant}; give --chat_template with a Jinja file or a built-in name")
        return
    if ours:
        file.put("chat_template", ours, "template")
    if system and not file.text("default_system"):
        file.put("default_system", system, "template")
    if not ours or ours in NEARLY:
        used = f"the built-in {ours}, which differs in white space" if ours else "the tokenizer's own, which may differ"
        file.tell(f"`template: {name}`: the chat template is {used} from LLaMA-Factory's")


LLAMAFACTORY: Final = Recipe(
    name="LLaMA-Factory",
    signs="stage+finetuning_type stage+model_name_or_path template+model_name_or_path dataset_dir+model_name_or_path "
    "template+finetuning_type template+dataset_dir cutoff_len+per_device_train_batch_size",
    tables=(
        "trainer",
        "llamafactory",
    ),
    translate=_translate,
)
"""LLaMA-Factory."""
