"""Chooses the microbatch of a peer: the one that takes the least time per row within the GPU's memory.

Each is tried for two short steps, the smallest first; all steps are then trained with the fastest.
"""

import argparse
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from peer import seconds_since_launch, time_steps, write_result
from torch import Tensor

SURELY_FITS, SURELY_NOT = 0.88, 1.1
"""Predicted parts of the memory below which a microbatch is tried at once, and above which it is not tried at all."""
Result = TypeVar("Result")
POLL_SECONDS = 0.2
Microbatches = Sequence[Tensor]
"""Tokens of a step on one rank, each [rows, length]."""


class MemoryMeter:
    """Reads the largest memory of a GPU since the last reset; a CPU has none to read, and no limit."""

    def __init__(self, device: torch.device, limit_gib: float | None) -> None:
        self._gpu = device if device.type == "cuda" else None
        self._limit = None if limit_gib is None or self._gpu is None else limit_gib * 2**30
        self.held = 0.0 if self._gpu is None else float(torch.cuda.memory_allocated(self._gpu))
        """Bytes that are taken already."""

    def reset(self) -> None:
        """Begin anew; unused memory is given back."""
        if self._gpu is not None:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._gpu)

    def peak(self) -> float:
        """Largest number of allocated bytes since the reset."""
        return 0.0 if self._gpu is None else float(torch.cuda.max_memory_allocated(self._gpu))

    def share_of_limit(self, num_bytes: float) -> float:
        """The part of the limit that `num_bytes` are; 0 without a limit."""
        return 0.0 if self._limit is None else num_bytes / self._limit


class MicrobatchSearch:
    """Tries microbatches, trains with the fastest and writes the result; all of it is collective.

    A process that ran out of memory amid a step is of no more use. So a microbatch that may do that is tried only
    when a result with a smaller one has been written, and if it does, the run ends with that result.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        train_step: Callable[[Microbatches], Tensor],
        device: torch.device,
        vocab_size: int,
    ) -> None:
        """`train_step` trains one step on the microbatches of this rank and returns the last one's loss.

        Raises SystemExit where no number of --rows_per_microbatch divides a rank's rows.
        """
        self._arguments, self._train_step, self._device, self._vocab_size = arguments, train_step, device, vocab_size
        self.candidates = candidates_of(arguments, dist.get_world_size())
        self._rows_per_rank = arguments.batch_size // dist.get_world_size()
        self._meter = MemoryMeter(device, arguments.gpu_memory_limit)
        self._load_seconds = seconds_since_launch()
        self._seconds_per_row: dict[int, float] = {}
        self._trained: int | None = None
        self._sign = arguments.output.with_suffix(".ends")

    def run(self) -> None:
        """Write the result of the fastest microbatch to --output."""
        if dist.get_rank() == 0:
            self._sign.unlink(missing_ok=True)
        dist.barrier()
        threading.Thread(target=end_at_sign, args=(self._sign,), daemon=True).start()
        peaks = {0: self._meter.held}
        for rows in self.candidates:
            share = self._agree(self._meter.share_of_limit(predicted_peak(peaks, rows)))
            if share > SURELY_FITS and self._seconds_per_row:
                self._train_with_fastest()
                if share > SURELY_NOT:
                    break
            self._meter.reset()
            self._seconds_per_row[rows] = self._agree(self._or_end(lambda: self._try(rows)))  # noqa: B023
            peaks[rows] = self._meter.peak()
        self._train_with_fastest()

    def _try(self, rows: int) -> float:
        """Seconds per row of the second of two steps on one microbatch each."""
        measured = time_steps(self._train_step, lambda: self._tokens(rows, 1), 2, self._device)
        seconds: float = measured["step_seconds"][-1] / rows
        return seconds

    def _train_with_fastest(self) -> None:
        """Train all steps and write the result, unless it is there."""
        rows = min(self._seconds_per_row, key=lambda tried: self._seconds_per_row[tried])
        if rows == self._trained:
            return
        self._meter.reset()
        measured = self._or_end(lambda: self._measure(rows))
        told = {
            "load_seconds": self._load_seconds,
            "rows_per_microbatch": rows,
            "trial_seconds_per_row": self._seconds_per_row,
        }
        write_result(self._arguments, measured | told, [self._device])
        self._trained = rows

    def _measure(self, rows: int) -> dict[str, Any]:
        number = self._rows_per_rank // rows
        return time_steps(self._train_step, lambda: self._tokens(rows, number), self._arguments.steps, self._device)

    def _tokens(self, rows: int, number: int) -> Microbatches:
        shape = (number, rows, self._arguments.seq_length)
        return list(torch.randint(0, self._vocab_size, shape, device=self._device))

    def _or_end(self, work: Callable[[], Result]) -> Result:
        """What `work` returns; without memory for it, every rank ends with the result that is written, if one is."""
        try:
            return work()
        except torch.OutOfMemoryError:
            if self._trained is None:
                raise
            self._sign.touch()
            time.sleep(10 * POLL_SECONDS)  # end_at_sign ends this process
            raise

    def _agree(self, value: float) -> float:
        """The largest of the ranks' values."""
        largest = torch.tensor(value, dtype=torch.float64, device=self._device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)


def candidates_of(arguments: argparse.Namespace, num_ranks: int) -> list[int]:
    """The numbers of rows to try, the smallest first. Raises SystemExit if none divides a rank's rows."""
    rows_per_rank, rest = divmod(arguments.batch_size, num_ranks)
    given = sorted(set(arguments.rows_per_microbatch))
    fitting = [rows for rows in given if rows > 0 and rows_per_rank % rows == 0]
    if rest or not fitting:
        raise SystemExit(
            f"--rows_per_microbatch {' '.join(map(str, given))}: none of them divides --batch_size "
            f"{arguments.batch_size} on {num_ranks} ranks; choose one that does"
        )
    return fitting


def predicted_peak(peaks: Mapping[int, float], rows: int) -> float:
    """Bytes with `rows`, on the line through those of the two largest numbers of rows; one alone is what all take."""
    known = sorted(peaks.items())[-2:]
    (first, low), (second, high) = known[0], known[-1]
    return high if first == second else high + (high - low) / (second - first) * (rows - second)


def end_at_sign(sign: Path) -> None:
    """End this process well as soon as `sign` is there."""
    while not sign.exists():
        time.sleep(POLL_SECONDS)
    os._exit(0)
