"""A record is read by the format of its columns; what is refused is in test_refusals.py."""

import json
import pickle
from collections.abc import Mapping
from typing import Any

import pytest

from mobius.data.formats import FORMATS_OF, detect_format, parse_record
from mobius.data.messages import Completion, Conversation, Document, Role, Sample, Turn, tool_call_names


def parsed(record: Mapping[str, object], mapping: Mapping[str, str] | None = None) -> tuple[str, object]:
    record_format = detect_format(list(record), "here", mapping)
    return record_format.name, parse_record(record_format, record, "here")


def turns(*texts: str) -> Conversation:
    """Turns by the first letter of their role."""
    roles = {role.value[0]: role for role in Role}
    return Conversation(tuple(Turn(roles[text[0]], text[2:]) for text in texts))


ASKED, SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
FUNCTION = {"name": "weather", "arguments": {"city": "Oslo", "day": None, "at": {"zone": None}}}
CALL = {"type": "function", "function": FUNCTION}
SCHEMA = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"day": {"default": None}}}}}
PAIR, XSUM = {"prompt": "a", "completion": "b"}, {"document": "It rained.", "summary": "Rain.", "id": "7"}
HUMAN, GPT = {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}
PREFERENCE = {"prompt": "a", "chosen": "good", "rejected": "bad"}
RECORDS: list[tuple[str, dict[str, Any], dict[str, str], Sample]] = [
    ("alpaca", {"instruction": "Add.", "input": "1 2", "output": "3"}, {}, turns("u:Add.\n\n1 2", "a:3")),
    ("alpaca", {"instruction": "Hi", "output": "Ho"}, {}, turns("u:Hi", "a:Ho")),
    # a column mapped to `query` is LLaMA-Factory's input
    ("alpaca", {"instruction": "Add.", "query": "1 2", "output": "3"}, {}, turns("u:Add.\n1 2", "a:3")),
    (
        "alpaca",
        {"instruction": "c", "input": "", "output": "d", "system": "Be kind.", "history": [["a", "b"]]},
        {},
        turns("s:Be kind.", "u:a", "a:b", "u:c", "a:d"),
    ),
    # a rendered text beside alpaca's columns does not hide the prompt
    ("alpaca", {"instruction": "a", "input": "", "output": "b", "text": "a b"}, {}, turns("u:a", "a:b")),
    (
        "alpaca",
        {"question": "a", "answer": "b", "input": "no context"},
        {"instruction": "question", "output": "answer"},
        turns("u:a\n\nno context", "a:b"),
    ),
    ("alpaca", {"input": "a", "output": "b"}, {"instruction": "input"}, turns("u:a", "a:b")),
    ("sharegpt", {"conversations": [HUMAN, GPT], "system": "s"}, {}, turns("s:s", "u:a", "a:b")),
    ("sharegpt", {"conversations": [ASKED, SAID]}, {}, turns("u:a", "a:b")),
    ("messages", {"messages": [ASKED, SAID]}, {}, turns("u:a", "a:b")),
    ("messages", {"messages": [HUMAN, GPT]}, {}, turns("u:a", "a:b")),
    ("messages", {"dialogue": [ASKED], "summary": "s"}, {"messages": "dialogue"}, turns("u:a")),
    (
        "messages",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "value": "Two "},
                        {"type": "text", "text": "parts.", "image": None},
                        " !",
                    ],
                }
            ]
        },
        {},
        turns("u:Two parts. !"),
    ),
    ("prompt-completion", PAIR, {}, Completion("a", "b")),
    (
        "prompt-completion",
        {"prompt": [ASKED, SAID, ASKED], "completion": [SAID], "tools": [SCHEMA]},
        {},
        Conversation(turns("u:a", "a:b").turns * 2, (SCHEMA,), num_prompt_turns=3),
    ),
    ("prompt-completion", XSUM, {"prompt": "document", "completion": "summary"}, Completion("It rained.", "Rain.")),
    (
        "prompt-completion",
        {"prompt": "a", "target": "b"},
        {"prompt": "prompt", "completion": "target"},
        Completion("a", "b"),
    ),
    (
        "xsum",
        XSUM,
        {},
        Completion("Summarize the article in one sentence.\n\nIt rained.\n\nSummary:\n", "Rain."),
    ),
    ("xsum", {"document": " ", "summary": "Rain."}, {}, Completion("", "")),
    ("text", {"text": "words", "label": 3}, {}, Document("words")),
    ("text", {"text": None}, {}, Document("")),
    ("text", {"messages": [], "doc": "words"}, {"text": "doc"}, Document("words")),
    ("text", {"text": "not this", "body": "this"}, {"text": "body"}, Document("this")),
    *(
        ("sharegpt", {"conversations": [HUMAN], "tools": tools}, {}, Conversation(turns("u:a").turns, (SCHEMA,)))
        for tools in ([SCHEMA], json.dumps([SCHEMA]), [json.dumps(SCHEMA)], json.dumps(SCHEMA))
    ),
    *(("messages", {"messages": [ASKED], "tools": tools}, {}, turns("u:a")) for tools in (None, "", "[]", [])),
    # a column that decides nothing, or is chosen by its name, is no preference
    *(
        ("prompt-completion", {**PAIR, name: value}, {}, Completion("a", "b"))
        for name, value in (("label", "chemistry"), ("label", None), ("rejected", None), ("rejected", ""), ("score", 3))
    ),
    ("prompt-completion", PREFERENCE, {"completion": "chosen"}, Completion("a", "good")),
    ("prompt-completion", {**PAIR, **PREFERENCE}, {"completion": "completion"}, Completion("a", "b")),
    (
        "prompt-completion",
        {"sentence": "fine", "label": "1"},
        {"prompt": "sentence", "completion": "label"},
        Completion("fine", "1"),
    ),
    # a function call and its result, nulls inside of arguments and schemas kept
    *(
        (
            "sharegpt",
            {
                "conversations": [
                    HUMAN,
                    {"from": "function_call", "value": value},
                    {"from": "observation", "value": "rain"},
                    GPT,
                ]
            },
            {},
            Conversation(
                (
                    Turn(Role.USER, "a"),
                    Turn(Role.ASSISTANT, "", {"tool_calls": [CALL]}),
                    Turn(Role.TOOL, "rain"),
                    Turn(Role.ASSISTANT, "b"),
                )
            ),
        )
        for value in (json.dumps(FUNCTION), json.dumps([FUNCTION]), FUNCTION)
    ),
]


