"""Owns the record formats: which columns make which format, and how a record of it becomes a `Sample`."""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial

from mobius.data.turns import Role, Turn, as_text, parse_tools, parse_turns
from mobius.errors import DataError
from mobius.excerpt import excerpt, listed, quoted


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, of which every assistant's is a target but those of a prompt and those that are not trained on."""

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    """JSON schemas of the tools that the assistant may call."""
    num_prompt_turns: int = 0
    """Turns at the start that are no targets, whoever speaks."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and directly behind it a response, the target."""

    prompt: str
    response: str


@dataclass(frozen=True, slots=True)
class Document:
    """Text of which every token is a target."""

    text: str


Sample = Conversation | Completion | Document


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """Columns and their meaning: `parse` gets a record with the `required` ones; its DataError names no place."""

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    parse: Callable[[Mapping[str, object]], Sample]
    is_text: bool = False
    """Whether records are plain text, which may be joined and cut, instead of one sample each."""
    mapping: Mapping[str, str] = field(default_factory=dict)
    """Columns by what they are read as, where the names differ: {"prompt": "document"}."""

    def describe(self) -> str:
        """Name and columns, the optional ones in brackets, for messages."""
        names = [*map(self._told, self.required), *(f"[{self._told(column)}]" for column in self.optional)]
        return f"{self.name} ({', '.join(names)})"

    def _told(self, name: str) -> str:
        return f"{name}={excerpt(self.mapping[name])}" if name in self.mapping else name


def detect_format(columns: Sequence[str], where: str, mapping: Mapping[str, str] | None = None) -> RecordFormat:
    """The first format whose required columns are all there, and that reads all of `mapping`.

    `mapping` tells the column of what is read: {"prompt": "document"} for `--columns prompt=document`. Raises DataError
    that names `where`.
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
    """The sample of a record; raises DataError that names `where` if a column is missing or of another kind."""
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
"""Names of columns that hold answers: a user who maps one has chosen what is trained on."""
_VERDICTS = ("label", "kto_tag")
_PREFERENCES = ("chosen", "rejected", "chosen_response", "rejected_response", "chosen_messages", "rejected_messages")


def _check_preference(record: Mapping[str, object], mapping: Mapping[str, str]) -> None:
    """Refuse preference data (DPO, KTO), of which supervised training would learn the bad answers too.

    A label that is text, such as a topic, is no verdict; nor is a column that is read as something else.
    """
    others = {name: value for name, value in record.items() if value is not None and name not in mapping.values()}
    found = [name for name in _PREFERENCES if others.get(name) not in (None, "", [], {})]
    found += [name for name in _VERDICTS if _is_verdict(others.get(name))]
    if found:
        raise DataError(
            f"{listed(f'`{name}`' for name in found)} next to the answer: preference data (DPO, KTO), of which a "
            "run would learn bad answers like good ones. Leave out the records with bad answers and remove the column, "
            "or name the column that holds the answers to learn: --columns messages=chosen, --columns "
            "completion=chosen, or --columns completion=completion where all are good"
        )


def _is_verdict(value: object) -> bool:
    """Whether the value is true, false, or a number, also as the text of one: a CSV file has text only."""
    if isinstance(value, str):
        return re.fullmatch(r"(?i)true|false|[-+]?\d+(\.\d*)?", value.strip()) is not None
    return isinstance(value, int | float)


def _renamed(record: Mapping[str, object], mapping: Mapping[str, str]) -> dict[str, object]:
    """The record with the names that are read; a column that is read as something else is not read as itself."""
    others = {column: value for column, value in record.items() if column not in mapping.values()}
    return others | {name: record[column] for name, column in mapping.items() if column in record}


def _check_mapping(columns: Collection[str], where: str, mapping: Mapping[str, str]) -> None:
    problems = [
        f"{quoted(name)} is nothing that a format reads{_nearest(name, known)}; known are {', '.join(sorted(known))}"
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
    """Words that name what may have been meant; long names are compared by their beginnings."""
    near = difflib.get_close_matches(name[:100], [other[:100] for other in names], n=2)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _written(mapping: Mapping[str, str]) -> str:
    return ",".join(f"{excerpt(name)}={excerpt(column)}" for name, column in mapping.items())


def _names(formats: Iterable[RecordFormat]) -> set[str]:
    return {name for record_format in formats for name in (*record_format.required, *record_format.optional)}


def _text(record: Mapping[str, object], column: str) -> str:
    """The column's text; an absent or null column is empty text."""
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
    """The record's tools; refuses images, audio and video beside them."""
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
        return Completion("", "")  # a summary of nothing would only teach to invent
    return Completion(f"Summarize the article in one sentence.\n\n{document}\n\nSummary:\n", summary)


def _parse_text(record: Mapping[str, object]) -> Sample:
    return Document(_text(record, "text"))


# Order matters: a record that has the columns of two formats (alpaca sets often carry a rendered `text` too) is read
# as the earlier one, which says more about what is a target.
FORMATS: tuple[RecordFormat, ...] = (
    RecordFormat("messages", ("messages",), ("system", "tools"), partial(_parse_conversation, "messages")),
    RecordFormat("sharegpt", ("conversations",), ("system", "tools"), partial(_parse_conversation, "conversations")),
    RecordFormat("alpaca", ("instruction", "output"), ("input", "system", "history"), _parse_alpaca),
    RecordFormat("prompt-completion", ("prompt", "completion"), ("tools",), _parse_completion),
    RecordFormat("xsum", ("document", "summary"), (), _parse_xsum),
    RecordFormat("text", ("text",), (), _parse_text, is_text=True),
)
