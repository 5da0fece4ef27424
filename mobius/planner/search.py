"""Search for the best plan: order, stages, microbatches, slices and rounds, and what stays on the GPU.

Each candidate is bounded from below (`predict_min_step_seconds`, a hundredth of a simulation's time). Numbers are
compared by bounds with few ways to use the memory; of the best numbers all ways are tried. Candidates are simulated in
the order of their bounds while one may be the fastest. Among those within `ALIKE` of the fastest, the one that takes
least host memory is chosen; of several, the fastest, and of equally fast ones the one with least GPU memory.

Products of some microbatches may be offloaded, so that a backward runs no matrix product again:

    forward      F0 F1 F2 F3 F4 ...      its products take longer to the host than it computes: on an RTX 4090 1.3
    to host      O1       O4    ...      times as long for a layer of 7B, on an H200 2.8 times
    backward                             prefetches them under the backward before

So only some of the microbatches are offloaded, spread over the round, and the others are recomputed. How many is
searched by simulation, which knows the copies of weights and gradients on the same links. Depth first, copies in both
directions run beside forwards and backwards, and often all fit.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache

from mobius.config.config import ActivationOffloading, PipelineConfig, Recompute
from mobius.errors import GpuMemoryError, PlanError, ScheduleError
from mobius.log import progress_bar
from mobius.planner.fit import (
    MIN_SLICE_TOKENS,
    divisors,
    fits_gpus,
    fits_host,
    fitting_plans,
    least_host_bytes,
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
from mobius.planner.peak_memory import LayerBytes
from mobius.planner.profile import Profile
from mobius.planner.rates import profile_for
from mobius.planner.request import PlanRequest
from mobius.planner.step_prediction import (
    predict_min_step_seconds,
    predict_step_seconds,
    without_garbage_collection,
)
from mobius.schedule.partition import max_stages
from mobius.schedule.plan import Plan
from mobius.schedule.spec import ComputeOrder
from mobius.units import format_bytes

logger = logging.getLogger(__name__)

MAX_CHUNKS_PER_RANK = 4
"""More microbatches per rank than this fill a breadth-first pipeline no better, and each has its own costs."""
MIN_MICROBATCH_TOKENS = 1024
"""Fewest tokens of a depth-first microbatch that auto chooses, unless a row has fewer: smaller ones do not keep a GPU
busy."""
SLICES_PER_RANK = 4
"""Microbatches per rank that slices of long sequences should give, so that fill and drain cost little."""
MIN_SLICED_SEQ_LENGTH = 16384
"""Shortest sequences, in tokens, that auto cuts into slices."""
NUM_FITTED_WELL = 4
"""Best numbers of each order of which all ways to use the memory are tried."""
NUMBERS_OF_A_SIZE = 2
"""Numbers of stages that are tried of those whose largest stages have equally many layers."""
MOST_ROUND_NUMBERS = 4
"""Numbers of rounds that are tried for one number of microbatches."""
ALIKE = 0.005
"""Share of a step within which the plan that takes less host memory is chosen, by as large a share. Numbers are chosen
first, then the use of memory: together 1 %."""
SAME = 0.001
"""Share of a step within which of plans with about the same host memory the one with less GPU memory is chosen."""
MOST_ALIKE = 3
"""Maximum number of plans with equally many resident stages that are simulated."""
MOST_SIMULATED_ALIKE = 12
"""Maximum number of plans that are simulated to find one as fast as the fastest that takes less memory."""
NEAR = 1.1
"""Bound of a plan relative to the fastest one of the other order, up to which it is tried: offloaded products may make
it faster."""
WORTH = 0.01
"""Share of a step that offloaded products must gain."""
MOST_IF_UNKNOWN = 2
"""Maximum host memory of a plan with offloaded products, relative to one without, if the host's memory is unknown."""


