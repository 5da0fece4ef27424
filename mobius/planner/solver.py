"""The planner's answer to a request: `solve` puts numbers in place of auto and returns a plan that fits.

The answer includes the plan's bytes on every GPU and on the host, and its predicted step. The planner searches
everything that is left open: order, stages, microbatches, slices, rounds, and what stays on the GPU.

1. `candidates` lists all numbers that fit, each with a few uses of memory and a lower bound of its step
   (`predict_min_step_seconds`, a hundredth of a simulation's time).
2. One plan for each of these numbers is simulated, in the order of bounds, as long as it may be the fastest.
3. For the fastest numbers, all uses of memory get bounds and are simulated in the same way.
4. Among the simulated plans about as fast as the fastest, `pick` chooses the plan with the least host memory.

Products of some microbatches may be offloaded, so that a backward runs no matrix product again:

    forward      F0 F1 F2 F3 F4 ...      copying products to the host takes longer than computing them: for a layer
    to host      O1       O4    ...      of 7B, 1.3 times as long on an RTX 4090, 2.8 times on an H200
    backward                             products are prefetched during the previous backward

So often only some microbatches, spread over the round, offload their products, and other microbatches recompute them.
Depth first, copies in both directions run during forwards and backwards, and often all microbatches can offload.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import groupby, product
from typing import Any

from mobius.config.config import ActivationOffloading, Config, PipelineConfig, Recompute
from mobius.config.objective import OF_TOKENS
from mobius.errors import PlanError, ScheduleError
from mobius.limits import FEWEST_STATE_BUFFERS
from mobius.planner.fit import (
    MIN_SLICE_TOKENS,
    MemoryFit,
    check_given_plan,
    divisors,
    fit_plan,
    fits_gpus,
    fitting_plans,
    least_host_bytes,
    max_saving_attention,
    may_save_products,
)
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
from mobius.planner.rates import profile_for, reference_profile
from mobius.planner.request import PlanRequest
from mobius.planner.states_in_memory import most_host_bytes, with_states_in_memory
from mobius.planner.step_prediction import (
    StepTimePrediction,
    predict_min_step_seconds,
    predict_pass_seconds,
    predict_step_seconds,
    predict_step_time,
    without_garbage_collection,
)
from mobius.process.log import progress_bar
from mobius.schedule.partition import max_stages
from mobius.schedule.plan import Plan
from mobius.schedule.spec import ComputeOrder
from mobius.units import format_bytes

logger = logging.getLogger(__name__)

Log = Callable[..., None]
"""Function that takes a level, a text and its values, as `logger.log` does."""
MAX_CHUNKS_PER_RANK = 8
"""Usual maximum of microbatches per rank: more do not fill a breadth-first pipeline better, and each has a cost."""
MIN_MICROBATCH_TOKENS = 1024
"""Minimum tokens of a depth-first microbatch that auto chooses, unless a row has fewer: smaller microbatches do not
keep a GPU busy."""
SLICES_PER_RANK = 4
"""Number of microbatches per rank that slices of long sequences should give, so that fill and drain cost little."""
MIN_SLICED_SEQ_LENGTH = 16384
"""Minimum length, in tokens, of sequences that auto slices."""
NUM_BEST_GROUPS = 4
"""Maximum number of groups of plans in which the search continues. Plans of a group have equal numbers, later also
equally many resident stages."""
NUMBERS_OF_A_SIZE = 2
"""Maximum number of stage counts that are tried, if their largest stages have equally many layers."""
PRODUCT_PARTS = 8
"""Number of parts of a round; the products of 1, 2, ... parts are offloaded."""
MOST_ROUND_NUMBERS = 3
"""Maximum number of fitting round counts that are tried for one number of microbatches."""
MOST_SIMULATED = 20
"""Maximum number of plans that are simulated to choose among numbers, and again among uses of memory."""
ALIKE = 0.005
"""Share of a step by which a chosen plan may be slower than the fastest plan, if it saves at least this share of host
memory. Microbatches are chosen first, then the rest, so both choices together may cost 1 %."""
SAME = 0.001
"""Share of a step by which a plan may be slower if it takes less GPU memory and about the same host memory."""
MOST_IF_UNKNOWN = 2
"""Maximum host memory of a plan with offloaded products / of a plan without, if the host's memory is unknown."""


