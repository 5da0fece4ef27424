"""Messages of one rank's actions: hidden states and their gradients, with router numbers if there is a router loss.

    begin_step -> for each action: begin_action -> receive -> ... -> send

Receives are posted ahead, in the order of the actions. A result for a later action of the same rank needs no message:
if ranks share the head, the last stage's rank has such results, for the microbatches whose loss it computes itself.
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
"""Queues of the messages that an action receives before and after its neighbour's message."""


class StageMessages:
    """Receives each action's input and sends its result, for the actions of one rank."""

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
        """For each action, source of its input and target of its result: stage, rank, direction; None: no message."""
        self._needed: list[list[Queue]] = []
        """Queues of the messages that each action receives; filled by the first step, which knows a message's size."""
        self._receives: list[Queue] = []
        self._num_posted = self._num_received = self._index = 0
        self._rows_shape = torch.Size()
        self._staying: dict[int | None, tuple[Tensor, Tensor | None]] = {}
        """Results for later actions of this rank, by microbatch."""

    def begin_step(self, rows_shape: torch.Size, further: Callable[[Action], FurtherMessages]) -> None:
        """Start a step with microbatches of `rows_shape` [B, L]; `further` returns an action's additional messages."""
        self._rows_shape = rows_shape
        self._num_posted = self._num_received = 0
        self._staying.clear()  # drop results of a failed step
        if not self._needed:
            for action, (source, _) in zip(self._actions, self._ends, strict=True):
                before, after = further(action)
                self._needed.append([*before, *([] if source is None else [source[1:]]), *after])
            self._receives = [*chain.from_iterable(self._needed)]

    def begin_action(self, index: int) -> None:
        """Start the action at `index`; all earlier actions have ended."""
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
        """Send the action's result, or keep it for a later action of this rank."""
        target = self._ends[self._index][1]
        if target is None:
            self._staying[self._actions[self._index].microbatch] = hidden, router_sums
        else:
            self._transport.send(self.routers.pack(hidden, router_sums), target[1], target[2])

    def receive_part(self, rank: int) -> Tensor:
        """Return the action's next additional message from `rank`."""
        message = self._transport.receive(rank, Direction.HEAD)
        self._num_received += 1
        self._post_receives()
        return message

    def send_part(self, tensor: Tensor, rank: int) -> None:
        """Send an additional message of the action to `rank`; `tensor` must not change before the step's end."""
        self._transport.send(tensor, rank, Direction.HEAD, is_kept=True)

    def finish_step(self) -> None:
        """Release sent tensors; this rank must have received all its messages of the step."""
        self._transport.finish_step()

    def _post_receives(self) -> None:
        for receive in self._receives[self._num_posted : self._num_received + NUM_PREPOSTED_RECEIVES]:
            self._transport.post_receive(*receive)
            self._num_posted += 1
