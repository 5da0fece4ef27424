"""Finds parts of a record's messages that a template does not write into the rows: turns, parts of answers, and keys.

The finder searches each text in the rows. A short or repeated text could be found elsewhere by chance. For such texts
it renders the conversation with a unique word in place of each text, once for all conversations of the same shape.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mobius.data.chat_templates import ChatRenderer
from mobius.data.messages import CALL_IDS, Conversation, Role, Turn, function_of, tool_call_names
from mobius.errors import listed, quoted

_SURE_CHARACTERS: Final = 32
"""Minimum length of a text that is not in the rows by chance if the conversation has it once."""
_MOST_SHAPES: Final = 4096
_KINDS: Final = {
    Role.SYSTEM: "system messages",
    Role.USER: "user messages",
    Role.TOOL: "results of tools",
    Role.ASSISTANT: "answers that are context only",
}
DEFAULT_SYSTEM: Final = "the system message of --default_system"
_KEY: Final = "key: "
_RECORDS, _TARGETS, _TOKENS = "shortened records", "shortened targets", "lost tokens"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Parts of a record that are missing in its rows."""

    kinds: frozenset[str] = frozenset()
    """Kinds of messages whose content is missing."""
    fields: frozenset[tuple[int, str]] = frozenset()
    """Turn and key of other missing fields; the first call of a turn is `tool_calls[0]`."""
    lost_tokens: tuple[int, ...] = ()
    """Number of missing tokens, for each target that lacks some."""
    is_without_tools: bool = False

    def tally(self) -> Counter[str]:
        """Return counts to add up over records; `describe_left_out` describes the sums."""
        tally = Counter([*self.kinds, *{_KEY + key for _, key in self.fields}])
        if self.lost_tokens:
            tally += Counter({_RECORDS: 1, _TARGETS: len(self.lost_tokens), _TOKENS: sum(self.lost_tokens)})
        return tally


NOTHING: Final = LeftOut()


def combined(parts: Sequence[LeftOut]) -> LeftOut:
    """Return the parts that are missing in any sequence of a record."""
    if all(part is NOTHING for part in parts):
        return NOTHING
    return LeftOut(
        frozenset().union(*(part.kinds for part in parts)),
        frozenset().union(*(part.fields for part in parts)),
        tuple(number for part in parts for number in part.lost_tokens),
        is_without_tools=any(part.is_without_tools for part in parts),
    )


def describe_left_out(tally: Mapping[str, int], num_records: int) -> Iterator[str]:
    """Yield sentences for the user on the parts that are missing in the rows."""
    if number := tally.get(_TARGETS, 0):
        yield (
            f"{tally[_RECORDS]} of {num_records} records: the chat template leaves out parts of answers (thoughts, for "
            f"example): {number} targets lose {tally[_TOKENS]} tokens. Use a --chat_template that writes them"
        )
    kinds = [kind for whole in (*_KINDS.values(), DEFAULT_SYSTEM) for kind in (whole, f"parts of {whole}")]
    for kind in kinds:
        if number := tally.get(kind, 0):
            yield f"{number} of {num_records} records: the chat template leaves out {kind}, which the model never sees"
    keys = {name.removeprefix(_KEY): number for name, number in tally.items() if name.startswith(_KEY)}
    if keys:
        found = listed(f"{quoted(key)} ({number} records)" for key, number in sorted(keys.items()))
        yield f"no row holds what these keys of messages say, as the chat template does not write them: {found}"


