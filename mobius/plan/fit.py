"""Fits a plan into GPU memory: refuses what cannot, and spends what is left on what makes a step shorter.

Three things do, and they share the memory of a rank:

    resident stages   the first of the rank: no loads, no offloads, and no update on the CPU to wait for
    activations       the last of the rank: backward need not run their forward again, a quarter of their compute
    a third slot      loads a stage while the gradients of another leave

Kept activations need their weights in place from forward to backward: those of a resident stage are, and of a rank's
streamed stages the last `num_slots` stay.

    rank 0 of 2, five stages, stage 0 resident, two slots, the last two keep their activations:

    stages                 F0 F2 F4 F6 F8   B8 B6 B4 B2 B0
    weights of 6 and 8 stay         ===========

What fits is predicted by budget.py; which of it is best is asked of a score (preference.py), or for all ranks
together (memory_use.py, by simulation).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from mobius.config.config import Recompute
from mobius.errors import GpuMemoryError, PlanError
from mobius.plan.budget import GpuNeed, check_gpu_memory, fullest, gpu_need
from mobius.plan.fit_request import FitRequest
from mobius.plan.plan import Plan
from mobius.plan.preference import Candidate, Rates, Score, estimated_seconds
from mobius.plan.remedies import find_remedies
from mobius.plan.working_set import LayerBytes
from mobius.units import bytes_text

FILLED_SHARE = 0.97
"""Of the GPU memory a rank may use, what options may fill; the rest is for what the prediction does not see."""
PREFETCH_SLOTS = 3
"""A third slot loads a stage while the gradients of another leave: it pays where a stage computes no longer than that
takes."""


@dataclass(frozen=True)
class FittedPlan:
    """A plan that fits, and which of a rank's stages keep their activations from forward to backward."""

    plan: Plan
    """With the rank's own slots; for the other ranks as if their GPUs had as much memory as this one's."""
    graph_stages: frozenset[int]
    others_graph_stages: frozenset[int] = frozenset()
    """The same of the other ranks, if their GPUs have as much memory as this one's."""
    uses: tuple[Candidate, ...] = ()
    """What every rank does with its memory if all have as much as this one."""


@dataclass(frozen=True)
class _Layer:
    """What was measured of a layer and a microbatch."""

    graph_bytes: int | None
    peak_bytes: int | None


Choose = Callable[[FitRequest, Sequence[Sequence[Candidate]]], Sequence[Candidate]]
"""From what fits on each rank, which is not empty, to what each rank does."""


def fit_plan(
    request: FitRequest,
    *,
    rank: int,
    graph_bytes: int | None = None,
    peak_bytes: int | None = None,
    score: Score | None = None,
    choose: Choose | None = None,
) -> FittedPlan:
    """Check that the plan fits and use what is left of the memory as `score` likes best.

    Of the candidates that fit (first stages resident, last stages with activations, slots) each rank takes the one
    with the least score, by default `estimated_seconds`; of equal ones that with more resident stages, then more
    activations, then more slots; with `choose` that decides instead. Residency and slots of a rank change nothing that
    another one sees. `graph_bytes` is what a layer's graph holds for a microbatch, measured; without it nothing is kept
    but what is asked for. `peak_bytes` is the most that its forward and backward take, where that was measured too.

    Raises PlanError for more resident stages than a rank has, and GpuMemoryError if the least does not fit, the
    resident stages that are asked for do not, or with `Recompute.NONE` all activations do not.
    """
    chosen = memory_uses(request, graph_bytes=graph_bytes, peak_bytes=peak_bytes, score=score, choose=choose)
    return fitted_plan(request.plan, chosen, rank=rank)


def memory_uses(
    request: FitRequest,
    *,
    graph_bytes: int | None = None,
    peak_bytes: int | None = None,
    score: Score | None = None,
    choose: Choose | None = None,
) -> tuple[Candidate, ...]:
    """What every rank does with its memory if all have as much; errors as `fit_plan`."""
    plan, per_rank = request.plan, request.plan.stages_per_rank
    if request.num_resident is not None and request.num_resident > per_rank:
        raise PlanError(
            f"--resident_stages {request.num_resident}: each rank has {per_rank} stage(s). Use {per_rank} or less, or "
            "raise --num_stages."
        )
    if request.gpu_bytes is None:
        return (_least(request),) * plan.num_ranks
    layer = _Layer(graph_bytes, peak_bytes)
    _refuse_what_cannot_fit(request, layer)
    fitting = [_fitting(request, rank, layer) for rank in range(plan.num_ranks)]
    if choose is not None:
        return tuple(choose(request, fitting))
    score = score or _default_score(request)

    def key(rank: int, candidate: Candidate) -> tuple[float, int, int, int]:
        return score(rank, candidate), -candidate.num_resident, -candidate.num_graphs, -candidate.num_slots

    return tuple(min(fitting[rank], key=partial(key, rank)) for rank in range(plan.num_ranks))


