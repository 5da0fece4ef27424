"""What a record holds is trained on as it is written: compared with transformers' rendering, or with text by hand."""

import json

import numpy as np
import pytest
from harness.samples import row_of
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from mobius.data.chat_templates import BUILTIN_TEMPLATES
from mobius.data.formats import detect_format, parse_record
from mobius.data.tokenization import EncodedSample, EncodingRules, SampleEncoder

ASKED = {"role": "user", "content": "Book 2 seats, any day."}


def encode(
    tokenizer: PreTrainedTokenizerBase, record: dict[str, object], rules: EncodingRules | None = None
) -> EncodedSample:
    sample = parse_record(detect_format(list(record), "here"), record, "here")
    return SampleEncoder(tokenizer, seq_length=1024, rules=rules).encode(sample, "here")


def texts(tokenizer: PreTrainedTokenizerBase, encoded: EncodedSample) -> list[tuple[str, str]]:
    """All text and all targets of each row."""
    return [
        (str(tokenizer.decode(ids.tolist())), str(tokenizer.decode(ids[np.flatnonzero(is_target)].tolist())))
        for ids, is_target in map(row_of, encoded.rows)
    ]


PROPERTIES = {"date": {"type": ["string", "null"], "default": None}, "seats": {"type": "integer"}}
BOOK = {"type": "function", "function": {"name": "book", "parameters": {"type": "object", "properties": PROPERTIES}}}


@pytest.mark.parametrize("arguments", [{"date": None, "seats": 2}, {"items": [1, None, 3]}, {"at": {"hour": None}}, {}])
@pytest.mark.parametrize("as_text", [False, True])
def test_nulls_of_arguments_and_schemas_are_trained_on_as_transformers_writes_them(
    tokenizer: PreTrainedTokenizerBase, arguments: dict[str, object], as_text: bool
) -> None:
    written = json.dumps(arguments) if as_text else arguments
    call = {"type": "function", "function": {"name": "book", "arguments": written}}
    messages = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]
    template = BUILTIN_TEMPLATES["chatml"]
    ((text, target),) = texts(
        tokenizer, encode(tokenizer, {"messages": messages, "tools": [BOOK]}, EncodingRules(chat_template=template))
    )
    expected = tokenizer.apply_chat_template(messages, tools=[BOOK], chat_template=template, tokenize=False)
    assert text == str(expected).rstrip("\n")
    assert '"default": null' in text
    assert json.dumps(arguments) in target


BOS, EOS = "<|begin|>", "<|im_end|>"
ASKED_AND = f"{BOS}<|im_start|>user\n2+3?{EOS}\n<|im_start|>assistant\n"


def adding_start(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """As Llama's do: without special tokens it is added to each text."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    return tokenizer


@pytest.mark.parametrize("adds_start", [False, True])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"A lake.{EOS}", f"A lake.{EOS}"),
        (f"A lake.{EOS}\n", f"A lake.{EOS}"),
        (f"A lake.{EOS}{EOS}", f"A lake.{EOS}"),
        (f"A lake. {EOS}\n{EOS} \n", f"A lake. {EOS}"),
        (f"{BOS}A lake.", f"{BOS}A lake.{EOS}"),
        (f"\n{BOS} {BOS}A lake.\n", f"{BOS}A lake.\n{EOS}"),
        (f"a{EOS}{EOS}b{EOS}\nc", f"a{EOS}b{EOS}\nc{EOS}"),
    ],
)
def test_start_and_end_tokens_of_text_are_not_doubled(
    tokenizer: PreTrainedTokenizerBase, text: str, expected: str, *, adds_start: bool
) -> None:
    if adds_start:
        tokenizer, expected = adding_start(tokenizer), BOS + expected.removeprefix(BOS)
    own = expected.removeprefix(BOS)
    assert texts(tokenizer, encode(tokenizer, {"text": text}))[0][0] == expected
    for prompt in ("", "Name one:\n", f"{BOS}Name one:\n", f"{BOS}\n{BOS}Name one:\n"):
        ((whole, target),) = texts(tokenizer, encode(tokenizer, {"prompt": prompt, "completion": text}))
        start = BOS if adds_start or BOS in prompt + text else ""
        assert whole == f"{start}{'Name one:' if prompt else ''}{chr(10) if prompt else ''}{own}"
        assert target == own


@pytest.mark.parametrize(
    "answer", ["Five.", f"Five.{EOS}", f"Five.{EOS}\n", f"Five.{EOS}{EOS}", f"{BOS}Five.{EOS}\n{EOS}"]
)
@pytest.mark.parametrize("question", ["2+3?", f"2+3?{EOS}", f"{BOS}2+3?{EOS}\n"])
def test_start_and_end_tokens_of_messages_are_those_of_the_template(
    tokenizer: PreTrainedTokenizerBase, question: str, answer: str
) -> None:
    exchange = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    ((text, target),) = texts(tokenizer, encode(tokenizer, {"messages": exchange * 2}))
    assert text == f"{ASKED_AND}Five.{EOS}\n{ASKED_AND.removeprefix(BOS)}Five.{EOS}"
    assert target == f"Five.{EOS}" * 2
    tokenizer.chat_template = None
    ((text, target),) = texts(tokenizer, encode(tokenizer, {"messages": exchange}))
    assert text == f"### Instruction:\n2+3?\n\n### Response:\nFive.{EOS}"


def test_an_end_token_that_a_template_writes_twice_is_learned_once(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = str(tokenizer.chat_template).replace("<|im_end|>", f"<|im_end|>{EOS}")
    exchange = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "Five."}]
    ((_, target),) = texts(tokenizer, encode(tokenizer, {"messages": exchange * 2}))
    assert target == f"Five.{EOS}" * 2


def test_an_answer_of_an_end_token_alone_is_none(tokenizer: PreTrainedTokenizerBase) -> None:
    exchange = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": EOS}]
    assert encode(tokenizer, {"messages": exchange}).is_unanswered
    assert encode(tokenizer, {"prompt": "a", "completion": f"{EOS}\n"}).is_unanswered
    assert encode(tokenizer, {"text": f"{BOS}{EOS}"}).is_empty
