"""Norm and head on every rank, each of which computes the loss of its share of the microbatches.

The last stage's rank owns them: their weights, sums and states are part of its stage. In every step the others get the
weights from it, before their first microbatch, and send it the gradients that they have added up, after their last:

    owner   weights are loaded -> [weights] -> [hidden states] ..    .. [gradients] -> [sums], added -> finish_gradients
    rank r                            `-> weights -> loss, backward, sums += .. ----------'

Both go in pieces of the size of a message, through the queue that joins the two ranks, so their order is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mobius.distributed.transport import ActivationTransport
from mobius.engine.stage import StageModule
from mobius.models.block_autograd import NamedTensors
from mobius.schedule.action import Direction


class SpreadHead:
    """Norm and head of one rank: a copy, or on the owner nothing of its own."""

    def __init__(
        self, module: StageModule, *, width: int, dtype: torch.dtype, device: torch.device, is_owner: bool
    ) -> None:
        """`module` has norm and head alone; hidden states have `width` elements per token in `dtype`."""
        self.module, self.dtype, self.width = module, dtype, width
        layout = module.layout()
        num_weights, num_sums = (0, 0) if is_owner else (layout.num_elements, layout.num_trained)
        flat, sums = torch.empty(num_weights, dtype=dtype, device=device), torch.zeros(num_sums, device=device)
        self.weights: NamedTensors = {} if is_owner else layout.views(flat)
        self.sums: NamedTensors = {} if is_owner else layout.trained_views(sums)
        """fp32 gradients of the step's own microbatches."""
        self._names, self._trained_names = tuple(layout.offsets), layout.trained_names
        self._num_weights = sum(torch.Size(shape).numel() for shape in module.shapes.values())
        trained = sum(torch.Size(module.shapes[name]).numel() for name in layout.trained_names)
        self._num_sums = trained * torch.float32.itemsize // dtype.itemsize
        self._all_sums = sums

    def num_messages(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the messages of `shape` that weights and sums take."""
        size = torch.Size(shape).numel()
        return -(-self._num_weights // size), -(-self._num_sums // size)

    def begin_step(self) -> None:
        """Set the sums to zero; those of the step before have left."""
        self._all_sums.zero_()

    def send_weights(
        self, weights: NamedTensors, transport: ActivationTransport, rank: int, shape: Sequence[int]
    ) -> None:
        """Send the owner's `weights` to `rank` in messages of `shape`; they must not change before the step's end."""
        self._send([weights[name] for name in self._names], transport, rank, shape)

    def receive_weights(self, receive: Callable[[], Tensor], shape: Sequence[int]) -> None:
        """Take the weights that the owner has sent; `receive` returns its next message."""
        for part, values in self._received([self.weights[name] for name in self._names], receive, shape):
            part.copy_(values)

    def send_sums(self, transport: ActivationTransport, owner: int, shape: Sequence[int]) -> None:
        """Send the step's sums to `owner`."""
        self._send([self.sums[name] for name in self._trained_names], transport, owner, shape)

    def add_sums(self, gradients: NamedTensors, receive: Callable[[], Tensor], shape: Sequence[int]) -> None:
        """Add the sums that a rank has sent to the owner's `gradients`, fp32; `receive` returns its next message."""
        for part, values in self._received([gradients[name] for name in self._trained_names], receive, shape):
            part.view(torch.float32).add_(values.view(torch.float32))

    def _send(self, tensors: Sequence[Tensor], transport: ActivationTransport, rank: int, shape: Sequence[int]) -> None:
        size = torch.Size(shape).numel()
        for parts in self._cut(tensors, size):
            missing = size - sum(part.numel() for part in parts)
            # Most messages are a part of the head's matrix, and need no copy.
            whole = torch.cat([*parts, parts[0].new_zeros(missing)]) if missing or len(parts) > 1 else parts[0]
            transport.send(whole.view(*shape), rank, Direction.HEAD, is_kept=True)

    def _received(
        self, tensors: Sequence[Tensor], receive: Callable[[], Tensor], shape: Sequence[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of `tensors` and what has arrived for each, as elements of the messages' format."""
        for parts in self._cut(tensors, torch.Size(shape).numel()):
            sizes = [part.numel() for part in parts]
            message = receive().view(-1)[: sum(sizes)]
            yield from zip(parts, message.split(sizes), strict=True)

    def _cut(self, tensors: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
        """Yield flat parts of `tensors`, as elements of the messages' format, that are `size` elements together."""
        parts, room = list[Tensor](), size
        for tensor in tensors:
            left = tensor.view(-1).view(self.dtype)
            while left.numel():
                part, left = left[:room], left[room:]
                parts.append(part)
                room -= part.numel()
                if room == 0:
                    yield parts
                    parts, room = [], size
        if parts:
            yield parts
