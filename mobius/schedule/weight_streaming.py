"""Owns when the weights of a stage are in a GPU slot: a pass that adds loads and offloads to one rank's compute order.

A slot is a piece of GPU memory that holds one stage's weights at a time. A resident stage keeps its weights on the GPU.

    rank 0 of 2, stages 0, 2 and 4, two slots, a run being all microbatches of one stage in one direction:

    compute   F0        F2        F4        B4        B2        B0
    load      L0 L2     L4 in 0's                     L0 in 4's
    offload             O0                       O4        O2        O0

Resident stages take no slot. While they compute, the slots are filled for the streamed ones behind them: with stage 0
resident, L2 and L4 are the first actions of the step and nothing else is loaded in it.

Before each run the slots are given to the stages of the nearest runs, this one's first; a stage that is not among them
gives up its slot, and one that is and has none is loaded at once, under the run that is about to start. So the last
stage turns from forward to backward without leaving the GPU, and nothing that is needed again soon is loaded twice.
Evicting the stage whose next use is farthest is Belady's rule: no other choice moves fewer bytes.

Gradients of streamed stages add up on the GPU, in one place for the stage whose backward runs and one for a stage that
comes or leaves. Where a step has rounds, what a stage has added up goes to the host behind its backward, and comes back
under the run before its backward in the next round. A rank's only streamed stage keeps its sums in place.

    compute   B4          B2          B0          F0 F2 F4     B4
    sums      LS2         OS4 LS0     OS2         OS0    LS4   LS2
"""

from collections.abc import Collection, Sequence
from itertools import groupby

from mobius.schedule.action import Action, ActionKind


def add_transfers(order: Sequence[Action], num_slots: int, resident: Collection[int]) -> list[Action]:
    """Add to `order`, the compute actions of one rank, the loads and offloads that `num_slots` slots allow.

    Stages in `resident` get none. The result starts with the loads of the first streamed stages and ends with every
    slot empty. Each stage is offloaded after its backward, which takes its gradients home, and the slot is then free
    for the next load. Where there is no backward, a stage gives up its slot after its forward.
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
    """The next so many different streamed stages from each place of `stages` on, in the order of their coming."""
    coming: list[list[int]] = []
    following: list[int] = []
    for stage in reversed(stages):
        if stage not in resident:
            following = [stage, *(each for each in following if each != stage)][:number]
        coming.append(following)
    return coming[::-1]


class _Sums:
    """Knows when the sums of one rank's streamed stages travel between the rounds of a step."""

    def __init__(self, runs: Sequence[Sequence[Action]], resident: Collection[int]) -> None:
        stages = [run[0].stage if run[-1].kind.is_backward else None for run in runs]
        self._stages = [None if stage in resident else stage for stage in stages]
        """The streamed stage that goes backward in each run."""
        last = {stage: position for position, stage in enumerate(self._stages)}
        first = {stage: position for position, stage in reversed([*enumerate(self._stages)])}
        self._last, self._first = {*last.values()}, {*first.values()}
        self._travel = len(last.keys() - {None}) > 1

    def is_last(self, position: int) -> bool:
        """Whether the run at `position` is its stage's last backward of the step."""
        return self._stages[position] is not None and position in self._last

    def leave_behind(self, position: int) -> bool:
        """Whether a stage's sums leave behind the run at `position`, to come back in another round."""
        return self._travel and self._stages[position] is not None and position not in self._last

    def before(self, position: int) -> list[Action]:
        """The load of the sums that the run behind the one at `position` goes on with, if it goes on with any."""
        coming = self._stages[position + 1] if position + 1 < len(self._stages) else None
        if not self._travel or coming is None or position + 1 in self._first:
            return []
        return [Action(ActionKind.LOAD_GRADIENT_SUMS, coming)]


def _run_of(action: Action) -> tuple[int, bool]:
    """Key that the actions of a run share; the last stage, which turns round, has one run for both directions."""
    is_backward = action.kind.is_backward or action.kind is ActionKind.RECOMPUTE_KV
    return action.stage, is_backward and action.kind is not ActionKind.BACKWARD_LAST
