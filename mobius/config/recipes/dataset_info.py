"""LLaMA-Factory's dataset_info.json: names of datasets, and the place and format of their records."""

import difflib
import enum
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from mobius.config.recipes.recipe import TheirFile
from mobius.errors import ConfigError, excerpt, listed
from mobius.files.regular_files import read_json

_FILE: Final = "dataset_info.json"
_TAGS: Final = {
    "role_tag": ("from", "role"),
    "content_tag": ("value", "content"),
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call",),
    "system_tag": ("system",),
}
"""Supported words in the data, for each tag."""
_ALPACA: Final = {"prompt": "instruction", "query": "query", "response": "output", "history": "history"}
"""LLaMA-Factory's columns -> names of Mobius' alpaca format; one line break joins `query`, as in LLaMA-Factory."""
_ALPACA_DEFAULTS: Final = {"prompt": "instruction", "query": "input", "response": "output"}
_MEDIA: Final = ("videos", "audios")
_REFUSED_PLACES: Final = ("script_url", "cloud_file_name", "ms_hub_url", "om_hub_url")


class Rows(enum.Enum):
    """Form of the data that a stage asks for."""

    SAMPLES = "stage: sft"
    TEXTS = "stage: pt"
    PAIRS = "stage: dpo or rm"
    JUDGED = "stage: kto"


_HELD: Final = {
    Rows.SAMPLES: "no pairs (`ranking`) or labels (`kto_tag`)",
    Rows.PAIRS: "pairs (`ranking`)",
    Rows.JUDGED: "labels (`kto_tag`)",
}
_VERDICTS: Final = {Rows.PAIRS: ("chosen", "rejected"), Rows.JUDGED: ("kto_tag",)}
"""Further columns of the data."""


def read_dataset_info(file: TheirFile, key: str, rows: Rows) -> list[dict[str, object]]:
    """Datasets in the form of Mobius' YAML, one for each name under `key` of the file.

    Reads dataset_info.json in the file's dataset_dir; errors become problems of the file.
    """
    folder, names = file.text("dataset_dir", "data"), file.names(key)
    if folder == "ONLINE":
        return [_dataset({"hf_hub_url": name}, folder, rows) for name in names]
    path = Path(folder) / _FILE
    try:
        if folder.startswith("REMOTE:"):
            raise ConfigError(f"`dataset_dir: {excerpt(folder)}`: download that folder, and give its path")
        info = read_json(path, ConfigError)
        if not isinstance(info, dict):
            raise ConfigError(f"{path}: it must be a mapping of names to datasets")
    except ConfigError as error:
        where = "relative paths begin where the command runs; dataset_dir names the folder"
        file.problems += [f"{problem} ({where})" for problem in error.problems]
        return []
    found = list[dict[str, object]]()
    for name in names:
        if not isinstance(entry := info.get(name), dict):
            near = difflib.get_close_matches(name, list(map(str, info)), n=2)
            hint = f"did you mean {listed(near)}?" if near else f"it has {listed(map(str, info))}"
            file.problems.append(f"`{key}`: there is no {excerpt(name)} in {path}; {hint}")
            continue
        columns = {column for column, given in _mapping(entry, "columns").items() if given}
        held = Rows.PAIRS if entry.get("ranking") else Rows.JUDGED if "kto_tag" in columns else Rows.SAMPLES
        if held is not (Rows.SAMPLES if rows is Rows.TEXTS else rows):
            file.refuse(key, f"{excerpt(name)} has {_HELD[held]}, and the file is for {rows.value}")
        elif not columns.isdisjoint(_MEDIA):
            file.stop(key, f"{excerpt(name)} has videos or audio; Mobius trains on text and images")
        problems = list(_find_problems(entry))
        file.problems += [f"{path}: {excerpt(name)}: {problem}" for problem in problems]
        if not problems:
            found.append(_dataset(entry, folder, rows))
    return found


def _find_problems(entry: Mapping[str, object]) -> Iterator[str]:
    tags = _mapping(entry, "tags")
    for name, words in _TAGS.items():
        if tags.get(name) not in (None, *words):
            yield f"`{name}` is {excerpt(str(tags[name]))}; in the data it must be {' or '.join(words)}"
    if entry.get("formatting", "alpaca") not in ("alpaca", "sharegpt", "openai"):
        yield f"`formatting` is {excerpt(str(entry['formatting']))}; it must be alpaca, sharegpt or openai"
    if "hf_hub_url" not in entry and "file_name" not in entry:
        place = next((name for name in _REFUSED_PLACES if name in entry), "neither file_name nor hf_hub_url")
        yield f"{place}: only file_name and hf_hub_url are read; download the data and give file_name"
    if entry.get("folder"):
        yield "`folder` is not read; give the folder's files by file_name"


def _mapping(entry: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = entry.get(key)
    return value if isinstance(value, dict) else {}


def _dataset(entry: Mapping[str, object], folder: str, rows: Rows) -> dict[str, object]:
    """One dataset: a hub id has priority over a file, as in LLaMA-Factory."""
    path = entry["hf_hub_url"] if "hf_hub_url" in entry else os.path.join(folder, str(entry["file_name"]))
    dataset: dict[str, object] = {"path": path}
    names = (("max_samples", "num_samples"), ("subset", "subset"), ("split", "split"))
    dataset |= {ours: str(entry[theirs]) for ours, theirs in names if entry.get(theirs) is not None}
    if columns := _columns(entry, rows):
        dataset["columns"] = columns
    return dataset


def _columns(entry: Mapping[str, object], rows: Rows) -> dict[str, str]:
    """Names that Mobius' formats read -> columns of the data; an unlisted column is not read."""
    given = {name: str(column) for name, column in _mapping(entry, "columns").items() if column}
    more = _VERDICTS.get(rows, ())
    if entry.get("formatting", "alpaca") == "alpaca":
        if more and not given:
            return {}
        given = given or _ALPACA_DEFAULTS
        if rows is Rows.TEXTS:
            return {"text": given.get("prompt", "")}
        names = {**_ALPACA, "system": "system", "images": "images", **{name: name for name in more}}
        if rows is Rows.PAIRS:
            del names["response"]
        return {ours: given[theirs] for theirs, ours in names.items() if theirs in given}
    messages = given.get("messages", "conversations")
    own = "messages" if messages == "messages" else "conversations"
    others = {name: given[name] for name in ("system", "tools", "images", *more) if given.get(name, name) != name}
    return {own: messages, **others} if others or own != messages else {}
