"""The planner's answer to a request: numbers in the place of auto, a plan that fits, its bytes and its predicted step.

The number of stages and microbatches is chosen by simulating what fits.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from mobius.config.config import PipelineConfig, Recompute
from mobius.errors import GpuMemoryError, PlanError
from mobius.log import progress_bar
from mobius.planner.fit import (
    MIN_SLICE_TOKENS,
    check_given_plan,
    fit_plan,
    fits_gpus,
    least_host_bytes,
    max_saving_attention,
    numbers_of_rounds,
)
from mobius.planner.gpu_specs import GIGA, TERA, LayerEstimate, estimate_profile, memory_rate, with_attention_length
from mobius.planner.memory_estimates import (
    GpuMemoryEstimate,
    HostMemoryEstimate,
    estimate_gpu_memory_of_ranks,
    estimate_host_memory,
    estimated_layer,
)
from mobius.planner.memory_policy import closed_form_score, fits_host, policy_by_score
from mobius.planner.peak_memory import LayerBytes
from mobius.planner.profile import Profile, with_frozen
from mobius.planner.recompute_search import fit_by_simulation
from mobius.planner.replica_traffic import ReplicaRates, rates_of_nodes
from mobius.planner.request import PlanRequest
from mobius.planner.step_prediction import (
    SimulatedSteps,
    StepTimePrediction,
    predict_min_step_seconds,
    predict_step_seconds,
    predict_step_time,
    without_garbage_collection,
)
from mobius.schedule.partition import max_stages
from mobius.schedule.plan import Plan

logger = logging.getLogger(__name__)

MAX_CHUNKS_PER_RANK = 4
"""More microbatches than this many times the ranks fill the pipeline no better; each has its own costs."""
SLICES_PER_RANK = 4
"""Microbatches for each rank that slices of long sequences are to give, so that fill and drain cost little."""
MIN_SLICED_SEQ_LENGTH = 16384
"""Tokens of sequences that are cut by themselves."""
BOUNDS_DIFFER = 1.5
"""Times the bound of another from which on a setting counts as slower, unsimulated: bounds are up to 20 % short."""
NUM_FITTED_WELL = 3
"""How many of the best settings, of different numbers of stages, have their use of memory chosen by simulation."""
NUMBERS_OF_A_SIZE = 2
"""Numbers of stages that are tried of those whose largest stages have equally many layers."""
NOTICEABLE = 0.005
"""Share of a step that more stages or chunks must gain."""


@dataclass(frozen=True)
class PlanResult:
    """A run as one rank knows it, all GPUs being supposed to have as much memory as its own."""

    request: PlanRequest
    """With numbers in the place of auto."""
    plan: Plan
    gpu_estimates: tuple[GpuMemoryEstimate, ...]
    """GPU memory of every rank."""
    host_estimate: HostMemoryEstimate
    layer: LayerBytes | None
    """Bytes of a layer and a microbatch that the plan goes by; None: nothing is kept but what is asked for."""
    profile: Profile | None
    """Seconds and rates that the plan goes by; None where nothing is known of the device's speed."""
    step_time_prediction: StepTimePrediction | None
    """None without a profile, and for a plan that is drawn again before it is run."""
    simulated_steps: SimulatedSteps | None

    @property
    def step_seconds(self) -> float:
        """The predicted step; raises PlanError where there is none."""
        if self.simulated_steps is None:
            raise PlanError("no step is predicted: rates are known of GPUs in formats of two bytes (bf16, fp16) only.")
        return self.simulated_steps.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all replicas."""
        return self.request.all_tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Operations of the model without recompute, over what the cards' data sheets give in a step.

        Six for each parameter but the embedding's and per token, four for frozen ones, and those of causal attention
        within documents.
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
    layer: LayerBytes | None = None,
    profile: Profile | None = None,
    given: Plan | None = None,
    own_bytes: int = 0,
    is_preliminary: bool = False,
) -> PlanResult:
    """Plan a run whose numbers of stages and chunks are settled.

    `layer` and `profile` are what was measured; without a profile, estimates count where there are any. With `given`
    nothing is chosen, only checked. What is preliminary goes by a closed form: the simulation comes with what is
    measured. `own_bytes` is as in `estimate_host_memory`. Raises PlanError or GpuMemoryError, each with what to change.
    """
    if request.recompute is Recompute.LINEAR and request.plan.num_slices == 1:
        raise PlanError(
            "--recompute linear keeps attention's results of slices, and no sequence of this run is cut: use "
            "--recompute auto, or say how many --num_slices."
        )
    profile = estimated_profile(request) if profile is None else _with_replicas(_checked(profile, request), request)
    simulates = profile is not None and not is_preliminary
    if given is not None:
        plan = given
        check_given_plan(request, plan, layer=layer)
    else:
        plan = fit_by_simulation(request, layer, profile) if profile and simulates else fit_plan(request, layer=layer)
    told, prediction = predict_step_time(plan, request, profile) if profile and simulates else (None, None)
    needs, host = (
        estimate_gpu_memory_of_ranks(request, plan, layer),
        estimate_host_memory(request, plan, own_bytes=own_bytes),
    )
    return PlanResult(request, plan, needs, host, layer, profile, told, prediction)


def estimated_profile(request: PlanRequest) -> Profile | None:
    """The estimate for a pipeline on the machine of `request`; None where there is none.

    Pipelines that share a machine share its host memory's bandwidth.
    """
    machine, gpu_spec = request.machine, request.gpu_spec
    if gpu_spec is None:
        return None
    if not machine.has_peer_copies:
        gpu_spec = replace(gpu_spec, has_peer_copies=False, nvlink=0.0)
    profile = estimate_profile(
        gpu_spec,
        request.shape,
        microbatch_tokens=request.microbatch_tokens,
        seq_length=request.config.data.seq_length,
        num_ranks=machine.num_ranks,
        pcie=machine.pcie,
        host=replace(machine.host, bandwidth=machine.host.bandwidth / machine.replicas_per_node),
        compiled=request.compiles,
        attention_length=None if request.packed is None else request.attention_length,
    )
    return replace(with_frozen(profile, request.shape, memory_rate(gpu_spec)), replicas=replica_rates(request, profile))


def replica_rates(request: PlanRequest, profile: Profile) -> ReplicaRates | None:
    """The estimate between replicas: over the nodes' links, or within a node as messages go; None with one pipeline."""
    machine, messages = request.machine, profile.messages
    if machine.num_replicas == 1:
        return None
    if machine.num_nodes == 1:
        return ReplicaRates(machine.num_ranks * messages.bandwidth, messages.bandwidth, messages.is_through_host)
    return rates_of_nodes(machine.node_link * GIGA, num_replicas=machine.num_replicas, num_nodes=machine.num_nodes)


