import pytest

from mobius.data.formats import Completion, Conversation, Document, Role, Turn, parse_record, recognize
from mobius.errors import DataError


def parsed(record: dict[str, object]) -> tuple[str, object]:
    record_format = recognize(list(record), "here")
    return record_format.name, parse_record(record_format, record, "here")


def nested(depth: int) -> list[object]:
    inner: list[object] = []
    for _ in range(depth):
        inner = [inner]
    return inner


NESTED = nested(100_000)
"""Deeper than Python shows or compares."""


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
        recognize(["question", "answer"], "qa.jsonl, line 1")
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


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"prompt": "a", "completion": 3}, "`completion` must be text, not int"),
        ({"messages": "hello"}, "`messages` must be a list, not str"),
        ({"messages": [{"role": "user"}]}, "must have `role` and `content`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "`messages[0]`.content must be text, not list",
        ),
        ({"conversations": [{"from": "narrator", "value": "a"}]}, "'narrator'"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "`history` must hold [question, answer] pairs"),
        ({"text": b"bytes"}, "`text` must be text, not bytes"),
        ({"text": float("nan")}, "`text` must be text, not float"),
        ({"text": ["a"]}, "`text` must be text, not list"),
        ({"prompt": {"a": 1}, "completion": "b"}, "`prompt` must be text, not dict"),
        ({"messages": {"role": "user"}}, "`messages` must be a list, not dict"),
        ({"messages": b"bytes"}, "`messages` must be a list, not bytes"),
        ({"messages": [None]}, "must have `role` and `content`, not None"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "has the role ['user']"),
        ({"messages": [{"role": "user", "content": None}]}, "content must be text, not NoneType"),
        ({"messages": [NESTED]}, "must have `role` and `content`, not "),
        ({"messages": [{"role": NESTED, "content": "a"}]}, "has the role "),
        ({"messages": [{"role": "x" * 100_000, "content": "a"}]}, "has the role 'xxx"),
        ({"instruction": "a", "output": "b", "history": [NESTED]}, "pairs of text, not "),
        ({"text": "ok \ud83d"}, "`text` holds half of a character, '\\ud83d'"),
        ({"prompt": "a", "completion": "\udc00"}, "`completion` holds half of a character"),
        ({"document": "\ud800", "summary": "a"}, "`document` holds half of a character"),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, "`messages[0]`.content holds half of a character"),
        ({"instruction": "a", "output": "b", "history": [["a", "\ud800"]]}, "`history` holds half of a character"),
    ],
    ids=lambda value: value[:30].encode("ascii", "replace").decode() if isinstance(value, str) else "",
)
def test_a_wrong_value_is_named_with_its_place(record: dict[str, object], complaint: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_record(recognize(list(record), "here"), record, "train.jsonl, line 9")
    assert str(caught.value).startswith("train.jsonl, line 9: ")
    assert complaint in str(caught.value)
    assert len(str(caught.value)) < 400


def test_many_or_long_columns_are_not_all_listed() -> None:
    columns = ["x" * 100_000, *(f"column {number}" for number in range(5000))]
    with pytest.raises(DataError, match=r"and 4989 more match no known format") as caught:
        recognize(columns, "here")
    assert len(str(caught.value)) < 1500
    record_format = recognize(["text"], "line 1")
    with pytest.raises(DataError, match=r"and 4989 more") as caught:
        parse_record(record_format, dict.fromkeys(columns, ""), "line 2")
    assert len(str(caught.value)) < 1500


def test_a_later_record_without_the_columns_is_named() -> None:
    record_format = recognize(["prompt", "completion"], "line 1")
    with pytest.raises(DataError, match=r"line 2: the column completion is missing; found: prompt, answer"):
        parse_record(record_format, {"prompt": "a", "answer": "b"}, "line 2")
