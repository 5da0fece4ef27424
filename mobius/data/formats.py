"""Record formats: the columns that identify a format, and the conversion of its records to `Sample`s."""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from mobius.data.images import find_image_part, images_of
from mobius.data.messages import (
    MESSAGE_KEYS,
    Completion,
    Conversation,
    Document,
    Role,
    Sample,
    Turn,
    Unit,
    as_number,
    as_text,
    check_weight,
    is_list,
    is_unset,
    items_of,
    system_turns,
    text_of,
    tools_of,
    turns_of,
)
from mobius.data.preferences import (
    MARGIN,
    PAIR,
    VERDICTS,
    parse_judged,
    parse_pair,
    parse_prompt_pair,
    parse_whole_pair,
)
from mobius.data.rollouts import GROUP, IDS, LOGPROBS, OUTCOMES, parse_rollout, parse_token_ids
from mobius.errors import DataError, excerpt, listed, quoted

SAMPLES: Final = "samples"
"""Kind of rows for supervised fine-tuning."""


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """Columns of a format; `parse` gets a record with all `required` columns, and raises DataErrors without a place."""

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    parse: Callable[[Mapping[str, object]], Sample | Unit]
    is_text: bool = False
    """Whether records are plain text, which may be joined and split; otherwise each record is one sample."""
    mapping: Mapping[str, str] = field(default_factory=dict)
    """Name that a format reads -> column of the data, if the two differ: {"prompt": "document"}."""
    sequence_names: tuple[str, ...] = ()
    """Names of the sequences of a unit, for people."""
    kind: str = SAMPLES
    """Kind of rows that an objective asks for, a key of `FORMATS_OF`."""

    def describe(self) -> str:
        """Return name and columns of the format for messages, optional columns in brackets."""
        names = [*map(self._column, self.required), *(f"[{self._column(column)}]" for column in self.optional)]
        return f"{self.name} ({', '.join(names)})"

    def _column(self, name: str) -> str:
        return f"{name}={excerpt(self.mapping[name])}" if name in self.mapping else name


def detect_format(
    record: Collection[str], where: str, mapping: Mapping[str, str] | None = None, kind: str = SAMPLES
) -> RecordFormat:
    """Return the first format of `kind` that reads every name in `mapping`, and whose required columns are all present.

    `record` is the first record, or the record's columns. `mapping` is name -> column: {"prompt": "document"} for
    `--columns prompt=document`. `kind` is a key of `FORMATS_OF`. Raises DataError that names `where`.
    """
    mapping, columns = mapping or {}, list(map(str, record))
    _check_mapping(columns, where, mapping, FORMATS_OF[kind])
    names = {column for column in columns if column not in mapping.values()} | set(mapping)
    for record_format in FORMATS_OF[kind]:
        if _fits(record_format, names, mapping):
            return replace(record_format, mapping=mapping, kind=kind)
    if isinstance(record, Mapping) and any(map(_is_record, _held(record).values())):
        raise DataError(f"{where}: {describe_object(record)}")
    accepted = "\n".join(f"  {record_format.describe()}" for record_format in FORMATS_OF[kind])
    given = f" with --columns {_written(mapping)}" if mapping else ""
    found = f"{where}: the columns {listed(sorted(set(columns)))}{given}"
    others = [
        (other, objectives)
        for other, objectives in _TRAINED_BY.items()
        if other != kind and any(_fits(each, names, mapping) for each in FORMATS_OF[other])
    ]
    if others and kind == SAMPLES:
        other, objectives = others[0]
        raise DataError(f"{found} hold {_DESCRIBED[other]}. Train on them with --objective {objectives}, {_AS_SFT}")
    of_kind, read = f" of {_DESCRIBED[kind]}" if kind in _DESCRIBED else "", ""
    if kind == SAMPLES:
        read = ", such as --columns prompt=question,completion=answer,"
    advice = "".join(f"; --objective {objectives} takes them" for _, objectives in others[:1])
    raise DataError(
        f"{found} match no known format{of_kind}{advice}. Name the columns to read{read} or rename the columns to one "
        f"of these (optional ones in brackets):\n{accepted}"
    )


