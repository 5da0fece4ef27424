"""Messages of a conversation and the samples made of them, as the values of a record's columns say."""

import json
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeGuard

from mobius.data.images import MARK
from mobius.errors import DataError, listed, quoted


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
    weight: float = 1.0
    """Factor of the loss of an assistant's turn; a turn of weight 0 is only context for later turns."""

    @property
    def is_trained(self) -> bool:
        """Whether the turn may be a target."""
        return self.weight > 0

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
MESSAGE_KEYS: Final = (("role", "content"), ("from", "value"))
REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning", "thoughts")
CALL_IDS: Final = ("name", "tool_call_id")
"""Fields of a tool's result that name the call; many templates do not write these fields."""
_TEXT_FIELDS: Final = (*CALL_IDS, *REASONING_FIELDS)
_TRAINED_FIELDS: Final = ("weight", "train", "training", "loss")
"""Fields that decide whether a message is trained on: OpenAI's (a factor), Axolotl's and ms-swift's (true, false)."""
_PARSED_FIELDS: Final = {
    *(key for keys in MESSAGE_KEYS for key in keys),
    *_TRAINED_FIELDS,
    "train_detail",
    "tool_calls",
}
_LARGEST: Final = 1e15
"""Largest weight: products of a message's and a record's weight, and their sums, are finite in fp32."""
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


def as_text(value: object, place: str) -> str:
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
    keys = next((keys for keys in MESSAGE_KEYS if isinstance(item, Mapping) and keys[0] in item), None)
    if keys is None or not isinstance(item, Mapping):
        raise DataError(f"{place} must have `role` and `content`, or `from` and `value`, not {quoted(item)}")
    role_key, content_key = keys
    name, content, fields = item[role_key], item.get(content_key), _parse_fields(item, place)
    if name == _CALL_ROLE:
        fields["tool_calls"] = _functions(content, f"{place}.{content_key}")
        return Turn(Role.ASSISTANT, "", fields, _weight(item, Role.ASSISTANT, place))
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
    return Turn(role, _content_text(content, f"{place}.{content_key}"), fields, _weight(item, role, place))


def _weight(item: Mapping[object, object], role: Role, place: str) -> float:
    """Return the factor of a message's loss by its fields. Null counts as unset, because tables fill in nulls."""
    if item.get("train_detail"):
        raise DataError(
            f"{place}.train_detail is not empty; a message is trained on as a whole or not at all. Split it into "
            'several messages, with "train": false in each message that is only context'
        )
    said = {name: value for name in _TRAINED_FIELDS if (value := item.get(name)) is not None}
    for name, value in said.items():
        if name == "weight":
            check_weight(value, f"{place}.weight", "context only")
        elif not isinstance(value, int | float) or value not in (0, 1):
            raise DataError(f"{place}.{name} must be 0 (context only) or 1 (trained on), not {quoted(value)}")
        if value and role is not Role.ASSISTANT:
            raise DataError(
                f"{place}.{name} is {quoted(value)}, and its role is {role.value}; only an assistant's messages are "
                "trained on. Remove the field there, or train on all tokens with --train_on_prompt"
            )
    if len({bool(value) for value in said.values()}) > 1:
        raise DataError(f"{place} contradicts itself: {', '.join(f'{name} is {said[name]!r}' for name in said)}")
    return check_weight(said.get("weight", 1), place, "") if all(said.values()) else 0.0


def check_weight(value: object, place: str, meaning_of_zero: str) -> float:
    """Return `value` if it is a number that can multiply a loss. Otherwise raises DataError."""
    if isinstance(value, int | float) and 0 <= value <= _LARGEST:
        return float(value)
    raise DataError(
        f"{place} must be a number of at least 0 (0: {meaning_of_zero}; 1: trained on; 0.5: half as much), not "
        f"{quoted(value)}"
    )