class Effort(StrEnum):
    """Parts of a search that are simulated; other parts use lower bounds of a step."""

    NOTHING = "nothing"
    """No simulation, for a draft, whose numbers are not used."""
    NUMBERS = "numbers"
    """Stages, microbatches, rounds and order, for a plan that is made again after measuring."""
    ALL = "all"
    """Numbers, then the use of memory, then the step itself."""


@dataclass(frozen=True)
class PlanResult:
    """Plan of a run on one rank; all GPUs are assumed to have as much memory as this rank's."""

    request: PlanRequest
    """Request with numbers in place of auto."""
    plan: Plan
    gpu_estimates: tuple[GpuMemoryEstimate, ...]
    """GPU memory of every rank."""
    host_estimate: HostMemoryEstimate
    layer: LayerBytes | None
    """Bytes of a layer and microbatch with which the plan was made; None: activations are saved only if options ask."""
    profile: Profile | None
    """Seconds and rates with which the plan was made; None if the device's speed is not known."""
    step_time_prediction: StepTimePrediction | None = None
    """None without a profile, and for a preliminary plan."""
    is_given: bool = False
    """Whether the plan comes from a file or a checkpoint, so that measurements do not change it."""

    @property
    def config(self) -> Config:
        """The configuration with numbers in place of auto."""
        return self.request.resolved_config

    @property
    def fits_host(self) -> bool:
        """Whether the host has enough memory; True if its memory is not known."""
        return self.request.host_bytes is None or self.host_estimate.total <= self.request.host_bytes

    @property
    def step_seconds(self) -> float:
        """Seconds of the predicted step; raises PlanError if no step is predicted."""
        if self.step_time_prediction is None:
            raise PlanError("no step is predicted: rates are known only for GPUs in two-byte formats (bf16, fp16).")
        return self.step_time_prediction.step_seconds

    @cached_property
    def pass_seconds(self) -> float | None:
        """Seconds of a forward pass over the rows of a step; None if no step is predicted."""
        if self.step_time_prediction is None or self.profile is None:
            return None
        return predict_pass_seconds(self.plan, self.request, self.profile)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all replicas together."""
        return self.request.all_tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Operations of the model without recomputation / operations that all GPUs can do in a step by data sheets.

        The model's operations are six per parameter and token (four for frozen parameters, none for the embedding's),
        plus causal attention within documents.
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
    effort: Effort = Effort.ALL,
) -> PlanResult:
    """Plan a run: choose every number that is auto, fit the plan into memory, and predict its step.

    `layer`: bytes of a layer, or a function that measures them for the chosen microbatch. `profile`: measured rates;
    without it, estimates are used if there are any. `given`: a plan that is only checked. Raises PlanError or
    ScheduleError with what to change, and DoesNotFitError, which `gpu_refusal` completes.

    With optimizer states on disks and little host memory, states of fewer stages are in memory at once, if only this
    fits or if this is faster: updates overlap less, but larger microbatches may use the memory. If all states fit
    into the memory that the user gave, the plan is the same as without disks.
    """

    def planned(asked: PlanRequest) -> tuple[PlanResult, list[tuple[Any, ...]]]:
        lines = list[tuple[Any, ...]]()
        found = _solve(asked, layer, profile, given, effort, log=lambda *line: lines.append(line))
        return found, lines

    tries = list[tuple[PlanResult, list[tuple[Any, ...]]]]()
    if given is None and (most_bytes := most_host_bytes(request)) > 0:
        found, lines = planned(request.with_pipeline(offload_states_to=None, gradients_on_disks=False))
        tries = [(_with_disks(found, request), lines)] if found.host_estimate.total <= most_bytes else []
    if not tries:
        most = request.num_state_buffers
        for number in range(most, (most if request.memory_rules.disks is None else FEWEST_STATE_BUFFERS) - 1, -1):
            tries.append(planned(replace(request, num_state_buffers=number)))
            if tries[-1][0].fits_host and (effort is Effort.NOTHING or _has_room_for_more(tries[-1][0])):
                break
    fitting = [each for each in tries if each[0].fits_host] or tries[:1]
    result, lines = fitting[0] if len(fitting) == 1 else min(fitting, key=_seconds)  # usually only one fits
    for line in lines:
        logger.log(*line)
    if effort is not Effort.ALL or result.profile is None:
        return result
    prediction = predict_step_time(result.plan, result.request, result.profile)
    return replace(result, step_time_prediction=prediction)


def _with_disks(found: PlanResult, request: PlanRequest) -> PlanResult:
    """Adapt a plan that was made without disks to a run with disks; all optimizer states fit and stay in memory."""
    pipeline = request.config.pipeline
    own = found.request.with_pipeline(
        offload_states_to=pipeline.offload_states_to, gradients_on_disks=pipeline.gradients_on_disks
    )
    plan = with_states_in_memory(own, found.plan)
    return replace(found, request=own, plan=plan, host_estimate=estimate_host_memory(own, plan))


def _has_room_for_more(result: PlanResult) -> bool:
    """Whether the host memory that is free with all states on disks is at least as large as the buffers for states.

    Fewer buffers would then gain almost nothing.
    """
    most = result.request.host_bytes
    need = estimate_host_memory(result.request, replace(result.plan, states_in_memory=frozenset()))
    return most is None or most - need.total >= need.state_buffers + need.load_buffers


def _seconds(tried: tuple[PlanResult, object]) -> float:
    """Seconds of a simulated step; 0 if the device's speed is not known."""
    result, _ = tried
    return predict_step_seconds(result.plan, result.request, result.profile) if result.profile else 0.0


