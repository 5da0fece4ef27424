"""Tells which operations of a layer are cheap to run again: those that take a GPU no longer than it reads their inputs.

A layer that keeps its products alone (`RecomputeLevel.PRODUCTS`) runs these again within its backward, and nothing
else: no matrix product, no attention, no sum over a row. Whatever is not known here is kept, so that an operation of a
kind that nobody has thought of costs memory, not time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_aten = torch.ops.aten
_MOVES = (_aten.cat, _aten._to_copy, _aten._unsafe_view, _aten.empty, _aten.full, _aten.zeros, _aten.scalar_tensor)
"""Operations that copy or fill, which torch does not tag; rotary embeddings concatenate."""
_CHANGED = (_aten.topk,)
"""Operations whose results families change in place: routers norm the shares that they have chosen."""


def is_cheap_to_recompute(operation: object) -> bool:
    """Whether `operation`, of a traced graph or of a dispatch, is element by element, a view, or a copy."""
    if not isinstance(operation, OpOverload):
        return False
    return torch.Tag.pointwise in operation.tags or operation.is_view or operation.overloadpacket in _MOVES


def mark_for_recompute(graph: Graph) -> None:
    """Mark what is cheap in the forward and backward of `graph` so that torch's partitioner keeps nothing of it."""
    for node in graph.nodes:
        if is_cheap_to_recompute(node.target):
            # Number of a checkpointed part: some of torch's versions read it wherever they find the mark.
            node.meta |= {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": 0}


def selective_checkpoint_contexts() -> tuple[Any, Any]:
    """Contexts of a checkpointed forward and of its repetition, for torch.utils.checkpoint."""
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-any-return]


def _policy(_: object, operation: OpOverload, *args: object, **kwargs: object) -> CheckpointPolicy:
    # Neither what changes its input nor a tensor that others change is to be handed out a second time.
    is_run_again = (
        is_cheap_to_recompute(operation) or operation._schema.is_mutable or operation.overloadpacket in _CHANGED
    )
    return CheckpointPolicy.PREFER_RECOMPUTE if is_run_again else CheckpointPolicy.MUST_SAVE
