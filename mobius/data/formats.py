"""Owns the record formats: which columns identify a format, and how its records become `Sample`s."""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial

from mobius.data.turns import Role, Turn, as_text, parse_tools, parse_turns
from mobius.errors import DataError, excerpt, listed, quoted


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns; every assistant turn is a target, except those of the prompt and those excluded from training."""

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    """JSON schemas of tools available to the assistant."""
    num_prompt_turns: int = 0
    """Number of leading turns that are never targets, whatever their role."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and the response that directly follows it, which is the target."""

    prompt: str
    response: str


@dataclass(frozen=True, slots=True)
class Document:
    """Text in which every token is a target."""

    text: str


Sample = Conversation | Completion | Document


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """Columns of a format; `parse` gets a record with the `required` ones, and its DataError names no place."""

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    parse: Callable[[Mapping[str, object]], Sample]
    is_text: bool = False
    """Whether records are plain text, which may be joined and cut, or one sample each."""
    mapping: Mapping[str, str] = field(default_factory=dict)
    """Name that a format reads -> column of the data, where they differ: {"prompt": "document"}."""

    def describe(self) -> str:
        """Name and columns for messages, optional columns in brackets."""
        names = [*map(self._told, self.required), *(f"[{self._told(column)}]" for column in self.optional)]
        return f"{self.name} ({', '.join(names)})"

    def _told(self, name: str) -> str:
        return f"{name}={excerpt(self.mapping[name])}" if name in self.mapping else name


def detect_format(columns: Sequence[str], where: str, mapping: Mapping[str, str] | None = None) -> RecordFormat:
    """The first format whose required columns are all present, and that reads every name in `mapping`.

    `mapping` is name -> column: {"prompt": "document"} for `--columns prompt=document`. Raises DataError that names
    `where`.
    """
    mapping = mapping or {}
    _check_mapping(columns, where, mapping)
    names = {column for column in columns if column not in mapping.values()} | set(mapping)
    for record_format in FORMATS:
        if names.issuperset(record_format.required) and _names([record_format]).issuperset(mapping):
            return replace(record_format, mapping=mapping)
    accepted = "\n".join(f"  {record_format.describe()}" for record_format in FORMATS)
    given = f" with --columns {_written(mapping)}" if mapping else ""
    raise DataError(
        f"{where}: the columns {listed(sorted(set(columns)))}{given} match no known format. Tell what to read from "
        "which column, such as --columns prompt=question,completion=answer, or rename the columns to one of these "
        f"(optional ones in brackets):\n{accepted}"
    )


def parse_record(record_format: RecordFormat, record: Mapping[str, object], where: str) -> Sample:
    """Convert a record to a sample. Raises DataError that names `where` for missing columns and wrong types."""
    mapping = record_format.mapping
    try:
        if not record_format.is_text and _ANSWERS.isdisjoint(mapping):
            _check_preference(record, mapping)
        columns = (mapping.get(name, name) for name in record_format.required)
        if missing := [column for column in columns if column not in record]:
            raise DataError(
                f"the column {listed(missing)} is missing; found: {listed(map(str, record))}. "
                f"The first record is in the format {record_format.describe()}, and all must be"
            )
        return record_format.parse(_renamed(record, mapping) if mapping else record)
    except DataError as error:
        told = f" (--columns {_written(mapping)})" if mapping else ""
        raise DataError(f"{where}: {error}{told}") from error


_ANSWERS = frozenset({"messages", "conversations", "output", "completion", "summary"})
"""Names of answer columns: a user who maps one of them has chosen the training target."""
_VERDICTS = ("label", "kto_tag")
_PREFERENCES = ("chosen", "rejected", "chosen_response", "rejected_response", "chosen_messages", "rejected_messages")


def _check_preference(record: Mapping[str, object], mapping: Mapping[str, str]) -> None:
    """Refuse preference data (DPO, KTO), as supervised training would learn the rejected answers too.

    A label that is text, such as a topic, is not a verdict; nor is a column mapped to another name.
    """
    others = {name: value for name, value in record.items() if value is not None and name not in mapping.values()}
    found = [name for name in _PREFERENCES if others.get(name) not in (None, "", [], {})]
    found += [name for name in _VERDICTS if _is_verdict(others.get(name))]
    if found:
        raise DataError(
            f"{listed(f'`{name}`' for name in found)} next to the answer: this is preference data (DPO, KTO), and a "
            "run would learn bad answers like good ones. Leave out the records with bad answers and remove the column, "
            "or name the column that holds the answers to learn: --columns messages=chosen, --columns "
            "completion=chosen, or --columns completion=completion where all are good"
        )


def _is_verdict(value: object) -> bool:
    """Whether the value is a boolean or a number, or the text of one, as in CSV files."""
    if isinstance(value, str):
        return re.fullmatch(r"(?i)true|false|[-+]?\d+(\.\d*)?", value.strip()) is not None
    return isinstance(value, int | float)


def _renamed(record: Mapping[str, object], mapping: Mapping[str, str]) -> dict[str, object]:
    """The record under the names that formats read; a mapped column is not available under its own name."""
    others = {column: value for column, value in record.items() if column not in mapping.values()}
    return others | {name: record[column] for name, column in mapping.items() if column in record}