def _solve(
    request: PlanRequest,
    layer: LayerBytes | Callable[[PlanRequest], LayerBytes | None] | None,
    profile: Profile | None,
    given: Plan | None,
    effort: Effort,
    log: Log,
) -> PlanResult:
    """Plan with the number of state buffers in `request`, without a prediction; other arguments as in `solve`."""
    solved = resolve_auto(request, measured=profile, effort=effort, log=log)
    if solved.recompute is Recompute.LINEAR and solved.plan.num_slices == 1:
        raise PlanError(
            "--recompute linear works only with slices, but this run does not slice its sequences: use --recompute "
            "auto, or set --num_slices to 2 or more."
        )
    own_layer = layer(solved) if callable(layer) else layer
    if callable(layer) and own_layer is not None and own_layer != estimated_layer(solved):
        solved = replace(solved, measured_products=own_layer.saved_products)
    rates = profile_for(solved, profile)
    if given is not None:
        plan = given
        check_given_plan(solved, plan, layer=own_layer)
    elif rates is not None and effort is Effort.ALL:
        plan = fit_by_simulation(solved, own_layer, rates)
    else:
        plan = fit_plan(solved, layer=own_layer)
    plan = with_states_in_memory(solved, plan)
    gpus = estimate_gpu_memory_of_ranks(solved, plan, own_layer)
    host = estimate_host_memory(solved, plan)
    return PlanResult(solved, plan, gpus, host, own_layer, rates, is_given=given is not None)


