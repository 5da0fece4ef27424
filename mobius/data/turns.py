"""Owns the turns of a conversation (roles, fields), and the conversion of chat messages to turns."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from mobius.errors import DataError, listed, quoted


class Role(StrEnum):
    """Speaker of a turn, named as in chat templates."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a role: its text, and its tool calls."""

    role: Role
    content: str
    fields: Mapping[str, object] = field(default_factory=dict)
    """Other message fields that chat templates read, such as tool_calls, a list of mappings."""
    is_trained: bool = True
    """False for an assistant turn that the data excludes from training; it remains context for later turns."""

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
"""Speaker of a turn whose text is the JSON of the assistant's tool calls."""
_KEYS: Final = (("role", "content"), ("from", "value"))
_REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")
_TEXT_FIELDS: Final = ("name", "tool_call_id", *_REASONING_FIELDS)
_TRAINED_FIELDS: Final = ("weight", "train", "training", "loss")
"""Message fields that say whether it is trained on: OpenAI's (0, 1), Axolotl's and ms-swift's (true, false)."""
_MOST_LEVELS: Final = 40
"""Maximum nesting of a tool's JSON; schemas have some ten levels."""


def parse_turns(items: Sequence[object], column: str) -> list[Turn]:
    """Turns from messages with `role` and `content`, or ShareGPT's `from` and `value`. Raises DataError."""
    return [_parse_turn(item, f"`{column}[{position}]`") for position, item in enumerate(items)]


def parse_tools(value: object, place: str) -> tuple[Mapping[str, object], ...]:
    """JSON schemas of tools, from a list or its JSON text; empty for null or empty text. Raises DataError."""
    return tuple(_mappings(value, place))


def tool_call_names(turn: Turn) -> list[str]:
    """Names of the functions that a turn calls."""
    calls = turn.fields.get("tool_calls", ())
    assert isinstance(calls, Sequence)
    return [str(function_of(call)["name"]) for call in calls]


def reasoning_of(turn: Turn) -> str:
    """Reasoning before the answer, from its own field; empty if there is none."""
    return next((text for name in _REASONING_FIELDS if (text := str(turn.fields.get(name) or "").strip())), "")


def function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Mapping with name and arguments of a call: its `function`, or the call itself."""
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def as_text(value: object, place: str) -> str:
    """Return `value` if it is encodable text. Raises DataError for others, also for JSON's lone surrogates."""
    if not isinstance(value, str):
        raise DataError(f"{place} must be text, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place} holds half of a character, {value[error.start]!r}, at position {error.start}; write whole ones"
        ) from error
    return value


def _parse_turn(item: object, place: str) -> Turn:
    keys = next((keys for keys in _KEYS if isinstance(item, Mapping) and keys[0] in item), None)
    if keys is None or not isinstance(item, Mapping):
        raise DataError(f"{place} must have `role` and `content`, or `from` and `value`, not {quoted(item)}")
    role_key, content_key = keys
    name, content, fields = item[role_key], item.get(content_key), _parse_fields(item, place)
    if name == _CALL_ROLE:
        calls = [
            call if "function" in call else {"function": call} for call in _calls(content, f"{place}.{content_key}")
        ]
        fields["tool_calls"] = [{"type": "function", **call} for call in calls]
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
    """Whether the message's own fields allow training on it; null means unset, as tables fill in nulls."""
    if item.get("train_detail"):
        raise DataError(
            f"{place}.train_detail is not empty; a message is trained on as a whole or not at all. Split it into "
            'messages, and give those that are only context "train": false'
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
    """Message fields besides role and content that templates read; null means unset, as tables fill in nulls."""
    texts = {name: as_text(item[name], f"{place}.{name}") for name in _TEXT_FIELDS if item.get(name) is not None}
    calls = _calls(item.get("tool_calls"), f"{place}.tool_calls")
    return {**texts, "tool_calls": calls} if calls else dict(texts)


def _content_text(content: object, place: str) -> str:
    """Text of a message; content parts (a list of texts) are concatenated."""
    if content is None:
        return ""
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        return "".join(_part_text(part, f"{place}[{position}]") for position, part in enumerate(content))
    return as_text(content, place)


def _part_text(part: object, place: str) -> str:
    if isinstance(part, str):
        return as_text(part, place)
    if not isinstance(part, Mapping) or "type" not in part:
        raise DataError(f'{place} must be a text part, {{"type": "text", "text": ...}}, not {quoted(part)}')
    if part["type"] != "text":
        raise DataError(
            f"{place} is of the type {quoted(part['type'])}; Mobius trains on text only, without images, audio and "
            "video. Leave such records out"
        )
    return as_text(part.get("text"), f"{place}.text")


def _calls(value: object, place: str) -> list[dict[str, object]]:
    """Tool calls as in the data, each with a function name. Raises DataError."""
    calls = _mappings([value] if isinstance(value, Mapping) else value, place)
    for position, call in enumerate(calls):
        function = function_of(call)
        if not isinstance(function.get("name"), str):
            raise DataError(f"{place}[{position}] must have the `name` of a function, not {quoted(call)}")
    return calls


def _mappings(value: object, place: str) -> list[dict[str, object]]:
    """List of mappings of plain values, from `value` or its JSON text; empty for null or empty text."""
    value = _decoded(value, place)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, bytes):
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
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} must be JSON, not {quoted(value)}: {quoted(str(error))}") from error


def _plain(value: object, place: str, level: int = 0) -> object:
    """Copy of a JSON value without null keys, which tables add for fields that a record lacks."""
    if level > _MOST_LEVELS:
        raise DataError(f"{place} is nested more than {_MOST_LEVELS} levels deep")
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        items = ((key, item) for key, item in value.items() if item is not None)
        return {as_text(key, f"a key of {place}"): _plain(item, place, level + 1) for key, item in items}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item, place, level + 1) for item in value]
    return as_text(value, place)