def _fits(record_format: RecordFormat, names: Collection[str], mapping: Mapping[str, str]) -> bool:
    return set(names).issuperset(record_format.required) and _names([record_format]).issuperset(mapping)


def parse_record(record_format: RecordFormat, record: Mapping[str, object], where: str) -> Sample | Unit:
    """Convert a record to a sample. Raises DataError that names `where` for missing columns and wrong types."""
    mapping = record_format.mapping
    is_sample = record_format.kind == SAMPLES
    try:
        if is_sample and not record_format.is_text and _ANSWERS.isdisjoint(mapping):
            _check_preference(record, mapping)
        columns = (mapping.get(name, name) for name in record_format.required)
        if missing := [column for column in columns if column not in record]:
            raise DataError(
                f"the column {listed(missing)} is missing; found: {listed(map(str, record))}. "
                f"The first record has the format {record_format.describe()}, and all records must have it"
            )
        record = _renamed(record, mapping) if mapping else record
        sample = _with_images(record_format.parse(record), record)
        weight = _loss_weight(record)
        if weight is None:
            return sample
        if isinstance(sample, Unit):
            raise DataError(f"`{_LOSS_WEIGHT}` is for --objective sft only. Remove the column, or use that objective")
        return replace(sample, weight=weight)
    except DataError as error:
        given = f" (--columns {_written(mapping)})" if mapping else ""
        raise DataError(f"{where}: {error}{given}") from error


def _with_images(sample: Sample | Unit, record: Mapping[str, object]) -> Sample | Unit:
    """Return a conversation with the paths of its images. Raises DataError for images of a unit."""
    if not isinstance(sample, Conversation | Unit):
        return sample
    if not (images := images_of(record)):
        if (place := find_image_part(record)) is not None:
            raise DataError(f"{place} is an image, and the record has no `{_IMAGES}` with its path. Add it")
        return sample
    if isinstance(sample, Unit):
        raise DataError("`images` is not empty, and images are for --objective sft only. Leave such records out")
    return replace(sample, images=images)


_IMAGES: Final = "images"
"""Column of any format of conversations: paths of files."""
_LOSS_WEIGHT: Final = "loss_weight"
"""Column of any format of samples: the factor of the record's loss."""


def _loss_weight(record: Mapping[str, object]) -> float | None:
    """Return the record's factor, a number or its text, as in CSV files; None if it has none."""
    value = record.get(_LOSS_WEIGHT)
    if is_unset(value):
        return None
    return check_weight(as_number(value), f"`{_LOSS_WEIGHT}`", "left out")


_ANSWERS = frozenset({"messages", "conversations", "output", "completion", "summary"})
"""Names of answer columns; a user who maps one of these names has chosen the training target."""
_AS_SFT: Final = (
    "or, to train on some of the answers alone (SFT), name their column: --columns messages=chosen, --columns "
    "completion=chosen"
)
_PREFERENCES = ("chosen", "rejected", "chosen_response", "rejected_response", "chosen_messages", "rejected_messages")


def _check_preference(record: Mapping[str, object], mapping: Mapping[str, str]) -> None:
    """Refuse preference data (DPO, KTO), because supervised training would also learn the rejected answers.

    A label that is text, such as a topic, is no verdict on an answer. Columns mapped to another name do not count.
    """
    others = {name: value for name, value in record.items() if value is not None and name not in mapping.values()}
    found = [name for name in _PREFERENCES if others.get(name) not in (None, "", [], {})]
    found += [name for name in VERDICTS if _is_verdict(others.get(name))]
    if found:
        raise DataError(
            f"{listed(f'`{name}`' for name in found)} next to the answer: this is preference data. Train on it with "
            f"--objective dpo (chosen and rejected) or --objective kto (a label), {_AS_SFT}, or, if all completions "
            "are good, --columns completion=completion"
        )


def _is_verdict(value: object) -> bool:
    """Whether the value is a boolean or a number, or the text of a boolean or number, as in CSV files."""
    if isinstance(value, str):
        return re.fullmatch(r"(?i)true|false|[-+]?\d+(\.\d*)?", value.strip()) is not None
    return isinstance(value, int | float)


