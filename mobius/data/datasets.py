"""Owns the preparation of a dataset: read, tokenize, count, cache by content, once for all ranks of the machine."""

import hashlib
import json
import logging
import multiprocessing
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from mobius.config.config import DataConfig, DatasetEntry, Packing
from mobius.data import store
from mobius.data.formats import Sample, parse_record, recognize
from mobius.data.sources import Source, open_source
from mobius.data.store import Row, TokenizedDataset
from mobius.data.tokenization import Encoded, Note, SampleEncoder, pack
from mobius.errors import DataError
from mobius.interruption import end_with_parent, workers_not_interrupted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Chunk = Sequence[tuple[Sample, str]]
"""Samples, each with the place that its record came from."""

_CHUNK_RECORDS = 256
_CHUNKS_PER_WORKER = 4  # in flight: enough to keep it busy, few enough that a large dataset is never whole in memory
_SHOWN_CHARACTERS = 1200


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """Numbers of records: `read` = `kept` (`cut` of them lost tokens) + `dropped` (without a target) + `empty`."""

    read: int
    kept: int
    cut: int
    dropped: int
    empty: int

    def __str__(self) -> str:
        return (
            f"{self.read} records read, {self.kept} kept ({self.cut} of them cut to the sequence length), "
            f"{self.dropped} dropped without targets, {self.empty} empty"
        )


@dataclass(frozen=True, slots=True)
class PreparedDataset:
    """One tokenized dataset of a mixture, the format recognized, and `warnings` for the user, one sentence each."""

    entry: DatasetEntry
    tokenized: TokenizedDataset
    counts: SampleCounts
    format_name: str
    is_text: bool
    warnings: tuple[str, ...]
    cache_folder: Path
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class PreparedData:
    """The datasets of `--dataset` and of `--eval_dataset` in the order given; whether samples share rows."""

    training: tuple[PreparedDataset, ...]
    evaluation: tuple[PreparedDataset, ...]
    is_packed: bool
    warnings: tuple[str, ...]


def prepare_data(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    cache_dir: Path,
    show_progress: bool = False,
    show_downloads: bool = False,
) -> PreparedData:
    """Tokenize every dataset of `config`, or map from `cache_dir` what another run or rank has tokenized.

    Every rank calls this before a process group exists: the first to come tokenizes while the others wait for its lock,
    so no collective times out. With `show_progress` on all ranks there is one bar, of the rank that tokenizes;
    downloads are every rank's, so only one should show them. Raises DataError if a dataset is missing, broken, empty
    or without a trainable token.
    """
    training, evaluation = (
        tuple(_prepare(entry, config, tokenizer, cache_dir, show_progress, show_downloads) for entry in entries or ())
        for entries in (config.dataset, config.eval_dataset)
    )
    is_packed = {Packing.ON: True, Packing.OFF: False}.get(
        config.packing, not all(dataset.is_text for dataset in training)
    )
    warnings = tuple(warning for dataset in (*training, *evaluation) for warning in dataset.warnings)
    return PreparedData(training, evaluation, is_packed, warnings)


def prepare_dataset(
    *,
    dataset: str,
    tokenizer: "PreTrainedTokenizerBase",
    seq_length: int,
    max_samples: int | None,
    num_workers: int,
    cache_dir: Path,
    show_progress: bool = False,
    show_downloads: bool = False,
) -> PreparedDataset:
    """The only dataset of `prepare_data`, plain text joined."""
    config = DataConfig(
        dataset=(DatasetEntry(dataset),),
        seq_length=seq_length,
        max_samples=max_samples,
        preprocessing_num_workers=num_workers,
    )
    prepared = prepare_data(
        config, tokenizer, cache_dir=cache_dir, show_progress=show_progress, show_downloads=show_downloads
    )
    return prepared.training[0]


def _prepare(
    entry: DatasetEntry,
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    cache_dir: Path,
    show_progress: bool,
    show_downloads: bool,
) -> PreparedDataset:
    max_samples = config.max_samples if entry.max_samples is None else entry.max_samples
    source = open_source(entry.name, show_progress=show_downloads)
    encoder = SampleEncoder(tokenizer, seq_length=config.seq_length)
    folder = cache_dir / "tokenized" / _cache_key(source, tokenizer, config.seq_length, max_samples)
    with store.locked(folder):
        stored = store.load(folder)
        if stored is None:
            num_workers = config.preprocessing_num_workers or 1
            store.save(folder, *_tokenize(source, encoder, max_samples, num_workers, show_progress))
            stored = store.load(folder)
    assert stored is not None
    tokenized, facts = stored
    return PreparedDataset(
        entry=entry,
        tokenized=tokenized,
        counts=SampleCounts(**facts["counts"]),
        format_name=facts["format_name"],
        is_text=facts["format_name"] == "text",
        warnings=tuple(facts["warnings"]),
        cache_folder=folder,
        cache_bytes=sum(path.stat().st_size for path in folder.iterdir()),
    )


