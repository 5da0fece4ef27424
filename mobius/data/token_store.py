"""Stores tokenized samples as arrays in memory-mapped files, written part by part.

    folder.partial/   input_ids.bin  is_target.bin  offsets.bin    appended to, part by part
                      journal.jsonl                                one line per finished part: sizes and progress
    folder/           the files above, with facts.json instead of the journal: complete, created by one rename

    sequence_offsets.bin               only if samples hold several sequences
    images.bin  image_numbers.bin      only if samples have images: a line of JSON of each, and each sample's number
    token.NAME.bin, sequence.NAME.bin  only if samples carry the value NAME (fp32) of each token, or of each sequence

The journal line of a part is written after the part's data is on disk. Bytes after the sizes in the last line belong to
an unfinished part of a killed process; the next process removes these bytes.
"""

import fcntl
import json
import logging
import math
import os
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from mobius.data.images import ImageFile
from mobius.errors import DataError, first_line, reason_of
from mobius.files.atomic_files import sync_to_disk
from mobius.files.regular_files import read_json
from mobius.units import format_bytes

logger = logging.getLogger(__name__)

Values = Mapping[str, npt.NDArray[np.float32]]
"""Name -> one number for each token, or for each sequence."""

WEIGHT: Final = "weight"
"""Name of the value by which a token's loss is multiplied."""
REWARD: Final = "reward"
"""Name of the value that is the reward of a sequence."""
ADVANTAGE: Final = "advantage"
"""Name of the value that is the advantage of a sequence over the others of its group."""
SAMPLER: Final = "sampler"
"""Name of the value that is the log-probability that a token's sampler gave to it."""
_NEUTRAL: Final = {WEIGHT: 1.0, REWARD: math.nan, SAMPLER: math.nan}
"""Value of a sample without this value, if other samples of its dataset have one (NaN: unknown); 0 for other names."""
_SEQUENCES: Final = "sequence_offsets"
_OF_TOKEN, _OF_SEQUENCE = "token.", "sequence."
_IMAGES, _IMAGE_NUMBERS = "images", "image_numbers"
"""Names of the file with a line of each image, and of that with the number of images of each sample."""
_ARRAYS: Final = {"input_ids": np.int32, "is_target": np.bool_, "offsets": np.int64}
_DTYPES: Final = {**_ARRAYS, _SEQUENCES: np.int64, _IMAGES: np.uint8, _IMAGE_NUMBERS: np.int32}
_FACTS: Final = "facts.json"
_JOURNAL: Final = "journal.jsonl"
_OFFSETS_AT_ONCE: Final = 1 << 20
_VALUES_AT_ONCE: Final = 1 << 20
_ABANDONED_SECONDS: Final = 7 * 24 * 3600


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedSample:
    """One or more sequences that are trained together (a pair has two), one after the other in the same arrays."""

    input_ids: npt.NDArray[np.int32]
    is_target: npt.NDArray[np.bool_]
    lengths: tuple[int, ...]
    """Number of tokens of each sequence."""
    token_values: Values = field(default_factory=dict)
    sequence_values: Values = field(default_factory=dict)
    images: tuple[ImageFile, ...] = ()
    """Images whose tokens the sample holds, in the order of its tokens."""

    @classmethod
    def plain(cls, input_ids: npt.NDArray[np.int32], is_target: npt.NDArray[np.bool_]) -> Self:
        """Return a sample of one sequence without values."""
        return cls(input_ids, is_target, (len(input_ids),))

    def __len__(self) -> int:
        return len(self.input_ids)

    def piece(self, span: slice) -> "TokenizedSample":
        """Return consecutive tokens of a sample of one sequence, without values of the sequence."""
        ids = self.input_ids[span]
        values = {name: values[span] for name, values in self.token_values.items()}
        return TokenizedSample(ids, self.is_target[span], (len(ids),), values)

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Position of the first token of each sequence."""
        return np.cumsum((0, *self.lengths[:-1]), dtype=np.int64)


def virtual_ids(number: int) -> npt.NDArray[np.int32]:
    """Return the ids of a prompt's virtual tokens, which no tokenizer has: -1 for the first, -2 for the second."""
    return ~np.arange(number, dtype=np.int32)


