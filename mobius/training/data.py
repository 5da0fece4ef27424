"""Data of a run: prepares the datasets and makes batches of their samples. All ranks make equal batches."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from mobius.config.config import Config, FinetuningType
from mobius.config.validation import resolve_epochs
from mobius.data.batches import TrainingBatches
from mobius.data.datasets import PreparedData, PreparedDataset, prepare_data, with_derived_values
from mobius.data.images import ImageFile, ImageRules
from mobius.data.mixture import WeightedSamples, hold_out
from mobius.data.preferences import MARGIN
from mobius.data.preview import describe_sample
from mobius.data.statistics import choose_fingerprint_stride, compute_sample_statistics, count_repeated, duplicates_text
from mobius.data.token_store import ADVANTAGE
from mobius.data.tokenization import NO_IMAGES
from mobius.errors import DataError
from mobius.models.tokenizer import pad_token_id
from mobius.objectives.registry import make_objective
from mobius.process.log import RANK_ZERO_ONLY
from mobius.process.ranks import Ranks, cache_folder
from mobius.reporting.data_report import DatasetStatistics
from mobius.reporting.events import table_row
from mobius.schedule.packed_rows import PackedRows

logger = logging.getLogger(__name__)

_COUNTED_TOKENS: Final = 1 << 30
"""Maximum tokens of all datasets for which a run counts repeated samples; counting takes seconds."""
_MANY_DUPLICATES: Final = 0.05
"""Share of repeated samples in a dataset from which on a run warns."""
_LOOKED_AT: Final = 256
"""Number of samples of each dataset whose tokens the fingerprint covers."""


@dataclass(frozen=True)
class RunData:
    """Tokenized datasets of a configuration, and the training and held-out samples of each training dataset."""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    prepared: PreparedData
    training_indices: Sequence[npt.NDArray[np.int64]]
    validation_indices: Sequence[npt.NDArray[np.int64]]

    @classmethod
    def of(
        cls,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        *,
        is_first: bool,
        images: ImageRules | str = NO_IMAGES,
    ) -> RunData:
        """Prepare the data that `config` names. Every rank calls this, one rank with `is_first`. Raises DataError.

        `images` as in `SampleEncoder`.
        """
        objective = make_objective(config.objective)
        prepared = prepare_data(
            config.data,
            tokenizer,
            cache_dir=cache_folder(),
            rows=objective.rows_kind,
            num_virtual_tokens=config.adapters.num_reserved_tokens,
            has_prefix=config.adapters.finetuning_type is FinetuningType.PREFIX,
            images=images,
            show_progress=True,
            show_downloads=is_first,
        )
        if objective.derive is not None:
            prepared = with_derived_values(prepared, objective.derive)
        sizes = [len(dataset.tokenized) for dataset in prepared.training]
        return cls(config, tokenizer, prepared, *hold_out(sizes, config.data.val_size, config.optim.seed))

    @cached_property
    def images(self) -> Sequence[ImageFile]:
        """Images of all datasets, each file once."""
        datasets = (each.tokenized for each in (*self.prepared.training, *self.prepared.evaluation))
        return [*dict.fromkeys(image for dataset in datasets for image in dataset.images)]

    def fingerprint(self) -> str:
        """Return a hash that identifies the training samples, from all lengths and the tokens of some samples."""
        return _fingerprint(zip(self.prepared.training, self.training_indices, strict=True))

    def evaluation_fingerprint(self) -> str:
        """Return a hash that identifies the evaluation samples, computed as in `fingerprint`."""
        return _fingerprint(self.evaluation_parts())

    def evaluation_parts(self) -> Iterator[tuple[PreparedDataset, npt.NDArray[np.int64]]]:
        """Yield each evaluation dataset with the indices of its samples."""
        yield from ((dataset, np.arange(len(dataset.tokenized))) for dataset in self.prepared.evaluation)
        for dataset, validation_indices in zip(self.prepared.training, self.validation_indices, strict=True):
            if len(validation_indices):
                yield dataset, validation_indices

    @cached_property
    def batches(self) -> TrainingBatches:
        """Batches of the run; they end after the run's epochs if the number of epochs is set."""
        return self.make_batches(is_packed=self.prepared.is_packed)

    def make_batches(self, *, is_packed: bool) -> TrainingBatches:
        """Return batches whose rows hold several samples (`is_packed`) or one sample each."""
        parts = zip(self.prepared.training, self.training_indices, strict=True)
        every = (*self.prepared.training, *self.prepared.evaluation)
        return TrainingBatches(
            [WeightedSamples(dataset.tokenized, dataset.entry.weight, indices) for dataset, indices in parts],
            batch_size=self.config.pipeline.batch_size,
            seq_length=self.config.data.seq_length,
            pad_token_id=pad_token_id(self.tokenizer),
            seed=self.config.optim.seed,
            is_packed=is_packed,
            num_epochs=self.config.optim.num_train_epochs,
            max_sequences=max(dataset.tokenized.max_sequences for dataset in every),
            has_sequences=make_objective(self.config.objective).teacher is not None,
        )

    @cached_property
    def statistics(self) -> tuple[Sequence[DatasetStatistics], Sequence[DatasetStatistics]]:
        """Statistics of the training datasets and of the evaluation datasets; computing them takes seconds."""
        every = (*self.prepared.training, *self.prepared.evaluation)
        fingerprint_stride = choose_fingerprint_stride(sum(len(dataset.tokenized) for dataset in every))
        eos, unknown = self.tokenizer.eos_token_id, self.tokenizer.unk_token_id
        assert isinstance(eos, int), "data are refused if the tokenizer has no end token"
        counted = [
            compute_sample_statistics(
                dataset.tokenized,
                eos_token_id=eos,
                unknown_token_id=unknown if isinstance(unknown, int) else None,
                fingerprint_stride=fingerprint_stride,
            )
            for dataset in every
        ]
        num_trained = [*map(len, self.training_indices), *(0 for _ in self.prepared.evaluation)]
        both = list(map(DatasetStatistics, every, counted, num_trained))
        return both[: len(self.prepared.training)], both[len(self.prepared.training) :]


