"""Search for the fastest plan: stages, microbatches, slices and rounds, what is saved, and what is offloaded.

Each candidate is bounded from below (`predict_min_step_seconds`, a hundredth of a simulation's time), and simulated
only while its bound promises less than the best so far.

Products of some microbatches may be offloaded, so that a backward runs no matrix product again:

    forward      F0 F1 F2 F3 F4 ...      its products take longer to the host than it computes: on an RTX 4090 1.3
    to host      O1       O4    ...      times as long for a layer of 7B, on an H200 2.8 times
    backward                             prefetches them under the backward before

So only some of the microbatches are offloaded, spread over the round, and the others are recomputed. How many is
searched by simulation, which knows the copies of weights and gradients on the same links.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from mobius.config.config import ActivationOffloading, PipelineConfig, Recompute
from mobius.errors import GpuMemoryError, PlanError
from mobius.log import progress_bar
from mobius.planner.fit import (
    MIN_SLICE_TOKENS,
    divisors,
    fit_plan,
    fits_gpus,
    least_host_bytes,
    levels_to_try,
    max_saving_attention,
    may_keep_products,
    numbers_of_rounds,
)
from mobius.planner.memory_estimates import (
    USABLE_MEMORY_FRACTION,
    estimate_gpu_memory_of_ranks,
    estimate_host_memory,
    estimated_layer,
)
from mobius.planner.memory_policy import (
    ALIKE,
    WORTH,
    MemoryPolicy,
    closed_form_score,
    fits_host,
    policy_by_score,
    policy_by_simulation,
)
from mobius.planner.peak_memory import LayerBytes
from mobius.planner.profile import Profile
from mobius.planner.rates import estimated_profile, profile_for
from mobius.planner.request import PlanRequest
from mobius.planner.step_prediction import (
    predict_min_step_seconds,
    predict_step_seconds,
    without_garbage_collection,
)
from mobius.schedule.partition import max_stages
from mobius.schedule.plan import Plan, RecomputeLevel

logger = logging.getLogger(__name__)

MAX_CHUNKS_PER_RANK = 4
"""More microbatches per rank than this fill the pipeline no better, and each has its own costs."""
SLICES_PER_RANK = 4
"""Microbatches per rank that slices of long sequences should give, so that fill and drain cost little."""
MIN_SLICED_SEQ_LENGTH = 16384
"""Shortest sequences, in tokens, that auto cuts into slices."""
NUM_FITTED_WELL = 3
"""Number of best candidates, with different numbers of stages, whose use of memory is chosen by simulation."""
NUMBERS_OF_A_SIZE = 2
"""Numbers of stages that are tried of those whose largest stages have equally many layers."""
NOTICEABLE = 0.005
"""Share of a step that more stages or chunks must gain."""
MOST_IF_UNKNOWN = 2
"""Maximum host memory of a plan with offloaded products, relative to one without, if the host's memory is unknown."""


@dataclass(frozen=True)
class TimedPlan:
    """A plan, and the seconds of its step; a lower bound until it is simulated."""

    request: PlanRequest
    plan: Plan
    profile: Profile
    seconds: float

    @property
    def fits_host(self) -> bool:
        """Whether the host has the memory, as far as is known."""
        return fits_host(self.request, self.plan)

    def simulated(self) -> TimedPlan:
        """Return the plan with the seconds of a simulated step."""
        return replace(self, seconds=predict_step_seconds(self.plan, self.request, self.profile))