def _renamed(record: Mapping[str, object], mapping: Mapping[str, str]) -> dict[str, object]:
    """Return the record with the column names that formats read; a mapped column loses its original name."""
    others = {column: value for column, value in record.items() if column not in mapping.values()}
    return others | {name: record[column] for name, column in mapping.items() if column in record}


def _check_mapping(
    columns: Collection[str], where: str, mapping: Mapping[str, str], formats: Iterable[RecordFormat]
) -> None:
    known = _names(formats)
    problems = [
        f"{quoted(name)} is not read by any format{_nearest(name, known)}; known are {', '.join(sorted(known))}"
        for name in mapping
        if name not in known
    ]
    problems += [
        f"there is no column {quoted(column)}{_nearest(column, columns)}; found: {listed(sorted(set(columns)))}"
        for column in mapping.values()
        if column not in columns
    ]
    if problems:
        raise DataError(f"{where}: --columns {_written(mapping)}: {'; and '.join(problems)}")


def _nearest(name: str, names: Collection[str]) -> str:
    """Return a suggestion of similar names, for a message; compares the first 100 characters."""
    near = difflib.get_close_matches(name[:100], [other[:100] for other in names], n=2)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _written(mapping: Mapping[str, str]) -> str:
    return ",".join(f"{excerpt(name)}={excerpt(column)}" for name, column in mapping.items())


def describe_object(fields: Mapping[str, object]) -> str:
    """Return a message about a file that has a JSON object in place of a list of records, with advice."""
    if held := _held(fields):
        return (
            f"an object with the key {listed(f'`{key}`' for key in held)}, not a list of records. Save the list under "
            "that key as a separate file: [{...}, {...}]"
        )
    return (
        f"one object over several lines, with the keys {listed(f'`{key}`' for key in fields)}, not a list of records. "
        "If it is a record, write it on one line, or in brackets: [{...}]"
    )


