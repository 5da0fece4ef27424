"""Plays one rank's actions of a step or evaluation in schedule order, one handler per action.

Nothing here waits for the device: handlers only enqueue work, ordered by streams and messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from mobius.activity import Activity
from mobius.distributed.transport import ActivationTransport
from mobius.engine.documents import Rows
from mobius.engine.host_arena import PinnedActivationBuffer
from mobius.engine.pipelined_router_loss import PipelinedRouterLoss, RouterContext
from mobius.engine.saved_activations import SavedActivations
from mobius.engine.spread_head import SpreadHead
from mobius.engine.stage import StageModule
from mobius.engine.stage_layers import (
    MicrobatchContext,
    SavedForBackward,
    SequenceSlice,
    StageLayers,
    cut_rows,
    slice_sequences,
)
from mobius.engine.stage_memory import GradientsReadyCallback, StageMemory
from mobius.engine.step_sums import EvaluationSums, StepSums
from mobius.engine.waits import DevicePosition, WaitClock
from mobius.hardware.spans import NO_SPANS, Spans
from mobius.hardware.streams import new_stream, record_current
from mobius.limits import NUM_PREPOSTED_RECEIVES
from mobius.models.attention import DocumentLayout
from mobius.models.block_autograd import NamedTensors
from mobius.models.blocks import LayerArguments
from mobius.models.loss import shift_labels
from mobius.schedule.action import Action, ActionKind, Direction
from mobius.schedule.lanes import Lane, WaitCause
from mobius.schedule.render import render_text
from mobius.schedule.schedule import Schedule


@dataclass(frozen=True)
class StepBatch:
    """Rows of one step on the host (page-locked if there is a GPU)."""

    input_ids: Tensor
    """int64 [batch, L]: rows of this pipeline. With replicas, the counts below cover all rows of the step."""
    labels: Tensor
    """int64 [batch, L], not shifted; -100 where there is no target."""
    num_targets: int
    """Positions of the step whose next token is a target, at least 1; the loss is the mean over them."""
    num_tokens: int
    """Number of tokens without padding."""
    num_samples: int
    epoch: float = 0.0
    """Epochs completed after this step."""
    documents: tuple[Tensor, Tensor] | None = None
    """Position ids int32 [batch, L] and document bounds int32 [microbatches, D + 1] (`runtime.documents`); None if each
    row is one document."""
    num_replicas: int = 1
    """Number of data-parallel pipelines, which play equally many rows."""
    lengths: Tensor | None = None
    """int64 [batch]: tokens of each row before its padding; None: rows are full. Only for a router loss."""
    document_lengths: Rows = ()
    """Lengths of each row's documents, for rotary factors that depend on them; (): rows are full."""


@dataclass
class _Step:
    """State shared by the handlers of one step or evaluation."""

    batch: StepBatch
    rows: Sequence[Tensor]
    """Token ids on the host, on every rank: per microbatch or, with slices, per group of complete sequences."""
    sums: StepSums
    evaluated: EvaluationSums
    loss_scale: float = 1.0
    on_gradients_ready: GradientsReadyCallback | None = None
    tokens: Sequence[Tensor] = ()
    targets: Sequence[Tensor] = ()
    documents: Sequence[DocumentLayout | None] = ()
    """Documents of each microbatch or group of sequences, on the device of every rank."""
    sequence_slices: Sequence[SequenceSlice] = ()
    """Position of each microbatch within its sequences; empty if microbatches are complete sequences."""
    token_mask: Sequence[Tensor] = ()
    """fp32 [B, L] for each microbatch: 1 for a token, 0 for padding. Only for a router loss."""
    router_sums: dict[int, Tensor] = field(default_factory=dict)
    """Router sums received by the last stage with a microbatch, until its backward."""
    at_head: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    """Hidden states or their gradient, and router numbers, between the last stage and a head that its rank computes."""


