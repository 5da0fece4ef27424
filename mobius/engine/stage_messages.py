"""Messages of one rank's actions: hidden states and their gradients, with router numbers if there is a router loss.

    begin_step -> for each action: begin_action -> receive -> ... -> send

Receives are posted ahead, in the order of the actions. A result for a later action of the same rank is handed on
without a message: with a head that ranks share, this is so for the microbatches of the last stage's rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from mobius.distributed.transport import ActivationTransport
from mobius.engine.pipelined_router_loss import RouterMessages
from mobius.engine.waits import Observers
from mobius.limits import NUM_PREPOSTED_RECEIVES
from mobius.schedule.action import Action, Direction
from mobius.schedule.lanes import WaitCause
from mobius.schedule.schedule import Schedule

Queue = tuple[int, Direction]
"""Sender rank and direction of a message."""
FurtherMessages = tuple[Sequence[Queue], Sequence[Queue]]
"""Messages that an action receives before and after its neighbour's message."""


class StageMessages:
    """Receives of one rank in a step, and the place where each action's result goes."""

    def __init__(
        self,
        schedule: Schedule,
        transport: ActivationTransport,
        observers: Observers,
        routers: RouterMessages | None = None,
    ) -> None:
        self._transport, self.rank, self.observers = transport, transport.rank, observers
        self.routers = routers or RouterMessages()
        spec, self._actions = schedule.spec, schedule.actions[transport.rank]
        self._ends = [(spec.source_of(action), spec.target_of(action)) for action in self._actions]
        """Source of each action's message and target of its result: stage, rank and queue; None: this rank itself."""
        self._needed: list[list[Queue]] = []
        """Messages that each action receives; known once the first step has given their size."""
        self._receives: list[Queue] = []
        self._num_posted = self._num_received = self._index = 0
        self._rows_shape = torch.Size()
        self._staying: dict[int | None, tuple[Tensor, Tensor | None]] = {}
        """Results for later actions of this rank, by microbatch."""

    def begin_step(self, rows_shape: torch.Size, further: Callable[[Action], FurtherMessages]) -> None:
        """Start a step with microbatches of `rows_shape` [B, L]; `further`: messages in addition to a neighbour's."""
        self._rows_shape = rows_shape
        self._num_posted = self._num_received = 0
        self._staying.clear()  # of a step that has failed
        if not self._needed:
            for action, (source, _) in zip(self._actions, self._ends, strict=True):
                before, after = further(action)
                self._needed.append([*before, *([] if source is None else [source[1:]]), *after])
            self._receives = [*chain.from_iterable(self._needed)]

    def begin_action(self, index: int) -> None:
        """Start the action at `index`; all before it have ended."""
        self._index = index
        if self._num_posted < self._num_received + NUM_PREPOSTED_RECEIVES:
            self._post_receives()
        self._num_received += min(len(self._needed[index]), 1)

    def receive(self) -> tuple[Tensor, Tensor | None]:
        """Return the action's hidden states or their gradient, and the router numbers if there is a router loss."""
        source = self._ends[self._index][0]
        if source is None:
            return self._staying.pop(self._actions[self._index].microbatch)
        stage, rank, direction = source
        with self.observers.waiting(WaitCause.NEIGHBOURS, rank=rank, stage=stage):
            message = self._transport.receive(rank, direction)
        return self.routers.unpack(message, self._rows_shape)

    def send(self, hidden: Tensor, router_sums: Tensor | None) -> None:
        """Send the action's result."""
        target = self._ends[self._index][1]
        if target is None:
            self._staying[self._actions[self._index].microbatch] = hidden, router_sums
        else:
            self._transport.send(self.routers.pack(hidden, router_sums), target[1], target[2])

    def receive_part(self, rank: int) -> Tensor:
        """Return a further message of the action, from `rank`."""
        message = self._transport.receive(rank, Direction.HEAD)
        self._num_received += 1
        self._post_receives()
        return message

    def send_part(self, tensor: Tensor, rank: int) -> None:
        """Send a further message of the action; `tensor` must not change before the step's end."""
        self._transport.send(tensor, rank, Direction.HEAD, is_kept=True)

    def finish_step(self) -> None:
        """Release sent tensors; every message of the step must have been received."""
        self._transport.finish_step()

    def _post_receives(self) -> None:
        for receive in self._receives[self._num_posted : self._num_received + NUM_PREPOSTED_RECEIVES]:
            self._transport.post_receive(*receive)
            self._num_posted += 1
