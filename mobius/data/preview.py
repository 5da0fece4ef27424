"""Shows tokenized samples to people: marks targets, and escapes invisible characters.

Control characters could move a terminal's cursor, direction marks could show an answer backwards, and nobody would see
zero-width characters.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from mobius.data.token_store import TokenizedSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mobius.data.datasets import PreparedDataset

_SHOWN_CHARACTERS: Final = 1200
"""Maximum number of characters shown of a part (a prompt or a target), half of them from the part's end."""
_SHOWN_LINES: Final = 40
_SHOWN_PARTS: Final = 24
_UNSEEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
"""Unicode categories of escaped characters: control, format, surrogate, private use, line and paragraph separators."""


class Tone(StrEnum):
    """Meaning of a line, shown as a colour; the value is its SGR code."""

    PLAIN = ""
    MASKED = "90"
    TARGET = "32"
    WARNING = "33"
    TITLE = "1"


@dataclass(frozen=True, slots=True)
class Line:
    """Text without line feeds and terminal control characters, and the text's tone."""

    text: str
    tone: Tone = Tone.PLAIN

    def painted(self) -> str:
        """Return the text in the terminal colour of its tone."""
        return f"\x1b[{self.tone.value}m{self.text}\x1b[0m" if self.tone.value else self.text


def escape_invisible(text: str) -> str:
    """Return `text` with invisible characters except line feeds as escapes (`\\x1b`, `\\u202e`); tabs become spaces."""
    return "".join(
        character.encode("unicode_escape").decode("ascii")
        if character != "\n" and unicodedata.category(character) in _UNSEEN
        else character
        for character in text.replace("\t", "    ")
    )


def format_sample(row: TokenizedSample, tokenizer: "PreTrainedTokenizerBase", title: str) -> list[Line]:
    """Return a sample as the model sees it: with special tokens, prompt and target marked, and long parts shortened."""
    input_ids, is_target = row.input_ids, row.is_target
    heading = f"{title}: {len(input_ids)} tokens, {int(is_target[1:].sum())} of them targets"
    parts = list(pairwise([0, *(np.flatnonzero(np.diff(is_target)) + 1).tolist(), len(input_ids)]))
    lines = [Line(escape_invisible(heading), Tone.TITLE)]
    half, left_out = _SHOWN_PARTS // 2, len(parts) - _SHOWN_PARTS
    for number, (first, last) in enumerate(parts):
        if left_out > 0 and half <= number < half + left_out:
            if number == half:
                lines.append(Line(f"  [... {left_out} parts ...]"))
            continue
        text = tokenizer.decode(
            input_ids[first:last].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        tone, name = (Tone.TARGET, "target") if is_target[first] else (Tone.MASKED, "prompt")
        lines += [Line(f"  {name} | {line}", tone) for line in _shortened(text)]
    return lines


def describe_sample(prepared: "PreparedDataset", tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the first sample of a dataset, formatted for the log."""
    return "\n".join(line.text for line in format_sample(prepared.tokenized.sample(0), tokenizer, "sample 0"))


def _shortened(text: str) -> Iterator[str]:
    """Yield the lines of a part, with invisible characters escaped; a note replaces the middle of a long part."""
    if len(text) > _SHOWN_CHARACTERS:
        half = _SHOWN_CHARACTERS // 2
        text = f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
    lines: Sequence[str] = text.split("\n")
    if len(lines) > _SHOWN_LINES:
        half = _SHOWN_LINES // 2
        lines = [*lines[:half], f"[... {len(lines) - 2 * half} lines ...]", *lines[-half:]]
    return map(escape_invisible, lines)
