"""Where a device is in the actions that its host has enqueued, for whoever asks when the host stands still."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from mobius.schedule.action import Action


class DevicePosition:
    """Owns an event behind each compute action of a schedule, and one behind each of its passes; none on a CPU.

    The main thread records them, any other one may ask.
    """

    def __init__(self, actions: Sequence[Action], device: torch.device) -> None:
        """Events of `actions`, which one rank plays in this order, again and again."""
        self._actions, self._device, self.is_on = actions, device, device.type == "cuda"
        self._events = {
            index: torch.cuda.Event()
            for index, action in enumerate(actions)
            if self.is_on and action.kind.is_forward_or_backward
        }
        self._num_begun = 0
        self._ends: deque[torch.cuda.Event] = deque()

    def begins(self) -> None:
        """A pass over the actions begins."""
        self._num_begun = 0
        while self._ends and self._ends[0].query():
            self._ends.popleft()

    def enqueued(self, index: int) -> None:
        """The action of this index is behind all that the compute stream has been given."""
        if (event := self._events.get(index)) is not None:
            event.record(torch.cuda.current_stream(self._device.index))
            self._num_begun = index + 1

    def ends(self) -> None:
        """All actions of a pass are enqueued, and what compute waits for behind them."""
        if self.is_on:
            end = torch.cuda.Event()
            end.record(torch.cuda.current_stream(self._device.index))
            self._ends.append(end)

    def __str__(self) -> str:
        """`at B3.1`, `at one of 3 passes` where the host is passes ahead, or `idle`: it has done all it was given.

        Behind the last action of a pass it may wait for the other replicas, to have the sums of all of them.
        """
        num_ahead = sum(not end.query() for end in list(self._ends))
        # Events of earlier passes were recorded anew.
        if num_ahead > 1:
            return f"at one of {num_ahead} passes"
        ahead = (action for index, action in enumerate(self._actions[: self._num_begun]) if self._is_ahead(index))
        action = next(ahead, None)
        if action is not None:
            return f"at {action}"
        return "at the sums of all replicas" if num_ahead else "idle"

    def _is_ahead(self, index: int) -> bool:
        event = self._events.get(index)
        return event is not None and not event.query()
