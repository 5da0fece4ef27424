"""Chooses each rank's use of GPU memory: the one with the shortest step among those that fit (fit.py).

A closed form predicts the step with the rates of a profile or of one kind of machine, or a simulation does. The
simulation tries settings that are equal on all ranks as far as their memory allows, because the slowest rank determines
the step. If there are many, the closed form preselects.

If the fastest setting needs more host memory than is available, ranks choose among uses that need less of it
(`choose_within_host_memory`): resident stages need none, and activations can stay on the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from mobius.log import progress_bar
from mobius.planner.memory_estimates import estimate_host_memory
from mobius.planner.profile import Profile
from mobius.planner.request import PlanRequest
from mobius.planner.step_prediction import (
    predict_min_step_seconds,
    predict_step_seconds,
    without_garbage_collection,
)
from mobius.schedule.plan import MemoryUse, Plan

MOST_ALIKE = 24
"""Maximum number of settings to simulate; 7B's shape in 32 stages has at most 18."""
WORTH = 0.01
"""Share of a step that a setting's lower bound must gain to be simulated."""
ALIKE = 0.001
"""Share of a step within which the setting with more resident stages wins: it needs less host memory."""

Score = Callable[[int, MemoryUse], float]
"""Cost of a rank's use of memory, such as seconds per step; less is better."""
MemoryPolicy = Callable[[PlanRequest, Sequence[Sequence[MemoryUse]]], Sequence[MemoryUse]]
"""Chooses each rank's use of memory among those that fit, of which there is at least one."""


@dataclass(frozen=True)
class Rates:
    """Rates of one rank's compute and updates.

    The defaults were measured on four H200 and 64 cores with Llama-2-7B's shape, 32768 tokens a step: 0.76 s with
    nothing streamed or recomputed; with everything streamed 1.2 s, or 1.6 s with clipping. On other machines only their
    relation matters.
    """

    flops: float = 4.35e14
    """Per second and GPU, bubbles of the pipeline included."""
    updates_in_step: float = 1.4e9
    """Parameters per second and rank, updated on the CPU while the GPU computes and gradients travel."""
    updates_after_step: float = 2.2e9
    """Parameters per second and rank with clipping, when gradients have arrived."""

    @classmethod
    def of(cls, profile: Profile, request: PlanRequest) -> Rates:
        """Return the rates of a profile, with the bubble of equal stages, which fill and drain once per round."""
        plan, shape = request.plan, request.shape
        turns = plan.stages_per_rank * plan.microbatches_per_round
        kinds = [profile.of_layer(layer) for layer in range(shape.num_layers)]
        layers = sum(kind.forward + kind.backward for kind in kinds) * (turns + plan.num_ranks - 1) / turns
        head = shape.head_parameters if shape.trained is None else shape.trained.head
        operations = shape.product_operations - 4 * shape.head_parameters - 2 * head
        return cls(
            flops=operations * profile.microbatch_tokens / layers,
            updates_in_step=profile.cpu_adamw_beside_copies,
            updates_after_step=profile.cpu_adamw_together,
        )


def estimated_seconds(
    use: MemoryUse,
    parameters: Sequence[int],
    *,
    tokens: int,
    clips: bool,
    rates: Rates,
    trained: Sequence[int] | None = None,
    updated: Sequence[int] | None = None,
) -> float:
    """Estimate one rank's step; `parameters` are those of its stages that compute, `tokens` those of a step.

    Compute is 6 FLOP per parameter and token, plus 2 if its forward is recomputed, minus 2 if it is not `trained`
    (None: all are). The CPU updates the `updated` parameters of streamed stages (None: the trained ones), one stage
    after the other. Without clipping it updates while the GPU computes. Gradients of the first streamed stage arrive
    last, and its update overlaps with backward and forward of the resident stages before it. With clipping, updates
    begin when the step ends and overlap with the forwards of earlier stages. Copies and neighbours are left out.
    """
    num_stages, resident = len(parameters), use.num_resident
    forward = 2 * sum(parameters) / num_stages * tokens / rates.flops
    compute = forward * (4 * num_stages - use.num_saving_activations)
    if trained is not None:
        compute -= 2 * (sum(parameters) - sum(trained)) * tokens / rates.flops
    on_host = updated if updated is not None else parameters if trained is None else trained
    streamed = on_host[resident:]
    if not any(streamed):
        return compute
    updates = rates.updates_after_step if clips else rates.updates_in_step
    all_updates, first_update = (count / updates for count in (sum(streamed), streamed[0]))
    if clips:
        before_first, before_last = forward * resident, forward * (num_stages - 1)
        return compute + max(0.0, first_update - before_first, all_updates - before_last)
    return max(compute, all_updates, compute + first_update - 3 * forward * resident)


