"""Plays one rank's actions of one step or evaluation, in the order of the schedule: for each action its handler.

Nothing here waits for the device: handlers enqueue, and the order of streams and edges does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from mobius.activity import Activity
from mobius.limits import RECEIVES_AHEAD
from mobius.memory.activation_home import ActivationHome
from mobius.memory.spans import NO_SPANS, Spans
from mobius.memory.stage_memory import GradientListener, StageMemory
from mobius.memory.streams import new_stream, record_current
from mobius.messages.transport import Messages
from mobius.models.attention import Documents
from mobius.models.blocks import LayerArguments
from mobius.models.graph import Views
from mobius.models.loss import shift_labels
from mobius.runtime.device_position import DevicePosition
from mobius.runtime.evaluation_sums import EvaluationSums
from mobius.runtime.places import Place, cut_rows, place_slices
from mobius.runtime.routers import Routers, RouterTurn
from mobius.runtime.stage import Kept, StageModule
from mobius.runtime.stage_layers import StageLayers, Turn
from mobius.runtime.stash import Stash
from mobius.runtime.step_sums import StepSums
from mobius.runtime.waits import WaitClock
from mobius.schedule.action import Action, ActionKind, incoming
from mobius.schedule.lanes import Lane, WaitCause
from mobius.schedule.render import render_text
from mobius.schedule.schedule import Schedule


@dataclass(frozen=True)
class StepBatch:
    """All rows of one step on the host (page-locked where there is a GPU)."""

    input_ids: Tensor
    """int64 [batch, L]: the rows that this pipeline plays, where replicas share the step; counts are of all."""
    labels: Tensor
    """int64 [batch, L], -100 where nothing is to be learned, not shifted."""
    num_targets: int
    """Positions of the step whose next token is a target; the loss is their mean. At least one."""
    num_tokens: int
    """Tokens without padding."""
    num_samples: int
    epoch: float = 0.0
    """Epochs that are done after this step."""
    documents: tuple[Tensor, Tensor] | None = None
    """Positions int32 [batch, L] and bounds int32 [microbatches, D + 1] of documents (`runtime.documents`); None where
    each row is one."""
    num_replicas: int = 1
    """Pipelines that play as many rows each."""
    lengths: Tensor | None = None
    """int64 [batch]: tokens of each row before its padding; None: rows are full. For a loss over routers only."""


@dataclass
class _Step:
    """State that the handlers of one step or evaluation share."""

    batch: StepBatch
    rows: Sequence[Tensor]
    """Token ids of each microbatch on the host, or of all slices of its sequences; every rank has them."""
    sums: StepSums
    evaluated: EvaluationSums
    loss_scale: float = 1.0
    listener: GradientListener | None = None
    tokens: Sequence[Tensor] = ()
    targets: Sequence[Tensor] = ()
    documents: Sequence[Documents | None] = ()
    """Documents of each microbatch or its sequences, on the device of every rank."""
    places: Sequence[Place] = ()
    """Places of the microbatches in their sequences; none where they are whole."""
    counted: Sequence[Tensor] = ()
    """Where the tokens of each microbatch are, fp32 [B, L], for a loss over routers."""
    router_sums: dict[int, Tensor] = field(default_factory=dict)
    """Sums of routers that the last stage got with a microbatch, until its turn."""


class Executor:
    """Owns the state of a step; memory, transport and stage code are handed in."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        stages: Mapping[int, StageModule],
        layers: Mapping[int, StageLayers],
        memory: Mapping[int, StageMemory],
        layer_inputs: Callable[[int, Documents | None], LayerArguments],
        transport: Messages,
        clock: WaitClock,
        device: torch.device,
        unsealed_names: frozenset[str] = frozenset(),
        home: ActivationHome | None = None,
        routers: Routers | None = None,
        spans: Spans = NO_SPANS,
        activity: Activity | None = None,
    ) -> None:
        """`stages`, their `layers` and `memory` are this rank's, and `activity` is told each action and wait.

        `unsealed_names` are parameters whose norm is taken later (tied weights). `home` has places for what the stashed
        stages of the schedule send to the host. `routers` is for models with a loss over them.
        """
        self._schedule, self._rank = schedule, transport.rank
        self._actions: Sequence[Action] = schedule.actions[transport.rank]
        self._stages, self._layers, self._memory = stages, layers, memory
        self._transport, self._clock = transport, clock
        self._layer_inputs, self._routers = layer_inputs, routers
        self._device, self._unsealed_names = device, unsealed_names
        self._spans, self._activity = spans, activity or Activity()
        self._position = DevicePosition(self._actions, device)
        self._to_device = new_stream(device)
        waiting = partial(self._waiting, WaitCause.ACTIVATIONS)
        self._stash = Stash(home, device=device, waiting=waiting, reach=schedule.reach, spans=spans)
        self._step: _Step
        sources = [incoming(action, schedule.num_stages) for action in self._actions]
        self._senders = [self._schedule.rank_of(source) for source in sources if source is not None]
        """Rank that sends each message of a step, in the order in which they are received."""
        self._stage_handlers: dict[ActionKind, Callable[[int], None]] = {
            ActionKind.GENERATE_DATA: self._generate_data,
            ActionKind.LOAD: lambda stage: self._memory[stage].load(),
            ActionKind.OFFLOAD: lambda stage: self._memory[stage].offload(self._step.listener),
            ActionKind.LOAD_SUMS: lambda stage: self._memory[stage].load_sums(),
            ActionKind.OFFLOAD_SUMS: lambda stage: self._memory[stage].offload_sums(),
        }
        self._microbatch_handlers: dict[ActionKind, Callable[[int, int], None]] = {
            ActionKind.FORWARD_FIRST: self._forward_only if schedule.is_evaluation else self._forward,
            ActionKind.FORWARD_MIDDLE: self._forward_only if schedule.is_evaluation else self._forward,
            ActionKind.FORWARD_LAST: self._forward_last,
            ActionKind.EVALUATE_LAST: self._evaluate_last,
            ActionKind.BACKWARD_FIRST: self._backward,
            ActionKind.BACKWARD_MIDDLE: self._backward,
            ActionKind.BACKWARD_LAST: self._backward_last,
            ActionKind.KEYS: self._make_keys,
            ActionKind.STASH: self._stash.send,
            ActionKind.FETCH: self._stash.fetch,
        }

    def run(self, batch: StepBatch, *, loss_scale: float = 1.0, listener: GradientListener | None = None) -> StepSums:
        """Forward and backward of all microbatches of one step.

        The gradients of `loss * loss_scale` end in the states of `memory`. Raises what the failing action raised, with
        the grid of the schedule attached.
        """
        assert not self._schedule.is_evaluation, "the schedule has no backward"
        self._step = self._start(batch)
        self._step.loss_scale, self._step.listener = loss_scale, listener
        self._play_all()
        return self._step.sums

    def _await_reductions(self) -> None:
        """Make the compute stream wait until the norms are those of all replicas, where there are any."""
        points = [self._memory[stage].reduction for stage in self._step.sums.squared_norms]
        if pending := [point for point in points if point is not None]:
            with self._waiting(WaitCause.NEIGHBOURS):
                for point in pending:
                    point.wait()

    def evaluate(self, batch: StepBatch) -> EvaluationSums:
        """Forward of all microbatches, which leaves no gradients and keeps no activations; for evaluation schedules.

        Returns at once where there is a GPU. Raises as `run` does.
        """
        assert self._schedule.is_evaluation, "the schedule trains"
        self._step = self._start(batch)
        self._play_all()
        return self._step.evaluated

    def _start(self, batch: StepBatch) -> _Step:
        number, device = self._schedule.num_microbatches // self._schedule.num_slices, self._device
        zero = torch.zeros((), dtype=torch.float32, device=device)
        sums = StepSums(zero, {}, None if self._routers is None else zero.clone())
        evaluated = EvaluationSums.zeros(self._schedule.num_microbatches if self._schedule.is_evaluation else 0, device)
        rows = batch.input_ids.chunk(number)
        step = _Step(batch, rows, sums, evaluated, documents=self._place_documents(batch, number))
        if self._schedule.num_slices > 1:
            bounds = [None] * number if batch.documents is None else [*batch.documents[1]]
            length = batch.input_ids.shape[1]
            step.places = place_slices(length, bounds, num_slices=self._schedule.num_slices)
        if self._routers is not None and not self._schedule.is_evaluation:
            lengths = [] if batch.lengths is None else self._bring(batch.lengths)
            step.counted = self._routers.counted(batch.input_ids.shape, *lengths).chunk(number)
        return step

    def _play_all(self) -> None:
        num_posted = num_received = 0
        if self._position.is_on:
            self._activity.device_position = self._position.__str__
        self._position.begins()
        for index, action in enumerate(self._actions):
            try:
                while num_posted < min(len(self._senders), num_received + RECEIVES_AHEAD):
                    self._transport.post_receive(self._senders[num_posted])
                    num_posted += 1
                num_received += incoming(action, self._schedule.num_stages) is not None
                self._activity.begins(action)
                self._play(action)
                self._position.enqueued(index)
            except Exception as error:
                self._stash.clear()
                error.add_note(render_text(self._schedule, failed=(self._rank, index)))
                raise
        self._await_reductions()
        self._position.ends()
        self._activity.begins("the end of the messages")
        self._transport.finish_step()

    def _play(self, action: Action) -> None:
        """Run the action's handler under its name; loads and offloads record their copies where they make them."""
        name, is_compute = str(action), action.kind.computes or action.kind is ActionKind.GENERATE_DATA
        span = self._spans.device_span(Lane.COMPUTE, name) if is_compute else nullcontext()
        # A name takes the host 5 microseconds, and nobody reads it otherwise.
        named = torch.profiler.record_function(name) if _profiler_enabled() else nullcontext()
        with named, span:
            if action.microbatch is None:
                self._stage_handlers[action.kind](action.stage)
            else:
                self._microbatch_handlers[action.kind](action.stage, action.microbatch)

    def _generate_data(self, stage: int) -> None:
        """Bring the step's tokens and labels to the device."""
        step, num_slices = self._step, self._schedule.num_slices
        tokens, labels = self._bring(step.batch.input_ids, step.batch.labels)
        cut = partial(cut_rows, num_groups=len(step.rows), num_slices=num_slices)
        step.tokens, step.targets = cut(tokens), cut(shift_labels(labels))

    def _place_documents(self, batch: StepBatch, number: int) -> Sequence[Documents | None]:
        """The documents of each of `number` groups of rows; every rank needs them."""
        if batch.documents is None:
            return (None,) * number
        positions, bounds = self._bring(*batch.documents)
        return [Documents(*own) for own in zip(positions.chunk(number), bounds, strict=True)]

    def _bring(self, *sources: Tensor) -> list[Tensor]:
        """Copies on the device; from page-locked memory they do not block.

        On a stream of their own: behind a copy on the compute stream, compute waited for all loads that were enqueued
        before its next kernel.
        """
        targets = [torch.empty_like(source, device=self._device) for source in sources]
        is_free = record_current(self._device)  # of what their memory was before
        with self._to_device.run():
            is_free.wait()
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            arrival = self._to_device.record()
        arrival.wait()
        return targets

    def _forward(self, stage: int, microbatch: int) -> None:
        inputs, sums = self._stage_input(stage, microbatch)
        turn = self._turn(microbatch, sums, for_home=self._schedule.sends_products(stage, microbatch))
        output, kept = self._layers[stage].forward(self._weights(stage), inputs, turn)
        self._stash.put(stage, microbatch, kept)
        self._send(output, turn.routers, stage + 1)

    def _forward_only(self, stage: int, microbatch: int) -> None:
        self._send(self._evaluate_layers(stage, microbatch), None, stage + 1)

    def _evaluate_last(self, stage: int, microbatch: int) -> None:
        hidden, sums = self._evaluate_layers(stage, microbatch), self._step.evaluated
        targets = self._step.targets[microbatch]
        sums.losses[microbatch], sums.num_correct[microbatch] = self._stages[stage].evaluate(
            self._weights(stage), hidden, targets
        )

    def _evaluate_layers(self, stage: int, microbatch: int) -> Tensor:
        """Output of the stage's layers for its next input, of which nothing is kept."""
        inputs, _ = self._stage_input(stage, microbatch)
        return self._layers[stage].evaluate(self._weights(stage), inputs, self._turn(microbatch))

    def _forward_last(self, stage: int, microbatch: int) -> None:
        """Keep the input, if forward can happen inside backward, just before the loss, when weights are there."""
        (inputs, sums), layers = self._stage_input(stage, microbatch), self._layers[stage]
        if sums is not None:
            self._step.router_sums[microbatch] = sums
        kept = layers.receive(inputs)
        if kept is None:
            _, kept = layers.forward(self._weights(stage), inputs, self._turn(microbatch))
        self._stash.put(stage, microbatch, kept)

    def _make_keys(self, stage: int, microbatch: int) -> None:
        is_last = (microbatch + 1) % self._schedule.num_slices == 0
        kept = self._stash.look(stage, microbatch, comes_again=not is_last)
        self._layers[stage].make_keys(self._weights(stage), kept, self._turn(microbatch))

    def _backward(self, stage: int, microbatch: int) -> None:
        (gradient, of_sums), weights = self._receive(stage + 1, microbatch), self._weights(stage)
        self._finish_backward(stage, microbatch, weights, self._stash.take(stage, microbatch), gradient, of_sums)

    def _backward_last(self, stage: int, microbatch: int) -> None:
        weights, kept = self._weights(stage), self._stash.take(stage, microbatch)
        turn = self._turn(microbatch, self._step.router_sums.pop(microbatch, None))
        hidden, kept = self._layers[stage].finish(weights, kept, turn)
        routers = turn.routers
        del turn  # its arguments would be there beside the logits
        loss, gradient = self._stages[stage].loss(
            weights,
            self._memory[stage].gradients(),
            hidden,
            self._step.targets[microbatch],
            num_targets=self._step.batch.num_targets,
            loss_scale=self._step.loss_scale,
        )
        self._step.sums.loss.add_(loss if routers is None else loss + self._end_of_routers(routers))
        of_sums = None if routers is None else routers.numbers
        self._finish_backward(stage, microbatch, weights, kept, gradient, of_sums)

    def _end_of_routers(self, turn: RouterTurn) -> Tensor:
        """The part of the step's loss that a microbatch's routers make; their turn then goes backward."""
        sums, number = self._step.sums.router_loss, self._schedule.num_microbatches * self._step.batch.num_replicas
        assert self._routers is not None
        assert sums is not None
        value = self._routers.end(turn, num_microbatches=number, loss_scale=self._step.loss_scale)
        sums.add_(value.loss / number)
        return value.weighted

    def _finish_backward(
        self, stage: int, microbatch: int, weights: Views, kept: list[Kept], gradient: Tensor, of_sums: Tensor | None
    ) -> None:
        """Backward through the layers, then to the stage before or into the embedding; the last microbatch seals.

        `of_sums` is the gradient of the sums of routers, where they have a loss.
        """
        module, memory = self._stages[stage], self._memory[stage]
        gradients = memory.gradients()
        turn = self._turn(microbatch, of_sums)
        gradient = self._layers[stage].backward(weights, gradients, kept, gradient, turn)
        if module.cut.is_first:
            module.embedding_backward(weights, gradients, self._step.tokens[microbatch], gradient)
        else:
            self._send(gradient, turn.routers, stage - 1)
        if microbatch == self._schedule.last_backward:
            square = memory.seal_gradients(excluded=self._unsealed_names, listener=self._step.listener)
            self._step.sums.squared_norms[stage] = square

    def _turn(self, microbatch: int, numbers: Tensor | None = None, *, for_home: bool = False) -> Turn:
        """Return what layers get beside the hidden states; without documents its arguments go by length.

        `numbers` of routers came with the message, if there was one.
        """
        step, group = self._step, microbatch // self._schedule.num_slices
        arguments = self._layer_inputs(step.rows[group].shape[1], step.documents[group])
        routers = (
            None if self._routers is None or not step.counted else self._routers.turn(step.counted[group], numbers)
        )
        return Turn(arguments, step.places[microbatch] if step.places else None, for_home, routers)

    def _stage_input(self, stage: int, microbatch: int) -> tuple[Tensor, Tensor | None]:
        """Tokens or hidden states, and what came of routers."""
        if self._stages[stage].cut.is_first:
            return self._step.tokens[microbatch], None
        return self._receive(stage - 1, microbatch)

    def _weights(self, stage: int) -> dict[str, Tensor]:
        memory = self._memory[stage]
        if memory.is_ready():  # waits are not measured where there are none: that takes the host time
            return memory.weights()
        with self._waiting(WaitCause.OPTIMIZER, stage=stage):
            memory.wait_until_updated()
        with self._waiting(WaitCause.WEIGHTS, stage=stage):
            return memory.weights()

    def _send(self, hidden: Tensor, turn: RouterTurn | None, stage: int) -> None:
        message = hidden if self._routers is None else self._routers.pack(hidden, turn)
        self._transport.send(message, self._schedule.rank_of(stage))

    def _receive(self, source_stage: int, microbatch: int) -> tuple[Tensor, Tensor | None]:
        """Hidden states or their gradient, and the numbers of routers where these have a loss."""
        rank = self._schedule.rank_of(source_stage)
        with self._waiting(WaitCause.NEIGHBOURS, rank=rank, stage=source_stage):
            message = self._transport.receive(rank)
        if self._routers is None:
            return message, None
        return self._routers.unpack(message, self._step.rows[microbatch // self._schedule.num_slices].shape)

    @contextmanager
    def _waiting(self, cause: WaitCause, *, rank: int | None = None, stage: int | None = None) -> Iterator[None]:
        with (
            self._activity.waiting(cause, rank=rank, stage=stage),
            self._clock.waiting(cause),
            self._spans.device_span(Lane.WAIT, cause.value),
        ):
            yield
