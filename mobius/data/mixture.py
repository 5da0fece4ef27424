"""Chooses the samples of each epoch (datasets mixed by weight), and the held-out samples; depends only on the seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from mobius.data.token_store import TokenizedDataset
from mobius.errors import DataError

Indices = npt.NDArray[np.int64]

# Last words of seeds with four words. A seed must not end in zero: numpy pads seeds with zeros, so it would equal a
# shorter seed.
_ROTATION, _HELD_OUT = 1, 2


def seeded_generator(*words: int) -> np.random.Generator:
    """Return a generator seeded by `words`: (seed, epoch) to order samples, (seed, epoch, window + 1) to order rows.

    numpy ignores zeros at the end: the words (1, 2, 0) give the same numbers as (1, 2).
    """
    return np.random.Generator(np.random.PCG64(words))


@dataclass(frozen=True, slots=True)
class WeightedSamples:
    """Samples of a dataset, each used `weight` (above 0) times per epoch on average; `indices` None: all samples."""

    tokenized: TokenizedDataset
    weight: float = 1.0
    indices: Indices | None = None

    def __len__(self) -> int:
        return len(self.tokenized) if self.indices is None else len(self.indices)

    @property
    def exact_weight(self) -> Fraction:
        """Weight as the user typed it: 0.3 is exactly 3/10, so ten epochs have each sample exactly three times."""
        return Fraction(str(self.weight))

    def num_through(self, epoch: int) -> int:
        """Return the total number of samples in all epochs before `epoch`."""
        weight = self.exact_weight
        return len(self) * epoch * weight.numerator // weight.denominator


def epoch_size(parts: Sequence[WeightedSamples], epoch: int) -> int:
    """Return the number of samples in an epoch; a fractional weight makes it vary by one between epochs."""
    return sum(part.num_through(epoch + 1) - part.num_through(epoch) for part in parts)


def epoch_samples(parts: Sequence[WeightedSamples], seed: int, epoch: int) -> tuple[npt.NDArray[np.int16], Indices]:
    """Return an epoch's samples in order: the number of each sample's part, and its index in the part's dataset."""
    chosen = [_chosen(part, number, seed, epoch) for number, part in enumerate(parts)]
    order = seeded_generator(seed, epoch).permutation(sum(map(len, chosen)))
    numbers = np.repeat(np.arange(len(parts), dtype=np.int16), [len(indices) for indices in chosen])
    return numbers[order], np.concatenate(chosen)[order]


def _chosen(part: WeightedSamples, number: int, seed: int, epoch: int) -> Indices:
    """Return a part's indices in an epoch, unshuffled: the next indices in an endless repetition of the samples.

    Each sample appears floor(weight) or ceil(weight) times; over many epochs all samples appear equally often.
    """
    places = np.arange(part.num_through(epoch), part.num_through(epoch + 1), dtype=np.int64)
    if len(part):
        places %= len(part)
    if part.exact_weight.denominator > 1:
        places = seeded_generator(seed, number, 0, _ROTATION).permutation(len(part))[places]
    return places if part.indices is None else part.indices[places]


def hold_out(sizes: Sequence[int], val_size: float, seed: int) -> tuple[list[Indices], list[Indices]]:
    """Split datasets with `sizes` samples; return the indices to train on and the held-out indices of each dataset.

    `val_size` is the number of held-out samples of all datasets or, below 1, their share of all samples, rounded up.
    Raises DataError if it is above 1 and not an integer, or if it leaves nothing to train on.
    """
    total = sum(sizes)
    if val_size >= 1 and val_size != int(val_size):
        raise DataError(f"--val_size {val_size:g}: give a whole number of samples, or a share of the data below 1")
    exact = Fraction(str(val_size))
    count = int(exact) if exact >= 1 else -(-total * exact.numerator // exact.denominator)
    if count and count >= total:
        most = f"the largest allowed is {total - 1}" if total > 1 else "give more data, or leave it out"
        raise DataError(f"--val_size {val_size:.15g} holds {count:,} of {total:,} samples out of training; {most}")
    is_held_out = np.zeros(total, dtype=np.bool_)
    is_held_out[seeded_generator(seed, 0, 0, _HELD_OUT).permutation(total)[:count]] = True
    parts = np.split(is_held_out, np.cumsum(sizes)[:-1])
    return [np.flatnonzero(~part) for part in parts], [np.flatnonzero(part) for part in parts]
