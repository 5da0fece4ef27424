"""Whatever a record's messages hold and its rows do not is told to the user, with its number of records."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.samples import row_of
from transformers import PreTrainedTokenizerBase

from mobius.data.chat_templates import BUILTIN_TEMPLATES, ChatRenderer
from mobius.data.datasets import PreparedDataset
from mobius.data.formats import detect_format, parse_record
from mobius.data.left_out import NOTHING, LeftOut
from mobius.data.tokenization import EncodedSample, EncodingNote, EncodingRules, SampleEncoder

END = "{{ '[A] ' if add_generation_prompt }}"
TURN = (
    "{{ '[' + m.role + '] ' + m.content + eos_token + '\n' if m.role == 'user' else '[A] ' + m.content + eos_token }}"
)
NO_SYSTEM = "{% for m in messages if m.role in ('user', 'assistant') %}" + TURN + "{% endfor %}" + END
FIRST_SYSTEM = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}" + NO_SYSTEM
CUT_THOUGHTS = (
    "{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}{% else %}<A>"
    "{{ m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{{ '<A><think>\n' if add_generation_prompt }}"
)
LAST_THOUGHTS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content if loop.last else m.content.split('</think>')[-1].strip() }}"
    "{{ eos_token }}{% endfor %}{{ '[assistant]' if add_generation_prompt }}"
)
CALLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or () %}<call>{{ c.function.name }} {{ c.function.arguments }}</call>{% endfor %}"
    "{{ eos_token }}{% endfor %}{{ '[assistant]' if add_generation_prompt }}"
)


def said(*turns: str, **fields: object) -> list[dict[str, object]]:
    """Messages by the first letter of their role; `fields` are further keys of the last one."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages: list[dict[str, object]] = [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]
    return [*messages[:-1], {**messages[-1], **fields}]


def encode(
    tokenizer: PreTrainedTokenizerBase, messages: object, template: str | None = None, **record: Any
) -> EncodedSample:
    rules = EncodingRules(chat_template=template, **{k: record.pop(k) for k in ("default_system",) if k in record})
    record = {"messages": messages, **record}
    sample = parse_record(detect_format(list(record), "here"), record, "here")
    return SampleEncoder(tokenizer, seq_length=1024, rules=rules).encode(sample, "here")


@pytest.mark.parametrize(
    ("messages", "template", "kinds"),
    [
        (said("s:Speak like a sailor.", "u:2+3?", "a:Five, matey."), NO_SYSTEM, {"system messages"}),
        (said("s:5", "u:2+3?", "a:5"), NO_SYSTEM, {"system messages"}),
        (said("s:Be brief, and be kind to everyone who asks.", "u:2?", "a:2"), FIRST_SYSTEM, set()),
        (said("s:Sail.", "u:2+3?", "a:Five.", "s:Judge.", "u:1?", "a:1."), FIRST_SYSTEM, {"system messages"}),
        (said("s:Sail.", "u:2+3?", "a:Five.", "s:Sail.", "u:1?", "a:1."), FIRST_SYSTEM, {"system messages"}),
        (said("u:2+3?", "a:I add.", "t:5", "a:5"), NO_SYSTEM, {"results of tools"}),
        (said("u:u", "a:a", "u:[A]", "a:a"), NO_SYSTEM, set()),
        (said("u:a", "u:a", "a:a"), NO_SYSTEM.replace("messages if", "messages[1:] if"), {"user messages"}),
        (said("u: 2 +\n 3 ? ", "a:\nFive.\n"), NO_SYSTEM.replace("m.content", "m.content | trim"), set()),
        (said("s:a", "u:b", "a:c"), "{{ messages[0].role }}" + NO_SYSTEM, {"system messages"}),
    ],
)
def test_turns_that_a_template_has_no_branch_for_are_found_by_their_role(
    tokenizer: PreTrainedTokenizerBase, messages: object, template: str, kinds: set[str]
) -> None:
    assert encode(tokenizer, messages, template).left_out == LeftOut(kinds=frozenset(kinds))


def test_a_default_system_message_that_is_never_written_is_found(tokenizer: PreTrainedTokenizerBase) -> None:
    asked = said("u:2+3?", "a:Five.")
    found = encode(tokenizer, asked, NO_SYSTEM, default_system="Speak like a sailor.").left_out
    assert found.kinds == {"the system message of --default_system"}
    assert encode(tokenizer, asked, FIRST_SYSTEM, default_system="Sail.").left_out == NOTHING
    assert encode(tokenizer, said("s:Own.", "u:2?", "a:2"), NO_SYSTEM, default_system="Sail.").left_out.kinds == {
        "system messages"
    }