def resolve_auto(request: PlanRequest, *, measured: Profile | None = None, is_draft: bool = False) -> PlanRequest:
    """Put numbers in the place of auto, and log them; a request without auto comes back unchanged.

    `measured` is a profile for the request's microbatches; without it, estimates are used. Without an estimate (a CPU,
    an unknown GPU, fp32) the numbers are the defaults, or the nearest possible. The choice depends on the total memory
    of the GPU and not on what is free, because every rank must choose the same. Raises GpuMemoryError if nothing fits.
    """
    if not request.candidate.is_known:
        if request.machine.on_cpu or (request.gpu_spec is None and measured is None):
            request = _usual_numbers(request)
        else:
            best = choose_candidate(request.on_empty_gpu, measured=measured, is_draft=is_draft)
            plan = best.plan
            logger.log(
                logging.DEBUG if is_draft else logging.INFO,
                "chosen: --num_stages %d --num_chunks %d --num_rounds %d, layers per stage %s; %.3g s per step by %s",
                plan.num_stages,
                plan.num_chunks,
                plan.accumulation_rounds,
                " ".join(str(len(cut.layers)) for cut in plan.cuts),
                best.seconds,
                best.profile.describe(),
            )
            rounds = request.candidate.accumulation_rounds
            request = _with_slices(request.trying(num_stages=plan.num_stages, num_chunks=plan.num_chunks))
            if rounds is None and request.candidate.num_slices == plan.num_slices:
                request = request.trying(accumulation_rounds=plan.accumulation_rounds)
    return _with_rounds(_with_slices(request), measured)