def _with_replicas(measured: Profile, request: PlanRequest) -> Profile:
    """A profile of one pipeline with an estimate of the link between replicas, if that was not measured."""
    return measured if measured.replicas is not None else replace(measured, replicas=replica_rates(request, measured))


def _checked(measured: Profile, request: PlanRequest) -> Profile:
    given = (measured.num_ranks, measured.microbatch_tokens, len(measured.kind_of_layer))
    wanted = (request.machine.num_ranks, request.microbatch_tokens, request.shape.num_layers)
    if given != wanted:
        parts = "ranks, tokens of a microbatch and layers"
        raise PlanError(f"the profile is of another run: its {parts} are {given}, {wanted} are asked for.")
    length = request.attention_length
    own = measured.attention_length or min(length, request.slice_length)  # documents are measured as they are
    if request.plan.num_slices == 1 or measured.attention_length == length:
        return measured
    estimate = None
    if request.gpu_spec is not None:
        is_packed = request.packed is not None
        estimate = LayerEstimate(request.gpu_spec, request.shape, is_packed=is_packed, compiled=request.compiles)
    return with_attention_length(measured, request.shape, measured_length=own, length=length, estimate=estimate)


@dataclass(frozen=True)
class Candidate:
    """Numbers of stages and chunks that were simulated."""

    request: PlanRequest
    plan: Plan
    profile: Profile
    seconds: float
    """Seconds of a step; a lower bound of them until it is simulated."""


