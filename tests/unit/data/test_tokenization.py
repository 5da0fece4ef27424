import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.forked import Ranks
from harness.runs import environment
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from mobius.data import tokenization
from mobius.data.chat_templates import BUILTIN_TEMPLATES
from mobius.data.formats import Completion, Conversation, Document, Role, Sample, Turn
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
    ids, is_target = row
    borders = [0, *(np.flatnonzero(np.diff(is_target.astype(int))) + 1).tolist(), len(ids)]
    return [
        ("target" if is_target[start] else "prompt", tokenizer.decode(ids[start:end].tolist()))
        for start, end in pairwise(borders)
    ]


def test_every_assistant_turn_is_a_target_that_ends_with_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    encoded = encode(tokenizer, TWO_EXCHANGES)
    (row,) = encoded.rows
    assert parts(tokenizer, row) == [
        (
            "prompt",
            "<|begin|><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nName a colour.<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        ("target", "Red.<|im_end|>"),
        ("prompt", "\n<|im_start|>user\nAnother one?<|im_end|>\n<|im_start|>assistant\n"),
        ("target", "Blue.<|im_end|>"),
    ]
    assert not encoded.is_truncated
    assert not encoded.notes


def test_the_row_begins_with_the_tokens_inference_would_send(tokenizer: PreTrainedTokenizerBase) -> None:
    (row,) = encode(tokenizer, ONE_EXCHANGE).rows
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True).input_ids
    assert row[0][: len(prompt)].tolist() == prompt
    assert row[1].tolist() == [False] * len(prompt) + [True] * (len(row[0]) - len(prompt))