def _usual_numbers(request: PlanRequest) -> PlanRequest:
    """The default numbers where they are possible, else the largest below them that are."""
    usual, num_ranks = PipelineConfig(), request.machine.num_ranks
    asked = request.candidate
    stages, chunks, rounds = asked.num_stages, asked.num_chunks, asked.accumulation_rounds or 1
    if stages is None:
        most = min(max(usual.num_stages or 0, num_ranks), request.shape.num_layers)
        stages = max(num_ranks, most // num_ranks * num_ranks)
    if chunks is None:
        most = max(usual.num_microbatches, num_ranks)
        chunks = max((n for n in divisors(request.rows) if n <= most and n % rounds == 0), default=rounds)
    logger.info("chosen without an estimate for this device: --num_stages %d --num_chunks %d", stages, chunks)
    return request.trying(num_stages=stages, num_chunks=chunks)


def _with_slices(request: PlanRequest, *, is_quick: bool = False) -> PlanRequest:
    """The request with a number of slices: 1 for short sequences, else the fewest that fit and fill all ranks.

    More where attention's results then fit, of one stage of each rank or of all, if that is faster by an estimate,
    which is skipped if `is_quick`.
    """
    if request.candidate.num_slices is not None:
        return request
    is_short = request.config.data.seq_length < MIN_SLICED_SEQ_LENGTH
    if is_short or request.recompute.saves_activations or not request.shape.is_sliceable:
        return request.trying(num_slices=1)
    number = _fewest_slices(request)
    has_choice = not is_quick and number > 1 and request.recompute is Recompute.AUTO
    if has_choice and request.gpu_spec is not None and not request.machine.on_cpu:
        card = request.on_empty_gpu
        keeping = [card.trying(num_saving_attention=stages) for stages in (1, request.plan.stages_per_rank)]
        tried = list[TimedPlan]()
        for each in sorted({number, *map(_fewest_slices, keeping)}):
            with suppress(GpuMemoryError):
                sliced = _with_rounds(card.trying(num_slices=each), None)
                profile, layer = estimated_profile(sliced), estimated_layer(sliced)
                most = max_saving_attention(sliced, layer=layer, policy=_closed_form(sliced, profile))
                tried.append(_bounded(sliced.trying(num_saving_attention=most), None))
        if fitting := [each for each in tried if each.fits_host]:
            number = _fastest(fitting).plan.num_slices
    return request.trying(num_slices=number)


def _closed_form(request: PlanRequest, profile: Profile | None) -> MemoryPolicy:
    return policy_by_score(closed_form_score(request, profile))


def _fewest_slices(request: PlanRequest) -> int:
    """The fewest slices that fit and fill all ranks, in the rounds that would be taken with them.

    If no number does both, the one that fits and fills most.
    """
    length, chunks = request.config.data.seq_length, request.num_chunks
    wanted = SLICES_PER_RANK * request.machine.num_ranks
    numbers = [number for number in range(1, length // MIN_SLICE_TOKENS + 1) if length % number == 0]
    enough = [number for number in numbers if number * chunks >= wanted] or numbers[-1:]
    in_a_round: dict[int, float] = {}
    for number in enough:
        rounds = numbers_of_rounds(request.on_empty_gpu.trying(num_slices=number))
        asked = request.candidate.accumulation_rounds
        if asked is not None:
            rounds = [asked] if any(each <= asked for each in rounds) else []
        if rounds:
            in_a_round[number] = min(wanted, number * chunks / rounds[0])
        if in_a_round.get(number) == wanted:
            break
    return max(in_a_round, key=lambda number: (in_a_round[number], -number), default=enough[0])


def _with_rounds(request: PlanRequest, measured: Profile | None) -> PlanRequest:
    """The request with a number of rounds: of those to try the fastest by prediction; without rates, the largest."""
    if request.candidate.accumulation_rounds is not None:
        return request
    tried = _rounds_to_try(request.on_empty_gpu)
    best = tried[-1]
    if len(tried) > 1 and (request.gpu_spec is not None or measured is not None):
        best = _fastest([_bounded(each, measured) for each in tried]).request
    return request.trying(accumulation_rounds=best.candidate.accumulation_rounds)


def _rounds_to_try(request: PlanRequest) -> list[PlanRequest]:
    """Requests with the fewest rounds that fit, with offloaded activations and without.

    If with none of them the GPUs have room for the stages that the host cannot hold, the fewest that do, if any.
    """
    if request.candidate.accumulation_rounds is not None:
        return [request]
    numbers = numbers_of_rounds(request) or [request.num_chunks]
    fewest = [request.trying(accumulation_rounds=number) for number in numbers]
    if request.gpu_bytes is None or (len(numbers) == 1 and fits_host(fewest[0], fewest[0].plan)):
        return fewest[-1:]
    if fitting := [each for each in fewest if _fits(each)]:
        return fitting
    more = [request.trying(accumulation_rounds=n) for n in divisors(request.num_chunks) if n > numbers[-1]]
    # A refusal says the least that there is.
    return [each for each in more if _fits(each)][:1] or [min((*fewest, *more), key=least_host_bytes)]


def _fits(request: PlanRequest) -> bool:
    """Whether some plan of these numbers fits GPUs and host, by estimated bytes."""
    if request.host_bytes is None:
        return fits_gpus(request, estimated_layer(request))
    return least_host_bytes(request) <= request.host_bytes


@without_garbage_collection()
def choose_candidate(request: PlanRequest, *, measured: Profile | None = None, is_draft: bool = False) -> TimedPlan:
    """Return the fastest candidate that fits the host, for a draft by bounds; numbers that are not None stay as given.

    Of candidates within `NOTICEABLE` of each other, the one with fewest stages and chunks. Raises GpuMemoryError if
    nothing fits, with the reason of the last try, and PlanError if nothing can be tried. If no usual numbers fit the
    host, all numbers of chunks and rounds are searched.
    """
    tried = list[TimedPlan]()
    quick = quick_candidates(request, measured=measured)
    if quick and is_draft:
        return min([each for each in quick if each.fits_host] or quick, key=lambda each: each.seconds)
    if quick:
        with progress_bar("planning", " plans") as bar:
            for each in _best_of_each(quick):
                to_beat = min((candidate.seconds for candidate in tried if candidate.fits_host), default=math.inf)
                plan = fit_by_simulation(each.request, estimated_layer(each.request), each.profile, to_beat)
                tried.append(replace(each, plan=plan).simulated())
                bar.update()
    else:  # many microbatches, whose steps take long to simulate
        bounded = [_bounded(each, measured) for each in from_all_numbers(request)]
        tried = [_fastest([each for each in bounded if each.fits_host] or bounded)]
    tried = [each for each in tried if each.fits_host] or tried
    fastest = min(candidate.seconds for candidate in tried)
    alike = [candidate for candidate in tried if candidate.seconds <= fastest * (1 + NOTICEABLE)]
    return min(alike, key=lambda each: (each.plan.num_stages, each.plan.num_microbatches, each.seconds))


def quick_candidates(request: PlanRequest, *, measured: Profile | None = None) -> list[TimedPlan]:
    """Return the usual numbers of stages and chunks that fit GPUs and host, bounded, with a quick use of memory.

    There may be none. Raises PlanError if there are no such numbers.
    """
    pairs = [(chunks, stages) for chunks in _chunk_numbers(request) for stages in _stage_numbers(request)]
    if not pairs:
        raise PlanError(
            f"no number of stages and chunks is possible: {request.shape.num_layers} layers on "
            f"{request.machine.num_ranks} ranks, --batch_size {request.config.pipeline.batch_size}."
        )
    found: list[TimedPlan] = []
    with progress_bar("planning", " plans", len(pairs)) as bar:
        for chunks, stages in pairs:
            asked = _with_slices(request.trying(num_stages=stages, num_chunks=chunks), is_quick=True)
            found += [_bounded(each, measured) for each in _rounds_to_try(asked) if _fits(each)]
            bar.update()
    return found


def from_all_numbers(request: PlanRequest) -> list[PlanRequest]:
    """Return requests that fit GPUs and host among all numbers of chunks and rounds, with the fewest rounds possible.

    If none fits, the one that takes the least of the host. Microbatches of one row leave most room on the GPUs; where
    they fit, larger ones may fit too, and take less time.
    """
    asked_chunks, asked_rounds = request.candidate.num_chunks, request.candidate.accumulation_rounds
    all_chunks = divisors(request.rows) if asked_chunks is None else [asked_chunks]
    all_rounds = divisors(request.rows) if asked_rounds is None else [asked_rounds]
    least = list[PlanRequest]()
    with progress_bar("planning", " plans") as bar:

        def fits(asked: PlanRequest) -> bool:
            bar.update()
            return _fits(asked)

        for rounds in all_rounds:
            found = []
            chunks = [number for number in all_chunks if number % rounds == 0]
            for stages in _stage_numbers(request) if chunks else ():
                numbers = request.trying(num_stages=stages, accumulation_rounds=rounds)
                asked = [_with_slices(numbers.trying(num_chunks=each), is_quick=True) for each in chunks]
                least = [min((*least, asked[-1]), key=least_host_bytes)]
                if fits(asked[-1]):
                    found.append(asked[bisect_left(asked, True, hi=len(asked) - 1, key=fits)])
            if found:
                return found
    return least


def _bounded(request: PlanRequest, measured: Profile | None) -> TimedPlan:
    """The candidate of given numbers, with the use of memory that a closed form prefers, and a bound of its step."""
    profile = profile_for(request, measured)
    assert profile is not None, "without rates nothing is chosen"
    plan = fit_plan(request, layer=estimated_layer(request), policy=_closed_form(request, profile))
    return TimedPlan(request, plan, profile, predict_min_step_seconds(plan, request, profile))


def _fastest(candidates: Iterable[TimedPlan]) -> TimedPlan:
    """The fastest of bounded candidates, simulated; those whose bound is too long are not simulated."""
    first, *others = sorted(candidates, key=lambda candidate: candidate.seconds)
    best = first.simulated()
    for each in others:
        if each.seconds < best.seconds:
            best = min(best, each.simulated(), key=lambda candidate: candidate.seconds)
    return best


def _best_of_each(candidates: Sequence[TimedPlan]) -> list[TimedPlan]:
    """The fastest of each number of stages, of those the best few, and two more of the best number, all simulated.

    These are the second, and that with the most microbatches, of which some may have all that products need offloaded.
    """
    by_stages: dict[int, list[TimedPlan]] = {}
    for each in sorted(candidates, key=lambda candidate: candidate.seconds):
        by_stages.setdefault(each.plan.num_stages, []).append(each)
    best = list[TimedPlan]()
    for own in by_stages.values():
        if len(best) == NUM_FITTED_WELL and own[0].seconds > best[-1].seconds:
            break
        best = sorted([*best, _fastest(own)], key=lambda candidate: candidate.seconds)[:NUM_FITTED_WELL]
    others = [each for each in by_stages[best[0].plan.num_stages] if each.plan.num_chunks != best[0].plan.num_chunks]
    if not others:
        return best
    second, finest = _fastest(others), max(others, key=lambda candidate: candidate.plan.num_microbatches)
    has_more = finest.plan.num_microbatches > max(best[0].plan.num_microbatches, second.plan.num_microbatches)
    return [*best, second, *([finest] if has_more else [])]


def _stage_numbers(request: PlanRequest) -> Sequence[int]:
    """Multiples of the ranks, up to a layer per stage with embedding and head apart.

    Of those that leave the largest stage as large, the fewest, and the next, which makes those with embedding and head
    smaller.
    """
    if request.candidate.num_stages is not None:
        return (request.candidate.num_stages,)
    num_ranks, num_layers = request.machine.num_ranks, request.shape.num_layers
    by_size: dict[int, list[int]] = {}
    for number in range(num_ranks, max_stages(num_layers, num_ranks) + 1, num_ranks):
        by_size.setdefault(-(-num_layers // number), []).append(number)
    return [number for numbers in by_size.values() for number in numbers[:NUMBERS_OF_A_SIZE]]


def _chunk_numbers(request: PlanRequest) -> list[int]:
    """Divisors of the batch, from half as many as ranks, which leaves most of them idle, up to a few per rank."""
    if request.candidate.num_chunks is not None:
        return [request.candidate.num_chunks]
    num_ranks, rounds = request.machine.num_ranks, request.candidate.accumulation_rounds or 1
    most = rounds * max(MAX_CHUNKS_PER_RANK * num_ranks, 2 * MAX_CHUNKS_PER_RANK)
    numbers = [number for number in divisors(request.rows) if number <= most and number % rounds == 0]
    return [number for number in numbers if 2 * number >= num_ranks] or numbers[-1:]


@lru_cache(maxsize=8)  # what is chosen for auto is then asked for by its numbers
def fit_by_simulation(
    request: PlanRequest, layer: LayerBytes | None, profile: Profile, to_beat: float = math.inf
) -> Plan:
    """Return the fastest plan of given numbers, with the use of memory chosen by simulation.

    A plan that does not promise to beat `to_beat` seconds is not simulated. `layer` and errors as in `fit_plan`.
    """
    if request.num_slices > 1:
        return _fit_slices(request, layer, profile, to_beat)
    plans = list[Plan]()
    for level in levels_to_try(request, layer):
        if plans and len(plans[0].saved_activation_stages) == len(plans[0].resident) == plans[0].num_stages:
            break  # nothing is left to gain
        # What a refusal advises is of the request as it was asked.
        asked = request if level is request.plan.recompute_level else request.trying(recompute_level=level)
        plan = fit_plan(asked, layer=layer, policy=policy_by_simulation(profile, to_beat))
        # The level of a plan that saves nothing says nothing.
        plans.append(plan if plan.saved_activation_stages else replace(plan, recompute_level=RecomputeLevel.NONE))
    best, *others = [plan for plan in plans if fits_host(request, plan)] or plans
    for plan in others:
        if predict_min_step_seconds(plan, request, profile) < to_beat * (1 - WORTH):
            now = predict_step_seconds(best, request, profile)
            if predict_step_seconds(plan, request, profile) < now * (1 - ALIKE):
                best = plan
    return _with_offloaded_products(request, best, layer, profile, to_beat)


def _fit_slices(request: PlanRequest, layer: LayerBytes | None, profile: Profile, to_beat: float) -> Plan:
    """The fastest plan of slices: as many stages save attention's results as there is room for, or none does."""
    asked = [request]
    if request.recompute is Recompute.AUTO and request.candidate.num_saving_attention is None:
        most = max_saving_attention(request, layer=layer, policy=_closed_form(request, profile))
        asked += [request.trying(num_saving_attention=most)] if most else []
    best, seconds = None, math.inf
    for each in asked:
        limit = min(to_beat, seconds)
        plan = fit_plan(each, layer=layer, policy=policy_by_simulation(profile, limit))
        own = predict_min_step_seconds(plan, request, profile)
        if own < limit and len(asked) > 1:
            own = predict_step_seconds(plan, request, profile)
        if best is None or (own < seconds and fits_host(request, plan)):
            best, seconds = plan, own
    assert best is not None
    return best


def _with_offloaded_products(
    request: PlanRequest, best: Plan, layer: LayerBytes | None, profile: Profile, to_beat: float
) -> Plan:
    """`best`, or a plan that offloads the products of some microbatches, if it is faster by `WORTH`.

    Its stages that do not save activations offload them, all of each rank except the model's last. The search goes from
    the number whose copies the forwards hide to the next faster one, in steps that are halved.
    """
    can_offload = request.recompute is Recompute.AUTO and may_keep_products(request)
    can_offload = can_offload and not request.candidate.num_offloaded_microbatches and request.gpu_bytes is not None
    can_offload = can_offload and request.config.pipeline.activation_offloading is not ActivationOffloading.OFF
    is_known = layer is not None and layer.saved_products is not None
    if not can_offload or not is_known or len(best.saved_activation_stages) >= best.num_stages - 1:
        return best
    size, kinds = best.microbatches_per_round, profile.layer_kinds
    forward = sum(kind.forward for kind in kinds) / len(kinds)
    copy = request.product_bytes / profile.copies.device_to_host_duplex
    hidden = max(1, min(size, int(size * forward / copy)))
    limit = min(to_beat, predict_step_seconds(best, request, profile) * (1 - WORTH))
    asked = request.with_pipeline(activation_offloading=ActivationOffloading.ON)
    asked = asked.trying(num_offloaded_microbatches=hidden)
    try:
        plan = fit_plan(asked, layer=layer, policy=policy_by_simulation(profile, limit))
    except GpuMemoryError:
        return best

    @cache
    def seconds(number: int) -> float:
        tried = replace(plan, num_offloaded_microbatches=number)
        bound = predict_min_step_seconds(tried, request, profile)
        return bound if bound >= limit else predict_step_seconds(tried, request, profile)

    def is_too_much(number: int) -> bool:
        return not _fits_with_products(request, replace(plan, num_offloaded_microbatches=number), best, layer)

    most = bisect_right(range(1, size + 1), 0, key=is_too_much)
    number, step = min(hidden, most), max(1, size // 8)
    while number > 0:
        nearby = [n for n in (number - step, number + step) if 0 < n <= most and seconds(n) < seconds(number)]
        if nearby:
            number = min(nearby, key=seconds)
        elif step > 1:
            step //= 2
        else:
            break
    return best if number == 0 or seconds(number) >= limit else replace(plan, num_offloaded_microbatches=number)


def _fits_with_products(request: PlanRequest, plan: Plan, best: Plan, layer: LayerBytes | None) -> bool:
    """Whether `plan` fits GPUs and host: where no limit is known, `MOST_IF_UNKNOWN` times what `best` takes."""
    most = request.host_bytes
    if most is None:
        most = MOST_IF_UNKNOWN * estimate_host_memory(request, best).total
    if estimate_host_memory(request, plan).total > most:
        return False
    assert request.gpu_bytes is not None
    usable = int(request.gpu_bytes * USABLE_MEMORY_FRACTION) - request.mailbox_bytes
    return all(need.total <= usable for need in estimate_gpu_memory_of_ranks(request, plan, layer))
