"""Norm and head on every rank: each rank computes the loss of its share of the microbatches.

The last stage's rank is the owner: weights, sums and states of norm and head are part of the last stage. In every step,
the owner sends the weights to each other rank before that rank's first microbatch. After its last microbatch, each of
these ranks sends its gradient sums to the owner:

    owner   weights are loaded -> [weights] -> [hidden states] ..    .. [gradients] -> [sums], added -> finish_gradients
    rank r                            `-> weights -> loss, backward, sums += .. ----------'

Weights and sums are sent in pieces of a message's size, through the queue between the two ranks, which keeps order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mobius.engine.stage import StageModule
from mobius.engine.stage_messages import FurtherMessages, StageMessages
from mobius.models.block_autograd import NamedTensors
from mobius.schedule.action import Action, ActionKind, Direction
from mobius.schedule.lanes import WaitCause
from mobius.schedule.schedule import Schedule

HeadViews = tuple[NamedTensors, NamedTensors]
"""Weights of norm and head, and their fp32 gradient sums."""


class HeadShare:
    """One rank's part of a head that all ranks share; this base class does nothing, for a head on one rank."""

    module: StageModule
    """Module that has only norm and head."""

    def begin_step(self, rows_shape: torch.Size) -> None:
        """Start a step with microbatches of `rows_shape` [B, L]."""

    def messages_of(self, action: Action) -> FurtherMessages:
        """Return the messages of weights or sums that `action` receives."""
        return (), ()

    def before_sending(self, stage: int, microbatch: int, weights: NamedTensors) -> None:
        """If `microbatch` is the first that another rank gets, send it the last stage's `weights` before it."""

    def views(self, stage: int, microbatch: int, last_stage: Callable[[int], HeadViews]) -> HeadViews:
        """Return the weights and sums with which this rank computes a microbatch's loss, in an action of `stage`.

        `last_stage` returns the weights and sums of the last stage, on the owner's rank.
        """
        raise AssertionError("only ranks that share the head have such actions")

    def after_loss(self, microbatch: int) -> None:
        """Send this rank's gradient sums to the owner if `microbatch` was this rank's last."""

    def after_backward(self, stage: int, microbatch: int, gradients: NamedTensors) -> None:
        """After the last backward of the last stage, add the sums of the other ranks to its `gradients`."""


class SpreadHead:
    """Norm and head of one rank: a copy of the weights, and sums; both are empty on the owner, which uses its stage."""

    def __init__(
        self, module: StageModule, *, width: int, dtype: torch.dtype, device: torch.device, is_owner: bool
    ) -> None:
        """`module` has only norm and head; hidden states have `width` elements per token in `dtype`."""
        self.module, self.dtype, self.width, self._is_owner = module, dtype, width, is_owner
        layout = module.layout(dtype)
        num_weights, num_sums = (0, 0) if is_owner else (layout.num_units, layout.num_trained)
        flat, self.all_sums = torch.empty(num_weights, dtype=dtype, device=device), torch.zeros(num_sums, device=device)
        self.weights: NamedTensors = {} if is_owner else layout.views(flat)
        self.sums: NamedTensors = {} if is_owner else layout.trained_views(self.all_sums)
        """fp32 gradient sums over this rank's microbatches of the step."""
        self.names, self.trained_names = tuple(layout.offsets), layout.trained_names
        self.num_weights = sum(torch.Size(shape).numel() for shape in module.shapes.values())
        trained = sum(torch.Size(module.shapes[name]).numel() for name in layout.trained_names)
        self.num_sums = trained * torch.float32.itemsize // dtype.itemsize
        """Number of elements of the sums' bytes, seen in the format of messages (the format of the weights)."""

    def share(self, schedule: Schedule, messages: StageMessages) -> HeadShare:
        """Return this rank's part in the steps of `schedule`."""
        return (_OwnerShare if self._is_owner else _CopyShare)(self, schedule, messages)


