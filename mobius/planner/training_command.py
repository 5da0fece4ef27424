"""The command that trains as planned: options as typed, without options that only a dry run takes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Final

from mobius.config.cli import given_options
from mobius.config.config import DRY_RUN, options, spellings
from mobius.models.published_shapes import find_published_shape
from mobius.process.ranks import program_words

BLANKS: Final = ("MODEL", "FOLDER", "DATASET")
"""Words in place of values that only the user knows: a model's folder or hub id, a folder on a disk, the data."""


def training_command(
    words: Sequence[str], model_path: str, *, is_shape: bool, num_processes: int, is_command: bool = True
) -> str:
    """Return the command of a run with options as typed, on a machine with `num_processes` processes per node.

    `is_shape`: no files of the model were read; then a model size is replaced by a hub model of this shape. Words for
    main.py (not `is_command`) get main.py's default stages and microbatches, because `mobius train` has others.
    """
    known = find_published_shape(model_path) if is_shape else None
    given = given_options(words)
    own, typed = [*program_words(), "train"], [*_kept(words, dropped={"nproc_per_node"})]
    if not (is_command or any(word.startswith("--config") for word in words)):
        for name in ("num_stages", "num_chunks"):
            if name not in given:
                typed += [f"--{name}", str(options()[name].default)]
    if known is not None and not known.is_on_hub:
        own += ["--model_path", known.model if "/" in known.model else "MODEL"]
        typed = [*_kept(typed, dropped={"model_path"})]
    data = [] if "dataset" in given else ["--dataset", "DATASET"]
    return shlex.join([*own, *typed, *data, "--nproc_per_node", str(num_processes)])


def _kept(words: Sequence[str], dropped: set[str]) -> Iterator[str]:
    """Yield options and their values, without `dropped` options and options that only a dry run takes."""
    is_kept = True
    for word in words:
        if word.startswith("--"):
            spelling = spellings().get(word.removeprefix("--").partition("=")[0].replace("-", "_"))
            option = None if spelling is None else spelling.option
            is_kept = option is None or not (option.name in dropped | {"dry_run", "verbose"} or DRY_RUN in option.needs)
        if is_kept:
            yield word