@dataclass(frozen=True)
class TokenizedDataset:
    """Samples of different lengths in flat arrays: sample i is `[offsets[i], offsets[i + 1])` of the arrays of tokens.

    The sequences of all samples are numbered in order: sequence s is `[sequence_offsets[s], sequence_offsets[s + 1])`.
    """

    input_ids: npt.NDArray[np.int32]
    is_target: npt.NDArray[np.bool_]
    offsets: npt.NDArray[np.int64]
    sequence_offsets: npt.NDArray[np.int64] | None = None
    """None: each sample is one sequence."""
    token_values: Values = field(default_factory=dict)
    sequence_values: Values = field(default_factory=dict)
    num_virtual_tokens: int = 0
    """Number of virtual tokens before each sequence; lengths count them, arrays and offsets do not hold them."""
    images: Sequence[ImageFile] = ()
    """Images of all samples; those of sample i are `[image_offsets[i], image_offsets[i + 1])`."""
    image_offsets: npt.NDArray[np.int64] | None = None
    """None: no sample has images."""
    has_prefix: bool = False
    """Whether virtual tokens are those of a prefix, which predict nothing; else the last one predicts a token."""

    @classmethod
    def of_samples(cls, samples: Sequence[TokenizedSample]) -> Self:
        """Return a dataset in memory. A value that only some samples have is 1 (`weight`) or 0 for the others."""
        lengths = [length for sample in samples for length in sample.lengths]
        return cls(
            np.concatenate([np.empty(0, np.int32), *(sample.input_ids for sample in samples)]),
            np.concatenate([np.empty(0, np.bool_), *(sample.is_target for sample in samples)]),
            np.cumsum([0, *map(len, samples)], dtype=np.int64),
            None if len(lengths) == len(samples) else np.cumsum([0, *lengths], dtype=np.int64),
            _concatenate([(sample.token_values, len(sample)) for sample in samples]),
            _concatenate([(sample.sequence_values, len(sample.lengths)) for sample in samples]),
            **_images_of([sample.images for sample in samples]),
        )

    def images_of(self, index: int) -> tuple[ImageFile, ...]:
        """Return the images of a sample."""
        if self.image_offsets is None:
            return ()
        return tuple(self.images[self.image_offsets[index] : self.image_offsets[index + 1]])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def has_sequences(self) -> bool:
        """Whether the sequences matter: samples hold several, or sequences carry values."""
        return self.sequence_offsets is not None or bool(self.sequence_values)

    @property
    def all_sequence_offsets(self) -> npt.NDArray[np.int64]:
        """Bounds of all sequences; the bounds of the samples if each sample is one sequence."""
        return self.offsets if self.sequence_offsets is None else self.sequence_offsets

    @property
    def num_sequences(self) -> int:
        """Number of sequences of all samples."""
        return len(self.all_sequence_offsets) - 1

    @cached_property
    def max_sequences(self) -> int:
        """Largest number of sequences of a sample."""
        if self.sequence_offsets is None:
            return 1
        return int(np.diff(np.searchsorted(self.sequence_offsets, self.offsets)).max())

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Token count of each sample, int32[len(self)]; in memory, not memory-mapped."""
        lengths = np.diff(self.offsets).astype(np.int32)
        if not self.num_virtual_tokens:
            return lengths
        sequences = np.diff(np.searchsorted(self.all_sequence_offsets, self.offsets)).astype(np.int32)
        return lengths + sequences * np.int32(self.num_virtual_tokens)

    def sequence_numbers(self, index: int) -> range:
        """Return the numbers of a sample's sequences among all sequences of the dataset."""
        if self.sequence_offsets is None:
            return range(index, index + 1)
        return range(*np.searchsorted(self.sequence_offsets, self.offsets[index : index + 2]).tolist())

    def sequence_lengths(self, index: int) -> tuple[int, ...]:
        """Return the token counts of a sample's sequences."""
        numbers = self.sequence_numbers(index)
        bounds = self.all_sequence_offsets[numbers.start : numbers.stop + 1].tolist()
        return tuple(stop - start + self.num_virtual_tokens for start, stop in pairwise(bounds))

    def sample(self, index: int) -> TokenizedSample:
        """Return views of a sample's arrays; with virtual tokens, new arrays."""
        span = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        numbers = self.sequence_numbers(index)
        of_sequences = slice(numbers.start, numbers.stop)
        lengths = self.sequence_lengths(index)
        tokens: dict[str, Any] = {"input_ids": self.input_ids[span], "is_target": self.is_target[span]}
        token_values = {name: values[span] for name, values in self.token_values.items()}
        if number := self.num_virtual_tokens:
            starts = np.cumsum([0, *lengths[:-1]]) - number * np.arange(len(lengths))
            places = np.repeat(starts, number)
            tokens["input_ids"] = np.insert(tokens["input_ids"], places, np.tile(virtual_ids(number), len(lengths)))
            is_target = np.insert(tokens["is_target"], places, False)
            if self.has_prefix:
                is_target[np.cumsum([0, *lengths[:-1]]) + number] = False
            tokens["is_target"] = is_target
            token_values = {name: np.insert(each, places, neutral_value(name)) for name, each in token_values.items()}
        sequence_values = {name: values[of_sequences] for name, values in self.sequence_values.items()}
        tokens |= {"lengths": lengths, "token_values": token_values, "sequence_values": sequence_values}
        return TokenizedSample(**tokens, images=self.images_of(index))