def closed_form_score(request: PlanRequest, profile: Profile | None = None) -> Score:
    """Return `estimated_seconds` as a score, at the rates of `profile` or the defaults."""
    plan, shape, rates = request.plan, request.shape, Rates() if profile is None else Rates.of(profile, request)
    own = [plan.cuts[rank :: plan.num_ranks] for rank in range(plan.num_ranks)]
    counts = [[cut.num_active(shape) for cut in cuts] for cuts in own]
    trained = [[cut.num_active_trained(shape) for cut in cuts] for cuts in own]
    share = request.rules.sharding.shard_size
    updated = [[0 if shape.keeps_trained_on_gpu else share(cut.num_trained(shape)) for cut in cuts] for cuts in own]

    def score(rank: int, use: MemoryUse) -> float:
        return estimated_seconds(
            use,
            counts[rank],
            tokens=request.step_tokens,
            clips=request.rules.clips,
            rates=rates,
            trained=trained[rank],
            updated=updated[rank],
        )

    return score


def policy_by_score(score: Score) -> MemoryPolicy:
    """Let each rank take the use of least score; ties go to more resident stages, saved activations, then slots."""

    def key(rank: int, use: MemoryUse) -> tuple[float, int, int, int, int]:
        return (
            score(rank, use),
            -use.num_resident,
            -use.num_saving_activations,
            -use.num_slots,
            use.num_offloading_activations,
        )

    def choose(request: PlanRequest, fitting: Sequence[Sequence[MemoryUse]]) -> Sequence[MemoryUse]:
        return [min(uses, key=partial(key, rank)) for rank, uses in enumerate(fitting)]

    return choose


def policy_by_simulation(profile: Profile, to_beat: float = math.inf) -> MemoryPolicy:
    """Let all ranks take the setting that is fastest by simulation.

    If no lower bound is below `to_beat` seconds, nothing is simulated, and the setting of the least bound is taken.
    """
    return partial(_fastest, profile=profile, to_beat=to_beat)


def choose_within_host_memory(
    policy: MemoryPolicy, request: PlanRequest, fitting: Sequence[Sequence[MemoryUse]]
) -> Sequence[MemoryUse]:
    """Choose by `policy`, among uses that fit the host's memory together if its first choice does not.

    If none do, each rank takes the use that needs least of it.
    """
    fastest = policy(request, fitting)
    if fits_host(request, request.plan.with_memory_uses(fastest)):
        return fastest
    return policy(request, _light(request, fitting))


def fits_host(request: PlanRequest, plan: Plan) -> bool:
    """Whether the host has the memory for a plan; True if its memory is not known."""
    return request.host_bytes is None or estimate_host_memory(request, plan).total <= request.host_bytes


def lightest(request: PlanRequest, fitting: Sequence[Sequence[MemoryUse]]) -> list[MemoryUse]:
    """Return each rank's use that needs the least host memory."""
    total = _host_bytes(request, fitting)
    return [min(uses, key=partial(total, rank)) for rank, uses in enumerate(fitting)]


def _host_bytes(request: PlanRequest, fitting: Sequence[Sequence[MemoryUse]]) -> Callable[[int, MemoryUse], int]:
    """Return the host bytes of all ranks as a function of one rank's use; other ranks take their first."""
    first = [uses[0] for uses in fitting]

    @cache
    def total(rank: int, use: MemoryUse) -> int:
        return estimate_host_memory(
            request, request.plan.with_memory_uses([*first[:rank], use, *first[rank + 1 :]])
        ).total

    return total


