"""Plays a rank's step once without its neighbours, before the first real one.

A receive that is posted ahead occupies the GPU until its message comes. While it does, whatever has to wait for an
idle device may wait forever: loading a kernel's code at its first use, or growing the memory pool. After a rehearsal
both have happened, and a step that does not fit into memory has failed where every rank can still say so.
"""

from __future__ import annotations

from collections import defaultdict, deque

import torch
from torch import Tensor


class WarmupTransport:
    """Takes memory as the real transport does, but every message is zeros and none leaves the rank."""

    def __init__(
        self, *, rank: int, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, max_pending_sends: int
    ) -> None:
        """`shape` and `dtype` are those of every activation and activation gradient.

        `max_pending_sends` is the number of messages that the real transport keeps at most, and so are kept here.
        """
        self.rank = rank
        self._device, self._shape, self._dtype = device, shape, dtype
        self._posted: defaultdict[int, deque[Tensor]] = defaultdict(deque)
        self._sent: deque[Tensor] = deque(maxlen=max_pending_sends)

    def post_receive(self, source: int) -> None:
        self._posted[source].append(torch.zeros(self._shape, dtype=self._dtype, device=self._device))

    def receive(self, source: int) -> Tensor:
        return self._posted[source].popleft()

    def send(self, tensor: Tensor, target: int) -> None:
        """Hold the tensor until as many others are behind it, as one that may still be on its way is held."""
        self._sent.append(tensor)

    def finish_step(self) -> None:
        self._sent.clear()
