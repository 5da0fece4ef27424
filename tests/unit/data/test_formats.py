import json
import pickle
from collections.abc import Mapping

import pytest

from mobius.data.formats import (
    FORMATS,
    Completion,
    Conversation,
    Document,
    Role,
    Turn,
    detect_format,
    parse_record,
    tool_call_names,
)


def parsed(record: Mapping[str, object], mapping: Mapping[str, str] | None = None) -> tuple[str, object]:
    record_format = detect_format(list(record), "here", mapping)
    return record_format.name, parse_record(record_format, record, "here")


def conversation(*turns: tuple[str, str]) -> Conversation:
    return Conversation(tuple(Turn(Role(role), content) for role, content in turns))


@pytest.mark.parametrize(
    ("record", "name", "sample"),
    [
        (
            {"instruction": "Add.", "input": "1 2", "output": "3"},
            "alpaca",
            conversation(("user", "Add.\n\n1 2"), ("assistant", "3")),
        ),
        ({"instruction": "Hi", "output": "Ho"}, "alpaca", conversation(("user", "Hi"), ("assistant", "Ho"))),
        (  # a column mapped to `query` is LLaMA-Factory's input
            {"instruction": "Add.", "query": "1 2", "output": "3"},
            "alpaca",
            conversation(("user", "Add.\n1 2"), ("assistant", "3")),
        ),
        (
            {"instruction": "c", "input": "", "output": "d", "system": "Be kind.", "history": [["a", "b"]]},
            "alpaca",
            conversation(("system", "Be kind."), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")),
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
            "sharegpt",
            conversation(("system", "s"), ("user", "a"), ("assistant", "b")),
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "messages",
            conversation(("user", "a"), ("assistant", "b")),
        ),
        ({"prompt": "1+1=", "completion": "2"}, "prompt-completion", Completion("1+1=", "2")),
        (
            {"document": "It rained.", "summary": "Rain.", "id": "7"},
            "xsum",
            Completion("Summarize the article in one sentence.\n\nIt rained.\n\nSummary:\n", "Rain."),
        ),
        ({"document": " ", "summary": "Rain."}, "xsum", Completion("", "")),
        ({"text": "words", "label": 3}, "text", Document("words")),
        ({"text": None}, "text", Document("")),
    ],
)
def test_each_format_is_recognized_by_its_columns(record: dict[str, object], name: str, sample: object) -> None:
    assert parsed(record) == (name, sample)


def test_a_rendered_text_beside_alpaca_columns_does_not_hide_the_prompt() -> None:
    assert parsed({"instruction": "a", "input": "", "output": "b", "text": "a b"})[0] == "alpaca"


ASKED = {"role": "user", "content": "Weather in Oslo?"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
SCHEMA = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("record", "mapping", "name", "sample"),
    [
        (
            {"document": "a", "summary": "b", "id": 1},
            {"prompt": "document", "completion": "summary"},
            "prompt-completion",
            Completion("a", "b"),
        ),
        (
            {"question": "a", "answer": "b", "input": "no context"},
            {"instruction": "question", "output": "answer"},
            "alpaca",
            conversation(("user", "a\n\nno context"), ("assistant", "b")),
        ),
        (
            {"input": "a", "output": "b"},
            {"instruction": "input"},
            "alpaca",
            conversation(("user", "a"), ("assistant", "b")),
        ),
        ({"messages": [], "doc": "words"}, {"text": "doc"}, "text", Document("words")),
        ({"text": "not this", "body": "this"}, {"text": "body"}, "text", Document("this")),
        ({"prompt": "a", "target": "b"}, {"prompt": "prompt", "completion": "target"}, "prompt-completion", None),
        (
            {"dialogue": [{"role": "user", "content": "a"}], "summary": "s"},
            {"messages": "dialogue"},
            "messages",
            conversation(("user", "a")),
        ),
    ],
)
def test_columns_are_read_as_they_are_mapped(
    record: dict[str, object], mapping: dict[str, str], name: str, sample: object
) -> None:
    assert parsed(record, mapping) == (name, sample or Completion("a", "b"))


def test_a_mapped_format_is_described_with_its_columns() -> None:
    record_format = detect_format(["q", "a"], "line 1", {"prompt": "q", "completion": "a"})
    assert record_format.describe() == "prompt-completion (prompt=q, completion=a, [tools])"


@pytest.mark.parametrize("record_format", FORMATS, ids=lambda each: each.name)
def test_a_format_can_be_sent_to_a_worker(record_format: object) -> None:
    assert pickle.loads(pickle.dumps(record_format)).name


def test_tool_calls_without_text_are_a_turn_with_the_fields_of_the_message() -> None:
    messages = [
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [CALL], "name": None},
        {"role": "tool", "content": "rain", "name": "weather", "tool_call_id": "c1"},
        {"role": "assistant", "content": "It rains.", "tool_calls": None, "reasoning_content": "Say it."},
    ]
    _, sample = parsed({"messages": messages, "tools": [SCHEMA]})
    assert isinstance(sample, Conversation)
    assert sample.tools == (SCHEMA,)
    assert sample.turns == (
        Turn(Role.USER, "Weather in Oslo?"),
        Turn(Role.ASSISTANT, "", {"tool_calls": [CALL]}),
        Turn(Role.TOOL, "rain", {"name": "weather", "tool_call_id": "c1"}),
        Turn(Role.ASSISTANT, "It rains.", {"reasoning_content": "Say it."}),
    )
    assert [turn.has_content for turn in sample.turns] == [True, True, True, True]
    assert tool_call_names(sample.turns[1]) == ["weather"]