def _light(request: PlanRequest, fitting: Sequence[Sequence[MemoryUse]]) -> list[list[MemoryUse]]:
    """Return the uses that fit the host whatever the other ranks take: memory beyond the least is shared evenly."""
    assert request.host_bytes is not None
    total, least = _host_bytes(request, fitting), lightest(request, fitting)
    left = request.host_bytes - estimate_host_memory(request, request.plan.with_memory_uses(least)).total
    more = max(0, left) // len(fitting)
    return [
        [use for use in uses if total(rank, use) <= total(rank, least[rank]) + more]
        for rank, uses in enumerate(fitting)
    ]


@without_garbage_collection()
def _fastest(
    request: PlanRequest, fitting: Sequence[Sequence[MemoryUse]], *, profile: Profile, to_beat: float
) -> tuple[MemoryUse, ...]:
    """Return the fastest setting by simulation; `to_beat` as in `policy_by_simulation`.

    Settings are simulated in the order of their lower bounds, as long as one may be faster by `WORTH`.
    """
    bounds: dict[tuple[MemoryUse, ...], float] = {}
    for chosen in _alike(request, profile, fitting):
        bounds[chosen] = predict_min_step_seconds(request.plan.with_memory_uses(chosen), request, profile)
    seconds: dict[tuple[MemoryUse, ...], float] = {}
    with progress_bar("simulating", " steps") as bar:
        for chosen in sorted(bounds, key=lambda chosen: (bounds[chosen], *_host_use(chosen))):
            if bounds[chosen] >= min([to_beat, *seconds.values()]) * (1 - WORTH):
                break
            seconds[chosen] = predict_step_seconds(request.plan.with_memory_uses(chosen), request, profile)
            bar.update()
    known = seconds or bounds
    alike = [chosen for chosen in known if known[chosen] <= min(known.values()) * (1 + ALIKE)]
    return min(alike, key=lambda chosen: (*_host_use(chosen), known[chosen]))


def _alike(
    request: PlanRequest, profile: Profile, fitting: Sequence[Sequence[MemoryUse]]
) -> list[tuple[MemoryUse, ...]]:
    """Return settings that are equal on all ranks as far as memory allows, preferring slots or saved activations."""
    numbers = sorted({use.num_resident for uses in fitting for use in uses})
    orders: tuple[Callable[[MemoryUse], tuple[int, ...]], ...] = (
        lambda use: (use.num_saving_activations, use.num_slots),
        lambda use: (use.num_slots, use.num_saving_activations),
        lambda use: (-use.num_offloading_activations, use.num_saving_activations, use.num_slots),
    )
    score = closed_form_score(request, profile)
    settings = [tuple(_nearest(uses, number, order) for uses in fitting) for number in numbers for order in orders]
    settings.append(tuple(policy_by_score(score)(request, fitting)))
    unique = list(dict.fromkeys(settings))
    if len(unique) <= MOST_ALIKE:
        return unique
    return sorted(unique, key=lambda chosen: max(score(rank, use) for rank, use in enumerate(chosen)))[:MOST_ALIKE]


def _host_use(chosen: Sequence[MemoryUse]) -> tuple[int, int]:
    """Return the use of host memory, less being better: by fewer resident stages, then by more offloading ones."""
    return -sum(use.num_resident for use in chosen), sum(use.num_offloading_activations for use in chosen)


def _nearest(uses: Sequence[MemoryUse], num_resident: int, order: Callable[[MemoryUse], tuple[int, ...]]) -> MemoryUse:
    """Return the use with that many resident stages, else the most below, else the fewest; ties by `order`."""
    numbers = {use.num_resident for use in uses}
    number = max((n for n in numbers if n <= num_resident), default=min(numbers))
    return max((use for use in uses if use.num_resident == number), key=order)
