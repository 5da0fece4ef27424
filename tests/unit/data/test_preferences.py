"""Pairs and answers with labels: their formats, their sequences, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from mobius.config.config import DatasetEntry, Packing
from mobius.data.datasets import PreparedData, PreparedDataset
from mobius.data.formats import detect_format, parse_record
from mobius.data.messages import Completion, Conversation, Role, Turn, Unit
from mobius.data.token_store import TokenizedSample
from mobius.errors import DataError

PrepareAll = Callable[..., PreparedData]
WriteLines = Callable[..., Path]
Record = Mapping[str, Any]


def said(*texts: str) -> list[dict[str, object]]:
    """Messages of texts such as "u:question"."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[text[0]], "content": text[2:]} for text in texts]


def share(*texts: str) -> list[dict[str, object]]:
    """The same with the names of ShareGPT."""
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    return [{"from": names[str(each["role"])], "value": each["content"]} for each in said(*texts)]


def talk(*texts: str, prompt: int) -> Conversation:
    turns = tuple(Turn(Role(str(each["role"])), str(each["content"])) for each in said(*texts))
    return Conversation(turns, num_prompt_turns=prompt)


GOOD, BAD = talk("u:2+2?", "a:4", prompt=1), talk("u:2+2?", "a:5", prompt=1)
LONG = [talk("s:Brief.", "u:hi", "a:hello", "u:2+2?", f"a:{answer}", prompt=4) for answer in ("4", "5")]
PAIRS: list[tuple[str, Record, tuple[Any, Any]]] = [
    (
        "prompt-pairs",
        {"prompt": "2+2=", "chosen": " 4", "rejected": " 5"},
        (Completion("2+2=", " 4"), Completion("2+2=", " 5")),
    ),
    ("prompt-pairs", {"prompt": said("u:2+2?"), "chosen": said("a:4"), "rejected": said("a:5")}, (GOOD, BAD)),
    ("prompt-pairs", {"prompt": said("u:2+2?"), "chosen": said("a:4")[0], "rejected": said("a:5")[0]}, (GOOD, BAD)),
    # UltraFeedback: the prompt as text, and again in whole conversations
    (
        "prompt-pairs",
        {
            "prompt": "2+2?",
            "chosen": said("u:2+2?", "a:4"),
            "rejected": said("u:2+2?", "a:5"),
            "messages": said("u:2+2?", "a:4"),
            "score_chosen": 9.0,
        },
        (GOOD, BAD),
    ),
    ("prompt-pairs", {"prompt": "2+2?", "chosen": said("a:4"), "rejected": said("a:5")}, (GOOD, BAD)),
    ("pairs", {"chosen": said("u:2+2?", "a:4"), "rejected": said("u:2+2?", "a:5")}, (GOOD, BAD)),
    (
        "pairs",
        {"chosen": "Human: 2+2? Assistant: 4, sir", "rejected": "Human: 2+2? Assistant: 5, sir"},
        (Completion("Human: 2+2? Assistant:", " 4, sir"), Completion("Human: 2+2? Assistant:", " 5, sir")),
    ),
    (
        "pairs",
        {
            "chosen": said("s:Brief.", "u:hi", "a:hello", "u:2+2?", "a:4"),
            "rejected": said("s:Brief.", "u:hi", "a:hello", "u:2+2?", "a:5"),
        },
        tuple(LONG),
    ),
    # LLaMA-Factory
    ("alpaca-pairs", {"instruction": "2+2?", "input": "", "chosen": "4", "rejected": "5"}, (GOOD, BAD)),
    (
        "alpaca-pairs",
        {"instruction": "2+2?", "system": "Brief.", "history": [["hi", "hello"]], "chosen": "4", "rejected": "5"},
        tuple(LONG),
    ),
    (
        "sharegpt-pairs",
        {"conversations": share("u:2+2?"), "chosen": share("a:4")[0], "rejected": share("a:5")[0]},
        (GOOD, BAD),
    ),
    (
        "sharegpt-pairs",
        {
            "conversations": share("u:hi", "a:hello", "u:2+2?"),
            "system": "Brief.",
            "chosen": share("a:4"),
            "rejected": share("a:5"),
        },
        tuple(LONG),
    ),
    ("messages-pairs", {"messages": said("u:2+2?"), "chosen": said("a:4")[0], "rejected": said("a:5")}, (GOOD, BAD)),
]


