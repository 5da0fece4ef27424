"""The loss on how evenly routers choose their experts (`output_router_logits`), as transformers computes it.

It is one number of all layers of a microbatch together, with p = softmax(a router's logits):

    experts x sum over experts of (times it is among a token's largest p / tokens) x (sum of its p / tokens)

Tokens are counted once for each layer, padding not at all. So a stage adds two rows of as many numbers as there are
experts to those of the stages before, and the last one has all. Times chosen have no gradient. That of the sum of p is
the same row of numbers for every layer, and autograd takes it from there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mobius.errors import CheckpointError, PlanError
from mobius.models.experts.fused import fused_experts
from mobius.models.structure.error_translation import file_of

TOKEN_MASK = "token_mask"
"""Argument of a layer with a router, fp32 [B, L]: 1 where a token counts. With it the layer gives `router_sums`, too.
"""
_SWITCH = "output_router_logits"
_UNKNOWN = (
    "{file}: '{switch}' is true, which adds a loss on how evenly routers choose their experts. For the family "
    "{family!r} {reason}. Set it to false there: routers are trained by the loss of the tokens alone."
)


class RouterLossValue(NamedTuple):
    """The loss of one microbatch, and what its layers' backward begins with."""

    loss: Tensor
    """fp32 scalar, without a coefficient."""
    weighted: Tensor
    """Part of the step's loss: it times the coefficient, over the number of microbatches."""
    gradient: Tensor
    """fp32 [2, experts]: that of the microbatch's sums, by `weighted` times the loss scale; zeros for times chosen."""


@dataclass(frozen=True)
class RouterLoss:
    """A model's loss over its routers."""

    num_experts: int
    num_experts_per_token: int
    """Experts of a token."""
    coefficient: float
    """`router_aux_loss_coef` of the configuration."""
    layers: frozenset[int]
    """Layers with a router, one each."""

    def __call__(
        self, sums: Tensor, num_tokens: Tensor, *, num_microbatches: int, loss_scale: float
    ) -> RouterLossValue:
        """The loss from the sums [2, experts] of all layers of a microbatch with `num_tokens` tokens that count.

        `num_tokens` is an fp32 scalar; a microbatch without tokens has no loss. The step's is the mean over its
        `num_microbatches`. `loss_scale` is a factor on the gradient only (fp16 scaling).
        """
        times_chosen, own = sums[0], sums[1].detach().requires_grad_()
        counted = (len(self.layers) * num_tokens).clamp(min=1)
        with torch.enable_grad():
            loss = (times_chosen / counted * (own / counted)).sum() * self.num_experts
            weighted = self.coefficient / num_microbatches * loss
            (gradient,) = torch.autograd.grad(weighted * loss_scale, own)
        return RouterLossValue(loss.detach(), weighted.detach(), torch.stack([torch.zeros_like(gradient), gradient]))


def router_sums(logits: Tensor, token_mask: Tensor, num_experts_per_token: int) -> Tensor:
    """Times that each expert was chosen, and the sum of its probabilities, fp32 [2, experts].

    `logits` [tokens, experts] are a router's, in its format; tokens weigh as `counted` [B, L] says.
    """
    weights = token_mask.reshape(-1)
    probabilities = torch.softmax(logits, -1)
    _, chosen = torch.topk(probabilities.detach(), num_experts_per_token, dim=-1)
    # Whole numbers: the order in which a GPU adds them does not matter.
    times = torch.zeros(logits.shape[-1], dtype=torch.float32, device=logits.device)
    times = times.scatter_add(0, chosen.reshape(-1), weights.unsqueeze(-1).expand_as(chosen).reshape(-1))
    return torch.stack([times, (probabilities.float() * weights.unsqueeze(-1)).sum(0)])


def install_router_loss(model: PreTrainedModel, layers: str) -> RouterLoss | None:
    """The loss that `model` asks for, if it does; its layers with a router, below `layers`, then take `TOKEN_MASK`.

    Raises CheckpointError if the family has no such loss, or one of another kind.
    """
    if not getattr(model.config, _SWITCH, False) or not fused_experts(model):
        return None
    numbers = _numbers(model)
    found = dict[int, _Router]()
    for name, router in _routers(model).items():
        place = name.removeprefix(f"{layers}.").partition(".")[0]
        if not name.startswith(f"{layers}.") or int(place) in found:
            raise _unknown(model, f"it is not one router in each of some layers ({name})")
        found[int(place)] = router
    for index, router in found.items():
        _give_sums(model.get_submodule(f"{layers}.{index}"), router, numbers.num_experts_per_token)
    return replace(numbers, layers=frozenset(found))


def refuse_slices(num_slices: int) -> None:
    """Raise PlanError if sequences are cut, whose last slices would go backward before all choices are known."""
    if num_slices > 1:
        raise PlanError(
            f"--num_slices {num_slices}: '{_SWITCH}' is true in the model's config.json, and its loss over routers is "
            "of all tokens of a sequence together. The last slice would go backward before the last layer has chosen "
            "for the others. Use --num_slices 1, or set it to false there."
        )


def _unknown(model: PreTrainedModel, reason: str) -> CheckpointError:
    config = model.config
    return CheckpointError(
        _UNKNOWN.format(file=file_of(config), switch=_SWITCH, family=config.model_type, reason=reason)
    )


def _numbers(model: PreTrainedModel) -> RouterLoss:
    """The loss by the numbers that the family's own code gives it, without layers."""
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
    return RouterLoss(num_experts, num_experts_per_token, coefficient, frozenset())


class _Router(NamedTuple):
    module: nn.Module
    position: int
    """Place of the logits among what it gives."""


def _routers(model: PreTrainedModel) -> dict[str, _Router]:
    """Routers by name: modules whose output the family's own code collects as `router_logits`."""
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


class _Seen:
    """Keeps the logits of a router from its forward to the end of its layer's."""

    def __init__(self, position: int) -> None:
        self._position = position
        self._logits: Tensor | None = None

    def keep(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        self._logits = output[self._position] if isinstance(output, tuple) else output

    def take(self) -> Tensor:
        logits, self._logits = self._logits, None
        assert logits is not None, "the layer did not call its router"
        return logits


def _give_sums(layer: nn.Module, router: _Router, num_experts_per_token: int) -> None:
    seen = _Seen(router.position)
    router.module.register_forward_hook(seen.keep)
    vars(layer)["forward"] = partial(_forward, layer.forward, seen, num_experts_per_token)


def _forward(
    forward: Callable[..., Tensor],
    seen: _Seen,
    num_experts_per_token: int,
    hidden: Tensor,
    token_mask: Tensor | None = None,
    **arguments: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    output, logits = forward(hidden, **arguments), seen.take()
    return output if token_mask is None else (output, router_sums(logits, token_mask, num_experts_per_token))