THOUGHT, ANSWER = "<think>\nadd two and three\n</think>", "\n\nFive."


def test_targets_that_lose_their_thoughts_are_counted_with_their_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    lost = count(THOUGHT + ANSWER) - count(ANSWER)
    assert lost > 10
    once = said("u:2+3?", f"a:{THOUGHT}{ANSWER}")
    twice = once + once
    for messages in (once, twice):
        found = encode(tokenizer, messages, CUT_THOUGHTS)
        assert found.left_out == LeftOut(lost_tokens=(lost,) * (len(messages) // 2))
        assert encode(tokenizer, messages, LAST_THOUGHTS).left_out == NOTHING, "each is a target of its own"
    context = [once[0], {**once[1], "weight": 0}, *said("u:And?", "a:Six.")]
    assert encode(tokenizer, context, LAST_THOUGHTS).left_out.kinds == {"parts of answers that are context only"}


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_a_template_that_writes_everything_is_not_accused(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    for texts in (("u:2+3?", "a:5"), ("s:a", "u:a", "a:a", "u:a", "a:a"), ("s: Be \n", "u:\tq\n\n", "a: 'x' \"y\"é\n")):
        assert encode(tokenizer, said(*texts), BUILTIN_TEMPLATES[name]).left_out == NOTHING


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}[{{ m.role }}]{{ m.content | tojson }}{{ eos_token }}{% endfor %}",
        # Mistral's own: the system message is in the last question.
        "{% for m in messages[1:] %}[{{ m.role }}]{{ messages[0].content if loop.revindex0 == 1 }}{{ m.content }}"
        "{{ eos_token }}{% endfor %}",
        "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
        "{% endif %}{% endfor %}{{ eos_token }}{% endfor %}",
        "{% for m in messages %}[{{ m.role }}]{{ m.content | replace('\n', ' ') }}{{ eos_token }}{% endfor %}",
    ],
    ids=["as JSON", "another order", "content parts", "white space"],
)
def test_a_template_that_writes_texts_otherwise_is_not_accused(
    tokenizer: PreTrainedTokenizerBase, template: str
) -> None:
    messages = said('s:Say "é",\n or what.', "u:It is 2,\nor 3?", 'a:"Five", I\nthink.')
    assert encode(tokenizer, messages, template + "{{ '[assistant]' if add_generation_prompt }}").left_out == NOTHING


CALL = {"name": "add", "arguments": '{"of": [2, null]}'}


@pytest.mark.parametrize("content", [{"content": "I add."}, {"content": ""}, {"content": None}, {}])
def test_a_former_function_call_is_a_tool_call(tokenizer: PreTrainedTokenizerBase, content: dict[str, object]) -> None:
    former = [{"role": "user", "content": "2+3?"}, {"role": "assistant", **content, "function_call": CALL}]
    newer = [former[0], {"role": "assistant", **content, "tool_calls": [{"type": "function", "function": CALL}]}]
    ids, is_target = row_of(*encode(tokenizer, former, CALLS).rows)
    assert ids.tolist() == encode(tokenizer, newer, CALLS).rows[0].input_ids.tolist()
    target = tokenizer.decode(ids[is_target].tolist())
    assert target == f'{content.get("content") or ""}<call>add {{"of": [2, null]}}</call><|im_end|>'


def test_former_functions_are_tools(tokenizer: PreTrainedTokenizerBase) -> None:
    schema = {"name": "add", "parameters": {"type": "object", "default": None}}
    chatml, asked = BUILTIN_TEMPLATES["chatml"], said("u:2+3?", "a:Five.")
    for functions in ([schema], json.dumps([schema])):
        former = encode(tokenizer, asked, chatml, functions=functions)
        newer = encode(tokenizer, asked, chatml, tools=[{"type": "function", "function": schema}])
        assert former.rows[0].input_ids.tolist() == newer.rows[0].input_ids.tolist()
        assert '"default": null' in tokenizer.decode(former.rows[0].input_ids.tolist())


def test_tools_are_missed_though_a_message_has_a_word_of_their_name(tokenizer: PreTrainedTokenizerBase) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    asked = said("u:Please add 2 and 3.", "a:Five.")
    assert encode(tokenizer, asked, NO_SYSTEM, tools=[tool]).notes == {EncodingNote.NO_TOOLS}
    assert not encode(tokenizer, asked, BUILTIN_TEMPLATES["chatml"], tools=[tool]).notes


