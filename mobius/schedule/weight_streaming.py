"""Decides when a stage's weights are in a GPU slot: adds loads and offloads to one rank's compute order.

A slot is GPU memory for one stage's weights. A resident stage's weights stay on the GPU.

    rank 0 of 2, stages 0, 2 and 4, two slots, a run being all microbatches of one stage in one direction:

    compute   F0        F2        F4        B4        B2        B0
    load      L0 L2     L4 in 0's                     L0 in 4's
    offload             O0                       O4        O2        O0

Resident stages take no slot. While they compute, the slots are filled for the streamed stages after them: with stage 0
resident, L2 and L4 are the first actions of the step and the only loads.

Before each run the slots are assigned to the stages of the nearest runs, starting with this one. A loaded stage that is
not among them is offloaded; a stage among them without a slot is loaded at once, during the run that is about to start.
So the last stage goes from forward to backward without leaving the GPU, and nothing needed soon is loaded twice.
Evicting the stage whose next use is farthest is Belady's rule: no other choice moves fewer bytes.

Gradients of streamed stages accumulate on the GPU, in one buffer for the stage in backward and one for a stage being
copied. With several accumulation rounds, a stage's sums are offloaded after its backward and loaded during the run
before its backward in the next round. The sums of a rank's only streamed stage stay in place.

    compute   B4          B2          B0          F0 F2 F4     B4
    sums      LS2         OS4 LS0     OS2         OS0    LS4   LS2
"""

from collections.abc import Collection, Sequence
from itertools import groupby

from mobius.schedule.action import Action, ActionKind


def add_transfers(order: Sequence[Action], num_slots: int, resident: Collection[int]) -> list[Action]:
    """Add to `order`, the compute actions of one rank, the loads and offloads that `num_slots` slots allow.

    Stages in `resident` get none. The result starts with the loads of the first streamed stages and ends with every
    slot empty. Each stage is offloaded after its backward, which copies its gradients to the host and frees the slot
    for the next load. In an evaluation, a stage is offloaded after its forward.
    """
    runs = [list(run) for _, run in groupby(order, key=_run_of)]
    sums = _Sums(runs, resident)
    result: list[Action] = []
    loaded: list[int] = []
    coming = _coming([run[0].stage for run in runs], num_slots, resident)
    for position, run in enumerate(runs):
        stage, wanted = run[0].stage, [*coming[position]]
        result += [Action(ActionKind.OFFLOAD, stage) for stage in loaded if stage not in wanted]
        result += [Action(ActionKind.LOAD, stage) for stage in wanted if stage not in loaded]
        loaded = wanted
        result += sums.before(position)
        result += run
        if sums.leave_behind(position):
            result.append(Action(ActionKind.OFFLOAD_GRADIENT_SUMS, stage))
        elif sums.is_last(position):
            loaded.remove(stage)
            result.append(Action(ActionKind.OFFLOAD, stage))
    return [*result, *(Action(ActionKind.OFFLOAD, stage) for stage in loaded)]


def _coming(stages: Sequence[int], number: int, resident: Collection[int]) -> list[list[int]]:
    """Return, for each position in `stages`, the next `number` different streamed stages, in order of use."""
    coming: list[list[int]] = []
    following: list[int] = []
    for stage in reversed(stages):
        if stage not in resident:
            following = [stage, *(each for each in following if each != stage)][:number]
        coming.append(following)
    return coming[::-1]


class _Sums:
    """Decides when the gradient sums of one rank's streamed stages are copied between accumulation rounds."""

    def __init__(self, runs: Sequence[Sequence[Action]], resident: Collection[int]) -> None:
        stages = [run[0].stage if run[-1].kind.is_backward else None for run in runs]
        self._stages = [None if stage in resident else stage for stage in stages]
        """The streamed stage of each run that is a backward, else None."""
        last = {stage: position for position, stage in enumerate(self._stages)}
        first = {stage: position for position, stage in reversed([*enumerate(self._stages)])}
        self._last, self._first = {*last.values()}, {*first.values()}
        self._travel = len(last.keys() - {None}) > 1

    def is_last(self, position: int) -> bool:
        """Whether the run at `position` is its stage's last backward of the step."""
        return self._stages[position] is not None and position in self._last

    def leave_behind(self, position: int) -> bool:
        """Whether the stage's sums are offloaded after the run at `position`, to be loaded in a later round."""
        return self._travel and self._stages[position] is not None and position not in self._last

    def before(self, position: int) -> list[Action]:
        """Return the load of the sums that the run after `position` continues, if any."""
        coming = self._stages[position + 1] if position + 1 < len(self._stages) else None
        if not self._travel or coming is None or position + 1 in self._first:
            return []
        return [Action(ActionKind.LOAD_GRADIENT_SUMS, coming)]


def _run_of(action: Action) -> tuple[int, bool]:
    """Key that the actions of a run share; the last stage has one run for both directions."""
    is_backward = action.kind.is_backward or action.kind is ActionKind.RECOMPUTE_KV
    return action.stage, is_backward and action.kind is not ActionKind.BACKWARD_LAST
