"""Record formats: the columns that identify a format, and the conversion of its records to `Sample`s."""

import difflib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, Final, TypeGuard

from mobius.errors import DataError, excerpt, listed, quoted


class Role(StrEnum):
    """Speaker of a turn, named as in chat templates."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation: role, text, and other fields such as tool calls."""

    role: Role
    content: str
    fields: Mapping[str, object] = field(default_factory=dict)
    """Other message fields that chat templates read, such as tool_calls, a list of mappings."""
    is_trained: bool = True
    """False for an assistant's turn that the data exclude from training; it is still context for later turns."""

    @property
    def has_calls(self) -> bool:
        """Whether the turn calls tools."""
        return bool(self.fields.get("tool_calls"))

    @property
    def has_content(self) -> bool:
        """Whether the turn has tool calls or text other than white space."""
        return bool(self.content.strip()) or self.has_calls


_ROLES: Final = {
    **dict.fromkeys(("system", "developer"), Role.SYSTEM),
    **dict.fromkeys(("human", "user"), Role.USER),
    **dict.fromkeys(("gpt", "chatgpt", "model", "assistant"), Role.ASSISTANT),
    **dict.fromkeys(("tool", "observation", "function", "tool_response", "function_response"), Role.TOOL),
}
_CALL_ROLE: Final = "function_call"
"""Speaker of a turn that has the assistant's tool calls as JSON text."""
_KEYS: Final = (("role", "content"), ("from", "value"))
REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning", "thoughts")
CALL_IDS: Final = ("name", "tool_call_id")
"""Fields of a tool's result that name the call; many templates do not write these fields."""
_TEXT_FIELDS: Final = (*CALL_IDS, *REASONING_FIELDS)
_TRAINED_FIELDS: Final = ("weight", "train", "training", "loss")
"""Fields that decide whether a message is trained on: OpenAI's (0, 1), Axolotl's and ms-swift's (true, false)."""
_PARSED_FIELDS: Final = {*(key for keys in _KEYS for key in keys), *_TRAINED_FIELDS, "train_detail", "tool_calls"}
_FORMER_CALL: Final = "function_call"
"""OpenAI's former field for a single call; `_CALL_ROLE` has the same text."""


def tool_call_names(turn: Turn) -> list[str]:
    """Return the names of the functions that a turn calls."""
    calls = turn.fields.get("tool_calls", ())
    assert isinstance(calls, Sequence)
    return [str(function_of(call)["name"]) for call in calls]


def reasoning_of(turn: Turn) -> str:
    """Return the reasoning before the answer, from a field of the turn; empty if there is none."""
    return next((text for name in REASONING_FIELDS if (text := str(turn.fields.get(name) or "").strip())), "")


def function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the mapping with name and arguments of a call: its `function`, or the call itself."""
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def _as_text(value: object, place: str) -> str:
    """Return `value` if it is text that UTF-8 can encode. Otherwise (a lone surrogate in JSON) raises DataError."""
    if not isinstance(value, str):
        raise DataError(f"{place} must be text, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place} holds half of a character, {value[error.start]!r}, at position {error.start}; write both halves"
        ) from error
    return value


def _parse_turn(item: object, place: str) -> Turn:
    keys = next((keys for keys in _KEYS if isinstance(item, Mapping) and keys[0] in item), None)
    if keys is None or not isinstance(item, Mapping):
        raise DataError(f"{place} must have `role` and `content`, or `from` and `value`, not {quoted(item)}")
    role_key, content_key = keys
    name, content, fields = item[role_key], item.get(content_key), _parse_fields(item, place)
    if name == _CALL_ROLE:
        fields["tool_calls"] = _functions(content, f"{place}.{content_key}")
        return Turn(Role.ASSISTANT, "", fields, _is_trained(item, Role.ASSISTANT, place))
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        known = listed([*_ROLES, _CALL_ROLE])
        raise DataError(f"{place} has the {role_key} {quoted(name)}; known are {known}")
    if content is None and "tool_calls" not in fields:
        if content_key not in item:
            raise DataError(f"{place} must have `{role_key}` and `{content_key}`, not {quoted(item)}")
        raise DataError(
            f"{place}.{content_key} is null; only an assistant's turn with `tool_calls` may have no text. Write an "
            "empty text, or leave the turn out"
        )
    return Turn(role, _content_text(content, f"{place}.{content_key}"), fields, _is_trained(item, role, place))


def _is_trained(item: Mapping[object, object], role: Role, place: str) -> bool:
    """Whether the message's fields allow training on it. Null counts as unset, because tables fill in nulls."""
    if item.get("train_detail"):
        raise DataError(
            f"{place}.train_detail is not empty; a message is trained on as a whole or not at all. Split it into "
            'several messages, with "train": false in each message that is only context'
        )
    said = {name: value for name in _TRAINED_FIELDS if (value := item.get(name)) is not None}
    for name, value in said.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise DataError(f"{place}.{name} must be 0 (context only) or 1 (trained on), not {quoted(value)}")
        if value and role is not Role.ASSISTANT:
            raise DataError(
                f"{place}.{name} is {quoted(value)}, and its role is {role.value}; only an assistant's messages are "
                "trained on. Remove the field there, or train on all tokens with --train_on_prompt"
            )
    if len({bool(value) for value in said.values()}) > 1:
        raise DataError(f"{place} contradicts itself: {', '.join(f'{name} is {said[name]!r}' for name in said)}")
    return all(said.values())


