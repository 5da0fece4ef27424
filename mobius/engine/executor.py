"""Runs one rank's actions of a step or evaluation in schedule order, one handler per kind of action.

Handlers never wait for the device: they enqueue work, and streams and messages put the work in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from mobius.engine.host_arena import PinnedActivationBuffer
from mobius.engine.pipelined_router_loss import RouterContext
from mobius.engine.saved_activations import SavedActivations
from mobius.engine.spread_head import HeadShare, HeadViews
from mobius.engine.stage import StageModule
from mobius.engine.stage_layers import MicrobatchContext, SavedForBackward, StageLayers
from mobius.engine.stage_memory import GradientsReadyCallback, StageMemory
from mobius.engine.stage_messages import StageMessages
from mobius.engine.step_inputs import LayerInputs, StepBatch, StepInputs
from mobius.engine.step_sums import StepSums
from mobius.engine.waits import DevicePosition
from mobius.hardware.streams import new_stream
from mobius.models.block_autograd import NamedTensors
from mobius.objectives.objective import Evaluation, Objective, StepScale
from mobius.schedule.action import Action, ActionKind
from mobius.schedule.lanes import Lane, WaitCause
from mobius.schedule.memory_layout import Part
from mobius.schedule.render import render_text
from mobius.schedule.schedule import Schedule


class PlayedStage(NamedTuple):
    """One stage of a rank: its code and its memory."""

    module: StageModule
    """Embedding, norm, head and loss."""
    layers: StageLayers
    memory: StageMemory


@dataclass
class _Step:
    """State of one step or evaluation, which all handlers share."""

    inputs: StepInputs
    sums: StepSums
    scale: StepScale
    evaluate: Evaluation
    on_gradients_ready: GradientsReadyCallback | None
    evaluated: dict[int, Tensor] = field(default_factory=dict)
    """Result of `evaluate` by microbatch."""
    router_sums: dict[int, Tensor | None] = field(default_factory=dict)
    """Router sums that the last stage received, by microbatch, kept until the microbatch's backward."""