@pytest.mark.parametrize(("name", "record", "sides"), PAIRS, ids=range(len(PAIRS)))
def test_a_pair_is_read_from_each_format(name: str, record: Record, sides: tuple[Any, Any]) -> None:
    record_format = detect_format(record, "here", kind="pairs")
    found = parse_record(record_format, record, "here")
    assert (record_format.name, found) == (name, Unit(sides))
    for margin in (0.5, -2, "0.5"):
        with_margin = parse_record(record_format, {**record, "margin": margin}, "here")
        assert with_margin == Unit(sides, {"margin": (float(margin),) * 2})
    assert parse_record(record_format, {**record, "margin": None}, "here") == Unit(sides)


def test_columns_of_pairs_are_mapped() -> None:
    record = {"q": "2+2=", "good": " 4", "bad": " 5", "by": 3}
    mapping = {"prompt": "q", "chosen": "good", "rejected": "bad", "margin": "by"}
    unit = parse_record(detect_format(record, "here", mapping, "pairs"), record, "here")
    assert unit == Unit((Completion("2+2=", " 4"), Completion("2+2=", " 5")), {"margin": (3.0, 3.0)})


JUDGED: list[tuple[str, Record, Any]] = [
    ("prompt-completion", {"prompt": "2+2=", "completion": " 4"}, Completion("2+2=", " 4")),
    ("prompt-completion", {"prompt": said("u:2+2?"), "completion": said("a:4")}, GOOD),
    ("messages", {"messages": said("u:2+2?", "a:4")}, GOOD),
    ("messages", {"messages": said("s:Brief.", "u:hi", "a:hello", "u:2+2?", "a:4")}, LONG[0]),
    ("sharegpt", {"conversations": share("u:2+2?", "a:4")}, GOOD),
    ("alpaca", {"instruction": "2+2?", "input": "", "output": "4"}, GOOD),
]


@pytest.mark.parametrize(("name", "record", "sample"), JUDGED, ids=range(len(JUDGED)))
@pytest.mark.parametrize("verdict", ["label", "kto_tag"])
def test_a_judged_answer_is_read_from_each_format(name: str, record: Record, sample: Any, verdict: str) -> None:
    record_format = detect_format([*record, verdict], "here", kind="judged")
    assert record_format.name == f"{name} with {verdict}"
    for value, label in ((True, 1), (False, 0), (1, 1), (0, 0), ("True", 1), ("false", 0), ("1", 1), (0.0, 0)):
        found = parse_record(record_format, {**record, verdict: value}, "here")
        assert found == Unit((sample,), {"label": (float(label),)})


