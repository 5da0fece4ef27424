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
    result: list[Action] = []
    loaded: list[int] = []
    for position, run in enumerate(runs):
        coming = dict.fromkeys(later[0].stage for later in runs[position:] if later[0].stage not in resident)
        wanted = [*coming][:num_slots]
        result += [Action(ActionKind.OFFLOAD, stage) for stage in loaded if stage not in wanted]
        result += [Action(ActionKind.LOAD, stage) for stage in wanted if stage not in loaded]
        loaded = wanted
        result += run
        if run[-1].kind.is_backward and run[0].stage not in resident:
            loaded = [stage for stage in loaded if stage != run[0].stage]
            result.append(Action(ActionKind.OFFLOAD, run[0].stage))
    return [*result, *(Action(ActionKind.OFFLOAD, stage) for stage in loaded)]


def _run_of(action: Action) -> tuple[int, bool]:
    """Key that the actions of a run share; the last stage, which turns round, has one run for both directions."""
    return action.stage, action.kind.is_backward and action.kind is not ActionKind.BACKWARD_LAST
