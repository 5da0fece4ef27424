"""Maps weight names in a multimodal checkpoint to the text model's names.

    model.language_model.layers.0.mlp.up_proj.weight     transformers 5
    language_model.model.layers.0.mlp.up_proj.weight     older versions, and most of the hub
    model.text_model.layers.0.mlp.up_proj.weight         Idefics
          \\__ model.layers.0.mlp.up_proj.weight          the text model

The prefix is taken from the stored name of the token embedding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

_OWN = "model."
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head."
_PARTS = ("language_model", "text_model")


def text_weight_names(stored: Collection[str]) -> dict[str, str]:
    """Stored name -> text model's name, where they differ; empty for a text model.

    Empty also if several parts embed tokens, or if two weights would get one name.
    """
    prefixes = [name.removesuffix(_EMBEDDING) for name in stored if name.endswith(f".{_EMBEDDING}")]
    of_text = [prefix for prefix in prefixes if any(part in prefix.split(".") for part in _PARTS)]
    if len(of_text) != 1 or _OWN in prefixes:
        return {}
    renamed = dict(_renamed(stored, of_text[0]))
    kept = set(stored) - renamed.keys()
    return {} if len({*renamed.values(), *kept}) < len(stored) else renamed


def _renamed(stored: Collection[str], prefix: str) -> Iterator[tuple[str, str]]:
    for name in stored:
        before, found, local = name.rpartition(_HEAD)
        if name.startswith(prefix) and not found:
            yield name, _OWN + name.removeprefix(prefix)
        elif found and before and prefix.startswith(before):
            yield name, _HEAD + local
