"""Chooses the number of stages and microbatches, and the cut, by simulating what fits.

It knows no machine: a profile for each microbatch shape, and what fits into memory, are handed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mobius.errors import GpuMemoryError, PlanError, ScheduleError
from mobius.plan.memory_use import schedule_of_slots
from mobius.plan.partition import OUTER_STAGES, StageSpan, balanced_partition
from mobius.plan.profile import Profile
from mobius.plan.shape import ModelShape
from mobius.plan.simulation import Prediction, simulate_steps, without_collector
from mobius.plan.stage_costs import StepRules, stage_costs
from mobius.plan.uneven_partition import TIME_LIMIT, PartitionTask, uneven_partition
from mobius.schedule.schedule import Schedule

MOST_CHUNKS_PER_RANK = 4
"""More microbatches than this many times the ranks fill the pipeline no better; each has its own costs."""
QUICK_STEPS = 2
"""Simulated for settings that are only compared; the second is the steady one."""
NUM_FITTED_WELL = 3
"""How many of the best settings, of different numbers of stages, have their use of memory chosen by simulation."""
NUM_RECUT = 2
"""How many of the best settings are cut anew."""
NOTICEABLE = 0.005
"""An uneven cut must gain this share of a step, and so must more stages or chunks."""


@dataclass(frozen=True)
class Fitting:
    """How a cut fits into memory: what stays where."""

    slots: tuple[int, ...]
    """Of each rank; 0 where it streams nothing."""
    resident: frozenset[int]
    graph_stages: frozenset[int]


@dataclass(frozen=True)
class Job:
    """What is to be run, as far as the choice goes."""

    shape: ModelShape
    num_ranks: int
    batch_size: int
    seq_length: int
    rules: Callable[[int], StepRules]
    """How a step of that many microbatches goes."""
    profile_of: Callable[[int], Profile]
    """Of a microbatch of that many tokens."""
    fit: Callable[[tuple[StageSpan, ...], int], Fitting]
    """(cut, number of microbatches) -> what stays where, found quickly; raises GpuMemoryError if it does not fit."""
    fit_well: Callable[[tuple[StageSpan, ...], int], Fitting] | None = None
    """The same, found by simulating what fits; None: `fit` is as good."""
    max_parameters: int | None = None
    """Of one stage, by memory."""


@dataclass(frozen=True)
class Candidate:
    """A setting that fits, and what it is predicted to do."""

    spans: tuple[StageSpan, ...]
    num_chunks: int
    fitting: Fitting
    schedule: Schedule
    profile: Profile
    prediction: Prediction

    @property
    def num_stages(self) -> int:
        return len(self.spans)


@dataclass(frozen=True)
class Choice:
    """The best candidate, all that were simulated, and lines for the log."""

    best: Candidate
    tried: tuple[Candidate, ...]
    notices: tuple[str, ...]


def predict(job: Job, spans: tuple[StageSpan, ...], num_chunks: int, *, is_quick: bool = False) -> Candidate:
    """Simulate one cut, its memory used by `job.fit_well` or quickly. Raises GpuMemoryError if it does not fit."""
    fit = job.fit if is_quick or job.fit_well is None else job.fit_well
    fitting = fit(spans, num_chunks)
    profile = job.profile_of(job.batch_size // num_chunks * job.seq_length)
    schedule = schedule_of_slots(job.num_ranks, len(spans), num_chunks, fitting.slots, fitting.resident)
    costs = stage_costs(spans, job.shape, profile, resident=fitting.resident, graph_stages=fitting.graph_stages)
    num_steps = QUICK_STEPS if is_quick else 3
    prediction = simulate_steps(schedule, costs, profile, job.rules(num_chunks), num_steps=num_steps)
    return Candidate(spans, num_chunks, fitting, schedule, profile, prediction)


@without_collector()
def choose_stages_and_chunks(
    job: Job,
    *,
    num_stages: int | None,
    num_chunks: int | None,
    cuts_unevenly: bool = True,
    time_limit: float = TIME_LIMIT,
) -> Choice:
    """The fastest setting by prediction; what is not None stays as given.

    All numbers of stages and chunks are tried with even cuts and a quick use of memory, the best of them then with what
    the simulation finds for the memory and, if `cuts_unevenly`, with uneven cuts. Between settings that are alike
    within `NOTICEABLE`, the one with fewer stages and chunks is taken.
    Raises GpuMemoryError if nothing fits, with the reason of the last try, and PlanError if nothing can be tried.
    """
    tried: list[Candidate] = []
    refusal: GpuMemoryError | ScheduleError | None = None
    for chunks in _chunk_numbers(job, num_chunks):
        for stages in _stage_numbers(job, num_stages):
            try:
                tried.append(
                    predict(
                        job,
                        balanced_partition(job.shape.num_layers, stages, num_ranks=job.num_ranks),
                        chunks,
                        is_quick=True,
                    )
                )
            except GpuMemoryError as error:
                refusal = error
    if not tried:
        raise refusal or PlanError(
            f"no number of stages and chunks is possible: {job.shape.num_layers} layers on {job.num_ranks} ranks, "
            f"--batch_size {job.batch_size}."
        )
    if job.fit_well is not None:
        quick, tried = tried, []
        for candidate in _best_of_each(quick):
            tried.append(predict(job, candidate.spans, candidate.num_chunks))
    notices: list[str] = []
    for candidate in sorted(tried, key=_seconds)[: NUM_RECUT if cuts_unevenly else 0]:
        tried += _recut(job, candidate, notices, time_limit)
    fastest = min(map(_seconds, tried))
    alike = [candidate for candidate in tried if _seconds(candidate) <= fastest * (1 + NOTICEABLE)]
    return Choice(min(alike, key=_simplicity), tuple(tried), tuple(dict.fromkeys(notices)))


def _best_of_each(tried: Sequence[Candidate]) -> list[Candidate]:
    """The fastest of each number of stages, of those the best few, and the second of the best."""
    ordered = sorted(tried, key=_seconds)
    fastest = {candidate.num_stages: candidate for candidate in reversed(ordered)}
    chosen = sorted(fastest.values(), key=_seconds)[:NUM_FITTED_WELL]
    return chosen + [candidate for candidate in ordered if candidate.num_stages == chosen[0].num_stages][1:2]


def recut(job: Job, spans: tuple[StageSpan, ...], num_chunks: int, *, time_limit: float = TIME_LIMIT) -> Choice:
    """The best cut into as many stages as `spans` has, that one included."""
    notices: list[str] = []
    candidate = predict(job, spans, num_chunks)
    tried = [candidate, *_recut(job, candidate, notices, time_limit)]
    return Choice(min(tried, key=_seconds), tuple(tried), tuple(dict.fromkeys(notices)))


def _recut(job: Job, candidate: Candidate, notices: list[str], time_limit: float) -> list[Candidate]:
    """Uneven cuts of the same number of stages that gain something."""
    if candidate.num_stages > job.shape.num_layers:
        return []
    task = _task(job, candidate)
    cuts = []
    for pace in dict.fromkeys((1.0, min(1.0, job.num_ranks / candidate.num_chunks), 0.5, 0.0)):
        cut = uneven_partition(task, pace=pace, time_limit=time_limit)
        notices += [] if cut.notice is None else [cut.notice]
        cuts.append(cut.spans)
    quick = []
    for spans in dict.fromkeys(cuts):
        try:
            quick.append(predict(job, spans, candidate.num_chunks, is_quick=True))
        except GpuMemoryError:
            continue
    better = []
    for found in sorted(quick, key=_seconds)[:1]:
        well = found if job.fit_well is None else predict(job, found.spans, found.num_chunks)
        if _seconds(well) < _seconds(candidate) * (1 - NOTICEABLE):
            better.append(well)
    return better


def _task(job: Job, candidate: Candidate) -> PartitionTask:
    shape, profile, spans = job.shape, candidate.profile, candidate.spans
    kept = candidate.fitting.graph_stages
    stage_of = {layer: span.stage for span in spans for layer in span.layers}
    # A layer's backward depends on whether its stage keeps activations: as it is in the candidate, on the average.
    share = sum(stage_of[layer] in kept for layer in stage_of) / max(1, len(stage_of))
    kinds = [profile.of_layer(layer) for layer in range(shape.num_layers)]
    return PartitionTask(
        layer_seconds=tuple(k.forward + share * k.backward + (1 - share) * k.recomputed_backward for k in kinds),
        first_seconds=profile.embedding_forward + profile.embedding_backward,
        last_seconds=profile.loss,
        layer_parameters=shape.layer_parameters,
        first_parameters=shape.embedding_parameters,
        last_parameters=shape.head_parameters,
        num_ranks=job.num_ranks,
        num_stages=candidate.num_stages,
        max_parameters=job.max_parameters,
    )


def _seconds(candidate: Candidate) -> float:
    return candidate.prediction.step_seconds


def _simplicity(candidate: Candidate) -> tuple[int, int, float]:
    return candidate.num_stages, candidate.num_chunks, _seconds(candidate)


def _stage_numbers(job: Job, given: int | None) -> Iterable[int]:
    """Multiples of the ranks, up to a layer per stage with embedding and head apart."""
    if given is not None:
        return (given,)
    most = math.ceil((job.shape.num_layers + OUTER_STAGES) / job.num_ranks) * job.num_ranks
    return range(job.num_ranks, most + 1, job.num_ranks)


def _chunk_numbers(job: Job, given: int | None) -> list[int]:
    """Divisors of the batch, from half as many as ranks, which leaves most of them idle, up to a few per rank."""
    if given is not None:
        return [given]
    most = max(MOST_CHUNKS_PER_RANK * job.num_ranks, 2 * MOST_CHUNKS_PER_RANK)
    divisors = [number for number in range(1, min(job.batch_size, most) + 1) if job.batch_size % number == 0]
    return [number for number in divisors if 2 * number >= job.num_ranks] or divisors[-1:]
