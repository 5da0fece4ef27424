"""Decides which operations of a layer are cheap to recompute: those that only read inputs and write outputs.

With `RecomputeLevel.PRODUCTS`, backward recomputes these operations and nothing else: no matrix product, attention or
reduction over a row. Unknown operations are saved, so a new kind of operation costs memory, not time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_aten = torch.ops.aten
_MOVES = (_aten.cat, _aten._to_copy, _aten._unsafe_view, _aten.empty, _aten.full, _aten.zeros, _aten.scalar_tensor)
"""Copies and fills, which torch does not tag as pointwise; rotary embeddings use cat."""
_CHANGED = (_aten.topk,)
"""Operations whose results some families modify in place: routers normalize the chosen weights."""


def is_cheap_to_recompute(operation: object) -> bool:
    """Whether `operation`, in a traced graph or a dispatch, is elementwise, a view, or a copy."""
    if not isinstance(operation, OpOverload):
        return False
    return torch.Tag.pointwise in operation.tags or operation.is_view or operation.overloadpacket in _MOVES


def mark_for_recompute(graph: Graph) -> None:
    """Mark cheap operations in the joint `graph`, so that torch's partitioner saves none of their results."""
    for node in graph.nodes:
        if is_cheap_to_recompute(node.target):
            # Some torch versions require the id of a checkpointed region next to the mark.
            node.meta |= {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": 0}


def selective_checkpoint_contexts() -> tuple[Any, Any]:
    """Contexts for the forward and the recomputation of torch.utils.checkpoint."""
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-any-return]


def _policy(_: object, operation: OpOverload, *args: object, **kwargs: object) -> CheckpointPolicy:
    # Never reuse results of operations that mutate inputs, nor tensors that later operations modify in place.
    is_run_again = (
        is_cheap_to_recompute(operation) or operation._schema.is_mutable or operation.overloadpacket in _CHANGED
    )
    return CheckpointPolicy.PREFER_RECOMPUTE if is_run_again else CheckpointPolicy.MUST_SAVE
