"""A kind of stage made of other choices of its parts, which neither executor nor stepper knows, trains like others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness.pipelines import CPU, make_batch, make_model
from harness.rank_memory import allocate_memory
from harness.schedules import even_cuts, spec_of
from torch import Tensor

from mobius.distributed.transport import SingleRankTransport
from mobius.engine.adamw import AdamWSettings, FlatAdamW
from mobius.engine.executor import Executor, PlayedStage
from mobius.engine.gradient_sums import GradientAccumulator, GradientSums
from mobius.engine.optimizer_states import HostStates
from mobius.engine.optimizer_stepper import GradientScaler, OptimizerStepper
from mobius.engine.stage import StageModule, num_trained_tensors
from mobius.engine.stage_memory import StageMemory
from mobius.engine.stage_messages import StageMessages
from mobius.engine.stage_state import StageState
from mobius.engine.stage_weights import ResidentWeights
from mobius.engine.update_queue import UpdateQueue
from mobius.engine.waits import Observers, WaitClock
from mobius.hardware.streams import DeviceBuffer, Event, Stream
from mobius.models.blocks import LayerArgumentsBuilder, ModelParts
from mobius.models.layout import StageLayout
from mobius.objectives.cross_entropy import SUPERVISED
from mobius.schedule.build import build_schedule
from mobius.schedule.memory_layout import StageRegions

NUM_STAGES, NUM_MICROBATCHES = 4, 2


class CopiedWeights(ResidentWeights):
    """A copy of the host's weights that stays, and is renewed after each of their updates."""

    def __init__(self, stage: int, state: StageState, updates: UpdateQueue) -> None:
        self._copy = state.weights.clone()
        super().__init__(stage, replace(state, weights=self._copy))
        self._updates, self._host = updates, state

    def is_ready(self) -> bool:
        return not self._updates.is_under_way(self._stage)

    def wait_until_updated(self) -> None:
        self._updates.wait(self._stage)

    def updated(self, event: Event | None = None) -> None:
        self._updates.run_after_update(self._stage, lambda: self._copy.copy_(self._host.weights))


class CollectedStates(HostStates):
    """On the host, although the stage is never offloaded: gradients leave as soon as they are finished."""

    is_on_host = False

    def finish_gradients(self, sums: GradientSums) -> Tensor:
        squares = super().finish_gradients(sums)
        assert self.collect_gradients(sums, Event())
        return squares


def half_resident(regions: StageRegions, state: StageState, updates: UpdateQueue) -> StageMemory:
    """Weights and sums on the device, master and moments on the host."""
    stage = regions.stage
    sums = GradientSums(stage, state.layout, GradientAccumulator(state.layout.num_trained, device=CPU))
    weights, outbox = CopiedWeights(stage, state, updates), DeviceBuffer(torch.zeros_like(state.gradients))
    states = CollectedStates(regions, state, weights, updates, device=CPU, to_host=Stream(), outbox=lambda: outbox)
    return StageMemory(regions, weights, sums, states)


def weights_after_steps(half: set[int], max_grad_norm: float, *, is_overlapped: bool) -> dict[str, Tensor]:
    model = make_model("llama", NUM_STAGES)
    parts, transport = ModelParts(model.config, CPU), SingleRankTransport()
    observers = Observers(WaitClock(CPU))
    spans = even_cuts(len(parts.layers), NUM_STAGES)
    stages = {span.stage: StageModule(parts, span, loss_chunk_tokens=16) for span in spans}
    updates = UpdateQueue(has_thread=is_overlapped)
    memory, _ = allocate_memory(
        {stage: StageLayout.of(module.shapes) for stage, module in stages.items()},
        resident={0},
        num_slots=2,
        dtype=torch.float32,
        gradient_dtype=torch.float32,
        deferred_updates=set(stages) if max_grad_norm else (),
        device=CPU,
        updates=updates,
    )
    values = dict(model.named_parameters())
    for own in memory.values():
        for name in own.state.layout.offsets:
            own.state.set_parameter(name, values[name].detach())
    memory |= {stage: half_resident(memory[stage].regions, memory[stage].state, updates) for stage in half}
    schedule = build_schedule(spec_of(1, NUM_STAGES, NUM_MICROBATCHES, 2, {0} | half))
    executor = Executor(
        schedule,
        stages={stage: PlayedStage(module, module, memory[stage]) for stage, module in stages.items()},
        layer_inputs=LayerArgumentsBuilder(parts, device=CPU, dtype=torch.float32),
        messages=StageMessages(schedule, transport, observers),
        objective=SUPERVISED,
        device=CPU,
    )
    stepper = OptimizerStepper(
        FlatAdamW(AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.1)),
        memory=memory,
        transport=transport,
        observers=observers,
        scaler=GradientScaler(is_dynamic=False, max_grad_norm=max_grad_norm),
        num_tensors=[num_trained_tensors(parts, span) for span in spans],
        waits_for_norm=max_grad_norm > 0,
        tied=None,
    )
    for step in (1, 2):
        stepper.begin_step(0.1)
        sums = executor.run(make_batch(NUM_MICROBATCHES), on_gradients_ready=stepper.on_gradients_ready)
        assert not stepper.apply(sums, step=step).is_skipped
    stepper.drain()
    states = [own.state for own in memory.values()]
    return {name: view for state in states for name, view in state.layout.views(state.weights).items()}


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_a_third_kind_of_stage_trains_like_a_streamed_one(max_grad_norm: float, is_overlapped: bool) -> None:
    expected = weights_after_steps(set(), max_grad_norm, is_overlapped=is_overlapped)
    mixed = weights_after_steps({1, 3}, max_grad_norm, is_overlapped=is_overlapped)
    assert all(torch.equal(mixed[name], value) for name, value in expected.items())
    assert any(
        not torch.equal(value, make_model("llama", NUM_STAGES).state_dict()[name]) for name, value in expected.items()
    )
