"""Rows of a step on the host, and the inputs of the step's microbatches on one rank's device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from mobius.engine.documents import Rows
from mobius.engine.pipelined_router_loss import RouterMessages
from mobius.engine.stage_layers import ImageTokens, MicrobatchContext, SequenceSlice, cut_rows, slice_sequences
from mobius.hardware.streams import Stream, record_current
from mobius.models.adapter_dropout import DropoutArguments
from mobius.models.attention import DocumentLayout
from mobius.models.blocks import LayerArguments
from mobius.models.loss import TargetRows, shift_labels, shift_left
from mobius.schedule.spec import ScheduleSpec

LayerInputs = Callable[[int, DocumentLayout | None, Rows, Tensor | None], LayerArguments]
"""Function (sequence length, documents on the device, document lengths of each row, positions on several axes) ->
arguments of the layers."""


@dataclass(frozen=True)
class StepImages:
    """Images in the rows of a step, on the host (page-locked if there is a GPU)."""

    positions: Tensor
    """int64 [axes, batch, L]: positions of tokens, on which the rotary factors of all layers depend."""
    places: Tensor
    """int64 [batch, L]: row of each image token's features, in the order of rows; -1 for other tokens."""
    features: Tensor
    """[image tokens, H]; empty on ranks without the model's first stage."""


@dataclass(frozen=True)
class StepBatch:
    """Rows of one step on the host (page-locked if there is a GPU)."""

    input_ids: Tensor
    """int64 [batch, L]: rows of this pipeline. The counts below are for the step's rows of all replicas."""
    labels: Tensor
    """int64 [batch, L], not shifted; -100 where there is no target."""
    num_targets: int
    """Number of positions whose next token is a target, at least 1; the loss is the mean over these positions."""
    num_tokens: int
    """Number of tokens without padding."""
    num_samples: int
    epoch: float = 0.0
    """Epochs completed after this step."""
    documents: tuple[Tensor, Tensor] | None = None
    """Position ids int32 [batch, L] and document bounds int32 [microbatches, D + 1] (`engine/documents.py`); None if
    each row is one document."""
    num_replicas: int = 1
    """Number of data-parallel pipelines; each of them runs the same number of rows."""
    lengths: Tensor | None = None
    """int64 [batch]: tokens of each row before its padding; None: rows are full. Only a router loss needs it."""
    document_lengths: Rows = ()
    """Lengths of each row's documents, on which some rotary factors depend; (): rows are full."""
    token_values: Mapping[str, Tensor] = field(default_factory=dict)
    """Values by name as in `TargetRows`, but not shifted: each value is at the place of its token."""
    sequence_values: Mapping[str, Tensor] = field(default_factory=dict)
    sequences: Tensor | None = None
    dropout_keys: Tensor | None = None
    """int64 [batch, L]: keys of the tokens (`adapter_dropout.token_keys`); None: adapters drop nothing."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Divisors of the objective, from all rows of the step (`Objective.counts`)."""
    images: StepImages | None = None
    """None: rows of a model that is trained without images."""


