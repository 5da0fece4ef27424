"""Tokenizes a sample into rows of at most seq_length token ids, with a target mask."""

import re
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from mobius.data.chat_templates import ChatRenderer
from mobius.data.images import MARK, ImageRules, with_images
from mobius.data.left_out import NOTHING, LeftOut, LeftOutFinder, combined
from mobius.data.messages import (
    REASONING_FIELDS,
    Completion,
    Conversation,
    Document,
    Role,
    Sample,
    TokenIds,
    Turn,
    Unit,
    holds_call,
    reasoning_of,
    tool_call_names,
)
from mobius.data.token_store import SAMPLER, WEIGHT, TokenizedDataset, TokenizedSample, Values
from mobius.errors import DataError, listed, quoted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_PIECE_CHARACTERS: Final = 1 << 19
"""Length of a piece. Tokenizers need about 160 bytes per byte of text, so text of twice this length is split."""
_MOST_UNBROKEN: Final = 4
"""Consecutive pieces without a natural end that are refused: each takes seconds, and such text is not language."""
_BREAKS: Final = (re.compile(r"\n(?=\S)"), re.compile(r"\S(?= \S)"))
"""Ends of pieces, best first: tokenizers start a token at the first word of a line and at a single space."""


_REASONING: Final = (
    "Give a template that writes it with --chat_template, write it into the content, or remove the field"
    " (reasoning_content, thinking, reasoning or thoughts) to train on answers without it"
)


NO_IMAGES: Final = "the model is not known to read images"


class EncodingNote(StrEnum):
    """Facts about tokenization that the user should know; the value completes "<n> records: ..."."""

    SPLIT_TURNS = (
        "each assistant turn became a sample of its own, because the tokenizer's chat template renders earlier turns "
        "differently or does not end them with the end-of-sequence token"
    )
    OTHER_PROMPT = (
        "the chat template's generation prompt holds text that a finished answer does not (a thinking tag, for "
        "example); the model is trained without it"
    )
    OTHER_END = (
        "the chat template does not end an answer with the tokenizer's end-of-sequence token, so this token was added "
        "after each answer: the model learns to stop with it"
    )
    NO_TOOLS = (
        "the chat template leaves out the `tools`, so the model is trained without seeing them; of the built-in "
        "templates (--chat_template) chatml writes tools"
    )
    UNUSED_END = "messages after the last trained answer are left out, because the model learns nothing from them"


class _EndlessWordError(Exception):
    def __str__(self) -> str:
        most = 2 * _MOST_UNBROKEN * _PIECE_CHARACTERS
        return (
            f"{most:,} characters in a row without the end of a word or line, as in binary data written as text; a "
            "tokenizer would take minutes for them. Leave the record out, or shorten it"
        )


@dataclass(frozen=True, slots=True)
class EncodingRules:
    """Rules for choosing targets and the text around them."""

    train_on_prompt: bool = False
    """Whether every token except a row's first is a target."""
    train_on_all_turns: bool = False
    """Whether every token is a target in conversations without a separate prompt."""
    mask_history: bool = False
    """Whether only the last answer of a conversation is a target."""
    default_system: str | None = None
    """System message for conversations without one."""
    chat_template: str | None = None
    """Jinja text that replaces the tokenizer's template."""

    def __post_init__(self) -> None:
        is_all = self.train_on_prompt or self.train_on_all_turns
        assert not (is_all and self.mask_history), "the options contradict each other"


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """Rows of a record; `is_truncated` if tokens beyond seq_length were removed. A document is one row of any length.

    A record without rows `is_empty` (no text), `is_unanswered`, `is_without_room` (the prompt fills the space of a
    sequence), or has an answer without a trainable token.
    """

    rows: tuple[TokenizedSample, ...]
    is_empty: bool = False
    is_unanswered: bool = False
    is_without_room: bool = False
    is_truncated: bool = False
    notes: frozenset[EncodingNote] = frozenset()
    left_out: LeftOut = NOTHING


@dataclass(frozen=True, slots=True)
class _Texts:
    """Text of a sample before tokenization."""

    rows: Sequence[Sequence["PromptAndTarget"]]
    start: list[int]
    """Token ids before each row."""
    weights: Sequence[Sequence[float]]
    """Factor of the loss of each row's targets."""
    notes: frozenset[EncodingNote] = frozenset()
    left_out: LeftOut = NOTHING


