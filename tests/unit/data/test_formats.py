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
from mobius.errors import DataError


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


def test_unknown_columns_are_named_with_the_formats_accepted() -> None:
    with pytest.raises(DataError) as caught:
        detect_format(["question", "answer"], "qa.jsonl, line 1")
    message = str(caught.value)
    assert "qa.jsonl, line 1" in message
    assert "answer, question" in message
    for accepted in (
        "instruction, output",
        "conversations",
        "messages",
        "prompt, completion",
        "document, summary",
        "text",
    ):
        assert accepted in message


WRONG_VALUES: list[dict[str, object]] = [
    {"prompt": "a", "completion": 3},
    {"prompt": {"a": 1}, "completion": "b"},
    {"text": b"bytes"},
    {"text": "ok \ud83d"},
    {"instruction": "a", "output": "b", "history": ["c"]},
    {"instruction": "a", "output": "b", "history": [["a", "\ud800"]]},
    {"conversations": [{"from": "narrator", "value": "a"}]},
    {"messages": "hello"},
    {"messages": {"role": "user"}},
    {"messages": [None]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": ["user"], "content": "a"}]},
]


@pytest.mark.parametrize("record", WRONG_VALUES, ids=range(len(WRONG_VALUES)))
def test_a_wrong_value_is_named_with_its_place(record: dict[str, object]) -> None:
    with pytest.raises(DataError) as caught:
        parse_record(detect_format(list(record), "here"), record, "train.jsonl, line 9")
    assert str(caught.value).startswith("train.jsonl, line 9: ")
    assert any(f"`{column}" in str(caught.value) for column in record)
    assert len(str(caught.value)) < 400


def test_many_or_long_columns_are_not_all_listed() -> None:
    columns = ["x" * 100_000, *(f"column {number}" for number in range(5000))]
    with pytest.raises(DataError, match=r"and 4989 more match no known format") as caught:
        detect_format(columns, "here")
    assert len(str(caught.value)) < 1500
    record_format = detect_format(["text"], "line 1")
    with pytest.raises(DataError, match=r"and 4989 more") as caught:
        parse_record(record_format, dict.fromkeys(columns, ""), "line 2")
    assert len(str(caught.value)) < 1500


def test_a_later_record_without_the_columns_is_named() -> None:
    record_format = detect_format(["prompt", "completion"], "line 1")
    with pytest.raises(DataError, match=r"line 2: the column completion is missing; found: prompt, answer"):
        parse_record(record_format, {"prompt": "a", "answer": "b"}, "line 2")


ASKED = {"role": "user", "content": "Weather in Oslo?"}
NO_TEXT = ("image", "image_url", "input_audio", "audio", "video")
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


def test_a_column_that_is_not_there_is_told_with_near_names_and_all_columns() -> None:
    with pytest.raises(DataError) as caught:
        detect_format(["documents", "summary", "id"], "train.csv", {"prompt": "document", "completion": "summary"})
    assert str(caught.value) == (
        "train.csv: --columns prompt=document,completion=summary: there is no column 'document' (did you mean "
        "documents?); found: documents, id, summary"
    )


def test_a_name_that_no_format_reads_is_told_with_near_names_and_all_that_are_read() -> None:
    with pytest.raises(DataError, match=r"'promt' is not read by any format \(did you mean prompt\?\); known are "):
        detect_format(["a", "b"], "here", {"promt": "a", "completion": "b"})


def test_a_mapping_that_no_format_reads_as_a_whole_is_told() -> None:
    with pytest.raises(DataError, match=r"columns a, b with --columns prompt=a,text=b match no known format"):
        detect_format(["a", "b"], "here", {"prompt": "a", "text": "b"})
    with pytest.raises(DataError, match=r"with --columns system=instruction match no known format"):
        detect_format(["instruction", "output"], "here", {"system": "instruction"})


def test_a_wrong_value_of_a_mapped_column_is_told_with_the_mapping() -> None:
    record_format = detect_format(["q", "a"], "line 1", {"prompt": "q", "completion": "a"})
    assert record_format.describe() == "prompt-completion (prompt=q, completion=a, [tools])"
    with pytest.raises(DataError, match=r"line 2: `prompt` must be text, not int \(--columns prompt=q,completion=a\)"):
        parse_record(record_format, {"q": 1, "a": "b"}, "line 2")
    with pytest.raises(DataError, match=r"line 3: the column q is missing; found: a"):
        parse_record(record_format, {"a": "b"}, "line 3")


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


def asked_with(**fields: object) -> dict[str, object]:
    return {"messages": [ASKED, {**ASKED, **fields}]}


@pytest.mark.parametrize(
    ("record", "place"),
    [
        *((asked_with(content=[{"type": "text", "text": "a"}, {"type": kind}]), "content[1]") for kind in NO_TEXT),
        ({"messages": [ASKED], "images": ["a.png"]}, "images"),
        ({"conversations": [], "image": "a.png"}, "image"),
        (asked_with(content=[3]), "content[0]"),
        (asked_with(content=[{"type": "text"}]), "content[0].text"),
        (asked_with(content={"a": 1}), "content"),
        (asked_with(name=3), "name"),
        (asked_with(content=None, tool_calls=[]), "content"),
        (asked_with(tool_calls=3), "tool_calls"),
        (asked_with(tool_calls=[3]), "tool_calls[0]"),
        (asked_with(tool_calls=[{"id": "x"}]), "tool_calls[0]"),
        (asked_with(tool_calls=[{"name": b"x"}]), "tool_calls[0]"),
        (asked_with(tool_calls=[{3: "x"}]), "tool_calls[0]"),
        ({"conversations": [{"from": "function_call", "value": "weather()"}]}, "`conversations[0]`.value"),
        ({"messages": [ASKED], "tools": "weather"}, "`tools`"),
        ({"messages": [ASKED], "tools": [["a"]]}, "`tools`[0]"),
        ({"messages": [ASKED], "tools": 7}, "`tools`"),
        ({"prompt": [ASKED], "completion": "b"}, "`prompt` and `completion`"),
        ({"prompt": "a", "completion": [ASKED]}, "`prompt` and `completion`"),
        ({"prompt": [ASKED], "completion": [{"role": "bot", "content": "b"}]}, "`completion[0]`"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_turn_or_tool_is_named_with_its_place(record: dict[str, object], place: str) -> None:
    with pytest.raises(DataError) as caught:
        parsed(record)
    assert str(caught.value).startswith("here: ")
    assert place in str(caught.value)
    assert len(str(caught.value)) < 400


SAID = {"role": "assistant", "content": "b"}
ANSWERED = [
    {"messages": [ASKED, SAID]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"instruction": "a", "output": "b"},
    {"prompt": "a", "completion": "b"},
    {"prompt": [ASKED], "completion": [SAID]},
]


@pytest.mark.parametrize("record", ANSWERED, ids=["messages", "sharegpt", "alpaca", "text pair", "message pair"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("label", False),
        ("label", True),
        ("label", 0),
        ("label", "False"),
        ("kto_tag", True),
        ("chosen", "good"),
        ("rejected", [SAID]),
        ("rejected_response", "bad"),
    ],
)
def test_preference_data_is_refused_by_the_name_of_its_column(
    record: dict[str, object], name: str, value: object
) -> None:
    with pytest.raises(DataError, match=rf"here: `{name}` .*DPO, KTO.* cannot train on yet.*--columns"):
        parsed({**record, name: value})


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
    with pytest.raises(DataError, match="`label` next to the answer"):
        parsed({"question": "a", "completion": "b", "label": False}, {"prompt": "question"})


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


@pytest.mark.parametrize(
    ("turn", "complaint"),
    [
        ({**SAID, "weight": 0.5}, "`messages[0]`.weight must be 0 (context only) or 1 (trained on), not 0.5"),
        ({**SAID, "weight": -1}, "weight must be 0"),
        ({**SAID, "weight": "0"}, "weight must be 0 (context only) or 1 (trained on), not '0'"),
        ({**SAID, "train": "no"}, "train must be 0"),
        ({**SAID, "weight": 0, "train": True}, "contradicts itself: weight is 0, train is True"),
        ({**ASKED, "weight": 1}, "`messages[0]`.weight is 1, and its role is user; only an assistant's"),
        ({**SAID, "train_detail": [{"begin_offset": 0}]}, "train_detail is not empty"),
    ],
)
def test_what_a_message_may_not_say_of_its_training_is_named(turn: dict[str, object], complaint: str) -> None:
    with pytest.raises(DataError) as caught:
        parsed({"messages": [turn]})
    assert complaint in str(caught.value)


def test_an_object_on_one_line_that_holds_the_records_is_told_from_a_record() -> None:
    with pytest.raises(DataError, match=r"here: an object with the key `train`, not a list of records\. Save"):
        detect_format({"train": [{"instruction": "a", "output": "b"}], "version": 1}, "here")
    for column in ([ASKED], [{"choice": "a"}], "train"):
        with pytest.raises(DataError, match="the columns dialog match no known format"):
            detect_format({"dialog": column}, "here")


def test_what_has_images_or_preferences_gets_no_advice_to_train_something_else() -> None:
    for record in ({"messages": [ASKED], "images": ["a.png"]}, {"messages": [ASKED], "rejected": "bad"}):
        with pytest.raises(DataError) as caught:
            parsed(record)
        assert "column" not in str(caught.value).replace("--columns", "")
