"""Fused experts (one tensor holds the matrices of all experts): forward for every family, and gradients.

    tokens --router--> top-k experts per token, and their weights
    rows: one per token and chosen expert, sorted by expert --> matmul --> gate --> matmul --> times weights
    a token's rows are summed in the order of its experts

transformers stores such a tensor as [experts, out, in] and finds our forward by its registered name. No token is
dropped, and no shape depends on routing. On a GPU, this code never synchronizes with the host. On a CPU, it runs the
same operations in the same order as transformers' `grouped_mm`, so results are bit-identical.

    y = x W of each expert's rows       dx = dy W^T is returned;   the caller computes dW = x^T dy from x and dy

Autograd returns the factors x and dy, and expert offsets, as gradients of three placeholders whose values are not read.

A matrix may have an adapter, whose two factors hold those of all experts: y = x W + scale * (x A) B, each by grouped
products. So no matrix of an expert is ever added up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from mobius.models.grouped_matmul import add_weight_gradient, grouped_matmul, grouped_weight_gradient
from mobius.models.linear import record_calls
from mobius.schedule.partition import Experts

_OPTIONS = ("has_gate", "has_bias", "is_transposed")
"""Attributes that transformers' decorator sets on each module of fused experts."""


def matrix_names(experts: nn.Module) -> tuple[str, str]:
    """Names of the input matrix and the output matrix of fused experts."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def fused_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of fused experts, by name."""
    return {name: module for name, module in model.named_modules() if _is_fused(module)}


def _is_fused(module: nn.Module) -> bool:
    return hasattr(type(module).forward, "__wrapped__") and all(name in vars(module) for name in _OPTIONS)


def unsupported_experts_reason(model: nn.Module) -> str | None:
    """Reason (a clause after the family's name) why the model's experts cannot be run, or None if they can.

    A parameter of an expert has `.experts.` in its name. Shared experts, which every token uses, are not checked.
    """
    fused = fused_experts(model)
    for name, module in fused.items():
        if reason := _other_form(module):
            return f"has experts with {reason}, which are not supported ({name})"
    known = tuple(f"{name}." for name in fused)
    others = sorted(name for name, _ in model.named_parameters() if ".experts." in name and not name.startswith(known))
    return f"has experts that are not held in one tensor per matrix (such as {others[0]})" if others else None


def _other_form(experts: Any) -> str | None:
    if getattr(experts, "has_post_expert_norm", False):
        return "norms"
    matrices = matrix_names(experts)
    known = dict.fromkeys(matrices, 3) | dict.fromkeys((f"{name}_bias" for name in matrices if experts.has_bias), 2)
    found = {name: each.dim() for name, each in experts.named_parameters()}
    if found != known:
        return f"other parameters than two matrices of three dimensions ({', '.join(found)})"
    return None


class ExpertsFactor(nn.Module):
    """One of two factors of an adapter of a matrix of fused experts, in the form in which peft stores it.

    first     A [rank * experts, in]     expert e: rows from e * rank on
    second    B [out, rank * experts]    expert e: columns e, e + experts, ...
    """

    def __init__(self, matrix: str, shape: tuple[int, int], num_experts: int, *, scale: float, is_second: bool) -> None:
        """Create a factor of `shape` on the meta device, for the parameter `matrix` of the experts."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device="meta"))
        self.matrix, self.num_experts, self.scale, self.is_second = matrix, num_experts, scale, is_second
        for name in placeholder_names("weight"):
            self.register_buffer(name, None, persistent=False)

    def arguments(self) -> tuple[Any, ...]:
        """Last five arguments of a product, as `_matrix` returns them."""
        weight = stacked(self.weight, self.num_experts, is_second=self.is_second)
        return weight, False, *(getattr(self, each) for each in placeholder_names("weight"))


def stacked(factor: Tensor, num_experts: int, *, is_second: bool) -> Tensor:
    """View of an adapter's factor as the experts' matrices [experts, out, in]."""
    if is_second:
        return factor.view(len(factor), -1, num_experts).permute(2, 0, 1)
    return factor.view(num_experts, -1, factor.shape[1])


def adapt_experts(experts: nn.Module, adapters: Mapping[str, tuple[int, float]]) -> None:
    """Add adapters to the matrices of fused experts in `adapters`: name -> rank and scale.

    peft wraps the module once for each matrix, and its names tell the order, so these are here, too: the adapter of the
    last matrix is `lora_A` and `lora_B`, that of the one before it `base_layer.lora_A` and `base_layer.lora_B`.
    """
    holder: nn.Module = experts
    shapes = {name: tuple(each.shape) for name, each in experts.named_parameters(recurse=False)}
    for matrix in reversed([name for name in shapes if name in adapters]):
        if hasattr(holder, "lora_A"):
            holder.base_layer = nn.Module()
            holder = holder.base_layer
        (rank, scale), (number, *sizes) = adapters[matrix], shapes[matrix]
        num_in, num_out = sizes if cast(Any, experts).is_transposed else reversed(sizes)
        holder.lora_A = ExpertsFactor(matrix, (rank * number, num_in), number, scale=scale, is_second=False)
        holder.lora_B = ExpertsFactor(matrix, (num_out, rank * number), number, scale=scale, is_second=True)


def _adapters_within(experts: nn.Module) -> Iterator[tuple[str, ExpertsFactor, ExpertsFactor]]:
    """Yield the adapters of fused experts: the end of the holder's name, and both factors."""
    end = ""
    holder: nn.Module | None = experts
    while isinstance(first := getattr(holder, "lora_A", None), ExpertsFactor):
        yield end, first, cast(Any, holder).lora_B
        end, holder = f"{end}.base_layer", getattr(holder, "base_layer", None)


