"""What cannot be trained on is refused in one short message, with its place and what to change: (input, message)."""

import gzip
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from transformers import PreTrainedTokenizerBase

from mobius.config.config import DatasetEntry, Packing
from mobius.data.chat_templates import BUILTIN_TEMPLATES, resolve_template
from mobius.data.datasets import PreparedData
from mobius.data.formats import detect_format, parse_record
from mobius.data.messages import Conversation, Role, Sample, Turn
from mobius.data.mixture import hold_out
from mobius.data.readers import find_reader
from mobius.data.sources import open_source
from mobius.data.tokenization import EncodingRules, SampleEncoder
from mobius.errors import DataError

WriteLines = Callable[..., Path]
Parts = str | tuple[str, ...]


def refusal(parts: Parts, act: Callable[..., object], *given: Any, **named: Any) -> str:
    """The message of a call, which has all `parts`."""
    with pytest.raises(DataError) as caught:
        act(*given, **named)
    text = str(caught.value)
    assert [part for part in ([parts] if isinstance(parts, str) else parts) if part not in text] == [], text
    return text


def read(path: Path) -> None:
    reader = find_reader(path)
    assert reader is not None
    for block in reader(path):
        list(block.records())


LINES = '{"text": "one"}\n'
FILES: list[tuple[str, str | bytes, str]] = [
    ("a.jsonl", f'{LINES}\n{{"text": "two"\n', "a.jsonl, line 3, column"),
    ("a.jsonl", f'{LINES}["two"]\n', "a.jsonl, line 2: a record must be a JSON object"),
    ("a.jsonl", "NaN\n", "a.jsonl, line 1: a record must be a JSON object with named columns, not float"),
    ("a.jsonl", "null\n", "a.jsonl, line 1: a record must be a JSON object with named columns, not NoneType"),
    ("a.jsonl", b'{"text": "\xff"}', "a.jsonl, line 1: is not UTF-8 text"),
    ("a.jsonl", LINES.encode() + b'\n{"text": "\xff"}\n', "a.jsonl, line 3: is not UTF-8 text"),
    ("a.jsonl", LINES.encode("utf-16"), "a.jsonl, line 1: is not UTF-8 text"),
    ("a.json", '[\n{"text": "one"},\n{"text" "two"}]', "a.json, line 3, column 9: broken JSON"),
    ("a.json", '["one"]', "a.json, record 0: a record must be a JSON object"),
    ("a.json", b'[\n{"text": "one"},\n{"text": "\xff"}]', "a.json, line 3: is not UTF-8 text"),
    ("a.json", '{\n "train": [{"text": "one"}]}', "an object with the key `train`, not a list of records. Save"),
    ("a.json", '{\n "text": "one"\n}', "a.json: one object over several lines, with the keys `text`, not a list"),
    ("a.json", '{\n "messages": [{"role": "user"}]\n}', "one object over several lines, with the keys `messages`"),
    ("a.json", '{\n "text": "one"', "a.json, line 1, column 1: broken JSON"),
    ("a.json.gz", gzip.compress(b'{\n"v": 1,\n"data": [{"a": 1}]}'), "an object with the key `data`, not a list"),
    ("a.csv", "text,more\none,1\ntwo\n", "a.csv, line 3: the row has more or fewer fields"),
    ("a.csv", 'a,b\n"1\n2",3\n\n4\n', "a.csv, line 5: the row has more or fewer fields than the header (a, b)"),
    ("a.csv", 'text\n"one"x\n', "a.csv, line 2: broken CSV"),
    ("a.csv", "text\n" + '"' + "x\n" * 50, "a.csv, line 51: broken CSV"),
    ("a.csv", b"text\none\ntwo\n\xe9\n", "a.csv, line 4: is not UTF-8 text"),
    ("a.txt", b"one\n\xff\n", "a.txt, line 2: is not UTF-8 text"),
    ("a.parquet", "no parquet", "a.parquet: cannot be read as Parquet"),
    ("a.parquet", b"PAR1" + bytes(100) + b"PAR1", "a.parquet: cannot be read as Parquet after 0 records"),
    ("a.parquet", b"", "a.parquet: cannot be read as Parquet after 0 records"),
    ("a.arrow", b"no arrow", "a.arrow: cannot be read as Arrow after 0 records"),
    ("a.arrow", b"ARROW1\0\0" + bytes(100), "a.arrow: cannot be read as Arrow after 0 records"),
    ("a.jsonl.gz", b"no gzip", "a.jsonl.gz: cannot be read"),
    ("a.jsonl.zst", b"no zstd", "a.jsonl.zst: cannot be read"),
    ("a.parquet.zst", b"no zstd", "a.parquet.zst: cannot be read as Parquet after 0 records"),
    ("a.jsonl.gz", gzip.compress(LINES.encode() * 3000)[:-9], "a.jsonl.gz: cannot be read"),
    ("a.jsonl.zst", pyarrow.compress(LINES.encode() * 3000, "zstd", asbytes=True)[:-9], "a.jsonl.zst: cannot be read"),
    (
        "a.jsonl.gz",
        gzip.compress(f'{LINES * 23_456}{{"text": "half\n{LINES * 6000}'.encode()),
        "a.jsonl.gz, line 23457, column 15: broken JSON: Invalid control character.",
    ),
]


