import itertools
import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.forked import Ranks
from harness.runs import environment
from harness.samples import row_of
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from mobius.data import tokenization
from mobius.data.messages import Completion, Conversation, Document, Role, Sample, Turn
from mobius.data.token_store import TokenizedSample
from mobius.data.tokenization import (
    EncodedSample,
    EncodingNote,
    EncodingRules,
    SampleEncoder,
    split_document,
    split_text,
    split_token_budget,
    truncate_exchanges,
)
from mobius.errors import DataError

EOS = "<|im_end|>"

TWO_EXCHANGES = Conversation(
    (
        Turn(Role.SYSTEM, "Be brief."),
        Turn(Role.USER, "Name a colour."),
        Turn(Role.ASSISTANT, "Red."),
        Turn(Role.USER, "Another one?"),
        Turn(Role.ASSISTANT, "Blue."),
    )
)
ONE_EXCHANGE = Conversation(TWO_EXCHANGES.turns[:3])


def encode(
    tokenizer: PreTrainedTokenizerBase, sample: Sample, seq_length: int = 256, rules: EncodingRules | None = None
) -> EncodedSample:
    return SampleEncoder(tokenizer, seq_length=seq_length, rules=rules).encode(sample, "train.jsonl, line 5")


def marked(tokenizer: PreTrainedTokenizerBase, encoded: EncodedSample) -> list[str]:
    """The text of each row, with brackets 【】 around the targets."""
    return [
        "".join(f"【{text}】" if kind == "target" else text for kind, text in parts(tokenizer, row))
        for row in encoded.rows
    ]


def parts(tokenizer: PreTrainedTokenizerBase, row: TokenizedSample) -> list[tuple[str, str]]:
    """The row's runs as ("prompt" or "target", text)."""
    ids, is_target = row_of(row)
    borders = [0, *(np.flatnonzero(np.diff(is_target.astype(int))) + 1).tolist(), len(ids)]
    return [
        ("target" if is_target[start] else "prompt", tokenizer.decode(ids[start:end].tolist()))
        for start, end in pairwise(borders)
    ]


def test_the_row_begins_with_the_tokens_inference_would_send(tokenizer: PreTrainedTokenizerBase) -> None:
    (row,) = encode(tokenizer, ONE_EXCHANGE).rows
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True).input_ids
    assert row.input_ids[: len(prompt)].tolist() == prompt
    assert row.is_target.tolist() == [False] * len(prompt) + [True] * (len(row.input_ids) - len(prompt))


def test_a_beginning_token_is_added_where_the_tokenizer_adds_it(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A <|im_end|>", special_tokens=[("<|begin|>", 1), ("<|im_end|>", 2)]
    )
    (row,) = encode(tokenizer, Completion("a", " b")).rows
    assert parts(tokenizer, row) == [("prompt", "<|begin|>a"), ("target", " b<|im_end|>")]
    (document,) = encode(tokenizer, Document("words")).rows
    assert parts(tokenizer, document) == [("target", "<|begin|>words<|im_end|>")]
    (chat,) = encode(tokenizer, ONE_EXCHANGE).rows
    assert chat.input_ids.tolist().count(1) == 1, "the chat template writes it already"


def test_the_mask_does_not_depend_on_token_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    """Padding with eos is common, and prompts may contain eos: both must not move the mask."""
    expected = encode(tokenizer, TWO_EXCHANGES).rows[0]
    tokenizer.pad_token = EOS
    row = encode(tokenizer, TWO_EXCHANGES).rows[0]
    assert row.input_ids.tolist() == expected.input_ids.tolist()
    assert row.is_target.tolist() == expected.is_target.tolist()