@pytest.mark.parametrize(
    "tools",
    [[SCHEMA], json.dumps([SCHEMA]), [json.dumps(SCHEMA)], json.dumps(SCHEMA)],
    ids=["a list", "JSON of a list", "a list of JSON", "JSON of one"],
)
def test_tools_may_be_json_text(tools: object) -> None:
    _, sample = parsed({"conversations": [{"from": "human", "value": "a"}], "tools": tools})
    assert isinstance(sample, Conversation)
    assert sample.tools == (SCHEMA,)


@pytest.mark.parametrize("tools", [None, "", "[]", []])
def test_there_may_be_no_tools(tools: object) -> None:
    assert parsed({"messages": [ASKED], "tools": tools})[1] == conversation(("user", "Weather in Oslo?"))


def test_nulls_of_arguments_and_schemas_stay_and_those_around_them_mean_unset() -> None:
    arguments = {"city": "Oslo", "day": None, "hours": [1, None], "at": {"zone": None}}
    properties = {"day": {"type": ["string", "null"], "default": None}}
    schema = {"type": "function", "function": {"name": "weather", "parameters": {"properties": properties}}}
    for written in (arguments, json.dumps(arguments)):
        call = {"id": None, "function": {"name": "weather", "arguments": written, "strict": None}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call], "name": None}
        _, sample = parsed({"messages": [ASKED, answer], "tools": [schema]})
        assert isinstance(sample, Conversation)
        assert sample.turns[1].fields == {"tool_calls": [{"function": {"name": "weather", "arguments": written}}]}
        assert sample.tools == (schema,)


@pytest.mark.parametrize(
    "value",
    [
        '{"name": "weather", "arguments": {"city": "Oslo"}}',
        '[{"name": "weather", "arguments": {"city": "Oslo"}}]',
        {"name": "weather", "arguments": {"city": "Oslo"}},
    ],
)
def test_function_calls_and_observations_of_sharegpt_are_tool_calls_and_tools(value: object) -> None:
    turns = [
        {"from": "human", "value": "Weather in Oslo?"},
        {"from": "function_call", "value": value},
        {"from": "observation", "value": "rain"},
        {"from": "gpt", "value": "It rains."},
    ]
    assert parsed({"conversations": turns})[1] == Conversation(
        (
            Turn(Role.USER, "Weather in Oslo?"),
            Turn(Role.ASSISTANT, "", {"tool_calls": [CALL]}),
            Turn(Role.TOOL, "rain"),
            Turn(Role.ASSISTANT, "It rains."),
        )
    )


def test_messages_and_sharegpt_may_swap_their_keys() -> None:
    expected = conversation(("user", "a"), ("assistant", "b"))
    swapped = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert parsed({"conversations": swapped})[1] == expected
    assert parsed({"messages": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]})[1] == expected


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "value": "Two "}, {"type": "text", "text": "parts.", "image": None}, " And this."]
    assert parsed({"messages": [{"role": "user", "content": parts}]})[1] == conversation(
        ("user", "Two parts. And this.")
    )


def test_a_prompt_and_a_completion_of_messages_are_a_conversation_whose_prompt_is_no_target() -> None:
    answer = {"role": "assistant", "content": "b"}
    record = {"prompt": [ASKED, answer, ASKED], "completion": [answer], "tools": [SCHEMA]}
    told = Turn(Role.USER, "Weather in Oslo?"), Turn(Role.ASSISTANT, "b")
    assert parsed(record) == ("prompt-completion", Conversation(told * 2, (SCHEMA,), num_prompt_turns=3))


SAID = {"role": "assistant", "content": "b"}


def test_a_column_that_decides_nothing_or_is_chosen_by_name_is_no_preference() -> None:
    pair = {"prompt": "a", "completion": "b"}
    for name, value in (("label", "chemistry"), ("label", None), ("rejected", None), ("rejected", ""), ("score", 3)):
        assert parsed({**pair, name: value})[1] == Completion("a", "b")
    assert parsed({"text": "a", "label": 1})[1] == Document("a")
    preference = {"prompt": "a", "chosen": "good", "rejected": "bad"}
    assert parsed(preference, {"completion": "chosen"})[1] == Completion("a", "good")
    assert parsed({**pair, **preference}, {"completion": "completion"})[1] == Completion("a", "b")
    assert parsed({"sentence": "fine", "label": "1"}, {"prompt": "sentence", "completion": "label"})[1] == Completion(
        "fine", "1"
    )


def test_a_message_says_whether_it_is_trained_on() -> None:
    def trained(**fields: object) -> bool:
        (_, sample) = parsed({"messages": [ASKED, {**SAID, **fields}]})
        assert isinstance(sample, Conversation)
        return sample.turns[1].is_trained

    for fields in ({"weight": 0}, {"weight": 0.0}, {"train": False}, {"loss": False}, {"weight": 0, "train": False}):
        assert not trained(**fields)
    for fields in ({}, {"weight": 1}, {"weight": None}, {"train": True}, {"weight": 1, "train": True}):
        assert trained(**fields)
    sharegpt = [{"from": "human", "value": "a", "weight": 0.0}, {"from": "gpt", "value": "b", "train": False}]
    (_, sample) = parsed({"conversations": sharegpt})
    assert isinstance(sample, Conversation)
    assert not sample.turns[1].is_trained
