"""Owns the way from one sample to rows of token ids with a target mask, at most seq_length tokens each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from mobius.data.chat_template import render
from mobius.data.formats import Completion, Conversation, Document, Role, Sample, Turn
from mobius.data.store import Row
from mobius.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Note(StrEnum):
    """Facts about the tokenizing for the user; the value completes "<n> records: ..."."""

    SPLIT_TURNS = (
        "each assistant turn became a sample of its own, because the tokenizer's chat template renders earlier turns "
        "differently or does not end them with the end-of-sequence token"
    )
    OTHER_PROMPT = (
        "the chat template's generation prompt holds text that a finished answer does not (a thinking tag, for "
        "example); the model is trained without it"
    )


@dataclass(frozen=True, slots=True)
class Encoded:
    """Rows of a record; `is_cut` if tokens were lost to seq_length. A document is one long row, which `pack` cuts."""

    rows: tuple[Row, ...]
    is_empty: bool = False
    is_cut: bool = False
    notes: frozenset[Note] = frozenset()


Exchange = tuple[str, str]
"""Text of a prompt, and of the target that follows it."""
ExchangeIds = tuple[list[int], list[int]]
"""Token ids of both."""


class SampleEncoder:
    """Turns samples into rows. Holds a tokenizer and no other state; can be pickled."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, seq_length: int) -> None:
        if tokenizer.eos_token_id is None or tokenizer.eos_token is None:
            raise DataError(
                "the tokenizer has no end-of-sequence token, so a model could not learn to stop: "
                "set `eos_token` in its tokenizer_config.json"
            )
        self._tokenizer, self.seq_length = tokenizer, seq_length
        self._eos_id, self._eos = int(tokenizer.eos_token_id), str(tokenizer.eos_token)
        bos_id = tokenizer.bos_token_id
        adds_bos = bos_id is not None and list(tokenizer("a").input_ids[:1]) == [bos_id]
        self._start: list[int] = [int(bos_id)] if adds_bos else []

    def encode(self, sample: Sample, where: str) -> Encoded:
        """The rows of a sample; raises DataError that names `where` if the chat template refuses it or is broken."""
        match sample:
            case Document(text) if text.strip():
                return Encoded((_as_row([([], [*self._start, *self._tokenize(text), self._eos_id])]),))
            case Completion(prompt, response) if prompt.strip() or response.strip():
                return self._encode_rows([[(prompt, response)]] if response.strip() else [], self._start)
            case Conversation(turns) if any(turn.content.strip() for turn in turns):
                return self._encode_conversation(turns, where)
        return Encoded((), is_empty=True)

    def _encode_conversation(self, turns: Sequence[Turn], where: str) -> Encoded:
        asked = next((index for index, turn in enumerate(turns) if turn.role in (Role.USER, Role.TOOL)), len(turns))
        answers = ((index, turn) for index, turn in enumerate(turns) if turn.role is Role.ASSISTANT)
        answered = [index for index, turn in answers if index > asked and turn.content.strip()]
        if not answered:
            return Encoded(())
        if self._tokenizer.chat_template is None:
            return self._encode_rows([self._plain_exchanges(turns, answered)], self._start)
        exchanges = self._template_exchanges(turns, answered, where)
        if exchanges is not None:
            return self._encode_rows([exchanges], [])
        split = [self._last_exchange(turns[: index + 1], where) for index in answered]
        notes = [Note.SPLIT_TURNS] if len(answered) > 1 else []
        if not all(is_prompt_whole for _, is_prompt_whole in split):
            notes.append(Note.OTHER_PROMPT)
        return self._encode_rows([[exchange] for exchange, _ in split], [], frozenset(notes))

    def _plain_exchanges(self, turns: Sequence[Turn], answered: Sequence[int]) -> list[Exchange]:
        """Prompts and targets of a conversation for tokenizers without a chat template."""
        headings = {Role.SYSTEM: "", Role.USER: "### Instruction:\n", Role.TOOL: "### Tool:\n"}
        exchanges, prompt = list[Exchange](), ""
        for index, turn in enumerate(turns[: answered[-1] + 1]):
            if index in answered:
                exchanges.append((f"{prompt}### Response:\n", turn.content + self._eos))
                prompt = "\n\n"
            elif turn.role is Role.ASSISTANT:
                prompt += f"### Response:\n{turn.content}{self._eos}\n\n"
            else:
                prompt += f"{headings[turn.role]}{turn.content}\n\n"
        return exchanges

    def _template_exchanges(self, turns: Sequence[Turn], answered: Sequence[int], where: str) -> list[Exchange] | None:
        """The whole conversation as one text, cut where each turn adds to the rendering of those before it.

        None if the template is not that regular, or ends an inner turn without the end-of-sequence token.
        """
        whole = render(self._tokenizer, turns[: answered[-1] + 1], where)
        exchanges, position = list[Exchange](), 0
        for index in answered:
            prompt = render(self._tokenizer, turns[:index], where, add_generation_prompt=True)
            through = render(self._tokenizer, turns[: index + 1], where)
            if not (through.startswith(prompt) and whole.startswith(through)) or len(prompt) < position:
                return None
            target = self._until_eos(through[len(prompt) :])
            if index != answered[-1] and not target.endswith(self._eos):
                return None
            exchanges.append((whole[position : len(prompt)], target))
            position = len(prompt) + len(target)
        return exchanges

    def _last_exchange(self, turns: Sequence[Turn], where: str) -> tuple[Exchange, bool]:
        """The last turn as the target of all before it, and whether the prompt is what inference would render."""
        prompt = render(self._tokenizer, turns[:-1], where, add_generation_prompt=True)
        through = render(self._tokenizer, turns, where)
        if through.startswith(prompt):
            return (prompt, self._until_eos(through[len(prompt) :])), True
        # Two answers that differ in their first character show where the template puts an answer.
        probes = [render(self._tokenizer, [*turns[:-1], Turn(Role.ASSISTANT, letter)], where) for letter in "xy"]
        prompt = "".join(x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*probes, strict=False)))
        if not through.startswith(prompt):
            raise DataError(
                f"{where}: the tokenizer's chat template renders the turns before an answer differently for different "
                "answers, so prompt and target cannot be told apart. Use a tokenizer with another chat template, or "
                "give the data as `prompt` and `completion`"
            )
        return (prompt, self._until_eos(through[len(prompt) :])), False

    def _until_eos(self, text: str) -> str:
        """`text` without white space that templates write after the end-of-sequence token: it is never generated."""
        stripped = text.rstrip()
        return stripped if stripped.endswith(self._eos) else text

    def _encode_rows(
        self, conversations: Iterable[Sequence[Exchange]], start: list[int], notes: frozenset[Note] = frozenset()
    ) -> Encoded:
        fitted = (fit(self._tokenize_exchanges(exchanges, start), self.seq_length) for exchanges in conversations)
        rows = [(_as_row(ids), is_cut) for ids, is_cut in fitted]
        kept = [(row, is_cut) for row, is_cut in rows if row[1][1:].any()]
        return Encoded(tuple(row for row, _ in kept), is_cut=any(is_cut for _, is_cut in kept), notes=notes)

    def _tokenize_exchanges(self, exchanges: Sequence[Exchange], start: list[int]) -> list[ExchangeIds]:
        """Token ids of each prompt and target; the last target ends with the end-of-sequence token.

        Where a token would span the border of two parts, they are tokenized one by one, as inference does it.
        """
        text, before = "", list[int]()
        result: list[ExchangeIds] = []
        for prompt, target in exchanges:
            through_prompt = self._tokenize(text + prompt)
            through_target = self._tokenize(text + prompt + target)
            if through_prompt[: len(before)] != before or through_target[: len(through_prompt)] != through_prompt:
                result = [(self._tokenize(prompt), self._tokenize(target)) for prompt, target in exchanges]
                break
            result.append((through_prompt[len(before) :], through_target[len(through_prompt) :]))
            text, before = text + prompt + target, through_target
        if result[-1][1][-1:] != [self._eos_id]:
            result[-1][1].append(self._eos_id)
        result[0][0][:0] = start
        return result

    def _tokenize(self, text: str) -> list[int]:
        # verbose=False: no warning that the text is longer than the model's window; `fit` cuts it.
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def fit(exchanges: Sequence[ExchangeIds], seq_length: int) -> tuple[list[ExchangeIds], bool]:
    """As many leading exchanges as seq_length holds, and whether something was lost.

    If not even the first fits, prompt and target share the length. The prompt is cut in its middle: its head holds the
    instruction, its end the words that call for the answer. A cut target ends without the end-of-sequence token.
    """
    length = 0
    for index, (prompt, target) in enumerate(exchanges):
        length += len(prompt) + len(target)
        if length <= seq_length:
            continue
        if index > 0:
            return list(exchanges[:index]), True
        num_prompt, num_target = share_length(len(prompt), len(target), seq_length)
        num_end = num_prompt // 4
        kept = prompt[: num_prompt - num_end] + prompt[len(prompt) - num_end :]
        return [(kept, target[:num_target])], True
    return list(exchanges), False


def share_length(num_prompt: int, num_target: int, seq_length: int) -> tuple[int, int]:
    """Numbers of tokens of prompt and target to keep when both together exceed seq_length.

    One that needs at most half stays whole, and the other takes the rest; if both need more, each gets half.
    """
    num_target = min(num_target, max(seq_length - seq_length // 2, seq_length - num_prompt))
    return seq_length - num_target, num_target


def pack(documents: Iterable[Row], seq_length: int) -> list[Row]:
    """Join documents, each with its end-of-sequence token, and cut them into rows of seq_length, the last shorter."""
    ids = np.concatenate([row[0] for row in documents] or [np.empty(0, np.int32)])
    blocks = [ids[first : first + seq_length] for first in range(0, len(ids), seq_length)]
    # A single token is no row: nothing predicts a row's first one.
    return [(block, np.ones(len(block), dtype=np.bool_)) for block in blocks if len(block) > 1]


def _as_row(exchanges: Sequence[ExchangeIds]) -> Row:
    ids = [token for prompt, target in exchanges for token in (*prompt, *target)]
    mask = [is_target for prompt, target in exchanges for is_target in (*[False] * len(prompt), *[True] * len(target))]
    return np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_)
