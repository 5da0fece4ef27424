"""The page of families, written from what the check of all of them has found."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mobius.models.structure.checked_families import CheckedFamilies

DOCUMENT = "docs/user/families.md"
VERSIONS = Path(__file__).with_name("family_versions.json")
_COLUMNS = 120
_HEAD = """\
# Families

{count} families of causal language models are trained, compared with transformers {version}. `model_type` in a model's
config.json names its family.

Mobius trains any decoder of transformers whose configuration declares a pipeline plan of embedding, layers and norm
(`base_model_pp_plan`). No family has code here: its own forward is followed once with stand-ins for its layers, which
shows masks, rotary embeddings, and the scalings around layers, norm and head.

A family is in this table if its tiny model with all its features on (grouped queries, biases, norms of queries and
keys, windows, partial rotary embeddings, scalings and caps, shared and routed experts) gives loss and every gradient of
plain transformers on two ranks with two streamed stages each, two microbatches, fp32 on a CPU: bit-equal, except a tied
matrix (1e-6 of its largest entry). With packed rows, tiles and slices, gradients are within 2e-6 of the norm. Experts
are compared with transformers' `grouped_mm`.

`bash scripts/check_families` writes this page and the list that the program reads; with names it checks these only.

Known weaknesses: a dry run assumes three matrices per feed-forward part, so activations of families with two (apertus,
arcee, jais2, phi, starcoder2) are estimated some 20 % too low; a run on GPUs measures a layer instead. Families with a
cap on scores (gemma2, vaultgemma) make all scores of a sequence where rows are not packed. Layers with a state
(qwen3_5_text) run in transformers' own loop unless its kernels are installed. transformers 5.17 stores the experts of
aria_text in another way: with it, the family is refused.

"""
_PARTS = """
## Text parts of larger models

Of a checkpoint that also takes images or sound, the text part is trained and saved as a text model that
`AutoModelForCausalLM` loads. A family is listed if a tiny model of it gives, for text only, loss and every gradient of
its text part in the pipeline, bit-equal unless stated. Text parts of Qwen2-VL and Qwen3-VL become Qwen2 and Qwen3,
which compute the same for text. By the family of the text part:

"""
_VERSIONS = """
## With other versions of transformers

`bash scripts/check_transformers VERSION` compares all families with that version, in an environment of its own:

"""
_TRIED = ("packing", "tiles", "slices")


def other_versions() -> dict[str, dict[str, Any]]:
    """Version of transformers -> what `scripts/check_transformers` has found with it."""
    return dict(json.loads(VERSIONS.read_text(encoding="utf-8")))


def written_table(
    checked: CheckedFamilies, parts: Mapping[str, Mapping[str, str]], versions: Mapping[str, Mapping[str, Any]]
) -> str:
    """The page in Markdown."""
    lines = [_HEAD.format(count=len(checked.supported), version=checked.transformers)]
    lines += ["| family | loss and gradients | packing | tiles | slices |\n", "|---|---|---|---|---|\n"]
    notes: list[str] = []
    for family, found in checked.supported.items():
        cells = [_cell(found[name], notes) for name in _TRIED]
        lines.append(f"| {' | '.join([family, found['parity'], *cells])} |\n")
    lines += ["\n", *(line for number, note in enumerate(notes, 1) for line in _wrapped(f"{number}. {note}"))]
    lines += [_PARTS, *_text_parts(parts)]
    if versions:
        lines += [
            _VERSIONS,
            *(line for version in sorted(versions) for line in _of_version(version, versions[version])),
        ]
    lines += ["\n## Not supported\n\n", "Each is refused by its name, with the reason.\n\n"]
    of_parts = {family: found["refused"] for family, found in parts.items() if "refused" in found}
    told = {family: f"is more than a text model, and its text part alone {why}" for family, why in of_parts.items()}
    by_reason: dict[str, list[str]] = {}
    for family, reason in sorted((dict(checked.refused) | told).items()):
        by_reason.setdefault(reason.partition(" (")[0], []).append(family)
    for reason, families in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        lines += _wrapped(f"- {reason}: {', '.join(families)}")
    return "".join(lines)


def _of_version(version: str, results: Mapping[str, Any]) -> Iterator[str]:
    """How the families of the table do with another transformers."""
    text = f"- {version}: {results['num_same']} families and text parts as in the table"
    if results["unknown"]:
        text += f"; not known to it: {', '.join(results['unknown'])}"
    for family, found in results["different"].items():
        told = ", ".join(f"{name} ({value.partition(' (')[0]})" for name, value in found.items())
        text += f"; otherwise {family}: {told}"
    yield from _wrapped(text)


def _text_parts(parts: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """A list of the text parts that are trained, by their family."""
    by_text: dict[str, list[str]] = {}
    for family, found in parts.items():
        if "parity" in found:
            near = "" if found["parity"] == "bit-equal" else f" ({found['parity']})"
            by_text.setdefault(found["text"], []).append(f"{family}{near}")
    for text, families in sorted(by_text.items()):
        yield from _wrapped(f"- {text}: {', '.join(families)}")


def _cell(found: str, notes: list[str]) -> str:
    """`yes`, or the number of the note that says why not."""
    if found == "yes":
        return found
    if found not in notes:
        notes.append(found)
    return f"no ({notes.index(found) + 1})"


def _wrapped(text: str) -> Iterator[str]:
    yield from (f"{line}\n" for line in textwrap.wrap(text, _COLUMNS, subsequent_indent="  ", break_on_hyphens=False))
