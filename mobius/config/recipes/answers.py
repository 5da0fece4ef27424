"""Reads tables of the options of other trainers, with Mobius' answer to each option.

The tables are text files beside this module, one for each tool, and `shared.txt` for names that several tools have. A
row is a line `key -> option = default`, or lines of keys with an indented answer below them. The answer begins with
`taken` (a function of the tool reads the key), `not needed` (ignored) or `another` (the file has another purpose than
training, and no other key matters); any other answer refuses the key. `key=value` is one value, `*` any letters.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mobius.files.regular_files import read_text

TAKEN: Final = "taken"
"""Beginning of the answer for a key that is read."""
IGNORED: Final = "not needed"
"""Beginning of the answer for a key that is ignored."""
OTHER: Final = "another"
"""Beginning of the answer for a key that shows that the file is for another method, command or engine."""
SHARED: Final = "shared"
TOOLS: Final = {
    "llamafactory": "LLaMA-Factory",
    "axolotl": "Axolotl",
    "trl": "TRL",
    "trainer": "LLaMA-Factory and TRL: keys of transformers' TrainingArguments",
    SHARED: "Names of several tools, and of tools whose files are not read",
}
"""Tables, and their headings in docs/user/other_trainers.md."""
_NOTHING: Final = frozenset({"", "~", "false", "null", "none", "no", "off", "0", "0.0"})
"""Values that switch an option off."""
_DATASET_KEYS: Final = {
    "weight": ("probability", "ratio", "proportion", "interleave_prob", "sampling_weight"),
    "max_samples": ("num_samples", "samples", "limit", "max_train_samples"),
    "subset": ("config", "config_name", "configuration", "dataset_config", "dataset_config_name"),
    "path": ("file", "file_name", "data_files", "hf_hub_url", "url", "id", "repo", "repo_id"),
    "columns": ("mapping", "column_mapping", "field_messages"),
}
"""Key of a dataset, and its names in other trainers' files."""


@dataclass(frozen=True)
class Row:
    """Answer to one key, or to one value of a key."""

    answer: str
    option: str | None = None
    """Option that takes the value as it is."""
    default: str | None = None
    """The tool's default, for a file without the key."""


@functools.cache
def read_table(name: str) -> Mapping[str, Row]:
    """Rows of one table by key, `key=value` or pattern."""
    rows = dict[str, Row]()
    text = re.sub("^#.*\n", "", read_text(Path(__file__).with_name(f"{name}.txt")), flags=re.MULTILINE)
    for key, option, default in re.findall(r"^(\S+) -> (\w+)(?: = (\S+))?$", text, re.MULTILINE):
        rows[key] = Row(TAKEN if key == option else f"{TAKEN} as --{option}", option, default or None)
    text = re.sub(r"^\S+ -> .*\n", "", text, flags=re.MULTILINE)
    for keys, answer in re.findall(r"((?:^\S.*\n)+)((?:^ .*\n)+)", text, re.MULTILINE):
        rows |= dict.fromkeys(keys.split(), Row(" ".join(answer.split())))
    return rows


def find_row(rows: Mapping[str, Row], name: str, value: object = None) -> Row | None:
    """Row of this value of a key, or else of the key; None without such rows."""
    text = value.strip().lower() if isinstance(value, str) else None
    return rows.get(f"{name}={text}") or rows.get(name)


def foreign_option(name: str, value: str | None = None) -> str | None:
    """Return the end of an error text about an option of another trainer; None for an unknown name.

    `value` is the given text; None without a value, or if the value is a list or mapping.
    """
    name = name.replace("-", "_").lower()
    rows = (find_row(read_table(table), name, value) for table in (SHARED, *TOOLS))
    answer = next((row.answer for row in rows if row is not None), "")
    if answer.startswith(TAKEN):
        _, use, option = answer.partition(". Default")[0].partition(f"{TAKEN} as --")
        return f"use --{option}" if use else f"not an option; as a key of a file it is {answer}"
    is_off = value is not None and value.strip().lower() in _NOTHING
    if is_off and answer.startswith("not ") and not answer.startswith(IGNORED):
        return f"{IGNORED}: the value asks for nothing"
    return answer or None


def asks_for_nothing(value: object) -> bool:
    """Whether a value of a file switches something off."""
    return value.strip().lower() in _NOTHING if isinstance(value, str) else not value


def foreign_dataset_key(name: str) -> list[str]:
    """Dataset keys that other trainers call `name`; empty for an unknown name."""
    return [key for key, names in _DATASET_KEYS.items() if name in names]