class StepInputs:
    """Inputs of the microbatches of a step or evaluation; if these are slices, several share a group of sequences."""

    def __init__(
        self,
        batch: StepBatch,
        spec: ScheduleSpec,
        layer_inputs: LayerInputs,
        routers: RouterMessages,
        *,
        device: torch.device,
        to_device: Stream,
    ) -> None:
        """Copy the documents' position ids and bounds, which every rank needs, to the device.

        Copies run on the stream `to_device`: after a copy on the compute stream, the next kernel would also wait for
        all loads that were enqueued before the copy.
        """
        self._batch, self._layer_inputs, self._routers = batch, layer_inputs, routers
        self._device, self._to_device = device, to_device
        number, self._num_slices = spec.num_chunks, spec.num_slices
        self._rows = batch.input_ids.chunk(number)
        self._documents: Sequence[DocumentLayout | None] = (None,) * number
        bounds: Sequence[Tensor | None] = (None,) * number
        if batch.documents is not None:
            position_ids, cu_seqlens = self._copy(*batch.documents)
            pairs = zip(position_ids.chunk(number), cu_seqlens, strict=True)
            self._documents, bounds = [DocumentLayout(*pair) for pair in pairs], [*batch.documents[1]]
        self._dropout_keys = None if batch.dropout_keys is None else self._copy(batch.dropout_keys)[0].chunk(number)
        self._positions: Sequence[Tensor | None] = (None,) * number
        if batch.images is not None:
            self._positions = self._copy(batch.images.positions)[0].chunk(number, 1)
        self._arguments = dict[int, LayerArguments]()  # by number, for positions on several axes
        self._images: Sequence[ImageTokens | None] = (None,) * number * self._num_slices
        self._slices: Sequence[SequenceSlice | None] = (None,) * number
        if spec.num_slices > 1:
            self._slices = slice_sequences(batch.input_ids.shape[1], bounds, num_slices=spec.num_slices)
        routers.begin_step(spec.num_microbatches * batch.num_replicas, self._token_masks)
        self.tokens: Sequence[Tensor] = ()
        """Token ids of each microbatch; `copy_rows` sets `tokens` and `rows`."""
        self.rows: Sequence[TargetRows] = ()
        """Targets of each microbatch."""

    @property
    def rows_shape(self) -> torch.Size:
        """Shape [B, L] of a group of complete sequences: a microbatch, or the slices that share them."""
        return self._rows[0].shape

    def copy_rows(self) -> None:
        """Copy the step's tokens, labels and values to the device."""
        tokens, labels = self._copy(self._batch.input_ids, self._batch.labels)
        cut = partial(cut_rows, num_groups=len(self._rows), num_slices=self._num_slices)
        self.tokens, targets = cut(tokens), cut(shift_labels(labels))
        self.rows = [TargetRows(own) for own in targets]
        if self._batch.images is not None:
            self._images = self._image_tokens(self._batch.images, cut)
        if not (self._batch.token_values or self._batch.sequence_values or self._batch.sequences is not None):
            return
        of_tokens = {name: cut(shift_left(*self._copy(value))) for name, value in self._batch.token_values.items()}
        of_sequences = {name: cut(*self._copy(value)) for name, value in self._batch.sequence_values.items()}
        places = None if self._batch.sequences is None else cut(*self._copy(self._batch.sequences))
        self.rows = [
            TargetRows(
                own,
                {name: parts[number] for name, parts in of_tokens.items()},
                {name: parts[number] for name, parts in of_sequences.items()},
                None if places is None else places[number],
                None if places is None else self.tokens[number],
            )
            for number, own in enumerate(targets)
        ]

    def context(
        self, microbatch: int, router_sums: Tensor | None = None, *, offload_saved_tensors: bool = False
    ) -> MicrobatchContext:
        """Return the inputs that the layers get in addition to hidden states.

        `router_sums` are the sums that the message contained, if any.
        """
        group = microbatch // self._num_slices
        num_rows, seq_length = self._rows[group].shape
        document_lengths = self._batch.document_lengths[group * num_rows : (group + 1) * num_rows]
        arguments = self._arguments.get(group)
        if arguments is None:
            given = seq_length, self._documents[group], document_lengths, self._positions[group]
            arguments = self._layer_inputs(*given)
            if self._batch.images is not None:
                self._arguments[group] = arguments
        if self._dropout_keys is not None:
            arguments = DropoutArguments(arguments, self._dropout_keys[group])
        routers = self._routers.context(microbatch, router_sums)
        images = self._images[microbatch]
        return MicrobatchContext(arguments, self._slices[microbatch], offload_saved_tensors, routers, images)

    def _image_tokens(self, images: StepImages, cut: Callable[[Tensor], list[Tensor]]) -> list[ImageTokens]:
        """Return the images of each microbatch; slices share the features of their sequences."""
        counts = [int((own >= 0).sum()) for own in images.places.chunk(len(self._rows))]
        groups = images.features.split(counts) if len(images.features) else [images.features] * len(counts)
        firsts = [*accumulate(counts, initial=0)]
        numbers = (number // self._num_slices for number in range(len(self._images)))
        parts = zip(cut(*self._copy(images.places)), numbers, strict=True)
        return [ImageTokens(places - firsts[group], groups[group]) for places, group in parts]

    def _token_masks(self) -> Sequence[Tensor]:
        """Return fp32 [B, L] for each group: 1 for a token, 0 for padding."""
        shape, lengths = self._batch.input_ids.shape, self._batch.lengths
        if lengths is None:
            return torch.ones(*shape, device=self._device).chunk(len(self._rows))
        positions = torch.arange(shape[1], device=self._device)
        return (positions < self._copy(lengths)[0].unsqueeze(-1)).float().chunk(len(self._rows))

    def _copy(self, *sources: Tensor) -> list[Tensor]:
        """Return copies on the device; does not block if the sources are page-locked."""
        targets = [torch.empty_like(source, device=self._device) for source in sources]
        is_free = record_current(self._device)  # before, compute may still read the targets' memory
        with self._to_device.run():
            is_free.wait()
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            arrival = self._to_device.record()
        arrival.wait()
        return targets
