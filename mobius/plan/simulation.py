"""Predicts a step: plays a schedule with the costs of a profile over everything that works at the same time.

It decides nothing, and the runtime does not know it. What waits for what is what executor, slots and stepper do:

    compute     in the order of the actions; waits for the message, the stage's update of the step before, its load
    load        waits for its slot and for the stage's update; the copies of a rank take turns
    offload     waits for the stage's last compute; its gradients then wait for the optimizer
    optimizer   one stage's piece at a time, the lowest stage whose gradients are home first; with clipping only once
                all ranks have ended their backward
    step        begins when the last rank has ended the one before: loss and norms are summed over all ranks

Copies, optimizers and messages through the host share its memory and their links (tasks.py). Compute also waits for
the host to enqueue it, one action after the other from the step's beginning on. Everything else of the machine is idle.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mobius.plan.profile import Profile
from mobius.plan.stage_costs import StageCost, StepRules
from mobius.plan.step_tasks import ComputeTask, StepTasks
from mobius.plan.tasks import run
from mobius.schedule.lanes import Lane, LaneSpan, WaitCause
from mobius.schedule.schedule import Schedule


@dataclass(frozen=True)
class Prediction:
    """A steady step, and all spans of the simulated ones."""

    step_seconds: float
    busy_seconds: tuple[float, ...]
    """Of compute, by rank."""
    waits: tuple[dict[WaitCause, float], ...]
    """Seconds that compute waited, by rank and cause."""
    used_shares: dict[str, float]
    """Resource -> share of what it could have done in all simulated steps."""
    step_ends: tuple[float, ...]
    spans: tuple[tuple[LaneSpan, ...], ...]
    """By rank, in order of their start."""

    @property
    def bubble(self) -> float:
        """Share of the step in which compute stands still, over all ranks."""
        return 1 - sum(self.busy_seconds) / (self.step_seconds * len(self.busy_seconds))

    def worst_wait(self, cause: WaitCause) -> float:
        """Seconds of the rank that waits longest for `cause`, as a run reports it."""
        return max(waits[cause] for waits in self.waits)


def simulate_steps(
    schedule: Schedule, costs: Sequence[StageCost], profile: Profile, rules: StepRules, *, num_steps: int = 3
) -> Prediction:
    """Play `num_steps` steps back to back and describe the last one.

    Loads and offloads of resident stages in `schedule` are left out, so it may be one that streams all stages.
    """
    return _describe(*_play(schedule, costs, profile, rules, num_steps))


def simulated_seconds(
    schedule: Schedule, costs: Sequence[StageCost], profile: Profile, rules: StepRules, *, num_steps: int = 3
) -> float:
    """`simulate_steps(...).step_seconds`, in less time because nothing else is told."""
    builder, _ = _play(schedule, costs, profile, rules, num_steps)
    ends = [0.0, *(task.end for task in builder.step_ends)]
    return ends[-1] - ends[-2]


def _play(
    schedule: Schedule, costs: Sequence[StageCost], profile: Profile, rules: StepRules, num_steps: int
) -> tuple[StepTasks, dict[Hashable, float]]:
    """The steps as they went, and what was used of each resource."""
    builder = StepTasks(schedule, costs, profile, rules)
    with without_collector():
        for _ in range(num_steps):
            builder.add_step()
        return builder, run(builder.tasks, builder.capacities)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """No search for garbage meanwhile: many thousand tasks would set off many, each through all that torch has made.

    Around several simulations too: what they leave has no circles, and a search between two of them took a tenth of
    their time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def stash_over_time(prediction: Prediction, rank: int, stage_bytes: Mapping[int, int]) -> list[tuple[float, int]]:
    """What the stages of `rank` keep from forward to backward in the last step: (seconds from its start, bytes) pairs.

    `stage_bytes` has for each stage what it keeps of one microbatch: its layers' inputs, or their graphs. It is there
    from the start of the forward to the end of the backward. The first pair is (0, 0), and each holds until the next.
    """
    start = prediction.step_ends[-2] if len(prediction.step_ends) > 1 else 0.0
    changes = []
    for span in prediction.spans[rank]:
        if span.lane is Lane.COMPUTE and span.step == len(prediction.step_ends) and span.name[0] in "FB":
            stage = int(span.name[1:].partition(".")[0])
            taken = (span.start - start, stage_bytes[stage])
            changes.append(taken if span.name[0] == "F" else (span.end - start, -stage_bytes[stage]))
    held, course = 0, [(0.0, 0)]
    for seconds, change in sorted(changes):
        held += change
        course.append((seconds, held))
    return course


def _describe(builder: StepTasks, used: Mapping[Hashable, float]) -> Prediction:
    ends = tuple(task.end for task in builder.step_ends)
    last = len(ends) - 1
    start = ends[-2] if last else 0.0
    busy, waits = [], []
    spans: list[list[LaneSpan]] = [[] for _ in builder.ranks]
    for task, (rank, lane, name, step, peer) in builder.names.items():
        if task.end > task.start or lane is Lane.COMPUTE:
            spans[rank].append(LaneSpan(lane, str(name), step, task.start, task.end, peer))
    for rank, state in enumerate(builder.ranks):
        rank_waits = dict.fromkeys(WaitCause, 0.0)
        busy.append(0.0)
        before = 0.0
        for compute in state.computes:
            waited = _waits_of(compute, before)
            before = compute.task.end
            spans[rank] += [
                LaneSpan(Lane.WAIT, cause.value, compute.step + 1, since, until) for cause, since, until in waited
            ]
            if compute.step == last:
                busy[rank] += compute.task.end - compute.task.start
                for cause, since, until in waited:
                    rank_waits[cause] += until - since
        own_end = max(c.task.end for c in state.computes if c.step == last)
        rank_waits[WaitCause.NEIGHBOURS] += ends[-1] - own_end
        waits.append(rank_waits)
    end = max(task.end for task in builder.tasks)
    shares = {name: used[name] / (builder.capacities[name] * end) for name in used if isinstance(name, str)}
    return Prediction(
        step_seconds=ends[-1] - start,
        busy_seconds=tuple(busy),
        waits=tuple(waits),
        used_shares=shares,
        step_ends=ends,
        spans=tuple(tuple(sorted(rank_spans, key=lambda s: (s.start, -s.end))) for rank_spans in spans),
    )


def _waits_of(compute: ComputeTask, before: float) -> list[tuple[WaitCause, float, float]]:
    """For what compute stood still before it began, one cause after the other, as an action waits."""
    since = max(before, compute.begin.end if compute.begin else 0.0)
    found = []
    for cause, task in compute.waits.items():
        if task is not None and task.end > since:
            found.append((cause, since, task.end))
            since = task.end
    return found