class AdaptedMatrix(NamedTuple):
    """A matrix of fused experts that has an adapter."""

    name: str
    """Full name of the parameter."""
    num_experts: int
    is_transposed: bool
    """Whether the parameter is [experts, in, out] instead of [experts, out, in]."""


def adapted_matrices(model: nn.Module) -> dict[str, AdaptedMatrix]:
    """Return, for each adapter of fused experts, the name of the module that holds its factors -> its matrix."""
    return {
        f"{name}{end}": AdaptedMatrix(f"{name}.{first.matrix}", first.num_experts, cast(Any, experts).is_transposed)
        for name, experts in fused_experts(model).items()
        for end, first, _ in _adapters_within(experts)
    }


class Routing(NamedTuple):
    """Mapping between tokens and rows. Each token has K rows; rows are sorted by expert."""

    order: Tensor
    """[rows]: index of each row in the flattened [tokens, K]."""
    inverse_order: Tensor
    """[tokens * K]: row of each index of the flattened [tokens, K]."""
    expert_offsets: Tensor
    """int32 [experts]: end of each expert's rows."""


def _as_in_out(weight: Tensor, is_transposed: bool) -> Tensor:
    return weight if is_transposed else weight.transpose(1, 2)


def _remember(ctx: Any, weight: Tensor, is_transposed: bool, placeholders: Sequence[Tensor | None]) -> None:
    ctx.is_transposed, ctx.is_trained = is_transposed, weight.requires_grad
    ctx.has_factors = placeholders[0] is not None


