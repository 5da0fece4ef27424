"""Keeps the embedding's and the head's copies of a tied matrix equal: sums their gradients before the update.

Both stages then make the same update from the same numbers, so the copies keep equal bits without sending weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mobius.distributed.transport import Transport
from mobius.engine.stage_memory import StageMemory

CHUNK_ELEMENTS = 2**24
"""Number of elements that are summed at a time."""


@dataclass(frozen=True)
class TiedWeights:
    """Names and stages of the two copies."""

    embedding_name: str
    head_name: str
    embedding_stage: int
    head_stage: int
    num_ranks: int
    gradient_dtype: torch.dtype | None = None
    """Dtype in which the two gradients are added, for any stored dtype; None: the stored dtype."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset((self.embedding_name, self.head_name))

    def sum_gradients(
        self, memory: Mapping[int, StageMemory], transport: Transport, device: torch.device
    ) -> Tensor | None:
        """Replace both gradients by their sum; collective over the ranks of the two copies.

        The sum is computed on `device`, the kind of device on which all ranks compute, for any place and dtype of the
        gradients: a rank need not know whether the other rank's stage is resident or streamed. Needs memory for three
        times `CHUNK_ELEMENTS` elements on `device`.

        Returns the sum's squared norm (fp32 scalar on `device`) on the rank of the embedding, None on other ranks. With
        replicas, each replica sums its shard, which has the same range in both copies.
        """
        places = ((self.embedding_stage, self.embedding_name), (self.head_stage, self.head_name))
        owners = [stage % self.num_ranks for stage, _ in places]
        if transport.rank not in owners:
            return None
        copies = []
        for stage, name in places:
            if stage in memory:
                memory[stage].states.wait_for_gradients()
                state = memory[stage].state
                copies.append(state.own_gradient(name))
        peer = owners[1] if transport.rank == owners[0] else owners[0]
        square = torch.zeros((), dtype=torch.float32, device=device)
        for parts in zip(*(copy.split(CHUNK_ELEMENTS) for copy in copies), strict=True):
            # sync: twice per chunk if the gradient is on the host
            first, *others = (part.to(device, self.gradient_dtype) for part in parts)
            total = first + (others[0] if others else transport.exchange(first, peer))
            for part in parts:
                part.copy_(total)
            norm: Tensor = torch.linalg.vector_norm(total, dtype=torch.float32)
            square += norm.square()
        return square if transport.rank == owners[0] else None
