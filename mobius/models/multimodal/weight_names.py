"""Names of a text part's weights in the checkpoint of a larger model, where they have another prefix.

    model.language_model.layers.0.mlp.up_proj.weight     as transformers 5 names it
    language_model.model.layers.0.mlp.up_proj.weight     as older ones do, and most of the hub
    model.text_model.layers.0.mlp.up_proj.weight         Idefics
          \\__ model.layers.0.mlp.up_proj.weight          as the text model has it by itself

The prefix is read off the names themselves: the embedding of tokens has it, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

_OWN = "model."
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head."
_PARTS = ("language_model", "text_model")


def text_weight_names(stored: Collection[str]) -> dict[str, str]:
    """Stored name -> name that the text model by itself has for it, of those that differ; empty for a text model.

    Nothing is renamed where several parts embed tokens, or where a name would be given twice.
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
