"""A sample is shown as it is trained on, and nothing of it steers a terminal."""

import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from mobius.config.config import DatasetEntry
from mobius.data.datasets import PreparedDataset, SampleCounts
from mobius.data.preview import Line, Tone, describe_sample, escape_invisible, format_sample
from mobius.data.token_store import TokenizedDataset, TokenizedSample


def row_of(tokenizer: PreTrainedTokenizerBase, *parts: tuple[str, bool]) -> TokenizedSample:
    ids = [(list(tokenizer(text, add_special_tokens=False).input_ids), is_target) for text, is_target in parts]
    mask = [is_target for part, is_target in ids for _ in part]
    tokens = np.array([token for part, _ in ids for token in part], dtype=np.int32)
    return TokenizedSample.plain(tokens, np.array(mask))


def test_no_character_of_unicode_without_a_shape_is_shown_as_itself() -> None:
    visible = list[str]()
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        # Python's own word for it also excludes spaces, which have a width, and what is not assigned yet.
        if character in "\n\t" or character.isprintable() or unicodedata.category(character) in ("Zs", "Cn"):
            visible.append(character)
        else:
            shown = escape_invisible(character)
            assert shown.isascii()
            assert shown.isprintable()
    text = "".join(visible)
    assert escape_invisible(text) == text.replace("\t", "    ")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]52;c;aGk=\x07", "\\x1b]52;c;aGk=\\x07"),
        ("a\0b\rc\x9b2J", "a\\x00b\\rc\\x9b2J"),
        ("safe\u202egnp.exe", "safe\\u202egnp.exe"),
        ("pass\u200bword\ufeff", "pass\\u200bword\\ufeff"),
        ("\U000e0041", "\\U000e0041"),
        ("\ud83d", "\\ud83d"),
        ("two\nlines, 模型, é, 🙂", "two\nlines, 模型, é, 🙂"),
        ("e\u0301\u0323", "e\u0301\u0323"),
    ],
)
def test_control_and_format_characters_are_escapes(text: str, shown: str) -> None:
    assert escape_invisible(text) == shown


def test_special_tokens_prompt_and_target_are_told_apart(tokenizer: PreTrainedTokenizerBase) -> None:
    row = row_of(tokenizer, ("<|im_start|>user\nHi", False), ("Hello,\nyou<|im_end|>", True))
    lines = format_sample(row, tokenizer, "sample 3")
    num_targets = len(tokenizer("Hello,\nyou<|im_end|>", add_special_tokens=False).input_ids)
    assert lines == [
        Line(f"sample 3: {len(row)} tokens, {num_targets} of them targets", Tone.TITLE),
        Line("  prompt | <|im_start|>user", Tone.MASKED),
        Line("  prompt | Hi", Tone.MASKED),
        Line("  target | Hello,", Tone.TARGET),
        Line("  target | you<|im_end|>", Tone.TARGET),
    ]


def test_the_first_token_is_no_target_whatever_its_mask(tokenizer: PreTrainedTokenizerBase) -> None:
    row = row_of(tokenizer, ("one two three", True))
    assert f" {len(row) - 1} of them targets" in format_sample(row, tokenizer, "sample 0")[0].text


def test_hostile_text_cannot_leave_its_lines(tokenizer: PreTrainedTokenizerBase) -> None:
    hostile = "\x1b[2J\x1b]0;owned\x07\r\x08\0\u2028\u2029\x85\x0b\x0c\u202e"
    lines = format_sample(row_of(tokenizer, (hostile, True)), tokenizer, "x\x1b[31m")
    assert len(lines) == 2
    assert all(line.text.isprintable() for line in lines)


def test_the_sample_of_the_log_is_one_record_that_steers_nothing(tokenizer: PreTrainedTokenizerBase) -> None:
    row = row_of(tokenizer, ("\x1b[2JSay\u200b it.\n", False), ("\u202eSo.<|im_end|>", True))
    prepared = PreparedDataset(
        entry=DatasetEntry("a.jsonl"),
        tokenized=TokenizedDataset.of_samples([row]),
        counts=SampleCounts(read=1, kept=1, cut=0, dropped=0, empty=0),
        format_name="prompt-completion",
        is_text=False,
        warnings=(),
        cache_folder=Path(),
    )
    num_targets = int(row.is_target.sum())
    assert describe_sample(prepared, tokenizer) == (
        f"sample 0: {len(row)} tokens, {num_targets} of them targets\n"
        "  prompt | \\x1b[2JSay\\u200b it.\n"
        "  prompt | \n"
        "  target | \\u202eSo.<|im_end|>"
    )


def test_long_parts_lose_their_middle(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "word " * 20_000
    lines = format_sample(row_of(tokenizer, (text, True)), tokenizer, "sample 0")
    assert sum(len(line.text) for line in lines) < 1500
    assert f"[... {len(text) - 1200} characters ...]" in lines[1].text


def test_many_lines_lose_their_middle(tokenizer: PreTrainedTokenizerBase) -> None:
    lines = format_sample(row_of(tokenizer, ("\n".join(map(str, range(200))), True)), tokenizer, "sample 0")
    assert len(lines) == 42
    assert lines[21].text == "  target | [... 160 lines ...]"
    assert lines[-1].text == "  target | 199"


def test_many_turns_lose_their_middle(tokenizer: PreTrainedTokenizerBase) -> None:
    parts = [(f"turn {number}.", number % 2 == 1) for number in range(100)]
    lines = [line.text for line in format_sample(row_of(tokenizer, *parts), tokenizer, "sample 0")]
    assert len(lines) == 1 + 24 + 1
    assert lines[13] == "  [... 76 parts ...]"
    assert lines[-1] == "  target | turn 99."


def test_colours_are_around_the_text_and_plain_lines_have_none() -> None:
    assert Line("yes", Tone.TARGET).painted() == "\x1b[32myes\x1b[0m"
    assert Line("no", Tone.MASKED).painted() == "\x1b[90mno\x1b[0m"
    assert Line("plain").painted() == "plain"


def test_both_sides_of_a_pair_are_shown_with_their_values(tokenizer: PreTrainedTokenizerBase) -> None:
    sides = [row_of(tokenizer, ("2+2=", False), (answer, True)) for answer in (" 4", " five")]
    parts = TokenizedDataset.of_samples(sides)
    margins = {"margin": np.array([0.5, 0.5], np.float32)}
    pair = TokenizedSample(parts.input_ids, parts.is_target, tuple(map(len, sides)), {}, margins)
    lines = [line.text for line in format_sample(pair, tokenizer, "sample 0", ("chosen", "rejected"))]
    counts = [len(side) for side in sides]
    assert lines == [
        f"sample 0: {sum(counts)} tokens, {int(parts.is_target.sum())} of them targets",
        f"  chosen: {counts[0]} tokens, margin 0.5",
        "  prompt | 2+2=",
        "  target |  4",
        f"  rejected: {counts[1]} tokens, margin 0.5",
        "  prompt | 2+2=",
        "  target |  five",
    ]


def test_targets_of_another_weight_than_one_say_it(tokenizer: PreTrainedTokenizerBase) -> None:
    row = row_of(tokenizer, ("a", False), (" b", True), (" c", True), (" d", True))
    assert len(row) == 4
    weights = np.array([1, 0.5, 1, 2], np.float32)
    lines = format_sample(TokenizedSample(row.input_ids, row.is_target, (4,), {"weight": weights}), tokenizer, "x")
    assert [line.text for line in lines[1:]] == [
        "  prompt | a",
        "  target x 0.5 |  b",
        "  target |  c",
        "  target x 2 |  d",
    ]
