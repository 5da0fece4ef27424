"""A table of plans with a row for each combination of the options' values: `mobius plan --card H200 RTX4090`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from mobius.config.sources import read_command_line
from mobius.errors import ConfigError, MobiusError, excerpt
from mobius.planner.forecast import Forecast, forecast
from mobius.planner.memory_estimates import largest_gpu_estimate
from mobius.process.log import printable, progress_bar
from mobius.units import GIB, format_columns

_HEADS: Final = ("stages", "chunks", "s/step", "tokens/s", "MFU", "GPU GiB", "host GiB", "limited by")
_SHOWN: Final = 120
"""Maximum characters of a refusal in its row."""


def compare(cases: Sequence[tuple[Mapping[str, str], Sequence[str]]]) -> bool:
    """Print a row for each case; return whether any case fits. A case pairs varied values by option with its words.

    After Ctrl-C, the rows planned so far are printed, too. Raises ConfigError for words that are no options.
    """
    if problems := dict.fromkeys(line for _, words in cases for line in read_command_line(words).problems):
        raise ConfigError(*problems)
    rows, num_fitting = [[*cases[0][0], *_HEADS]], 0
    logging.disable(logging.INFO)
    try:
        with progress_bar("comparing", " plans", total=len(cases)) as bar:
            for values, words in cases:
                try:
                    found = forecast(words, only_fitting=True)
                    num_fitting += found.fits
                    cells = _cells(found)
                except MobiusError as error:
                    cells = _refused(str(error))
                rows.append([*values.values(), *cells])
                bar.update()
    finally:
        logging.disable(logging.NOTSET)
        columns = format_columns([row[:-1] for row in rows], num_left=len(cases[0][0])).splitlines()
        text = "\n".join(f"{line}  {row[-1]}" for line, row in zip(columns, rows, strict=True))
        sys.stdout.write(f"{printable(text, sys.stdout)}\n")
    return num_fitting > 0


def _cells(own: Forecast) -> list[str]:
    if own.found is None or not own.fits:
        return _refused(f"does not fit: {own.problem}")
    found, prediction = own.found, own.found.step_time_prediction
    step = ["-"] * 3
    if prediction is not None:
        step = [f"{found.step_seconds:.3f}", f"{found.tokens_per_second:,.0f}", f"{100 * found.mfu:.0f} %"]
    gpu = "-" if own.machine.on_cpu else f"{largest_gpu_estimate(found.gpu_estimates).total / GIB:.1f}"
    host = f"{found.host_estimate.total / GIB:.0f}"
    numbers = [str(found.plan.num_stages), str(found.plan.num_microbatches)]
    return [*numbers, *step, gpu, host, "-" if prediction is None else str(prediction.bottleneck)]


def _refused(text: str) -> list[str]:
    return [*["-"] * (len(_HEADS) - 1), excerpt(text.splitlines()[0], _SHOWN)]
