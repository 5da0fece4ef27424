"""Code of one pipeline stage, without storage; callers pass in weights and gradients as views of flat buffers.

Backward recomputes each layer from its input, so only the activations of one layer, or of one tile of its tokens
(`tiles.py`), exist at a time. If forward saves graphs instead, it keeps the activations of all layers, and the weights
must not change until backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from mobius.engine.embedder import Embedder
from mobius.engine.stage_layers import MicrobatchContext, SavedForBackward, tensors_of
from mobius.engine.tiles import TiledLayer
from mobius.models.adapters import learning_rate_factors
from mobius.models.attention import DocumentAttention
from mobius.models.block_autograd import (
    Block,
    BlockGraph,
    NamedTensors,
    backward,
    recomputed_backward,
    resume_from_products,
    run_many_without_graph,
    run_saving_products,
    run_with_graph,
    run_without_graph,
)
from mobius.models.blocks import ModelParts
from mobius.models.compiled import KeywordArguments, SavedProducts, Tensors
from mobius.models.layout import StageLayout, WeightFormats
from mobius.models.loss import Head, LossHead, TargetRows
from mobius.objectives.objective import Evaluation, Objective, StepScale
from mobius.schedule.partition import StageCut
from mobius.schedule.plan import RecomputeLevel


class StageModule:
    """Layers of `cut`, plus the embedding in the first stage and the final norm and head in the last."""

    def __init__(
        self,
        parts: ModelParts,
        cut: StageCut,
        *,
        loss_chunk_tokens: int,
        tile_tokens: int | None = None,
        keep_graphs: bool = False,
        recompute_level: RecomputeLevel = RecomputeLevel.NONE,
    ) -> None:
        """`keep_graphs`: forward saves graphs, so that backward recomputes no layer; needs the weights until backward.

        `recompute_level`: operations that backward recomputes although forward saves graphs. Unless the level is NONE,
        layers with FlexAttention save only their input.
        `tile_tokens`: maximum tokens per tile in recomputed layers; it does not change the result. If it is None or the
        microbatch is no larger, each layer runs at once. Raises CheckpointError if the layers of the model family
        cannot be split at attention.
        """
        self.cut = cut
        self._parts, self._embedder = parts, Embedder(parts.embedding)
        self._layers = [parts.layers[index] for index in cut.layers]
        self._loss_chunk_tokens = loss_chunk_tokens
        self._keep_graphs, self._recompute_level = keep_graphs, recompute_level
        # FlexAttention cannot compile itself in the mode that saves an eager layer's products; then the input is saved.
        self._may_keep = recompute_level is RecomputeLevel.NONE or parts.attention is not DocumentAttention.FLEX
        self._tile_tokens = tile_tokens
        self._tiled: dict[int, TiledLayer] = {}
        if tile_tokens is not None:
            self._tiled = {
                index: TiledLayer(parts.split_at_attention(index), tile_tokens=tile_tokens) for index in cut.layers
            }
        blocks = _blocks(parts, cut)
        self.shapes = {name: shape for block in blocks for name, shape in block.parameter_shapes().items()}
        """Hugging Face name -> shape, for every parameter of this stage in forward order."""
        self.frozen = frozenset[str]().union(*(block.frozen_names() for block in blocks))
        """Names of frozen parameters."""
        self.no_weight_decay = frozenset[str]().union(*(block.no_weight_decay_names() for block in blocks))
        """Names of parameters without weight decay."""
        self._first_trained = parts.first_trained_layer

    def layout(self, dtype: torch.dtype, reduced_format: str = "", *, has_codes: bool = True) -> StageLayout:
        """Return the layout of the stage's flat buffers, with weights in `dtype`.

        The layers' optimizer states are in `reduced_format`, if given. Without `has_codes`, weights that are codes
        between their uses have a place for their values instead.
        """
        in_fp32, own = self._parts.names_in_fp32(dtype), self._parts.codecs_in(dtype) if has_codes else {}
        codecs = {name: codec for name, codec in own.items() if name in self.shapes}
        return StageLayout.of(
            self.shapes,
            frozen=self.frozen,
            no_weight_decay=self.no_weight_decay,
            reduced=reduced_names(self._layers) if reduced_format else (),
            reduced_format=reduced_format,
            quantized={name for layer in self._layers for name in layer.quantizable_names()},
            eight_bit=self._parts.eight_bit,
            formats=WeightFormats(in_fp32, codecs, dtype.itemsize),
            rates=learning_rate_factors(self.shapes, self._parts.adapters),
        )

    def forward(
        self, weights: NamedTensors, inputs: Tensor, context: MicrobatchContext
    ) -> tuple[Tensor, list[SavedForBackward]]:
        """Run the layers as in `StageLayers.forward`.

        With `context.offload_saved_tensors`, matrix products are saved, so backward does not repeat them; layers that
        are not compiled save their input.
        """
        hidden = self._embedder.run(weights, inputs, context) if self.cut.is_first else inputs
        saved_for_backward: list[SavedForBackward] = []
        for index, layer in zip(self.cut.layers, self._layers, strict=True):
            outputs, saved = self._forward_layer(index, layer, weights, hidden, context)
            saved_for_backward.append(saved)
            hidden, *router_sums = outputs
            for sums in router_sums:
                context.routers.add(sums)
        return hidden, saved_for_backward

    def run(self, weights: NamedTensors, inputs: Tensor, context: MicrobatchContext) -> Tensor:
        """Return only the hidden states, with the bits of `forward`; at most one layer's activations exist at a time.

        A compiled layer that saves activations rounds differently from one that does not, so each layer runs as in
        `forward`.
        """
        hidden = self._embedder.run(weights, inputs, context) if self.cut.is_first else inputs
        for index, layer in zip(self.cut.layers, self._layers, strict=True):
            hidden = self._forward_layer(index, layer, weights, hidden, context)[0][0]
        return hidden

    def _forward_layer(
        self, index: int, layer: Block, weights: NamedTensors, hidden: Tensor, context: MicrobatchContext
    ) -> tuple[Tensors, SavedForBackward]:
        """Return the outputs of one layer, without a graph, and the state to save for backward."""
        is_trained, own = index >= self._first_trained, context.routers.arguments(index, context.arguments[index])
        if context.offload_saved_tensors and is_trained:
            made = run_saving_products(layer, weights, hidden, own)
            if made is not None:
                return made
        if self._keep_graphs and self._may_keep and is_trained:
            graph = run_with_graph(layer, weights, hidden, own, self._recompute_level)
            return tuple(each.detach() for each in graph.outputs), graph
        # A layer without backward gets a placeholder, which nothing reads.
        saved = hidden if is_trained else hidden.new_empty(0)
        return self._run(index, layer, weights, hidden, own), saved

    def save_input(self, inputs: Tensor) -> list[SavedForBackward] | None:
        """Return the input: the model's last stage runs forward only inside backward."""
        return [inputs]

    def recompute_kv(
        self, weights: NamedTensors, saved_for_backward: Sequence[Tensor], context: MicrobatchContext
    ) -> None:
        """Fail: complete sequences have no keys and values to recompute."""
        raise AssertionError("complete sequences have no keys and values to recompute")

    def finish_forward(
        self, weights: NamedTensors, saved_for_backward: list[SavedForBackward], context: MicrobatchContext
    ) -> tuple[Tensor, list[SavedForBackward]]:
        """Run `forward` on the saved input."""
        (inputs,) = tensors_of(saved_for_backward)
        return self.forward(weights, inputs, context)

    def backward(
        self,
        weights: NamedTensors,
        gradients: NamedTensors,
        saved_for_backward: list[SavedForBackward],
        gradient: Tensor,
        context: MicrobatchContext,
    ) -> Tensor:
        """Add the layers' gradients as in `StageLayers.backward`; parameters that `gradients` lacks are skipped.

        Layers before the first trained parameter have no backward; if the stage has such layers, the returned gradient
        is undefined. Each entry of `saved_for_backward` is freed after use.
        """
        arguments, routers = context.arguments, context.routers
        for index, layer in zip(reversed(self.cut.layers), reversed(self._layers), strict=True):
            last = saved_for_backward.pop()
            if index < self._first_trained:
                continue
            own, other_gradients = routers.arguments(index, arguments[index]), routers.gradients(index)
            if isinstance(last, SavedProducts):
                graph = resume_from_products(layer, weights, last, own)
                (gradient,) = backward(layer, graph, gradients, gradient, *other_gradients)
                del graph
            elif isinstance(last, BlockGraph):
                (gradient,) = backward(layer, last, gradients, gradient, *other_gradients)
            elif self._is_tiled(last):
                tiled = self._tiled[index]
                gradient = tiled.backward(weights, gradients, last, gradient, own, other_gradients=other_gradients)
            else:
                (gradient,) = recomputed_backward(layer, weights, (last,), own, gradients, gradient, *other_gradients)
            del last
        return gradient

    def _run(
        self, index: int, layer: Block, weights: NamedTensors, hidden: Tensor, arguments: KeywordArguments
    ) -> Tensors:
        """Return the outputs of one layer."""
        if self._is_tiled(hidden):
            return self._tiled[index].run(weights, hidden, arguments)
        return run_many_without_graph(layer, weights, (hidden,), arguments)

    def _is_tiled(self, hidden: Tensor) -> bool:
        return self._tile_tokens is not None and hidden.shape[:2].numel() > self._tile_tokens

    def embedding_backward(
        self,
        weights: NamedTensors,
        gradients: NamedTensors,
        tokens: Tensor,
        gradient: Tensor,
        context: MicrobatchContext,
    ) -> None:
        """Add the embedding's gradients as in `Embedder.backward`."""
        self._embedder.backward(weights, gradients, tokens, gradient, context)

    def loss(
        self,
        weights: NamedTensors,
        gradients: NamedTensors,
        hidden: Tensor,
        rows: TargetRows,
        objective: Objective,
        scale: StepScale,
    ) -> tuple[Tensor, Tensor]:
        """Run final norm, head and loss of one microbatch, with their backward.

        `hidden` [B, L, H] comes from the last layer. Returns loss and further numbers as `Objective.loss`, and the
        gradient of `hidden`.
        """
        parts = self._parts
        normed = run_with_graph(parts.norm, weights, hidden, {})

        def head(part: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
            graph = run_with_graph(parts.head, weights, part, {})
            return graph.output.detach(), lambda of_logits: backward(parts.head, graph, gradients, of_logits)[0]

        numbers, gradient = objective.loss(self._loss_head(weights, normed.output, head), rows, scale)
        return numbers, backward(parts.norm, normed, gradients, gradient)[0]

    def evaluate(self, weights: NamedTensors, hidden: Tensor, rows: TargetRows, evaluate: Evaluation) -> Tensor:
        """Run final norm and head of one microbatch, forward only, as in `loss`; return the result of `evaluate`."""
        normed = run_with_graph(self._parts.norm, weights, hidden, {}).output.detach()
        return evaluate(self._loss_head(weights, normed), rows)

    def _loss_head(self, weights: NamedTensors, normed: Tensor, head: Head | None = None) -> LossHead:
        parts = self._parts
        return LossHead(
            parts.token_losses,
            normed,
            lambda part: run_without_graph(parts.head, weights, part, {}),
            head,
            chunk_tokens=self._loss_chunk_tokens,
            padding=getattr(parts.config, "pad_token_id", None),
        )


def num_trained_tensors(parts: ModelParts, cut: StageCut) -> int:
    """Return the number of trained tensors of a stage: matrices and vectors."""
    return sum(len(block.parameter_shapes()) - len(block.frozen_names()) for block in _blocks(parts, cut))


def reduced_names(layers: Iterable[Block]) -> frozenset[str]:
    """Return the names of the matrices of `layers`, whose optimizer states may be in a reduced format.

    Embedding, head, norms and biases are few and more sensitive, so their states are in fp32.
    """
    return frozenset(
        name
        for layer in layers
        for name, shape in layer.parameter_shapes().items()
        if len(shape) > 1 and name not in layer.frozen_names() | layer.no_weight_decay_names()
    )


def _blocks(parts: ModelParts, cut: StageCut) -> list[Block]:
    """Return the blocks of a stage in forward order."""
    return [
        *([parts.embedding] if cut.is_first else []),
        *(parts.layers[index] for index in cut.layers),
        *([parts.norm, parts.head] if cut.is_last else []),
    ]