@dataclass(frozen=True)
class TimedPlan:
    """A plan, and the seconds of its step; these are a lower bound until the plan is simulated."""

    request: PlanRequest
    plan: Plan
    profile: Profile
    seconds: float

    @classmethod
    def bounded(cls, request: PlanRequest, plan: Plan, profile: Profile) -> TimedPlan:
        """Return the plan with a lower bound of its step."""
        return cls(request, plan, profile, predict_min_step_seconds(plan, request, profile))

    def simulated(self) -> TimedPlan:
        """Return the plan with the seconds of a simulated step."""
        return replace(self, seconds=predict_step_seconds(self.plan, self.request, self.profile))

    @cached_property
    def fits_host(self) -> bool:
        """Whether the host has enough memory; True if its memory is not known."""
        return self.request.host_bytes is None or self.host_bytes <= self.request.host_bytes

    @cached_property
    def host_bytes(self) -> int:
        """Host memory of all ranks."""
        return estimate_host_memory(self.request, self.plan).total

    @cached_property
    def gpu_bytes(self) -> int:
        """GPU memory of all ranks."""
        gpus = estimate_gpu_memory_of_ranks(self.request, self.plan, estimated_layer(self.request))
        return sum(each.total for each in gpus)

    @property
    def numbers(self) -> tuple[object, ...]:
        """Numbers that are chosen before the use of memory, and the number of microbatches that offload products."""
        plan = self.plan
        counts = plan.num_stages, plan.num_microbatches, plan.num_slices, plan.num_rounds
        return plan.order, *counts, plan.num_offloaded_microbatches


def pick(candidates: Iterable[TimedPlan]) -> TimedPlan:
    """Simulate bounded candidates; among those about as fast as the fastest, return the one with the least memory.

    Candidates that do not fit the host count only if no candidate fits.
    """
    simulated = simulate_best(best_groups(candidates, lambda each: (each.numbers, len(each.plan.resident))))
    fastest = min(each.seconds for each in simulated)
    alike = [each for each in simulated if each.seconds <= fastest * (1 + ALIKE)]
    least = min(each.host_bytes for each in alike)
    alike = [each for each in alike if each.host_bytes <= least * (1 + ALIKE)]
    limit = min(each.seconds for each in alike) * (1 + SAME)
    return min((each for each in alike if each.seconds <= limit), key=lambda each: (each.gpu_bytes, each.seconds))


def best_groups(candidates: Iterable[TimedPlan], key: Callable[[TimedPlan], object]) -> list[TimedPlan]:
    """Return the candidates of the best groups; to compare groups, simulate each group's candidate of lowest bound."""
    groups = dict[object, list[TimedPlan]]()
    for each in sorted(candidates, key=lambda each: each.seconds):
        groups.setdefault(key(each), []).append(each)
    simulated = simulate_best(group[0] for group in groups.values())
    best = sorted(simulated, key=lambda each: each.seconds)[:NUM_BEST_GROUPS]
    return [each for one in best for each in groups[key(one)]]


def simulate_best(candidates: Iterable[TimedPlan]) -> list[TimedPlan]:
    """Simulate bounded candidates that may be chosen, in ascending order of bounds.

    A candidate whose bound is above the fastest step is simulated only if it takes less host memory than all similarly
    fast candidates before it.
    """
    listed = list(candidates)
    listed = [each for each in listed if each.fits_host] or listed
    simulated, fastest, least = list[TimedPlan](), math.inf, math.inf
    with progress_bar("simulating", " steps") as bar:
        for each in sorted(listed, key=lambda each: each.seconds):
            if each.seconds > fastest * (1 + ALIKE) or len(simulated) == MOST_SIMULATED:
                break
            if each.seconds < fastest or each.host_bytes * (1 + ALIKE) < least:
                simulated.append(each.simulated())
                fastest = min(fastest, simulated[-1].seconds)
                alike = [other.host_bytes for other in simulated if other.seconds <= fastest * (1 + ALIKE)]
                least = min(alike)
                bar.update()
    return simulated


