"""One or more ranks with tiny stages whose gradients a test sets by hand."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from harness.pipelines import scalar_code
from harness.rank_memory import allocate_memory
from harness.runs import kernel_folder
from torch import Tensor

from mobius.distributed.transport import SingleRankTransport, Transport
from mobius.engine.adamw import AdamWSettings, FlatAdamW
from mobius.engine.adamw_cpu import CPUAdamW, load_adamw_cpu
from mobius.engine.optimizer_stepper import GradientScaler, OptimizerStepper, StepOutcome
from mobius.engine.stage_memory import StageMemory
from mobius.engine.step_sums import StepSums
from mobius.engine.tied_weights import TiedWeights
from mobius.engine.update_queue import UpdateQueue
from mobius.engine.waits import Observers, WaitClock
from mobius.models.layout import StageLayout

__all__ = ["scalar_code"]

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def kernels() -> Path:
    """The folder with AdamW's C kernel, which all tests of a process share."""
    return Path(kernel_folder().name)


@pytest.fixture(scope="session")
def kernel(kernels: Path) -> CPUAdamW:
    loaded = load_adamw_cpu(kernels, num_threads=2)
    assert loaded is not None
    return loaded


Gradients = Mapping[str, Tensor]


@dataclass
class Rank:
    """This rank's stages and its stepper; a parameter is named `stage.name`."""

    memory: Mapping[int, StageMemory]
    stepper: OptimizerStepper

    def step(
        self, gradients: Gradients, *, step: int = 1, loss: float = 1.0, learning_rate: float = 0.1
    ) -> StepOutcome:
        """Accumulate `gradients` (the others stay zero) as backward does, then apply them."""
        self.stepper.begin_step(learning_rate)
        squares = {}
        for stage, memory in self.memory.items():
            if memory.states.is_on_host:
                memory.weights.load()
            views = memory.sums.views()
            for name in memory.state.layout.offsets:
                if name in gradients:
                    views[name].add_(gradients[name])
            squares[stage] = memory.finish_gradients(self.stepper.on_gradients_ready)
            if memory.states.is_on_host:
                memory.offload(self.stepper.on_gradients_ready)
        outcome = self.stepper.apply(StepSums(torch.tensor([loss]), squares), step=step)
        self.stepper.drain()
        return outcome

    def parameters(self) -> dict[str, Tensor]:
        """Copies of the working weights."""
        return {
            name: view.clone()
            for state in (memory.state for memory in self.memory.values())
            for name, view in state.layout.views(state.weights).items()
        }


MakeRank = Callable[..., Rank]


@pytest.fixture
def make_rank() -> MakeRank:
    def make(
        stages: Mapping[int, Mapping[str, Tensor]],
        *,
        transport: Transport | None = None,
        num_tensors: Sequence[int] = (),
        max_grad_norm: float = 1.0,
        loss_scale: GradientScaler | None = None,
        tied: TiedWeights | None = None,
        dtype: torch.dtype = torch.float32,
        is_streamed: bool = False,
        is_overlapped: bool = False,
        resident: Collection[int] | None = None,
        deferred_updates: Collection[int] | None = None,
    ) -> Rank:
        """`stages`: stage -> parameter name -> initial value.

        `num_tensors` counts the parameters of all stages if this rank does not have them all.
        With `resident` those stages stay and the others are streamed; the updates of `deferred_updates` wait, by
        default as in a run.
        """
        layouts = {
            stage: StageLayout.of({name: tuple(value.shape) for name, value in parameters.items()})
            for stage, parameters in stages.items()
        }
        scaler = loss_scale or GradientScaler(is_dynamic=False)
        scaler.max_grad_norm = max_grad_norm
        waits_for_norm = max_grad_norm > 0 or scaler.is_dynamic
        waiting = {*layouts} if waits_for_norm else {tied.embedding_stage, tied.head_stage} if tied else set[int]()
        staying = frozenset(stages) if resident is None and not is_streamed else frozenset(resident or ())
        memory, _ = allocate_memory(
            layouts,
            resident=staying,
            num_slots=1,
            dtype=dtype,
            gradient_dtype=dtype,
            deferred_updates=waiting if deferred_updates is None else deferred_updates,
            device=CPU,
            updates=UpdateQueue() if is_overlapped else None,
            tied=tied.names if tied else (),
        )
        for stage, parameters in stages.items():
            for name, value in parameters.items():
                memory[stage].state.set_parameter(name, value)
        stepper = OptimizerStepper(
            FlatAdamW(AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0)),
            memory=memory,
            transport=transport or SingleRankTransport(),
            observers=Observers(WaitClock(CPU)),
            scaler=scaler,
            num_tensors=num_tensors or [len(parameters) for parameters in stages.values()],
            waits_for_norm=waits_for_norm,
            tied=tied,
        )
        return Rank(memory, stepper)

    return make


@pytest.fixture
def layouts() -> dict[int, StageLayout]:
    """Three stages of different sizes: 128 + 256, 256 and 128 + 128 elements with their padding."""
    return {
        0: StageLayout.of({"norm": (7,), "matrix": (5, 40)}),
        2: StageLayout.of({"matrix": (16, 16)}),
        4: StageLayout.of({"matrix": (3, 4), "bias": (128,)}),
    }
