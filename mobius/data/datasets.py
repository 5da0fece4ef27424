"""Prepares datasets: reads, tokenizes and counts each dataset once for all ranks, in a cache keyed by content."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import metadata
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from tqdm import tqdm

from mobius.config.config import DataConfig, Packing
from mobius.config.options import DatasetEntry
from mobius.data import token_store
from mobius.data.chat_templates import resolve_template
from mobius.data.formats import SAMPLES, RecordFormat, detect_format, parse_record
from mobius.data.images import ImageRules
from mobius.data.left_out import describe_left_out
from mobius.data.messages import Completion, Conversation, Document, Sample, TokenIds, Unit
from mobius.data.preferences import LABEL
from mobius.data.readers import RecordBlock
from mobius.data.sources import DatasetSource, open_source
from mobius.data.token_store import DatasetWriter, TokenizedDataset, Values
from mobius.data.tokenization import NO_IMAGES, EncodingNote, EncodingRules, SampleEncoder
from mobius.data.workers import BlockEncoder, EncodedBlock, encode_blocks
from mobius.errors import DataError, excerpt
from mobius.process.ranks import num_cpus_per_rank
from mobius.units import format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_PART_RECORDS: Final = 8192
_PART_TOKENS: Final = 1 << 23  # 40 MiB on the disk
_MOST_WORKERS: Final = 16
_BYTES_WORTH_A_WORKER: Final = 1 << 23  # some seconds of work, about as long as the start of a worker
_BYTES_OF_A_RECORD: Final = 1 << 14  # assumed if the number of records is unknown; most are smaller


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """Record counts: `read` = `kept` (`cut` of them truncated) + `dropped` (no target) + `empty`.

    `unanswered` counts the dropped records without an answer, `without_room` the dropped records whose prompt fills the
    space of a sequence; the other dropped records have an answer without a trainable token.
    """

    read: int
    kept: int
    cut: int
    dropped: int
    empty: int
    unanswered: int = 0
    without_room: int = 0

    @property
    def dropped_by_reason(self) -> dict[str, int]:
        """Reason -> number of dropped records, if above 0; the reason completes "<n> records ..."."""
        numbers = {
            "without an answer": self.unanswered,
            "whose prompt leaves no room for an answer": self.without_room,
            "without a token to train on": self.dropped - self.unanswered - self.without_room,
        }
        return {reason: number for reason, number in numbers.items() if number}

    def __str__(self) -> str:
        reasons = ", ".join(f"{number} {reason}" for reason, number in self.dropped_by_reason.items())
        return (
            f"{self.read} records read, {self.kept} kept ({self.cut} of them cut to the sequence length), "
            f"{self.dropped} dropped{f' ({reasons})' if reasons else ''}, {self.empty} empty"
        )


@dataclass(frozen=True, slots=True)
class PreparedDataset:
    """One tokenized dataset of a mixture, with the detected format, and with `warnings`, one sentence each."""

    entry: DatasetEntry
    tokenized: TokenizedDataset
    counts: SampleCounts
    format_name: str
    is_text: bool
    warnings: tuple[str, ...]
    cache_folder: Path
    sequence_names: tuple[str, ...] = ()
    """Names of the sequences of each sample, such as chosen and rejected; empty for plain samples."""

    @property
    def cache_bytes(self) -> int:
        """Size of the dataset's files."""
        return sum(path.stat().st_size for path in self.cache_folder.iterdir())


@dataclass(frozen=True, slots=True)
class PreparedData:
    """Datasets of `--dataset` and of `--eval_dataset` in the order of the options, and whether packing is on.

    `warnings` has the warnings of all datasets; if there are several datasets, each warning has a dataset's name.
    """

    training: tuple[PreparedDataset, ...]
    evaluation: tuple[PreparedDataset, ...]
    is_packed: bool
    warnings: tuple[str, ...]


