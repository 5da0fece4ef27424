"""Counts tokens, targets, endings and duplicates in tokenized samples before a run, and warns about problems.

Samples are memory-mapped and read once, a few megabytes at a time.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

import numpy as np
import numpy.typing as npt

from mobius.data.datasets import PreparedDataset
from mobius.data.token_store import TokenizedDataset

Fingerprints = npt.NDArray[np.uint64]
"""One number for each sample; samples with equal tokens and images have equal numbers."""

_CHUNK_TOKENS: Final = 1 << 20
"""Tokens processed at a time: arrays of 8 MiB."""
_KEPT_FINGERPRINTS: Final = 1 << 22
"""Maximum number of fingerprints in memory (32 MiB). If there are more, a fingerprint's value decides if it is kept."""
_FEW_TARGETS: Final = 0.03
_MANY_UNKNOWN: Final = 0.001
"""Shares of all tokens: a warning is given for fewer targets or for more unknown tokens."""


@dataclass(frozen=True, slots=True)
class SampleStatistics:
    """Counts of a dataset's samples; one of `fingerprint_stride` fingerprints is kept, with the sample's index."""

    num_samples: int
    num_tokens: int
    num_targets: int
    num_ended: int
    """Number of samples all of whose sequences end with the end-of-sequence token."""
    num_eos_targets: int
    """Number of targets that are the end-of-sequence token."""
    num_single_token_targets: int
    """Number of samples with a sequence of a single target token; such an answer is only its end token."""
    num_unknown: int
    """Number of occurrences of the tokenizer's unknown token."""
    length_counts: npt.NDArray[np.int64]
    """Number of samples of each length, from 0 tokens to the length of the longest sample."""
    fingerprint_stride: int
    indices: npt.NDArray[np.int64]
    fingerprints: Fingerprints

    @property
    def num_duplicates(self) -> int:
        """Number of samples that equal an earlier sample; an estimate if not all fingerprints are kept."""
        return self.fingerprint_stride * (len(self.fingerprints) - len(np.unique(self.fingerprints)))

    @property
    def is_exact(self) -> bool:
        """Whether `num_duplicates` is a count, not an estimate."""
        return self.fingerprint_stride == 1

    def fingerprints_of(self, indices: npt.NDArray[np.int64] | None) -> Fingerprints:
        """Return the kept fingerprints of the samples `indices`; None: of all samples."""
        return self.fingerprints if indices is None else self.fingerprints[np.isin(self.indices, indices)]


