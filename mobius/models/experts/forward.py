"""The forward of fused experts, as an experts implementation of transformers, so that every family takes it.

    tokens --router--> experts of each token, and their shares
    rows: a token as often as it has experts, sorted by expert --> product --> gate --> product --> times shares
    a token's rows are summed in its experts' order

No token is dropped, whatever the router does, and no shape depends on it. On a GPU nothing here waits for it. On a CPU
operations and their order are those of transformers' `grouped_mm`, so that results are its bits.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from mobius.models.experts.fused import fused_experts, matrices
from mobius.models.experts.gradients import Matrix, Routing, multiply, multiply_and_gather, spread
from mobius.models.experts.taps import tap_names

IMPLEMENTATION = "mobius_experts"
"""Name by which transformers finds `run_experts`."""


def use_experts(model: nn.Module) -> None:
    """Let the fused experts of `model` be run by `run_experts`, with taps; its configuration then says so."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for experts in fused_experts(model).values():
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, run_experts)
        cast(Any, experts.config)._experts_implementation = IMPLEMENTATION
        for tap in (tap for name in matrices(experts) for tap in tap_names(name)):
            experts.register_buffer(tap, None, persistent=False)


def run_experts(module: nn.Module, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Each token's sum of its experts' outputs, as transformers calls it.

    Args:
        module: fused experts.
        hidden: tokens [T, H].
        chosen: experts of each token, integers [T, K].
        shares: their weights [T, K].
    """
    run = run_without_scatter if hidden.device.type == "cuda" else _run_as_transformers
    return run(cast(Any, module), hidden, chosen, shares)


def run_without_scatter(experts: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """`run_experts` for GPUs: neither forward nor backward adds at places, and no product is made again for shares."""
    routing, (into, out_of) = _route(experts, chosen), matrices(experts)
    rows = spread(hidden, routing, chosen.shape[1])
    rows = _gate(experts, multiply(rows, routing.ends, _matrix(experts, into)))
    return multiply_and_gather(rows, shares, routing, _matrix(experts, out_of)).to(hidden.dtype)


def _run_as_transformers(experts: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    routing, (into, out_of) = _route(experts, chosen), matrices(experts)
    rows = hidden[routing.order // chosen.shape[1]]
    rows = _gate(experts, multiply(rows, routing.ends, _matrix(experts, into)))
    rows = multiply(rows, routing.ends, _matrix(experts, out_of))
    rows = rows * shares.reshape(-1)[routing.order].unsqueeze(-1)
    tokens: Tensor = rows[routing.places].unflatten(0, chosen.shape).sum(1)
    return tokens.to(hidden.dtype)


def _route(experts: Any, chosen: Tensor) -> Routing:
    # Tokens of one expert are added up in this order, which for transformers' bits is not to be the stable one.
    sorted_experts, order = torch.sort(chosen.reshape(-1))
    numbers = torch.arange(experts.num_experts, device=chosen.device)
    ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)
    places = order.scatter(0, order, torch.arange(len(order), device=order.device))
    return Routing(order, places, ends)


def _gate(experts: Any, rows: Tensor) -> Tensor:
    return cast(Tensor, experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows))


def _matrix(experts: Any, name: str) -> Matrix:
    return Matrix(getattr(experts, name), experts.is_transposed, *(getattr(experts, tap) for tap in tap_names(name)))
