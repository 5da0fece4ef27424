"""Experts: their products alone, and steps that train them beside transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from harness.pipelines import model_of
from harness.tiny_families import Losses, tiny_config
from torch import Tensor
from transformers import PreTrainedModel

from mobius.engine.stage import StageModule
from mobius.engine.stage_layers import MicrobatchContext
from mobius.models.blocks import LayerArgumentsBuilder, ModelParts
from mobius.models.loss import shift_labels
from mobius.schedule.partition import partition_of

LEARNING_RATE = 3e-5
"""Twenty steps halve the loss: of a loss near zero, which ten times as much ends in, rounding alone is a large share.
"""
ROWS, LENGTH = 4, 64

Step = Callable[[Mapping[str, Tensor], Tensor], tuple[float, dict[str, Tensor]]]
"""Weights in the working dtype and tokens [B, L] -> loss, and gradients of all weights by name."""


def losses_of_both(device: torch.device, dtype: torch.dtype, *, steps: int, width: int, compiled: bool) -> Losses:
    """Losses of a qwen3_moe of two layers, all of experts, on the same rows again and again, with fp32 masters."""
    shape = {"hidden_size": width, "moe_intermediate_size": width, "num_experts": 16, "num_experts_per_tok": 4}
    config = tiny_config("qwen3_moe", num_hidden_layers=2, decoder_sparse_step=1, use_sliding_window=False, **shape)
    model = model_of(config)
    masters = {name: parameter.detach().clone().to(device) for name, parameter in model.named_parameters()}
    tokens = torch.randint(0, config.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2)).to(device)
    ways = _in_a_stage(model, device, dtype, compiled=compiled), _by_transformers(_moved(model, device, dtype))
    return Losses(*(_train(step, masters, tokens, dtype, steps) for step in ways))


def _moved(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The model with its parameters in `dtype`; frequencies of rotary embeddings are as they were, as when loaded."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.to(device)


def _train(
    step: Step, initial: Mapping[str, Tensor], tokens: Tensor, dtype: torch.dtype, num_steps: int
) -> list[float]:
    masters = {name: value.clone().requires_grad_() for name, value in initial.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=LEARNING_RATE)
    losses = []
    for _ in range(num_steps):
        loss, gradients = step({name: value.detach().to(dtype) for name, value in masters.items()}, tokens)
        for name, value in masters.items():
            value.grad = gradients[name].float()
        optimizer.step()
        losses.append(loss)
    return losses


def _by_transformers(model: PreTrainedModel) -> Step:
    def step(weights: Mapping[str, Tensor], tokens: Tensor) -> tuple[float, dict[str, Tensor]]:
        model.load_state_dict(dict(weights), strict=False)
        model.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return float(loss.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}

    return step


def _in_a_stage(model: PreTrainedModel, device: torch.device, dtype: torch.dtype, *, compiled: bool) -> Step:
    parts = ModelParts(model.config, device, compiled=compiled)
    stage = StageModule(parts, partition_of((len(parts.layers),))[0], loss_chunk_tokens=ROWS * LENGTH)
    context = MicrobatchContext(LayerArgumentsBuilder(parts, device=device, dtype=dtype)(LENGTH))

    def step(weights: Mapping[str, Tensor], tokens: Tensor) -> tuple[float, dict[str, Tensor]]:
        sums = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in weights.items()}
        targets = shift_labels(tokens)
        hidden, kept = stage.forward(weights, tokens, context)
        num_targets = int((targets >= 0).sum())
        loss, gradient = stage.loss(weights, sums, hidden, targets, num_targets=num_targets, loss_scale=1.0)
        gradient = stage.backward(weights, sums, kept, gradient, context)
        stage.embedding_backward(weights, sums, tokens, gradient)
        return float(loss), sums

    return step


COUNTS = (10, 0, 150, 3, 129, 128, 0)
"""Rows of each expert; among them none, less than a tile, and more than one."""


class Case:
    """Random rows of both sides, and matrices [experts, in, out] of both forms, one of them a transposed view."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, width: int, out_width: int) -> None:
        generator = torch.Generator().manual_seed(4)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.expert_offsets = torch.tensor(COUNTS).cumsum(0).to(device, torch.int32)
        self.rows, self.gradient = draw(sum(COUNTS), width), draw(sum(COUNTS), out_width)
        plain, turned = draw(len(COUNTS), width, out_width), draw(len(COUNTS), out_width, width).transpose(1, 2)
        self.matrices = plain, turned
        self._edges = list(pairwise([0, *self.expert_offsets.tolist()]))

    def product(self, matrix: Tensor) -> Tensor:
        """Rows times their experts' matrices, in fp64."""
        parts = zip(self._edges, matrix.double(), strict=True)
        return torch.cat([self.rows[start:end].double() @ own for (start, end), own in parts])

    def grouped_weight_gradient(self) -> Tensor:
        """gradient^T rows of each expert, in fp64."""
        return torch.stack([self.gradient[a:b].double().t() @ self.rows[a:b].double() for a, b in self._edges])


def off(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, as a share of the largest entry."""
    return float((actual.double() - expected).abs().max() / expected.abs().max())