@pytest.mark.parametrize(("name", "content", "told"), FILES)
def test_a_broken_file_is_named_with_the_line(tmp_path: Path, name: str, content: str | bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert len(refusal(told, read, tmp_path / name)) < 600 + len(str(tmp_path))


ASKED = {"role": "user", "content": "Weather in Oslo?"}
SAID = {"role": "assistant", "content": "b"}
PAIR = {"prompt": "a", "completion": "b"}
ALPACA = {"instruction": "a", "output": "b"}


def messages(*turns: object, **others: object) -> dict[str, object]:
    return {"messages": list(turns), **others}


def asked_with(**fields: object) -> dict[str, object]:
    return messages(ASKED, {**ASKED, **fields})


PREFERENCE = (
    "next to the answer: this is preference data. Train on it with --objective dpo (chosen and rejected) or "
    "--objective kto (a label)"
)
WEIGHT = "weight must be a number of at least 0 (0: context only; 1: trained on; 0.5: half as much), not "
RECORDS: list[tuple[Mapping[str, object], Parts]] = [
    (
        {"question": "", "answer": ""},
        (
            "the columns answer, question match no known format",
            *("messages (messages, [", "(conversations, [", "(instruction, output, [", "(prompt, completion, ["),
            *("(document, summary)", "text (text)"),
        ),
    ),
    ({"dialog": [ASKED]}, "the columns dialog match no known format"),
    ({"dialog": [{"choice": "a"}]}, "the columns dialog match no known format"),
    ({"dialog": "train"}, "the columns dialog match no known format"),
    ({"train": [ALPACA], "version": 1}, "here: an object with the key `train`, not a list of records. Save"),
    ({"prompt": "a", "completion": 3}, "`completion` must be text, not int"),
    ({"prompt": {"a": 1}, "completion": "b"}, "`prompt` must be text, not dict"),
    ({"prompt": [ASKED], "completion": "b"}, "`prompt` and `completion`"),
    ({"prompt": "a", "completion": [ASKED]}, "`prompt` and `completion`"),
    ({"prompt": [ASKED], "completion": [{"role": "bot", "content": "b"}]}, "`completion[0]`"),
    ({"text": b"bytes"}, "`text` must be text, not bytes"),
    ({"text": "ok \ud83d"}, "`text` holds half of a character, '\\ud83d', at position 3"),
    ({**ALPACA, "history": ["c"]}, "`history` must hold [question, answer] pairs"),
    ({**ALPACA, "history": [["a", "\ud800"]]}, "`history` holds half of a character"),
    ({"conversations": [{"from": "narrator", "value": "a"}]}, "`conversations[0]`"),
    ({"conversations": [{"from": "function_call", "value": "weather()"}]}, "`conversations[0]`.value"),
    ({"conversations": [], "audio": "a.wav"}, "`audio` is not empty"),
    ({"messages": "hello"}, "`messages` must be a list, not str"),
    ({"messages": {"role": "user"}}, "`messages` must be a list, not dict"),
    (messages(None), "`messages[0]` must have `role` and `content`"),
    (messages({"role": "user"}), "`messages[0]`"),
    (messages({"role": "user", "content": None}), "`messages[0]`"),
    (messages({"role": ["user"], "content": "a"}), "`messages[0]`"),
    (messages(ASKED, images=[{"bytes": b"a"}]), "`images` must be a list of paths of files"),
    (messages(ASKED, images=["a.png"], image="a.png"), "both `images` and `image`"),
    (asked_with(content=[{"type": "image", "url": "a.png"}]), "content[0] is an image with the key url"),
    (messages(ASKED, tools="weather"), "`tools`"),
    (messages(ASKED, tools=[["a"]]), "`tools`[0]"),
    (messages(ASKED, tools=7), "`tools`"),
    (messages(ASKED, tools=[{"name": "f"}], functions=[{"name": "f"}]), "both `tools` and `functions`"),
    *(
        (asked_with(content=[{"type": "text", "text": "a"}, {"type": kind}]), "content[1]")
        for kind in ("image", "image_url", "input_audio", "audio", "video")
    ),
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
    (
        messages(ASKED, {**SAID, "tool_calls": [{"name": "f"}], "function_call": {"name": "f"}}),
        "`messages[1]` has both `tool_calls` and `function_call`",
    ),
    (messages({**SAID, "weight": -0.5}), f"`messages[0]`.{WEIGHT}-0.5"),
    *(
        (messages({**SAID, "weight": float(value)}), f"`messages[0]`.{WEIGHT}{value}")
        for value in ("nan", "inf", "1e+39")
    ),
    *(
        ({**PAIR, "loss_weight": value}, "here: `loss_weight` must be a number of at least 0 (0: left out; 1: ")
        for value in (-1, float("nan"), "much", [1], "-2")
    ),
    (messages({**SAID, "weight": "0"}), f"{WEIGHT}'0'"),
    (messages({**SAID, "train": "no"}), "train must be 0"),
    (messages({**SAID, "weight": 0, "train": True}), "contradicts itself: weight is 0, train is True"),
    (messages({**ASKED, "weight": 1}), "`messages[0]`.weight is 1, and its role is user; only an assistant's"),
    (messages({**SAID, "train_detail": [{"begin_offset": 0}]}), "train_detail is not empty"),
    *(
        ({**record, "label": False}, f"here: `label` {PREFERENCE}")
        for record in (messages(ASKED, SAID), ALPACA, PAIR, {"prompt": [ASKED], "completion": [SAID]})
    ),
    ({"conversations": [{"from": "gpt", "value": "b"}], "kto_tag": True}, f"here: `kto_tag` {PREFERENCE}"),
    ({**PAIR, "label": 0}, f"here: `label` {PREFERENCE}"),
    ({**PAIR, "label": "False"}, f"here: `label` {PREFERENCE}"),
    ({**PAIR, "chosen": "good"}, f"here: `chosen` {PREFERENCE}"),
    ({**PAIR, "rejected": [SAID], "rejected_response": "bad"}, f"`rejected`, `rejected_response` {PREFERENCE}"),
]


def parse(record: Mapping[str, object], columns: Mapping[str, str] | None = None, **later: object) -> None:
    parse_record(detect_format(record, "here", columns), later or record, "here")


@pytest.mark.parametrize(("record", "told"), RECORDS, ids=range(len(RECORDS)))
def test_a_wrong_record_is_told_with_the_place_in_it(record: Mapping[str, object], told: Parts) -> None:
    text = refusal(told, parse, record)
    assert text.startswith("here: ")
    assert len(text) < (1000 if "known format" in text else 600)
    if "image" in text:
        assert "column" not in text, "no advice to train something else"


@pytest.mark.parametrize(
    ("record", "columns", "later", "told"),
    [
        (
            {"documents": "", "summary": "", "id": 1},
            {"prompt": "document", "completion": "summary"},
            {},
            "--columns prompt=document,completion=summary: there is no column 'document' (did you mean documents?); "
            "found: documents, id, summary",
        ),
        ({"a": "", "b": ""}, {"promt": "a"}, {}, "'promt' is not read by any format (did you mean prompt?); known are"),
        ({"a": "", "b": ""}, {"prompt": "a", "text": "b"}, {}, "columns a, b with --columns prompt=a,text=b match no"),
        (ALPACA, {"system": "instruction"}, {}, "with --columns system=instruction match no known format"),
        ({"q": 1, "a": "b"}, {"prompt": "q", "completion": "a"}, {}, "not int (--columns prompt=q,completion=a)"),
        ({"q": "a", "completion": "b", "label": False}, {"prompt": "q"}, {}, "`label` next to the answer"),
        ({"q": "", "a": ""}, {"prompt": "q", "completion": "a"}, {"a": "b"}, "the column q is missing; found: a"),
        (PAIR, None, {"prompt": "a", "answer": "b"}, "here: the column completion is missing; found: prompt, answer"),
        (dict.fromkeys(map(str, range(5000)), ""), None, {}, "and 4988 more match no known format"),
    ],
)
def test_columns_that_are_not_there_are_told_with_near_names(
    record: Mapping[str, object], columns: Mapping[str, str] | None, later: dict[str, object], told: str
) -> None:
    assert len(refusal(told, parse, record, columns, **later)) < 1500


ONE = Conversation((Turn(Role.SYSTEM, "Be brief."), Turn(Role.USER, "A colour?"), Turn(Role.ASSISTANT, "Red.")))
CALLED = Turn(Role.ASSISTANT, "", {"tool_calls": [{"function": {"name": "add", "arguments": '{"of": 2}'}}]})
CALL = {"name": "add", "arguments": '{"of": 2}'}
THINKING = Turn(Role.ASSISTANT, "4", {"reasoning_content": "2 + 2\n is 4"})
REFUSING = (
    "{{% for m in messages %}}{{% if loop.index == {} %}}{{{{ raise_exception('no') }}}}{{% endif %}}{{% endfor %}}"
)
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt }}"
)
BROKEN = ("here: the tokenizer's chat template is broken", "chat_template.jinja")