class Executor:
    """State of a step; memory, transport and stage code are passed in."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        stages: Mapping[int, StageModule],
        layers: Mapping[int, StageLayers],
        memory: Mapping[int, StageMemory],
        layer_inputs: Callable[[int, DocumentLayout | None, Rows], LayerArguments],
        transport: ActivationTransport,
        clock: WaitClock,
        device: torch.device,
        activation_buffer: PinnedActivationBuffer | None = None,
        routers: PipelinedRouterLoss | None = None,
        spread_head: SpreadHead | None = None,
        spans: Spans = NO_SPANS,
        activity: Activity | None = None,
    ) -> None:
        """Take this rank's `stages`, `layers` and `memory`; report each action and wait to `activity`.

        `activation_buffer`: host memory for the stages that offload activations. `routers`: only for models with a
        router loss. `spread_head`: norm and head if the ranks share them.
        """
        self._schedule, self._spec, self._rank = schedule, schedule.spec, transport.rank
        self._actions: Sequence[Action] = schedule.actions[transport.rank]
        self._stages, self._layers, self._memory = stages, layers, memory
        self._transport, self._clock = transport, clock
        self._layer_inputs, self._routers = layer_inputs, routers
        self._device, self._spans, self._activity = device, spans, activity or Activity()
        self._position = DevicePosition(self._actions, device)
        self._to_device = new_stream(device)
        waiting = partial(self._waiting, WaitCause.ACTIVATIONS)
        self._saved_activations = SavedActivations(
            activation_buffer,
            device=device,
            waiting=waiting,
            copy_lookahead=schedule.spec.copy_lookahead,
            alternates=schedule.spec.is_depth_first,
            spans=spans,
        )
        self._step: _Step
        self._spread_head, self._head_owner = spread_head, self._spec.rank_of(self._spec.num_stages - 1)
        self._needed: list[list[tuple[int, Direction]]] = []
        """Messages that each action receives, once the first step has told their size."""
        self._receives: list[tuple[int, Direction]] = []
        self._num_posted = self._num_received = 0
        forward = self._forward_only if schedule.spec.is_evaluation else self._forward
        self._stage_handlers: dict[ActionKind, Callable[[int], None]] = {
            ActionKind.GENERATE_DATA: self._generate_data,
            ActionKind.LOAD: lambda stage: memory[stage].weights.load(),
            ActionKind.OFFLOAD: self._offload,
            ActionKind.LOAD_GRADIENT_SUMS: lambda stage: memory[stage].sums.load(),
            ActionKind.OFFLOAD_GRADIENT_SUMS: lambda stage: memory[stage].sums.offload(),
        }
        self._microbatch_handlers: dict[ActionKind, Callable[[int, int], None]] = {
            ActionKind.FORWARD_FIRST: forward,
            ActionKind.FORWARD_MIDDLE: forward,
            ActionKind.FORWARD_LAST: self._forward_last,
            ActionKind.EVALUATE_LAST: self._evaluate_last,
            ActionKind.BACKWARD_FIRST: self._backward,
            ActionKind.BACKWARD_MIDDLE: self._backward,
            ActionKind.BACKWARD_LAST: self._backward_last,
            ActionKind.HEAD: self._head,
            ActionKind.RECOMPUTE_KV: self._recompute_kv,
            ActionKind.OFFLOAD_ACTIVATIONS: self._saved_activations.offload,
            ActionKind.PREFETCH_ACTIVATIONS: self._saved_activations.prefetch,
        }

    def run(
        self, batch: StepBatch, *, loss_scale: float = 1.0, on_gradients_ready: GradientsReadyCallback | None = None
    ) -> StepSums:
        """Run forward and backward of all microbatches of one step.

        Leaves the gradients of `loss * loss_scale` in the states of `memory`. Re-raises the error of the failing
        action, with the schedule grid attached as a note.
        """
        assert not self._spec.is_evaluation, "run() needs a training schedule"
        self._step = self._start(batch)
        if self._spread_head is not None:
            self._spread_head.begin_step()
        self._step.loss_scale, self._step.on_gradients_ready = loss_scale, on_gradients_ready
        self._play_all()
        return self._step.sums

    def _await_reductions(self) -> None:
        """Make the compute stream wait until the norms are reduced over all replicas, if there are several."""
        points = [self._memory[stage].sums.reduction for stage in self._step.sums.squared_norms]
        if pending := [point for point in points if point is not None]:
            with self._waiting(WaitCause.NEIGHBOURS):
                for point in pending:
                    point.wait()

    def evaluate(self, batch: StepBatch) -> EvaluationSums:
        """Run forward of all microbatches of an evaluation schedule, without gradients or saved activations.

        Returns without waiting for a GPU. Raises as `run` does.
        """
        assert self._spec.is_evaluation, "evaluate() needs an evaluation schedule"
        self._step = self._start(batch)
        self._play_all()
        return self._step.evaluated

    def _start(self, batch: StepBatch) -> _Step:
        number, device = self._spec.num_chunks, self._device
        zero = torch.zeros((), dtype=torch.float32, device=device)
        sums = StepSums(zero, {}, None if self._routers is None else zero.clone())
        losses = zero.new_zeros(self._spec.num_microbatches if self._spec.is_evaluation else 0)
        evaluated = EvaluationSums(losses, torch.zeros_like(losses, dtype=torch.int64))
        rows = batch.input_ids.chunk(number)
        step = _Step(batch, rows, sums, evaluated, documents=self._copy_documents(batch, number))
        if self._spec.num_slices > 1:
            cu_seqlens = [None] * number if batch.documents is None else [*batch.documents[1]]
            length = batch.input_ids.shape[1]
            step.sequence_slices = slice_sequences(length, cu_seqlens, num_slices=self._spec.num_slices)
        if self._routers is not None and not self._spec.is_evaluation:
            lengths = [] if batch.lengths is None else self._copy_to_device(batch.lengths)
            step.token_mask = self._routers.token_mask(batch.input_ids.shape, *lengths).chunk(number)
        return step

    def _play_all(self) -> None:
        if not self._needed:
            self._needed = [self._messages_of(action) for action in self._actions]
            self._receives = [*chain.from_iterable(self._needed)]
        self._num_posted = self._num_received = 0
        if self._position.is_on:
            self._activity.device_position = self._position.__str__
        self._position.begins()
        for index, action in enumerate(self._actions):
            try:
                self._post_receives()
                self._num_received += min(len(self._needed[index]), 1)
                self._activity.start_action(action)
                self._play(action)
                self._position.enqueued(index)
            except Exception as error:
                self._saved_activations.clear()
                error.add_note(render_text(self._schedule, failed=(self._rank, index)))
                raise
        self._await_reductions()
        self._position.ends()
        self._activity.start_action("the end of the messages")
        self._transport.finish_step()

    def _post_receives(self) -> None:
        for receive in self._receives[self._num_posted : self._num_received + NUM_PREPOSTED_RECEIVES]:
            self._transport.post_receive(*receive)
            self._num_posted += 1

    def _receive_part(self, rank: int) -> Tensor:
        """Return a further message of an action that receives several."""
        message = self._transport.receive(rank, Direction.HEAD)
        self._num_received += 1
        self._post_receives()
        return message

    def _messages_of(self, action: Action) -> list[tuple[int, Direction]]:
        """Return sender rank and direction of each message that an action receives."""
        source = self._spec.source_of(action)
        found = [] if source is None else [source[1:]]
        if self._spread_head is None:
            return found
        num_weights, num_sums = self._spread_head.num_messages(self._message_shape)
        if action.kind is ActionKind.HEAD and self._takes_weights(action.microbatch):
            return [(self._head_owner, Direction.HEAD)] * num_weights + found
        if action.kind.is_backward and self._takes_sums(action.stage, action.microbatch):
            return found + [(rank, Direction.HEAD) for rank in range(self._head_owner) for _ in range(num_sums)]
        return found

    def _takes_weights(self, microbatch: int | None) -> bool:
        """Whether the head's weights come before this microbatch: the first one of a rank that does not own them."""
        return microbatch == self._rank != self._head_owner

    def _takes_sums(self, stage: int, microbatch: int | None) -> bool:
        """Whether the head's gradients of other ranks come after this backward: the last one of its owner's stage."""
        is_last = stage == self._spec.num_stages - 1 and microbatch == self._spec.last_backward
        return self._spread_head is not None and is_last

    def _play(self, action: Action) -> None:
        """Run the action's handler under its name; loads and offloads record their own copy spans."""
        name, is_compute = str(action), action.kind.runs_on_compute_lane or action.kind is ActionKind.GENERATE_DATA
        span = self._spans.device_span(Lane.COMPUTE, name) if is_compute else nullcontext()
        # A profiler range costs the host 5 microseconds, so it is opened only while profiling.
        named = torch.profiler.record_function(name) if _profiler_enabled() else nullcontext()
        with named, span:
            if action.microbatch is None:
                self._stage_handlers[action.kind](action.stage)
            else:
                self._microbatch_handlers[action.kind](action.stage, action.microbatch)

    def _offload(self, stage: int) -> None:
        """Free the stage's slot; its gradients may have to wait for a buffer of states that are on disks."""
        own = self._memory[stage]
        with self._waiting(WaitCause.OPTIMIZER, stage=stage) if own.state.is_on_disk else nullcontext():
            own.offload(self._step.on_gradients_ready)

    def _generate_data(self, stage: int) -> None:
        """Copy the step's tokens and labels to the device."""
        step, num_slices = self._step, self._spec.num_slices
        tokens, labels = self._copy_to_device(step.batch.input_ids, step.batch.labels)
        cut = partial(cut_rows, num_groups=len(step.rows), num_slices=num_slices)
        step.tokens, step.targets = cut(tokens), cut(shift_labels(labels))

    def _copy_documents(self, batch: StepBatch, number: int) -> Sequence[DocumentLayout | None]:
        """Return the documents of each of `number` groups of rows; every rank needs them."""
        if batch.documents is None:
            return (None,) * number
        position_ids, cu_seqlens = self._copy_to_device(*batch.documents)
        return [DocumentLayout(*own) for own in zip(position_ids.chunk(number), cu_seqlens, strict=True)]

    def _copy_to_device(self, *sources: Tensor) -> list[Tensor]:
        """Return copies on the device; does not block if the sources are page-locked.

        Uses its own stream: after a copy on the compute stream, the next kernel waited for all loads enqueued before
        it.
        """
        targets = [torch.empty_like(source, device=self._device) for source in sources]
        is_free = record_current(self._device)  # the targets may reuse memory that compute still reads
        with self._to_device.run():
            is_free.wait()
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            arrival = self._to_device.record()
        arrival.wait()
        return targets

    def _forward(self, stage: int, microbatch: int) -> None:
        inputs, sums = self._stage_input(stage, microbatch)
        context = self._context(microbatch, sums, offload_saved_tensors=self._spec.offloads_all(stage, microbatch))
        output, saved_for_backward = self._layers[stage].forward(self._weights(stage), inputs, context)
        self._saved_activations.put(stage, microbatch, saved_for_backward)
        if stage + 1 < self._spec.num_stages:
            self._send(output, context.routers, stage + 1, Direction.FORWARD)
            return
        rank, owner = self._spec.rank_of(stage + 1, microbatch), self._head_owner
        if microbatch == rank != owner:  # the first one that it gets
            self._shared_head.send_weights(self._weights(stage), self._transport, rank, self._message_shape)
        self._send(output, context.routers, stage + 1, Direction.HEAD, microbatch)

    def _head(self, stage: int, microbatch: int) -> None:
        """Compute norm, head and loss of a microbatch, and their backward, where the ranks share them."""
        head, owner = self._shared_head, self._head_owner
        if self._takes_weights(microbatch):
            with self._waiting(WaitCause.WEIGHTS, stage=stage):
                head.receive_weights(partial(self._receive_part, owner), self._message_shape)
        weights, gradients = head.weights, head.sums
        if self._rank == owner:
            weights, gradients = self._weights(stage - 1), self._memory[stage - 1].sums.views()
        hidden, sums = self._receive(stage - 1, microbatch, Direction.HEAD)
        routers = self._router_context(microbatch, sums)
        gradient = self._loss(head.module, weights, gradients, hidden, microbatch, routers)
        self._send(gradient, routers, stage - 1, Direction.HEAD, microbatch)
        if self._rank != owner and microbatch == self._spec.head_microbatches(self._rank)[-1]:
            head.send_sums(self._transport, owner, self._message_shape)

    def _forward_only(self, stage: int, microbatch: int) -> None:
        self._send(self._evaluate_layers(stage, microbatch), None, stage + 1, Direction.FORWARD)

    def _evaluate_last(self, stage: int, microbatch: int) -> None:
        hidden, sums = self._evaluate_layers(stage, microbatch), self._step.evaluated
        targets = self._step.targets[microbatch]
        sums.losses[microbatch], sums.num_correct[microbatch] = self._stages[stage].evaluate(
            self._weights(stage), hidden, targets
        )

    def _evaluate_layers(self, stage: int, microbatch: int) -> Tensor:
        """Return the output of the stage's layers for its next input; saves no activations."""
        inputs, _ = self._stage_input(stage, microbatch)
        return self._layers[stage].run(self._weights(stage), inputs, self._context(microbatch))

    def _forward_last(self, stage: int, microbatch: int) -> None:
        """Save only the input if forward can run inside backward, just before the loss, once the weights are there."""
        (inputs, sums), layers = self._stage_input(stage, microbatch), self._layers[stage]
        if sums is not None:
            self._step.router_sums[microbatch] = sums
        saved_for_backward = layers.save_input(inputs)
        if saved_for_backward is None:
            _, saved_for_backward = layers.forward(self._weights(stage), inputs, self._context(microbatch))
        self._saved_activations.put(stage, microbatch, saved_for_backward)

    def _recompute_kv(self, stage: int, microbatch: int) -> None:
        is_last = (microbatch + 1) % self._spec.num_slices == 0
        saved_for_backward = self._saved_activations.look(stage, microbatch, comes_again=not is_last)
        self._layers[stage].recompute_kv(self._weights(stage), saved_for_backward, self._context(microbatch))

    def _backward(self, stage: int, microbatch: int) -> None:
        direction = Direction.BACKWARD if stage + 1 < self._spec.num_stages else Direction.HEAD
        gradient, router_gradient = self._receive(stage + 1, microbatch, direction)
        weights = self._weights(stage)
        self._finish_backward(
            stage, microbatch, weights, self._saved_activations.take(stage, microbatch), gradient, router_gradient
        )

    def _backward_last(self, stage: int, microbatch: int) -> None:
        weights, saved_for_backward = self._weights(stage), self._saved_activations.take(stage, microbatch)
        context = self._context(microbatch, self._step.router_sums.pop(microbatch, None))
        hidden, saved_for_backward = self._layers[stage].finish_forward(weights, saved_for_backward, context)
        routers = context.routers
        del context  # else its arguments would stay in memory during the logits
        sums = self._memory[stage].sums.views()
        gradient = self._loss(self._stages[stage], weights, sums, hidden, microbatch, routers)
        router_gradient = None if routers is None else routers.router_sums
        self._finish_backward(stage, microbatch, weights, saved_for_backward, gradient, router_gradient)

    def _loss(
        self,
        module: StageModule,
        weights: NamedTensors,
        gradients: NamedTensors,
        hidden: Tensor,
        microbatch: int,
        routers: RouterContext | None,
    ) -> Tensor:
        """Add the loss of a microbatch, by norm and head of `module`; return the gradient of `hidden`.

        `routers` then holds that of the router sums.
        """
        loss, gradient = module.loss(
            weights,
            gradients,
            hidden,
            self._step.targets[microbatch],
            num_targets=self._step.batch.num_targets,
            loss_scale=self._step.loss_scale,
        )
        self._step.sums.loss.add_(loss if routers is None else loss + self._add_router_loss(routers))
        return gradient

    def _add_router_loss(self, context: RouterContext) -> Tensor:
        """Return the microbatch's weighted router loss; its context then holds the gradient of the sums."""
        sums, number = self._step.sums.router_loss, self._spec.num_microbatches * self._step.batch.num_replicas
        assert self._routers is not None
        assert sums is not None
        value = self._routers.compute_loss(context, num_microbatches=number, loss_scale=self._step.loss_scale)
        sums.add_(value.loss / number)
        return value.weighted

    def _finish_backward(
        self,
        stage: int,
        microbatch: int,
        weights: NamedTensors,
        saved_for_backward: list[SavedForBackward],
        gradient: Tensor,
        router_gradient: Tensor | None,
    ) -> None:
        """Run backward through the layers, then send the gradient to the previous stage or into the embedding.

        The last microbatch finishes the stage's gradients. `router_gradient` is that of the router sums, if any.
        """
        module, memory = self._stages[stage], self._memory[stage]
        gradients = memory.sums.views()
        context = self._context(microbatch, router_gradient)
        gradient = self._layers[stage].backward(weights, gradients, saved_for_backward, gradient, context)
        if module.cut.is_first:
            module.embedding_backward(weights, gradients, self._step.tokens[microbatch], gradient)
        else:
            self._send(gradient, context.routers, stage - 1, Direction.BACKWARD)
        if self._takes_sums(stage, microbatch):
            with self._waiting(WaitCause.NEIGHBOURS, stage=stage):
                for rank in range(self._head_owner):
                    receive = partial(self._receive_part, rank)
                    self._shared_head.add_sums(gradients, receive, self._message_shape)
        if microbatch == self._spec.last_backward:
            self._step.sums.squared_norms[stage] = memory.finish_gradients(self._step.on_gradients_ready)

    def _context(
        self, microbatch: int, router_sums: Tensor | None = None, *, offload_saved_tensors: bool = False
    ) -> MicrobatchContext:
        """Return the layers' inputs other than hidden states; without documents they depend on the length only.

        `router_sums` are the sums received with the message, if any.
        """
        step, group = self._step, microbatch // self._spec.num_slices
        num_rows, seq_length = step.rows[group].shape
        document_lengths = step.batch.document_lengths[group * num_rows : (group + 1) * num_rows]
        arguments = self._layer_inputs(seq_length, step.documents[group], document_lengths)
        return MicrobatchContext(
            arguments,
            step.sequence_slices[microbatch] if step.sequence_slices else None,
            offload_saved_tensors,
            self._router_context(microbatch, router_sums),
        )

    def _router_context(self, microbatch: int, router_sums: Tensor | None) -> RouterContext | None:
        if self._routers is None or not self._step.token_mask:
            return None
        return self._routers.context(self._step.token_mask[microbatch // self._spec.num_slices], router_sums)

    def _stage_input(self, stage: int, microbatch: int) -> tuple[Tensor, Tensor | None]:
        """Return tokens or hidden states, and the received router sums."""
        if self._stages[stage].cut.is_first:
            return self._step.tokens[microbatch], None
        return self._receive(stage - 1, microbatch, Direction.FORWARD)

    def _weights(self, stage: int) -> dict[str, Tensor]:
        weights = self._memory[stage].weights
        if weights.is_ready():  # measuring a wait costs host time, so skip it if there is none
            return weights.views()
        with self._waiting(WaitCause.OPTIMIZER, stage=stage):
            weights.wait_until_updated()
        with self._waiting(WaitCause.WEIGHTS, stage=stage):
            return weights.views()

    @property
    def _shared_head(self) -> SpreadHead:
        assert self._spread_head is not None, "only ranks that share the head have such actions"
        return self._spread_head

    @property
    def _message_shape(self) -> tuple[int, ...]:
        """Shape of the step's messages, which norm and head are sent in, too."""
        hidden = *self._step.rows[0].shape, self._shared_head.width
        return hidden if self._routers is None else self._routers.sent_shape(hidden, self._shared_head.dtype)

    def _send(
        self,
        hidden: Tensor,
        context: RouterContext | None,
        stage: int,
        direction: Direction,
        microbatch: int | None = None,
    ) -> None:
        """Send to `stage`; to and from a head that ranks share that of a `microbatch`, which may stay on this rank."""
        rank = self._spec.rank_of(stage, microbatch)
        if direction is Direction.HEAD and rank == self._rank and microbatch is not None:
            self._step.at_head[microbatch] = hidden, None if context is None else context.router_sums
            return
        message = hidden if self._routers is None else self._routers.pack(hidden, context)
        self._transport.send(message, rank, direction)

    def _receive(self, source_stage: int, microbatch: int, direction: Direction) -> tuple[Tensor, Tensor | None]:
        """Return hidden states or their gradient, and the router numbers if there is a router loss."""
        if direction is Direction.HEAD and microbatch in self._step.at_head:
            return self._step.at_head.pop(microbatch)
        rank = self._spec.rank_of(source_stage, microbatch)
        with self._waiting(WaitCause.NEIGHBOURS, rank=rank, stage=source_stage):
            message = self._transport.receive(rank, direction)
        if self._routers is None:
            return message, None
        return self._routers.unpack(message, self._step.rows[microbatch // self._spec.num_slices].shape)

    @contextmanager
    def _waiting(self, cause: WaitCause, *, rank: int | None = None, stage: int | None = None) -> Iterator[None]:
        with (
            self._activity.waiting(cause, rank=rank, stage=stage),
            self._clock.waiting(cause),
            self._spans.device_span(Lane.WAIT, cause.value),
        ):
            yield