def resolve_auto(
    request: PlanRequest, *, measured: Profile | None = None, effort: Effort = Effort.ALL, log: Log = logger.log
) -> PlanRequest:
    """Put numbers in place of auto, and `log` them; a request without auto is returned unchanged.

    `measured` is a profile for the request's microbatches; without it, estimates are used. Without an estimate (for a
    CPU, an unknown GPU or fp32) the numbers are the defaults, or the nearest possible numbers. The choice depends on
    the total memory of the GPU instead of its free memory, because every rank must choose the same. Raises
    GpuMemoryError if nothing fits.
    """
    is_unknown = request.machine.on_cpu or (request.gpu_spec is None and measured is None)
    if is_unknown:
        request = request if request.candidate.is_known else _usual_numbers(request, effort=effort, log=log)
        request = request.trying(order=request.candidate.order or ComputeOrder.BREADTH_FIRST)
    if request.candidate.is_complete:
        return request
    if is_unknown:
        return _with_numbers(request, candidates(request.on_empty_gpu)[0].plan)
    best = choose_candidate(request.on_empty_gpu, measured=measured, effort=effort, log=log)
    return _with_numbers(request, best.plan)


def _with_numbers(request: PlanRequest, plan: Plan) -> PlanRequest:
    """Return `request` with the numbers of `plan` on which all ranks must agree."""
    return request.trying(
        num_stages=plan.num_stages,
        num_chunks=plan.num_chunks,
        num_slices=plan.num_slices,
        num_rounds=plan.num_rounds,
        order=plan.order,
    )


