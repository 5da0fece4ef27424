"""Observes the position of compute in a step, and its waits by cause, without synchronizing during the step."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from mobius.hardware.spans import NO_SPANS, Spans
from mobius.hardware.streams import timed_mark
from mobius.process.activity import Activity
from mobius.schedule.action import Action
from mobius.schedule.lanes import Lane, WaitCause


class WaitClock:
    """Adds up waits by cause. On a GPU, a wait is the time between two events around it on the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._host_seconds: defaultdict[WaitCause, float] = defaultdict(float)
        self._pairs: list[tuple[WaitCause, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def waiting(self, cause: WaitCause) -> Iterator[None]:
        """Count the time that the compute stream (on a CPU: this thread) waits within the block."""
        if not self._is_cuda:
            with self.blocking(cause):
                yield
            return
        before = timed_mark(self._device)
        yield
        self._pairs.append((cause, before, timed_mark(self._device)))

    @contextmanager
    def blocking(self, cause: WaitCause) -> Iterator[None]:
        """Count the host's time within the block; for waits of the host during which the device is idle."""
        start = time.perf_counter()
        yield
        self._host_seconds[cause] += time.perf_counter() - start

    def collect(self) -> dict[str, float]:
        """Return the seconds by cause since the last call; the compute stream must have been synchronized."""
        seconds = {cause.value: self._host_seconds.pop(cause, 0.0) for cause in WaitCause}
        for cause, before, after in self._pairs:
            seconds[cause.value] += before.elapsed_time(after) / 1000
        self._pairs.clear()
        return seconds


@dataclass(frozen=True)
class Observers:
    """Observers of a rank's work: its waits by cause, its timeline, and its activity for the watchdog."""

    clock: WaitClock
    spans: Spans = NO_SPANS
    activity: Activity = field(default_factory=Activity)

    @contextmanager
    def waiting(self, cause: WaitCause, *, rank: int | None = None, stage: int | None = None) -> Iterator[None]:
        """Report that compute waits within the block, because of `cause` and, if given, for `rank` or `stage`."""
        with (
            self.activity.waiting(cause, rank=rank, stage=stage),
            self.clock.waiting(cause),
            self.spans.device_span(Lane.WAIT, cause.value),
        ):
            yield


class DevicePosition:
    """Position of a GPU in a schedule, by a CUDA event after each compute action and each pass; no events on a CPU.

    The main thread records the events; any thread may query them.
    """

    def __init__(self, actions: Sequence[Action], device: torch.device) -> None:
        """Create the events for `actions`, which one rank runs in this order in every pass."""
        self._actions, self._device, self.is_on = actions, device, device.type == "cuda"
        self._events = {
            index: torch.cuda.Event()
            for index, action in enumerate(actions)
            if self.is_on and action.kind.is_forward_or_backward
        }
        self._num_begun = 0
        self._ends: deque[torch.cuda.Event] = deque()

    def begins(self) -> None:
        """Begin a new pass over the actions."""
        self._num_begun = 0
        while self._ends and self._ends[0].query():
            self._ends.popleft()

    def enqueued(self, index: int) -> None:
        """Record the event after the action at `index`, whose work is now enqueued on the compute stream."""
        if (event := self._events.get(index)) is not None:
            event.record(torch.cuda.current_stream(self._device.index))
            self._num_begun = index + 1

    def ends(self) -> None:
        """Record the event after the pass, whose work is now enqueued, with the waits after its last action."""
        if self.is_on:
            end = torch.cuda.Event()
            end.record(torch.cuda.current_stream(self._device.index))
            self._ends.append(end)

    def __str__(self) -> str:
        """Return `at B3.1`; `at one of 3 passes` if the host is several passes ahead; `idle` if no work is left.

        After its last action, a pass may still wait for the reduced gradients of the other replicas.
        """
        num_ahead = sum(not end.query() for end in list(self._ends))
        # The actions' events already belong to a later pass, so they do not show the action of this pass.
        if num_ahead > 1:
            return f"at one of {num_ahead} passes"
        ahead = (action for index, action in enumerate(self._actions[: self._num_begun]) if self._is_ahead(index))
        action = next(ahead, None)
        if action is not None:
            return f"at {action}"
        return "at the reduction over replicas" if num_ahead else "idle"

    def _is_ahead(self, index: int) -> bool:
        event = self._events.get(index)
        return event is not None and not event.query()