def talk(*turns: Turn, **fields: Any) -> Conversation:
    return Conversation((Turn(Role.USER, "a"), *turns), **fields)


SAMPLES: list[tuple[Sample, str | dict[str, str] | None, dict[str, Any], Parts]] = [
    (ONE, "{% for m in messages %}\n{{ m['content'] }", {}, (*BROKEN, "TemplateSyntaxError", "line 2 of the template")),
    (ONE, "\n{{ nonsense() }}", {}, (*BROKEN, "'nonsense' is undefined", "line 2 of the template")),
    (ONE, "{{ messages[0].tools.name }}", {}, (*BROKEN, "has no attribute 'tools'", "line 1 of the template")),
    (ONE, "{{ messages.__class__.__mro__ }}", {}, (*BROKEN, "SecurityError")),
    (ONE, "{% break %}", {}, (*BROKEN, "SyntaxError: 'break' outside loop", ". The conversation is not")),
    (ONE, {"tools": "{{ 1 }}"}, {}, (*BROKEN, "ValueError")),
    (ONE, PLAIN, {"chat_template": "{% for %}"}, "the template of --chat_template is broken: TemplateSyntaxError"),
    (
        ONE,
        "{{ messages | length }} {{ messages[-1].content | length }} {{ messages[-1].content }}",
        {},
        ("here: ", "prompt and target cannot be told apart"),
    ),
    (ONE, REFUSING.format(1), {}, ("(system, user, assistant): no. Change the order", "from turn 1 on, system")),
    (ONE, REFUSING.format(3), {}, "from turn 3 on, assistant"),
    (Conversation(ONE.turns * 1000), "{{ raise_exception('no ' * 10000) }}", {}, "refuses the conversation"),
    (
        ONE,
        "{% for m in messages %}\n{% if loop.index == 3 %}{{ m.nothing.at_all }}{% endif %}{% endfor %}",
        {},
        "here: the tokenizer's chat template fails on turn 3, assistant, of the conversation (system, user, "
        "assistant): UndefinedError: 'dict object' has no attribute 'nothing' (line 2 of the template). It renders the "
        "turns before: change that turn, or correct the template",
    ),
    (
        talk(CALLED),
        PLAIN.replace("m.content", "m.content ~ (m.tool_calls[0].function.arguments + 1 if m.tool_calls)"),
        {},
        ("fails on turn 2, assistant, of the", 'TypeError: can only concatenate str (not "int")'),
    ),
    (talk(CALLED), PLAIN, {}, "here: the chat template leaves out the tool calls of turn 2 (add)"),
    (talk(CALLED), None, {}, "here: the tokenizer has no chat template, so tool calls cannot be written"),
    (
        talk(Turn(Role.ASSISTANT, "", CALLED.fields, weight=0), Turn(Role.TOOL, "5"), Turn(Role.ASSISTANT, "5")),
        PLAIN,
        {},
        "here: the chat template leaves out the tool calls of turn 2 (add)",
    ),
    *(
        (talk(Turn(Role.ASSISTANT, "I add.", {"actions": value})), PLAIN, {}, "the key 'actions' of turn 2, a call")
        for value in (CALL, [CALL], json.dumps(CALL), {"calls": [{"function": CALL}]})
    ),
    *(
        (talk(Turn(Role.ASSISTANT, "4", {name: "4"})), PLAIN, {}, "here: the chat template leaves out the reasoning of")
        for name in ("reasoning_content", "reasoning", "thinking", "thoughts")
    ),
    (talk(THINKING), None, {}, ("here: ", "reasoning cannot be written")),
    (
        talk(THINKING),
        PLAIN.replace("m.content", "m.reasoning_content | default('') | replace('\n', '\n> ') ~ m.content"),
        {},
        "leaves out the reasoning",
    ),
    (
        talk(Turn(Role.ASSISTANT, "b", weight=0), Turn(Role.USER, "c"), Turn(Role.ASSISTANT, "d")),
        PLAIN,
        {"train_on_prompt": True},
        ("here: an answer is excluded from training", "--train_on_prompt"),
    ),
    *(
        (
            talk(Turn(Role.USER, "b"), Turn(Role.ASSISTANT, "c")),
            template,
            {},
            ("user and assistant must take turns", "from turn 2 on, user"),
        )
        for name, template in BUILTIN_TEMPLATES.items()
        if name not in ("chatml", "llama3", "phi3")
    ),
]


