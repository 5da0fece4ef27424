"""One layer that runs alone as it does in a step, on separate tensors: its seconds and its GPU memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mobius.engine.documents import typical_arguments, typical_documents
from mobius.engine.pipelined_router_loss import router_messages
from mobius.engine.quantized_weights import StageQuantizer, num_scales_of
from mobius.engine.sliced_layers import SlicedLayers, SliceMemory
from mobius.engine.stage import StageModule
from mobius.engine.stage_layers import MicrobatchContext, SavedForBackward, SequenceSlice, StageLayers
from mobius.hardware.devices import TORCH_DTYPES
from mobius.limits import KEYS_PER_CALL
from mobius.models.attention import DocumentAttention
from mobius.models.block_autograd import NamedTensors
from mobius.models.blocks import LayerArguments, ModelParts
from mobius.planner.memory_estimates import tile_tokens
from mobius.planner.peak_memory import LayerBytes
from mobius.planner.profile import LayerSeconds
from mobius.planner.request import PlanRequest
from mobius.planner.timer import Work
from mobius.schedule.packed_rows import PackedRows
from mobius.schedule.partition import StageCut
from mobius.schedule.plan import RecomputeLevel


@dataclass(frozen=True)
class MicrobatchShape:
    """Shape of a microbatch, and options that decide how it is computed."""

    batch: int
    seq_length: int
    """Tokens of each sequence in the microbatch, or of a slice if sequences are sliced."""
    dtype: torch.dtype
    loss_chunk_tokens: int
    packed: PackedRows | None = None
    """None if each row is one document."""
    tile_tokens: int | None = None
    """Tokens of a tile; None if recomputed layers are not tiled."""
    reduced_format: str = ""
    """Format of the layers' optimizer states; empty if it is the usual format."""
    full_seq_length: int | None = None
    """Tokens of a whole sequence if microbatches are slices; None if they hold whole sequences."""
    head_work: float = 1.0
    """Seconds of the head, as a multiple of its seconds in supervised fine-tuning (`ObjectiveConfig.head_work`)."""

    @classmethod
    def of(cls, request: PlanRequest) -> MicrobatchShape:
        """Return the shape of a run's microbatches; their number must already be chosen."""
        config = request.config
        return cls(
            request.microbatch_rows,
            request.slice_length,
            TORCH_DTYPES[config.model.dtype],
            config.pipeline.loss_chunk_tokens,
            request.packed,
            tile_tokens(request),
            request.reduced_format,
            config.data.seq_length if request.num_slices > 1 else None,
            config.objective.head_work,
        )

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_length

    @property
    def is_sliced(self) -> bool:
        """Whether slices are timed as slices; slices of packed rows are not: they attend to few earlier tokens."""
        return self.full_seq_length is not None and self.packed is None

    @property
    def is_tiled(self) -> bool:
        """Whether recomputed layers run in several tiles."""
        return self.tile_tokens is not None and self.tokens > self.tile_tokens

    def hidden_size(self, parts: ModelParts) -> tuple[int, int, int]:
        """Shape [B, L, H] of the hidden states."""
        return self.batch, self.seq_length, parts.config.hidden_size


@dataclass(frozen=True)
class LayerRun:
    """Layers of a stage that run alone, on separate tensors."""

    layers: StageLayers
    weights: NamedTensors
    sums: NamedTensors
    """Gradient accumulators."""
    hidden: Tensor
    """Tensor that is used as the input and as the gradient of the output."""
    context: MicrobatchContext

    def forward(self) -> tuple[Tensor, list[SavedForBackward]]:
        """Return the output, and the tensors that the layers save for backward."""
        return self.layers.forward(self.weights, self.hidden, self.context)

    def backward(self, saved_for_backward: list[SavedForBackward] | None = None) -> None:
        """Run backward from the tensors that `forward` has saved; None: backward recomputes them from the input."""
        saved: list[SavedForBackward] = [self.hidden] if saved_for_backward is None else saved_for_backward
        self.layers.backward(self.weights, self.sums, saved, self.hidden, self.context)