def _parse_fields(item: Mapping[object, object], place: str) -> dict[str, object]:
    """Return the fields that templates read besides role and content; null and empty fields count as unset."""
    others = {name: value for name, value in item.items() if name not in _PARSED_FIELDS and not _is_unset(value)}
    texts: dict[str, object] = {
        name: _as_text(others.pop(name), f"{place}.{name}") for name in _TEXT_FIELDS if name in others
    }
    calls = _calls(item.get("tool_calls"), f"{place}.tool_calls")
    if (former := others.pop(_FORMER_CALL, None)) is not None:
        if calls:
            raise DataError(
                f"{place} has both `tool_calls` and `{_FORMER_CALL}`, its former name; leave one of them out"
            )
        calls = _functions(former, f"{place}.{_FORMER_CALL}")
    fields: dict[str, object] = {**texts, **({"tool_calls": calls} if calls else {})}
    if others:
        plain = _plain(others, place)
        assert isinstance(plain, dict)
        fields |= plain
    return fields


def _is_unset(value: object) -> bool:
    return value is None or (isinstance(value, Sized) and len(value) == 0)


def _functions(value: object, place: str) -> list[dict[str, object]]:
    """Return calls or schemas of functions in the form of `tool_calls` and `tools`: objects with a `function`."""
    calls = _calls(value, place)
    return [{"type": "function", **(call if "function" in call else {"function": call})} for call in calls]