def describe_sample(prepared: PreparedDataset, tokenizer: "PreTrainedTokenizerBase") -> str:
    """The first sample as the model sees it: special tokens, prompt and target apart, long parts without a middle."""
    input_ids, is_target = prepared.tokenized.sample(0)
    lines = [f"sample 0: {len(input_ids)} tokens, {int(is_target[1:].sum())} of them targets"]
    position = 0
    for part_is_target, group in groupby(is_target.tolist()):
        length = len(list(group))
        text = tokenizer.decode(input_ids[position : position + length].tolist(), skip_special_tokens=False)
        assert isinstance(text, str)
        if len(text) > _SHOWN_CHARACTERS:
            half = _SHOWN_CHARACTERS // 2
            text = f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
        lines += [f"  {'target' if part_is_target else 'prompt'} | {line}" for line in text.split("\n")]
        position += length
    return "\n".join(lines)


def _cache_key(source: Source, tokenizer: "PreTrainedTokenizerBase", seq_length: int, max_samples: int | None) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    facts = {
        "source": source.fingerprint,
        "tokenizer": tokenizer.get_vocab() if backend is None else backend.to_str(),
        "tokenizer_class": type(tokenizer).__name__,
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat_template": tokenizer.chat_template,
        "seq_length": seq_length,
        "max_samples": max_samples,
        "code": [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(__file__).parent.glob("*.py"))],
        "libraries": [metadata.version(name) for name in ("transformers", "tokenizers")],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _tokenize(
    source: Source, encoder: SampleEncoder, max_samples: int | None, num_workers: int, show_progress: bool
) -> tuple[TokenizedDataset, dict[str, Any]]:
    """The dataset, and the facts stored beside it: counts, format and warnings."""
    records = islice(source.read(), max_samples)
    first = next(records, None)
    if first is None:
        raise DataError(f"--dataset {source.label}: the dataset is empty; it must hold at least one record")
    record_format = recognize([str(column) for column in first.fields], first.where)
    # Columns that no format knows, of any kind and depth, go no further than here.
    samples = ((parse_record(record_format, each.fields, each.where), each.where) for each in chain([first], records))
    chunks = iter(lambda: list(islice(samples, _CHUNK_RECORDS)), [])
    total = source.num_records if max_samples is None else min(source.num_records or max_samples, max_samples)
    rows: list[Row] = []
    tally: Counter[str] = Counter()
    notes: Counter[Note] = Counter()
    with tqdm(total=total, desc="tokenizing", unit=" records", disable=not show_progress) as progress:
        for encoded_chunk in _encode_chunks(chunks, encoder, num_workers):
            for encoded in encoded_chunk:
                rows += encoded.rows
                notes.update(encoded.notes)
                tally["read"] += 1
                tally["cut"] += encoded.is_cut
                tally["kept" if encoded.rows else "empty" if encoded.is_empty else "dropped"] += 1
            progress.update(len(encoded_chunk))
    counts = SampleCounts(**{field.name: tally[field.name] for field in fields(SampleCounts)})
    if record_format.is_packed:
        rows = pack(rows, encoder.seq_length)
    if not rows:
        raise DataError(
            f"--dataset {source.label}: no record has a token to train on ({counts}; format "
            f"{record_format.describe()}). Check that the answers are in the column named there, and that --seq_length "
            f"{encoder.seq_length} leaves room for them"
        )
    warnings = [f"{count} of {counts.read} records: {note}" for note, count in sorted(notes.items())]
    return TokenizedDataset.from_rows(rows), {
        "counts": asdict(counts),
        "format_name": record_format.name,
        "warnings": warnings,
    }


def _encode_chunks(chunks: Iterator[Chunk], encoder: SampleEncoder, num_workers: int) -> Iterator[list[Encoded]]:
    """Encoded chunks in the order of the records, whatever the number of workers."""
    first_chunks = list(islice(chunks, 2))
    chunks = chain(first_chunks, chunks)
    if num_workers == 1 or len(first_chunks) < 2:  # a worker takes seconds to start
        yield from ([encoder.encode(*sample) for sample in chunk] for chunk in chunks)
        return
    # Not fork: by now torch and the tokenizer may have threads, and a fork keeps their locks but not the threads.
    context = multiprocessing.get_context("spawn")
    pending: deque[Future[list[Encoded]]] = deque()
    with ProcessPoolExecutor(num_workers, context, _start_worker, (_ChildOfParent(), encoder)) as pool:
        try:
            for chunk in chunks:
                with workers_not_interrupted():  # it starts workers as they are needed
                    pending.append(pool.submit(_work, chunk))
                if len(pending) == num_workers * _CHUNKS_PER_WORKER:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                "a tokenization worker died, most likely for lack of memory: lower --preprocessing_num_workers "
                f"{num_workers}"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


# A worker process gets the tokenizer once, when it starts: sent with every chunk, it would be megabytes each time.
_worker_state: list[SampleEncoder] = []


class _ChildOfParent:
    """Makes a worker end with its parent as soon as it arrives there: before the tokenizer, which takes seconds."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return end_with_parent, ()


def _start_worker(_: object, encoder: SampleEncoder) -> None:
    _worker_state[:] = [encoder]


def _work(chunk: Chunk) -> list[Encoded]:
    return [_worker_state[0].encode(*sample) for sample in chunk]
