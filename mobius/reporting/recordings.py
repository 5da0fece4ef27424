"""Recordings of a run, made if the options ask for them.

--trace           trace.json and timeline.png: a few steps of all ranks, every action with its name
--profile_steps   profile/rank0.json.gz, ...: the chosen steps, a file for each rank, every kernel (torch.profiler)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from mobius.config.config import Config
from mobius.distributed.transport import Transport
from mobius.errors import reason_of
from mobius.hardware.spans import NO_SPANS, SpanRecorder, Spans
from mobius.reporting.pictures import draw_timeline
from mobius.reporting.trace import TraceFacts, merge_parts, write_part, write_trace

logger = logging.getLogger(__name__)

StepHook = Callable[[int], AbstractContextManager[object]]
"""Function that takes the number of a step, counted from 1, and returns the context in which the step runs."""


def traced_steps(num_iterations: int) -> range:
    """Return steps 3 to 5, because earlier steps may still warm up, or the last three steps of a shorter run."""
    first = max(1, min(3, num_iterations - 2))
    return range(first, min(first + 2, num_iterations) + 1)


class Recordings:
    """Recorders of one rank: the rank's parts report work to `spans`; the trainer runs steps within `step_hooks`."""

    def __init__(self, config: Config, *, rank: int, device: torch.device, folder: Path) -> None:
        """Take the folder for the files; it need not exist before the first step."""
        self._folder, self._rank = folder, rank
        self._recorder = SpanRecorder(device, traced_steps(config.optim.num_steps)) if config.output.trace else None
        self.spans: Spans = self._recorder or NO_SPANS
        step_hooks: list[StepHook] = [self._recorder.step] if self._recorder else []
        if steps := config.output.profiled_steps:
            step_hooks.append(StepProfiler(device, steps, folder / "profile" / f"rank{rank}.json.gz").step)
        self.step_hooks = tuple(step_hooks)

    def write(self, facts: TraceFacts, transport: Transport) -> None:
        """Write trace.json and timeline.png, if requested; collective, after the last step. Synchronizes.

        Only warns if a file cannot be written, because the model is not saved yet.
        """
        if self._recorder is None:
            return
        spans = self._recorder.collect()
        is_written = self._write_or_warn(lambda: write_part(self._folder, self._rank, spans))
        num_parts = transport.sum_over_ranks(torch.tensor([float(is_written)], dtype=torch.float64))
        if self._rank == 0 and int(num_parts[0]) == transport.num_ranks:
            self._write_or_warn(lambda: self._merge(facts))

    def _merge(self, facts: TraceFacts) -> None:
        trace = merge_parts(self._folder, facts)
        write_trace(self._folder / "trace.json", trace)
        if trace.steps:
            draw_timeline(trace, self._folder / "timeline.png")
            logger.info("trace of steps %d to %d: trace.json, timeline.png", trace.steps[0], trace.steps[-1])

    def _write_or_warn(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except OSError as error:
            logger.warning("--trace: cannot write into %s (%s); the trace is left out", self._folder, reason_of(error))
            return False
        return True


class StepProfiler:
    """Owner of torch's profiler on one rank; the profiler exists only during the profiled steps."""

    def __init__(self, device: torch.device, steps: range, path: Path) -> None:
        """Profile `steps`, counted from 1, and write them to `path`, whose name ends in .json or .json.gz."""
        self._steps, self._path = steps, path
        self._activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler: torch.profiler.profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the block if `number` is one of the steps; writes the file after the last one."""
        if number in self._steps and self._profiler is None:
            self._profiler = torch.profiler.profile(activities=self._activities)
            self._profiler.start()
        yield
        if self._profiler is not None and number >= self._steps[-1]:
            self._profiler.stop()
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._profiler.export_chrome_trace(str(self._path))
            except OSError as error:  # a full disk must not end the training
                logger.warning("--profile_steps: cannot write %s (%s); it is left out", self._path, reason_of(error))
            self._profiler = None