def test_without_a_template_the_text_has_plain_headings(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = None
    (row,) = encode(tokenizer, TWO_EXCHANGES).rows
    assert parts(tokenizer, row) == [
        ("prompt", "Be brief.\n\n### Instruction:\nName a colour.\n\n### Response:\n"),
        ("target", "Red.<|im_end|>"),
        ("prompt", "\n\n### Instruction:\nAnother one?\n\n### Response:\n"),
        ("target", "Blue.<|im_end|>"),
    ]


def test_a_completion_follows_its_prompt_directly(tokenizer: PreTrainedTokenizerBase) -> None:
    (row,) = encode(tokenizer, Completion("The sky is", " blue.")).rows
    assert parts(tokenizer, row) == [("prompt", "The sky is"), ("target", " blue.<|im_end|>")]


def test_a_word_that_spans_prompt_and_completion_is_not_one_token(tokenizer: PreTrainedTokenizerBase) -> None:
    whole = tokenizer("return", add_special_tokens=False).input_ids
    assert len(whole) == 1, "the test needs a word that is one token"
    (row,) = encode(tokenizer, Completion("ret", "urn")).rows
    assert parts(tokenizer, row) == [("prompt", "ret"), ("target", "urn<|im_end|>")]


def test_a_beginning_token_is_added_where_the_tokenizer_adds_it(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A <|im_end|>", special_tokens=[("<|begin|>", 1), ("<|im_end|>", 2)]
    )
    (row,) = encode(tokenizer, Completion("a", " b")).rows
    assert parts(tokenizer, row) == [("prompt", "<|begin|>a"), ("target", " b<|im_end|>")]
    (document,) = encode(tokenizer, Document("words")).rows
    assert parts(tokenizer, document) == [("target", "<|begin|>words<|im_end|>")]
    (chat,) = encode(tokenizer, ONE_EXCHANGE).rows
    assert chat[0].tolist().count(1) == 1, "the chat template writes it already"


def test_the_mask_does_not_depend_on_token_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    """Padding with eos is common, and prompts may contain eos: both must not move the mask."""
    expected = encode(tokenizer, TWO_EXCHANGES).rows[0]
    tokenizer.pad_token = EOS
    row = encode(tokenizer, TWO_EXCHANGES).rows[0]
    assert row[0].tolist() == expected[0].tolist()
    assert row[1].tolist() == expected[1].tolist()


def test_a_template_that_does_not_end_turns_with_eos_gets_it_at_the_end_of_each_target(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    encoded = encode(tokenizer, TWO_EXCHANGES)
    start = "<system>Be brief.</turn>\n<user>Name a colour.</turn>\n<assistant>"
    assert [parts(tokenizer, row) for row in encoded.rows] == [
        [("prompt", start), ("target", "Red.</turn>\n<|im_end|>")],
        [
            ("prompt", start + "Red.</turn>\n<user>Another one?</turn>\n<assistant>"),
            ("target", "Blue.</turn>\n<|im_end|>"),
        ],
    ]
    assert encoded.notes == {EncodingNote.SPLIT_TURNS, EncodingNote.OTHER_END}
    assert encode(tokenizer, ONE_EXCHANGE).notes == {EncodingNote.OTHER_END}


def test_a_template_that_rewrites_earlier_turns_gives_one_row_per_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = REWRITING
    encoded = encode(tokenizer, TWO_EXCHANGES)
    start = "[system]Be brief.<|im_end|>[user]Name a colour.<|im_end|>[assistant]"
    assert [parts(tokenizer, row) for row in encoded.rows] == [
        [("prompt", start), ("target", "<think></think>Red.<|im_end|>")],
        [
            ("prompt", start + "Red.<|im_end|>[user]Another one?<|im_end|>[assistant]"),
            ("target", "<think></think>Blue.<|im_end|>"),
        ],
    ]
    assert encoded.notes == {EncodingNote.SPLIT_TURNS}


def test_a_generation_prompt_that_the_answer_does_not_repeat_is_left_out(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
    )
    sample = Conversation((Turn(Role.USER, "Markup?"), Turn(Role.ASSISTANT, "<b>")))
    encoded = encode(tokenizer, sample)
    assert [parts(tokenizer, row) for row in encoded.rows] == [
        [("prompt", "[user]Markup?<|im_end|>[assistant]"), ("target", "<b><|im_end|>")]
    ]
    assert encoded.notes == {EncodingNote.OTHER_PROMPT}


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


def test_what_follows_the_last_answer_is_left_out(tokenizer: PreTrainedTokenizerBase) -> None:
    longer = Conversation((*ONE_EXCHANGE.turns, Turn(Role.USER, "And then?")))
    assert encode(tokenizer, longer).rows[0][0].tolist() == encode(tokenizer, ONE_EXCHANGE).rows[0][0].tolist()


def test_an_encoder_can_be_sent_to_a_worker(tokenizer: PreTrainedTokenizerBase) -> None:
    encoder = SampleEncoder(tokenizer, seq_length=64)
    copy = pickle.loads(pickle.dumps(encoder))
    assert copy.encode(TWO_EXCHANGES, "").rows[0][0].tolist() == encoder.encode(TWO_EXCHANGES, "").rows[0][0].tolist()


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
    assert len(row[0]) == 40
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
    assert row[0].tolist() == expected.rows[0][0].tolist()
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
    ((ids, is_target),) = encoded.rows
    assert encoded.is_truncated
    assert (ids.tolist(), is_target.tolist()) == (whole[0].tolist(), whole[1].tolist())
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
    assert row[0][-1] != tokenizer.eos_token_id
    assert row[1].sum() == 20 - len(tokenizer("Count:").input_ids)


def documents(*lengths: int) -> list[TokenizedSample]:
    return [(np.arange(n, dtype=np.int32), np.ones(n, dtype=np.bool_)) for n in lengths]


def test_a_document_is_one_row_of_targets_that_ends_with_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    assert marked(tokenizer, encode(tokenizer, Document("one two three"), 2)) == ["【one two three<|im_end|>】"]


@pytest.mark.parametrize(("num_tokens", "lengths"), [(3, [3]), (4, [4]), (5, [4]), (6, [4, 2]), (9, [4, 4]), (1, [])])
def test_a_long_document_is_cut_into_pieces_of_which_nothing_is_lost_but_a_single_last_token(
    num_tokens: int, lengths: list[int]
) -> None:
    (row,) = documents(num_tokens)
    pieces = split_document(row, 4)
    assert [len(ids) for ids, _ in pieces] == lengths
    assert [token for ids, _ in pieces for token in ids.tolist()] == list(range(sum(lengths)))


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
    for sample, (ids, is_target) in zip(samples, whole, strict=True):
        (row,) = encode(tokenizer, sample, 100_000).rows
        assert row[0].tolist() == ids.tolist()
        assert row[1].tolist() == is_target.tolist()


def test_a_document_of_megabytes_takes_little_memory(assets: Path, tmp_path: Path) -> None:
    """In a process of its own, as only the operating system knows what the tokenizer takes: 160 bytes for each byte."""
    given = [str(assets / "tiny-llama"), 4 * 2**20]
    run = Ranks(
        "harness.tokenizing_worker", "tell_peak", given, num_ranks=1, folder=tmp_path, environment=environment(tmp_path)
    )
    assert run.wait() == 0, run.output()
    assert int(run.output()) < 350 * 1024


MASKED = EncodingRules(mask_history=True)
EVERYTHING = EncodingRules(train_on_prompt=True)
REWRITING = (
    "{% for m in messages %}[{{ m['role'] }}]"
    "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Writes the last answer otherwise than those before it, as templates of thinking models do."""


def test_with_a_masked_history_only_the_last_answer_is_a_target(tokenizer: PreTrainedTokenizerBase) -> None:
    assert marked(tokenizer, encode(tokenizer, TWO_EXCHANGES, rules=MASKED)) == [
        "<|begin|><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nName a colour.<|im_end|>\n"
        "<|im_start|>assistant\nRed.<|im_end|>\n<|im_start|>user\nAnother one?<|im_end|>\n<|im_start|>assistant\n"
        "【Blue.<|im_end|>】"
    ]
    tokenizer.chat_template = REWRITING
    encoded = encode(tokenizer, TWO_EXCHANGES, rules=MASKED)
    assert marked(tokenizer, encoded) == [
        "[system]Be brief.<|im_end|>[user]Name a colour.<|im_end|>[assistant]Red.<|im_end|>[user]Another one?<|im_end|>"
        "[assistant]【<think></think>Blue.<|im_end|>】"
    ]
    assert not encoded.notes
    tokenizer.chat_template = None
    assert marked(tokenizer, encode(tokenizer, TWO_EXCHANGES, rules=MASKED)) == [
        "Be brief.\n\n### Instruction:\nName a colour.\n\n### Response:\nRed.<|im_end|>\n\n### Instruction:\n"
        "Another one?\n\n### Response:\n【Blue.<|im_end|>】"
    ]


def test_with_prompts_trained_on_every_token_but_the_first_is_a_target(tokenizer: PreTrainedTokenizerBase) -> None:
    assert marked(tokenizer, encode(tokenizer, TWO_EXCHANGES, rules=EVERYTHING)) == [
        "<|begin|>【<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nName a colour.<|im_end|>\n"
        "<|im_start|>assistant\nRed.<|im_end|>\n<|im_start|>user\nAnother one?<|im_end|>\n<|im_start|>assistant\n"
        "Blue.<|im_end|>】"
    ]
    tokenizer.chat_template = REWRITING
    assert marked(tokenizer, encode(tokenizer, TWO_EXCHANGES, rules=EVERYTHING)) == [
        "[【system]Be brief.<|im_end|>[user]Name a colour.<|im_end|>[assistant]Red.<|im_end|>[user]Another one?"
        "<|im_end|>[assistant]<think></think>Blue.<|im_end|>】"
    ]
    (row,) = encode(tokenizer, Completion("The sky is", " blue."), rules=EVERYTHING).rows
    assert row[1].tolist() == [False] + [True] * (len(row[0]) - 1)


def test_training_on_prompts_changes_the_mask_and_not_the_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    for seq_length in (256, 30, 12):
        plain = encode(tokenizer, TWO_EXCHANGES, seq_length)
        every = encode(tokenizer, TWO_EXCHANGES, seq_length, EVERYTHING)
        assert [row[0].tolist() for row in every.rows] == [row[0].tolist() for row in plain.rows]
        assert every.is_truncated == plain.is_truncated


def test_a_default_system_message_is_for_conversations_that_have_none(tokenizer: PreTrainedTokenizerBase) -> None:
    rules = EncodingRules(default_system="Be kind.")
    without = Conversation(TWO_EXCHANGES.turns[1:3])
    assert marked(tokenizer, encode(tokenizer, without, rules=rules)) == [
        "<|begin|><|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nName a colour.<|im_end|>\n"
        "<|im_start|>assistant\n【Red.<|im_end|>】"
    ]
    own = encode(tokenizer, ONE_EXCHANGE, rules=rules)
    assert marked(tokenizer, own) == marked(tokenizer, encode(tokenizer, ONE_EXCHANGE))
    completion = Completion("The sky is", " blue.")
    assert marked(tokenizer, encode(tokenizer, completion, rules=rules)) == ["The sky is【 blue.<|im_end|>】"]
    assert encode(tokenizer, Conversation((Turn(Role.USER, " "),)), rules=rules).is_empty
    tokenizer.chat_template = None
    assert marked(tokenizer, encode(tokenizer, without, rules=rules)) == [
        "Be kind.\n\n### Instruction:\nName a colour.\n\n### Response:\n【Red.<|im_end|>】"
    ]


def test_answers_of_a_prompt_are_no_targets(tokenizer: PreTrainedTokenizerBase) -> None:
    sample = Conversation(TWO_EXCHANGES.turns[1:], num_prompt_turns=3)
    expected = (
        "<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\nRed.<|im_end|>\n<|im_start|>user\n"
        "Another one?<|im_end|>\n<|im_start|>assistant\n【Blue.<|im_end|>】"
    )
    assert marked(tokenizer, encode(tokenizer, sample)) == [f"<|begin|>{expected}"]
    for num_prompt_turns in (2, 3):
        sample = Conversation(TWO_EXCHANGES.turns[1:], num_prompt_turns=num_prompt_turns)
        with_system = encode(tokenizer, sample, rules=EncodingRules(default_system="s"))
        assert marked(tokenizer, with_system) == [f"<|begin|><|im_start|>system\ns<|im_end|>\n{expected}"]


def test_a_given_template_replaces_the_tokenizers_own(tokenizer: PreTrainedTokenizerBase) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"
    for own in (tokenizer.chat_template, None):
        tokenizer.chat_template = own
        encoded = encode(tokenizer, ONE_EXCHANGE, rules=EncodingRules(chat_template=template))
        assert marked(tokenizer, encoded) == [
            "<system>Be brief.<|im_end|><user>Name a colour.<|im_end|>【<assistant>Red.<|im_end|>】"
        ]


def test_all_turns_are_trained_on_but_no_prompt_that_has_a_completion(tokenizer: PreTrainedTokenizerBase) -> None:
    rules = EncodingRules(train_on_all_turns=True)
    asked = replace(ONE_EXCHANGE, num_prompt_turns=2)

    for sample, like in ((TWO_EXCHANGES, EVERYTHING), (asked, None), (Completion("The sky is", " blue."), None)):
        assert marked(tokenizer, encode(tokenizer, sample, rules=rules)) == marked(
            tokenizer, encode(tokenizer, sample, rules=like)
        )


def test_rules_that_contradict_each_other_cannot_be_made() -> None:
    with pytest.raises(AssertionError):
        EncodingRules(train_on_all_turns=True, mask_history=True)
    with pytest.raises(AssertionError):
        EncodingRules(train_on_prompt=True, mask_history=True)


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
SCHEMA = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TOOLS = Conversation(
    (
        Turn(Role.USER, "Weather in Oslo?"),
        Turn(Role.ASSISTANT, "", {"tool_calls": [CALL]}),
        Turn(Role.TOOL, "rain", {"name": "weather"}),
        Turn(Role.ASSISTANT, "It rains."),
    ),
    (SCHEMA,),
)
CHATML = EncodingRules(chat_template=BUILTIN_TEMPLATES["chatml"])


def with_arguments(arguments: object) -> Conversation:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    turns = (TOOLS.turns[0], Turn(Role.ASSISTANT, "", {"tool_calls": [call]}), *TOOLS.turns[2:])
    return Conversation(turns, TOOLS.tools)


def test_a_call_is_a_target_and_the_tools_and_their_answers_are_not(tokenizer: PreTrainedTokenizerBase) -> None:
    encoded = encode(tokenizer, TOOLS, 1024, CHATML)
    (text,) = marked(tokenizer, encoded)
    system, turns = text.split("<|im_end|>\n", 1)
    assert '<tools>\n{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}' in system
    assert turns == (
        "<|im_start|>user\nWeather in Oslo?<|im_end|>\n<|im_start|>assistant\n"
        '【<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>】\n'
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "【It rains.<|im_end|>】"
    )
    assert not encoded.notes


QUOTING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>{% endfor %}{{ '<assistant>' if add_generation_prompt }}"
)


def test_arguments_are_an_object_for_a_template_that_would_quote_their_text(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = QUOTING
    expected = (
        '<user>Weather in Oslo?<|im_end|><assistant>【weather{"city": "Oslo"}<|im_end|>】<tool>rain<|im_end|>'
        "<assistant>【It rains.<|im_end|>】"
    )
    for arguments in ({"city": "Oslo"}, '{"city": "Oslo"}'):
        assert marked(tokenizer, encode(tokenizer, with_arguments(arguments))) == [expected]


def test_arguments_stay_text_for_a_template_that_writes_them_as_they_are(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = QUOTING.replace(" | tojson", "")
    (text,) = marked(tokenizer, encode(tokenizer, with_arguments('{"city":  "Oslo"}')))
    assert '【weather{"city":  "Oslo"}<|im_end|>】' in text


@pytest.mark.parametrize(
    "written",
    [
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}",
        "{{ 'city=' + c.function.arguments[10:14] }}",
    ],
    ids=["an object", "text"],
)
@pytest.mark.parametrize("arguments", [{"city": "Oslo"}, '{"city": "Oslo"}'], ids=["given an object", "given text"])
def test_arguments_are_what_the_template_can_take(
    tokenizer: PreTrainedTokenizerBase, written: str, arguments: object
) -> None:
    tokenizer.chat_template = QUOTING.replace("{{ c.function.arguments | tojson }}", written)
    (text,) = marked(tokenizer, encode(tokenizer, with_arguments(arguments)))
    assert "【weathercity=Oslo<|im_end|>】" in text


def test_a_template_without_tools_is_told(tokenizer: PreTrainedTokenizerBase) -> None:
    seen = Conversation(ONE_EXCHANGE.turns, (SCHEMA,))
    assert encode(tokenizer, seen).notes == {EncodingNote.NO_TOOLS}
    assert encode(tokenizer, seen, 1024, CHATML).notes == set()
    tokenizer.chat_template = None
    assert encode(tokenizer, seen).notes == {EncodingNote.NO_TOOLS}


PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}<|im_end|>{% endfor %}{{ '<assistant>' if add_generation_prompt }}"
)


def test_a_template_that_takes_content_parts_only_is_given_them(tokenizer: PreTrainedTokenizerBase) -> None:
    expected = "<system>Be brief.<|im_end|><user>Name a colour.<|im_end|><assistant>【Red.<|im_end|>】"
    tokenizer.chat_template = PARTS
    assert marked(tokenizer, encode(tokenizer, ONE_EXCHANGE)) == [expected]
    tokenizer.chat_template = PARTS.replace("'<assistant>'", "'<assistant><think>'")
    assert marked(tokenizer, encode(tokenizer, ONE_EXCHANGE)) == [expected]


def test_reasoning_reaches_a_template_that_writes_it(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}<|im_end|>{% endfor %}"
        "{{ '<assistant>' if add_generation_prompt }}"
    )
    answer = Turn(Role.ASSISTANT, "4", {"reasoning_content": "(2 + 2)"})
    assert marked(tokenizer, encode(tokenizer, Conversation((Turn(Role.USER, "2 + 2"), answer)))) == [
        "<user>2 + 2<|im_end|><assistant>【(2 + 2)4<|im_end|>】"
    ]