def fitted_plan(plan: Plan, chosen: Sequence[Candidate], *, rank: int) -> FittedPlan:
    """The plan where all ranks do as `chosen` says, with the stages that keep activations on `rank` and on others."""
    fitted = plan.with_resident([each.num_resident for each in chosen], [each.num_slots for each in chosen])
    stages = plan.stages_of(rank)
    graphs = [_last(plan.stages_of(each), candidate.num_graphs) for each, candidate in enumerate(chosen)]
    others = frozenset[int]().union(*graphs) - frozenset(stages)
    return FittedPlan(fitted, graphs[rank], others, tuple(chosen))


def _last(stages: range, number: int) -> frozenset[int]:
    return frozenset(stages[len(stages) - number :])


def fit_as_given(
    request: FitRequest, given: FittedPlan, *, rank: int, measured: LayerBytes | None = None
) -> FittedPlan:
    """Check that a plan made elsewhere fits on every rank; `given.graph_stages` are those of all ranks.

    Raises GpuMemoryError with the arithmetic.
    """
    plan, num_ranks = given.plan, given.plan.num_ranks
    layer = _Layer(None, None) if measured is None else _Layer(measured.graph, measured.peak)
    if request.gpu_bytes is not None:
        needs = [_need_of(request, plan, each, given.graph_stages, layer) for each in range(num_ranks)]
        need = fullest(needs)
        if need.total > request.gpu_bytes:
            raise GpuMemoryError(
                f"--plan: rank {need.rank} needs {bytes_text(need.total)} of GPU memory ({need.describe()}), "
                f"{bytes_text(request.gpu_bytes)} is available. Make a plan for this memory (--dry_run "
                "--gpu_memory_limit), or leave --plan out."
            )
    own = frozenset(plan.stages_of(rank))
    uses = tuple(
        Candidate(
            len(plan.resident.intersection(plan.stages_of(each))),
            len(given.graph_stages.intersection(plan.stages_of(each))),
            plan.slots[each],
        )
        for each in range(num_ranks)
    )
    return FittedPlan(plan, given.graph_stages & own, given.graph_stages - own, uses)


def _default_score(request: FitRequest) -> Score:
    """Seconds by `estimated_seconds` at the rates that are known."""
    plan, rates = request.plan, Rates()
    clips = len(request.waiting) == plan.num_stages
    counts = [
        [plan.spans[stage].num_parameters(request.shape) for stage in plan.stages_of(rank)]
        for rank in range(plan.num_ranks)
    ]

    def score(rank: int, candidate: Candidate) -> float:
        return estimated_seconds(candidate, counts[rank], tokens=request.tokens.step, clips=clips, rates=rates)

    return score


def _least(request: FitRequest) -> Candidate:
    """What takes the least memory of what is asked for."""
    is_resident = request.plan.num_slots is None
    return _with_resident(request, request.plan.stages_per_rank if is_resident else request.num_resident or 0)


def _with_resident(request: FitRequest, num_resident: int) -> Candidate:
    """So many resident stages, and beside them no more than is asked for."""
    per_rank = request.plan.stages_per_rank
    num_graphs = per_rank if request.recompute is Recompute.NONE else 0
    return Candidate(num_resident, num_graphs, min(request.plan.num_slots or 0, per_rank - num_resident))


def _candidates(request: FitRequest, *, knows_graphs: bool) -> Iterator[Candidate]:
    """Everything that may be asked of a rank's memory, whether it fits or not."""
    plan, least = request.plan, _least(request)
    per_rank = plan.stages_per_rank
    is_open = plan.num_slots is not None and request.num_resident is None
    may_keep = request.recompute is Recompute.AUTO and knows_graphs
    for num_resident in range(least.num_resident, per_rank + 1 if is_open else least.num_resident + 1):
        num_streamed = per_rank - num_resident
        for num_graphs in range(least.num_graphs, per_rank + 1 if may_keep else least.num_graphs + 1):
            in_slots = min(num_graphs, num_streamed)
            if num_streamed == 0:
                yield Candidate(num_resident, num_graphs, 0)
            elif plan.num_slots == 1:  # no prefetch: of the streamed stages nothing but the last stays
                yield from [Candidate(num_resident, num_graphs, 1)] if in_slots <= 1 else []
            else:
                wanted = {max(slots, in_slots) for slots in (PREFETCH_SLOTS, plan.num_slots or 0)}
                yield from (Candidate(num_resident, num_graphs, s) for s in {min(w, num_streamed) for w in wanted})