def _of_weight(ctx: Any, rows: Tensor, gradient: Tensor, expert_offsets: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the five arguments that `_matrix` returns, from input rows and output gradient."""
    left, right = (rows, gradient) if ctx.is_transposed else (gradient, rows)
    if ctx.has_factors:
        # Without detach, the input would keep its graph alive.
        return None, None, left.detach(), right.detach(), expert_offsets.to(torch.float32)
    return grouped_weight_gradient(left, right, expert_offsets) if ctx.is_trained else None, None, None, None, None


class _Product(torch.autograd.Function):
    """Multiply each row by its expert's matrix: [rows, in] -> [rows, out]."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, expert_offsets: Tensor, weight: Tensor, is_transposed: bool, *placeholders: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows, expert_offsets, weight)
        _remember(ctx, weight, is_transposed, placeholders)
        return grouped_matmul(rows, _as_in_out(weight, is_transposed), expert_offsets)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, expert_offsets, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_rows = grouped_matmul(gradient, _as_in_out(weight, not ctx.is_transposed), expert_offsets)
        return of_rows, None, *_of_weight(ctx, rows, gradient, expert_offsets)


class _PermuteTokens(torch.autograd.Function):
    """Copy tokens to rows: [T, H] -> [rows, H]; backward sums the rows of a token without scatter-add."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Tensor, inverse_order: Tensor, num_experts_per_token: int) -> Tensor:
        ctx.save_for_backward(inverse_order)
        ctx.num_experts_per_token = num_experts_per_token
        return hidden[order // num_experts_per_token]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inverse_order,) = ctx.saved_tensors
        return gradient[inverse_order].unflatten(0, (-1, ctx.num_experts_per_token)).sum(1), None, None, None


class _MultiplyAndUnpermute(torch.autograd.Function):
    """Multiply rows by their experts' matrices and sum them per token, weighted by [T, K]: [rows, in] -> [T, out].

    Backward recomputes no product: the gradient of a top-k weight is the dot product of its row and the gradient of
    this row before weighting.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        top_k_weights: Tensor,
        order: Tensor,
        inverse_order: Tensor,
        expert_offsets: Tensor,
        weight: Tensor,
        is_transposed: bool,
        *placeholders: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(rows, top_k_weights, order, inverse_order, expert_offsets, weight)
        _remember(ctx, weight, is_transposed, placeholders)
        made = grouped_matmul(rows, _as_in_out(weight, is_transposed), expert_offsets)
        tokens: Tensor = (made[inverse_order].unflatten(0, top_k_weights.shape) * top_k_weights.unsqueeze(-1)).sum(1)
        return tokens.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, top_k_weights, order, inverse_order, expert_offsets, weight = ctx.saved_tensors
        of_output = gradient[order // top_k_weights.shape[1]]
        unshared = grouped_matmul(of_output, _as_in_out(weight, not ctx.is_transposed), expert_offsets)
        own = top_k_weights.reshape(-1)[order].unsqueeze(-1)
        of_shares = (
            (unshared.float() * rows.float()).sum(-1)[inverse_order].view(top_k_weights.shape).to(top_k_weights.dtype)
        )
        of_rows = (unshared * own).to(rows.dtype)
        of_weight = _of_weight(ctx, (rows * own).to(rows.dtype), of_output, expert_offsets)
        return of_rows, of_shares, None, None, None, *of_weight


_multiply = cast(Callable[..., Tensor], _Product.apply)
_permute_tokens = cast(Callable[..., Tensor], _PermuteTokens.apply)
_multiply_and_unpermute = cast(Callable[..., Tensor], _MultiplyAndUnpermute.apply)

EXPERTS_IMPLEMENTATION = "mobius_experts"
"""Name by which transformers finds `run_experts`."""


def register_experts_implementation(model: nn.Module) -> None:
    """Make the fused experts of `model` call `run_experts` (set in their configuration), and add placeholders."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for experts in fused_experts(model).values():
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, run_experts)
        cast(Any, experts.config)._experts_implementation = EXPERTS_IMPLEMENTATION
        for name in (each for matrix in matrix_names(experts) for each in placeholder_names(matrix)):
            experts.register_buffer(name, None, persistent=False)


def run_experts(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Weighted sum of expert outputs per token; called by transformers.

    Args:
        module: fused experts.
        hidden: tokens [T, H].
        top_k_index: numbers of each token's experts, integers [T, K].
        top_k_weights: weights of these experts, [T, K].
    """
    run = run_experts_on_gpu if hidden.device.type == "cuda" else _run_as_transformers
    return run(cast(Any, module), hidden, top_k_index, top_k_weights)


def run_experts_on_gpu(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`run_experts` for GPUs, without scatter-add, and without recomputing a product for `top_k_weights`."""
    routing, (into, out_of) = _route(experts, top_k_index), matrix_names(experts)
    rows = _permute_tokens(hidden, routing.order, routing.inverse_order, top_k_index.shape[1])
    rows = _multiply_adapted(experts, into, rows, routing.expert_offsets)
    if experts.has_bias:
        numbers = top_k_index.reshape(-1, 1)[routing.order]
        rows = _add_biases(experts, into, rows, numbers, rows.new_ones(()).expand(numbers.shape))
    rows = _gate(experts, rows)
    tokens = _multiply_and_unpermute(rows, top_k_weights, *routing, *_matrix(experts, out_of))
    if experts.has_bias:
        tokens = _add_biases(experts, out_of, tokens, top_k_index, top_k_weights)
    if (adapter := _adapter_of(experts, out_of)) is not None:
        first, second = adapter
        inner = _multiply(rows, routing.expert_offsets, *first.arguments())
        added = _multiply_and_unpermute(inner, top_k_weights, *routing, *second.arguments())
        tokens = tokens + added * second.scale
    return tokens.to(hidden.dtype)


def _run_as_transformers(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    routing, (into, out_of) = _route(experts, top_k_index), matrix_names(experts)
    numbers = top_k_index.reshape(-1)[routing.order]
    rows = hidden[routing.order // top_k_index.shape[1]]
    rows = _multiply_adapted(experts, into, rows, routing.expert_offsets)
    rows = _gate(experts, rows + getattr(experts, f"{into}_bias")[numbers] if experts.has_bias else rows)
    rows = _multiply_adapted(experts, out_of, rows, routing.expert_offsets)
    rows = rows + getattr(experts, f"{out_of}_bias")[numbers] if experts.has_bias else rows
    rows = rows * top_k_weights.reshape(-1)[routing.order].unsqueeze(-1)
    tokens: Tensor = rows[routing.inverse_order].unflatten(0, top_k_index.shape).sum(1)
    return tokens.to(hidden.dtype)


def _add_biases(experts: Any, matrix: str, output: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
    """Add to each row of `output` the biases of its `chosen` experts [rows, K], times `factors` [rows, K].

    As a product, because the gradient of an index would be summed in any order.
    """
    bias = getattr(experts, f"{matrix}_bias")
    spread = torch.zeros(len(chosen), len(bias), dtype=bias.dtype, device=bias.device)
    return torch.addmm(output.to(bias.dtype), spread.scatter(1, chosen, factors.to(bias.dtype)), bias)


def _multiply_adapted(experts: nn.Module, matrix: str, rows: Tensor, expert_offsets: Tensor) -> Tensor:
    """Multiply each row by its expert's matrix, and by the factors of its adapter, if any."""
    output = _multiply(rows, expert_offsets, *_matrix(experts, matrix))
    if (adapter := _adapter_of(experts, matrix)) is None:
        return output
    first, second = adapter
    inner = _multiply(rows, expert_offsets, *first.arguments())
    return output + _multiply(inner, expert_offsets, *second.arguments()) * second.scale


def _adapter_of(experts: nn.Module, matrix: str) -> tuple[ExpertsFactor, ExpertsFactor] | None:
    """Return the factors of the adapter of a matrix of fused experts; None without one."""
    found = ((first, second) for _, first, second in _adapters_within(experts) if first.matrix == matrix)
    return next(found, None)


def _route(experts: Any, top_k_index: Tensor) -> Routing:
    # As in transformers, the sort is not stable: an expert's tokens must be summed in the same order as there.
    sorted_experts, order = torch.sort(top_k_index.reshape(-1))
    numbers = torch.arange(experts.num_experts, device=top_k_index.device)
    expert_offsets = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)
    inverse_order = order.scatter(0, order, torch.arange(len(order), device=order.device))
    return Routing(order, inverse_order, expert_offsets)


def _gate(experts: Any, rows: Tensor) -> Tensor:
    return cast(Tensor, experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows))


def _matrix(experts: Any, name: str) -> tuple[Any, ...]:
    """Last five arguments of a product with the tensor `name`.

    These arguments are the weight [experts, out, in]; whether the weight is [experts, in, out] instead; and three
    placeholders, each possibly None: [rows, second dimension of the weight], [rows, third dimension], and fp32
    [experts] for offsets.
    """
    return getattr(experts, name), experts.is_transposed, *(getattr(experts, each) for each in placeholder_names(name))


_MOST_ROWS = 2**24
"""Maximum number of rows: fp32 represents every integer up to this number."""


def placeholder_names(weight: str) -> tuple[str, str, str]:
    """Placeholder names of matrix `weight`: left factor, right factor, and expert offsets."""
    return f"{weight}_left_placeholder", f"{weight}_right_placeholder", f"{weight}_offsets_placeholder"


@dataclass(frozen=True)
class ExpertsGradientFactors:
    """Gradient factors of one parameter of fused experts."""

    weight: str
    """Name within the layer."""
    num_experts_per_token: int
    """Experts per token (top-k)."""
    num_experts: int | None = None
    """Number of experts whose matrices `weight` holds, an adapter's factor; None for a matrix of experts."""
    is_second: bool = False
    """Whether `weight` is an adapter's second factor."""

    def make_placeholders(self, weight: Tensor, *, num_tokens: int) -> dict[str, Tensor]:
        rows, weight = num_tokens * self.num_experts_per_token, self._stacked(weight)
        assert rows <= _MOST_ROWS, "more rows than fp32 counts exactly"
        element = torch.empty(1, dtype=weight.dtype, device=weight.device)
        expert_offsets = torch.empty(1, dtype=torch.float32, device=weight.device).expand(len(weight))
        placeholders = *(element.expand(rows, width) for width in weight.shape[1:]), expert_offsets
        return {
            name: each.requires_grad_() for name, each in zip(placeholder_names(self.weight), placeholders, strict=True)
        }

    def add_gradient(self, total: Tensor, found: Mapping[str, Tensor]) -> None:
        left, right, expert_offsets = placeholder_names(self.weight)
        if left not in found:
            return
        matrices = self._stacked(total)
        own = (
            matrices if matrices.is_contiguous() else torch.zeros_like(matrices, memory_format=torch.contiguous_format)
        )
        add_weight_gradient(own, found[left], found[right], found[expert_offsets].to(torch.int32))
        if own is not matrices:
            matrices.add_(own)

    def _stacked(self, weight: Tensor) -> Tensor:
        return weight if self.num_experts is None else stacked(weight, self.num_experts, is_second=self.is_second)


def find_experts_gradient_factors(
    module: nn.Module, run: Callable[[], object], *, num_tokens: int
) -> tuple[ExpertsGradientFactors, ...]:
    """Factors of what is trained in fused experts in `module` that `run` calls exactly once, on all `num_tokens`."""
    found = fused_experts(module)
    calls = record_calls(found.values(), run) if found else {}
    factors = list[ExpertsGradientFactors]()
    for name, experts in found.items():
        given = [_top_k_index(*call.arguments, **call.keyword_arguments) for call in calls[experts]]
        if [len(each) for each in given] == [num_tokens]:
            trained = [own for own in matrix_names(experts) if experts.get_parameter(own).requires_grad]
            factors += [ExpertsGradientFactors(f"{name}.{own}", given[0].shape[1]) for own in trained]
            for path, factor in experts.named_modules(prefix=name):
                if isinstance(factor, ExpertsFactor) and factor.weight.requires_grad:
                    form = factor.num_experts, factor.is_second
                    factors.append(ExpertsGradientFactors(f"{path}.weight", given[0].shape[1], *form))
    return tuple(factors)


def _top_k_index(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return `top_k_index` from the arguments of `run_experts`; families pass it by position or by name."""
    return top_k_index


_EXPERTS = re.compile(r"(^|\.)experts\.")
_SHARED = re.compile(r"(^|\.)shared_experts?\.|^mlp\.(gate|up|down)_proj\.")
"""Patterns of parameter names: routed experts, and shared experts or a plain part beside them, for every token."""


def is_of_experts(name: str) -> bool:
    """Whether a parameter of this name is one of routed experts, or of their adapters."""
    return _EXPERTS.search(name) is not None


_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
"""Configuration fields for the number of experts per token, by family."""


def count_experts(
    config: PretrainedConfig, layers: Sequence[Mapping[str, tuple[int, ...]]], frozen: Sequence[Collection[str]]
) -> Experts | None:
    """Sizes of the experts in `layers` (per layer: parameter name -> shape); None for a model without experts.

    `frozen` holds each layer's untrained parameter names. A matrix of experts has three dimensions, the first of which
    is the number of experts; an adapter's factors have two.
    """
    own = [{name: shape for name, shape in shapes.items() if _EXPERTS.search(name)} for shapes in layers]
    numbers = {shape[0] for shapes in own for shape in shapes.values() if len(shape) > 2}
    if not numbers:
        return None
    assert len(numbers) == 1, numbers
    (number,) = numbers
    num_experts_per_token = next(
        (own_number for name in _PER_TOKEN if (own_number := getattr(config, name, None))), None
    )
    shared = [
        sum(math.prod(shape) for name, shape in shapes.items() if _SHARED.search(name)) // (3 * config.hidden_size)
        for shapes, routed in zip(layers, own, strict=True)
        if routed
    ]
    return Experts(
        number=number,
        num_experts_per_token=min(number, int(num_experts_per_token or number)),
        layers=tuple(sum(map(math.prod, shapes.values())) for shapes in own),
        shared_width=max(shared),
        trained=tuple(
            sum(math.prod(shape) for name, shape in shapes.items() if name not in names)
            for shapes, names in zip(own, frozen, strict=True)
        ),
    )