def make_weights_and_sums(
    stage: StageModule, dtype: torch.dtype, device: torch.device, *, is_random: bool = True
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a stage's weights, random or zero, and its gradient accumulators."""
    layout = stage.layout(dtype, has_codes=False)
    weights = torch.empty(layout.num_units, device=device, dtype=dtype)
    weights = weights.normal_(std=0.02) if is_random else weights.zero_()
    sums = layout.trained_views(torch.zeros(layout.num_trained, device=device))
    if (quantizer := StageQuantizer.of(layout)) is None:
        return layout.views(weights), sums
    return quantizer.quantize_in_place(weights, torch.empty(num_scales_of(layout), device=device)), sums


@dataclass(frozen=True)
class LayerBench:
    """One layer of a model, with microbatches of a given shape."""

    parts: ModelParts
    index: int
    shape: MicrobatchShape
    device: torch.device
    is_random: bool = True
    """Whether weights and hidden states are random; otherwise they are zero."""

    def stage(self, saved: RecomputeLevel | None = None) -> StageModule:
        """Return the layer for whole rows. Forward saves activations of level `saved`; None: backward recomputes."""
        return StageModule(
            self.parts,
            StageCut(1, self.index, self.index + 1, is_first=False, is_last=False),
            loss_chunk_tokens=self.shape.loss_chunk_tokens,
            tile_tokens=self.shape.tile_tokens if self.shape.is_tiled else None,
            keep_graphs=saved is not None,
            recompute_level=saved or RecomputeLevel.NONE,
        )

    def on_rows(self, saved: RecomputeLevel | None = None) -> LayerRun:
        """Return a run of the layer on whole rows; `saved` as in `stage`."""
        stage, shape, routers = self.stage(saved), self.shape, router_messages(self.parts.router_loss)
        routers.begin_step(1, lambda: [torch.ones(shape.batch, shape.seq_length, device=self.device)])
        context = MicrobatchContext(self._arguments(shape.seq_length), routers=routers.context(0, None))
        return self._run(stage, stage, context)

    def on_slice(self, sequence_slice: SequenceSlice) -> LayerRun:
        """Return a run on a slice of sequences; keys and values of earlier slices are zero."""
        stage = self.stage()
        layers = SlicedLayers(
            self.parts, stage.cut, SliceMemory(begins_anywhere=True), tile_tokens=self.shape.tile_tokens
        )
        context = MicrobatchContext(self._arguments(sequence_slice.length), sequence_slice)
        return self._run(layers, stage, context)

    def _run(self, layers: StageLayers, stage: StageModule, context: MicrobatchContext) -> LayerRun:
        dtype, device = self.shape.dtype, self.device
        weights, sums = make_weights_and_sums(stage, dtype, device, is_random=self.is_random)
        make = torch.randn if self.is_random else torch.zeros
        hidden = make(self.shape.hidden_size(self.parts), device=device, dtype=dtype)
        return LayerRun(layers, weights, sums, hidden, context)

    def _arguments(self, seq_length: int) -> LayerArguments:
        batch, dtype = self.shape.batch, self.shape.dtype
        return typical_arguments(
            self.parts, self.shape.packed, batch=batch, seq_length=seq_length, dtype=dtype, device=self.device
        )


def layer_seconds(bench: LayerBench, seconds: Callable[[Work], float]) -> LayerSeconds:
    """Return the `seconds` of a layer; forward is assumed to take equally long with and without saved activations.

    With tiles, activations of all tokens may not fit, so the measured backward always recomputes.
    """
    recomputing = bench.on_rows()
    saving = recomputing if bench.shape.is_tiled else replace(recomputing, layers=bench.stage(RecomputeLevel.NONE))
    forward, both = seconds(recomputing.forward), seconds(lambda: saving.backward(saving.forward()[1]))
    return LayerSeconds(forward, max(both - forward, 0.0), seconds(recomputing.backward))


def slice_seconds(bench: LayerBench, seconds: Callable[[Work], float]) -> tuple[LayerSeconds, LayerSeconds]:
    """Return the mean `seconds` of a layer on a slice of a sequence, and the part of this time that attention takes.

    Only the first and the last slice are run. Attention's time grows linearly with the tokens before a slice. So the
    mean of these two slices is the mean of all slices, and the difference gives attention's part.
    """
    length, tokens = bench.shape.full_seq_length, bench.shape.seq_length
    assert length is not None
    last = bench.on_slice(SequenceSlice(length - tokens, length, length))
    first = replace(last, context=replace(last.context, sequence_slice=SequenceSlice(0, tokens, length)))
    ends = [(seconds(run.forward), seconds(run.backward)) for run in (first, last)]
    forward, recomputed = (sum(each) / 2 for each in zip(*ends, strict=True))
    by_position = length / 2 / max(length - tokens, 1)
    own_forward, own_recomputed = (max(0.0, end - start) * by_position for start, end in zip(*ends, strict=True))
    return (
        LayerSeconds(forward, max(recomputed - forward, 0.0), recomputed),
        LayerSeconds(own_forward, max(own_recomputed - own_forward, 0.0), own_recomputed),
    )


def measure_layer_bytes(
    parts: ModelParts, shape: MicrobatchShape, *, device: torch.device, with_products: bool = False
) -> LayerBytes:
    """Return the GPU memory of one layer for one microbatch: its saved graph, and its peak in backward.

    Each number is the maximum of all kinds of layers. Backward is measured with saved and with recomputed activations.
    With tiles, a whole layer may not fit. So the layer is measured with about the tokens of one tile, and its bytes are
    scaled up in proportion. `with_products` also measures a forward that saves only its matrix products, if layers can
    do so; this compiles once more. Layers run on zeros; all memory is freed afterwards.

    A recomputed slice attends to as many earlier tokens as one attention call takes; keys, values and their gradient
    sums are not counted.
    """
    levels = [RecomputeLevel.NONE]
    if with_products and parts.attention is not DocumentAttention.FLEX:
        levels.append(RecomputeLevel.ELEMENTWISE)
    whole = shape
    if shape.tile_tokens is not None and shape.is_tiled:
        rows, length = max(1, shape.tile_tokens // shape.seq_length), min(shape.seq_length, shape.tile_tokens)
        whole = replace(shape, batch=rows, seq_length=length)
    share = shape.tokens / whole.tokens
    of_kinds = []
    for index in {id(layer.module): index for index, layer in enumerate(parts.layers)}.values():
        bench = LayerBench(parts, index, shape, device, is_random=False)
        saved = [_bytes_of(replace(bench, shape=whole).on_rows(level)) for level in levels]
        held, peak, *products = [int(share * num_bytes) for of_level in saved for num_bytes in of_level]
        if shape.full_seq_length is None:
            _, recomputed = _bytes_of(bench.on_rows(), runs_forward=False)
        else:
            _, recomputed = _bytes_of(bench.on_slice(_typical_slice(shape)))
        of_kinds.append((held, peak, recomputed, *products))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)  # a run's peak must not include this measurement
    return LayerBytes(*map(max, zip(*of_kinds, strict=True)))


def _typical_slice(shape: MicrobatchShape) -> SequenceSlice:
    """Return the last slice of sequences, after about as many earlier tokens as one attention call takes."""
    assert shape.full_seq_length is not None
    tokens, packed = shape.seq_length, shape.packed
    start = min(shape.full_seq_length // tokens - 1, -(-KEYS_PER_CALL // tokens)) * tokens
    end = start + tokens
    documents = None if packed is None else typical_documents(packed, batch=shape.batch, seq_length=end).cu_seqlens
    return SequenceSlice(start, end, end, documents)


def _bytes_of(run: LayerRun, *, runs_forward: bool = True) -> tuple[int, int]:
    """Return the bytes that forward saves, and the peak; without forward, backward recomputes the activations."""
    device, held, peak = run.hidden.device, 0, 0
    for _ in range(2):  # the first pass compiles, and libraries allocate memory that they keep
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        if runs_forward:
            output, saved_for_backward = run.forward()
            held = torch.cuda.memory_allocated(device) - before
            run.backward(saved_for_backward)
            del output
        else:
            run.backward()
        peak = torch.cuda.max_memory_allocated(device) - before
    return held, peak
