"""One or more ranks with tiny stages whose gradients a test sets by hand."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mobius.memory.host_arena import HostArena
from mobius.memory.layout import StageLayout
from mobius.memory.resident import ResidentStages
from mobius.memory.stage_memory import StageMemory
from mobius.memory.update_queue import UpdateQueue
from mobius.memory.weight_slots import WeightSlots
from mobius.optim.adamw import AdamWSettings, FlatAdamW
from mobius.optim.grad_scaler import LossScale
from mobius.optim.stepper import StepOutcome, Stepper
from mobius.optim.tied import TiedPair
from mobius.runtime.executor import StepSums
from mobius.runtime.transport import SingleRankTransport, Transport
from mobius.runtime.waits import WaitClock

CPU = torch.device("cpu")
Gradients = Mapping[str, Tensor]


@dataclass
class Rank:
    """This rank's stages and its stepper; a parameter is named `stage.name`."""

    memory: StageMemory
    stepper: Stepper
    is_streamed: bool
    tied_names: frozenset[str]

    def step(
        self, gradients: Gradients, *, step: int = 1, loss: float = 1.0, learning_rate: float = 0.1
    ) -> StepOutcome:
        """Accumulate `gradients` (the others stay zero) as backward does, then apply them."""
        self.stepper.begin_step(learning_rate)
        squares = {}
        for stage, state in self.memory.states.items():
            if self.is_streamed:
                self.memory.load(stage)
            views = self.memory.gradients(stage)
            for name in state.layout.offsets:
                if name in gradients:
                    views[name].add_(gradients[name])
            squares[stage] = self.memory.seal_gradients(stage, excluded=self.tied_names)
            if self.is_streamed:
                departure = self.memory.offload(stage)
                assert departure is not None
                self.stepper.gradients_leave(stage, departure)
            else:
                self.stepper.gradients_stay(stage, squares[stage])
        outcome = self.stepper.apply(StepSums(torch.tensor(loss), squares), step=step)
        self.stepper.drain()
        return outcome

    def parameters(self) -> dict[str, Tensor]:
        """Copies of the working weights."""
        return {
            name: view.clone()
            for state in self.memory.states.values()
            for name, view in state.layout.views(state.weights).items()
        }


MakeRank = Callable[..., Rank]


@pytest.fixture
def make_rank() -> MakeRank:
    def make(
        stages: Mapping[int, Mapping[str, Tensor]],
        *,
        transport: Transport | None = None,
        num_stages: int = 2,
        max_grad_norm: float = 1.0,
        loss_scale: LossScale | None = None,
        tied: TiedPair | None = None,
        dtype: torch.dtype = torch.float32,
        is_streamed: bool = False,
        is_overlapped: bool = False,
    ) -> Rank:
        """`stages`: stage -> parameter name -> initial value."""
        layouts = {
            stage: StageLayout.of({name: tuple(value.shape) for name, value in parameters.items()})
            for stage, parameters in stages.items()
        }
        memory: StageMemory = (
            WeightSlots(HostArena(layouts, dtype=dtype, register=False).states, num_slots=1, device=CPU)
            if is_streamed
            else ResidentStages(layouts, dtype=dtype, device=CPU)
        )
        for stage, parameters in stages.items():
            for name, value in parameters.items():
                memory.states[stage].set_parameter(name, value)
        stepper = Stepper(
            FlatAdamW(AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0)),
            memory=memory,
            transport=transport or SingleRankTransport(),
            clock=WaitClock(CPU),
            loss_scale=loss_scale or LossScale(is_dynamic=False),
            num_stages=num_stages,
            max_grad_norm=max_grad_norm,
            tied=tied,
            updates=UpdateQueue() if is_overlapped else None,
        )
        return Rank(memory, stepper, is_streamed, tied.names if tied else frozenset())

    return make