@pytest.mark.parametrize(
    "sample",
    [
        Completion("a question", "  "),
        Conversation((Turn(Role.USER, "a"),)),
        Conversation((Turn(Role.USER, "a"), Turn(Role.ASSISTANT, ""))),
        Conversation((Turn(Role.SYSTEM, "s"), Turn(Role.ASSISTANT, "nobody asked"))),
    ],
)
def test_a_sample_without_an_answer_has_no_row_but_is_not_empty(
    tokenizer: PreTrainedTokenizerBase, sample: Sample
) -> None:
    assert encode(tokenizer, sample) == EncodedSample((), is_unanswered=True)


@pytest.mark.parametrize(
    "sample", [Completion("", " "), Conversation((Turn(Role.USER, ""),)), Document("\n"), Conversation(())]
)
def test_a_sample_without_text_is_empty(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> None:
    assert encode(tokenizer, sample) == EncodedSample((), is_empty=True)


def test_an_encoder_can_be_sent_to_a_worker(tokenizer: PreTrainedTokenizerBase) -> None:
    encoder = SampleEncoder(tokenizer, seq_length=64)
    copy = pickle.loads(pickle.dumps(encoder))
    assert (
        copy.encode(TWO_EXCHANGES, "").rows[0].input_ids.tolist()
        == encoder.encode(TWO_EXCHANGES, "").rows[0].input_ids.tolist()
    )


@pytest.mark.parametrize(
    ("num_prompt", "num_target", "kept"),
    [
        (100, 4, (6, 4)),  # a short target stays whole
        (100, 5, (5, 5)),
        (100, 6, (5, 5)),  # both too long: half each
        (100, 100, (5, 5)),
        (5, 100, (5, 5)),
        (2, 100, (2, 8)),  # a short prompt stays whole
        (0, 11, (0, 10)),
    ],
)
def test_prompt_and_target_share_a_length_of_ten(num_prompt: int, num_target: int, kept: tuple[int, int]) -> None:
    assert split_token_budget(num_prompt, num_target, 10) == kept
    assert split_token_budget(50, 50, 11) == (5, 6), "an odd length is used up"


@pytest.mark.parametrize(
    ("exchanges", "seq_length", "expected"),
    [
        ([(list(range(100)), [900, 901])], 10, [([0, 1, 2, 3, 4, 5, 98, 99], [900, 901])]),
        ([([1, 2, 3, 4], [9, 9, 9])], 6, [([1, 2, 3], [9, 9, 9])]),
        ([([1, 2], [3]), ([4], [5, 6])], 5, [([1, 2], [3])]),
        ([([1, 2], [3]), ([4], [5, 6])], 6, [([1, 2], [3]), ([4], [5, 6])]),
    ],
    ids=["head and end of a prompt", "head of a short prompt", "whole exchanges", "what fits exactly"],
)
def test_exchanges_are_cut_to_the_sequence_length(
    exchanges: list[tuple[list[int], list[int]]], seq_length: int, expected: list[tuple[list[int], list[int]]]
) -> None:
    assert truncate_exchanges(exchanges, seq_length) == (expected, expected != exchanges)


def test_a_cut_sample_has_exactly_the_sequence_length_and_its_whole_short_answer(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    question = Turn(Role.USER, "Why is it so? " * 100)
    encoded = encode(tokenizer, Conversation((question, Turn(Role.ASSISTANT, "Nobody knows."))), seq_length=40)
    (row,) = encoded.rows
    assert encoded.is_truncated
    assert len(row.input_ids) == 40
    (_, prompt), target = parts(tokenizer, row)
    assert prompt.startswith("<|begin|><|im_start|>user\nWhy is it so?")
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert target == ("target", "Nobody knows.<|im_end|>")


class CountingTokenizer:
    """Passes everything on to a tokenizer and counts the characters it is given."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self.num_characters = tokenizer, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: object) -> object:
        self.num_characters += len(text)
        return self._tokenizer(text, **options)


def test_exchanges_behind_the_cut_are_not_tokenized(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = None
    short, long = (Conversation(ONE_EXCHANGE.turns[1:] * number) for number in (8, 500))
    counting: Any = CountingTokenizer(tokenizer)
    (row,) = encode(counting, long, seq_length=100).rows
    assert counting.num_characters < 10_000
    expected = encode(tokenizer, short, seq_length=100)
    assert row.input_ids.tolist() == expected.rows[0].input_ids.tolist()
    assert expected.is_truncated


LONG = " ".join(f"word{number}" for number in range(2000))


@pytest.mark.parametrize(
    "sample",
    [
        Completion(f"First {LONG} last:", " An answer."),
        Completion("A question:", f" {LONG}"),
        Completion(f"First {LONG} last:", f" {LONG}"),
        Conversation((Turn(Role.USER, LONG), Turn(Role.ASSISTANT, "Yes."))),
        Conversation((*ONE_EXCHANGE.turns, Turn(Role.USER, LONG), Turn(Role.ASSISTANT, LONG))),
    ],
    ids=["prompt", "answer", "both", "conversation", "second exchange"],
)
def test_the_middle_of_a_long_text_that_is_cut_is_not_tokenized(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, sample: Sample
) -> None:
    (whole,) = encode(tokenizer, sample, 64).rows
    monkeypatch.setattr(tokenization, "_PIECE_CHARACTERS", 250)
    counting: Any = CountingTokenizer(tokenizer)
    encoded = encode(counting, sample, 64)
    ids, is_target = row_of(*encoded.rows)
    assert encoded.is_truncated
    assert (ids.tolist(), is_target.tolist()) == (whole.input_ids.tolist(), whole.is_target.tolist())
    assert counting.num_characters < len(LONG) // 2


@pytest.mark.parametrize("word", ["x", "\n", " ", "ab1", "字"])
def test_a_word_without_an_end_is_refused_at_once(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setattr(tokenization, "_PIECE_CHARACTERS", 100)
    counting: Any = CountingTokenizer(tokenizer)
    text = "Look: " + word * 2000 + "!"
    turns = (Turn(Role.USER, text), Turn(Role.ASSISTANT, "Yes."))
    for sample in (Document(text), Completion(text, "Yes."), Completion("Say:", text), Conversation(turns)):
        with pytest.raises(DataError, match=r"line 5: 800 characters in a row without the end of a word"):
            encode(counting, sample)
    assert counting.num_characters < 100
    encode(tokenizer, Document("Look: " + word * (600 // len(word))))


def test_a_cut_target_does_not_pretend_to_end(tokenizer: PreTrainedTokenizerBase) -> None:
    (row,) = encode(tokenizer, Completion("Count:", " one" * 50), seq_length=20).rows
    assert row.input_ids[-1] != tokenizer.eos_token_id
    assert row.is_target.sum() == 20 - len(tokenizer("Count:").input_ids)


def documents(*lengths: int) -> list[TokenizedSample]:
    return [TokenizedSample.plain(np.arange(n, dtype=np.int32), np.ones(n, dtype=np.bool_)) for n in lengths]


@pytest.mark.parametrize(("num_tokens", "lengths"), [(3, [3]), (4, [4]), (5, [4]), (6, [4, 2]), (9, [4, 4]), (1, [])])
def test_a_long_document_is_cut_into_pieces_of_which_nothing_is_lost_but_a_single_last_token(
    num_tokens: int, lengths: list[int]
) -> None:
    (row,) = documents(num_tokens)
    pieces = split_document(row, 4)
    assert [len(piece) for piece in pieces] == lengths
    assert [token for piece in pieces for token in piece.input_ids.tolist()] == list(range(sum(lengths)))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a word " * 2 + "end", ["a word a word end"]),  # 17 characters: at most twice ten
        ("some words\nin the lines\n\nand more words", ["some words\n", "in the lines\n\n", "and more words"]),
        ("one two three four five six seven", ["one two three", " four five six seven"]),
        ("x" * 45, ["x" * 20, "x" * 20, "x" * 5]),
        ("x" * 12 + "  y  " * 2 + "z" * 8, ["x" * 12 + "  y    y", "  " + "z" * 8]),
    ],
)
def test_a_very_long_text_is_tokenized_in_pieces_that_end_with_a_line_or_before_a_space(
    text: str, pieces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenization, "_PIECE_CHARACTERS", 10)
    assert list(split_text(text)) == pieces


def test_the_tokens_of_a_text_in_pieces_are_those_of_the_whole(
    tokenizer: PreTrainedTokenizerBase, assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (assets / "docstrings" / "train.jsonl").read_text(encoding="utf-8").replace("\\n", "\n")[:100_000]
    samples = [Document(text), Completion("Summary of\n" + text, "A text.")]
    whole = [encode(tokenizer, sample, 100_000).rows[0] for sample in samples]
    monkeypatch.setattr(tokenization, "_PIECE_CHARACTERS", 1000)
    assert len(list(split_text(text))) > 50
    for sample, (ids, is_target) in zip(samples, map(row_of, whole), strict=True):
        (row,) = encode(tokenizer, sample, 100_000).rows
        assert row.input_ids.tolist() == ids.tolist()
        assert row.is_target.tolist() == is_target.tolist()


def test_a_document_of_megabytes_takes_little_memory(assets: Path, tmp_path: Path) -> None:
    """In a process of its own, as only the operating system knows what the tokenizer takes: 160 bytes for each byte."""
    given = [str(assets / "tiny-llama"), 4 * 2**20]
    run = Ranks(
        "harness.tokenizing_worker", "tell_peak", given, num_ranks=1, folder=tmp_path, environment=environment(tmp_path)
    )
    assert run.wait() == 0, run.output()
    assert int(run.output()) < 350 * 1024


OWN = "the tokenizer's"
SPLIT, END, PROMPT = EncodingNote.SPLIT_TURNS, EncodingNote.OTHER_END, EncodingNote.OTHER_PROMPT
ANSWER = "<|im_start|>assistant\n"
SYSTEM, FIRST = f"<|im_start|>system\nBe brief.{EOS}\n", f"<|im_start|>user\nName a colour.{EOS}\n{ANSWER}"
SECOND = f"\n<|im_start|>user\nAnother one?{EOS}\n{ANSWER}"
COMPLETION = Completion("The sky is", " blue.")
HEADINGS = "\n\n### Instruction:\nName a colour.\n\n### Response:\n"
GENERATION = "{{ '<assistant>' if add_generation_prompt }}"
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}" + GENERATION
OTHER_TURNS = PLAIN.replace("<|im_end|>", "</turn>\n")
# Writes the last answer otherwise than those before it, as templates of thinking models do.
REWRITING = PLAIN.replace("{{ m.content", "{{ '<think></think>' if loop.last and m.role == 'assistant' }}{{ m.content")
CONTENT_PARTS = PLAIN.replace(
    "{{ m.content }}", "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
)
REASONING = PLAIN.replace("{{ m.content", "{{ m.reasoning_content | default('') }}{{ m.content")
CALLING = PLAIN.replace(
    "<|im_end|>",
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>",
)
BRIEF, COLOUR = f"<system>Be brief.{EOS}", f"<user>Name a colour.{EOS}<assistant>"
OTHER = f"<user>Another one?{EOS}<assistant>"
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
SCHEMA = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def untrained(*numbers: int) -> Conversation:
    turns = (replace(turn, weight=float(index not in numbers)) for index, turn in enumerate(TWO_EXCHANGES.turns))
    return Conversation(tuple(turns))


def called(arguments: object = CALL["function"]["arguments"]) -> Conversation:  # type: ignore[index]
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return Conversation(
        (
            Turn(Role.USER, "Weather in Oslo?"),
            Turn(Role.ASSISTANT, "", {"tool_calls": [call]}),
            Turn(Role.TOOL, "rain", {"name": "weather"}),
            Turn(Role.ASSISTANT, "It rains."),
        ),
        (SCHEMA,),
    )


def thinking(thought: str) -> Conversation:
    return Conversation((Turn(Role.USER, "2 + 2"), Turn(Role.ASSISTANT, "4", {"reasoning_content": thought})))


def called_text(written: str) -> str:
    return (
        f"<user>Weather in Oslo?{EOS}<assistant>【weather{written}{EOS}】<tool>rain{EOS}<assistant>【It rains.{EOS}】"
    )


CALLED, PAIRS = (
    called_text('{"city": "Oslo"}'),
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}",
)
ROWS: dict[str, tuple[Sample, str | None, dict[str, Any], list[str], set[EncodingNote]]] = {
    "every answer": (
        TWO_EXCHANGES, OWN, {}, [f"<|begin|>{SYSTEM}{FIRST}【Red.{EOS}】{SECOND}【Blue.{EOS}】"], set()
    ),
    "no template": (
        TWO_EXCHANGES, None, {},
        [f"Be brief.{HEADINGS}【Red.{EOS}】{HEADINGS.replace('Name a colour.', 'Another one?')}【Blue.{EOS}】"], set(),
    ),
    "a completion": (COMPLETION, OWN, {}, [f"The sky is【 blue.{EOS}】"], set()),
    "a word that is one token": (Completion("ret", "urn"), OWN, {}, [f"ret【urn{EOS}】"], set()),
    "a document": (Document("one two three"), OWN, {}, [f"【one two three{EOS}】"], set()),
    "a question at the end": (
        replace(ONE_EXCHANGE, turns=(*ONE_EXCHANGE.turns, Turn(Role.USER, "And?"))), OWN, {},
        [f"<|begin|>{SYSTEM}{FIRST}【Red.{EOS}】"], {EncodingNote.UNUSED_END},
    ),
    "another end": (
        ONE_EXCHANGE, OTHER_TURNS, {},
        [f"<system>Be brief.</turn>\n<user>Name a colour.</turn>\n<assistant>【Red.</turn>\n{EOS}】"], {END},
    ),
    "another end of two": (
        TWO_EXCHANGES, OTHER_TURNS, {},
        [
            f"<system>Be brief.</turn>\n<user>Name a colour.</turn>\n<assistant>【Red.</turn>\n{EOS}】",
            "<system>Be brief.</turn>\n<user>Name a colour.</turn>\n<assistant>Red.</turn>\n"
            f"<user>Another one?</turn>\n<assistant>【Blue.</turn>\n{EOS}】",
        ],
        {SPLIT, END},
    ),
    "rewritten turns": (
        TWO_EXCHANGES, REWRITING, {},
        [
            f"{BRIEF}{COLOUR}【<think></think>Red.{EOS}】",
            f"{BRIEF}{COLOUR}Red.{EOS}{OTHER}【<think></think>Blue.{EOS}】",
        ],
        {SPLIT},
    ),
    "another prompt": (
        ONE_EXCHANGE, PLAIN.replace("<assistant>", "<assistant><think>\n"), {},
        [f"{BRIEF}{COLOUR}【Red.{EOS}】"], {PROMPT},
    ),
    "masked history": (
        TWO_EXCHANGES, OWN, {"mask_history": True}, [f"<|begin|>{SYSTEM}{FIRST}Red.{EOS}{SECOND}【Blue.{EOS}】"], set()
    ),
    "masked, rewritten": (
        TWO_EXCHANGES, REWRITING, {"mask_history": True},
        [f"{BRIEF}{COLOUR}Red.{EOS}{OTHER}【<think></think>Blue.{EOS}】"], set(),
    ),
    "masked, no template": (
        TWO_EXCHANGES, None, {"mask_history": True},
        [f"Be brief.{HEADINGS}Red.{EOS}{HEADINGS.replace('Name a colour.', 'Another one?')}【Blue.{EOS}】"], set(),
    ),
    "prompts, too": (
        TWO_EXCHANGES, OWN, {"train_on_prompt": True},
        [f"<|begin|>【{SYSTEM}{FIRST}Red.{EOS}{SECOND}Blue.{EOS}】"], set(),
    ),
    "prompts, too, rewritten": (
        TWO_EXCHANGES, REWRITING, {"train_on_prompt": True},
        [f"<【{BRIEF[1:]}{COLOUR}Red.{EOS}{OTHER}<think></think>Blue.{EOS}】"], set(),
    ),
    "prompts of completions, too": (
        COMPLETION, OWN, {"train_on_prompt": True}, [f"The【 sky is blue.{EOS}】"], set()
    ),
    "all turns": (
        TWO_EXCHANGES, OWN, {"train_on_all_turns": True},
        [f"<|begin|>【{SYSTEM}{FIRST}Red.{EOS}{SECOND}Blue.{EOS}】"], set(),
    ),
    "all turns, asked": (
        replace(ONE_EXCHANGE, num_prompt_turns=2), OWN, {"train_on_all_turns": True},
        [f"<|begin|>{SYSTEM}{FIRST}【Red.{EOS}】"], set(),
    ),
    "all turns of a completion": (COMPLETION, OWN, {"train_on_all_turns": True}, [f"The sky is【 blue.{EOS}】"], set()),
    "default system": (
        Conversation(ONE_EXCHANGE.turns[1:]), OWN, {"default_system": "Be kind."},
        [f"<|begin|>{SYSTEM.replace('brief', 'kind')}{FIRST}【Red.{EOS}】"], set(),
    ),
    "default system, its own": (
        ONE_EXCHANGE, OWN, {"default_system": "Be kind."}, [f"<|begin|>{SYSTEM}{FIRST}【Red.{EOS}】"], set()
    ),
    "default system of a completion": (
        COMPLETION, OWN, {"default_system": "Be kind."}, [f"The sky is【 blue.{EOS}】"], set()
    ),
    "default system, no template": (
        Conversation(ONE_EXCHANGE.turns[1:]), None, {"default_system": "Be kind."},
        [f"Be kind.{HEADINGS}【Red.{EOS}】"], set(),
    ),
    "answers of a prompt": (
        Conversation(TWO_EXCHANGES.turns[1:], num_prompt_turns=3), OWN, {},
        [f"<|begin|>{FIRST}Red.{EOS}{SECOND}【Blue.{EOS}】"], set(),
    ),
    "answers of a prompt and default system": (
        Conversation(TWO_EXCHANGES.turns[1:], num_prompt_turns=2), OWN, {"default_system": "Be brief."},
        [f"<|begin|>{SYSTEM}{FIRST}Red.{EOS}{SECOND}【Blue.{EOS}】"], set(),
    ),
    "a given template": (ONE_EXCHANGE, OWN, {"chat_template": PLAIN}, [f"{BRIEF}{COLOUR}【Red.{EOS}】"], set()),
    "a given template alone": (ONE_EXCHANGE, None, {"chat_template": PLAIN}, [f"{BRIEF}{COLOUR}【Red.{EOS}】"], set()),
    "content parts": (ONE_EXCHANGE, CONTENT_PARTS, {}, [f"{BRIEF}{COLOUR}【Red.{EOS}】"], set()),
    "content parts, another prompt": (
        ONE_EXCHANGE, CONTENT_PARTS.replace("<assistant>", "<assistant><think>"), {},
        [f"{BRIEF}{COLOUR}【Red.{EOS}】"], {PROMPT},
    ),
    "calls": (called(), CALLING, {}, [CALLED], {EncodingNote.NO_TOOLS}),
    "calls as text, quoted by a template": (called('{"city": "Oslo"}'), CALLING, {}, [CALLED], {EncodingNote.NO_TOOLS}),
    "calls as text": (
        called('{"city":  "Oslo"}'), CALLING.replace(" | tojson", ""), {}, [called_text('{"city":  "Oslo"}')],
        {EncodingNote.NO_TOOLS},
    ),
    **{
        f"calls {number}": (
            called(arguments), CALLING.replace("{{ c.function.arguments | tojson }}", written), {},
            [called_text("city=Oslo")], {EncodingNote.NO_TOOLS},
        )
        for number, (arguments, written) in enumerate(
            itertools.product(
                ({"city": "Oslo"}, '{"city": "Oslo"}'), (PAIRS, "{{ 'city=' + c.function.arguments[10:14] }}")
            )
        )
    },
    "tools without a place": (
        replace(ONE_EXCHANGE, tools=(SCHEMA,)), PLAIN, {}, [f"{BRIEF}{COLOUR}【Red.{EOS}】"], {EncodingNote.NO_TOOLS}
    ),
    "reasoning": (thinking("(2 + 2)"), REASONING, {}, [f"<user>2 + 2{EOS}<assistant>【(2 + 2)4{EOS}】"], set()),
    "reasoning with other spaces": (
        thinking("2 + 2\n is 4"), REASONING.replace("('')", "('') | replace('\n', '\n  ')"), {},
        [f"<user>2 + 2{EOS}<assistant>【2 + 2\n   is 44{EOS}】"], set(),
    ),
    "an answer that is context": (
        untrained(2), OWN, {}, [f"<|begin|>{SYSTEM}{FIRST}Red.{EOS}{SECOND}【Blue.{EOS}】"], set()
    ),
    "an answer that is context, no template": (
        untrained(2), None, {},
        [f"Be brief.{HEADINGS}Red.{EOS}{HEADINGS.replace('Name a colour.', 'Another one?')}【Blue.{EOS}】"], set(),
    ),
    "a last answer that is context": (
        untrained(4), OWN, {}, [f"<|begin|>{SYSTEM}{FIRST}【Red.{EOS}】"], {EncodingNote.UNUSED_END}
    ),
    "a rewritten answer that is context": (
        untrained(2), REWRITING, {}, [f"{BRIEF}{COLOUR}Red.{EOS}{OTHER}【<think></think>Blue.{EOS}】"], set()
    ),
    "only context": (untrained(2, 4), OWN, {}, [], set()),
    "only context, masked": (untrained(4), OWN, {"mask_history": True}, [], set()),
}  # fmt: skip


@pytest.mark.parametrize(("sample", "template", "rules", "rows", "notes"), ROWS.values(), ids=list(ROWS))
def test_rows_hold_the_targets_of_a_sample(
    tokenizer: PreTrainedTokenizerBase,
    sample: Sample,
    template: str | None,
    rules: dict[str, Any],
    rows: list[str],
    notes: set[EncodingNote],
) -> None:
    """Targets are in brackets 【】."""
    if template != OWN:
        tokenizer.chat_template = template
    encoded = encode(tokenizer, sample, rules=EncodingRules(**rules))
    assert marked(tokenizer, encoded) == rows
    assert encoded.notes == notes
    assert not any((encoded.is_truncated, encoded.is_empty, encoded.is_unanswered))


def test_training_on_prompts_changes_the_mask_and_not_the_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    for seq_length in (256, 30, 12):
        plain = encode(tokenizer, TWO_EXCHANGES, seq_length)
        every = encode(tokenizer, TWO_EXCHANGES, seq_length, EncodingRules(train_on_prompt=True))
        assert [row.input_ids.tolist() for row in every.rows] == [row.input_ids.tolist() for row in plain.rows]
        assert every.is_truncated == plain.is_truncated


def test_rules_that_contradict_each_other_cannot_be_made() -> None:
    for other in ("train_on_all_turns", "train_on_prompt"):
        with pytest.raises(AssertionError):
            EncodingRules(mask_history=True, **{other: True})  # type: ignore[arg-type]
