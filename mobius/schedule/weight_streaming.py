"""Decides when a stage's weights are in a GPU slot: adds loads and offloads to one rank's compute order.

A slot is GPU memory for one stage's weights. A resident stage's weights stay on the GPU.

A run is all microbatches of one stage in one direction. Rank 0 of 2, stages 0, 2 and 4, two slots:

    compute   F0        F2        F4        B4        B2        B0
    load      L0 L2     L4 in 0's                     L0 in 4's
    offload             O0                       O4        O2        O0

Resident stages need no slot. While they compute, the next streamed stages are loaded into the slots. If stage 0 were
resident, L2 and L4 would be the first actions of the step and the only loads.

Before each run the slots are assigned to the stages of the nearest runs, starting with this run. A loaded stage without
an assigned slot is offloaded. An assigned stage that is not loaded is loaded at once, during the run that is about to
start. So the last stage stays on the GPU between its forward and its backward, and a stage that is needed soon is not
loaded twice. This is Belady's rule: evict the stage whose next use is farthest. No other choice moves fewer bytes.

With a slot for each streamed stage, weights are loaded once, at the beginning of the step, and stay until the stage's
last backward. A depth-first order always has these slots, because a rank's stages compute in turn.

Gradients of streamed stages accumulate on the GPU in buffers. If gradients accumulate over rounds, several stages have
unfinished sums. If there are fewer buffers than stages, the sums are offloaded and loaded by the rule for weights:
before the backwards of a stage, the buffers are assigned to this stage and to the stages whose backwards come next.
Forwards do not count. With two buffers:

    compute   B4          B2          B0          F0 F2 F4     B4
    sums         LS2      OS4 LS0     OS2 LS4     OS0            LS2
"""

from collections.abc import Collection, Sequence
from functools import cache
from itertools import groupby

from mobius.schedule.action import Action, ActionKind


def add_transfers(
    order: Sequence[Action], num_slots: int, num_sum_buffers: int, resident: Collection[int]
) -> list[Action]:
    """Add the copies that `num_slots` slots and the sum buffers require to `order`, the compute actions of one rank.

    Stages in `resident` have no copies. The result starts with the loads of the first streamed stages and ends with
    every slot empty. Each stage is offloaded after its last backward; the offload copies its gradients to the host and
    frees the slot for the next load. In an evaluation, a stage is offloaded after its forward.
    """
    runs = [list(run) for _, run in groupby(order, key=_run_of)]
    stages = [run[0].stage for run in runs]
    backward = [stage if run[-1].kind.is_backward else None for stage, run in zip(stages, runs, strict=True)]
    last = {stage: position for position, stage in enumerate(backward)}
    sums = _Sums([None if stage in resident else stage for stage in backward], num_sum_buffers)
    result: list[Action] = []
    loaded: list[int] = []
    coming = _coming(stages, num_slots, resident)
    for position, run in enumerate(runs):
        stage, wanted = stages[position], [*coming[position]]
        result += [Action(ActionKind.OFFLOAD, stage) for stage in loaded if stage not in wanted]
        result += [Action(ActionKind.LOAD, stage) for stage in wanted if stage not in loaded]
        loaded = wanted
        own_loads, loads = sums.before(position)
        result += own_loads
        # Stages use sum buffers in turn, and this stage takes its buffer by its first backward. So loads for the next
        # stages come later.
        first = next((place for place, action in enumerate(run, start=1) if action.kind.is_backward), 0)
        result += [*run[:first], *loads, *run[first:]]
        result += sums.after(position)
        if stage in loaded and last.get(stage) == position:
            loaded.remove(stage)
            result.append(Action(ActionKind.OFFLOAD, stage))
    return [*result, *(Action(ActionKind.OFFLOAD, stage) for stage in loaded)]


def _coming(stages: Sequence[int | None], number: int, resident: Collection[int] = ()) -> list[list[int]]:
    """Return, for each position in `stages`, the next `number` different streamed stages, in order of use."""
    coming: list[list[int]] = []
    following: list[int] = []
    for stage in reversed(stages):
        if stage is not None and stage not in resident:
            following = [stage, *(each for each in following if each != stage)][:number]
        coming.append(following)
    return coming[::-1]


@cache
def num_loads(num_streamed: int, num_slots: int, rounds: int) -> tuple[int, ...]:
    """Return how often a step loads each streamed stage of a rank, in order; resident stages do not matter."""
    forward = list(range(num_streamed))
    runs = [*forward, *forward[::-1]] * rounds
    numbers, loaded = [0] * num_streamed, list[int]()
    for wanted in _coming(runs, num_slots):
        for stage in wanted:
            numbers[stage] += stage not in loaded
        loaded = wanted
    return tuple(numbers)


class _Sums:
    """Decides when unfinished gradient sums of one rank's streamed stages are copied to the host and back."""

    def __init__(self, backward: Sequence[int | None], num_buffers: int) -> None:
        """`backward` has the stage of each run that is the backward of a streamed stage; None for other runs."""
        self._backward, self._coming = backward, _coming(backward, num_buffers)
        self._last = {stage: position for position, stage in enumerate(backward)}
        self._on_gpu, self._on_host = set[int](), set[int]()

    def before(self, position: int) -> tuple[list[Action], list[Action]]:
        """Return the loads of sums for the run at `position`, and the loads for the next stages into free buffers."""
        stage = self._backward[position]
        if stage is None:
            return [], []
        arriving = [each for each in self._coming[position] if each in self._on_host]
        self._on_host.difference_update(arriving)
        self._on_gpu.update(arriving, [stage])
        loads = [Action(ActionKind.LOAD_GRADIENT_SUMS, each) for each in arriving]
        return [load for load in loads if load.stage == stage], [load for load in loads if load.stage != stage]

    def after(self, position: int) -> list[Action]:
        """Return the offloads of sums whose buffers the next stages need; finished sums leave with their stage."""
        stage = self._backward[position]
        if stage is None:
            return []
        if self._last[stage] == position:
            self._on_gpu.discard(stage)
            return []
        leaving = [each for each in sorted(self._on_gpu) if each not in self._next(position)]
        self._on_gpu.difference_update(leaving)
        self._on_host.update(leaving)
        return [Action(ActionKind.OFFLOAD_GRADIENT_SUMS, each) for each in leaving]

    def _next(self, position: int) -> Sequence[int]:
        """Return the stages to which the buffers are assigned from the next backward on."""
        return self._coming[position + 1] if position + 1 < len(self._coming) else ()


def _run_of(action: Action) -> tuple[int, bool]:
    """Key that all actions of a run share; the last stage has one run for both directions."""
    is_backward = action.kind.is_backward or action.kind is ActionKind.RECOMPUTE_KV
    return action.stage, is_backward and action.kind is not ActionKind.BACKWARD_LAST