class Executor:
    """Runs the steps of a rank; the caller passes in memory, messages and the code of the stages."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        stages: Mapping[int, PlayedStage],
        layer_inputs: LayerInputs,
        messages: StageMessages,
        objective: Objective,
        device: torch.device,
        head: HeadShare | None = None,
        activation_buffer: PinnedActivationBuffer | None = None,
    ) -> None:
        """`stages` are this rank's stages; `messages` belong to the same schedule and compute the router loss.

        `objective`: what the last stage learns and evaluates.

        `head`: this rank's part of a head that all ranks share. `activation_buffer`: host memory for offloaded
        activations.
        """
        self._schedule, self._spec, self._stages = schedule, schedule.spec, stages
        self._messages, self._head, self._layer_inputs = messages, head or HeadShare(), layer_inputs
        self.objective = objective
        self._device, self._observers = device, messages.observers
        self._to_device, self._routers = new_stream(device), messages.routers
        self._saved_activations = SavedActivations(
            activation_buffer,
            device=device,
            waiting=partial(self._observers.waiting, WaitCause.ACTIVATIONS),
            copy_lookahead=schedule.spec.copy_lookahead,
            alternates=schedule.spec.is_depth_first,
            spans=self._observers.spans,
        )
        self._step: _Step
        actions = schedule.actions[messages.rank]
        self._named_actions = [(action, str(action)) for action in actions]
        self._position, self._last_backward = DevicePosition(actions, device), schedule.spec.last_backward
        forward = self._forward_only if schedule.spec.is_evaluation else self._forward
        self._handlers: dict[ActionKind, Callable[..., None]] = {
            ActionKind.GENERATE_DATA: lambda stage: self._step.inputs.copy_rows(),
            ActionKind.LOAD: lambda stage: stages[stage].memory.weights.load(),
            ActionKind.OFFLOAD: self._offload,
            ActionKind.LOAD_GRADIENT_SUMS: lambda stage: stages[stage].memory.sums.load(),
            ActionKind.OFFLOAD_GRADIENT_SUMS: lambda stage: stages[stage].memory.sums.offload(),
            ActionKind.FORWARD_FIRST: forward,
            ActionKind.FORWARD_MIDDLE: forward,
            ActionKind.FORWARD_LAST: self._forward_last,
            ActionKind.EVALUATE_LAST: self._evaluate_last,
            ActionKind.BACKWARD_FIRST: self._backward,
            ActionKind.BACKWARD_MIDDLE: self._backward,
            ActionKind.BACKWARD_LAST: self._backward_last,
            ActionKind.HEAD: self._compute_head,
            ActionKind.RECOMPUTE_KV: self._recompute_kv,
            ActionKind.OFFLOAD_ACTIVATIONS: self._saved_activations.offload,
            ActionKind.PREFETCH_ACTIVATIONS: self._saved_activations.prefetch,
        }

    def run(
        self, batch: StepBatch, *, loss_scale: float = 1.0, on_gradients_ready: GradientsReadyCallback | None = None
    ) -> StepSums:
        """Run forward and backward of all microbatches of one step.

        Leaves the gradients of `loss * loss_scale` in the states of the stages. If an action fails, its error is
        re-raised with the schedule grid as a note.
        """
        assert not self._spec.is_evaluation, "run() needs a training schedule"
        self._start(batch, loss_scale, on_gradients_ready)
        self._play_all()
        return self._step.sums

    def evaluate(self, batch: StepBatch, evaluate: Evaluation | None = None) -> dict[int, Tensor]:
        """Run forward of all microbatches of an evaluation schedule, without gradients or saved activations.

        Returns the result of `evaluate` (default: the objective's) by microbatch on the rank of the last stage, {} on
        other ranks, without waiting for a GPU. Raises as `run` does.
        """
        assert self._spec.is_evaluation, "evaluate() needs an evaluation schedule"
        self._start(batch, evaluate=evaluate)
        self._play_all()
        return self._step.evaluated

    def _start(
        self,
        batch: StepBatch,
        loss_scale: float = 1.0,
        on_gradients_ready: GradientsReadyCallback | None = None,
        evaluate: Evaluation | None = None,
    ) -> None:
        given = batch, self._spec, self._layer_inputs, self._routers
        inputs = StepInputs(*given, device=self._device, to_device=self._to_device)
        self._head.begin_step(inputs.rows_shape)
        self._messages.begin_step(inputs.rows_shape, self._head.messages_of)
        numbers = torch.zeros(1 + len(self.objective.number_names), dtype=torch.float32, device=self._device)
        sums, scale = StepSums(numbers, {}, self._routers.total), StepScale(batch.num_targets, loss_scale, batch.counts)
        self._step = _Step(inputs, sums, scale, evaluate or self.objective.evaluate, on_gradients_ready)

    def _play_all(self) -> None:
        activity = self._observers.activity
        if self._position.is_on:
            activity.device_position = self._position.__str__
        self._position.begins()
        for index, (action, name) in enumerate(self._named_actions):
            try:
                self._messages.begin_action(index)
                activity.start_action(action)
                self._play(action, name)
                self._position.enqueued(index)
            except Exception as error:
                self._saved_activations.clear()
                error.add_note(render_text(self._schedule, failed=(self._messages.rank, index)))
                raise
        self._await_reductions()
        self._position.ends()
        activity.start_action("the end of the messages")
        self._messages.finish_step()

    def _play(self, action: Action, name: str) -> None:
        """Run the action's handler in spans with the action's name; handlers of copies record copy spans themselves."""
        is_compute = action.kind.runs_on_compute_lane or action.kind is ActionKind.GENERATE_DATA
        span = self._observers.spans.device_span(Lane.COMPUTE, name) if is_compute else nullcontext()
        # A profiler range costs the host 5 microseconds, so it is opened only while profiling.
        named = torch.profiler.record_function(name) if _profiler_enabled() else nullcontext()
        with named, span:
            if action.microbatch is None:
                self._handlers[action.kind](action.stage)
            else:
                self._handlers[action.kind](action.stage, action.microbatch)

    def _await_reductions(self) -> None:
        """Make the compute stream wait until all replicas have reduced the norms, if there are several replicas."""
        points = [self._stages[stage].memory.sums.reduction for stage in self._step.sums.squared_norms]
        if pending := [point for point in points if point is not None]:
            with self._observers.waiting(WaitCause.NEIGHBOURS):
                for point in pending:
                    point.wait()

    def _offload(self, stage: int) -> None:
        """Free the stage's slot and start copying its gradients; if states are on disks, wait for a free buffer."""
        memory = self._stages[stage].memory
        may_wait = memory.regions.has_on_disks(Part.STATES)
        with self._observers.waiting(WaitCause.OPTIMIZER, stage=stage) if may_wait else nullcontext():
            memory.offload(self._step.on_gradients_ready)

    def _forward(self, stage: int, microbatch: int) -> None:
        inputs, context = self._forward_inputs(stage, microbatch)
        weights = self._weights(stage)
        output, saved_for_backward = self._stages[stage].layers.forward(weights, inputs, context)
        self._saved_activations.put(stage, microbatch, saved_for_backward)
        self._head.before_sending(stage, microbatch, weights)
        self._messages.send(output, context.routers.router_sums)

    def _forward_last(self, stage: int, microbatch: int) -> None:
        """Save only the input if the layers' forward can run later, at the start of this microbatch's backward."""
        (inputs, sums), layers = self._stage_input(stage, microbatch), self._stages[stage].layers
        self._step.router_sums[microbatch] = sums
        saved_for_backward = layers.save_input(inputs)
        if saved_for_backward is None:
            _, saved_for_backward = layers.forward(self._weights(stage), inputs, self._step.inputs.context(microbatch))
        self._saved_activations.put(stage, microbatch, saved_for_backward)

    def _forward_only(self, stage: int, microbatch: int) -> None:
        self._messages.send(*self._evaluate_layers(stage, microbatch))

    def _evaluate_last(self, stage: int, microbatch: int) -> None:
        hidden, _ = self._evaluate_layers(stage, microbatch)
        weights, rows, module = self._weights(stage), self._step.inputs.rows[microbatch], self._stages[stage].module
        self._step.evaluated[microbatch] = module.evaluate(weights, hidden, rows, self._step.evaluate)

    def _evaluate_layers(self, stage: int, microbatch: int) -> tuple[Tensor, Tensor | None]:
        """Run the stage's layers on the next input; return their output and the router sums as received."""
        inputs, context = self._forward_inputs(stage, microbatch)
        return self._stages[stage].layers.run(self._weights(stage), inputs, context), context.routers.router_sums

    def _recompute_kv(self, stage: int, microbatch: int) -> None:
        is_last = (microbatch + 1) % self._spec.num_slices == 0
        saved_for_backward = self._saved_activations.look(stage, microbatch, comes_again=not is_last)
        weights, context = self._weights(stage), self._step.inputs.context(microbatch)
        self._stages[stage].layers.recompute_kv(weights, saved_for_backward, context)

    def _compute_head(self, stage: int, microbatch: int) -> None:
        """Run norm, head and loss of a microbatch, and their backward, in a head that all ranks share."""
        views = self._head.views(stage, microbatch, self._views)
        hidden, sums = self._messages.receive()
        routers = self._routers.context(microbatch, sums)
        gradient = self._loss(self._head.module, views, hidden, microbatch, routers)
        self._messages.send(gradient, routers.router_sums)
        self._head.after_loss(microbatch)

    def _backward(self, stage: int, microbatch: int) -> None:
        gradient, router_gradient = self._messages.receive()
        weights, saved_for_backward = self._weights(stage), self._saved_activations.take(stage, microbatch)
        self._finish_backward(stage, microbatch, weights, saved_for_backward, gradient, router_gradient)

    def _backward_last(self, stage: int, microbatch: int) -> None:
        weights, saved_for_backward = self._weights(stage), self._saved_activations.take(stage, microbatch)
        context = self._step.inputs.context(microbatch, self._step.router_sums.pop(microbatch))
        hidden, saved_for_backward = self._stages[stage].layers.finish_forward(weights, saved_for_backward, context)
        routers = context.routers
        del context  # otherwise the layers' arguments stay in memory while the logits are computed
        views = weights, self._stages[stage].memory.sums.views()
        gradient = self._loss(self._stages[stage].module, views, hidden, microbatch, routers)
        self._finish_backward(stage, microbatch, weights, saved_for_backward, gradient, routers.router_sums)

    def _loss(
        self, module: StageModule, views: HeadViews, hidden: Tensor, microbatch: int, routers: RouterContext
    ) -> Tensor:
        """Add a microbatch's loss, by norm and head of `module`, to the step's loss; return the gradient of `hidden`.

        Afterwards `routers` holds the gradient of the router sums.
        """
        step = self._step
        numbers, gradient = module.loss(*views, hidden, step.inputs.rows[microbatch], self.objective, step.scale)
        numbers[0] = self._routers.add_loss(numbers[0], routers, step.scale.loss_scale)
        step.sums.numbers.add_(numbers)
        return gradient

    def _finish_backward(
        self,
        stage: int,
        microbatch: int,
        weights: NamedTensors,
        saved_for_backward: list[SavedForBackward],
        gradient: Tensor,
        router_gradient: Tensor | None,
    ) -> None:
        """Run backward of the layers, then of the embedding; if the stage has none, send the gradient of its input.

        The last microbatch finishes the stage's gradients. `router_gradient`: gradient of the router sums, if any.
        """
        (module, layers, memory), step = self._stages[stage], self._step
        gradients = memory.sums.views()
        context = self._step.inputs.context(microbatch, router_gradient)
        gradient = layers.backward(weights, gradients, saved_for_backward, gradient, context)
        if module.cut.is_first:
            module.embedding_backward(weights, gradients, step.inputs.tokens[microbatch], gradient, context)
        else:
            self._messages.send(gradient, context.routers.router_sums)
        self._head.after_backward(stage, microbatch, gradients)
        if microbatch == self._last_backward:
            step.sums.squared_norms[stage] = memory.finish_gradients(step.on_gradients_ready)

    def _forward_inputs(self, stage: int, microbatch: int) -> tuple[Tensor, MicrobatchContext]:
        """Return the input of a stage's layers, and their context, in which a pass computes what a step computes."""
        inputs, sums = self._stage_input(stage, microbatch)
        offloads_all = self._spec.offloads_all(stage, microbatch)
        return inputs, self._step.inputs.context(microbatch, sums, offload_saved_tensors=offloads_all)

    def _stage_input(self, stage: int, microbatch: int) -> tuple[Tensor, Tensor | None]:
        """Return the tokens (first stage) or the received hidden states, and the received router sums."""
        if self._stages[stage].module.cut.is_first:
            return self._step.inputs.tokens[microbatch], None
        return self._messages.receive()

    def _views(self, stage: int) -> HeadViews:
        return self._weights(stage), self._stages[stage].memory.sums.views()

    def _weights(self, stage: int) -> NamedTensors:
        weights = self._stages[stage].memory.weights
        if weights.is_ready():  # no wait to measure: measuring takes host time
            return weights.views()
        with self._observers.waiting(WaitCause.OPTIMIZER, stage=stage):
            weights.wait_until_updated()
        with self._observers.waiting(WaitCause.WEIGHTS, stage=stage):
            return weights.views()