def _fitting(request: FitRequest, rank: int, layer: _Layer) -> list[Candidate]:
    """The candidates that fit; the least candidate if no other does."""
    assert request.gpu_bytes is not None
    usable = int(request.gpu_bytes * FILLED_SHARE) - request.reserved_bytes

    @cache
    def states_take(num_resident: int, num_slots: int) -> int:
        return _need(request, rank, Candidate(num_resident, 0, num_slots), layer).states

    @cache
    def rest_takes(num_graphs: int) -> int:
        need = _need(request, rank, Candidate(0, num_graphs, request.plan.num_slots or 0), layer)
        return need.total - need.states

    fitting = [
        candidate
        for candidate in _candidates(request, knows_graphs=layer.graph_bytes is not None)
        if states_take(candidate.num_resident, candidate.num_slots) + rest_takes(candidate.num_graphs) <= usable
    ]

    return fitting or [_least(request)]


def _need(request: FitRequest, rank: int, candidate: Candidate, layer: _Layer) -> GpuNeed:
    counts = [candidate.num_resident] * request.plan.num_ranks
    plan = request.plan.with_resident(counts, candidate.num_slots)
    return _need_of(request, plan, rank, _last(plan.stages_of(rank), candidate.num_graphs), layer)


def _need_of(request: FitRequest, plan: Plan, rank: int, graph_stages: frozenset[int], layer: _Layer) -> GpuNeed:
    return gpu_need(
        plan,
        request.shape,
        request.sizes,
        request.tokens,
        rank=rank,
        waiting=request.waiting,
        graph_stages=graph_stages,
        graph_bytes=layer.graph_bytes,
        peak_bytes=layer.peak_bytes,
        compiled=request.compiled,
    )


def need_bytes(
    request: FitRequest, fitted: FittedPlan, *, graph_bytes: int | None = None, peak_bytes: int | None = None
) -> tuple[int, ...]:
    """GPU bytes of every rank, all ranks having the memory of this one."""
    layer, graphs = _Layer(graph_bytes, peak_bytes), fitted.graph_stages | fitted.others_graph_stages
    return tuple(_need_of(request, fitted.plan, r, graphs, layer).total for r in range(fitted.plan.num_ranks))


def _refuse_what_cannot_fit(request: FitRequest, layer: _Layer) -> None:
    """Raise GpuMemoryError, alike on all ranks, if the fullest rank cannot hold the least that is asked for."""
    available, least = request.gpu_bytes, _least(request)
    assert available is not None
    need, is_offloading = _fullest_need(request, least.num_resident, layer), request.plan.num_slots is not None
    if need.total <= available:
        return
    fewer = range(least.num_resident - 1, -1, -1) if is_offloading else ()
    fits = next((number for number in fewer if _fullest_need(request, number, layer).total <= available), None)
    if fits is None:  # no residency was asked for, or it is not to blame
        lowest = replace(request, num_resident=0) if is_offloading else request

        def bytes_of(changed: FitRequest) -> int:
            # What was measured is of the microbatch as it is; another one's is estimated.
            is_same = changed.tokens.microbatch == request.tokens.microbatch
            return _fullest_need(changed, _least(changed).num_resident, layer if is_same else _Layer(None, None)).total

        check_gpu_memory(
            _fullest_need(lowest, _least(lowest).num_resident, layer),
            available_bytes=available,
            is_offloading=is_offloading,
            remedies=find_remedies(lowest, bytes_of, available),
        )
        return
    raise GpuMemoryError(
        f"--resident_stages {least.num_resident}: rank {need.rank} needs {bytes_text(need.total)} of GPU "
        f"memory ({need.describe()}), {bytes_text(available)} is available. At most --resident_stages {fits} fits, "
        f"which needs {bytes_text(_fullest_need(request, fits, layer).total)}; auto chooses by what is free."
    )


def _fullest_need(request: FitRequest, num_resident: int, layer: _Layer) -> GpuNeed:
    candidate = _with_resident(request, num_resident)
    return fullest(_need(request, rank, candidate, layer) for rank in range(request.plan.num_ranks))