class LeftOutFinder:
    """Compares conversations with the rows made of them; remembers shapes of conversations, but no text. Picklable."""

    def __init__(self, default_system: str | None) -> None:
        self._default_system = default_system
        self._written_by_shape: dict[object, frozenset[tuple[int, str]]] = {}

    def find(
        self,
        conversation: Conversation,
        rows: Sequence[str],
        targets: Mapping[int, str],
        *,
        chat: ChatRenderer | None,
        tokenize: Callable[[str], list[int]],
    ) -> LeftOut:
        """Compare `conversation` with the texts of its rows, and each answer with its target (`targets`, by turn).

        `chat` has rendered the rows; None: there is no template, and the rows have only the contents of messages.
        """
        text, turns = _Text("\n".join(rows)), conversation.turns
        contents = {(index, key): content for index, key, content in _texts(conversation)}
        numbers = Counter(contents.values())
        unsure = {at for at, part in contents.items() if len(part) < _SURE_CHARACTERS or numbers[part] > 1}
        own = {index: _Text(target) for index, target in targets.items()}
        missing = {at for at, part in contents.items() if not own.get(at[0], text).holds(part)}
        written = frozenset(at for at in contents if at[1] == "content")
        if chat is not None and (missing or unsure):
            written = self._written(chat, conversation, list(contents), sorted(targets))
        missing = {*missing, *(unsure - written), *_unwritten(turns, text)}
        if not missing:
            return NOTHING
        shortened = [index for index, key in missing if key == "content"]
        lost = [
            Counter(tokenize(contents[index, "content"])) - Counter(tokenize(targets[index]))
            for index in shortened
            if index in own
        ]
        return LeftOut(
            frozenset(
                self._kind(turns[index], is_partial=(index, "content") in written)
                for index in shortened
                if index not in own
            ),
            frozenset(at for at in missing if at[0] >= 0 and at[1] != "content"),
            tuple(max(1, tokens.total()) for tokens in lost),
            is_without_tools=any(index < 0 for index, _ in missing),
        )

    def _kind(self, turn: Turn, *, is_partial: bool) -> str:
        kind = DEFAULT_SYSTEM if turn.content is self._default_system else _KINDS[turn.role]
        return f"parts of {kind}" if is_partial else kind

    def _written(
        self,
        chat: ChatRenderer,
        conversation: Conversation,
        places: Sequence[tuple[int, str]],
        answered: Sequence[int],
    ) -> frozenset[tuple[int, str]]:
        keys = ((turn.role, *sorted(turn.fields)) for turn in conversation.turns)
        shape = (*keys, *places, bool(conversation.tools), *answered)
        if shape not in self._written_by_shape:
            if len(self._written_by_shape) >= _MOST_SHAPES:
                self._written_by_shape.clear()
            self._written_by_shape[shape] = chat.find_written(places, [index + 1 for index in answered])
        return self._written_by_shape[shape]


class _Text:
    """Text in which parts are searched, with and without white space."""

    def __init__(self, text: str) -> None:
        self._text, self._squeezed = text, ""

    def holds(self, part: str) -> bool:
        """Whether the text contains the part: unchanged, with other white space, or as JSON."""
        if part in self._text:
            return True
        self._squeezed = self._squeezed or "".join(self._text.split())
        return "".join(part.split()) in self._squeezed or json.dumps(part, ensure_ascii=False)[1:-1] in self._text


def _texts(conversation: Conversation) -> Iterator[tuple[int, str, str]]:
    """Yield turn, key and text of everything that a template should write; turns -1, -2, ... are names of tools."""
    for index, turn in enumerate(conversation.turns):
        for key, value in (("content", turn.content), *turn.fields.items()):
            if key not in CALL_IDS and isinstance(value, str) and (text := value.strip()):
                yield index, key, text
        for number, name in enumerate(tool_call_names(turn)):
            yield index, f"tool_calls[{number}]", name
    for index, tool in enumerate(conversation.tools):
        if name := str(function_of(tool).get("name") or "").strip():
            yield ~index, "name", name


def _unwritten(turns: Sequence[Turn], text: _Text) -> set[tuple[int, str]]:
    """Return turn and key of each list or mapping (other than calls) with a text that the rows lack."""
    return {
        (index, key)
        for index, turn in enumerate(turns)
        for key, value in turn.fields.items()
        if key != "tool_calls" and not isinstance(value, str) and not all(map(text.holds, _leaves(value)))
    }


def _leaves(value: object) -> Iterator[str]:
    """Yield the texts inside lists and mappings."""
    if isinstance(value, str) and value.strip():
        yield value.strip()
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