@pytest.mark.parametrize(("sample", "template", "rules", "told"), SAMPLES, ids=range(len(SAMPLES)))
def test_a_sample_that_a_template_cannot_write_is_told_with_its_turn(
    tokenizer: PreTrainedTokenizerBase,
    sample: Sample,
    template: str | dict[str, str] | None,
    rules: dict[str, Any],
    told: Parts,
) -> None:
    tokenizer.chat_template = template
    encoder = SampleEncoder(tokenizer, seq_length=64, rules=EncodingRules(**rules))
    text = refusal(told, encoder.encode, sample, "here")
    assert len(text) < 1000
    assert ("Change the order" in text) == ("refuses the conversation" in text)
    if "'break'" in text:
        assert "of the template)" not in text, "jinja knows only the line of the code that it made"


def test_a_tokenizer_without_an_end_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.eos_token = None
    refusal("no end-of-sequence token", SampleEncoder, tokenizer, seq_length=8)


TEMPLATE_FILES = {"empty.jinja": b"", "blank.jinja": b" \n", "other.jinja": b"\xff\xfe{"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("chatlm", "--chat_template chatlm: neither a built-in template (did you mean chatml?) nor a file"),
        ("Llama-3", "(did you mean llama3"),
        ("missing.jinja", "(No such file or directory). Give a Jinja file, or one of alpaca, chatml, gemma, "),
        ("", "Is a directory"),
        ("a\0b", "null byte"),
        ("empty.jinja", "the file is empty"),
        ("blank.jinja", "the file is empty"),
        ("other.jinja", "not text in UTF-8"),
    ],
)
def test_a_template_that_is_none_is_told(
    given: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in TEMPLATE_FILES.items():
        Path(name).write_bytes(content)
    assert len(refusal(told, resolve_template, given)) < 400


SOURCES: list[tuple[dict[str, Any], str]] = [
    *(({"name": name}, "--dataset") for name in ("x" * 300, "a\0b", "~nosuchuser/a.jsonl", "a b", "--")),
    ({"name": "pipe.jsonl"}, "is neither a file nor a folder"),
    ({"name": "/dev/zero"}, "is neither a file nor a folder"),
    ({"name": "data/gone.jsonl"}, "--dataset data/gone.jsonl: there is no file or folder {here}/data/gone.jsonl"),
    ({"name": "chat.jsonl"}, "{here}/chat.jsonl (did you mean chats.jsonl?)"),
    ({"name": "nothing_like_it.csv"}, "/nothing_like_it.csv. Give"),
    ({"name": "page.html"}, "files of the kind '.html' cannot be read"),
    ({"name": "none"}, "no data files in {here}/none; looked for .json, .jsonl, .csv, .parquet"),
    ({"name": "chats.jsonl", "split": "test"}, "chats.jsonl: split test is for folders and datasets of the hub"),
    ({"name": "chats.jsonl", "subset": "en"}, "subset en is for datasets of the Hugging Face Hub"),
    ({"name": "held", "subset": "en"}, "subset en is for datasets of the Hugging Face Hub"),
    ({"name": "held"}, "no file that a run could be trained on in {here}/held"),
    ({"name": "held", "split": "missing"}, "no file of the split missing in {here}/held"),
    ({"name": "saved"}, "state.json: does not list the files of a dataset"),
    ({"name": "splits", "split": "dev"}, "has no split dev; it has test, train"),
]


@pytest.mark.parametrize(("entry", "told"), SOURCES, ids=range(len(SOURCES)))
def test_a_dataset_that_is_not_there_is_told_with_what_is(
    entry: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.jsonl")
    names = "chats.jsonl page.html held/test.jsonl held/validation.jsonl none/README.md splits/dataset_dict.json"
    for name in (*names.split(), "splits/train/state.json", "splits/test/state.json", "saved/state.json"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}")
    refusal(told.format(here=tmp_path), open_source, DatasetEntry(**entry))


OPTIONS: dict[str, Any] = {
    "chat_template": "chatml",
    "default_system": "Be brief.",
    "mask_history": True,
    "train_on_prompt": True,
    "packing": Packing.JOINED,
}
TEXT = {"text": "one two"}
CHAT = messages(ASKED, SAID)
PREPARED: list[tuple[list[Mapping[str, object]], dict[str, Any], str]] = [
    ([], {}, "/train.jsonl: the dataset is empty"),
    ([{"text": ""}, {"text": " "}], {}, "no record has a token to train on (2 records read, 0 kept"),
    ([{"prompt": "a", "completion": ""}], {}, "1 dropped (1 without an answer)"),
    ([{"question": "a"}], {}, "the columns question match no known format"),
    ([PAIR], {"seq_length": 1}, "--seq_length 1 leaves room"),
    ([PAIR], {"eval_dataset": (DatasetEntry("gone.jsonl"),)}, "--eval_dataset gone.jsonl: there is no file"),
    ([PAIR], {"eval_dataset": (DatasetEntry("empty.jsonl"),)}, "--eval_dataset empty.jsonl: the dataset is empty"),
    ([PAIR], {"cache_dir": Path("empty.jsonl")}, "cannot keep the tokenized dataset in empty.jsonl/tokenized"),
    *(([record], {name: OPTIONS[name]}, f"`--{name}") for name in [*OPTIONS][:3] for record in (PAIR, TEXT)),
    ([TEXT], {"train_on_prompt": True}, "`--train_on_prompt` has no effect"),
    *(([record], {"packing": Packing.JOINED}, "`--packing joined` has no effect") for record in (CHAT, ALPACA, PAIR)),
]


@pytest.mark.parametrize(("records", "options", "told"), PREPARED, ids=range(len(PREPARED)))
def test_data_without_anything_to_train_on_or_for_an_option_are_refused(
    prepare_all: Callable[..., PreparedData],
    write_lines: WriteLines,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    records: list[Mapping[str, object]],
    options: dict[str, Any],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    text = refusal(told, prepare_all, write_lines(records), **options)
    if "no file" in text or "no effect" in text:
        assert not (tmp_path / "cache").exists(), "told before anything is tokenized"


@pytest.mark.parametrize(
    ("name", "record"),
    [
        *(
            (name, record)
            for name in [*OPTIONS][:4]
            for record in (CHAT, ALPACA, {"prompt": [ASKED], "completion": [SAID]})
        ),
        ("train_on_prompt", PAIR),
        ("packing", TEXT),
    ],
)
def test_an_option_is_taken_with_a_format_that_it_acts_on(
    prepare_all: Callable[..., PreparedData], write_lines: WriteLines, name: str, record: Mapping[str, object]
) -> None:
    prepare_all(write_lines([record, record]), **{name: OPTIONS[name]})


@pytest.mark.parametrize(
    ("numbers", "val_size", "told"),
    [
        *(([100, 50], size, ("--val_size", "of 150 samples", "largest allowed is 149")) for size in (150, 1e9, 0.9999)),
        ([1], 0.5, ("--val_size 0.5 holds 1 of 1 samples", "more data")),
        ([100], 2.5, "--val_size 2.5: give a whole number"),
    ],
)
def test_too_many_samples_to_hold_out_are_refused(numbers: list[int], val_size: float, told: Parts) -> None:
    refusal(told, hold_out, np.array(numbers).tolist(), val_size, 42)