def prepare_data(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    cache_dir: Path,
    rows: str = SAMPLES,
    num_virtual_tokens: int = 0,
    has_prefix: bool = False,
    images: ImageRules | str = NO_IMAGES,
    show_progress: bool = False,
    show_downloads: bool = False,
) -> PreparedData:
    """Tokenize every dataset of `config`, or map from `cache_dir` the files that another run or rank has tokenized.

    `rows` is the kind of rows that the objective asks for, a key of `FORMATS_OF`. `num_virtual_tokens` places are kept
    free before each sequence; of a prefix, they predict nothing. `images` as in `SampleEncoder`.

    Every rank calls this before process groups exist. One rank tokenizes while the others wait for its file lock, so
    no collective can time out. All ranks may set `show_progress`: only the tokenizing rank draws a bar. Every rank
    downloads, so only one rank should set `show_downloads`. Raises DataError if a dataset is missing, broken, empty or
    without a trainable token.
    """
    config = replace(config, seq_length=config.seq_length - num_virtual_tokens)
    folder = cache_dir / "tokenized"
    preparation = _Preparation(config, tokenizer, folder, rows, show_progress, num_virtual_tokens, images)
    wanted = [("--dataset", entry) for entry in config.dataset]
    wanted += [("--eval_dataset", entry) for entry in config.eval_dataset or ()]
    # Find all datasets before tokenizing the first, which may take hours: a missing dataset is then reported at once.
    hash_cache = preparation.folder / "hashes"
    sources = [
        open_source(entry, option=option, show_progress=show_downloads, hash_cache=hash_cache)
        for option, entry in wanted
    ]
    _refuse_ineffective_options(config, [entry for _, entry in wanted], sources, rows)
    both = tuple(preparation.dataset(*each, source) for each, source in zip(wanted, sources, strict=True))
    if num_virtual_tokens:
        virtual: dict[str, Any] = {"num_virtual_tokens": num_virtual_tokens, "has_prefix": has_prefix}
        both = tuple(replace(each, tokenized=replace(each.tokenized, **virtual)) for each in both)
    training, evaluation = both[: len(config.dataset)], both[len(config.dataset) :]
    _refuse_one_label(training)
    num_bytes = sum(dataset.cache_bytes for dataset in {dataset.cache_folder: dataset for dataset in both}.values())
    place = both[0].cache_folder if len(both) == 1 else preparation.folder
    logger.debug("tokenized data: %s in %s", format_bytes(num_bytes), place)
    is_text = all(dataset.is_text for dataset in training)
    is_packed = {Packing.ON: True, Packing.OFF: False}.get(config.packing, not is_text)
    named = ((f"{excerpt(dataset.entry.name)}: " if len(both) > 1 else "", dataset.warnings) for dataset in both)
    warnings = tuple(name + text for name, texts in named for text in texts)
    return PreparedData(training, evaluation, is_packed, warnings)


def with_derived_values(data: PreparedData, derive: Callable[[Values], Values]) -> PreparedData:
    """Return the data with the values of sequences that `derive` computes from those of a dataset. Raises DataError."""
    training, evaluation = (
        tuple(_derived(dataset, derive) for dataset in datasets) for datasets in (data.training, data.evaluation)
    )
    return replace(data, training=training, evaluation=evaluation)


def _derived(dataset: PreparedDataset, derive: Callable[[Values], Values]) -> PreparedDataset:
    try:
        values = derive(dataset.tokenized.sequence_values)
    except DataError as error:
        raise DataError(f"{excerpt(dataset.entry.name)}: {error}") from error
    return replace(dataset, tokenized=replace(dataset.tokenized, sequence_values=values))


