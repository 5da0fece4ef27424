"""Owns the order of the samples and their padding into batches: the same on every rank, from the seed alone."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mobius.data.store import TokenizedDataset

IGNORED_LABEL = -100  # what torch's cross entropy ignores by default


@dataclass(frozen=True, slots=True)
class Batch:
    """One optimizer step's sequences, int64[batch, L], padded on the right.

    `labels[b, t]` is `input_ids[b, t]` where that token is a target and -100 elsewhere, not shifted: position t - 1
    predicts it. Column 0 is therefore always -100.
    `num_targets` counts the labels that are not -100, `num_tokens` the tokens that are not padding.
    """

    input_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    num_targets: int
    num_tokens: int


class Batches:
    """Endless iterator over shuffled samples.

    The epochs' permutations, each a function of (seed, epoch), form one stream, of which step k takes the positions
    [k * batch_size, (k + 1) * batch_size): a batch may span epochs, a small dataset repeats, any step can be sought.
    """

    def __init__(
        self, tokenized: TokenizedDataset, *, batch_size: int, seq_length: int, pad_token_id: int, seed: int
    ) -> None:
        self._tokenized, self._seed, self._pad_token_id = tokenized, seed, pad_token_id
        self._batch_size, self._seq_length = batch_size, seq_length
        self._step, self._epoch = 0, -1
        self._permutation: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    @property
    def state(self) -> int:
        """Number of batches taken: what `seek` needs to continue from here."""
        return self._step

    def seek(self, step: int) -> None:
        """Make the next batch the one of this step, counted from 0, forwards or backwards, without reading any."""
        self._step = step

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        input_ids = np.full((self._batch_size, self._seq_length), self._pad_token_id, dtype=np.int64)
        labels = np.full_like(input_ids, IGNORED_LABEL)
        num_tokens = 0
        for row in range(self._batch_size):
            epoch, place = divmod(self._step * self._batch_size + row, len(self._tokenized))
            if epoch != self._epoch:
                generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
                self._epoch, self._permutation = epoch, generator.permutation(len(self._tokenized))
            tokens, is_target = self._tokenized.sample(int(self._permutation[place]))
            length = len(tokens)
            assert length <= self._seq_length, f"a sample of {length} tokens in a batch of {self._seq_length}"
            input_ids[row, :length] = tokens
            labels[row, :length] = np.where(is_target, tokens, IGNORED_LABEL)
            num_tokens += length
        labels[:, 0] = IGNORED_LABEL  # nothing predicts the first token
        self._step += 1
        return Batch(input_ids, labels, int(np.count_nonzero(labels != IGNORED_LABEL)), num_tokens)
