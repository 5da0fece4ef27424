"""Owns what `--profile_steps` leaves: one Chrome trace of torch.profiler per rank, of the chosen steps.

Does not own the lighter trace of all ranks (timeline.py), which names actions instead of kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


class StepProfiler:
    """Owns the profiler of one rank; it exists only while one of its steps runs."""

    def __init__(self, device: torch.device, steps: range, path: Path) -> None:
        """Profile `steps`, counted from 1, and write them to `path`, whose name ends in .json or .json.gz."""
        self._steps, self._path = steps, path
        self._activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler: torch.profiler.profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile what runs within, if `number` is one of the steps; behind the last of them the file is written."""
        if number in self._steps and self._profiler is None:
            self._profiler = torch.profiler.profile(activities=self._activities)
            self._profiler.start()
        yield
        if self._profiler is not None and number >= self._steps[-1]:
            self._profiler.stop()
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._profiler.export_chrome_trace(str(self._path))
            except OSError as error:  # a full disk; the training is worth more
                logger.warning("--profile_steps: cannot write %s (%s); it is left out", self._path, error.strerror)
            self._profiler = None
