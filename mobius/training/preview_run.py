"""Preview of the data (`--preview`): tokenizes, counts and prints the data, without weights or GPU."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import IO, Final

import numpy as np
from transformers import PreTrainedTokenizerBase

from mobius.config.config import Config
from mobius.data.preview import Line, Tone, format_sample
from mobius.data.statistics import find_data_warnings
from mobius.models.families import locate_model
from mobius.models.model_files import read_json_object
from mobius.models.tokenizer import load_tokenizer
from mobius.planner.plan_file import apply_saved_plan
from mobius.process.log import printable, redirect_to_devnull
from mobius.process.ranks import Ranks, allows_colour
from mobius.reporting.data_report import (
    added,
    dataset_table,
    describe_lengths,
    histogram_lines,
    step_table,
)
from mobius.training.data import RunData, repeats_in_steps, repeats_of_datasets
from mobius.training.images import find_image_model

_FEW_ROWS_USED: Final = 0.8
"""Preview warns if a tokenizer uses a smaller share of the vocabulary rows; unused rows round their number up."""


def run_preview(config: Config, ranks: Ranks, *, given: Collection[str] = ()) -> None:
    """Print samples as training sees them, statistics of the data, and the contents of a step.

    Only the first rank prints, on standard output, in colours on a terminal. `given`: options that the user set; a plan
    (`--plan`) may not contradict them. Raises MobiusError for data that a run would refuse.
    """
    if not ranks.is_first:
        return
    config, _ = apply_saved_plan(config, given=given)
    folder = Path(config.model.model_path).expanduser()
    folder = folder if folder.is_dir() else locate_model(config.model.model_path, with_weights=False)
    # If the tokenizer has more tokens than the model has rows, a warning is printed below, after the samples.
    tokenizer = load_tokenizer(folder, sys.maxsize)
    found = find_image_model(folder, tokenizer)
    images = found if isinstance(found, str) else found.rules
    data = RunData.of(config, tokenizer, is_first=True, images=images)
    blocks = [_samples(data), _datasets(data), _lengths(data, sys.stdout), _steps(data), _warnings(data, folder)]
    lines = [line for block in blocks for line in [*block, Line("")]]  # print nothing if a block raises
    _show(lines, sys.stdout)


def _samples(data: RunData) -> Iterator[Line]:
    """Yield the requested number of random samples, equally many from each dataset; the seed decides which."""
    wanted, num_datasets = data.config.data.preview or 0, len(data.prepared.training)
    generator = np.random.Generator(np.random.PCG64(data.config.optim.seed))
    for number, (each, indices) in enumerate(zip(data.statistics[0], data.training_indices, strict=True)):
        share = wanted // num_datasets + (number < wanted % num_datasets)
        for index in np.sort(generator.choice(indices, min(share, len(indices)), replace=False)).tolist():
            row = each.dataset.tokenized.sample(index)
            names = each.dataset.sequence_names
            yield from format_sample(row, data.tokenizer, f"{each.name}, sample {index}", names)


def _datasets(data: RunData) -> Iterator[Line]:
    training, evaluation = data.statistics
    heads, *lines = dataset_table([*training, *evaluation])
    yield Line(heads, Tone.TITLE)
    yield from map(Line, lines)
    if data.config.data.is_text_joined and any(each.dataset.is_text for each in [*training, *evaluation]):
        yield Line("  text is joined: a sample is a row of documents, which may be split anywhere")
    num_held = sum(map(len, data.validation_indices))
    if num_held:
        total = num_held + sum(map(len, data.training_indices))
        yield Line(f"  validation: {num_held:,} of {total:,} samples are held out (--val_size)")
    elif evaluation:
        names = ", ".join(each.name for each in evaluation)
        yield Line(f"  validation: {sum(each.statistics.num_samples for each in evaluation):,} samples of {names}")


def _lengths(data: RunData, stream: IO[str]) -> Iterator[Line]:
    counts = added([each.statistics.length_counts for each in data.statistics[0]])
    yield Line(f"  tokens of a sample: {describe_lengths(counts)}", Tone.TITLE)
    block = "\N{FULL BLOCK}"
    yield from map(Line, histogram_lines(counts, block=block if printable(block, stream) == block else "#"))


def _steps(data: RunData) -> Iterator[Line]:
    config, is_packed, own, training = data.config, data.prepared.is_packed, data.batches, data.statistics[0]
    if config.data.is_text_joined and all(each.dataset.is_text for each in training):
        ways = [("plain text, joined", own)]
    else:
        other = data.make_batches(is_packed=not is_packed)
        packed, single = (own, other) if is_packed else (other, own)
        ways = [("packed", packed), ("one sample in a row", single)]
    num_tokens = sum(each.epoch_tokens for each in training)
    num_targets = sum(each.epoch_tokens * each.statistics.num_targets / each.statistics.num_tokens for each in training)
    batch_size, seq_length = config.pipeline.batch_size, config.data.seq_length
    heads, *lines = step_table(
        ways, batch_size=batch_size, seq_length=seq_length, target_share=num_targets / num_tokens
    )
    yield Line(heads, Tone.TITLE)
    yield from map(Line, lines)
    if len(ways) > 1:
        yield Line(f"  this run: {own.describe(_batch_unit(config))}")
    if config.optim.num_train_epochs is not None:
        yield Line(f"  --num_train_epochs {config.optim.num_train_epochs:g} takes {own.num_steps:,} steps")
    else:
        steps = config.optim.num_steps
        yield Line(f"  --num_iterations {steps:,} makes {own.num_epochs_of(steps):.3g} epochs")


def _batch_unit(config: Config) -> int | None:
    """Return the number by which a batch's rows must be divisible; None if the number of processes is unknown."""
    launch, num_pipelines = config.launch, config.launch.nnodes
    if launch.pipeline_ranks is not None:
        if launch.nproc_per_node is None:
            return None
        num_pipelines *= max(1, launch.nproc_per_node // launch.pipeline_ranks)
    return (config.pipeline.num_chunks or 1) * num_pipelines


def _warnings(data: RunData, folder: Path) -> Iterator[Line]:
    every = [each for datasets in data.statistics for each in datasets]
    texts = [
        f"{each.name}: {text}" if len(every) > 1 else text
        for each in every
        for text in find_data_warnings(each.dataset, each.statistics)
    ]
    texts += [*repeats_in_steps(data), *repeats_of_datasets(data), *_of_tokenizer(data.tokenizer, folder)]
    yield from (Line(f"  warning: {text}", Tone.WARNING) for text in texts)
    if not texts:
        yield Line("  no warnings")


def _of_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Iterator[str]:
    """Yield warnings about signs that the tokenizer belongs to another model."""
    path = folder / "config.json"
    if not path.is_file():
        return
    fields = read_json_object(path)
    num_rows = fields.get("vocab_size")
    num_tokens = max([len(tokenizer), *(token + 1 for token in tokenizer.added_tokens_decoder)])
    if isinstance(num_rows, int) and num_tokens > num_rows:
        yield (
            f"the tokenizer has {num_tokens:,} tokens, the model only {num_rows:,} (vocab_size): a run is refused. Is "
            "the tokenizer another model's?"
        )
    elif isinstance(num_rows, int) and num_tokens < _FEW_ROWS_USED * num_rows:
        yield f"the tokenizer has {num_tokens:,} tokens, the model {num_rows:,} (vocab_size): is it another model's?"
    for name, own in (("bos", tokenizer.bos_token_id), ("eos", tokenizer.eos_token_id)):
        named = fields.get(f"{name}_token_id")
        theirs = named if isinstance(named, list) else [named]
        if own is not None and named is not None and own not in theirs:
            shown = " or ".join(map(str, theirs))
            yield f"{name}_token_id is {own} in the tokenizer and {shown} in {path}: is it another model's?"


def _show(lines: Iterable[Line], stream: IO[str]) -> None:
    """Write the lines, in colour if the terminal supports it."""
    is_painted = stream.isatty() and allows_colour()
    try:
        for line in lines:
            line = Line(printable(line.text, stream), line.tone)
            stream.write(f"{line.painted() if is_painted else line.text}\n")
        stream.flush()
    except BrokenPipeError:  # the reading program has closed the pipe, as `| head` does
        redirect_to_devnull(stream)
