"""Owns the rules that every schedule obeys before it is played, one function per rule.

The last rule asks whether the ranks can play their lists to the end (schedule.py).
"""

from collections import Counter
from enum import StrEnum

from mobius.errors import ScheduleError
from mobius.schedule.action import ActionKind, describe_misfit
from mobius.schedule.schedule import Schedule, take_turns


class Rule(StrEnum):
    """Names of the rules; a message of `check` starts with one."""

    SHAPE = "shape"
    """There are as many lists as ranks, the stages are a multiple of them, each action is possible at its stage."""
    PLACEMENT = "placement"
    """A rank acts on its own stages only."""
    DATA = "data"
    """The ranks of the first and the last stage make the batch once, before anything else; the others never."""
    COMPLETE = "complete"
    """Every (stage, microbatch) goes forward once and backward once."""
    ORDER = "order"
    """Backward follows forward, and an edge delivers messages in the order in which they are received."""
    RESIDENT = "resident"
    """A streamed stage computes while it is loaded, and is loaded and offloaded in turns; a resident one never is."""
    BUDGET = "budget"
    """No more stages of a rank are loaded than there are slots; without slots nothing is."""
    GRADIENTS = "gradients"
    """A stage is offloaded after its last backward, not between two, and is not loaded again in this step."""
    DEADLOCK = "deadlock"
    """All ranks reach the end of their lists."""


def check(schedule: Schedule) -> None:
    """Raise ScheduleError naming the rank, the index of the action and the rule where `schedule` breaks one."""
    _check_lists(schedule)
    for rank in range(schedule.num_ranks):
        for rule in (_check_form, _check_data, _check_complete, _check_order, _check_residency):
            rule(schedule, rank)
    _, conflict = take_turns(schedule)
    if conflict is not None:
        rule_broken = Rule.DEADLOCK if conflict.is_deadlock else Rule.ORDER
        raise _violation(schedule, conflict.rank, conflict.index, rule_broken, conflict.text)


def _violation(schedule: Schedule, rank: int, index: int, rule: Rule, text: str) -> ScheduleError:
    actions = schedule.actions[rank]
    name = str(actions[index]) if index < len(actions) else "the end of the list"
    return ScheduleError(f"{rule}: rank {rank}, action {index} ({name}): {text}")


def _check_lists(schedule: Schedule) -> None:
    if len(schedule.actions) != schedule.num_ranks:
        raise ScheduleError(f"{Rule.SHAPE}: {len(schedule.actions)} lists of actions for {schedule.num_ranks} ranks")
    if schedule.num_stages < 1 or schedule.num_stages % schedule.num_ranks:
        raise ScheduleError(f"{Rule.SHAPE}: {schedule.num_stages} stages is no multiple of {schedule.num_ranks} ranks")


def _check_form(schedule: Schedule, rank: int) -> None:
    for index, action in enumerate(schedule.actions[rank]):
        misfit = describe_misfit(action, schedule.num_stages)
        if misfit is None and action.microbatch is not None and not 0 <= action.microbatch < schedule.num_microbatches:
            misfit = f"there is no such microbatch, they are 0 to {schedule.num_microbatches - 1}"
        if misfit is not None:
            raise _violation(schedule, rank, index, Rule.SHAPE, misfit)
        owner = schedule.rank_of(action.stage)
        if owner != rank:
            text = f"stage {action.stage} belongs to rank {owner}"
            raise _violation(schedule, rank, index, Rule.PLACEMENT, text)