@dataclass(frozen=True)
class TimedPlan:
    """A plan, and the seconds of its step; a lower bound until it is simulated."""

    request: PlanRequest
    plan: Plan
    profile: Profile
    seconds: float

    @classmethod
    def bounded(cls, request: PlanRequest, plan: Plan, profile: Profile) -> TimedPlan:
        """Return the plan with a bound of its step."""
        return cls(request, plan, profile, predict_min_step_seconds(plan, request, profile))

    def simulated(self) -> TimedPlan:
        """Return the plan with the seconds of a simulated step."""
        return replace(self, seconds=predict_step_seconds(self.plan, self.request, self.profile))

    @property
    def fits_host(self) -> bool:
        """Whether the host has the memory, as far as is known."""
        return fits_host(self.request, self.plan)

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
    def numbers(self) -> tuple[int, ...]:
        """Numbers of stages, microbatches, slices and rounds, and of microbatches that offload products."""
        plan, offloaded = self.plan, self.plan.num_offloaded_microbatches
        return plan.num_stages, plan.num_microbatches, plan.num_slices, plan.accumulation_rounds, offloaded


def pick(candidates: Iterable[TimedPlan]) -> TimedPlan:
    """Return the best of bounded candidates, simulated: of those about as fast as the fastest the one of least memory.

    Candidates that fit the host come before those that do not.
    """
    listed = list(candidates)
    listed = [each for each in listed if each.fits_host] or listed
    groups: dict[tuple[object, ...], list[TimedPlan]] = {}
    for each in sorted(listed, key=lambda each: each.seconds):
        groups.setdefault((each.plan.order, *each.numbers), []).append(each)
    simulated: dict[Plan, TimedPlan] = {}
    fastest = math.inf
    with progress_bar("simulating", " steps") as bar:
        for group in groups.values():
            for each in _simulate_best(group, fastest):
                simulated[each.plan] = each
                fastest = min(fastest, each.seconds)
                bar.update()
        limit = fastest * (1 + ALIKE)
        alike = [each for each in simulated.values() if each.seconds <= limit]
        least = min(each.host_bytes for each in alike)
        lighter = [each for each in listed if each.plan not in simulated and each.seconds <= limit]
        lighter = [each for each in lighter if each.host_bytes * (1 + ALIKE) < least]
        for each in sorted(lighter, key=lambda each: each.host_bytes)[:MOST_SIMULATED_ALIKE]:
            tried = each.simulated()
            bar.update()
            if tried.seconds <= limit:
                return tried
    alike = [each for each in alike if each.host_bytes <= least * (1 + ALIKE)]
    limit = min(each.seconds for each in alike) * (1 + SAME)
    return min((each for each in alike if each.seconds <= limit), key=lambda each: (each.gpu_bytes, each.seconds))