def choose_fingerprint_stride(num_samples: int) -> int:
    """Return the fingerprint stride for `num_samples` samples; 1 keeps all fingerprints."""
    return -(-num_samples // _KEPT_FINGERPRINTS)


def compute_sample_statistics(
    tokenized: TokenizedDataset, *, eos_token_id: int, unknown_token_id: int | None, fingerprint_stride: int = 1
) -> SampleStatistics:
    """Read and count all samples once; takes about three seconds for a million samples of 500 tokens."""
    lengths = np.diff(tokenized.offsets)  # without virtual tokens, which hold no text
    longest = int(lengths.max())
    # One random odd number (not even) per position; the seed is fixed.
    factors = np.random.Generator(np.random.PCG64(18)).integers(2**64, size=longest, dtype=np.uint64) | np.uint64(1)
    length_counts = np.zeros(longest + 1, dtype=np.int64)
    sums = Counter[str]()
    indices, fingerprints = list[npt.NDArray[np.int64]](), list[Fingerprints]()
    for first, last in _chunks(tokenized.offsets):
        tokens = slice(int(tokenized.offsets[first]), int(tokenized.offsets[last]))
        ids, is_target = np.asarray(tokenized.input_ids[tokens]), np.array(tokenized.is_target[tokens])
        own = lengths[first:last].astype(np.int64)
        ends = np.cumsum(own)
        starts = ends - own
        length_counts += np.bincount(own, minlength=longest + 1)
        bounds = _sequence_bounds(tokenized, first, last)
        first_sequences = np.searchsorted(bounds, starts)
        is_target[bounds[:-1]] = False  # the first token is never predicted
        is_eos = ids == eos_token_id
        num_targets = np.add.reduceat(is_target, bounds[:-1], dtype=np.int64)
        sums["num_targets"] += int(num_targets.sum())
        sums["num_ended"] += int(np.logical_and.reduceat(is_eos[bounds[1:] - 1], first_sequences).sum())
        sums["num_eos_targets"] += int(np.count_nonzero(is_eos & is_target))
        sums["num_single_token_targets"] += int(np.logical_or.reduceat(num_targets == 1, first_sequences).sum())
        sums["num_unknown"] += 0 if unknown_token_id is None else int(np.count_nonzero(ids == unknown_token_id))
        prints = _fingerprints(ids, starts, own, factors) ^ _image_fingerprints(tokenized, first, last)
        sampled = np.flatnonzero(prints % np.uint64(fingerprint_stride) == 0)
        indices.append(sampled + first)
        fingerprints.append(prints[sampled])
    return SampleStatistics(
        num_samples=len(lengths),
        num_tokens=int(lengths.sum(dtype=np.int64)),
        **sums,
        length_counts=length_counts,
        fingerprint_stride=fingerprint_stride,
        indices=np.concatenate(indices),
        fingerprints=np.concatenate(fingerprints),
    )


def _sequence_bounds(tokenized: TokenizedDataset, first: int, last: int) -> npt.NDArray[np.int64]:
    """Return the bounds of the sequences of samples `first` to `last` (exclusive), from the first sample's start."""
    start, offsets = int(tokenized.offsets[first]), tokenized.all_sequence_offsets
    begin, end = np.searchsorted(offsets, (start, tokenized.offsets[last]))
    bounds: npt.NDArray[np.int64] = np.asarray(offsets[begin : end + 1]) - start
    return bounds


def _chunks(offsets: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield ranges of samples with about `_CHUNK_TOKENS` tokens, and at least one sample."""
    first, num_samples = 0, len(offsets) - 1
    while first < num_samples:
        last = int(np.searchsorted(offsets, offsets[first] + _CHUNK_TOKENS, side="right")) - 1
        yield first, (last := max(first + 1, last))
        first = last


def _fingerprints(
    ids: npt.NDArray[np.int32],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    factors: npt.NDArray[np.uint64],
) -> Fingerprints:
    """Return for each sample the sum of (token + 1) x (factor of its position) modulo 2^64, high bits XORed into low.

    Multilinear hashing (Lemire and Kaser 2014): two different samples collide with probability 2^-32 or less.
    """
    positions = np.arange(len(ids)) - np.repeat(starts, lengths)
    products = factors[positions] * (ids.astype(np.uint64) + np.uint64(1))
    sums: Fingerprints = np.add.reduceat(products, starts)
    return sums ^ (sums >> np.uint64(29))


def _image_fingerprints(tokenized: TokenizedDataset, first: int, last: int) -> Fingerprints | np.uint64:
    """Return a hash of the images of each sample from `first` to `last` (exclusive); 0 without images."""
    if tokenized.image_offsets is None:
        return np.uint64(0)
    contents = ("".join(image.content for image in tokenized.images_of(index)) for index in range(first, last))
    return np.array([int(sha256(each.encode()).hexdigest()[:16], 16) if each else 0 for each in contents], np.uint64)


def find_data_warnings(dataset: PreparedDataset, found: SampleStatistics) -> list[str]:
    """Return warnings about a dataset, one sentence each, for the user to read before training."""
    counts, texts, num_samples = dataset.counts, list(dataset.warnings), found.num_samples
    records = {
        "are empty: they hold no text": counts.empty,
        **{f"{reason} were dropped": number for reason, number in counts.dropped_by_reason.items()},
        "are longer than seq_length: they were cut, and tokens of them are lost": counts.cut,
    }
    texts += [f"{number:,} of {counts.read:,} records {text}" for text, number in records.items() if number]
    if found.num_duplicates:
        texts.append(duplicates_text(found))
    if number := found.num_single_token_targets:
        texts.append(
            f"{number:,} of {num_samples:,} samples have a single token as their target: answers without words?"
        )
    if not found.num_eos_targets:
        texts.append("no target is the end-of-sequence token: the model would not learn to stop")
    elif not dataset.is_text and (number := num_samples - found.num_ended):
        texts.append(f"{number:,} of {num_samples:,} samples end in the middle of an answer: it was cut")
    if found.num_targets < _FEW_TARGETS * found.num_tokens:
        share = found.num_targets / found.num_tokens
        texts.append(f"only {100 * share:.2g} % of the tokens are targets: most of the work is for prompts")
    if found.num_unknown > _MANY_UNKNOWN * found.num_tokens:
        share = found.num_unknown / found.num_tokens
        texts.append(f"{100 * share:.2g} % of the tokens are unknown to the tokenizer: is it made for other text?")
    return texts


def duplicates_text(found: SampleStatistics) -> str:
    """Return a text on the number of samples that repeat an earlier sample."""
    about = "" if found.is_exact else "about "
    return f"{about}{found.num_duplicates:,} of {found.num_samples:,} samples repeat an earlier one exactly"


def count_repeated(fingerprints: Fingerprints, earlier: Fingerprints) -> int:
    """Return the number of samples whose fingerprint is also in `earlier`, for example in the training data."""
    return int(np.count_nonzero(np.isin(fingerprints, earlier)))
