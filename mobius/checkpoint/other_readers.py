"""Tells what llama.cpp and vLLM know of a model's names. Neither is needed, and neither is run.

llama.cpp    the table of names in the package gguf, if it is installed; its converter has further rules for a family
vLLM         models/vllm_classes.json: the classes that its registry lists, of those that are written here
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from typing import Any, Final

from transformers import PretrainedConfig

from mobius.errors import listed
from mobius.models.family_support import FAMILIES_PATH
from mobius.models.model_files import read_json_object

_GGUF_NAMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("mistral", "mixtral", "internlm3"), "llama"),
    **dict.fromkeys(("deepseekv2", "deepseekv3"), "deepseek2"),
    "cohere": "commandr",
    "phi": "phi2",
    "olmo3": "olmo2",
}
"""Family -> llama.cpp's name of it, if the two differ by more than signs; both without signs."""
_EXPERT: Final = re.compile(r"\.experts\.\d+\.")
"""Number of an expert in a name; llama.cpp stores all experts of a layer as one tensor."""


def reader_notes(class_name: str, config: PretrainedConfig, text_names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield each program's name and what it knows of a model: its class, and its text's names in a text model."""
    yield "llama.cpp", _llama_cpp(config, text_names)
    yield "vLLM", _vllm(class_name)


def _llama_cpp(config: PretrainedConfig, text_names: Collection[str]) -> str:
    try:
        import gguf
    except ImportError:
        return "not compared: its table of names is in the package gguf, which is not installed"
    known = {_without_signs(name): arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    family = _without_signs(config.model_type.removesuffix("_text"))
    arch = known.get(_GGUF_NAMES.get(family, family))
    version = f"gguf {metadata.version('gguf')}"
    if arch is None:
        return f"{version} has no table of names for the family {config.model_type!r}"
    table: Any = gguf.get_tensor_name_map(arch, int(config.num_hidden_layers))
    suffixes = (".weight", ".bias")
    lost = [n for n in text_names if table.get_name(_EXPERT.sub(".experts.", n), try_suffixes=suffixes) is None]
    found = (
        f"{len(text_names) - len(lost)} of {len(text_names)} names in the table of {version} for {arch.name.lower()}"
    )
    return f"{found}; left to its converter: {listed(sorted(lost))}" if lost else found


def _without_signs(name: str) -> str:
    return name.replace("_", "").replace("-", "")


def _vllm(class_name: str) -> str:
    fields = _vllm_classes()
    if class_name not in fields["classes"]:
        return f"{fields['version']} does not list {class_name}; it may load it with transformers' code"
    since = fields["since"].get(class_name)
    return f"{fields['version']} lists {class_name}" + (f", as versions from {since} on do" if since else "")


@functools.cache
def _vllm_classes() -> Mapping[str, Any]:
    return read_json_object(FAMILIES_PATH.with_name("vllm_classes.json"))