def _usual_numbers(request: PlanRequest, *, effort: Effort, log: Log) -> PlanRequest:
    """Return `request` with default numbers; an impossible default is replaced by the largest possible lower number."""
    usual, num_ranks = PipelineConfig(), request.machine.num_ranks
    asked = request.candidate
    stages, chunks, rounds = asked.num_stages, asked.num_chunks, asked.num_rounds or 1
    if stages is None:
        most = min(max(usual.num_stages or 0, num_ranks), request.shape.num_layers)
        stages = max(num_ranks, most // num_ranks * num_ranks)
    if chunks is None:
        most = max(usual.num_microbatches, num_ranks)
        chunks = max((n for n in divisors(request.rows) if n <= most and n % rounds == 0), default=rounds)
    text = "chosen without an estimate for this device: --num_stages %d --num_chunks %d"
    log(logging.DEBUG if effort is Effort.NOTHING else _level(request), text, stages, chunks)
    return request.trying(num_stages=stages, num_chunks=chunks)


@without_garbage_collection()
def choose_candidate(
    request: PlanRequest, *, measured: Profile | None = None, effort: Effort = Effort.ALL, log: Log = logger.log
) -> TimedPlan:
    """Return the best candidate that fits the host; a draft compares bounds. Numbers that are not None stay as given.

    The best candidate is logged, and at level DEBUG also the best candidate of the other order. After the number of
    microbatches is chosen, the search is repeated with only this number, as in a run that measured. Raises
    GpuMemoryError if nothing fits, with the reason of the last try, and PlanError if nothing can be tried.
    """
    given, searched = request, None
    while request != searched:
        searched, found = request, candidates(request, measured)
        if effort is Effort.NOTHING:
            return min(found, key=lambda each: each.seconds)
        groups = best_groups(found, lambda each: each.numbers)
        asked = dict.fromkeys(_with_numbers(request, each.plan) for each in groups)
        best = pick(plan for each in asked for plan in _bounded(each, measured, is_quick=False))
        request = request.trying(num_chunks=best.plan.num_chunks, num_slices=best.plan.num_slices)
    _log_chosen(best, given, log)
    others = [each for each in (*groups, *found) if each.plan.order is not best.plan.order]
    if others:
        other = others[0].simulated()
        order = "" if other.plan.is_depth_first else ", breadth-first"
        plan = f"--num_stages {other.plan.num_stages}, {other.plan.describe_microbatches()}{order}"
        more = 100 * (other.seconds / best.seconds - 1)
        text = "next best: %s, %+.1f %% per step, %s of host memory"
        log(logging.DEBUG, text, plan, more, format_bytes(other.host_bytes))
    return best


def _log_chosen(best: TimedPlan, given: PlanRequest, log: Log) -> None:
    """Log the numbers of the best candidate, unless the user gave both stages and microbatches."""
    plan = best.plan
    if not given.candidate.is_known:
        log(
            _level(given),
            "chosen: --num_stages %d --num_chunks %d --num_rounds %d --compute_order %s, layers per stage %s; %.3g s "
            "per step, %s",
            plan.num_stages,
            plan.num_chunks,
            plan.num_rounds,
            plan.order.value,
            ", ".join(f"{len([*own])} x {number}" for number, own in groupby(len(cut.layers) for cut in plan.cuts)),
            best.seconds,
            best.profile.describe(),
        )


def _level(request: PlanRequest) -> int:
    """Level of log lines about chosen numbers: DEBUG in a dry run, whose answer also shows these numbers."""
    return logging.DEBUG if request.config.planning.dry_run else logging.INFO


def candidates(request: PlanRequest, measured: Profile | None = None) -> list[TimedPlan]:
    """Return bounded plans for all numbers that fit GPUs and host, each with few uses of memory.

    If no plan fits the host, returns the plan that takes the least host memory. Unusual numbers of microbatches, whose
    steps take long to simulate, are tried only if no usual numbers fit. Raises GpuMemoryError if nothing fits the GPUs,
    with the reason of the last try.
    """
    found = list[TimedPlan]()
    with progress_bar("planning", " plans") as bar:
        for asked in _numbers(request):
            if request.candidate.num_chunks is None and not _is_usual(asked) and any(each.fits_host for each in found):
                continue
            for slices in _slice_numbers(asked):
                own = _in_rounds(asked.trying(num_slices=slices), measured)
                found += own
                bar.update()
                if any(_is_sliced_enough(each) for each in own):
                    break
    if not found:  # a plan may still fit without the margin
        last = asked.trying(num_slices=slices, num_rounds=max(round_numbers(asked), default=1))
        return _bounded(last, measured, is_quick=True)
    return [each for each in found if each.fits_host] or [min(found, key=lambda each: each.host_bytes)]


def _in_rounds(asked: PlanRequest, measured: Profile | None) -> list[TimedPlan]:
    """Return bounded plans for the first round counts that fit, and for earlier round counts that fit only the GPUs."""
    found, num_fitting = list[TimedPlan](), 0
    for rounds in round_numbers(asked):
        tried = asked.trying(num_rounds=rounds)
        with suppress(PlanError, ScheduleError):
            if num_fitting < MOST_ROUND_NUMBERS and fits_gpus(tried, estimated_layer(tried), with_margin=True):
                found += _bounded(tried, measured, is_quick=True)
                num_fitting += found[-1].fits_host
    return found


def _numbers(request: PlanRequest) -> Iterator[PlanRequest]:
    """Yield `request` with each combination of microbatches, stages and order; the last one needs least GPU memory.

    Raises PlanError if no numbers are possible.
    """
    stage_numbers, chunk_numbers = _stage_numbers(request), _chunk_numbers(request)
    if not stage_numbers or not chunk_numbers:
        raise PlanError(
            f"no number of stages and chunks is possible: {request.shape.num_layers} layers on "
            f"{request.machine.num_ranks} ranks, --batch_size {request.config.pipeline.batch_size}."
        )
    orders = [ComputeOrder.DEPTH_FIRST, ComputeOrder.BREADTH_FIRST]
    if request.candidate.order is not None:
        orders = [request.candidate.order]
    for chunks, stages, order in product(chunk_numbers, stage_numbers, orders):
        yield request.trying(num_stages=stages, num_chunks=chunks, order=order)


def least_host_need(request: PlanRequest) -> float:
    """Return the least estimated host memory of all plans; infinite if none fits the GPUs.

    Returns 0 if stages or microbatches are auto.
    """
    if not request.candidate.is_known:
        return 0.0
    least = math.inf
    for asked in _numbers(request):
        for slices, rounds in product(_slice_numbers(asked), round_numbers(asked)):
            with suppress(PlanError, ScheduleError):
                tried = asked.trying(num_slices=slices, num_rounds=rounds)
                tried.plan.check_numbers()
                least = min(least, least_host_bytes(tried))
    return least


def _stage_numbers(request: PlanRequest) -> Sequence[int]:
    """Numbers of stages to try: multiples of the number of ranks, up to one stage per layer, embedding and head.

    Of the numbers that give equally large largest stages, only the two smallest are tried: the second makes the stages
    with embedding and head smaller.
    """
    if request.candidate.num_stages is not None:
        return (request.candidate.num_stages,)
    num_ranks, num_layers = request.machine.num_ranks, request.shape.num_layers
    by_size: dict[int, list[int]] = {}
    for number in range(num_ranks, max_stages(num_layers, num_ranks) + 1, num_ranks):
        by_size.setdefault(-(-num_layers // number), []).append(number)
    return [number for numbers in by_size.values() for number in numbers[:NUMBERS_OF_A_SIZE]]


def _chunk_numbers(request: PlanRequest) -> list[int]:
    """Divisors of the batch that are at least half the number of ranks; fewer microbatches leave most ranks idle."""
    if request.candidate.num_chunks is not None:
        return [request.candidate.num_chunks]
    num_ranks, rounds = request.machine.num_ranks, request.candidate.num_rounds or 1
    numbers = [number for number in divisors(request.rows) if number % rounds == 0]
    return [number for number in numbers if 2 * number >= num_ranks] or numbers[-1:]


def _is_usual(request: PlanRequest) -> bool:
    """Whether microbatches are usual: few enough in breadth-first order, large enough in depth-first order."""
    num_ranks, rounds = request.machine.num_ranks, request.candidate.num_rounds or 1
    if request.candidate.order is ComputeOrder.DEPTH_FIRST:
        return request.microbatch_rows == 1 or request.microbatch_tokens >= MIN_MICROBATCH_TOKENS
    return request.num_chunks <= rounds * MAX_CHUNKS_PER_RANK * num_ranks


def _slice_numbers(request: PlanRequest) -> list[int]:
    """Return the slice counts to try: 1 for short or unsliceable sequences, else counts that fill all ranks."""
    if request.candidate.num_slices is not None:
        return [request.candidate.num_slices]
    length, is_depth_first = request.config.data.seq_length, request.candidate.order is ComputeOrder.DEPTH_FIRST
    is_whole = is_depth_first or request.recompute.saves_activations or not request.shape.is_sliceable
    is_whole = is_whole or request.config.objective.objective not in OF_TOKENS
    is_whole = is_whole or request.config.evaluation.save_scores
    if is_whole or length < MIN_SLICED_SEQ_LENGTH:
        return [1]
    numbers = [number for number in range(1, length // MIN_SLICE_TOKENS + 1) if length % number == 0]
    in_a_round = request.num_chunks // (request.candidate.num_rounds or 1)
    wanted = SLICES_PER_RANK * request.machine.num_ranks
    return [number for number in numbers if number * in_a_round >= wanted] or numbers[-1:]


def _is_sliced_enough(each: TimedPlan) -> bool:
    """Whether to stop adding slices: all ranks are busy, and attention's results are saved wherever allowed."""
    plan, may_save = each.plan, each.request.recompute is Recompute.AUTO and each.plan.num_slices > 1
    fills = plan.microbatches_per_round >= SLICES_PER_RANK * plan.num_ranks
    return fills and each.fits_host and (not may_save or len(plan.saved_attention_stages) == plan.num_stages)


def round_numbers(request: PlanRequest) -> list[int]:
    """Return the round counts to try, in this order, until enough of them fit.

    The breadth-first order tries all counts, the lowest first, because each round loads weights twice. Depth first
    tries the highest count first, because then the fewest microbatches wait; larger rounds hide more of the updates.
    """
    if request.candidate.num_rounds is not None:
        return [request.candidate.num_rounds]
    chunks = request.num_chunks
    if request.candidate.order is not ComputeOrder.DEPTH_FIRST:
        return divisors(chunks)
    if request.plan.stages_per_rank == 1:  # then rounds change nothing
        return [max(1, chunks // request.machine.num_ranks)]
    return [chunks // size for size in divisors(chunks) if size >= request.machine.num_ranks]


@lru_cache(maxsize=1024)  # cached: the search is repeated with the chosen microbatches
def _bounded(request: PlanRequest, measured: Profile | None, *, is_quick: bool) -> list[TimedPlan]:
    """Return bounded plans for given numbers, by estimated bytes; `is_quick` tries few uses of memory."""
    profile = profile_for(request, measured) or reference_profile(request)
    return bounded_plans(request, estimated_layer(request), profile, is_quick=is_quick)


@lru_cache(maxsize=16)  # a plan chosen for auto is later requested by its numbers
def bounded_plans(
    request: PlanRequest, layer: LayerBytes | None, profile: Profile, *, is_quick: bool = False
) -> list[TimedPlan]:
    """Return a bounded plan for each use of memory with given numbers; arguments and errors as in `fit_plan`.

    If every plan needs more memory than the host has, returns plans that do not fit the host.
    """
    found = [TimedPlan.bounded(request, plan, profile) for plan in fitting_plans(request, layer, is_quick=is_quick)]
    most = request.host_bytes
    if most is None:
        most = MOST_IF_UNKNOWN * min(found, key=lambda each: each.seconds).host_bytes
    for asked in _recomputing_less(request, layer):
        plans = [TimedPlan.bounded(asked, plan, profile) for plan in MemoryFit(asked, layer).plans(is_quick=is_quick)]
        plans = [each for each in plans if each.host_bytes <= most]
        found += plans
        if is_quick and plans:
            break
    return [each for each in found if each.fits_host] or found


def _recomputing_less(request: PlanRequest, layer: LayerBytes | None) -> Iterator[PlanRequest]:
    """Yield requests with equal numbers and less recomputation, if options allow it; the least recomputation first.

    With slices, as many stages as fit save attention's results. With whole sequences, stages that do not save their
    activations offload them, and offload also the products of all or some microbatches.
    """
    if request.recompute is not Recompute.AUTO or request.gpu_bytes is None:
        return
    if request.num_slices > 1:
        is_open = request.candidate.num_saving_attention is None
        if is_open and (most := max_saving_attention(request, layer=layer)):
            yield request.trying(num_saving_attention=most)
        return
    is_known = layer is not None and layer.saved_products is not None
    is_off = request.config.pipeline.activation_offloading is ActivationOffloading.OFF
    if is_off or not is_known or not may_save_products(request) or request.candidate.num_offloaded_microbatches:
        return
    size = request.plan.microbatches_per_round
    offloading = request.with_pipeline(activation_offloading=ActivationOffloading.ON)
    for number in sorted({-(-size * part // PRODUCT_PARTS) for part in range(1, PRODUCT_PARTS + 1)}, reverse=True):
        yield offloading.trying(num_offloaded_microbatches=number)


@lru_cache(maxsize=8)  # a plan chosen for auto is later requested by its numbers
def fit_by_simulation(request: PlanRequest, layer: LayerBytes | None, profile: Profile) -> Plan:
    """Return the best plan for given numbers, by simulation; `layer` and errors as in `fit_plan`."""
    return pick(bounded_plans(request, layer, profile)).plan
