"""Load-balancing auxiliary loss of routers (`output_router_logits`), as in transformers.

The loss is one number per microbatch for all layers together, with p = softmax(router logits):

    experts x sum over experts of (times the expert is in a token's top-k / tokens) x (sum of its p / tokens)

Each layer counts every token again; padding does not count. Each stage adds two rows, with one number per expert, to
the rows of earlier stages, so the last stage has the totals. Top-k counts have no gradient. The gradient of the sums of
p is the same row for every layer; autograd continues from it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mobius.errors import CheckpointError, PlanError
from mobius.models.experts import fused_experts
from mobius.models.structure import file_of

TOKEN_MASK = "token_mask"
"""Layer argument, fp32 [B, L]: 1 for tokens that count. With it, a layer with a router also returns `router_sums`."""
_SWITCH = "output_router_logits"
_UNKNOWN = (
    "{file}: '{switch}' is true, which adds a loss on how evenly routers choose their experts. For the family "
    "{family!r} {reason}. Set it to false there: then only the loss of the tokens trains the routers."
)


class RouterLossValue(NamedTuple):
    """The loss of one microbatch, and the gradient with which backward of its layers starts."""

    loss: Tensor
    """fp32 scalar, without the coefficient."""
    weighted: Tensor
    """Contribution to the step's loss: `loss` * coefficient / number of microbatches."""
    gradient: Tensor
    """fp32 [2, experts]: gradient of `weighted` * loss scale for the microbatch's sums; zeros for top-k counts."""


@dataclass(frozen=True)
class RouterLoss:
    """Auxiliary loss of all routers of a model together."""

    num_experts: int
    num_experts_per_token: int
    """Experts per token (top-k)."""
    coefficient: float
    """`router_aux_loss_coef` in the configuration."""
    layers: frozenset[int]
    """Indices of the layers with a router; each has one router."""

    def __call__(
        self, sums: Tensor, num_tokens: Tensor, *, num_microbatches: int, loss_scale: float
    ) -> RouterLossValue:
        """Compute the loss from `sums` [2, experts] over all layers of a microbatch.

        `num_tokens` is an fp32 scalar, the number of tokens that count; without such tokens, the loss is 0. The step's
        loss is the mean over `num_microbatches`. `loss_scale` scales only the gradient (fp16 scaling).
        """
        times_chosen, own = sums[0], sums[1].detach().requires_grad_()
        counted = (len(self.layers) * num_tokens).clamp(min=1)
        with torch.enable_grad():
            loss = (times_chosen / counted * (own / counted)).sum() * self.num_experts
            weighted = self.coefficient / num_microbatches * loss
            (gradient,) = torch.autograd.grad(weighted * loss_scale, own)
        return RouterLossValue(loss.detach(), weighted.detach(), torch.stack([torch.zeros_like(gradient), gradient]))


def router_sums(logits: Tensor, token_mask: Tensor, num_experts_per_token: int) -> Tensor:
    """Top-k count and probability sum of each expert, fp32 [2, experts].

    `logits` [tokens, experts] are in the router's dtype; `token_mask` [B, L] weights the tokens.
    """
    weights = token_mask.reshape(-1)
    probabilities = torch.softmax(logits, -1)
    _, chosen = torch.topk(probabilities.detach(), num_experts_per_token, dim=-1)
    # Counts are integers, so the order of a GPU's scatter-add does not change the result.
    times = torch.zeros(logits.shape[-1], dtype=torch.float32, device=logits.device)
    times = times.scatter_add(0, chosen.reshape(-1), weights.unsqueeze(-1).expand_as(chosen).reshape(-1))
    return torch.stack([times, (probabilities.float() * weights.unsqueeze(-1)).sum(0)])


def install_router_loss(model: PreTrainedModel, layers: str) -> RouterLoss | None:
    """Return the auxiliary loss if the configuration sets it; layers with a router then accept `TOKEN_MASK`.

    `layers` is the name prefix of the layers. Raises CheckpointError if the family has no such loss, or another kind.
    """
    if not getattr(model.config, _SWITCH, False) or not fused_experts(model):
        return None
    num_experts, num_experts_per_token, coefficient = _numbers(model)
    found = dict[int, _Router]()
    for name, router in _routers(model).items():
        place = name.removeprefix(f"{layers}.").partition(".")[0]
        if not name.startswith(f"{layers}.") or int(place) in found:
            raise _unknown(model, f"it is not one router in each of some layers ({name})")
        found[int(place)] = router
    for index, router in found.items():
        layer = model.get_submodule(f"{layers}.{index}")
        vars(layer)["forward"] = _ForwardWithSums(layer, router, num_experts_per_token)
    return RouterLoss(num_experts, num_experts_per_token, coefficient, frozenset(found))


def refuse_slices(num_slices: int) -> None:
    """Raise PlanError for sequence slices: the last slice's backward would start before all routing is known."""
    if num_slices > 1:
        raise PlanError(
            f"--num_slices {num_slices}: '{_SWITCH}' is true in the model's config.json, and its router loss needs all "
            "tokens of a sequence together. The last slice's backward would start before the last layer has routed the "
            f"other slices. Use --num_slices 1, or set '{_SWITCH}' to false there."
        )


def _unknown(model: PreTrainedModel, reason: str) -> CheckpointError:
    config = model.config
    return CheckpointError(
        _UNKNOWN.format(file=file_of(config), switch=_SWITCH, family=config.model_type, reason=reason)
    )


def _numbers(model: PreTrainedModel) -> tuple[int, int, float]:
    """Number of experts, experts per token, and coefficient, as the family's model reads them."""
    given: Any = model
    names = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    num_experts, num_experts_per_token, coefficient = (getattr(given, name, None) for name in names)
    if (
        num_experts is None
        or num_experts_per_token is None
        or coefficient is None
        or _SWITCH not in inspect.signature(type(model).forward).parameters
    ):
        raise _unknown(model, "transformers has no such loss")
    return num_experts, num_experts_per_token, coefficient


class _Router(NamedTuple):
    module: nn.Module
    position: int
    """Index of the logits in the router's output tuple."""


def _routers(model: PreTrainedModel) -> dict[str, _Router]:
    """Routers by name: modules whose output the family records as `router_logits`."""
    recorded = getattr(getattr(model, model.base_model_prefix), "_can_record_outputs", None) or {}
    own: Any = recorded.get("router_logits")
    if getattr(own, "target_class", None) is None:
        raise _unknown(model, "transformers does not say which modules are its routers")
    within = f".{own.layer_name.strip('.')}." if own.layer_name else ""
    return {
        name: _Router(module, own.index)
        for name, module in model.named_modules()
        if isinstance(module, own.target_class) and within in f".{name}."
    }


class _ForwardWithSums:
    """Forward of a layer; if called with a token mask, it also returns the sums of the layer's router."""

    def __init__(self, layer: nn.Module, router: _Router, num_experts_per_token: int) -> None:
        self._forward, self._position = layer.forward, router.position
        self._num_experts_per_token = num_experts_per_token
        self._logits: Tensor | None = None
        """Logits, from the router's forward to the end of the layer's forward."""
        router.module.register_forward_hook(self._keep)

    def __call__(
        self, hidden: Tensor, token_mask: Tensor | None = None, **arguments: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        output = self._forward(hidden, **arguments)
        logits, self._logits = self._logits, None
        assert logits is not None, "the layer did not call its router"
        return output if token_mask is None else (output, router_sums(logits, token_mask, self._num_experts_per_token))

    def _keep(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        self._logits = output[self._position] if isinstance(output, tuple) else output