class _Share(HeadShare):
    """One rank's part of a shared head; sends and receives weights and sums in pieces."""

    def __init__(self, head: SpreadHead, schedule: Schedule, messages: StageMessages) -> None:
        spec = schedule.spec
        self._head, self._messages, self._spec, self.module = head, messages, spec, head.module
        self._last_stage = spec.num_stages - 1
        self._owner = spec.rank_of(self._last_stage)
        self._shape, self._size = torch.Size(), 0
        """Shape and number of elements of a message, and of a piece."""

    def begin_step(self, rows_shape: torch.Size) -> None:
        sent_shape = self._messages.routers.sent_shape((*rows_shape, self._head.width), self._head.dtype)
        self._shape, self._size = torch.Size(sent_shape), math.prod(sent_shape)

    def _num_messages(self, num_elements: int) -> int:
        return -(-num_elements // self._size)

    def _send(self, tensors: Sequence[Tensor], rank: int) -> None:
        for parts in self._cut(tensors):
            missing = self._size - sum(part.numel() for part in parts)
            # Most pieces are a part of the head's matrix, which is sent without a copy.
            whole = torch.cat([*parts, parts[0].new_zeros(missing)]) if missing or len(parts) > 1 else parts[0]
            self._messages.send_part(whole.view(self._shape), rank)

    def _received(self, tensors: Sequence[Tensor], rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each part of `tensors` with the values for it that `rank` sent, both in the format of messages."""
        for parts in self._cut(tensors):
            sizes = [part.numel() for part in parts]
            message = self._messages.receive_part(rank).view(-1)[: sum(sizes)]
            yield from zip(parts, message.split(sizes), strict=True)

    def _cut(self, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Yield lists of flat parts of `tensors`, in the format of messages; the parts of a list fill one message."""
        parts, room = list[Tensor](), self._size
        for tensor in tensors:
            left = tensor.view(-1).view(self._head.dtype)
            while left.numel():
                part, left = left[:room], left[room:]
                parts.append(part)
                room -= part.numel()
                if room == 0:
                    yield parts
                    parts, room = [], self._size
        if parts:
            yield parts


class _OwnerShare(_Share):
    """The owner's part: sends the weights to the other ranks, and adds their sums to its own gradients."""

    def __init__(self, head: SpreadHead, schedule: Schedule, messages: StageMessages) -> None:
        super().__init__(head, schedule, messages)
        self._first = {(self._last_stage, self._spec.head_microbatches(rank)[0]): rank for rank in range(self._owner)}
        """(Last stage, microbatch) -> rank for which this microbatch is the first."""
        self._last_backward = self._last_stage, self._spec.last_backward

    def messages_of(self, action: Action) -> FurtherMessages:
        if not action.kind.is_backward or (action.stage, action.microbatch) != self._last_backward:
            return (), ()
        number = self._num_messages(self._head.num_sums)
        return (), [(rank, Direction.HEAD) for rank in range(self._owner) for _ in range(number)]

    def before_sending(self, stage: int, microbatch: int, weights: NamedTensors) -> None:
        if (rank := self._first.get((stage, microbatch))) is not None:
            self._send([weights[name] for name in self._head.names], rank)

    def views(self, stage: int, microbatch: int, last_stage: Callable[[int], HeadViews]) -> HeadViews:
        return last_stage(self._last_stage)

    def after_backward(self, stage: int, microbatch: int, gradients: NamedTensors) -> None:
        if (stage, microbatch) != self._last_backward:
            return
        tensors = [gradients[name] for name in self._head.trained_names]
        with self._messages.observers.waiting(WaitCause.NEIGHBOURS, stage=stage):
            for rank in range(self._owner):
                for part, values in self._received(tensors, rank):
                    part.view(torch.float32).add_(values.view(torch.float32))


class _CopyShare(_Share):
    """Another rank's part: receives the weights before its first microbatch, and sends its sums after its last."""

    def __init__(self, head: SpreadHead, schedule: Schedule, messages: StageMessages) -> None:
        super().__init__(head, schedule, messages)
        own = self._spec.head_microbatches(messages.rank)
        self._first, self._last = own[0], own[-1]

    def begin_step(self, rows_shape: torch.Size) -> None:
        super().begin_step(rows_shape)
        self._head.all_sums.zero_()  # the sums of the previous step have been sent

    def messages_of(self, action: Action) -> FurtherMessages:
        if action.kind is not ActionKind.HEAD or action.microbatch != self._first:
            return (), ()
        return [(self._owner, Direction.HEAD)] * self._num_messages(self._head.num_weights), ()

    def views(self, stage: int, microbatch: int, last_stage: Callable[[int], HeadViews]) -> HeadViews:
        if microbatch == self._first:
            tensors = [self._head.weights[name] for name in self._head.names]
            with self._messages.observers.waiting(WaitCause.WEIGHTS, stage=stage):
                for part, values in self._received(tensors, self._owner):
                    part.copy_(values)
        return self._head.weights, self._head.sums

    def after_loss(self, microbatch: int) -> None:
        if microbatch == self._last:
            self._send([self._head.sums[name] for name in self._head.trained_names], self._owner)