def holds_call(value: object) -> bool:
    """Whether a value, or the value of a JSON text, contains a call with arguments."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return False
    if isinstance(value, Mapping):
        function = function_of(value)
        return {"name", "arguments"} <= function.keys() or any(map(holds_call, value.values()))
    return _is_list(value) and any(map(holds_call, value))


def _content_text(content: object, place: str) -> str:
    """Return the text of a message; a list of text parts is concatenated."""
    if content is None:
        return ""
    if _is_list(content):
        return "".join(_part_text(part, f"{place}[{position}]") for position, part in enumerate(content))
    return _as_text(content, place)


def _part_text(part: object, place: str) -> str:
    if isinstance(part, str):
        return _as_text(part, place)
    if not isinstance(part, Mapping) or "type" not in part:
        raise DataError(f'{place} must be a text part, {{"type": "text", "text": ...}}, not {quoted(part)}')
    if part["type"] != "text":
        raise DataError(
            f"{place} is of the type {quoted(part['type'])}; only parts of the type text are read. Mobius trains "
            "without images, audio and video: leave such records out. Write calls as `tool_calls`, thoughts as "
            "`reasoning_content`"
        )
    key = "value" if part.get("text") is None and "value" in part else "text"
    return _as_text(part.get(key), f"{place}.{key}")


def _calls(value: object, place: str) -> list[dict[str, object]]:
    """Return the tool calls in `value`, without null keys outside the arguments; each must have a function name."""
    calls = [_without_nulls(call) for call in _mappings(value, place)]
    for position, call in enumerate(calls):
        function = function_of(call)
        if not isinstance(function.get("name"), str):
            raise DataError(f"{place}[{position}] must have the `name` of a function, not {quoted(call)}")
    return calls


def _without_nulls(call: Mapping[str, object]) -> dict[str, object]:
    known = {key: value for key, value in call.items() if value is not None}
    function = known.get("function")
    return known | {"function": _without_nulls(function)} if isinstance(function, dict) else known


def _mappings(value: object, place: str) -> list[dict[str, object]]:
    """Return a list of JSON objects from `value` or its JSON text; empty for null or empty text."""
    value = _decoded(value, place)
    if isinstance(value, Mapping):
        value = [value]
    if not _is_list(value):
        raise DataError(f"{place} must be a list of JSON objects, not {type(value).__name__}")
    result = []
    for position, item in enumerate(value):
        plain = _plain(_decoded(item, f"{place}[{position}]"), f"{place}[{position}]")
        if not isinstance(plain, dict):
            raise DataError(f"{place}[{position}] must be a JSON object, not {quoted(item)}")
        result.append(plain)
    return result


def _decoded(value: object, place: str) -> object:
    if value is None or (isinstance(value, str) and not value.strip()):
        return []
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise DataError(f"{place} must be JSON, not {quoted(value)}: {quoted(str(error))}") from error


def _plain(value: object, place: str) -> object:
    """Return a copy of a JSON value, including nulls."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {_as_text(key, f"a key of {place}"): _plain(item, place) for key, item in value.items()}
    if _is_list(value):
        return [_plain(item, place) for item in value]
    return _as_text(value, place)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of which every assistant's turn is a target, except turns of the prompt and untrained turns."""

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    """JSON schemas of the tools that the assistant may call."""
    num_prompt_turns: int = 0
    """Number of leading turns that are never targets, also if they are an assistant's."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt, directly followed by a response; the response is the target."""

    prompt: str
    response: str


@dataclass(frozen=True, slots=True)
class Document:
    """Text in which every token is a target."""

    text: str


Sample = Conversation | Completion | Document


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """Columns of a format; `parse` gets a record with all `required` columns, and raises DataErrors without a place."""

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    parse: Callable[[Mapping[str, object]], Sample]
    is_text: bool = False
    """Whether records are plain text, which may be joined and split; otherwise each record is one sample."""
    mapping: Mapping[str, str] = field(default_factory=dict)
    """Name that a format reads -> column of the data, if the two differ: {"prompt": "document"}."""

    def describe(self) -> str:
        """Return name and columns of the format for messages, optional columns in brackets."""
        names = [*map(self._column, self.required), *(f"[{self._column(column)}]" for column in self.optional)]
        return f"{self.name} ({', '.join(names)})"

    def _column(self, name: str) -> str:
        return f"{name}={excerpt(self.mapping[name])}" if name in self.mapping else name


def detect_format(record: Collection[str], where: str, mapping: Mapping[str, str] | None = None) -> RecordFormat:
    """Return the first format that reads every name in `mapping`, and whose required columns are all present.

    `record` is the first record, or the record's columns. `mapping` is name -> column: {"prompt": "document"} for
    `--columns prompt=document`. Raises DataError that names `where`.
    """
    mapping, columns = mapping or {}, list(map(str, record))
    _check_mapping(columns, where, mapping)
    names = {column for column in columns if column not in mapping.values()} | set(mapping)
    for record_format in FORMATS:
        if names.issuperset(record_format.required) and _names([record_format]).issuperset(mapping):
            return replace(record_format, mapping=mapping)
    if isinstance(record, Mapping) and any(map(_is_record, _held(record).values())):
        raise DataError(f"{where}: {describe_object(record)}")
    accepted = "\n".join(f"  {record_format.describe()}" for record_format in FORMATS)
    given = f" with --columns {_written(mapping)}" if mapping else ""
    raise DataError(
        f"{where}: the columns {listed(sorted(set(columns)))}{given} match no known format. Name the columns to "
        "read, such as --columns prompt=question,completion=answer, or rename the columns to one of these "
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
                f"The first record has the format {record_format.describe()}, and all records must have it"
            )
        return record_format.parse(_renamed(record, mapping) if mapping else record)
    except DataError as error:
        given = f" (--columns {_written(mapping)})" if mapping else ""
        raise DataError(f"{where}: {error}{given}") from error