PromptAndTarget = tuple[str, str]
"""Text of a prompt, and text of the target that follows the prompt."""
PromptAndTargetIds = tuple[list[int], list[int]]
"""Token ids of a prompt, and token ids of its target."""


class SampleEncoder:
    """Converts samples to rows. Holds a tokenizer and no other state; picklable."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        seq_length: int,
        rules: EncodingRules | None = None,
        num_virtual_tokens: int = 0,
        images: ImageRules | str = NO_IMAGES,
        image_folder: Path | None = None,
    ) -> None:
        """`num_virtual_tokens` places before each sequence are kept free; `seq_length` does not count those of one.

        `images`: tokens of images, or why the model has none (a clause). Their relative paths begin at `image_folder`.
        """
        if tokenizer.eos_token_id is None or tokenizer.eos_token is None:
            raise DataError(
                "the tokenizer has no end-of-sequence token, so a model could not learn to stop: "
                "set `eos_token` in its tokenizer_config.json"
            )
        self._tokenizer, self.seq_length, self._rules = tokenizer, seq_length, rules or EncodingRules()
        self._eos_id, self._eos = int(tokenizer.eos_token_id), str(tokenizer.eos_token)
        bos_id = tokenizer.bos_token_id
        self._bos_ids: list[int] = [] if bos_id is None else [int(bos_id)]
        self._bos = "" if bos_id is None else str(tokenizer.bos_token)
        self._start = self._bos_ids if list(tokenizer("a").input_ids[:1]) == self._bos_ids else []
        marks = "|".join(re.escape(mark) for mark in (self._eos, self._bos) if mark)
        self._doubled = re.compile(rf"({marks})(?:\s*\1)+")
        self._left_out = LeftOutFinder(self._rules.default_system)
        self._num_virtual_tokens = num_virtual_tokens
        self._images, self._image_folder = images, image_folder
        self._of_all_turns: SampleEncoder | None = None
        if self._rules.train_on_all_turns:
            whole = replace(self._rules, train_on_prompt=True, train_on_all_turns=False)
            self._of_all_turns = SampleEncoder(
                tokenizer, seq_length=seq_length, rules=whole, images=images, image_folder=image_folder
            )

    def with_images_in(self, folder: Path | None) -> "SampleEncoder":
        """Return an encoder that reads images in `folder`."""
        other = copy(self)
        other._image_folder = folder
        if other._of_all_turns is not None:
            other._of_all_turns = other._of_all_turns.with_images_in(folder)
        return other

    def encode(self, sample: Sample | Unit, where: str) -> EncodedSample:
        """Return a sample's rows. Raises DataError with `where` if the chat template refuses it or is broken."""
        try:
            if isinstance(sample, Unit):
                return self._encode_unit(sample, where)
            if self._of_all_turns is not None and isinstance(sample, Conversation) and not sample.num_prompt_turns:
                return self._of_all_turns.encode(sample, where)
            if isinstance(sample, Conversation) and sample.images:
                return self._encode_with_images(sample, where)
            if isinstance(sample, Document) and sample.weight and (bare := self._bare(sample.text)).strip():
                return EncodedSample((self._encode_document(sample, bare),))
            texts = self._texts_of(sample, where)
            return texts if isinstance(texts, EncodedSample) else self._without_images(texts, sample, where)
        except _EndlessWordError as error:
            raise DataError(f"{where}: {error}") from None

    def _without_images(self, texts: _Texts, sample: Sample, where: str) -> EncodedSample:
        """Return the rows of a sample without images. Raises DataError for the token of an image in its text."""
        encoded, rules = self._encode_rows(texts, sample), self._images
        if isinstance(rules, ImageRules) and any((row.input_ids == rules.token_id).any() for row in encoded.rows):
            raise DataError(f"{where}: the text holds {rules.token}, which stands for an image, and there is no image")
        return encoded

    def _encode_with_images(self, sample: Conversation, where: str) -> EncodedSample:
        """Return the rows of a conversation; each row has the first images, which it holds whole."""
        rules = self._images
        try:
            if isinstance(rules, str):
                raise DataError(f"`images` is not empty, but {rules}. Leave such records out, or train another model")
            if any(MARK in turn.content for turn in sample.turns if turn.role is Role.ASSISTANT):
                raise DataError(f"an answer has {MARK}, and a model answers with text. Leave such records out")
            images = [rules.read(given, self._image_folder) for given in sample.images]
            texts = with_images([turn.content for turn in sample.turns], images, rules)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        turns = tuple(replace(turn, content=text) for turn, text in zip(sample.turns, texts, strict=True))
        found = self._texts_of(replace(sample, turns=turns), where)
        if isinstance(found, EncodedSample):
            return found
        encoded, rows = self._encode_rows(found, sample, keeps_first=True), list[TokenizedSample]()
        ends = [0, *accumulate(map(rules.num_tokens, images))]
        for row in encoded.rows:
            is_image = row.input_ids == rules.token_id
            if (number := int(is_image.sum())) not in ends:
                raise DataError(
                    f"{where}: the chat template does not write each image once ({number} tokens of images, not "
                    f"{ends[-1]}). Use the model's own template"
                )
            own = tuple(images[: ends.index(number)])
            rows.append(replace(row, is_target=row.is_target & ~is_image, images=own))
        rows = [row for row in rows if row.is_target[1:].any()]
        return replace(encoded, rows=tuple(rows))

    def _texts_of(self, sample: Sample, where: str) -> _Texts | EncodedSample:
        """Return prompts and targets of a sample, or why it has no rows."""
        match sample:
            case Document(text) if (bare := self._bare(text)).strip():
                return _Texts([[("", bare)]], self._start_of(text), [[1.0]])
            case Completion(prompt, response) if (bare := self._bare(response)).strip():
                exchange = (self._without_start(self._undoubled(prompt)), bare)
                start = self._start_of(prompt) or self._start_of(response)
                return _Texts([[exchange]], start, [[1.0]])
            case Completion(prompt) if prompt.strip():
                return EncodedSample((), is_unanswered=True)
            case Conversation(turns) if any(turn.has_content for turn in turns):
                bare_turns = tuple(
                    turn if (bare := self._bare(turn.content)) is turn.content else replace(turn, content=bare)
                    for turn in turns
                )
                return self._texts_of_conversation(self._with_system(replace(sample, turns=bare_turns)), where)
        return EncodedSample((), is_empty=True)

    def _encode_document(self, document: Document, bare: str) -> TokenizedSample:
        pieces = [np.array(ids, dtype=np.int32) for ids in map(self._tokenize, list(split_text(bare)))]
        start, end = self._start_of(document.text), [self._eos_id]
        ids = np.concatenate([np.array(start, dtype=np.int32), *pieces, np.array(end, dtype=np.int32)])
        return _with_weights(TokenizedSample.plain(ids, np.ones(len(ids), dtype=np.bool_)), document.weight)

    def _bare(self, text: str) -> str:
        """Return text without a start token at its start and an end token at its end; both are added later."""
        text = self._without_start(self._undoubled(text))
        stripped = text.rstrip()
        return stripped.removesuffix(self._eos) if stripped.endswith(self._eos) else text

    def _undoubled(self, text: str) -> str:
        """Return text in which no start or end token follows itself, directly or after white space."""
        has_marks = self._eos in text or (self._bos and self._bos in text)
        return self._doubled.sub(r"\1", text) if has_marks else text

    def _without_start(self, text: str) -> str:
        stripped = text.lstrip()
        return stripped.removeprefix(self._bos) if self._bos and stripped.startswith(self._bos) else text

    def _start_of(self, text: str) -> list[int]:
        """Return the token ids before the text: the text's start token, or the tokens that the tokenizer adds."""
        return self._bos_ids if self._bos and text.lstrip().startswith(self._bos) else self._start

    def _with_system(self, conversation: Conversation) -> Conversation:
        system, turns = self._rules.default_system, conversation.turns
        if not system or any(turn.role is Role.SYSTEM for turn in turns):
            return conversation
        num_prompt_turns = conversation.num_prompt_turns + 1
        return replace(conversation, turns=(Turn(Role.SYSTEM, system), *turns), num_prompt_turns=num_prompt_turns)

    def _texts_of_conversation(self, conversation: Conversation, where: str) -> _Texts | EncodedSample:
        turns = conversation.turns
        asked = next((index for index, turn in enumerate(turns) if turn.role in (Role.USER, Role.TOOL)), len(turns))
        first = max(asked + 1, conversation.num_prompt_turns)
        answers = ((index, turn) for index, turn in enumerate(turns) if turn.role is Role.ASSISTANT)
        answered = [index for index, turn in answers if index >= first and turn.has_content]
        if not answered:
            return EncodedSample((), is_unanswered=True)
        if self._rules.mask_history:
            del answered[:-1]
        if self._rules.train_on_prompt and not all(turn.is_trained for turn in turns if turn.role is Role.ASSISTANT):
            raise DataError(
                f"{where}: an answer is excluded from training (`weight` 0 or `train` false), and --train_on_prompt "
                "trains on every token. Leave out the option, or the field"
            )
        answered = [index for index in answered if turns[index].is_trained]
        if not answered:
            return EncodedSample(())
        used, unused = turns[: answered[-1] + 1], turns[answered[-1] + 1 :]
        conversation = replace(conversation, turns=used)
        is_plain = self._rules.chat_template is None and self._tokenizer.chat_template is None
        texts = (self._plain_texts if is_plain else self._chat_texts)(conversation, answered, where)
        if any(turn.has_content for turn in unused):
            return replace(texts, notes=texts.notes | {EncodingNote.UNUSED_END})
        return texts

    def _plain_texts(self, conversation: Conversation, answered: Sequence[int], where: str) -> _Texts:
        """Return the text of a conversation, for a tokenizer without a chat template."""
        if any(turn.has_calls for turn in conversation.turns):
            raise DataError(
                f"{where}: the tokenizer has no chat template, so tool calls cannot be written. Give one with "
                "--chat_template, such as the built-in chatml"
            )
        if any(reasoning_of(conversation.turns[index]) for index in answered):
            raise DataError(
                f"{where}: the tokenizer has no chat template, so an answer's reasoning cannot be written. {_REASONING}"
            )
        headings = {Role.SYSTEM: "", Role.USER: "### Instruction:\n", Role.TOOL: "### Tool:\n"}
        exchanges, prompt = list[PromptAndTarget](), ""
        for index, turn in enumerate(conversation.turns):
            if index in answered:
                exchanges.append((f"{prompt}### Response:\n", turn.content + self._eos))
                prompt = "\n\n"
            elif turn.role is Role.ASSISTANT:
                prompt += f"### Response:\n{turn.content}{self._eos}\n\n"
            else:
                prompt += f"{headings[turn.role]}{turn.content}\n\n"
        left_out = self._find_left_out(conversation, answered, [exchanges], None, where)
        return _Texts([exchanges], self._start, [_weights(conversation, answered)], left_out=left_out)

    def _chat_texts(self, conversation: Conversation, answered: Sequence[int], where: str) -> _Texts:
        """Return the text of a conversation by the chat template; several rows if the template is not prefix-stable."""
        chat = ChatRenderer(self._tokenizer, self._rules.chat_template, conversation, where)
        whole = chat.render_all()
        notes = set[EncodingNote]()
        exchanges = self._regular_exchanges(chat, whole, answered)
        if exchanges is not None:
            conversations, weights = [exchanges], [_weights(conversation, answered)]
        else:
            # If every token is a target, the row of the last answer includes the rows of all other answers.
            answered = answered[-1:] if self._rules.train_on_prompt else answered
            split = [self._last_exchange(chat, index, where) for index in answered]
            conversations = [[exchange] for exchange, _ in split]
            weights = [[weight] for weight in _weights(conversation, answered)]
            if len(answered) > 1:
                notes.add(EncodingNote.SPLIT_TURNS)
            if not all(is_prompt_whole for _, is_prompt_whole in split):
                notes.add(EncodingNote.OTHER_PROMPT)
        if not all(exchanges[-1][1].endswith(self._eos) for exchanges in conversations):
            notes.add(EncodingNote.OTHER_END)
        left_out = self._find_left_out(conversation, answered, conversations, chat, where)
        return _Texts(conversations, [], weights, frozenset(notes), left_out)

    def _find_left_out(
        self,
        conversation: Conversation,
        answered: Sequence[int],
        conversations: Sequence[Sequence[PromptAndTarget]],
        chat: ChatRenderer | None,
        where: str,
    ) -> LeftOut:
        """Return the parts that are missing in the rows. Raises DataError for missing calls or reasoning."""
        rows = ["".join(prompt + target for prompt, target in exchanges) for exchanges in conversations]
        ends = [target for exchanges in conversations for _, target in exchanges]
        targets = dict(zip(answered, ends, strict=True))
        left_out = self._left_out.find(conversation, rows, targets, chat=chat, tokenize=self._tokenize)
        for index, key in sorted(left_out.fields):
            turn, place = conversation.turns[index], f"{where}: the chat template leaves out the"
            if key.startswith("tool_calls["):
                raise DataError(
                    f"{place} tool calls of turn {index + 1} ({listed(tool_call_names(turn))}). Give one that writes "
                    "them with --chat_template, such as the built-in chatml"
                )
            if key in REASONING_FIELDS and index in targets:
                raise DataError(f"{place} reasoning of turn {index + 1}. {_REASONING}")
            if holds_call(turn.fields[key]):
                raise DataError(f"{place} key {quoted(key)} of turn {index + 1}, a call. Write it as `tool_calls`")
        return left_out

    def _regular_exchanges(
        self, chat: ChatRenderer, whole: str, answered: Sequence[int]
    ) -> list[PromptAndTarget] | None:
        """Split the text of the conversation into prompts and targets, if each turn only extends the previous text.

        Returns None if a rendering does not extend the previous one, or an inner answer lacks the end-of-sequence
        token.
        """
        exchanges, position = list[PromptAndTarget](), 0
        for index in answered:
            prompt = chat.render(index, add_generation_prompt=True)
            through = whole if index == answered[-1] else chat.render(index + 1)
            if not (through.startswith(prompt) and whole.startswith(through)) or len(prompt) < position:
                return None
            target = self._until_eos(through[len(prompt) :])
            if index != answered[-1] and not target.endswith(self._eos):
                return None
            exchanges.append((whole[position : len(prompt)], target))
            position = len(prompt) + len(target)
        return exchanges

    def _last_exchange(self, chat: ChatRenderer, index: int, where: str) -> tuple[PromptAndTarget, bool]:
        """Return turn `index` as target of all earlier turns, and whether the prompt is the prompt at inference."""
        prompt = chat.render(index, add_generation_prompt=True)
        through = chat.render(index + 1)
        if through.startswith(prompt):
            return (prompt, self._until_eos(through[len(prompt) :])), True
        # Rendering two answers with different first characters shows where the template puts the answer.
        probes = [chat.render(index, answer=letter) for letter in "xy"]
        prompt = "".join(x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*probes, strict=False)))
        if not through.startswith(prompt):
            raise DataError(
                f"{where}: the chat template renders the turns before an answer differently for different answers, so "
                "prompt and target cannot be told apart. Use another template (--chat_template), or give the data as "
                "`prompt` and `completion`"
            )
        return (prompt, self._until_eos(through[len(prompt) :])), False

    def _until_eos(self, text: str) -> str:
        """Return `text` without white space or repeated end-of-sequence tokens after its end-of-sequence token.

        A model that stops never generates them.
        """
        stripped = text.rstrip()
        while (shorter := stripped.removesuffix(self._eos).rstrip()) != stripped and shorter.endswith(self._eos):
            stripped = shorter
        return stripped if stripped.endswith(self._eos) else text

    def _encode_rows(self, texts: _Texts, sample: Sample, *, keeps_first: bool = False) -> EncodedSample:
        """Return the rows of a sample; with `keeps_first`, none whose first exchange is longer than a sequence."""
        rows = list[TokenizedSample]()
        is_truncated = is_without_room = False
        for exchanges, weights in zip(texts.rows, texts.weights, strict=True):
            whole = self._tokenize_exchanges(exchanges, texts.start)
            if keeps_first and sum(map(len, whole[0])) > self.seq_length:
                is_without_room = True
                continue
            fitted, is_cut = truncate_exchanges(whole, self.seq_length)
            row = _as_row(fitted, [weight * sample.weight for weight in weights], sample.weight, self._rules)
            if row.is_target[1:].any():
                rows.append(row)
                is_truncated |= is_cut
        return EncodedSample(
            tuple(rows),
            is_without_room=is_without_room and not rows,
            is_truncated=is_truncated,
            notes=_notes_of([texts]),
            left_out=texts.left_out,
        )

    def _encode_unit(self, unit: Unit, where: str) -> EncodedSample:
        """Return the sequences of a unit as one row; none if a prompt fills the space of its sequence."""
        reserved = self._num_virtual_tokens
        capacity = (self.seq_length + reserved) // len(unit.sequences) - reserved
        texts, sequences = list[_Texts](), list[_Sequence]()
        for number, sample in enumerate(unit.sequences):
            if isinstance(sample, TokenIds):
                sequences.append(self._given(sample, where))
                continue
            found = self._texts_of(sample, where)
            if isinstance(found, EncodedSample):
                raise DataError(f"{where}: answer {number + 1} of {len(unit.sequences)} has no text to train on")
            if len(found.rows) > 1:
                raise DataError(
                    f"{where}: an answer has several turns of the assistant, and the chat template renders earlier "
                    "turns differently. Use another template (--chat_template), or give all but the last turn as prompt"
                )
            texts.append(found)
            sequences.append(self._tokenize_whole(found, sample.weight))
        firsts = dict[tuple[int, ...], int]()
        for sequence in sequences:
            firsts[sequence.prompt] = min(sequence.first, firsts.get(sequence.prompt, sequence.first))
        notes, left_out = _notes_of(texts), combined([text.left_out for text in texts])
        if any(firsts[sequence.prompt] >= capacity for sequence in sequences):
            return EncodedSample((), is_without_room=True, notes=notes, left_out=left_out)
        parts = TokenizedDataset.of_samples([each.row(firsts[each.prompt], capacity) for each in sequences])
        values = {name: np.array(numbers, dtype=np.float32) for name, numbers in unit.values.items()}
        lengths = tuple(parts.lengths.tolist())
        return EncodedSample(
            (TokenizedSample(parts.input_ids, parts.is_target, lengths, parts.token_values, values),),
            is_truncated=any(len(sequence.whole) > capacity for sequence in sequences),
            notes=notes,
            left_out=left_out,
        )

    def _tokenize_whole(self, texts: _Texts, weight: float) -> "_Sequence":
        """Tokenize prompts and targets in one piece; a target begins where the ids of the text before it diverge."""
        (exchanges,), (weights,) = texts.rows, texts.weights
        ids = texts.start + self._tokenize_ends("".join(prompt + target for prompt, target in exchanges))[0]
        if ids[-1:] != [self._eos_id]:
            ids.append(self._eos_id)
        text, factors, prompt_ids = "", np.zeros(len(ids), dtype=np.float32), list[int]()
        is_target, first = np.zeros(len(ids), dtype=np.bool_), 0
        for number, (prompt, target) in enumerate(exchanges):
            before = texts.start + self._tokenize_ends(text + prompt)[0]
            text += prompt + target
            begin = _num_common(before, ids)
            is_last = number == len(exchanges) - 1
            end = len(ids) if is_last else _num_common(texts.start + self._tokenize_ends(text)[0], ids)
            is_target[begin:end], factors[begin:end] = True, weights[number] * weight
            if not number:
                prompt_ids, first = before, begin
        return _Sequence(np.array(ids, dtype=np.int32), is_target, factors, tuple(prompt_ids), first)

    def _given(self, sample: TokenIds, where: str) -> "_Sequence":
        """Return the tokens as they are given. Raises DataError for an id that the tokenizer does not have."""
        ids, size, first = sample.prompt + sample.completion, len(self._tokenizer), len(sample.prompt)
        if max(ids) >= size:
            raise DataError(
                f"{where}: the token id {max(ids)} is not one of the {size} tokens of the model's tokenizer. Leave "
                "such records out, or sample with the model that is trained"
            )
        values = {}
        if sample.logprobs:
            values[SAMPLER] = np.array((0.0,) * first + sample.logprobs, dtype=np.float32)
        is_target = np.arange(len(ids)) >= first
        factors = np.full(len(ids), sample.weight, dtype=np.float32)
        return _Sequence(np.array(ids, dtype=np.int32), is_target, factors, sample.prompt, first, values)

    def _tokenize_exchanges(self, exchanges: Sequence[PromptAndTarget], start: list[int]) -> list[PromptAndTargetIds]:
        """Return the token ids of each prompt and target; the last target ends with the end-of-sequence token.

        Exchanges beyond seq_length are omitted. If a token would cross the border between prompt and target, all
        prompts and targets are tokenized separately, as at inference.
        """
        text, before = "", list[int]()
        result: list[PromptAndTargetIds] = []
        for prompt, target in exchanges:
            through_prompt, is_whole = self._tokenize_ends(text + prompt)
            through_target, is_whole = self._tokenize_ends(text + prompt + target) if is_whole else ([], False)
            if not is_whole:
                result.append((self._tokenize_ends(prompt)[0], self._tokenize_ends(target)[0]))
                break
            if through_prompt[: len(before)] != before or through_target[: len(through_prompt)] != through_prompt:
                result = [
                    (self._tokenize_ends(prompt)[0], self._tokenize_ends(target)[0]) for prompt, target in exchanges
                ]
                break
            result.append((through_prompt[len(before) :], through_target[len(through_prompt) :]))
            text, before = text + prompt + target, through_target
            if len(before) > self.seq_length:
                break
        if result[-1][1][-1:] != [self._eos_id]:
            result[-1][1].append(self._eos_id)
        result[0][0][:0] = start
        return result

    def _tokenize_ends(self, text: str) -> tuple[list[int], bool]:
        """Return the token ids of `text`, and whether they are complete.

        The middle of a long text is not tokenized, because `truncate_exchanges` would remove it. Then the result has at
        least seq_length tokens from each end.
        """
        pieces = list(split_text(text))
        head, tail, first, last = list[int](), list[int](), 0, len(pieces)
        while first < last and len(head) < self.seq_length:
            head += self._tokenize(pieces[first])
            first += 1
        while first < last and len(tail) < self.seq_length:
            last -= 1
            tail[:0] = self._tokenize(pieces[last])
        return head + tail, first == last

    def _tokenize(self, piece: str) -> list[int]:
        # verbose=False: no warning about text beyond the model's context; `truncate_exchanges` shortens it.
        ids: list[int] = self._tokenizer(piece, add_special_tokens=False, verbose=False).input_ids
        return ids