def _parse_fields(item: Mapping[object, object], place: str) -> dict[str, object]:
    """Return the fields that templates read besides role and content; null and empty fields count as unset."""
    others = {name: value for name, value in item.items() if name not in _PARSED_FIELDS and not is_unset(value)}
    texts: dict[str, object] = {
        name: as_text(others.pop(name), f"{place}.{name}") for name in _TEXT_FIELDS if name in others
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


def as_number(value: object) -> object:
    """Return the number that a text holds, as in CSV files; other values unchanged."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def is_unset(value: object) -> bool:
    """Whether a field counts as absent: null or empty."""
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
    return is_list(value) and any(map(holds_call, value))


def _content_text(content: object, place: str) -> str:
    """Return the text of a message; a list of text parts is concatenated."""
    if content is None:
        return ""
    if is_list(content):
        return "".join(_part_text(part, f"{place}[{position}]") for position, part in enumerate(content))
    return as_text(content, place)


def _part_text(part: object, place: str) -> str:
    if isinstance(part, str):
        return as_text(part, place)
    if not isinstance(part, Mapping) or "type" not in part:
        raise DataError(f'{place} must be a text part, {{"type": "text", "text": ...}}, not {quoted(part)}')
    if part["type"] == "image":
        if held := [name for name in part if name != "type" and not is_unset(part[name])]:
            raise DataError(
                f"{place} is an image with the key {listed(map(str, held))}; give its path in `images` of the "
                'record, and only {"type": "image"} here'
            )
        return MARK
    if part["type"] != "text":
        raise DataError(
            f"{place} is of the type {quoted(part['type'])}; only parts of the types text and image are read. Mobius "
            "trains without audio and video: leave such records out. Write calls as `tool_calls`, thoughts as "
            "`reasoning_content`"
        )
    key = "value" if part.get("text") is None and "value" in part else "text"
    return as_text(part.get(key), f"{place}.{key}")


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
    if not is_list(value):
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
        return {as_text(key, f"a key of {place}"): _plain(item, place) for key, item in value.items()}
    if is_list(value):
        return [_plain(item, place) for item in value]
    return as_text(value, place)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of which every assistant's turn is a target, except turns of the prompt and untrained turns."""

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    """JSON schemas of the tools that the assistant may call."""
    num_prompt_turns: int = 0
    """Number of leading turns that are never targets, also if they are an assistant's."""
    weight: float = 1.0
    """Factor of the loss of all turns together; the other kinds of samples have this field, too."""
    images: tuple[str, ...] = ()
    """Paths of images, each with its place (`images.MARK`) in the text of a turn."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt, directly followed by a response; the response is the target."""

    prompt: str
    response: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Document:
    """Text in which every token is a target."""

    text: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Token ids of a prompt and of the completion after it, which is the target; nothing is added to them."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    """Log-probability of each token of the completion by its sampler, NaN where it is not known; () for none."""
    weight: float = 1.0


Sample = Conversation | Completion | Document | TokenIds


@dataclass(frozen=True, slots=True)
class Unit:
    """Samples that are trained together, such as the two sides of a pair; each becomes one sequence.

    Sequences with the same prompt have the same masked tokens. A sequence has at most --seq_length // (their number)
    tokens, and is cut at its end.
    """

    sequences: tuple[Sample, ...]
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Name -> a number for each sequence."""


def text_of(record: Mapping[str, object], column: str) -> str:
    """Return the text of the column; empty if the column is absent or null."""
    value = record.get(column)
    return "" if value is None else as_text(value, f"`{column}`")


def system_turns(record: Mapping[str, object]) -> list[Turn]:
    """Return the turn of the column `system`, if it has text."""
    system = text_of(record, "system")
    return [Turn(Role.SYSTEM, system)] if system.strip() else []


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    """Whether a value of JSON is a list."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def items_of(record: Mapping[str, object], column: str) -> Sequence[object]:
    """Return the list in a column; empty if the column is absent or null."""
    value = () if record.get(column) is None else record[column]
    if not is_list(value):
        raise DataError(f"`{column}` must be a list, not {type(value).__name__}")
    return value


def turns_of(record: Mapping[str, object], column: str) -> list[Turn]:
    """Return the turns in a column of messages with `role` and `content`, or ShareGPT's `from` and `value`."""
    return [_parse_turn(item, f"`{column}[{position}]`") for position, item in enumerate(items_of(record, column))]


_MEDIA = ("audio", "audios", "video", "videos")


def tools_of(record: Mapping[str, object]) -> tuple[Mapping[str, object], ...]:
    """Return the tools of the record. Raises DataError if the record has audio or video."""
    for name in _MEDIA:
        value = record.get(name)
        if value is not None and not (isinstance(value, Sized) and len(value) == 0):
            raise DataError(
                f"`{name}` is not empty; Mobius trains on text and images, not on audio and video. Without them, the "
                "answers would describe things that the model never met: leave such records out"
            )
    tools, former = (None if is_unset(record.get(name)) else record[name] for name in ("tools", "functions"))
    if tools is not None and former is not None:
        raise DataError("there are both `tools` and `functions`, its former name; leave one of them out")
    return tuple(_mappings(tools, "`tools`") if former is None else _functions(former, "`functions`"))