def _check_mapping(columns: Collection[str], where: str, mapping: Mapping[str, str]) -> None:
    problems = [
        f"{quoted(name)} is not read by any format{_nearest(name, known)}; known are {', '.join(sorted(known))}"
        for known in [_names(FORMATS)]
        for name in mapping
        if name not in known
    ]
    problems += [
        f"there is no column {quoted(column)}{_nearest(column, columns)}; found: {listed(sorted(set(columns)))}"
        for column in mapping.values()
        if column not in columns
    ]
    if problems:
        raise DataError(f"{where}: --columns {_written(mapping)}: {'; and '.join(problems)}")


def _nearest(name: str, names: Collection[str]) -> str:
    """Suggestion of similar names for a message; compares the first 100 characters."""
    near = difflib.get_close_matches(name[:100], [other[:100] for other in names], n=2)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _written(mapping: Mapping[str, str]) -> str:
    return ",".join(f"{excerpt(name)}={excerpt(column)}" for name, column in mapping.items())


def _names(formats: Iterable[RecordFormat]) -> set[str]:
    return {name for record_format in formats for name in (*record_format.required, *record_format.optional)}


def _text(record: Mapping[str, object], column: str) -> str:
    """Text of the column; empty for an absent or null column."""
    value = record.get(column)
    return "" if value is None else as_text(value, f"`{column}`")


def _system_turns(record: Mapping[str, object]) -> list[Turn]:
    system = _text(record, "system")
    return [Turn(Role.SYSTEM, system)] if system.strip() else []


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _items(record: Mapping[str, object], column: str) -> Sequence[object]:
    value = () if record.get(column) is None else record[column]
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise DataError(f"`{column}` must be a list, not {type(value).__name__}")
    return value


def _parse_alpaca(record: Mapping[str, object]) -> Sample:
    turns = _system_turns(record)
    for pair in _items(record, "history"):
        match pair:
            case [str(), str()]:
                texts = (as_text(text, "`history`") for text in pair)
                turns += map(Turn, (Role.USER, Role.ASSISTANT), texts)
            case _:
                raise DataError(f"`history` must hold [question, answer] pairs of text, not {quoted(pair)}")
    question = "\n\n".join(part for part in (_text(record, "instruction"), _text(record, "input")) if part.strip())
    return Conversation((*turns, Turn(Role.USER, question), Turn(Role.ASSISTANT, _text(record, "output"))))


_MEDIA = ("image", "images", "audio", "audios", "video", "videos")


def _parse_tools(record: Mapping[str, object]) -> tuple[Mapping[str, object], ...]:
    """Tools of the record. Raises DataError if it has images, audio or video."""
    for name in _MEDIA:
        value = record.get(name)
        if value is not None and not (isinstance(value, Sized) and len(value) == 0):
            raise DataError(
                f"`{name}` is not empty; Mobius trains on text only, without images, audio and video. Leave such "
                "records out, or remove the column"
            )
    return parse_tools(record.get("tools"), "`tools`")


def _parse_conversation(column: str, record: Mapping[str, object]) -> Sample:
    turns = (*_system_turns(record), *parse_turns(_items(record, column), column))
    return Conversation(turns, _parse_tools(record))


def _parse_completion(record: Mapping[str, object]) -> Sample:
    prompt, completion = record["prompt"], record["completion"]
    if not _is_list(prompt) and not _is_list(completion):
        return Completion(_text(record, "prompt"), _text(record, "completion"))
    if not _is_list(prompt) or not _is_list(completion):
        kinds = f"{type(prompt).__name__} and {type(completion).__name__}"
        raise DataError(f"`prompt` and `completion` must both be text, or both lists of messages, not {kinds}")
    asked = parse_turns(_items(record, "prompt"), "prompt")
    turns = (*asked, *parse_turns(_items(record, "completion"), "completion"))
    return Conversation(turns, _parse_tools(record), len(asked))


def _parse_xsum(record: Mapping[str, object]) -> Sample:
    document, summary = _text(record, "document"), _text(record, "summary")
    if not document.strip():
        return Completion("", "")  # a summary of an empty document would teach the model to invent
    return Completion(f"Summarize the article in one sentence.\n\n{document}\n\nSummary:\n", summary)


def _parse_text(record: Mapping[str, object]) -> Sample:
    return Document(_text(record, "text"))


# In order of preference: a record with the columns of two formats (alpaca sets often carry a rendered `text` too) is
# read as the earlier one, which is more specific about targets.
FORMATS: tuple[RecordFormat, ...] = (
    RecordFormat("messages", ("messages",), ("system", "tools"), partial(_parse_conversation, "messages")),
    RecordFormat("sharegpt", ("conversations",), ("system", "tools"), partial(_parse_conversation, "conversations")),
    RecordFormat("alpaca", ("instruction", "output"), ("input", "system", "history"), _parse_alpaca),
    RecordFormat("prompt-completion", ("prompt", "completion"), ("tools",), _parse_completion),
    RecordFormat("xsum", ("document", "summary"), (), _parse_xsum),
    RecordFormat("text", ("text",), (), _parse_text, is_text=True),
)
