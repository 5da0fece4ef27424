"""Forward of fused experts, registered as an experts implementation of transformers, for every family.

    tokens --router--> top-k experts per token, and their weights
    rows: one per token and chosen expert, sorted by expert --> matmul --> gate --> matmul --> times weights
    a token's rows are summed in the order of its experts

No token is dropped, and no shape depends on routing. On a GPU nothing here synchronizes with the host. On a CPU,
operations and their order equal those of transformers' `grouped_mm`, so results are bit-identical.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from mobius.models.experts.fused import fused_experts, matrix_names
from mobius.models.experts.gradient_factors import placeholder_names
from mobius.models.experts.grouped_linear import (
    ExpertMatrices,
    Routing,
    grouped_linear,
    multiply_and_unpermute,
    permute_tokens,
)

EXPERTS_IMPLEMENTATION = "mobius_experts"
"""Name by which transformers finds `run_experts`."""


def register_experts_implementation(model: nn.Module) -> None:
    """Make the fused experts of `model` run `run_experts`, with placeholders; sets this in its configuration."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for experts in fused_experts(model).values():
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, run_experts)
        cast(Any, experts.config)._experts_implementation = EXPERTS_IMPLEMENTATION
        for tap in (tap for name in matrix_names(experts) for tap in placeholder_names(name)):
            experts.register_buffer(tap, None, persistent=False)


def run_experts(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Weighted sum of expert outputs per token; called by transformers.

    Args:
        module: fused experts.
        hidden: tokens [T, H].
        top_k_index: experts of each token, integers [T, K].
        top_k_weights: their weights [T, K].
    """
    run = run_experts_on_gpu if hidden.device.type == "cuda" else _run_as_transformers
    return run(cast(Any, module), hidden, top_k_index, top_k_weights)


def run_experts_on_gpu(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`run_experts` for GPUs: no scatter-add in forward or backward, no matmul recomputed for `top_k_weights`."""
    routing, (into, out_of) = _route(experts, top_k_index), matrix_names(experts)
    rows = permute_tokens(hidden, routing, top_k_index.shape[1])
    rows = _gate(experts, grouped_linear(rows, routing.expert_offsets, _matrix(experts, into)))
    return multiply_and_unpermute(rows, top_k_weights, routing, _matrix(experts, out_of)).to(hidden.dtype)


def _run_as_transformers(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    routing, (into, out_of) = _route(experts, top_k_index), matrix_names(experts)
    rows = hidden[routing.order // top_k_index.shape[1]]
    rows = _gate(experts, grouped_linear(rows, routing.expert_offsets, _matrix(experts, into)))
    rows = grouped_linear(rows, routing.expert_offsets, _matrix(experts, out_of))
    rows = rows * top_k_weights.reshape(-1)[routing.order].unsqueeze(-1)
    tokens: Tensor = rows[routing.inverse_order].unflatten(0, top_k_index.shape).sum(1)
    return tokens.to(hidden.dtype)


def _route(experts: Any, top_k_index: Tensor) -> Routing:
    # Not a stable sort: it fixes the summation order of an expert's tokens, which has to be transformers' own.
    sorted_experts, order = torch.sort(top_k_index.reshape(-1))
    numbers = torch.arange(experts.num_experts, device=top_k_index.device)
    expert_offsets = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)
    inverse_order = order.scatter(0, order, torch.arange(len(order), device=order.device))
    return Routing(order, inverse_order, expert_offsets)


def _gate(experts: Any, rows: Tensor) -> Tensor:
    return cast(Tensor, experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows))


def _matrix(experts: Any, name: str) -> ExpertMatrices:
    return ExpertMatrices(
        getattr(experts, name), experts.is_transposed, *(getattr(experts, tap) for tap in placeholder_names(name))
    )