def _check_data(schedule: Schedule, rank: int) -> None:
    last_stage = schedule.num_stages - 1
    needed_by = {schedule.rank_of(last_stage): last_stage, schedule.rank_of(0): 0}
    for index, action in enumerate(schedule.actions[rank]):
        if action.kind is not ActionKind.GENERATE_DATA:
            continue
        if needed_by.get(rank) != action.stage:
            raise _violation(schedule, rank, index, Rule.DATA, f"rank {rank} does not make the batch as this stage")
        if index > 0:
            raise _violation(schedule, rank, index, Rule.DATA, "the batch is made once, as the first action")
    actions = schedule.actions[rank]
    if rank in needed_by and (not actions or actions[0].kind is not ActionKind.GENERATE_DATA):
        text = f"the batch for stage {needed_by[rank]} is missing: the first action must be generate_data"
        raise _violation(schedule, rank, 0, Rule.DATA, text)


def _check_complete(schedule: Schedule, rank: int) -> None:
    seen: set[tuple[bool, int, int | None]] = set()
    for index, action in enumerate(schedule.actions[rank]):
        if not action.kind.is_compute:
            continue
        key = (action.kind.is_backward, action.stage, action.microbatch)
        if key in seen:
            raise _violation(schedule, rank, index, Rule.COMPLETE, "it is there a second time")
        seen.add(key)
    for is_backward in (False, True):
        for stage in schedule.local_stages(rank):
            for microbatch in range(schedule.num_microbatches):
                if (is_backward, stage, microbatch) not in seen:
                    text = f"{'B' if is_backward else 'F'}{stage}.{microbatch} is missing"
                    raise _violation(schedule, rank, len(schedule.actions[rank]), Rule.COMPLETE, text)


def _check_order(schedule: Schedule, rank: int) -> None:
    forwarded: set[tuple[int, int | None]] = set()
    for index, action in enumerate(schedule.actions[rank]):
        if action.kind.is_forward:
            forwarded.add((action.stage, action.microbatch))
        elif action.kind.is_backward and (action.stage, action.microbatch) not in forwarded:
            raise _violation(schedule, rank, index, Rule.ORDER, "its forward has not run yet")


def _check_residency(schedule: Schedule, rank: int) -> None:
    loaded: set[int] = set()
    num_backwards: Counter[int] = Counter()
    for index, action in enumerate(schedule.actions[rank]):
        is_transfer = action.kind in (ActionKind.LOAD, ActionKind.OFFLOAD)
        if is_transfer and schedule.num_slots is None:
            text = "the schedule has no slots, all weights stay on the GPU"
            raise _violation(schedule, rank, index, Rule.BUDGET, text)
        if is_transfer and action.stage in schedule.resident:
            text = f"stage {action.stage} is resident, its weights stay on the GPU"
            raise _violation(schedule, rank, index, Rule.RESIDENT, text)
        if action.kind is ActionKind.GENERATE_DATA or action.stage in schedule.resident:
            continue
        is_loaded = action.stage in loaded
        if is_loaded == (action.kind is ActionKind.LOAD):
            text = f"stage {action.stage} is {'already' if is_loaded else 'not'} loaded"
            raise _violation(schedule, rank, index, Rule.RESIDENT, text)
        done = num_backwards[action.stage]
        if action.kind is ActionKind.LOAD:
            if len(loaded) == schedule.slots[rank]:
                text = f"all slots ({schedule.slots[rank]}) are taken by the stages {sorted(loaded)}"
                raise _violation(schedule, rank, index, Rule.BUDGET, text)
            if done:
                raise _violation(schedule, rank, index, Rule.GRADIENTS, "its gradients have gone home already")
            loaded.add(action.stage)
        elif action.kind is ActionKind.OFFLOAD:
            if 0 < done < schedule.num_microbatches:
                text = f"only {done} of {schedule.num_microbatches} backwards are in its gradients"
                raise _violation(schedule, rank, index, Rule.GRADIENTS, text)
            loaded.remove(action.stage)
        elif action.kind.is_backward:
            num_backwards[action.stage] += 1
    if loaded:
        text = (
            f"the gradients of the stages {sorted(loaded)} have not gone home: each needs an offload after its backward"
        )
        raise _violation(schedule, rank, len(schedule.actions[rank]), Rule.GRADIENTS, text)