def _fingerprint(parts: Iterable[tuple[PreparedDataset, npt.NDArray[np.int64]]]) -> str:
    digest = hashlib.sha256()
    for dataset, indices in parts:
        digest.update(np.ascontiguousarray(indices).tobytes())
        digest.update(dataset.tokenized.lengths.tobytes())
        number = len(dataset.tokenized)
        for index in np.linspace(0, number - 1, min(number, _LOOKED_AT)).astype(int):
            sample = dataset.tokenized.sample(int(index))
            values = [
                array for named in (sample.token_values, sample.sequence_values) for _, array in sorted(named.items())
            ]
            lengths = [np.array(sample.lengths)] if dataset.tokenized.has_sequences else []
            digest.update("".join(image.content for image in sample.images).encode())
            for part in (sample.input_ids, sample.is_target, *lengths, *values):
                digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()[:16]


def read_data(
    config: Config, ranks: Ranks, tokenizer: PreTrainedTokenizerBase, images: ImageRules | str = NO_IMAGES
) -> tuple[Config, RunData]:
    """Return the configuration with epochs converted to steps, and the data of the run; logs the counts of samples.

    Raises DataError, and ConfigError if other options do not fit the number of steps.
    """
    data = RunData.of(config, tokenizer, is_first=ranks.is_first, images=images)
    for dataset in data.prepared.training:
        text = f"{dataset.entry.name} ({dataset.format_name}): {dataset.counts}"
        logger.info("%s", table_row("data", text))
        margins = dataset.tokenized.sequence_values.get(MARGIN)
        if margins is not None and MARGIN not in make_objective(config.objective).optional_values:
            text = f"{np.count_nonzero(margins) // 2} pairs have a `{MARGIN}`, which only --objective reward uses"
            logger.info("%s", table_row("data", text))
    advantages = [each.tokenized.sequence_values.get(ADVANTAGE) for each in data.prepared.training]
    if config.evaluation.do_train and all(each is not None and not each.any() for each in advantages):
        raise DataError(
            "every rollout has the advantage 0, so there is nothing to learn: the rewards of each group are equal. "
            "Sample more completions of each prompt, or give prompts whose completions differ in reward"
        )
    for warning in data.prepared.warnings:
        logger.warning("%s", warning, extra=RANK_ZERO_ONLY)
    num_held = sum(map(len, data.validation_indices))
    if num_held:
        logger.info("%s", table_row("data", f"{num_held} samples are held out of training (--val_size)"))
    logger.debug("%s", describe_sample(data.prepared.training[0], tokenizer))
    num_chunks = (config.pipeline.num_chunks or 1) * ranks.num_replicas
    logger.info("%s", table_row("data", data.batches.describe(num_chunks)))
    if ranks.is_first and config.evaluation.do_train:
        for warning in _repeats(data):
            logger.warning("%s", warning)
    num_steps = data.batches.num_steps
    return config if num_steps is None else resolve_epochs(config, num_steps), data


def _repeats(data: RunData) -> Iterator[str]:
    """Yield warnings about samples that repeat within a step or an epoch, or between training and evaluation."""
    yield from repeats_in_steps(data)
    every = (*data.prepared.training, *data.prepared.evaluation)
    if sum(int(dataset.tokenized.lengths.sum(dtype=np.int64)) for dataset in every) > _COUNTED_TOKENS:
        logger.info("the data is too large to count repeated samples here; use --preview")
        return
    for each in data.statistics[0]:
        if ADVANTAGE in each.dataset.tokenized.sequence_values:
            continue  # a policy that is sure samples an answer again and again
        if each.statistics.num_duplicates >= _MANY_DUPLICATES * each.statistics.num_samples:
            yield f"{each.name}: {duplicates_text(each.statistics)}"
    yield from repeats_of_datasets(data)


def repeats_in_steps(data: RunData) -> Iterator[str]:
    """Yield a warning if a step has more samples than an epoch."""
    if (epochs := data.batches.num_epochs_of(1)) > 1:
        advice = f"Lower --batch_size {data.config.pipeline.batch_size}, or give more data"
        yield f"a step takes {epochs:.3g} epochs: samples repeat in it. {advice}"


def repeats_of_datasets(data: RunData) -> Iterator[str]:
    """Yield warnings about samples that are in two training datasets, or in training and validation."""
    training, evaluation = data.statistics
    trained, held = (
        [each.statistics.fingerprints_of(indices) for each, indices in zip(training, chosen, strict=True)]
        for chosen in (data.training_indices, data.validation_indices)
    )
    held += [each.statistics.fingerprints for each in evaluation]
    pairs = [
        (f"samples of {each.name} are in an earlier dataset too", trained[number], trained[:number])
        for number, each in enumerate(training)
        if number
    ]
    statistics = training[0].statistics
    for text, own, earlier in [*pairs, ("samples of the validation are trained on too", np.concatenate(held), trained)]:
        if repeated := statistics.fingerprint_stride * count_repeated(own, np.concatenate(earlier)):
            yield f"{'' if statistics.is_exact else 'about '}{repeated:,} {text}, with the same tokens"


def packed_rows(batches: TrainingBatches) -> PackedRows | None:
    """Return the statistics of packed rows for the planner; None if each row holds one sample."""
    if batches.max_documents is None:
        return None
    return PackedRows(batches.row_statistics.attention_length, batches.max_documents)
