"""Keeps the two copies of a matrix that embedding and head share equal: their gradients are summed before the update.

Both owners then make the same update from the same numbers, so the copies stay bit-equal without sending weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from mobius.memory.stage_memory import StageMemory
from mobius.runtime.transport import Transport


@dataclass(frozen=True)
class TiedPair:
    """Where the two copies live."""

    embedding_name: str
    head_name: str
    embedding_stage: int
    head_stage: int
    num_ranks: int

    @property
    def names(self) -> frozenset[str]:
        return frozenset((self.embedding_name, self.head_name))

    def sum_gradients(self, memory: StageMemory, transport: Transport) -> Tensor | None:
        """Replace both gradients by their sum; collective over the owners.

        Returns the sum's squared norm (fp32 scalar) on the rank of the embedding, None on the others.
        """
        owners = (self.embedding_stage % self.num_ranks, self.head_stage % self.num_ranks)
        if transport.rank not in owners:
            return None
        if owners[0] == owners[1]:
            embedding = _gradient(memory, self.embedding_stage, self.embedding_name)
            head = _gradient(memory, self.head_stage, self.head_name)
            embedding += head
            head.copy_(embedding)
            return _square(embedding)
        is_embedding = transport.rank == owners[0]
        own = (
            _gradient(memory, self.embedding_stage, self.embedding_name)
            if is_embedding
            else _gradient(memory, self.head_stage, self.head_name)
        )
        own += transport.exchange(own, owners[1] if is_embedding else owners[0])
        return _square(own) if is_embedding else None


def _gradient(memory: StageMemory, stage: int, name: str) -> Tensor:
    memory.wait_for_gradients(stage)
    state = memory.states[stage]
    offset, shape = state.layout.offsets[name]
    return state.gradients[offset : offset + torch.Size(shape).numel()]


def _square(gradient: Tensor) -> Tensor:
    return cast(Tensor, torch.linalg.vector_norm(gradient, dtype=torch.float32)).square()