def untrained(conversation: Conversation, *numbers: int) -> Conversation:
    turns = (replace(turn, is_trained=index not in numbers) for index, turn in enumerate(conversation.turns))
    return replace(conversation, turns=tuple(turns))


@pytest.mark.parametrize("is_plain", [False, True], ids=["a template", "no template"])
def test_an_answer_that_is_not_trained_on_is_context(tokenizer: PreTrainedTokenizerBase, is_plain: bool) -> None:
    if is_plain:
        tokenizer.chat_template = None
    (whole,) = encode(tokenizer, TWO_EXCHANGES).rows
    (second,) = encode(tokenizer, untrained(TWO_EXCHANGES, 2)).rows
    assert second[0].tolist() == whole[0].tolist()
    assert tokenizer.decode(whole[0][whole[1]].tolist()) == f"Red.{EOS}Blue.{EOS}"
    assert tokenizer.decode(second[0][second[1]].tolist()) == f"Blue.{EOS}"
    (first,) = encode(tokenizer, untrained(TWO_EXCHANGES, 4)).rows
    assert tokenizer.decode(first[0][first[1]].tolist()) == f"Red.{EOS}"
    assert "Blue" not in tokenizer.decode(first[0].tolist()), "nothing is learned from what follows the last target"


def test_answers_that_are_not_trained_on_get_no_row_of_their_own(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ 'old ' if not loop.last }}{{ m.content }}<|im_end|>{% endfor %}"
        "{{ '<assistant>' if add_generation_prompt }}"
    )
    assert len(encode(tokenizer, TWO_EXCHANGES).rows) == 2
    ((ids, is_target),) = encode(tokenizer, untrained(TWO_EXCHANGES, 2)).rows
    assert tokenizer.decode(ids[is_target].tolist()) == f"Blue.{EOS}"


def test_a_conversation_without_a_trained_answer_has_no_row(tokenizer: PreTrainedTokenizerBase) -> None:
    for encoded in (
        encode(tokenizer, untrained(TWO_EXCHANGES, 2, 4)),
        encode(tokenizer, untrained(TWO_EXCHANGES, 4), 64, EncodingRules(mask_history=True)),
    ):
        assert encoded.rows == ()
        assert not encoded.is_empty
        assert not encoded.is_unanswered


def test_reasoning_may_be_written_with_other_spaces_or_be_left_out_of_context(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    asked, answer = Turn(Role.USER, "2 + 2"), Turn(Role.ASSISTANT, "4", {"reasoning_content": "2 + 2\n is 4"})
    assert encode(tokenizer, untrained(Conversation((asked, answer, asked, Turn(Role.ASSISTANT, "4"))), 1)).rows
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content | default('') | replace('\n', '\n  ') }}"
        "{{ m.content }}<|im_end|>{% endfor %}{{ '<assistant>' if add_generation_prompt }}"
    )
    assert encode(tokenizer, Conversation((asked, answer))).rows