_ANSWERS = frozenset({"messages", "conversations", "output", "completion", "summary"})
"""Names of answer columns; a user who maps one of these names has chosen the training target."""
_VERDICTS = ("label", "kto_tag")
_PREFERENCES = ("chosen", "rejected", "chosen_response", "rejected_response", "chosen_messages", "rejected_messages")


def _check_preference(record: Mapping[str, object], mapping: Mapping[str, str]) -> None:
    """Refuse preference data (DPO, KTO), because supervised training would also learn the rejected answers.

    A label that is text, such as a topic, is no verdict on an answer. Columns mapped to another name do not count.
    """
    others = {name: value for name, value in record.items() if value is not None and name not in mapping.values()}
    found = [name for name in _PREFERENCES if others.get(name) not in (None, "", [], {})]
    found += [name for name in _VERDICTS if _is_verdict(others.get(name))]
    if found:
        raise DataError(
            f"{listed(f'`{name}`' for name in found)} next to the answer: this is preference data (DPO, KTO), which "
            "Mobius cannot train on yet. To train on some of the answers (SFT) instead, name their column: --columns "
            "messages=chosen, --columns completion=chosen, or, if all completions are good, --columns "
            "completion=completion"
        )


def _is_verdict(value: object) -> bool:
    """Whether the value is a boolean or a number, or the text of a boolean or number, as in CSV files."""
    if isinstance(value, str):
        return re.fullmatch(r"(?i)true|false|[-+]?\d+(\.\d*)?", value.strip()) is not None
    return isinstance(value, int | float)


def _renamed(record: Mapping[str, object], mapping: Mapping[str, str]) -> dict[str, object]:
    """Return the record with the column names that formats read; a mapped column loses its original name."""
    others = {column: value for column, value in record.items() if column not in mapping.values()}
    return others | {name: record[column] for name, column in mapping.items() if column in record}