def test_calls_may_be_written_from_any_key_and_of_context(tokenizer: PreTrainedTokenizerBase) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": CALL}], "weight": 0}
    messages = [*said("u:2+3?"), call, *said("t:5", "a:Five.")]
    assert encode(tokenizer, messages, CALLS).left_out == NOTHING
    messages = said("u:2+3?", "a:I add.", actions=CALL)
    written = encode(
        tokenizer, messages, NO_SYSTEM.replace("m.content", "m.content + ' ' + (m.actions or '') | string")
    )
    assert written.left_out == NOTHING


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking", "thoughts"])
def test_thoughts_of_context_are_told(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    thinking = said("u:2+3?", "a:5", **{name: "5"})
    context = [thinking[0], {**thinking[1], "train": False}, *said("u:And?", "a:5")]
    assert encode(tokenizer, context, NO_SYSTEM).left_out == LeftOut(fields=frozenset({(1, name)}))


def test_other_keys_reach_the_template_or_are_told(tokenizer: PreTrainedTokenizerBase) -> None:
    keys: dict[str, object] = {
        "plan": "5",
        "steps": [{"do": "add"}],
        "id": 7,
        "is_good": True,
        "note": None,
        "tags": [],
    }
    messages = said("u:2+3?", "a:5", **keys, name="bob", tool_call_id="c1", weight=1)
    assert encode(tokenizer, messages, NO_SYSTEM).left_out == LeftOut(fields=frozenset({(1, "plan"), (1, "steps")}))
    written = NO_SYSTEM.replace("m.content", "m.content + (m.plan or '') + ((m.steps or '') | string)")
    assert encode(tokenizer, messages, written).left_out == NOTHING
    tokenizer.chat_template = None
    assert encode(tokenizer, messages).left_out == LeftOut(fields=frozenset({(1, "plan"), (1, "steps")}))


def test_messages_after_the_last_answer_are_told(tokenizer: PreTrainedTokenizerBase) -> None:
    longer = said("u:2+3?", "a:5", "u:And 2?")
    assert encode(tokenizer, longer).notes == {EncodingNote.UNUSED_END}
    assert encode(tokenizer, [*longer, {"role": "assistant", "content": "7", "weight": 0}]).notes == {
        EncodingNote.UNUSED_END
    }
    assert not encode(tokenizer, longer[:2]).notes


def test_conversations_of_one_shape_are_rendered_with_marks_once(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = list[int]()
    find = ChatRenderer.find_written
    monkeypatch.setattr(ChatRenderer, "find_written", lambda *given: numbers.append(1) or find(*given))
    encoder = SampleEncoder(tokenizer, seq_length=64)
    for number in range(9):
        record = {"messages": said(f"u:{number}+3?", f"a:{number + 3}")}
        assert encoder.encode(parse_record(detect_format(["messages"], ""), record, ""), "").left_out == NOTHING
    assert len(numbers) == 1


def test_a_dataset_names_what_its_rows_lack_with_the_number_of_records(
    prepare: Callable[..., PreparedDataset], write_lines: Callable[..., Path], tmp_path: Path
) -> None:
    def warnings(template: str, *conversations: object, **options: object) -> tuple[str, ...]:
        (tmp_path / "a.jinja").write_text(template)
        data = write_lines([{"messages": messages} for messages in conversations])
        return prepare(data, chat_template=str(tmp_path / "a.jinja"), **options).warnings

    plain, system = said("u:2+3?", "a:5"), said("s:Sail.", "u:2+3?", "a:5")
    assert warnings(NO_SYSTEM, plain, plain) == ()
    assert warnings(NO_SYSTEM, plain, system, system) == (
        "2 of 3 records: the chat template leaves out system messages, which the model never sees",
    )
    default = "2 of 2 records: the chat template leaves out the system message of --default_system, which the model"
    assert warnings(NO_SYSTEM, plain, plain, default_system="Sail.") == (f"{default} never sees",)
    assert warnings(NO_SYSTEM, plain, said("u:2+3?", "a:5", plan="x", id="1"), said("u:2?", "a:2", plan="x")) == (
        "no row holds what these keys of messages say, as the chat template does not write them: 'id' (1 records), "
        "'plan' (2 records)",
    )
    thinking = said("u:2+3?", f"a:{THOUGHT}{ANSWER}", "u:2+3?", f"a:{THOUGHT}{ANSWER}")
    told = warnings(CUT_THOUGHTS, plain, thinking)
    assert told[0].startswith(
        "1 of 2 records: the chat template leaves out parts of answers (thoughts, for example): 2 targets lose "
    )