def _simulate_best(group: Sequence[TimedPlan], to_beat: float) -> Iterator[TimedPlan]:
    """Simulate plans of the same numbers: from few, some and many resident stages to the number that is fastest.

    `group` is sorted by bounds; of each number of resident stages, a plan is simulated while its bound promises to be
    faster than `to_beat` seconds and than the others of that number.
    """
    by_resident: dict[int, list[TimedPlan]] = {}
    for each in group:
        by_resident.setdefault(len(each.plan.resident), []).append(each)
    numbers, seconds = sorted(by_resident), dict[int, float]()
    wanted = {0, len(numbers) // 2, len(numbers) - 1}
    while new := sorted(wanted - seconds.keys()):
        for place in new:
            seconds[place] = math.inf
            for each in by_resident[numbers[place]][:MOST_ALIKE]:
                if each.seconds < min(to_beat, seconds[place]):
                    tried = each.simulated()
                    seconds[place] = min(seconds[place], tried.seconds)
                    yield tried
        best = min(seconds, key=lambda place: seconds[place])
        if math.isfinite(seconds[best]):
            wanted = {place for place in (best - 1, best + 1) if 0 <= place < len(numbers)}


def resolve_auto(request: PlanRequest, *, measured: Profile | None = None, is_draft: bool = False) -> PlanRequest:
    """Put numbers in the place of auto, and log them; a request without auto comes back unchanged.

    `measured` is a profile for the request's microbatches; without it, estimates are used. Without an estimate (a CPU,
    an unknown GPU, fp32) the numbers are the defaults, or the nearest possible. The choice depends on the total memory
    of the GPU and not on what is free, because every rank must choose the same. Raises GpuMemoryError if nothing fits.
    """
    if request.machine.on_cpu or (request.gpu_spec is None and measured is None):
        request = request if request.candidate.is_known else _usual_numbers(request)
        request = _with_slices(request.trying(order=request.candidate.order or ComputeOrder.BREADTH_FIRST))
        if request.candidate.accumulation_rounds is not None:
            return request
        return request.trying(accumulation_rounds=rounds_to_try(request.on_empty_gpu)[-1])
    if request.candidate.is_complete:
        return request
    best = choose_candidate(request.on_empty_gpu, measured=measured, is_draft=is_draft)
    plan = best.plan
    if not request.candidate.is_known:
        logger.log(
            logging.DEBUG if is_draft else logging.INFO,
            "chosen: --num_stages %d --num_chunks %d --num_rounds %d --compute_order %s, layers per stage %s; %.3g s "
            "per step by %s",
            plan.num_stages,
            plan.num_chunks,
            plan.accumulation_rounds,
            plan.order.value,
            " ".join(str(len(cut.layers)) for cut in plan.cuts),
            best.seconds,
            best.profile.describe(),
        )
    return request.trying(
        num_stages=plan.num_stages,
        num_chunks=plan.num_chunks,
        num_slices=plan.num_slices,
        accumulation_rounds=plan.accumulation_rounds,
        order=plan.order,
    )


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
    if _leaves_whole(request):
        return request.trying(num_slices=1)
    number = _fewest_slices(request)
    has_choice = not is_quick and number > 1 and request.recompute is Recompute.AUTO
    if has_choice and request.gpu_spec is not None and not request.machine.on_cpu:
        card = request.on_empty_gpu
        keeping = [card.trying(num_saving_attention=stages) for stages in (1, request.plan.stages_per_rank)]
        tried = list[TimedPlan]()
        for each in sorted({number, *map(_fewest_slices, keeping)}):
            with suppress(GpuMemoryError):
                sliced = card.trying(num_slices=each)
                if sliced.candidate.accumulation_rounds is None:
                    sliced = sliced.trying(accumulation_rounds=rounds_to_try(sliced)[-1])
                most = max_saving_attention(sliced, layer=estimated_layer(sliced))
                tried += _bounded(sliced.trying(num_saving_attention=most), None, is_quick=True)
        if fitting := [each for each in tried if each.fits_host]:
            number = pick(fitting).plan.num_slices
    return request.trying(num_slices=number)


def _leaves_whole(request: PlanRequest) -> bool:
    """Whether auto cuts no sequences: short ones, and those of runs that have no slices."""
    is_short = request.config.data.seq_length < MIN_SLICED_SEQ_LENGTH
    is_whole = request.recompute.saves_activations or request.candidate.order is ComputeOrder.DEPTH_FIRST
    return is_short or is_whole or not request.shape.is_sliceable


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


def rounds_to_try(request: PlanRequest) -> list[int]:
    """Return numbers of breadth-first rounds: the fewest that fit, with offloaded activations and without.

    Those in between take less host memory. If with none of them the GPUs have room for the stages that the host cannot
    hold, the fewest that do, if any.
    """
    if request.candidate.accumulation_rounds is not None:
        return [request.candidate.accumulation_rounds]
    numbers = numbers_of_rounds(request) or [request.num_chunks]
    if request.gpu_bytes is None:
        return numbers[-1:]
    between = [number for number in divisors(request.num_chunks) if numbers[0] <= number <= numbers[-1]]
    tried = sorted({numbers[0], *between[-(MOST_ROUND_NUMBERS - 1) :]})
    if fitting := [number for number in tried if _fits(request.trying(accumulation_rounds=number))]:
        return fitting
    more = [number for number in divisors(request.num_chunks) if number > numbers[-1]]
    if fitting := [number for number in more if _fits(request.trying(accumulation_rounds=number))][:1]:
        return fitting
    # A refusal says the least that there is.
    return [min((*tried, *more), key=lambda number: least_host_bytes(request.trying(accumulation_rounds=number)))]


def depth_first_rounds(request: PlanRequest) -> list[int]:
    """Return numbers of depth-first rounds: those of one microbatch per rank, and of some more, which hide updates.

    Empty if the request cannot run depth-first.
    """
    chunks, num_ranks = request.num_chunks, request.machine.num_ranks
    cannot = request.num_slices > 1 or (request.plan.num_slots == 1 and request.plan.stages_per_rank > 1)
    if cannot or request.machine.on_cpu:
        return []
    sizes = [size for size in divisors(chunks) if size >= num_ranks or request.plan.stages_per_rank == 1]
    if request.candidate.accumulation_rounds is not None:
        return [number for number in [request.candidate.accumulation_rounds] if chunks // number in sizes]
    if request.plan.stages_per_rank == 1:  # rounds change nothing
        return [chunks // sizes[min(bisect_left(sizes, num_ranks), len(sizes) - 1)]]
    return [chunks // size for size in sizes[:MOST_ROUND_NUMBERS]]


def _fits(request: PlanRequest) -> bool:
    """Whether some plan of these numbers is possible and fits GPUs and host, by estimated bytes."""
    try:
        request.plan.check_numbers()
    except ScheduleError:
        return False
    if request.host_bytes is None:
        return fits_gpus(request, estimated_layer(request))
    return least_host_bytes(request) <= request.host_bytes


@without_garbage_collection()
def choose_candidate(request: PlanRequest, *, measured: Profile | None = None, is_draft: bool = False) -> TimedPlan:
    """Return the best candidate that fits the host, for a draft by bounds; numbers that are not None stay as given.

    Once microbatches are chosen, the search is repeated with these alone, as a run does that has measured them. Raises
    GpuMemoryError if nothing fits, with the reason of the last try, and PlanError if nothing can be tried.
    """
    if request.candidate.num_slices is None and _leaves_whole(request):
        request = request.trying(num_slices=1)
    asked, fitted = request, list[TimedPlan]()
    if is_draft or not request.candidate.is_known:
        fitted = _search(request, measured, is_draft=is_draft)
        if is_draft:
            return min([each for each in fitted if each.fits_host] or fitted, key=lambda each: each.seconds)
        best = pick(fitted)
        asked = request.trying(num_stages=best.plan.num_stages, num_chunks=best.plan.num_chunks)
    again = request.trying(num_chunks=asked.num_chunks, num_slices=_with_slices(asked).num_slices)
    if not fitted or again != request:
        found = _search(again, measured)
        best, fitted = pick(found), fitted or found
    other = _other_order(best, fitted)
    if other is not None and _is_better(other, best):
        best, other = other, best
    if other is not None:
        order = "" if other.plan.is_depth_first else ", breadth-first"
        plan = f"--num_stages {other.plan.num_stages}, {other.plan.describe_microbatches()}{order}"
        more = 100 * (other.seconds / best.seconds - 1)
        logger.info("next best: %s, %+.1f %% per step, %s of host memory", plan, more, format_bytes(other.host_bytes))
    return best


def _is_better(other: TimedPlan, best: TimedPlan) -> bool:
    """Whether `other` is faster by `WORTH`, or about as fast and takes less host memory."""
    is_alike = other.seconds <= best.seconds * (1 + ALIKE)
    return other.seconds < best.seconds * (1 - WORTH) or (is_alike and other.host_bytes < best.host_bytes)


def _other_order(best: TimedPlan, candidates: Sequence[TimedPlan]) -> TimedPlan | None:
    """Return a fast plan of the order that `best` does not have, simulated: of the numbers with the lowest bound.

    It may offload products, which only the best breadth-first one is tried with.
    """
    others = sorted((each for each in candidates if each.plan.order is not best.plan.order), key=lambda o: o.seconds)
    if not others:
        return None
    group = [each for each in others if each.numbers == others[0].numbers]
    other = min(_simulate_best(group, math.inf), key=lambda each: each.seconds)
    request, layer = other.request, estimated_layer(other.request)
    if other.plan.num_slices > 1 or not other.fits_host:
        return other
    return replace(other, plan=_with_offloaded_products(request, other.plan, layer, other.profile)).simulated()


def _search(request: PlanRequest, measured: Profile | None, *, is_draft: bool = False) -> list[TimedPlan]:
    """Return bounded candidates of the best numbers; of all numbers of chunks and rounds if no usual ones fit."""
    found = quick_candidates(request, measured=measured)
    if not found:  # many microbatches, whose steps take long to simulate
        return [each for tried in from_all_numbers(request) for each in _bounded(tried, measured, is_quick=True)]
    if is_draft:
        return found
    fitted = list[TimedPlan]()
    with progress_bar("planning", " plans") as bar:
        for each in _best_numbers(found):
            fitted += _bounded(each.request, measured)
            bar.update()
    return fitted


def quick_candidates(request: PlanRequest, *, measured: Profile | None = None) -> list[TimedPlan]:
    """Return the usual numbers of stages and chunks that fit GPUs and host, bounded, with few uses of memory.

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
            asked = request.trying(num_stages=stages, num_chunks=chunks)
            for each in _orders_and_rounds(request, asked):
                own = _bounded(each, measured, is_quick=True)
                found += own
                if each.plan.is_depth_first:
                    found += _bounded_with_products(each, min(own, key=lambda plan: plan.seconds), measured)
            bar.update()
    return found


def _bounded_with_products(request: PlanRequest, best: TimedPlan, measured: Profile | None) -> list[TimedPlan]:
    """Return bounded plans, instead of `best`, that offload the products of all microbatches where stages save none."""
    asked = _offloading_products(request, request.plan.microbatches_per_round)
    if not _may_offload_products(request) or not _fits(asked):
        return []
    plans, layer = _bounded(asked, measured, is_quick=True), estimated_layer(asked)
    return [each for each in plans if _fits_with_products(asked, each.plan, best.plan, layer)]


def _orders_and_rounds(request: PlanRequest, asked: PlanRequest) -> Iterator[PlanRequest]:
    """Yield `asked` with each order and number of rounds that fit and make sense for its microbatches."""
    order, num_ranks = request.candidate.order, request.machine.num_ranks
    is_given = request.candidate.num_chunks is not None
    rounds = request.candidate.accumulation_rounds or 1
    most = rounds * max(MAX_CHUNKS_PER_RANK * num_ranks, 2 * MAX_CHUNKS_PER_RANK)
    if order is not ComputeOrder.DEPTH_FIRST and (is_given or asked.num_chunks <= most):
        looped = _with_slices(asked.trying(order=ComputeOrder.BREADTH_FIRST), is_quick=True)
        for number in rounds_to_try(looped):
            if _fits(tried := looped.trying(accumulation_rounds=number)):
                yield tried
    is_small = asked.microbatch_rows * request.config.data.seq_length < MIN_MICROBATCH_TOKENS
    if order is not ComputeOrder.BREADTH_FIRST and (is_given or asked.microbatch_rows == 1 or not is_small):
        deep = _with_slices(asked, is_quick=True).trying(order=ComputeOrder.DEPTH_FIRST)
        for number in depth_first_rounds(deep):
            if _fits(tried := deep.trying(accumulation_rounds=number)):
                yield tried


def _best_numbers(candidates: Sequence[TimedPlan]) -> list[TimedPlan]:
    """Return the fastest numbers of each order, and breadth-first those with the most microbatches.

    Bounds may mislead, so candidates are simulated in their order while one may be the fastest, of the slower order
    while one may come near it. Of the most microbatches, some may have all that products need offloaded.
    """
    best, limit = list[TimedPlan](), math.inf
    by_bound = sorted(candidates, key=lambda candidate: candidate.seconds)
    for order in dict.fromkeys(each.plan.order for each in by_bound):
        own: dict[tuple[int, ...], TimedPlan] = {}
        for each in by_bound:
            if each.plan.order is order:
                own.setdefault(each.numbers, each)
        simulated, fastest = dict[TimedPlan, float](), math.inf
        for each in own.values():
            if each.seconds < min(fastest, limit):
                simulated[each] = each.simulated().seconds
                fastest = min(fastest, simulated[each])
        limit = min(limit, fastest * NEAR)
        best += sorted(simulated, key=lambda each: simulated[each])[:NUM_FITTED_WELL]
        if order is ComputeOrder.BREADTH_FIRST and own:
            best.append(max(own.values(), key=lambda each: (each.plan.num_microbatches, -each.seconds)))
    return list(dict.fromkeys(best))


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


def _bounded(request: PlanRequest, measured: Profile | None, *, is_quick: bool = False) -> list[TimedPlan]:
    """Return a bounded plan for each way of given numbers to use the memory, of few ways if `is_quick`."""
    profile = profile_for(request, measured)
    assert profile is not None, "without rates nothing is chosen"
    plans = fitting_plans(request, estimated_layer(request), is_quick=is_quick)
    return [TimedPlan.bounded(request, plan, profile) for plan in plans]


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
    """Divisors of the batch, from half as many as ranks on, which leaves most of them idle."""
    if request.candidate.num_chunks is not None:
        return [request.candidate.num_chunks]
    num_ranks, rounds = request.machine.num_ranks, request.candidate.accumulation_rounds or 1
    numbers = [number for number in divisors(request.rows) if number % rounds == 0]
    return [number for number in numbers if 2 * number >= num_ranks] or numbers[-1:]


@lru_cache(maxsize=8)  # what is chosen for auto is then asked for by its numbers
def fit_by_simulation(request: PlanRequest, layer: LayerBytes | None, profile: Profile) -> Plan:
    """Return the best plan of given numbers by simulation; `layer` and errors as in `fit_plan`."""
    asked = [request]
    if (
        request.num_slices > 1
        and request.recompute is Recompute.AUTO
        and request.candidate.num_saving_attention is None
    ):
        most = max_saving_attention(request, layer=layer)
        asked += [request.trying(num_saving_attention=most)] if most else []
    plans = [plan for each in asked for plan in fitting_plans(each, layer)]
    best = plans[0]
    if len(plans) > 1:
        best = pick(TimedPlan.bounded(request, plan, profile) for plan in plans).plan
    return best if request.num_slices > 1 else _with_offloaded_products(request, best, layer, profile)


def _with_offloaded_products(request: PlanRequest, best: Plan, layer: LayerBytes | None, profile: Profile) -> Plan:
    """`best`, or a plan that offloads the products of some microbatches, if it is faster by `WORTH`.

    Its stages that do not save activations offload them, all of each rank except the model's last.
    """
    is_known = layer is not None and layer.saved_products is not None
    # Depth first, activations that leave make room for resident stages, also where all would fit.
    saves_all = len(best.saved_activation_stages) >= best.num_stages - 1 and not best.is_depth_first
    if saves_all or not is_known or not _may_offload_products(request):
        return best
    size, kinds = best.microbatches_per_round, profile.layer_kinds
    beside = sum(kind.forward + kind.backward * best.is_depth_first for kind in kinds) / len(kinds)
    copy = request.product_bytes / profile.copies.device_to_host_duplex
    hidden = max(1, min(size, int(size * beside / copy)))
    limit = predict_step_seconds(best, request, profile) * (1 - WORTH)
    for number in sorted({hidden, size}):
        plan = _offloading_about(number, request, best, layer, profile)
        if plan is not None and (seconds := predict_step_seconds(plan, request, profile)) < limit:
            best, limit = plan, seconds
    return best


def _may_offload_products(request: PlanRequest) -> bool:
    """Whether auto may choose microbatches that offload their products."""
    is_open = request.recompute is Recompute.AUTO and not request.candidate.num_offloaded_microbatches
    is_off = request.config.pipeline.activation_offloading is ActivationOffloading.OFF
    return is_open and not is_off and may_keep_products(request) and request.gpu_bytes is not None


def _offloading_products(request: PlanRequest, number: int) -> PlanRequest:
    """Return `request` with so many microbatches of a round that offload products, where stages save nothing."""
    asked = request.with_pipeline(activation_offloading=ActivationOffloading.ON)
    return asked.trying(num_offloaded_microbatches=number)


def _offloading_about(
    number: int, request: PlanRequest, best: Plan, layer: LayerBytes | None, profile: Profile
) -> Plan | None:
    """Return the best plan that offloads products of about `number` microbatches; None if none fits.

    Memory is shared out for that number; from it the search goes to the next faster one, in steps that are halved.
    """
    asked = _offloading_products(request, number)
    try:
        plan = pick(TimedPlan.bounded(asked, each, profile) for each in fitting_plans(asked, layer)).plan
    except GpuMemoryError:
        return None

    def fits(number: int) -> bool:
        tried = replace(plan, num_offloaded_microbatches=number)
        return 0 < number <= best.microbatches_per_round and _fits_with_products(request, tried, best, layer)

    @cache
    def seconds(number: int) -> float:
        tried = replace(plan, num_offloaded_microbatches=number)
        return predict_step_seconds(tried, request, profile) if fits(number) else math.inf

    number = next((each for each in range(number, 0, -1) if fits(each)), 0)
    step = max(1, best.microbatches_per_round // 8)
    while number > 0:
        nearby = min(number - step, number + step, key=seconds)
        if seconds(nearby) < seconds(number):
            number = nearby
        elif step > 1:
            step //= 2
        else:
            return replace(plan, num_offloaded_microbatches=number)
    return None


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