def _held(fields: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    """Return each key whose value is a list of objects other than messages, with the first object of the list."""
    lists = ((key, value[0]) for key, value in fields.items() if isinstance(value, list) and value)
    roles = {role for role, _ in MESSAGE_KEYS}
    return {key: first for key, first in lists if isinstance(first, Mapping) and roles.isdisjoint(first)}


def _is_record(fields: Mapping[str, object]) -> bool:
    return any(fields.keys() >= set(each.required) for formats in FORMATS_OF.values() for each in formats)


def _names(formats: Iterable[RecordFormat]) -> set[str]:
    names = (name for record_format in formats for name in (*record_format.required, *record_format.optional))
    return {_LOSS_WEIGHT, _IMAGES, *names}


def _parse_alpaca(answer: str, record: Mapping[str, object]) -> Sample:
    turns = system_turns(record)
    for pair in items_of(record, "history"):
        if not is_list(pair) or [type(text) for text in pair] != [str, str]:
            raise DataError(f"`history` must hold [question, answer] pairs of text, not {quoted(pair)}")
        turns += map(Turn, (Role.USER, Role.ASSISTANT), (as_text(text, "`history`") for text in pair))
    question = "\n\n".join(part for part in (text_of(record, "instruction"), text_of(record, "input")) if part.strip())
    question = "\n".join(part for part in (question, text_of(record, "query")) if part)
    return Conversation((*turns, Turn(Role.USER, question), Turn(Role.ASSISTANT, text_of(record, answer))))


def _parse_conversation(column: str, record: Mapping[str, object]) -> Sample:
    return Conversation((*system_turns(record), *turns_of(record, column)), tools_of(record))


def _parse_answered(column: str, answer: str, record: Mapping[str, object]) -> Sample:
    asked = (*system_turns(record), *turns_of(record, column))
    return Conversation((*asked, *turns_of(record, answer)), tools_of(record), len(asked))


def _parse_completion(answer: str, record: Mapping[str, object]) -> Sample:
    prompt, completion = record["prompt"], record[answer]
    if not is_list(prompt) and not is_list(completion):
        return Completion(text_of(record, "prompt"), text_of(record, answer))
    if not is_list(prompt) or not is_list(completion):
        kinds = f"{type(prompt).__name__} and {type(completion).__name__}"
        raise DataError(f"`prompt` and `{answer}` must both be text, or both lists of messages, not {kinds}")
    return _parse_answered("prompt", answer, {**record, "system": None})


def _parse_xsum(record: Mapping[str, object]) -> Sample:
    document, summary = text_of(record, "document"), text_of(record, "summary")
    if not document.strip():
        return Completion("", "")  # no target: the model would learn to invent summaries
    return Completion(f"Summarize the article in one sentence.\n\n{document}\n\nSummary:\n", summary)


def _parse_text(record: Mapping[str, object]) -> Sample:
    return Document(text_of(record, "text"))


_CHAT: Final = ("system", "tools")
_ALPACA: Final = ("input", "query", "system", "history")
# In order of priority: if a record has the columns of two formats (alpaca sets often also have a rendered `text`), the
# earlier format reads it, because this format is more specific about targets.
FORMATS: tuple[RecordFormat, ...] = (
    RecordFormat("messages", ("messages",), _CHAT, partial(_parse_conversation, "messages")),
    RecordFormat("sharegpt", ("conversations",), _CHAT, partial(_parse_conversation, "conversations")),
    RecordFormat("alpaca", ("instruction", "output"), _ALPACA, partial(_parse_alpaca, "output")),
    RecordFormat("prompt-completion", ("prompt", "completion"), ("tools",), partial(_parse_completion, "completion")),
    RecordFormat("xsum", ("document", "summary"), (), _parse_xsum),
    RecordFormat("text", ("text",), (), _parse_text, is_text=True),
)

FORMATS_OF: Final[dict[str, tuple[RecordFormat, ...]]] = {
    SAMPLES: FORMATS,
    "pairs": tuple(
        RecordFormat(name, (*required, *PAIR), (*optional, MARGIN), parse, sequence_names=PAIR)
        for name, required, optional, parse in (
            ("prompt-pairs", ("prompt",), ("tools",), partial(parse_prompt_pair, _parse_completion)),
            ("alpaca-pairs", ("instruction",), _ALPACA, partial(parse_pair, _parse_alpaca)),
            ("messages-pairs", ("messages",), _CHAT, partial(parse_pair, partial(_parse_answered, "messages"))),
            (
                "sharegpt-pairs",
                ("conversations",),
                _CHAT,
                partial(parse_pair, partial(_parse_answered, "conversations")),
            ),
            ("pairs", (), ("tools",), parse_whole_pair),
        )
    ),
    "judged": tuple(
        replace(
            each,
            name=f"{each.name} with {verdict}",
            required=(*each.required, verdict),
            parse=partial(parse_judged, each.parse, verdict),
            sequence_names=("completion",),
        )
        for verdict in VERDICTS
        for each in FORMATS
        if each.name in ("messages", "sharegpt", "alpaca", "prompt-completion")
    ),
    "rollouts": tuple(
        RecordFormat(
            f"{name} with {outcome}",
            (*required, outcome),
            (*optional, GROUP, LOGPROBS),
            partial(parse_rollout, parse, outcome),
            sequence_names=("completion",),
        )
        for outcome in OUTCOMES
        for name, required, optional, parse in (
            ("token-ids", IDS, (), parse_token_ids),
            ("prompt-completion", ("prompt", "completion"), ("tools",), partial(_parse_completion, "completion")),
        )
    ),
}
"""Kind of rows that an objective asks for -> its formats in order of priority."""
_TRAINED_BY: Final = {
    "pairs": "dpo, orpo, simpo or reward",
    "judged": "kto",
    "rollouts": "policy",
    SAMPLES: "sft",
}
"""Kind of rows -> objectives that ask for them; kinds whose formats need more columns come first."""
_DESCRIBED: Final = {
    "pairs": "pairs of a chosen and a rejected answer",
    "judged": "answers with a label",
    "rollouts": "completions with a reward or an advantage",
}