def resolve_auto(request: PlanRequest, *, measured: Profile | None = None) -> PlanRequest:
    """Put numbers in the place of auto, and tell which; without auto, nothing changes.

    By `measured` if there is a profile, whose microbatches the request must then have, else by an estimate. Where there
    is none (a CPU, an unknown GPU, fp32) the numbers are the defaults, or the nearest that are possible. They go by the
    card's memory, not by what is free of it: every rank asks for itself, and all must find the same. Raises
    GpuMemoryError if no setting fits.
    """
    if request.num_stages is not None and request.num_chunks is not None:
        return _with_rounds(_with_slices(request), measured)
    if request.machine.on_cpu or (request.gpu_spec is None and measured is None):
        return _with_rounds(_with_slices(_usual_numbers(request)), measured)
    best = choose_candidate(replace(request, machine=replace(request.machine, free_bytes=None)), measured=measured)
    logger.info(
        "chosen: --num_stages %d --num_chunks %d --num_rounds %d, layers per stage %s; %.3g s per step by %s",
        best.plan.num_stages,
        best.plan.num_chunks,
        best.plan.accumulation_rounds,
        " ".join(str(len(cut.layers)) for cut in best.plan.cuts),
        best.seconds,
        best.profile.describe(),
    )
    plan = best.plan
    sliced = _with_slices(replace(request, num_stages=plan.num_stages, num_chunks=plan.num_chunks))
    rounds = plan.accumulation_rounds if sliced.num_slices == plan.num_slices else None
    return _with_rounds(replace(sliced, accumulation_rounds=request.accumulation_rounds or rounds), measured)


def _with_slices(request: PlanRequest, *, is_quick: bool = False) -> PlanRequest:
    """The request with a number of slices: whole sequences, or the fewest of long ones that fit and fill all ranks.

    More where attention's results then fit, of one stage of each rank or of all, if that is faster by an estimate,
    which is not looked at if `is_quick`. It goes by the card's memory, as `resolve_auto` says.
    """
    if request.num_slices is not None:
        return request
    if (
        request.config.data.seq_length < MIN_SLICED_SEQ_LENGTH
        or request.recompute.saves_activations
        or not request.shape.is_sliceable
    ):
        return replace(request, num_slices=1)
    number = _fewest_slices(request)
    has_choice = not is_quick and number > 1 and request.recompute is Recompute.AUTO
    if not has_choice or request.gpu_spec is None or request.machine.on_cpu:
        return replace(request, num_slices=number)
    like_all = replace(request, machine=replace(request.machine, free_bytes=None))
    keeping = [replace(request, num_saving_attention=kept) for kept in (1, request.plan.stages_per_rank)]
    tried = list[Candidate]()
    for each in sorted({number, *map(_fewest_slices, keeping)}):
        with suppress(GpuMemoryError):
            tried.append(_bounded(_keeping_attention(replace(like_all, num_slices=each)), None))
    fitting = _that_fit_host(tried)
    return replace(request, num_slices=_fastest(fitting).plan.num_slices if fitting else number)


def _keeping_attention(request: PlanRequest) -> PlanRequest:
    """A request of slices, with as many stages that keep attention's results as fit, by estimates."""
    request = _with_rounds(request, None)
    profile, layer = estimated_profile(request), estimated_layer(request)
    most = max_saving_attention(request, layer=layer, policy=policy_by_score(closed_form_score(request, profile)))
    return replace(request, num_saving_attention=most)