class _Preparation:
    """Prepares the datasets of one configuration."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: "PreTrainedTokenizerBase",
        folder: Path,
        rows: str,
        show_progress: bool,
        num_virtual_tokens: int,
        images: ImageRules | str,
    ) -> None:
        self._images = images
        self._config, self._tokenizer, self.folder, self._show_progress = config, tokenizer, folder, show_progress
        self._rows, self._num_virtual_tokens = rows, num_virtual_tokens
        self._rules = EncodingRules(
            train_on_prompt=config.train_on_prompt,
            train_on_all_turns=config.train_on_all_turns,
            mask_history=config.mask_history,
            default_system=config.default_system,
            chat_template=resolve_template(config.chat_template),
        )
        self._encoder = SampleEncoder(
            tokenizer,
            seq_length=config.seq_length,
            rules=self._rules,
            num_virtual_tokens=num_virtual_tokens,
            images=images,
        )

    def dataset(self, option: str, entry: DatasetEntry, source: DatasetSource) -> PreparedDataset:
        """Load a dataset from the cache, or tokenize it while other ranks wait."""
        columns = _columns_of(entry, self._config)
        max_samples = self._config.max_samples if entry.max_samples is None else entry.max_samples
        folder = self.folder / self._key(source, columns, max_samples)
        with token_store.tokenized_lock(folder):
            stored = token_store.load_tokenized(folder)
            if stored is None:
                token_store.remove_abandoned(self.folder)
                with DatasetWriter(folder) as writer:
                    _Tokenization(f"{option} {excerpt(source.label, 300)}", source, max_samples, writer).run(
                        self._encoder.with_images_in(source.folder),
                        columns,
                        self._config,
                        self._rows,
                        show_progress=self._show_progress,
                    )
                stored = token_store.load_tokenized(folder)
            assert stored is not None
        tokenized, facts = stored
        return PreparedDataset(
            entry=entry,
            tokenized=tokenized,
            counts=SampleCounts(**facts["counts"]),
            format_name=facts["format_name"],
            is_text=facts["is_text"],
            warnings=tuple(facts["warnings"]),
            cache_folder=folder,
            sequence_names=tuple(facts.get("sequence_names", ())),
        )

    def _key(self, source: DatasetSource, columns: Mapping[str, str], max_samples: int | None) -> str:
        """Return the cache key: a hash of everything that affects the tokens."""
        tokenizer, code = self._tokenizer, sorted(Path(__file__).parent.glob("*.py"))
        backend = getattr(tokenizer, "backend_tokenizer", None)
        facts = {
            "source": source.fingerprint,
            "tokenizer": tokenizer.get_vocab() if backend is None else backend.to_str(),
            "tokenizer_class": type(tokenizer).__name__,
            "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            "chat_template": tokenizer.chat_template,
            "rules": asdict(self._rules),
            "rows": self._rows,
            "columns": columns,
            "seq_length": self._config.seq_length,
            "num_virtual_tokens": self._num_virtual_tokens,
            "is_text_joined": self._config.is_text_joined,
            "max_samples": max_samples,
            "code": [hashlib.sha256(path.read_bytes()).hexdigest() for path in code],
            "libraries": [metadata.version(name) for name in ("transformers", "tokenizers")],
        }
        if not isinstance(self._images, str):
            facts |= {"images": asdict(self._images), "folder": str(source.folder)}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


class _Tokenization:
    """Tokenizes one dataset into files, and resumes where an earlier run stopped."""

    def __init__(self, given: str, source: DatasetSource, max_samples: int | None, writer: DatasetWriter) -> None:
        self._given, self._source, self._max_samples, self._writer = given, source, max_samples, writer
        known = [number for number in (source.num_records, max_samples) if number is not None]
        self._num_records = min(known, default=None)
        earlier = writer.progress or {}
        self._num_blocks: int = earlier.get("blocks", 0)
        self._tally = Counter[str](earlier.get("tally", {}))
        self._part = Counter[str]()

    def run(
        self,
        encoder: SampleEncoder,
        columns: Mapping[str, str],
        config: DataConfig,
        kind: str,
        *,
        show_progress: bool,
    ) -> None:
        """Write all rows. Raises DataError if there are no rows."""
        blocks = _limited(self._source.read(), self._max_samples)
        first_block = next(blocks, None)
        if first_block is None:
            raise DataError(f"{self._given}: the dataset is empty; it must hold at least one record")
        first = next(first_block.records())
        record_format = detect_format(first.fields, first.where, columns, kind)
        is_joined = record_format.is_text and config.is_text_joined
        num_workers = config.preprocessing_num_workers or self._default_workers()
        blocks = chain([first_block], blocks)
        # If an earlier run has written the rows of a block, the block is read, but not parsed.
        num_bytes_done = sum(block.num_bytes for block in islice(blocks, self._num_blocks))
        if done := self._tally["read"]:
            logger.info("%s: %d records were tokenized by an earlier run that did not finish", self._given, done)
        encoded = encode_blocks(blocks, BlockEncoder(encoder, record_format, is_joined), num_workers, self._given)
        with self._progress_bar(num_bytes_done, is_shown=show_progress) as bar:
            for block in encoded:
                self._write(block, is_joined=is_joined)
                bar.update(block.num_bytes if self._num_records is None else block.tally["read"])
        self._finish(record_format, encoder.seq_length, is_joined)

    def _default_workers(self) -> int:
        num_bytes = self._source.num_bytes
        if self._max_samples is not None:
            num_bytes = min(num_bytes, self._max_samples * _BYTES_OF_A_RECORD)
        return max(1, min(num_cpus_per_rank(1), _MOST_WORKERS, num_bytes // _BYTES_WORTH_A_WORKER))

    def _progress_bar(self, num_bytes_done: int, *, is_shown: bool) -> "tqdm[Any]":
        """Return a progress bar in records, or in bytes if their number is unknown; write log lines before calling."""
        if self._num_records is None:
            sizes: dict[str, Any] = {"total": self._source.num_bytes, "initial": num_bytes_done, "unit": "B"}
        else:
            sizes = {"total": self._num_records, "initial": self._tally["read"], "unit": " records"}
        return tqdm(desc="tokenizing", unit_scale=self._num_records is None, disable=not is_shown, **sizes)

    def _write(self, block: EncodedBlock, *, is_joined: bool) -> None:
        self._writer.append(block.samples, is_joined=is_joined)
        self._num_blocks += 1
        self._tally.update(block.tally)
        self._part.update(records=block.tally["read"], tokens=len(block.samples.input_ids))
        if self._part["records"] >= _PART_RECORDS or self._part["tokens"] >= _PART_TOKENS:
            self._writer.commit_part({"blocks": self._num_blocks, "tally": self._tally})
            self._part.clear()

    def _finish(self, record_format: RecordFormat, seq_length: int, is_joined: bool) -> None:
        counts = SampleCounts(**{field.name: self._tally[field.name] for field in fields(SampleCounts)})
        if self._writer.num_tokens < 2:
            num_sides = len(record_format.sequence_names)
            half = f" ({seq_length // num_sides} for each of both)" if num_sides > 1 else ""
            raise DataError(
                f"{self._given}: no record has a token to train on ({counts}; format {record_format.describe()}). "
                "Check that the answers are in a column of this format, and that --seq_length "
                f"{seq_length}{half} leaves room for them"
            )
        facts = {
            "counts": asdict(counts),
            "format_name": record_format.name,
            "is_text": record_format.is_text,
            "warnings": [
                *describe_left_out(self._tally, counts.read),
                *(
                    f"{number} of {counts.read} records: {note.value}"
                    for note in sorted(EncodingNote)
                    if (number := self._tally[note.value])
                ),
            ],
            **({"sequence_names": record_format.sequence_names} if record_format.sequence_names else {}),
        }
        self._writer.finish(facts, row_length=seq_length if is_joined else None)


def _limited(blocks: Iterator[RecordBlock], most: int | None) -> Iterator[RecordBlock]:
    """Yield the blocks of the first `most` records; None: of all records."""
    for block in blocks:
        if most is not None and len(block) >= most:
            yield block.first(most)
            return
        most = None if most is None else most - len(block)
        yield block


_KINDS: Final = {
    Conversation: "conversations",
    Completion: "prompts with completions",
    Document: "plain text",
    TokenIds: "token ids",
}
_ACTS_ON: Final[Mapping[str, tuple[type[Sample], ...]]] = {
    "chat_template": (Conversation,),
    "default_system": (Conversation,),
    "mask_history": (Conversation,),
    "train_on_prompt": (Conversation, Completion),
}
"""Data option -> kinds of samples that the option affects; all other options affect all kinds."""


def _refuse_ineffective_options(
    config: DataConfig, entries: Sequence[DatasetEntry], sources: Sequence[DatasetSource], rows: str
) -> None:
    """Raise DataError for options that affect no kind of sample; reads the first sample of each dataset."""
    wanted = {f"--{name}": acts_on for name, acts_on in _ACTS_ON.items() if getattr(config, name)}
    if config.packing is Packing.JOINED:
        wanted["--packing joined"] = (Document,)
    if not wanted:
        return
    columns = (_columns_of(entry, config) for entry in entries)
    kinds = {kind for each in zip(sources, columns, strict=True) for kind in _first_kinds(*each, rows)}
    found = " and ".join(text for kind, text in _KINDS.items() if kind in kinds)
    problems = [
        f"`{name}` has no effect: it is for {' and '.join(_KINDS[kind] for kind in acts_on)}, and the data hold {found}"
        for name, acts_on in wanted.items()
        if kinds.isdisjoint(acts_on)
    ]
    if problems:
        raise DataError("; ".join(problems) + ". Remove it, or give the data in another format (docs/user/data.md)")


def _columns_of(entry: DatasetEntry, config: DataConfig) -> dict[str, str]:
    return dict(entry.columns or config.columns or ())


def _first_kinds(source: DatasetSource, columns: Mapping[str, str], rows: str) -> set[type[Sample]]:
    """Return the kinds of samples in the first record. An empty dataset counts as text; tokenizing it raises errors."""
    for block in source.read():
        for record in block.records():
            found = detect_format(record.fields, record.where, columns, rows)
            sample = parse_record(found, record.fields, record.where)
            return {type(each) for each in (sample.sequences if isinstance(sample, Unit) else (sample,))}
    return {Document}


def _refuse_one_label(datasets: Sequence[PreparedDataset]) -> None:
    """Raise DataError if all training answers have the same label."""
    values = [dataset.tokenized.sequence_values for dataset in datasets]
    labels = [each[LABEL] for each in values if LABEL in each]
    if labels and min(map(np.min, labels)) == max(map(np.max, labels)):
        label, advice = ("true", ", or train on these with --objective sft") if labels[0][0] else ("false", "")
        raise DataError(
            f"all answers have the label {label}, so there is nothing to tell apart. Add answers with the other "
            f"label{advice}"
        )
