"""Conversion of records with preferences to `Unit`s: pairs of a better and a worse answer, and answers with a label."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Final

from mobius.data.messages import (
    Completion,
    Conversation,
    Role,
    Sample,
    TokenIds,
    Turn,
    Unit,
    as_number,
    is_list,
    is_unset,
    text_of,
    tools_of,
    turns_of,
)
from mobius.errors import DataError, quoted

PAIR: Final = ("chosen", "rejected")
VERDICTS: Final = ("label", "kto_tag")
MARGIN: Final = "margin"
"""Value of both sequences of a pair: least difference of their scores."""
LABEL: Final = "label"
_LABELS: Final = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}

Record = Mapping[str, object]


def parse_pair(parse: Callable[[str, Record], Sample], record: Record) -> Unit:
    """Convert a record with `chosen` and `rejected`; `parse` reads a sample, given the name of its answer's column."""
    chosen, rejected = (parse(side, _with_lists(record)) for side in PAIR)
    return _as_pair(record, chosen, rejected)


def parse_prompt_pair(parse: Callable[[str, Record], Sample], record: Record) -> Unit:
    """Convert a record with a `prompt`. If only the answers are messages, they hold the whole conversation."""
    record = _with_lists(record)
    if is_list(record["prompt"]) or not all(is_list(record[side]) for side in PAIR):
        return parse_pair(parse, record)
    return parse_whole_pair(record)


def parse_whole_pair(record: Record) -> Unit:
    """Convert a record whose `chosen` and `rejected` begin with the prompt; the prompt is their common beginning.

    A `prompt` as text is the question of messages that are only answers; otherwise they hold it already.
    """
    record = _with_lists(record)
    if not all(is_list(record[side]) for side in PAIR):
        return _as_pair(record, *_split_texts(text_of(record, "chosen"), text_of(record, "rejected")))
    sides = [tuple(turns_of(record, side)) for side in PAIR]
    num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*sides, strict=False)))
    question = text_of(record, "prompt")
    asked = (Turn(Role.USER, question),) if question.strip() and not num_common else ()
    if not asked and not num_common:
        raise DataError(_NO_PROMPT)
    tools = tools_of(record)
    chosen, rejected = (Conversation((*asked, *turns), tools, len(asked) + num_common) for turns in sides)
    return _as_pair(record, chosen, rejected)


_NO_PROMPT: Final = (
    "`chosen` and `rejected` have no common beginning, which would be the prompt. Give the prompt in a column `prompt`"
)


def _with_lists(record: Record) -> Record:
    """Return the record with a list in place of a single message as an answer, as LLaMA-Factory has it."""
    sides = {side: record[side] for side in PAIR}
    return {**record, **{side: [value] if isinstance(value, Mapping) else value for side, value in sides.items()}}


def _split_texts(chosen: str, rejected: str) -> tuple[Completion, Completion]:
    """Split two texts after their common beginning, before the space of a word, as TRL does."""
    pairs = zip(chosen, rejected, strict=False)
    num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if num_common < min(len(chosen), len(rejected)) and chosen[:num_common].endswith(" "):
        num_common -= 1
    if not chosen[:num_common].strip() and chosen != rejected:
        raise DataError(_NO_PROMPT)
    return (
        Completion(chosen[:num_common], chosen[num_common:]),
        Completion(rejected[:num_common], rejected[num_common:]),
    )


def _as_pair(record: Record, chosen: Sample, rejected: Sample) -> Unit:
    if chosen == rejected:
        raise DataError("`chosen` and `rejected` are equal, so the pair prefers neither. Leave such records out")
    sides = tuple(judged(side, sample) for side, sample in zip(PAIR, (chosen, rejected), strict=True))
    margin = as_number(record.get(MARGIN))
    if is_unset(margin):
        return Unit(sides)
    if not isinstance(margin, int | float) or not math.isfinite(margin):
        raise DataError(f"`{MARGIN}` must be a finite number, not {quoted(margin)}")
    return Unit(sides, {MARGIN: (float(margin),) * len(PAIR)})


def parse_judged(parse: Callable[[Record], Sample | Unit], verdict: str, record: Record) -> Unit:
    """Convert a record with a column `verdict`, which says whether the last answer is good."""
    label = _LABELS.get(str(record[verdict]).strip().lower())
    if label is None:
        raise DataError(f"`{verdict}` must be true (a good answer) or false (1 or 0), not {quoted(record[verdict])}")
    sample = parse(record)
    assert not isinstance(sample, Unit)
    return Unit((judged("completion", sample),), {LABEL: (label,)})


def judged(name: str, sample: Sample) -> Sample:
    """Return the sample with only its last answers as completion. Raises DataError if there are none."""
    if isinstance(sample, Conversation):
        turns = sample.turns
        answers = [index for index, turn in enumerate(turns) if turn.role is Role.ASSISTANT and turn.has_content]
        first = sample.num_prompt_turns or (answers[-1] if answers else len(turns))
        if any(turn.weight != 1 for turn in turns[first:] if turn.role is Role.ASSISTANT):
            raise DataError(
                f"`{name}` has a message with a `weight` (or `train`, `loss`), which is for --objective sft only. "
                "Remove the field"
            )
        if any(index >= first for index in answers):
            return replace(sample, num_prompt_turns=first)
    elif (isinstance(sample, Completion) and sample.response.strip()) or (
        isinstance(sample, TokenIds) and sample.completion
    ):
        return sample
    raise DataError(f"`{name}` is empty: there is no answer to learn from. Leave such records out")
