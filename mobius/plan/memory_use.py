"""Decides what every rank does with its GPU memory by the predicted step: residency, kept activations and slots.

It knows not what fits (fit.py hands that in) and not how a step is predicted (simulation.py). Ranks are tried alike
first, each as far as its memory goes, since a step is as fast as its slowest rank; then each rank's neighbours of the
best are tried alone. A closed form (preference.py) says which are worth it where there are many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mobius.plan.fit import Choose
from mobius.plan.fit_request import FitRequest
from mobius.plan.preference import Candidate, Rates, Score, estimated_seconds
from mobius.plan.profile import Profile
from mobius.plan.simulation import simulated_seconds, without_collector
from mobius.plan.stage_costs import StepRules, stage_costs
from mobius.schedule.action import Action
from mobius.schedule.looped import compute_order, data_actions
from mobius.schedule.residency import add_transfers
from mobius.schedule.schedule import Schedule

MOST_ALIKE = 24
"""Settings of all ranks alike that are simulated; 7B's shape in 32 stages has at most 18."""
NUM_STEPS = 2
"""Simulated; the first has nothing to wait for, the second is the steady one."""
ALIKE = 0.001
"""Share of a step below which the setting with more resident stages is taken: it needs less host memory."""

_Chosen = tuple[Candidate, ...]
"""What each rank does."""


@dataclass(frozen=True)
class StepModel:
    """What a step is predicted with."""

    profile: Profile
    rules: StepRules


def chosen_stages(
    num_ranks: int, num_stages: int, chosen: Sequence[Candidate]
) -> tuple[frozenset[int], frozenset[int]]:
    """The resident stages, and those that keep their activations, of all ranks."""
    own = [range(rank, num_stages, num_ranks) for rank in range(num_ranks)]
    resident = {stage for stages, each in zip(own, chosen, strict=True) for stage in stages[: each.num_resident]}
    graphs = {s for stages, each in zip(own, chosen, strict=True) for s in stages[len(stages) - each.num_graphs :]}
    return frozenset(resident), frozenset(graphs)


def schedule_of_slots(
    num_ranks: int, num_stages: int, num_microbatches: int, slots: Sequence[int], resident: frozenset[int]
) -> Schedule:
    """As `build_schedule`, unchecked, for ranks with different numbers of slots (0: streams nothing)."""
    actions = tuple(
        _actions(
            rank, num_ranks, num_stages, num_microbatches, number, resident & {*range(rank, num_stages, num_ranks)}
        )
        for rank, number in enumerate(slots)
    )
    return Schedule(num_ranks, num_stages, num_microbatches, tuple(slots), actions, resident)


@lru_cache(maxsize=1024)
def _actions(
    rank: int, num_ranks: int, num_stages: int, num_microbatches: int, num_slots: int, resident: frozenset[int]
) -> tuple[Action, ...]:
    order = compute_order(rank, num_ranks, num_stages, num_microbatches)
    transfers = add_transfers(order, num_slots, resident) if num_slots else order
    return (*data_actions(rank, num_ranks, num_stages), *transfers)


def score_by_profile(request: FitRequest, model: StepModel) -> Score:
    """The closed form at the rates of a profile: seconds of one rank, its neighbours left out."""
    plan = request.plan
    rates = Rates.of(
        model.profile,
        request.shape,
        num_ranks=plan.num_ranks,
        stages_per_rank=plan.stages_per_rank,
        num_microbatches=plan.num_microbatches,
    )
    counts = [
        [plan.spans[stage].num_parameters(request.shape) for stage in plan.stages_of(rank)]
        for rank in range(plan.num_ranks)
    ]

    def score(rank: int, candidate: Candidate) -> float:
        tokens = request.tokens.step
        return estimated_seconds(candidate, counts[rank], tokens=tokens, clips=model.rules.clips, rates=rates)

    return score


def by_simulation(model: StepModel) -> Choose:
    """A choice for `fit_plan` that takes what the simulation says is fastest."""

    def choose(request: FitRequest, fitting: Sequence[Sequence[Candidate]]) -> Sequence[Candidate]:
        return _Search(request, model, fitting).run()

    return choose


class _Search:
    """Simulates settings of all ranks, none twice."""

    def __init__(self, request: FitRequest, model: StepModel, fitting: Sequence[Sequence[Candidate]]) -> None:
        self._request, self._model = request, model
        self._worth = [_undominated(candidates) for candidates in fitting]
        self._seconds: dict[_Chosen, float] = {}

    @without_collector()
    def run(self) -> _Chosen:
        for chosen in self._alike():
            self._simulate(chosen)
        best = self._best()
        for rank, candidates in enumerate(self._worth):
            for candidate in candidates:
                if candidate != best[rank] and abs(candidate.num_resident - best[rank].num_resident) <= 1:
                    self._simulate((*best[:rank], candidate, *best[rank + 1 :]))
            best = self._best()
        return best

    def _best(self) -> _Chosen:
        fastest = min(self._seconds.values())
        alike = [chosen for chosen, seconds in self._seconds.items() if seconds <= fastest * (1 + ALIKE)]
        return min(alike, key=lambda chosen: (-sum(each.num_resident for each in chosen), self._seconds[chosen]))

    def _alike(self) -> list[_Chosen]:
        """All ranks alike as far as their memory goes, with slots first or activations first."""
        numbers = sorted({candidate.num_resident for candidates in self._worth for candidate in candidates})
        orders: tuple[Callable[[Candidate], tuple[int, int]], ...] = (
            lambda each: (each.num_graphs, each.num_slots),
            lambda each: (each.num_slots, each.num_graphs),
        )
        score = score_by_profile(self._request, self._model)
        settings = [
            tuple(_nearest(candidates, number, order) for candidates in self._worth)
            for number in numbers
            for order in orders
        ]
        settings.append(tuple(min(c, key=lambda each: score(r, each)) for r, c in enumerate(self._worth)))
        unique = list(dict.fromkeys(settings))
        if len(unique) <= MOST_ALIKE:
            return unique
        return sorted(unique, key=lambda chosen: max(score(r, each) for r, each in enumerate(chosen)))[:MOST_ALIKE]

    def _simulate(self, chosen: _Chosen) -> None:
        if chosen in self._seconds:
            return
        request, model, plan = self._request, self._model, self._request.plan
        resident, graphs = chosen_stages(plan.num_ranks, plan.num_stages, chosen)
        costs = stage_costs(plan.spans, request.shape, model.profile, resident=resident, graph_stages=graphs)
        slots = [each.num_slots for each in chosen]
        schedule = schedule_of_slots(plan.num_ranks, plan.num_stages, plan.num_microbatches, slots, resident)
        self._seconds[chosen] = simulated_seconds(schedule, costs, model.profile, model.rules, num_steps=NUM_STEPS)


def _undominated(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those of which no other has as many resident stages, and as many activations and slots or more."""

    def is_worse(one: Candidate, other: Candidate) -> bool:
        no_more = one.num_graphs <= other.num_graphs and one.num_slots <= other.num_slots
        return one != other and one.num_resident == other.num_resident and no_more

    return [one for one in candidates if not any(is_worse(one, other) for other in candidates)]


def _nearest(
    candidates: Sequence[Candidate], num_resident: int, order: Callable[[Candidate], tuple[int, int]]
) -> Candidate:
    """The candidate with that many resident stages, or the most below, or the fewest; of those the most by `order`."""
    numbers = {candidate.num_resident for candidate in candidates}
    number = max((n for n in numbers if n <= num_resident), default=min(numbers))
    return max((candidate for candidate in candidates if candidate.num_resident == number), key=order)
