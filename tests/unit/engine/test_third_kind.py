"""A kind of stage that neither executor nor stepper knows is loaded, trained and updated like the others."""

from __future__ import annotations

import torch
from harness.pipelines import CPU, make_batch, make_model
from torch import Tensor

from mobius.distributed.transport import SingleRankTransport
from mobius.engine.adamw import AdamWSettings, FlatAdamW
from mobius.engine.executor import Executor
from mobius.engine.loss_scaler import LossScaler
from mobius.engine.optimizer_stepper import OptimizerStepper
from mobius.engine.rank_memory import allocate_memory
from mobius.engine.stage import StageModule
from mobius.engine.stage_layers import WholeLayers
from mobius.engine.stage_memory import GradientsReadyCallback, StageMemory, Update
from mobius.engine.stage_state import StageState
from mobius.engine.waits import WaitClock
from mobius.models.blocks import LayerArgumentsBuilder, ModelParts
from mobius.models.layout import StageLayout
from mobius.schedule.build import build_schedule
from mobius.schedule.partition import balanced_partition
from mobius.schedule.spec import ScheduleSpec

NUM_STAGES, NUM_MICROBATCHES = 4, 2


class ParkedStage:
    """Its weights are a copy made by `load`; it is updated at once, in one piece."""

    reduction = None

    def __init__(self, stage: int, state: StageState) -> None:
        self.stage, self.state, self.frozen_state = stage, state, state
        self.copy: Tensor | None = None
        self.sums: Tensor | None = None

    def load(self) -> None:
        self.copy = self.state.weights.clone()

    def is_ready(self) -> bool:
        return True

    def wait_until_updated(self) -> None:
        pass

    def gather_updated_weights(self) -> None:
        pass

    def weights(self) -> dict[str, Tensor]:
        assert self.copy is not None
        return self.state.layout.views(self.copy)

    def gradients(self) -> dict[str, Tensor]:
        if self.sums is None:
            self.sums = torch.zeros(self.state.layout.num_trained)
        return self.state.layout.trained_views(self.sums)

    def finish_gradients(
        self, *, excluded: frozenset[str], on_gradients_ready: GradientsReadyCallback | None = None
    ) -> Tensor:
        assert self.sums is not None
        self.state.gradients.copy_(self.sums)
        self.sums = None
        return self.state.gradients.square().sum()

    def offload(self, on_gradients_ready: GradientsReadyCallback | None = None) -> None:
        self.copy = None
        if on_gradients_ready is not None and self.state.gradients.count_nonzero():
            on_gradients_ready(self.stage)

    def wait_for_gradients(self) -> None:
        pass

    def begin_update(self, update: Update) -> bool:
        self.update(update)
        return True

    def update(self, update: Update) -> None:
        update(pieces=self.state.layout.ranges)


def weights_after_a_step(parked: set[int], max_grad_norm: float) -> dict[str, Tensor]:
    model = make_model("llama")
    parts, clock, transport = ModelParts(model.config, CPU), WaitClock(CPU), SingleRankTransport()
    spans = balanced_partition(len(parts.layers), NUM_STAGES)
    stages = {span.stage: StageModule(parts, span, loss_chunk_tokens=16) for span in spans}
    memory: dict[int, StageMemory]
    memory, _ = allocate_memory(
        {stage: StageLayout.of(module.shapes) for stage, module in stages.items()},
        resident={0},
        num_slots=2,
        dtype=torch.float32,
        gradient_dtype=torch.float32,
        deferred_updates=set(stages),
        device=CPU,
    )
    values = dict(model.named_parameters())
    for own in memory.values():
        for name in own.state.layout.offsets:
            own.state.set_parameter(name, values[name].detach())
    memory |= {stage: ParkedStage(stage, memory[stage].state) for stage in parked}
    executor = Executor(
        build_schedule(ScheduleSpec.of(1, NUM_STAGES, NUM_MICROBATCHES, 2, {0})),
        stages=stages,
        layers={stage: WholeLayers(module, keep_graphs=False) for stage, module in stages.items()},
        memory=memory,
        layer_inputs=LayerArgumentsBuilder(parts, device=CPU, dtype=torch.float32),
        transport=transport,
        clock=clock,
        device=CPU,
    )
    stepper = OptimizerStepper(
        FlatAdamW(AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.1)),
        memory=memory,
        transport=transport,
        clock=clock,
        loss_scale=LossScaler(is_dynamic=False),
        num_stages=NUM_STAGES,
        max_grad_norm=max_grad_norm,
        tied=None,
    )
    stepper.begin_step(0.1)
    assert not stepper.apply(
        executor.run(make_batch(NUM_MICROBATCHES), on_gradients_ready=stepper.on_gradients_ready), step=1
    ).is_skipped
    stepper.drain()
    states = [own.state for own in memory.values()]
    return {name: view for state in states for name, view in state.layout.views(state.weights).items()}


def test_a_third_kind_of_stage_trains_like_a_streamed_one() -> None:
    expected = weights_after_a_step(set(), 0.0)
    mixed = weights_after_a_step({1, 3}, 0.0)
    assert all(torch.equal(mixed[name], value) for name, value in expected.items())
    assert any(not torch.equal(value, make_model("llama").state_dict()[name]) for name, value in expected.items())


def test_a_third_kind_of_stage_waits_for_the_norm_of_all() -> None:
    expected, mixed = weights_after_a_step(set(), 0.5), weights_after_a_step({1, 3}, 0.5)
    for name, value in expected.items():
        torch.testing.assert_close(mixed[name], value, rtol=1e-5, atol=1e-6)  # its norm is summed in another order
