"""Runs the processes that parse and tokenize blocks; the order of blocks does not depend on their number."""

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

from mobius.data.formats import RecordFormat, parse_record
from mobius.data.left_out import NOTHING
from mobius.data.readers import RecordBlock
from mobius.data.token_store import TokenizedDataset, TokenizedSample
from mobius.data.tokenization import SampleEncoder, split_document
from mobius.errors import DataError
from mobius.process.signal_handling import die_with_parent, sigint_blocked

logger = logging.getLogger(__name__)

_BLOCKS_PER_WORKER: Final = 4  # submitted blocks: enough to keep workers busy, but not much memory


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """Rows of a block, and counts of records by outcome."""

    samples: TokenizedDataset
    num_bytes: int
    """Bytes of the file, as in `RecordBlock`."""
    tally: Counter[str]
    """Counts by field names of `SampleCounts` and texts of `EncodingNote`, and the counts of `LeftOut.tally`."""


@dataclass(frozen=True, slots=True)
class BlockEncoder:
    """Converts blocks to rows; picklable."""

    encoder: SampleEncoder
    record_format: RecordFormat
    is_joined: bool

    def encode(self, block: RecordBlock) -> EncodedBlock:
        """Return the rows of a block. Raises DataError that names the place of an unusable record."""
        rows: list[TokenizedSample] = []
        tally = Counter[str]()
        for record in block.records():
            sample = parse_record(self.record_format, record.fields, record.where)
            encoded = self.encoder.encode(sample, record.where)
            own: Sequence[TokenizedSample] = encoded.rows
            if self.record_format.is_text and not self.is_joined:
                own = [piece for row in own for piece in split_document(row, self.encoder.seq_length)]
            rows += own
            tally.update(note.value for note in encoded.notes)
            if encoded.left_out is not NOTHING:
                tally.update(encoded.left_out.tally())
            tally["read"] += 1
            tally["cut"] += encoded.is_truncated
            tally["kept" if own else "empty" if encoded.is_empty else "dropped"] += 1
            tally["unanswered"] += encoded.is_unanswered
            tally["without_room"] += encoded.is_without_room
        return EncodedBlock(
            TokenizedDataset.of_samples(rows),
            block.num_bytes,
            tally,
        )


def encode_blocks(
    blocks: Iterator[RecordBlock], encoder: BlockEncoder, num_workers: int, label: str
) -> Iterator[EncodedBlock]:
    """Encode blocks in the given order; with one worker or a single block, this process does the work.

    The number of processes is logged immediately; the iterator raises DataError if a process dies.
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
    # Do not fork: torch and the tokenizer may have threads, and a fork copies their locks without the threads.
    context = multiprocessing.get_context("spawn")
    pending: deque[Future[EncodedBlock]] = deque()
    with (
        _shared(encoder) as place,
        ProcessPoolExecutor(num_workers, context, _start_worker, (_ChildOfParent(), place)) as pool,
    ):
        try:
            for block in blocks:
                with sigint_blocked():  # submit may start a worker
                    pending.append(_submit(pool, block))
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


def _submit(pool: ProcessPoolExecutor, block: RecordBlock) -> Future[EncodedBlock]:
    try:
        return pool.submit(_work, block)
    except OSError as error:
        if error.errno is not None:
            raise
        # The pool's thread has just found a dead worker, and closed the pipe through which `submit` wakes the thread.
        raise BrokenProcessPool(str(error)) from error


# Encoder of this worker, sent once when the worker starts: sent with every block, it would be megabytes each time.
_worker_state: list[BlockEncoder] = []


class _ChildOfParent:
    """Object that, when unpickled, makes a worker end with its parent, even while the tokenizer still loads."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return die_with_parent, ()


@contextlib.contextmanager
def _shared(encoder: BlockEncoder) -> Iterator[Path]:
    """Yield the path of an in-memory file with the encoder, which workers read.

    As a start argument, the encoder would exceed a pipe's buffer. This process would then block forever if a worker
    ended before reading it, for example because the worker lacks memory for its imports.
    """
    with open(os.memfd_create("encoder"), "wb", buffering=0) as memory:
        memory.write(ForkingPickler.dumps(encoder))
        yield Path(f"/proc/{os.getpid()}/fd/{memory.fileno()}")


def _start_worker(_: object, place: Path) -> None:
    try:
        content = place.read_bytes()
    except FileNotFoundError:  # the parent ended while this process started
        os._exit(0)
    _worker_state[:] = [ForkingPickler.loads(content)]


def _work(block: RecordBlock) -> EncodedBlock:
    return _worker_state[0].encode(block)