def _fewest_slices(request: PlanRequest) -> int:
    """The fewest slices that fit and fill all ranks, in the rounds that would be taken with them.

    Where no number does both, the one that fits and fills most.
    """
    length, chunks = request.config.data.seq_length, request.num_chunks
    assert chunks is not None
    wanted = SLICES_PER_RANK * request.machine.num_ranks
    like_all = replace(request, machine=replace(request.machine, free_bytes=None))
    numbers = [number for number in range(1, length // MIN_SLICE_TOKENS + 1) if length % number == 0]
    enough = [number for number in numbers if number * chunks >= wanted] or numbers[-1:]
    in_a_round: dict[int, float] = {}
    for number in enough:
        rounds = numbers_of_rounds(replace(like_all, num_slices=number))
        if request.accumulation_rounds is not None:
            rounds = (
                [request.accumulation_rounds] if any(each <= request.accumulation_rounds for each in rounds) else []
            )
        if rounds:
            in_a_round[number] = min(wanted, number * chunks / rounds[0])
        if in_a_round.get(number) == wanted:
            break
    return max(in_a_round, key=lambda number: (in_a_round[number], -number), default=enough[0])


def _with_rounds(request: PlanRequest, measured: Profile | None) -> PlanRequest:
    """The request with a number of rounds, which goes by the card's memory as `resolve_auto` says.

    Where fewer rounds fit if activations wait on the host, the faster of both by prediction; without rates, the more.
    Where none of them leaves GPUs enough room for stages that the host cannot hold, the fewest that do, if any.
    """
    if request.accumulation_rounds is not None:
        return request
    like_all = replace(request, machine=replace(request.machine, free_bytes=None))
    num_chunks = like_all.plan.num_chunks
    numbers = numbers_of_rounds(like_all) or [num_chunks]
    fewest = [replace(like_all, accumulation_rounds=number) for number in numbers]
    if like_all.gpu_bytes is None or (len(numbers) == 1 and fits_host(fewest[0], fewest[0].plan)):
        return replace(request, accumulation_rounds=numbers[-1])
    fitting = [each for each in fewest if _fits(each)]
    if not fitting:
        divisors = [number for number in range(numbers[-1] + 1, num_chunks + 1) if num_chunks % number == 0]
        more = [replace(like_all, accumulation_rounds=number) for number in divisors]
        fitting = [each for each in more if _fits(each)][:1]
        fitting = fitting or [min((*fewest, *more), key=least_host_bytes)]  # what is refused tells the least there is
    best = fitting[-1]
    if len(fitting) > 1 and (request.gpu_spec is not None or measured is not None):
        bounded = sorted((_bounded(each, measured) for each in fitting), key=lambda candidate: candidate.seconds)
        is_clear = bounded[1].seconds > BOUNDS_DIFFER * bounded[0].seconds
        best = bounded[0].request if is_clear else _fastest(bounded).request
    return replace(request, accumulation_rounds=best.accumulation_rounds)


def _fits(request: PlanRequest) -> bool:
    """Whether some plan of these numbers fits GPUs and host, by estimated bytes."""
    if request.host_bytes is None:
        return fits_gpus(request, estimated_layer(request))
    return least_host_bytes(request) <= request.host_bytes


def _that_fit_host(settings: Iterable[Candidate]) -> list[Candidate]:
    return [setting for setting in settings if fits_host(setting.request, setting.plan)]


def _usual_numbers(request: PlanRequest) -> PlanRequest:
    """The defaults' numbers where they are possible, else the largest below them that are."""
    usual, num_ranks = PipelineConfig(), request.machine.num_ranks
    stages, chunks = request.num_stages, request.num_chunks
    if stages is None:
        most = min(max(usual.stages, num_ranks), request.shape.num_layers)
        stages = max(num_ranks, most // num_ranks * num_ranks)
    if chunks is None:
        most = max(usual.num_microbatches, num_ranks)
        rounds = request.accumulation_rounds or 1
        divisors = [n for n in range(1, most + 1) if request.rows % n == 0]
        chunks = max((n for n in divisors if n % rounds == 0), default=rounds)
    logger.info("chosen without an estimate for this device: --num_stages %d --num_chunks %d", stages, chunks)
    return replace(request, num_stages=stages, num_chunks=chunks)


@without_garbage_collection()
def choose_candidate(request: PlanRequest, *, measured: Profile | None = None) -> Candidate:
    """The fastest setting by prediction of those that fit the host; numbers that are not None stay as given.

    Between settings that are alike within `NOTICEABLE`, the one with fewer stages and chunks is taken. Raises
    GpuMemoryError if nothing fits, with the reason of the last try, and PlanError if nothing can be tried. Where no
    usual numbers fit the host, all numbers of chunks and rounds are searched for some that do.
    """
    tried = list[Candidate]()
    if quick := quick_candidates(request, measured=measured):
        with progress_bar("planning", " plans") as bar:
            for each in _best_of_each(quick):
                to_beat = min((setting.seconds for setting in _that_fit_host(tried)), default=math.inf)
                tried.append(_simulated(each.request, measured, to_beat))
                bar.update()
    else:  # many microbatches, whose steps take long to simulate
        bounded = [_bounded(each, measured) for each in from_all_numbers(request)]
        tried = [_fastest(_that_fit_host(bounded) or bounded)]
    tried = _that_fit_host(tried) or tried
    fastest = min(setting.seconds for setting in tried)
    alike = [setting for setting in tried if setting.seconds <= fastest * (1 + NOTICEABLE)]
    return min(alike, key=lambda setting: (setting.plan.num_stages, setting.plan.num_microbatches, setting.seconds))


def quick_candidates(request: PlanRequest, *, measured: Profile | None = None) -> list[Candidate]:
    """The usual numbers of stages and chunks that fit GPUs and host, with a quick use of memory; there may be none.

    Their seconds are lower bounds. Raises PlanError if there are no such numbers.
    """
    pairs = [(chunks, stages) for chunks in _chunk_numbers(request) for stages in _stage_numbers(request)]
    if not pairs:
        raise PlanError(
            f"no number of stages and chunks is possible: {request.shape.num_layers} layers on "
            f"{request.machine.num_ranks} ranks, --batch_size {request.config.pipeline.batch_size}."
        )
    found: list[Candidate] = []
    with progress_bar("planning", " plans", len(pairs)) as bar:
        for chunks, stages in pairs:
            asked = replace(request, num_stages=stages, num_chunks=chunks)
            asked = _with_rounds(_with_slices(asked, is_quick=True), measured)
            if _fits(asked):
                found.append(_bounded(asked, measured))
            bar.update()
    return found


def from_all_numbers(request: PlanRequest) -> list[PlanRequest]:
    """Requests that fit GPUs and host among all numbers of chunks and rounds, which take the fewest rounds possible.

    If none fits, the one that takes the least of the host. Microbatches of one row leave most room on the GPUs; where
    they fit, so may larger ones, which take less time.
    """
    divisors = [number for number in range(1, request.rows + 1) if request.rows % number == 0]
    all_chunks = divisors if request.num_chunks is None else [request.num_chunks]
    all_rounds = divisors if request.accumulation_rounds is None else [request.accumulation_rounds]
    least = list[PlanRequest]()
    with progress_bar("planning", " plans") as bar:

        def fits(asked: PlanRequest) -> bool:
            bar.update()
            return _fits(asked)

        for rounds in all_rounds:
            found = []
            chunks = [number for number in all_chunks if number % rounds == 0]
            for stages in _stage_numbers(request) if chunks else ():
                asked = [
                    replace(request, num_stages=stages, num_chunks=each, accumulation_rounds=rounds) for each in chunks
                ]
                asked = [_with_slices(each, is_quick=True) for each in asked]
                least = [min((*least, asked[-1]), key=least_host_bytes)]
                if fits(asked[-1]):
                    found.append(asked[bisect_left(asked, True, hi=len(asked) - 1, key=fits)])
            if found:
                return found
    return least


def _simulated(request: PlanRequest, measured: Profile | None, to_beat: float) -> Candidate:
    """Numbers that are given, memory used as the simulation finds best; `to_beat` as in `fit_by_simulation`."""
    request, profile = _with_profile(request, measured)
    plan = fit_by_simulation(request, estimated_layer(request), profile, to_beat)
    return _with_seconds(Candidate(request, plan, profile, math.inf))


def _bounded(request: PlanRequest, measured: Profile | None) -> Candidate:
    """Numbers that are given, memory used as a closed form finds best, with a lower bound of a step's seconds."""
    request, profile = _with_profile(request, measured)
    policy = policy_by_score(closed_form_score(request, profile))
    plan = fit_plan(request, layer=estimated_layer(request), policy=policy)
    return Candidate(request, plan, profile, predict_min_step_seconds(plan, request, profile))


def _with_profile(request: PlanRequest, measured: Profile | None) -> tuple[PlanRequest, Profile]:
    request = _with_rounds(_with_slices(request, is_quick=True), measured)
    profile = estimated_profile(request) if measured is None else _checked(measured, request)
    assert profile is not None, "without rates nothing is chosen"
    return request, profile


def _with_seconds(candidate: Candidate) -> Candidate:
    return replace(candidate, seconds=predict_step_seconds(candidate.plan, candidate.request, candidate.profile))


def _fastest(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest of candidates with lower bounds, simulated; what cannot be it by its bound is not simulated."""
    first, *others = sorted(candidates, key=lambda candidate: candidate.seconds)
    best = _with_seconds(first)
    for each in others:
        if each.seconds < best.seconds:
            best = min(best, _with_seconds(each), key=lambda candidate: candidate.seconds)
    return best


def _best_of_each(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The fastest of each number of stages, of those the best few, and two more of the best number, all simulated.

    These are the second, and that with the most microbatches, of which some may have all that products need offloaded.
    """
    by_stages: dict[int, list[Candidate]] = {}
    for each in sorted(candidates, key=lambda candidate: candidate.seconds):
        by_stages.setdefault(each.plan.num_stages, []).append(each)
    best = list[Candidate]()
    for own in by_stages.values():
        if len(best) == NUM_FITTED_WELL and own[0].seconds > best[-1].seconds:
            break
        best = sorted([*best, _fastest(own)], key=lambda candidate: candidate.seconds)[:NUM_FITTED_WELL]
    others = [each for each in by_stages[best[0].plan.num_stages] if each.plan != best[0].plan]
    if not others:
        return best
    second, finest = _fastest(others), max(others, key=lambda candidate: candidate.plan.num_microbatches)
    has_more = finest.plan.num_microbatches > max(best[0].plan.num_microbatches, second.plan.num_microbatches)
    return [*best, second, *([_with_seconds(finest)] if has_more else [])]


def _stage_numbers(request: PlanRequest) -> Sequence[int]:
    """Multiples of the ranks, up to a layer per stage with embedding and head apart.

    Of those that leave the largest stage as large, the fewest, and the next, which makes those with embedding and head
    smaller.
    """
    if request.num_stages is not None:
        return (request.num_stages,)
    num_ranks, num_layers = request.machine.num_ranks, request.shape.num_layers
    by_size: dict[int, list[int]] = {}
    for number in range(num_ranks, max_stages(num_layers, num_ranks) + 1, num_ranks):
        by_size.setdefault(-(-num_layers // number), []).append(number)
    return [number for numbers in by_size.values() for number in numbers[:NUMBERS_OF_A_SIZE]]


def _chunk_numbers(request: PlanRequest) -> list[int]:
    """Divisors of the batch, from half as many as ranks, which leaves most of them idle, up to a few per rank."""
    if request.num_chunks is not None:
        return [request.num_chunks]
    num_ranks, num_rows, rounds = request.machine.num_ranks, request.rows, request.accumulation_rounds or 1
    most = rounds * max(MAX_CHUNKS_PER_RANK * num_ranks, 2 * MAX_CHUNKS_PER_RANK)
    divisors = [number for number in range(rounds, min(num_rows, most) + 1, rounds) if num_rows % number == 0]
    return [number for number in divisors if 2 * number >= num_ranks] or divisors[-1:]
