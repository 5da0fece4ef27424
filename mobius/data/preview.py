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

from mobius.data.token_store import WEIGHT, TokenizedSample

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


def format_sample(
    row: TokenizedSample, tokenizer: "PreTrainedTokenizerBase", title: str, sequence_names: Sequence[str] = ()
) -> list[Line]:
    """Return a sample as the model sees it: with special tokens, prompt and target marked, and long parts shortened.

    `sequence_names`: names of the sample's sequences, such as chosen and rejected; empty for a plain sample.
    """
    is_counted = row.is_target.copy()
    is_counted[row.starts] = False  # the first token is never predicted
    heading = f"{title}: {len(row)} tokens, {int(is_counted.sum())} of them targets"
    heading += f", {len(row.images)} image{'s' * (len(row.images) > 1)}" * bool(row.images)
    lines = [Line(escape_invisible(heading), Tone.TITLE)]
    for place, (start, length) in enumerate(zip(row.starts.tolist(), row.lengths, strict=True)):
        if sequence_names:
            values = (f", {name} {values[place]:g}" for name, values in row.sequence_values.items())
            name = sequence_names[place] if place < len(sequence_names) else f"sequence {place + 1}"
            lines.append(Line(escape_invisible(f"  {name}: {length} tokens{''.join(values)}"), Tone.TITLE))
        lines += _format_parts(row.piece(slice(start, start + length)), tokenizer)
    return lines


def _format_parts(row: TokenizedSample, tokenizer: "PreTrainedTokenizerBase") -> Iterator[Line]:
    """Yield the lines of a sequence: each prompt and each target, also by weight."""
    weights = row.token_values.get(WEIGHT, np.ones(len(row)))
    is_new = np.diff(row.is_target) | ((np.diff(weights) != 0) & row.is_target[1:])
    parts = list(pairwise([0, *(np.flatnonzero(is_new) + 1).tolist(), len(row)]))
    half, left_out = _SHOWN_PARTS // 2, len(parts) - _SHOWN_PARTS
    for number, (first, last) in enumerate(parts):
        if left_out > 0 and half <= number < half + left_out:
            if number == half:
                yield Line(f"  [... {left_out} parts ...]")
            continue
        ids = row.input_ids[first:last]
        text = tokenizer.decode(ids[ids >= 0].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        if num_virtual := int(np.count_nonzero(ids < 0)):
            text = f"[{num_virtual} virtual tokens]{text}"
        tone, name = (Tone.TARGET, "target") if row.is_target[first] else (Tone.MASKED, "prompt")
        if row.is_target[first] and weights[first] != 1:
            name += f" x {weights[first]:g}"
        yield from (Line(f"  {name} | {line}", tone) for line in _shortened(text))


def describe_sample(prepared: "PreparedDataset", tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the first sample of a dataset, formatted for the log."""
    lines = format_sample(prepared.tokenized.sample(0), tokenizer, "sample 0", prepared.sequence_names)
    return "\n".join(line.text for line in lines)


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
