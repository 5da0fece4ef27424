"""The planner's answer to a request: `solve` puts numbers in the place of auto and returns a plan that fits.

The answer includes the plan's bytes on every GPU and on the host, and its predicted step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mobius.config.config import Recompute
from mobius.errors import PlanError
from mobius.limits import FEWEST_STATE_BUFFERS
from mobius.planner.fit import check_given_plan, fit_plan, fits_host
from mobius.planner.gpu_specs import TERA
from mobius.planner.memory_estimates import (
    GpuMemoryEstimate,
    HostMemoryEstimate,
    estimate_gpu_memory_of_ranks,
    estimate_host_memory,
    estimated_layer,
)
from mobius.planner.peak_memory import LayerBytes
from mobius.planner.profile import Profile
from mobius.planner.rates import profile_for
from mobius.planner.request import PlanRequest
from mobius.planner.search import fit_by_simulation, resolve_auto
from mobius.planner.step_prediction import (
    SimulatedSteps,
    StepTimePrediction,
    predict_step_time,
    without_garbage_collection,
)
from mobius.schedule.plan import Plan


@dataclass(frozen=True)
class PlanResult:
    """A run as one rank knows it. All GPUs are assumed to have as much memory as the rank's own."""

    request: PlanRequest
    """With numbers in the place of auto."""
    plan: Plan
    gpu_estimates: tuple[GpuMemoryEstimate, ...]
    """GPU memory of every rank."""
    host_estimate: HostMemoryEstimate
    layer: LayerBytes | None
    """Bytes of a layer for one microbatch that the plan was made with; None: nothing is saved unless asked for."""
    profile: Profile | None
    """Seconds and rates that the plan was made with; None if the device's speed is not known."""
    step_time_prediction: StepTimePrediction | None
    """None without a profile, and for a preliminary plan."""
    simulated_steps: SimulatedSteps | None

    @property
    def step_seconds(self) -> float:
        """Seconds of the predicted step; raises PlanError if there is none."""
        if self.simulated_steps is None:
            raise PlanError("no step is predicted: rates are known of GPUs in formats of two bytes (bf16, fp16) only.")
        return self.simulated_steps.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all replicas."""
        return self.request.all_tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Operations of the model without recompute, divided by what the data sheets of all GPUs give in a step.

        Six per parameter and token except the embedding's, four for frozen ones, and those of causal attention within
        documents.
        """
        shape, machine = self.request.shape, self.request.machine
        assert machine.gpu_spec is not None
        attention = shape.num_layers * shape.hidden_size * self.request.attention_length
        operations = (shape.product_operations + 6 * attention) * self.tokens_per_second
        return operations / (machine.gpu_spec.tera_flops * TERA * machine.num_ranks * machine.num_replicas)


@without_garbage_collection()
def solve(
    request: PlanRequest,
    *,
    layer: LayerBytes | Callable[[PlanRequest], LayerBytes | None] | None = None,
    profile: Profile | None = None,
    given: Plan | None = None,
    is_preliminary: bool = False,
    is_draft: bool = False,
) -> PlanResult:
    """Plan a run: choose every number that is auto, fit the plan into memory, and predict its step.

    `layer`: bytes of a layer, or a function that measures them for the microbatch that is chosen. `profile`: measured
    rates; without it, estimates are used if there are any. `given`: a plan that is only checked. A preliminary plan is
    chosen by a bound and not simulated, because it is planned again after measuring. So are the stages and
    microbatches of a draft, whose numbers nobody uses. Raises PlanError or ScheduleError with what to
    change, and DoesNotFitError, which `gpu_refusal` completes.

    With optimizer states on disks and too little host memory, fewer stages are in it at once, which is slower.
    """
    solved = resolve_auto(request, measured=profile, is_draft=is_draft)
    if solved.recompute is Recompute.LINEAR and solved.plan.num_slices == 1:
        raise PlanError(
            "--recompute linear keeps attention's results of slices, and no sequence of this run is cut: use "
            "--recompute auto, or say how many --num_slices."
        )
    own_layer = layer(solved) if callable(layer) else layer
    if callable(layer) and own_layer is not None and own_layer != estimated_layer(solved):
        solved = replace(solved, measured_products=own_layer.saved_products)
    rates = profile_for(solved, profile)
    simulates = rates is not None and not (is_preliminary or is_draft)
    if given is not None:
        plan = given
        check_given_plan(solved, plan, layer=own_layer)
    else:
        plan = fit_by_simulation(solved, own_layer, rates) if rates and simulates else fit_plan(solved, layer=own_layer)
    if solved.sizes.has_disks and solved.num_state_buffers > FEWEST_STATE_BUFFERS and not fits_host(solved, plan):
        fewer = solve(
            replace(request, num_state_buffers=FEWEST_STATE_BUFFERS),
            layer=layer,
            profile=profile,
            given=given,
            is_preliminary=is_preliminary,
            is_draft=is_draft,
        )
        if fits_host(fewer.request, fewer.plan):
            return fewer
    prediction, steps = predict_step_time(plan, solved, rates) if rates and simulates else (None, None)
    gpus = estimate_gpu_memory_of_ranks(solved, plan, own_layer)
    return PlanResult(solved, plan, gpus, estimate_host_memory(solved, plan), own_layer, rates, prediction, steps)