def _check_mapping(columns: Collection[str], where: str, mapping: Mapping[str, str]) -> None:
    known = _names(FORMATS)
    problems = [
        f"{quoted(name)} is not read by any format{_nearest(name, known)}; known are {', '.join(sorted(known))}"
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
    """Return a suggestion of similar names, for a message; compares the first 100 characters."""
    near = difflib.get_close_matches(name[:100], [other[:100] for other in names], n=2)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _written(mapping: Mapping[str, str]) -> str:
    return ",".join(f"{excerpt(name)}={excerpt(column)}" for name, column in mapping.items())


def describe_object(fields: Mapping[str, object]) -> str:
    """Return a message about a file that has a JSON object in place of a list of records, with advice."""
    if held := _held(fields):
        return (
            f"an object with the key {listed(f'`{key}`' for key in held)}, not a list of records. Save the list under "
            "that key as a separate file: [{...}, {...}]"
        )
    return (
        f"one object over several lines, with the keys {listed(f'`{key}`' for key in fields)}, not a list of records. "
        "If it is a record, write it on one line, or in brackets: [{...}]"
    )


def _held(fields: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    """Return each key whose value is a list of objects other than messages, with the first object of the list."""
    lists = ((key, value[0]) for key, value in fields.items() if isinstance(value, list) and value)
    roles = {role for role, _ in _KEYS}
    return {key: first for key, first in lists if isinstance(first, Mapping) and roles.isdisjoint(first)}


def _is_record(fields: Mapping[str, object]) -> bool:
    return any(fields.keys() >= set(record_format.required) for record_format in FORMATS)


def _names(formats: Iterable[RecordFormat]) -> set[str]:
    return {name for record_format in formats for name in (*record_format.required, *record_format.optional)}


def _text(record: Mapping[str, object], column: str) -> str:
    """Return the text of the column; empty if the column is absent or null."""
    value = record.get(column)
    return "" if value is None else _as_text(value, f"`{column}`")


def _system_turns(record: Mapping[str, object]) -> list[Turn]:
    system = _text(record, "system")
    return [Turn(Role.SYSTEM, system)] if system.strip() else []


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _items(record: Mapping[str, object], column: str) -> Sequence[object]:
    value = () if record.get(column) is None else record[column]
    if not _is_list(value):
        raise DataError(f"`{column}` must be a list, not {type(value).__name__}")
    return value


def _turns(record: Mapping[str, object], column: str) -> list[Turn]:
    """Return the turns in a column of messages with `role` and `content`, or ShareGPT's `from` and `value`."""
    return [_parse_turn(item, f"`{column}[{position}]`") for position, item in enumerate(_items(record, column))]


def _parse_alpaca(record: Mapping[str, object]) -> Sample:
    turns = _system_turns(record)
    for pair in _items(record, "history"):
        if not _is_list(pair) or [type(text) for text in pair] != [str, str]:
            raise DataError(f"`history` must hold [question, answer] pairs of text, not {quoted(pair)}")
        turns += map(Turn, (Role.USER, Role.ASSISTANT), (_as_text(text, "`history`") for text in pair))
    question = "\n\n".join(part for part in (_text(record, "instruction"), _text(record, "input")) if part.strip())
    question = "\n".join(part for part in (question, _text(record, "query")) if part)
    return Conversation((*turns, Turn(Role.USER, question), Turn(Role.ASSISTANT, _text(record, "output"))))


_MEDIA = ("image", "images", "audio", "audios", "video", "videos")


def _parse_tools(record: Mapping[str, object]) -> tuple[Mapping[str, object], ...]:
    """Return the tools of the record. Raises DataError if the record has images, audio or video."""
    for name in _MEDIA:
        value = record.get(name)
        if value is not None and not (isinstance(value, Sized) and len(value) == 0):
            raise DataError(
                f"`{name}` is not empty; Mobius trains on text only, not on images, audio and video. Without them, "
                "the answers would describe things that the model never saw: leave such records out"
            )
    tools, former = (None if _is_unset(record.get(name)) else record[name] for name in ("tools", "functions"))
    if tools is not None and former is not None:
        raise DataError("there are both `tools` and `functions`, its former name; leave one of them out")
    return tuple(_mappings(tools, "`tools`") if former is None else _functions(former, "`functions`"))


def _parse_conversation(column: str, record: Mapping[str, object]) -> Sample:
    return Conversation((*_system_turns(record), *_turns(record, column)), _parse_tools(record))


def _parse_completion(record: Mapping[str, object]) -> Sample:
    prompt, completion = record["prompt"], record["completion"]
    if not _is_list(prompt) and not _is_list(completion):
        return Completion(_text(record, "prompt"), _text(record, "completion"))
    if not _is_list(prompt) or not _is_list(completion):
        kinds = f"{type(prompt).__name__} and {type(completion).__name__}"
        raise DataError(f"`prompt` and `completion` must both be text, or both lists of messages, not {kinds}")
    asked = _turns(record, "prompt")
    return Conversation((*asked, *_turns(record, "completion")), _parse_tools(record), len(asked))


def _parse_xsum(record: Mapping[str, object]) -> Sample:
    document, summary = _text(record, "document"), _text(record, "summary")
    if not document.strip():
        return Completion("", "")  # otherwise the model would learn to invent a summary without a document
    return Completion(f"Summarize the article in one sentence.\n\n{document}\n\nSummary:\n", summary)


def _parse_text(record: Mapping[str, object]) -> Sample:
    return Document(_text(record, "text"))


# In order of priority: if a record has the columns of two formats (alpaca sets often also have a rendered `text`), the
# earlier format reads it, because this format is more specific about targets.
FORMATS: tuple[RecordFormat, ...] = (
    RecordFormat("messages", ("messages",), ("system", "tools"), partial(_parse_conversation, "messages")),
    RecordFormat("sharegpt", ("conversations",), ("system", "tools"), partial(_parse_conversation, "conversations")),
    RecordFormat("alpaca", ("instruction", "output"), ("input", "query", "system", "history"), _parse_alpaca),
    RecordFormat("prompt-completion", ("prompt", "completion"), ("tools",), _parse_completion),
    RecordFormat("xsum", ("document", "summary"), (), _parse_xsum),
    RecordFormat("text", ("text",), (), _parse_text, is_text=True),
)