TEXTS = {"prompt": "2+2=", "chosen": " 4", "rejected": " 5"}
CHAT = {"prompt": said("u:2+2?"), "chosen": said("a:4"), "rejected": said("a:5")}
REFUSED: list[tuple[str, Record, str]] = [
    ("pairs", {**TEXTS, "rejected": " 4"}, "`chosen` and `rejected` are equal, so the pair prefers neither"),
    ("pairs", {**CHAT, "rejected": said("a:4")}, "`chosen` and `rejected` are equal"),
    ("pairs", {"chosen": said("u:a", "a:b"), "rejected": said("u:a", "a:b")}, "`chosen` and `rejected` are equal"),
    ("pairs", {"chosen": "a b", "rejected": "a b"}, "`chosen` and `rejected` are equal"),
    ("pairs", {**TEXTS, "rejected": " \n"}, "`rejected` is empty: there is no answer to learn from"),
    ("pairs", {**TEXTS, "chosen": None}, "`chosen` is empty"),
    ("pairs", {**CHAT, "chosen": []}, "`chosen` is empty"),
    ("pairs", {**CHAT, "chosen": said("u:4")}, "`chosen` is empty"),
    ("pairs", {"chosen": said("u:a", "a:b"), "rejected": said("u:a")}, "`rejected` is empty"),
    ("pairs", {"chosen": said("u:a", "a:b"), "rejected": said("u:b", "a:b")}, "have no common beginning"),
    ("pairs", {"chosen": "yes", "rejected": "no"}, "have no common beginning"),
    ("pairs", {**CHAT, "chosen": "4"}, "`prompt` and `chosen` must both be text, or both lists of messages"),
    ("pairs", {**CHAT, "rejected": [{"role": "bot"}]}, "`rejected[0]` has the role 'bot'"),
    ("pairs", {**TEXTS, "rejected": 3}, "`rejected` must be text, not int"),
    ("pairs", {**TEXTS, "margin": math.nan}, "`margin` must be a finite number, not nan"),
    ("pairs", {**TEXTS, "margin": "much"}, "`margin` must be a finite number, not 'much'"),
    ("pairs", {**TEXTS, "loss_weight": 2}, "`loss_weight` is for --objective sft only"),
    ("pairs", {**CHAT, "chosen": [{**said("a:4")[0], "weight": 0.5}]}, "`chosen` has a message with a `weight`"),
    ("pairs", {"prompt": "a", "completion": "b"}, "match no known format of pairs of a chosen and a rejected answer"),
    ("pairs", {"prompt": "a", "completion": "b", "label": True}, "--objective kto takes them"),
    ("pairs", {"messages": said("u:a", "a:b")}, "--objective sft takes them"),
    ("judged", TEXTS, "match no known format of answers with a label; --objective dpo"),
    ("judged", {"prompt": "a", "completion": "b"}, "--objective sft takes them"),
    ("judged", {"prompt": "a", "completion": "", "label": True}, "`completion` is empty"),
    ("judged", {"messages": said("u:a"), "label": True}, "`completion` is empty"),
    (
        "judged",
        {"prompt": "a", "completion": "b", "label": 0.5},
        "`label` must be true (a good answer) or false (1 or 0",
    ),
    ("judged", {"prompt": "a", "completion": "b", "kto_tag": None}, "`kto_tag` must be true"),
    ("samples", TEXTS, "hold pairs of a chosen and a rejected answer. Train on them with --objective dpo"),
    ("samples", CHAT, "or, to train on some of the answers alone (SFT), name their column: --columns messages=chosen"),
    (
        "samples",
        {"prompt": "a", "completion": "b", "label": True},
        "--objective dpo (chosen and rejected) or --objective",
    ),
]