def _images_of(images: Sequence[Sequence[ImageFile]]) -> dict[str, Any]:
    """Return the fields of a dataset about images, from those of each sample."""
    if not any(images):
        return {}
    offsets = np.cumsum([0, *map(len, images)], dtype=np.int64)
    return {"images": [*chain.from_iterable(images)], "image_offsets": offsets}


def neutral_value(name: str) -> float:
    """Return the value of tokens or sequences whose sample lacks the value `name`."""
    return _NEUTRAL.get(name, 0.0)


def _neutral_values(name: str, number: int) -> npt.NDArray[np.float32]:
    return np.full(number, neutral_value(name), dtype=np.float32)


def _concatenate(parts: Sequence[tuple[Values, int]]) -> dict[str, npt.NDArray[np.float32]]:
    """Concatenate each value of any part; a part is its values and its number of tokens or sequences."""
    names = sorted({name for values, _ in parts for name in values})
    return {
        name: np.concatenate(
            [values[name] if name in values else _neutral_values(name, number) for values, number in parts]
        ).astype(np.float32)
        for name in names
    }


@contextmanager
def tokenized_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder` against all other processes of this machine; the end of a process releases it."""
    with _explained(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = folder.with_name(folder.name + ".lock").open("w")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot keep the tokenized dataset in {folder.parent}: {reason_of(error)}. Make that folder writable, "
            "free some space, or choose another place with the environment variable XDG_CACHE_HOME"
        ) from error


def load_tokenized(folder: Path) -> tuple[TokenizedDataset, dict[str, Any]] | None:
    """Return the dataset, memory-mapped so that ranks share its pages, and its facts; None if `folder` does not exist.

    A damaged dataset is removed with a warning, and None is returned. The caller holds the lock.
    """
    if not folder.is_dir():
        return None
    try:
        facts, checksum = read_json(folder / _FACTS, DataError)
        if checksum != _checksum(facts):
            raise ValueError("the checksum of the facts is wrong")
        dataset = _map_arrays(folder, facts)
        return dataset, dict(facts)
    except (DataError, OSError, ValueError, EOFError, TypeError, IndexError, KeyError, AttributeError) as error:
        logger.warning("the tokenized dataset in %s is damaged and is made again: %s", folder, first_line(error))
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _map_arrays(folder: Path, facts: Mapping[str, Any]) -> TokenizedDataset:
    """Return the dataset with its arrays mapped. Raises ValueError if their sizes do not match `facts`."""
    arrays: dict[str, Any] = {name: np.memmap(_path(folder, name), kind, "r") for name, kind in _ARRAYS.items()}
    num_tokens, num_samples = facts["num_tokens"], facts["num_samples"]
    num_sequences = facts.get("num_sequences", num_samples)
    if num_sequences != num_samples:
        arrays[_SEQUENCES] = np.memmap(_path(folder, _SEQUENCES), np.int64, "r")
    values = {name: np.memmap(_path(folder, name), np.float32, "r") for name in facts.get("values", ())}
    for field_name, start, number in (
        ("token_values", _OF_TOKEN, num_tokens),
        ("sequence_values", _OF_SEQUENCE, num_sequences),
    ):
        found = {name.removeprefix(start): array for name, array in values.items() if name.startswith(start)}
        arrays[field_name] = found
        if any(len(array) != number for array in found.values()):
            raise ValueError("file sizes do not match the facts")
    if facts.get("num_image_bytes"):
        numbers = np.fromfile(_path(folder, _IMAGE_NUMBERS), np.int32)
        images = [*map(ImageFile.loads, _path(folder, _IMAGES).read_bytes().splitlines())]
        arrays |= {"images": images, "image_offsets": np.cumsum([0, *numbers], dtype=np.int64)}
        if (len(numbers), int(numbers.sum())) != (num_samples, len(images)):
            raise ValueError("the images do not match the facts")
    dataset = TokenizedDataset(**arrays)
    bounds = dataset.all_sequence_offsets
    sizes = [len(dataset.input_ids), len(dataset.is_target), int(dataset.offsets[-1]), int(bounds[-1])]
    if sizes != [num_tokens] * 4 or (len(dataset), dataset.num_sequences) != (num_samples, num_sequences):
        raise ValueError("file sizes do not match the facts")
    if dataset.lengths.min() < 1:
        raise ValueError("a sample has no tokens")
    return dataset


def remove_abandoned(parent: Path) -> None:
    """Delete unfinished datasets in `parent` that are at least a week old, unless a run holds their lock."""
    for partial in parent.glob("*.partial"):
        # Skip a dataset that a run has locked, that is already gone, or that may not be removed.
        with suppress(OSError), partial.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            facts = [path.stat() for path in (partial, *partial.iterdir())]
            last = max(fact.st_mtime for fact in facts)
            if time.time() - last > _ABANDONED_SECONDS:
                shutil.rmtree(partial)
                size = format_bytes(sum(fact.st_size for fact in facts))
                day = time.strftime("%Y-%m-%d", time.gmtime(last))
                logger.info("removed %s (%s), which a run left unfinished on %s", partial, size, day)


class DatasetWriter:
    """Owns the files of a growing dataset; the caller holds the lock of `folder`.

    `progress` is the progress at the last part that this or an earlier process has committed; None before the first
    part. As a context manager, the writer closes the files, and deletes them if no part was committed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._partial = folder, _partial(folder)
        self.progress: dict[str, Any] | None = None
        self.num_tokens = self.num_samples = self.num_sequences = self.num_image_bytes = 0
        self._values = list[str]()  # names of the files with values
        self._files = ExitStack()
        with _explained(folder):
            self._partial.mkdir(exist_ok=True)
            journal_bytes = self._resume()
            self._journal = self._open(self._partial / _JOURNAL, journal_bytes)
            sizes = self._sizes(self._values)
            self._arrays = {name: self._open(_path(self._partial, name), size) for name, size in sizes.items()}
            for path in self._partial.glob("*.bin"):
                if path.stem not in sizes:
                    path.unlink()  # values that only an unfinished part had

    def append(self, samples: TokenizedDataset, *, is_joined: bool = False) -> None:
        """Append samples to the arrays; if `is_joined`, append their tokens, which `finish` splits into rows."""
        arrays = {"input_ids": samples.input_ids, "is_target": samples.is_target, **_file_values(samples)}
        if not is_joined:
            arrays["offsets"] = self.num_tokens + samples.offsets[:-1]
            arrays[_SEQUENCES] = self.num_tokens + samples.all_sequence_offsets[:-1]
            bounds = samples.image_offsets
            arrays[_IMAGE_NUMBERS] = np.zeros(len(samples), np.int32) if bounds is None else np.diff(bounds)
        lines = b"".join(image.dumps() for image in samples.images)
        arrays[_IMAGES] = np.frombuffer(lines, np.uint8)
        with _explained(self._folder):
            for name in arrays.keys() - {*self._arrays}:
                self._start_values(name)
            for name in self._values:
                if name not in arrays:
                    number = len(samples.input_ids) if name.startswith(_OF_TOKEN) else samples.num_sequences
                    arrays[name] = _neutral_values(_value_name(name), number)
            for name, array in arrays.items():
                self._arrays[name].write(np.ascontiguousarray(array, _dtype(name)).tobytes())
        self.num_tokens += len(samples.input_ids)
        self.num_image_bytes += len(lines)
        if not is_joined:
            self.num_samples += len(samples)
            self.num_sequences += samples.num_sequences

    def _start_values(self, name: str) -> None:
        """Open the file of a value, with the neutral value for all tokens or sequences before."""
        self._values.append(name)
        file = self._arrays[name] = self._open(_path(self._partial, name), 0)
        number = self._sizes([name])[name] // 4
        for first in range(0, number, _VALUES_AT_ONCE):
            file.write(_neutral_values(_value_name(name), min(_VALUES_AT_ONCE, number - first)).tobytes())

    def commit_part(self, progress: Mapping[str, object]) -> None:
        """Sync all data to disk, then record the part with `progress` (JSON); after that, the part survives a crash."""
        with _explained(self._folder):
            for file in self._arrays.values():
                self._sync(file)
            line = {**self._counts(), "values": self._values, "progress": progress}
            self._journal.write(json.dumps(line).encode() + b"\n")
            self._sync(self._journal)
        self.progress = dict(progress)

    def finish(self, facts: Mapping[str, object], *, row_length: int | None = None) -> None:
        """Complete the dataset with `facts` (JSON) and rename it to `folder`; `row_length` splits all tokens into rows.

        The last row may be shorter; a single remaining token is dropped, because nothing predicts a row's first token.
        """
        with _explained(self._folder):
            if row_length is not None:
                self._cut(row_length)
            for name in ("offsets", _SEQUENCES):
                self._arrays[name].write(np.int64(self.num_tokens).tobytes())
            all_facts = {**facts, **self._counts(), "values": self._values}
            if self.num_sequences == self.num_samples:
                self._arrays.pop(_SEQUENCES).close()
                _path(self._partial, _SEQUENCES).unlink()
                del all_facts["num_sequences"]
            if not self.num_image_bytes:
                for name in (_IMAGES, _IMAGE_NUMBERS):
                    self._arrays.pop(name).close()
                    _path(self._partial, name).unlink()
                del all_facts["num_image_bytes"]
            if not self._values:
                del all_facts["values"]
            for file in self._arrays.values():
                self._sync(file)
            with (self._partial / _FACTS).open("wb") as file:
                file.write(json.dumps([all_facts, _checksum(all_facts)], indent=1).encode())
                self._sync(file)
            self._files.close()
            (self._partial / _JOURNAL).unlink()
            self._partial.rename(self._folder)
            sync_to_disk(self._folder.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # a full disk was reported before; buffered data belong to no committed part
            self._files.close()
        if self.progress is None:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _resume(self) -> int:
        """Adopt the committed parts on disk; return the journal's size up to the last committed part."""
        journal = self._partial / _JOURNAL
        if not journal.is_file():
            return 0
        try:
            text = journal.read_bytes()
            text = text[: text.rfind(b"\n") + 1]
            if not text:
                return 0
            last = json.loads(text.splitlines()[-1])
            counts = [int(last[name]) for name in self._counts()]
            self.num_tokens, self.num_samples, self.num_sequences, self.num_image_bytes = counts
            self._values = list(map(str, last["values"]))
            for name, size in self._sizes(self._values).items():
                if _path(self._partial, name).stat().st_size < size:
                    raise ValueError(f"{name}.bin is too short")
            self.progress = dict(last["progress"])
            return len(text)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            logger.warning("unfinished data in %s is damaged and is made again: %s", self._partial, first_line(error))
            self.num_tokens = self.num_samples = self.num_sequences = self.num_image_bytes = 0
            self._values = []
            return 0

    def _counts(self) -> dict[str, int]:
        return {
            "num_tokens": self.num_tokens,
            "num_samples": self.num_samples,
            "num_sequences": self.num_sequences,
            "num_image_bytes": self.num_image_bytes,
        }

    def _sizes(self, values: Sequence[str]) -> dict[str, int]:
        """Return the bytes of each file, without the last offsets, which are written at the end."""
        return {
            "input_ids": 4 * self.num_tokens,
            "is_target": self.num_tokens,
            "offsets": 8 * self.num_samples,
            _SEQUENCES: 8 * self.num_sequences,
            _IMAGES: self.num_image_bytes,
            _IMAGE_NUMBERS: 4 * self.num_samples,
            **{name: 4 * (self.num_tokens if name.startswith(_OF_TOKEN) else self.num_sequences) for name in values},
        }

    def _open(self, path: Path, size: int) -> Any:
        file = self._files.enter_context(path.open("ab"))
        file.truncate(size)
        return file

    def _sync(self, file: Any) -> None:
        file.flush()
        os.fsync(file.fileno())

    def _cut(self, row_length: int) -> None:
        if self.num_tokens % row_length == 1:
            self.num_tokens -= 1
            for name in ("input_ids", "is_target", *self._values):
                self._arrays[name].flush()
                self._arrays[name].truncate(self.num_tokens * np.dtype(_dtype(name)).itemsize)
        self.num_samples = self.num_sequences = -(-self.num_tokens // row_length)
        for first in range(0, self.num_samples, _OFFSETS_AT_ONCE):
            rows = np.arange(first, min(first + _OFFSETS_AT_ONCE, self.num_samples), dtype=np.int64)
            self._arrays["offsets"].write((rows * row_length).tobytes())


def _checksum(facts: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def _file_values(dataset: TokenizedDataset) -> dict[str, npt.NDArray[np.float32]]:
    """Return the values of tokens and of sequences by the names of their files."""
    return {
        **{_OF_TOKEN + name: values for name, values in dataset.token_values.items()},
        **{_OF_SEQUENCE + name: values for name, values in dataset.sequence_values.items()},
    }


def _value_name(file_name: str) -> str:
    return file_name.partition(".")[2]


def _dtype(name: str) -> Any:
    return _DTYPES.get(name, np.float32)


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.bin"


def _partial(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")
