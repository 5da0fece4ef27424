"""Recordings of a run, made on request.

--trace           trace.json and timeline.png: few steps of all ranks, every action with its name
--profile_steps   profile/rank0.json.gz, ...: the chosen steps of one rank each, every kernel (torch.profiler)
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
"""Called with the number of a step, counted from 1; returns the context in which the step runs."""


def traced_steps(num_iterations: int) -> range:
    """Steps 3 to 5, or the last three of a shorter run: the first ones may still warm up."""
    first = max(1, min(3, num_iterations - 2))
    return range(first, min(first + 2, num_iterations) + 1)


class Recordings:
    """Recorders of one rank; its parts report their work to `spans`, the trainer runs steps within `step_hooks`."""

    def __init__(self, config: Config, *, rank: int, device: torch.device, folder: Path) -> None:
        """`folder` takes the files; it need not exist before the first step."""
        self._folder, self._rank = folder, rank
        self._recorder = SpanRecorder(device, traced_steps(config.optim.num_steps)) if config.output.trace else None
        self.spans: Spans = self._recorder or NO_SPANS
        step_hooks: list[StepHook] = [self._recorder.step] if self._recorder else []
        if steps := config.output.profiled_steps:
            step_hooks.append(StepProfiler(device, steps, folder / "profile" / f"rank{rank}.json.gz").step)
        self.step_hooks = tuple(step_hooks)

    def write(self, facts: TraceFacts, transport: Transport) -> None:
        """Write trace.json and timeline.png, if requested; collective, after the last step. Synchronizes.

        A file that cannot be written is a warning and not an error, because the model is still to be saved.
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
    """The torch.profiler of one rank; it exists only while one of its steps runs."""

    def __init__(self, device: torch.device, steps: range, path: Path) -> None:
        """Profile `steps`, counted from 1, and write them to `path`, whose name ends in .json or .json.gz."""
        self._steps, self._path = steps, path
        self._activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler: torch.profiler.profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the block, if `number` is one of the steps; writes the file after the last of them."""
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
                logger.warning("--profile_steps: cannot write %s (%s); it is left out", self._path, reason_of(error))
            self._profiler = None