@pytest.mark.parametrize(("kind", "record", "told"), REFUSED, ids=range(len(REFUSED)))
def test_a_record_that_cannot_be_learned_from_is_one_message(kind: str, record: Record, told: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_record(detect_format(record, "here", kind=kind), record, "here")
    assert told in str(caught.value)
    assert str(caught.value).startswith("here: ")


def prepared(prepare_all: PrepareAll, path: Path, rows: str, **options: Any) -> PreparedDataset:
    return prepare_all(path, rows=rows, **options).training[0]


def sequences(tokenizer: PreTrainedTokenizerBase, sample: TokenizedSample) -> list[str]:
    """Text of each sequence, with brackets 【】 around its targets."""
    found = []
    for start, length in zip(sample.starts.tolist(), sample.lengths, strict=True):
        ids, is_target = (array[start : start + length] for array in (sample.input_ids, sample.is_target))
        borders = [0, *(np.flatnonzero(np.diff(is_target.astype(int))) + 1).tolist(), length]
        texts = [(is_target[a], str(tokenizer.decode(ids[a:b].tolist()))) for a, b in pairwise(borders)]
        found.append("".join(f"【{text}】" if is_answer else text for is_answer, text in texts))
    return found


def test_both_sides_of_a_pair_are_one_sample_with_its_margin(
    prepare_all: PrepareAll, write_lines: WriteLines, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_lines([{**TEXTS, "margin": 2}, {**TEXTS, "chosen": " four"}])
    found = prepared(prepare_all, path, "pairs")
    assert (len(found.tokenized), found.tokenized.num_sequences, found.sequence_names) == (2, 4, ("chosen", "rejected"))
    assert sequences(tokenizer, found.tokenized.sample(0)) == ["2+2=【 4<|im_end|>】", "2+2=【 5<|im_end|>】"]
    assert sequences(tokenizer, found.tokenized.sample(1)) == ["2+2=【 four<|im_end|>】", "2+2=【 5<|im_end|>】"]
    assert found.tokenized.sequence_values["margin"].tolist() == [2, 2, 0, 0]
    assert found.counts.kept == 2


def test_answers_of_a_pair_begin_where_the_first_of_them_leaves_the_tokens_of_the_prompt(
    prepare_all: PrepareAll, write_lines: WriteLines, tokenizer: PreTrainedTokenizerBase
) -> None:
    """TRL's rule: "the wea" is three tokens, of which the last becomes another one in "the weather"."""
    path = write_lines([{"prompt": "the wea", "chosen": "ther is", "rejected": " bad"}])
    sample = prepared(prepare_all, path, "pairs").tokenized.sample(0)
    prompt = tokenizer("the wea", add_special_tokens=False).input_ids
    whole = [tokenizer(text, add_special_tokens=False).input_ids for text in ("the weather is", "the wea bad")]
    assert [len(prompt), whole[0][:2] == prompt[:2], whole[0][2] == prompt[2], whole[1][:3] == prompt] == [3, 1, 0, 1]
    assert sample.input_ids.tolist() == [*whole[0], tokenizer.eos_token_id, *whole[1], tokenizer.eos_token_id]
    expected = [place >= 2 for ids in whole for place in range(len(ids) + 1)]
    assert sample.is_target.tolist() == expected


CHINESE = {
    "prompt": said("s:你是一个助手。", "u:天空为什么是蓝色的？"),
    "chosen": said("a:因为空气散射蓝光。"),
    "rejected": said("a:不知道。🙂"),
}


def test_a_chinese_pair_keeps_every_character(
    prepare_all: PrepareAll, write_lines: WriteLines, tokenizer: PreTrainedTokenizerBase
) -> None:
    found = prepared(prepare_all, write_lines([CHINESE]), "pairs", seq_length=512)
    prompt = tokenizer.apply_chat_template(CHINESE["prompt"], tokenize=False, add_generation_prompt=True)
    assert sequences(tokenizer, found.tokenized.sample(0)) == [
        f"{prompt}【{answer}<|im_end|>】" for answer in ("因为空气散射蓝光。", "不知道。🙂")
    ]
    assert found.warnings == ()


def test_a_pair_with_tool_calls_trains_calls_and_masks_results(
    prepare_all: PrepareAll, write_lines: WriteLines, tokenizer: PreTrainedTokenizerBase
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"of": [2, 2]}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    calling = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "4"}]
    record = {**CHAT, "chosen": [*calling, *said("a:It is 4.")], "tools": tools}
    found = prepared(prepare_all, write_lines([record]), "pairs", chat_template="chatml", seq_length=1024)
    chosen, rejected = sequences(tokenizer, found.tokenized.sample(0))
    assert chosen.count("【") == 2
    assert '【<tool_call>\n{"name": "add", "arguments": {"of": [2, 2]}}\n</tool_call><|im_end|>】' in chosen
    assert "<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n【It is 4.<|im_end|>】" in chosen
    assert rejected.endswith("【5<|im_end|>】")
    assert all('"name": "add", "parameters"' in text for text in (chosen, rejected))


def test_earlier_answers_of_a_conversation_are_prompt(
    prepare_all: PrepareAll, write_lines: WriteLines, tokenizer: PreTrainedTokenizerBase
) -> None:
    found = prepared(prepare_all, write_lines([PAIRS[9][1]]), "pairs", seq_length=256)
    texts = sequences(tokenizer, found.tokenized.sample(0))
    assert [text.count("【") for text in texts] == [1, 1]
    assert [text.endswith(f"【{answer}<|im_end|>】") for text, answer in zip(texts, "45", strict=True)] == [True, True]


def test_pairs_are_cut_at_their_ends_and_dropped_if_the_prompt_fills_half_a_row(
    prepare_all: PrepareAll, write_lines: WriteLines, tokenizer: PreTrainedTokenizerBase
) -> None:
    words = [" two" * number for number in (3, 12, 16, 40)]
    records = [{"prompt": prompt, "chosen": " three" * 30, "rejected": " four"} for prompt in words]
    found = prepared(prepare_all, write_lines(records), "pairs", seq_length=33)
    assert [len(tokenizer(prompt, add_special_tokens=False).input_ids) for prompt in words] == [3, 12, 16, 40]
    assert str(found.counts) == (
        "4 records read, 2 kept (2 of them cut to the sequence length), "
        "2 dropped (2 whose prompt leaves no room for an answer), 0 empty"
    )
    for index, num_prompt in enumerate((3, 12)):
        sample = found.tokenized.sample(index)
        assert sample.lengths == (16, num_prompt + len(tokenizer(" four", add_special_tokens=False).input_ids) + 1)
        assert sample.is_target[:16].tolist() == [False] * num_prompt + [True] * (16 - num_prompt)
        assert sample.input_ids[-1] == tokenizer.eos_token_id
    with pytest.raises(DataError, match=r"--seq_length 33 \(16 for each of both\) leaves room"):
        prepared(prepare_all, write_lines(records[2:]), "pairs", seq_length=33)


