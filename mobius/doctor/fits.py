"""Tables of models that fit: `mobius plan` prints the same number for the options of a row.

`mobius doctor` prints the table of this machine. `python -m mobius.doctor.fits [MODEL...]` prints the rows of
docs/user/what_fits.md for models (default: all models), in half an hour on a core.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import shlex
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from mobius.config.sources import read_command_line
from mobius.doctor.apart import Work
from mobius.errors import HostMemoryError
from mobius.models.published_shapes import find_published_shape
from mobius.planner.forecast import Forecast, forecast
from mobius.process.ranks import program_words
from mobius.units import GIB, format_bytes, format_rounded

SIZES: Final = {
    "1B": "Llama-3.2-1B",
    "3B": "Llama-3.2-3B",
    "8B": "Llama-3.1-8B",
    "14B": "Qwen2.5-14B",
    "32B": "Qwen2.5-32B",
    "70B": "Meta-Llama-3-70B",
}
_ON_DISKS = "--offload_states_to /a,/b,/c,/d --disk_rate 7,2 --durable_steps off"
WAYS: Final = {
    "fp32": "",
    "bf16": "--optimizer_states bf16",
    "compact": "--optimizer_states compact",
    "fp32 on disks": _ON_DISKS,
    "compact on disks": f"{_ON_DISKS} --optimizer_states compact",
    "compact on disks, unclipped": f"{_ON_DISKS} --optimizer_states compact --max_grad_norm 0",
    "compact, weights, too": f"{_ON_DISKS} --optimizer_states compact --gradients_on_disks --weights_on_disks",
    "compact, weights, too, unclipped": f"{_ON_DISKS} --optimizer_states compact --max_grad_norm 0 --weights_on_disks",
    "LoRA": "--use_lora",
    "LoRA, int8 base": "--use_lora --base_dtype int8",
    "LoRA, nf4 base": "--use_lora --base_dtype nf4",
}
"""Name of a training method -> options. Each of the four disks reads 7 and writes 2 GB/s."""
TRIED: Final = {"full": ("fp32", "compact"), "LoRA": ("LoRA", "LoRA, int8 base", "LoRA, nf4 base")}
"""Training methods that the doctor tries: the first method that fits counts."""
_SET_BY_WAYS: Final = (
    ("optimizer_states", "--optimizer_states"),
    ("base_dtype", "--base_dtype"),
    ("matmul_dtype", "--base_dtype"),
)
"""Options whose typed values leave out methods that have these words."""
BATCH: Final = {"batch_size": "32", "seq_length": "2048"}
LAYERS_PER_STAGE, CHUNKS_PER_RANK = (2, 1), 4
"""With two layers per stage, the plan of a row takes 1 to 4 s of a core; with `auto` 5 to 30 s. On four RTX 4090 the
steps planned by `auto` were 5 to 8 % faster for 1B and 8B, and 17 % faster for 32B with LoRA."""


@dataclass(frozen=True)
class Row:
    """A model and a training method, with the options of its plan."""

    model: str
    way: str
    words: tuple[str, ...]
    fits: bool | None = None
    """None: not planned in time."""
    tokens_per_second: float | None = None
    reason: str = ""
    """Reason why the run does not fit."""

    @property
    def command(self) -> str:
        """Command that prints the number of this row."""
        return shlex.join([*program_words(), "plan", *self.words])


Tries = tuple[tuple[Row, ...], ...]
"""Rows to plan; the first row that fits counts. Each inner tuple has one training method and ever smaller stages."""


def rows_to_plan(given: Sequence[str], num_ranks: int) -> dict[tuple[str, str], Tries]:
    """Return the rows to try for each model and method; `given` are the options that the user typed."""
    typed = read_command_line(given).values
    batch = int(str(typed.get("batch_size", BATCH["batch_size"])))
    possible = range(1, min(batch, CHUNKS_PER_RANK * num_ranks) + 1)
    chunks = max((each for each in possible if batch % each == 0), default=1)

    def words(name: str, stages_per_rank: int) -> Iterator[str]:
        numbers = {"num_stages": stages_per_rank * num_ranks, "num_chunks": chunks, **BATCH}
        yield from ("--model_path", name)
        for option, value in numbers.items():
            yield from () if option in typed else (f"--{option}", str(value))
        yield from given

    rows = dict[tuple[str, str], Tries]()
    for size, name in SIZES.items():
        shape = find_published_shape(name)
        assert shape is not None
        most = int(shape.fields["num_hidden_layers"]) // num_ranks
        numbers = [max(1, min(2, most), most // layers) for layers in LAYERS_PER_STAGE]
        ways = [tuple(words(name, each)) for each in dict.fromkeys(numbers)]
        for way, tried in TRIED.items():
            rows[size, way] = tuple(
                tuple(Row(size, way, (*each, *WAYS[name].split())) for each in dict.fromkeys(ways))
                for name in tried
                if not any(option in typed and words in WAYS[name] for option, words in _SET_BY_WAYS)
            )
    return rows


def plan_rows(tries: Tries) -> Row:
    """Return the first row that fits, or else the last row with the reason why it does not fit."""
    num_refused = 0  # stage counts refused with every kind of optimizer states
    for rows in tries:
        for row in rows[num_refused:]:
            found = forecast(row.words, only_fitting=True)
            if found.machine.on_cpu:
                return replace(row, fits=False, reason="torch sees no GPU")
            if found.fits:
                return replace(row, fits=True, tokens_per_second=found.tokens_per_second)
            if isinstance(found.refusals[0], HostMemoryError):
                break  # the row fits the GPUs, but not the host; smaller stages need about as much host memory
            num_refused += 1
    host = _host_bytes(found)
    reason = f"needs {format_bytes(host)} of host memory" if host else str(found.problem).partition(" (")[0]
    return replace(row, fits=False, reason=reason)


def works_of(rows: dict[tuple[str, str], Tries]) -> dict[str, Work]:
    """Return the work of each model and method, by name, the longest first.

    Imports modules that each process would otherwise import in 0.4 s, and exempts them from garbage collection.
    """
    for family in ("llama", "qwen2") if rows else ():
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    gc.freeze()
    return {" ".join(key): partial(plan_rows, rows[key]) for key in reversed(rows)}


def describe(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines of the table."""
    for row in rows:
        text = "not planned in time" if row.fits is None else f"no: {row.reason}"
        if row.fits:
            text = f"{format_rounded(row.tokens_per_second)} tokens/s" if row.tokens_per_second else "fits"
            text += ", compact states" if "compact" in row.words else ""
            text += f", {row.words[row.words.index('--base_dtype') + 1]} base" if "--base_dtype" in row.words else ""
        yield f"  {row.model:<4} {row.way:<5} {text:<40}  {row.command}"


def page_rows(models: Sequence[str]) -> Iterator[str]:
    """Rows of the page: tokens per second of four RTX 4090 by host memory; a dash if the run does not fit."""
    box = "--card RTX4090 --num_ranks 4 --num_stages auto --num_chunks auto --batch_size 32 --seq_length 2048"
    for model, (way, more) in itertools.product(models, WAYS.items()):
        cells, found = deque[str](), None
        for gib in (476, 238, 119, 59):  # usable GiB of 512, 256, 128 and 64 GB
            if found is None or (found.fits and _host_bytes(found) > gib * GIB):
                words = f"{box} --model_path {model} {more} --host_memory_limit {gib}"
                found = forecast(words.split(), only_fitting=True)
            cells.appendleft(f"{found.tokens_per_second:,.0f}" if found.fits else "-")
        yield f"| {model} | {way} | {' | '.join(cells)} |"


def _host_bytes(forecast: Forecast) -> int:
    return 0 if forecast.found is None else forecast.found.host_estimate.total


if __name__ == "__main__":
    for line in page_rows(sys.argv[1:] or ["7b", "14b", "32b", "70b"]):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