def split_text(text: str) -> Iterator[str]:
    """Split text into pieces for which a tokenizer needs little memory; only very long text has several pieces.

    A piece ends at the end of a line, or else before a space, or else anywhere. A token across two pieces becomes two
    tokens, and a tokenizer that prepends a space prepends it to each piece. This changes a few tokens in a million
    characters. Raises _EndlessWordError after several consecutive pieces without an end of a line or word.
    """
    start, num_unbroken = 0, 0
    while len(text) - start > 2 * _PIECE_CHARACTERS:
        first, last = start + _PIECE_CHARACTERS, start + 2 * _PIECE_CHARACTERS
        found = (end_of_word.search(text, first, last) for end_of_word in _BREAKS)
        end_of_word = next(filter(None, found), None)
        num_unbroken = 0 if end_of_word else num_unbroken + 1
        if num_unbroken == _MOST_UNBROKEN:
            raise _EndlessWordError
        end = end_of_word.end() if end_of_word else last
        yield text[start:end]
        start = end
    yield text[start:]


def truncate_exchanges(
    exchanges: Sequence[PromptAndTargetIds], seq_length: int
) -> tuple[list[PromptAndTargetIds], bool]:
    """Return the leading exchanges that fit into seq_length, and whether tokens were removed.

    If the first exchange does not fit, prompt and target share the length. The prompt loses its middle: its start has
    the instruction, and its end has the words that ask for the answer. A target loses its end-of-sequence token.
    """
    length = 0
    for index, (prompt, target) in enumerate(exchanges):
        length += len(prompt) + len(target)
        if length <= seq_length:
            continue
        if index > 0:
            return list(exchanges[:index]), True
        num_prompt, num_target = split_token_budget(len(prompt), len(target), seq_length)
        num_end = num_prompt // 4
        shortened = prompt[: num_prompt - num_end] + prompt[len(prompt) - num_end :]
        return [(shortened, target[:num_target])], True
    return list(exchanges), False