def test_judged_answers_have_their_label_and_the_whole_row(
    prepare_all: PrepareAll, write_lines: WriteLines, tokenizer: PreTrainedTokenizerBase
) -> None:
    records = [{"prompt": "2+2=", "completion": f" {n}", "label": n == 4} for n in (3, 4)]
    found = prepared(prepare_all, write_lines(records), "judged", packing=Packing.OFF)
    assert found.tokenized.sequence_values["label"].tolist() == [0, 1]
    assert sequences(tokenizer, found.tokenized.sample(1)) == ["2+2=【 4<|im_end|>】"]
    assert found.sequence_names == ("completion",)
    long = [{"prompt": "2", "completion": " two" * 90, "label": 1}, records[0]]
    cut = prepared(prepare_all, write_lines(long, "long.jsonl"), "judged", seq_length=32)
    assert (cut.tokenized.sample(0).lengths, cut.counts.cut) == ((32,), 1)


@pytest.mark.parametrize(("label", "advice"), [(True, "or train on these"), (False, "Add answers")])
def test_labels_of_one_class_are_refused_over_all_datasets(
    prepare_all: PrepareAll, write_lines: WriteLines, label: bool, advice: str
) -> None:
    records = [{"prompt": "2+2=", "completion": f" {n}", "label": label} for n in range(3)]
    one = write_lines(records, "one.jsonl")
    other = write_lines([{**each, "label": not label} for each in records], "other.jsonl")
    with pytest.raises(DataError, match=f"all answers have the label {str(label).lower()}.*{advice}"):
        prepare_all(one, rows="judged")
    assert len(prepare_all(one, other, rows="judged").training) == 2
    evaluated = prepare_all(one, other, rows="judged", eval_dataset=(DatasetEntry(str(one)),))
    assert len(evaluated.evaluation) == 1


def test_an_option_for_conversations_is_refused_for_pairs_of_texts(
    prepare_all: PrepareAll, write_lines: WriteLines
) -> None:
    with pytest.raises(DataError, match="`--default_system` has no effect: it is for conversations"):
        prepare_all(write_lines([TEXTS]), rows="pairs", default_system="Brief.")


def test_a_system_message_by_option_is_part_of_both_prompts(
    prepare_all: PrepareAll, write_lines: WriteLines, tokenizer: PreTrainedTokenizerBase
) -> None:
    found = prepared(prepare_all, write_lines([CHAT]), "pairs", default_system="Be brief.", seq_length=256)
    texts = sequences(tokenizer, found.tokenized.sample(0))
    assert all("system\nBe brief.<|im_end|>" in text and text.count("【") == 1 for text in texts)


def test_several_answers_need_a_template_that_keeps_earlier_ones(
    prepare_all: PrepareAll, write_lines: WriteLines
) -> None:
    forgetting = (
        "{% for m in messages %}{{ m.role if m.role == 'user' or loop.last else 'old' }}: {{ m.content }}<|im_end|>"
        "{% endfor %}{{ 'assistant: ' if add_generation_prompt }}"
    )
    record = {**CHAT, "chosen": said("a:4", "u:sure?", "a:yes")}
    with pytest.raises(DataError, match="several turns of the assistant, and the chat template renders earlier turns"):
        prepare_all(write_lines([record]), rows="pairs", chat_template=forgetting, seq_length=512)


def test_kinds_of_rows_have_caches_of_their_own(prepare_all: PrepareAll, write_lines: WriteLines) -> None:
    path = write_lines([{**TEXTS, "completion": " 4", "label": number % 2 == 0} for number in range(2)])
    columns = (("completion", "completion"),)
    plain = prepared(prepare_all, path, "samples", columns=columns).cache_folder
    folders = {prepared(prepare_all, path, kind).cache_folder for kind in ("pairs", "judged")}
    assert len({plain, *folders}) == 3
    assert "sequence_names" not in json.loads((plain / "facts.json").read_text())[0]
