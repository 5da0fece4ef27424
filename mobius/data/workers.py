"""Owns the processes that parse and tokenize blocks; the blocks' order does not depend on their number."""

import contextlib
import logging
import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from mobius.data.formats import RecordFormat, parse_record
from mobius.data.record_blocks import RecordBlock
from mobius.data.token_store import TokenizedSample
from mobius.data.tokenization import SampleEncoder, split_document
from mobius.errors import DataError
from mobius.signal_handling import die_with_parent, sigint_blocked

logger = logging.getLogger(__name__)

_BLOCKS_PER_WORKER: Final = 4  # in flight: enough to keep it busy, few enough that memory stays small


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """Rows of a block, one behind the other, their lengths, and how many records came to what."""

    input_ids: npt.NDArray[np.int32]
    is_target: npt.NDArray[np.bool_]
    lengths: list[int]
    num_bytes: int
    """Bytes of the file, as the block tells."""
    tally: Counter[str]
    """Numbers by the names of `SampleCounts`."""
    notes: Counter[str]


@dataclass(frozen=True, slots=True)
class BlockEncoder:
    """All that makes rows of a block; can be pickled. Rows of joined text have no lengths yet."""

    encoder: SampleEncoder
    record_format: RecordFormat
    is_joined: bool

    def encode(self, block: RecordBlock) -> EncodedBlock:
        """The rows of a block; raises DataError that names the place of a record that cannot be used."""
        rows: list[TokenizedSample] = []
        tally, notes = Counter[str](), Counter[str]()
        for record in block.records():
            sample = parse_record(self.record_format, record.fields, record.where)
            encoded = self.encoder.encode(sample, record.where)
            own: Sequence[TokenizedSample] = encoded.rows
            if self.record_format.is_text and not self.is_joined:
                own = [piece for row in own for piece in split_document(row, self.encoder.seq_length)]
            rows += own
            notes.update(note.value for note in encoded.notes)
            tally["read"] += 1
            tally["cut"] += encoded.is_truncated
            tally["kept" if own else "empty" if encoded.is_empty else "dropped"] += 1
            tally["unanswered"] += encoded.is_unanswered
        return EncodedBlock(
            np.concatenate([ids for ids, _ in rows] or [np.empty(0, np.int32)]),
            np.concatenate([is_target for _, is_target in rows] or [np.empty(0, np.bool_)]),
            [] if self.is_joined else [len(ids) for ids, _ in rows],
            block.num_bytes,
            tally,
            notes,
        )


def encode_blocks(
    blocks: Iterator[RecordBlock], encoder: BlockEncoder, num_workers: int, label: str
) -> Iterator[EncodedBlock]:
    """Encoded blocks in the order given; a single block, or with one worker all, are encoded in this process.

    The number of processes is told at once; the iterator raises DataError if one dies.
    """
    first_blocks = list(islice(blocks, 2))
    blocks = chain(first_blocks, blocks)
    if num_workers == 1 or len(first_blocks) < 2:  # a worker takes seconds to start
        logger.info("tokenizing %s in this process", label)
        return map(encoder.encode, blocks)
    logger.info("tokenizing %s in %d processes (--preprocessing_num_workers)", label, num_workers)
    return _encode_in_processes(blocks, encoder, num_workers)


def _encode_in_processes(
    blocks: Iterator[RecordBlock], encoder: BlockEncoder, num_workers: int
) -> Iterator[EncodedBlock]:
    # Not fork: by now torch and the tokenizer may have threads, and a fork keeps their locks but not the threads.
    context = multiprocessing.get_context("spawn")
    pending: deque[Future[EncodedBlock]] = deque()
    with (
        _shared(encoder) as place,
        ProcessPoolExecutor(num_workers, context, _start_worker, (_ChildOfParent(), place)) as pool,
    ):
        try:
            for block in blocks:
                with sigint_blocked():  # it starts workers as they are needed
                    pending.append(pool.submit(_work, block))
                if len(pending) == num_workers * _BLOCKS_PER_WORKER:
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


# A worker process gets the tokenizer once, when it starts: sent with every block, it would be megabytes each time.
_worker_state: list[BlockEncoder] = []


class _ChildOfParent:
    """Makes a worker end with its parent as soon as it arrives there: before the tokenizer, which takes seconds."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return die_with_parent, ()


@contextlib.contextmanager
def _shared(encoder: BlockEncoder) -> Iterator[Path]:
    """Give the path of memory that holds the encoder, for workers to read.

    With what a worker is started with it would be more than a pipe holds: this process would wait for ever to write it
    to a worker that ended before it read, as one does without the memory to import.
    """
    with open(os.memfd_create("encoder"), "wb", buffering=0) as memory:
        memory.write(ForkingPickler.dumps(encoder))
        yield Path(f"/proc/{os.getpid()}/fd/{memory.fileno()}")


def _start_worker(_: object, place: Path) -> None:
    _worker_state[:] = [ForkingPickler.loads(place.read_bytes())]


def _work(block: RecordBlock) -> EncodedBlock:
    return _worker_state[0].encode(block)