def split_token_budget(num_prompt: int, num_target: int, seq_length: int) -> tuple[int, int]:
    """Return the numbers of prompt and target tokens to keep if prompt and target together exceed seq_length.

    If one of them has at most half of seq_length, all its tokens are kept, and the other gets the rest. If both are
    longer, each gets half.
    """
    num_target = min(num_target, max(seq_length - seq_length // 2, seq_length - num_prompt))
    return seq_length - num_target, num_target


def split_document(row: TokenizedSample, seq_length: int) -> list[TokenizedSample]:
    """Return consecutive pieces of at most seq_length tokens; a final piece of one token is dropped."""
    pieces = (slice(first, first + seq_length) for first in range(0, len(row), seq_length))
    return [row.piece(piece) for piece in pieces if len(row.input_ids[piece]) > 1]


def _as_row(
    exchanges: Sequence[PromptAndTargetIds], weights: Sequence[float], prompt_weight: float, rules: EncodingRules
) -> TokenizedSample:
    """Return the row of prompts and targets. `prompt_weight` is the factor of prompts that are trained on."""
    ids = [token for prompt, target in exchanges for token in prompt + target]
    mask, factors = list[bool](), list[float]()
    for (prompt, target), weight in zip(exchanges, weights, strict=False):
        mask += [rules.train_on_prompt] * len(prompt) + [True] * len(target)
        factors += [prompt_weight if rules.train_on_prompt else 1.0] * len(prompt) + [weight] * len(target)
    if rules.train_on_prompt:
        mask[:1] = [False]
    row = TokenizedSample.plain(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_))
    return _with_weights(row, np.array(factors, dtype=np.float32))


def _with_weights(row: TokenizedSample, factors: float | npt.NDArray[np.float32]) -> TokenizedSample:
    """Return the row with the factors of its loss, if they are not all 0 or 1; tokens of factor 0 are no targets."""
    factors = np.broadcast_to(np.float32(factors), row.input_ids.shape)
    is_target = row.is_target & (factors > 0)
    is_plain = bool((factors[is_target] == 1).all())
    return replace(row, is_target=is_target, token_values={} if is_plain else {WEIGHT: np.array(factors)})


@dataclass(frozen=True, slots=True, eq=False)
class _Sequence:
    """Tokens of one sequence of a unit, before it is cut; `first` is where its completion begins."""

    whole: npt.NDArray[np.int32]
    is_target: npt.NDArray[np.bool_]
    factors: npt.NDArray[np.float32]
    prompt: tuple[int, ...]
    first: int
    values: Values = field(default_factory=dict)
    """Further values of tokens."""

    def row(self, first: int, capacity: int) -> TokenizedSample:
        """Return at most `capacity` tokens; the completion begins at `first`, at or before its own beginning."""
        is_target, factors = self.is_target.copy(), self.factors.copy()
        is_target[first : self.first], factors[first : self.first] = True, factors[self.first]
        row = TokenizedSample.plain(self.whole[:capacity], is_target[:capacity])
        row = _with_weights(row, np.where(is_target, factors, 1)[:capacity])
        values = {name: each[:capacity] for name, each in self.values.items()}
        return replace(row, token_values={**row.token_values, **values}) if values else row


def _weights(conversation: Conversation, answered: Sequence[int]) -> list[float]:
    return [conversation.turns[index].weight for index in answered]


def _notes_of(texts: Sequence[_Texts]) -> frozenset[EncodingNote]:
    no_tools = {EncodingNote.NO_TOOLS} if any(each.left_out.is_without_tools for each in texts) else set()
    return frozenset().union(*(each.notes for each in texts), no_tools)


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of leading tokens that are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
