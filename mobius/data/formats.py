"""Owns the record formats: which columns make which format, and how a record of it becomes a `Sample`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from mobius.errors import DataError
from mobius.excerpt import listed, quoted


class Role(StrEnum):
    """Speaker of a turn, by the names that chat templates use."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Turn:
    """Text that one role said in one go."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, of which every assistant's is a target."""

    turns: tuple[Turn, ...]


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
    is_packed: bool = False
    """Whether samples are joined and cut into full rows, instead of one sample to a row."""

    def describe(self) -> str:
        """Name and columns, the optional ones in brackets, for messages."""
        return f"{self.name} ({', '.join([*self.required, *(f'[{column}]' for column in self.optional)])})"


def recognize(columns: Sequence[str], where: str) -> RecordFormat:
    """The first format whose required columns are all there. Raises DataError that names `where`."""
    for record_format in FORMATS:
        if set(columns).issuperset(record_format.required):
            return record_format
    accepted = "\n".join(f"  {record_format.describe()}" for record_format in FORMATS)
    raise DataError(
        f"{where}: the columns {listed(sorted(set(columns)))} match no known format. "
        f"Rename the columns to one of these (optional ones in brackets):\n{accepted}"
    )


def parse_record(record_format: RecordFormat, record: Mapping[str, object], where: str) -> Sample:
    """The sample of a record; raises DataError that names `where` if a column is missing or of another kind."""
    try:
        if missing := [column for column in record_format.required if column not in record]:
            raise DataError(
                f"the column {', '.join(missing)} is missing; found: {listed(map(str, record))}. "
                f"The first record is in the format {record_format.describe()}, and all must be"
            )
        return record_format.parse(record)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def _text(record: Mapping[str, object], column: str) -> str:
    """The column's text; an absent or null column is empty text."""
    value = record.get(column)
    return "" if value is None else _as_text(value, f"`{column}`")


def _as_text(value: object, place: str) -> str:
    """`value` if it is text that can be encoded, as a tokenizer needs it; JSON's escapes can name half a character."""
    if not isinstance(value, str):
        raise DataError(f"{place} must be text, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place} holds half of a character, {value[error.start]!r}, at position {error.start}; write whole ones"
        ) from error
    return value


def _system_turns(record: Mapping[str, object]) -> list[Turn]:
    system = _text(record, "system")
    return [Turn(Role.SYSTEM, system)] if system.strip() else []


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
                texts = (_as_text(text, "`history`") for text in pair)
                turns += map(Turn, (Role.USER, Role.ASSISTANT), texts)
            case _:
                raise DataError(f"`history` must hold [question, answer] pairs of text, not {quoted(pair)}")
    question = "\n\n".join(part for part in (_text(record, "instruction"), _text(record, "input")) if part.strip())
    return Conversation((*turns, Turn(Role.USER, question), Turn(Role.ASSISTANT, _text(record, "output"))))


_ROLES = {
    **dict.fromkeys(("system", "developer"), Role.SYSTEM),
    **dict.fromkeys(("human", "user"), Role.USER),
    **dict.fromkeys(("gpt", "chatgpt", "model", "assistant"), Role.ASSISTANT),
    **dict.fromkeys(("tool", "observation"), Role.TOOL),
}


def _parse_turns(column: str, role_key: str, content_key: str, record: Mapping[str, object]) -> Sample:
    turns = _system_turns(record)
    for position, item in enumerate(_items(record, column)):
        place = f"`{column}[{position}]`"
        if not isinstance(item, Mapping) or role_key not in item or content_key not in item:
            raise DataError(f"{place} must have `{role_key}` and `{content_key}`, not {quoted(item)}")
        name = item[role_key]
        role = _ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            raise DataError(f"{place} has the {role_key} {quoted(name)}; known are {', '.join(_ROLES)}")
        turns.append(Turn(role, _as_text(item[content_key], f"{place}.{content_key}")))
    return Conversation(tuple(turns))


def _parse_xsum(record: Mapping[str, object]) -> Sample:
    document, summary = _text(record, "document"), _text(record, "summary")
    if not document.strip():
        return Completion("", "")  # a summary of nothing would only teach to invent
    return Completion(f"Summarize the article in one sentence.\n\n{document}\n\nSummary:\n", summary)


# Order matters: a record that has the columns of two formats (alpaca sets often carry a rendered `text` too) is read
# as the earlier one, which says more about what is a target.
FORMATS: tuple[RecordFormat, ...] = (
    RecordFormat("messages", ("messages",), ("system",), partial(_parse_turns, "messages", "role", "content")),
    RecordFormat("sharegpt", ("conversations",), ("system",), partial(_parse_turns, "conversations", "from", "value")),
    RecordFormat("alpaca", ("instruction", "output"), ("input", "system", "history"), _parse_alpaca),
    RecordFormat(
        "prompt-completion",
        ("prompt", "completion"),
        (),
        lambda record: Completion(_text(record, "prompt"), _text(record, "completion")),
    ),
    RecordFormat("xsum", ("document", "summary"), (), _parse_xsum),
    RecordFormat("text", ("text",), (), lambda record: Document(_text(record, "text")), is_packed=True),
)