@pytest.mark.parametrize(("name", "record", "mapping", "sample"), RECORDS, ids=range(len(RECORDS)))
def test_a_record_is_read_by_its_columns_and_as_they_are_mapped(
    name: str, record: dict[str, Any], mapping: dict[str, str], sample: Sample
) -> None:
    assert parsed(record, mapping) == (name, sample)


def test_a_mapped_format_is_described_with_its_columns() -> None:
    record_format = detect_format(["q", "a"], "line 1", {"prompt": "q", "completion": "a"})
    assert record_format.describe() == "prompt-completion (prompt=q, completion=a, [tools])"


@pytest.mark.parametrize("record_format", sum(FORMATS_OF.values(), ()), ids=lambda each: each.name)
def test_a_format_can_be_sent_to_a_worker(record_format: object) -> None:
    assert pickle.loads(pickle.dumps(record_format)).name


@pytest.mark.parametrize("arguments", [FUNCTION["arguments"], json.dumps(FUNCTION["arguments"])])
def test_tool_calls_without_text_are_a_turn_with_the_fields_of_the_message(arguments: object) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [{"id": None, **call}], "name": None},
        {"role": "tool", "content": "rain", "name": "weather", "tool_call_id": "c1"},
        {"role": "assistant", "content": "It rains.", "tool_calls": None, "reasoning_content": "Say it."},
    ]
    _, sample = parsed({"messages": messages, "tools": [SCHEMA]})
    assert isinstance(sample, Conversation)
    assert sample.tools == (SCHEMA,)
    assert sample.turns == (
        Turn(Role.USER, "a"),
        Turn(Role.ASSISTANT, "", {"tool_calls": [call]}),
        Turn(Role.TOOL, "rain", {"name": "weather", "tool_call_id": "c1"}),
        Turn(Role.ASSISTANT, "It rains.", {"reasoning_content": "Say it."}),
    )
    assert [turn.has_content for turn in sample.turns] == [True, True, True, True]
    assert tool_call_names(sample.turns[1]) == ["weather"]


@pytest.mark.parametrize(
    ("fields", "is_trained"),
    [
        *((fields, False) for fields in ({"weight": 0}, {"weight": 0.0}, {"train": False}, {"loss": False})),
        ({"weight": 0, "train": False}, False),
        *((fields, True) for fields in ({}, {"weight": 1}, {"weight": None}, {"train": True})),
        ({"weight": 1, "train": True}, True),
    ],
)
def test_a_message_says_whether_it_is_trained_on(fields: dict[str, object], is_trained: bool) -> None:
    for record in ({"messages": [ASKED, {**SAID, **fields}]}, {"conversations": [HUMAN, {**GPT, **fields}]}):
        _, sample = parsed(record)
        assert isinstance(sample, Conversation)
        assert sample.turns[1].is_trained is is_trained
