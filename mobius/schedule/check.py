"""Rules that every schedule must satisfy before it runs.

Each function yields the violations in the actions of one rank; `check` raises the first. The last rule checks that the
ranks can play their lists to the end (schedule.py).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import product

from mobius.errors import ScheduleError
from mobius.limits import max_prefetched
from mobius.schedule.action import Action, ActionKind, describe_misfit
from mobius.schedule.activation_offloading import num_host_regions
from mobius.schedule.depth_first import max_waiting
from mobius.schedule.schedule import Schedule, topological_order
from mobius.schedule.spec import ScheduleSpec


class Rule(StrEnum):
    """Names of the rules; a message of `check` starts with a rule's name."""

    SHAPE = "shape"
    """There is one list per rank, the ranks divide the stages, and each action is possible at its stage."""
    PLACEMENT = "placement"
    """The actions of a rank are for the stages of this rank."""
    DATA = "data"
    """The ranks of the first and the last stage load the batch once, as their first action. Other ranks load it only if
    all ranks share the head."""
    COMPLETE = "complete"
    """Every (stage, microbatch) has one forward and one backward; in an evaluation, no backward. If the ranks share the
    head, each rank computes the head for the microbatches assigned to it, in order."""
    ORDER = "order"
    """Backward follows forward, and every queue delivers messages in the order in which the receiver needs them."""
    ROUND = "round"
    """At most `depth_first.max_waiting` microbatches of a stage are between forward and backward."""
    RESIDENT = "resident"
    """A streamed stage computes only while it is loaded, and its loads and offloads alternate. A resident stage has no
    loads and no offloads. At the end of an evaluation, all slots are empty."""
    BUDGET = "budget"
    """A rank never has more loaded stages than slots; without slots, it loads nothing."""
    GRADIENTS = "gradients"
    """A streamed stage is offloaded after its last backward and not loaded again in the step. Until then, the stage's
    gradient sums are on the GPU when a backward adds to them; between backwards they may be on the host. The number of
    stages with sums on the GPU is at most the number of buffers."""
    SLICES = "slices"
    """Slices of a sequence run forward in order and backward in reverse. Before the first backward in a stage, keys and
    values of all slices are recomputed once, in order. The model's last stage recomputes no keys and values."""
    OFFLOAD_ACTIVATIONS = "offload_activations"
    """Offloaded activations are copied to a free host region after forward, and back to the GPU before backward.
    `ScheduleSpec.copy_lookahead` limits how many microbatches are prefetched early. Stages that offload no activations
    have no such copies."""
    DEADLOCK = "deadlock"
    """All ranks reach the end of their lists, within the runtime's limits of posted receives and messages in flight."""


_ACTIVATION_COPIES = (ActionKind.OFFLOAD_ACTIVATIONS, ActionKind.PREFETCH_ACTIVATIONS)
_OUTSIDE_SLOTS = (
    ActionKind.GENERATE_DATA,
    ActionKind.LOAD_GRADIENT_SUMS,
    ActionKind.OFFLOAD_GRADIENT_SUMS,
    *_ACTIVATION_COPIES,
)

Actions = Sequence[Action]
_Breach = tuple[int, Rule, str]
"""Index of the action, the rule that it breaks, and an explanation."""


def check(schedule: Schedule) -> None:
    """Raise ScheduleError if `schedule` breaks a rule, with the rank, the index of the action and the rule."""
    if len(schedule.actions) != schedule.spec.num_ranks:
        text = f"{len(schedule.actions)} lists of actions for {schedule.spec.num_ranks} ranks"
        raise ScheduleError(f"{Rule.SHAPE}: {text}")
    for rank in range(schedule.spec.num_ranks):
        for breaches in _CHECKS:
            for index, rule, text in breaches(schedule.spec, rank, schedule.actions[rank]):
                raise _violation(schedule, rank, index, rule, text)
    _, conflict = topological_order(schedule)
    if conflict is not None:
        rule = Rule.DEADLOCK if conflict.is_deadlock else Rule.ORDER
        raise _violation(schedule, conflict.rank, conflict.index, rule, conflict.text)


def _violation(schedule: Schedule, rank: int, index: int, rule: Rule, text: str) -> ScheduleError:
    actions = schedule.actions[rank]
    name = str(actions[index]) if index < len(actions) else "the end of the list"
    return ScheduleError(f"{rule}: rank {rank}, action {index} ({name}): {text}")


def _check_form(spec: ScheduleSpec, rank: int, actions: Actions) -> Iterator[_Breach]:
    for index, action in enumerate(actions):
        misfit = describe_misfit(
            action, spec.chain_length, is_evaluation=spec.is_evaluation, spreads_head=spec.spreads_head
        )
        if misfit is not None:
            yield index, Rule.SHAPE, misfit
        if action.microbatch is not None and not 0 <= action.microbatch < spec.num_microbatches:
            yield index, Rule.SHAPE, f"there is no such microbatch, the numbers are 0 to {spec.num_microbatches - 1}"
        owner = spec.rank_of(action.stage, action.microbatch)
        if owner != rank:
            yield index, Rule.PLACEMENT, f"stage {action.stage} belongs to rank {owner}"


def _check_data(spec: ScheduleSpec, rank: int, actions: Actions) -> Iterator[_Breach]:
    last_stage = spec.num_stages - 1
    needed_by = {each: each for each in range(spec.num_ranks)} if spec.spreads_head else {}
    needed_by |= {spec.rank_of(last_stage): last_stage, spec.rank_of(0): 0}
    made = [i for i, action in enumerate(actions) if action.kind is ActionKind.GENERATE_DATA]
    for index in made:
        if needed_by.get(rank) != actions[index].stage:
            yield index, Rule.DATA, f"rank {rank} does not load the batch for this stage"
        if index > 0:
            yield index, Rule.DATA, "the batch is loaded once, as the first action"
    if rank in needed_by and not made:
        text = f"the batch for stage {needed_by[rank]} is missing: the first action must be generate_data"
        yield 0, Rule.DATA, text


def _check_complete(spec: ScheduleSpec, rank: int, actions: Actions) -> Iterator[_Breach]:
    seen: set[tuple[bool, int, int | None]] = set()
    heads = [action.microbatch for action in actions if action.kind is ActionKind.HEAD]
    if heads != [*spec.head_microbatches(rank)]:
        yield len(actions), Rule.COMPLETE, f"it computes the head for the microbatches {heads}"
    for index, action in enumerate(actions):
        key = (action.kind.is_backward, action.stage, action.microbatch)
        if action.kind.is_forward_or_backward and key in seen:
            yield index, Rule.COMPLETE, "it is a duplicate"
        if action.kind.is_forward_or_backward:
            seen.add(key)
    directions = (False,) if spec.is_evaluation else (False, True)
    for key in product(directions, spec.local_stages(rank), range(spec.num_microbatches)):
        if key not in seen:
            is_backward, stage, microbatch = key
            text = f"{'B' if is_backward else 'F'}{stage}.{microbatch} is missing"
            yield len(actions), Rule.COMPLETE, text


def _check_order(spec: ScheduleSpec, rank: int, actions: Actions) -> Iterator[_Breach]:
    waiting: dict[int, set[int | None]] = {stage: set() for stage in spec.local_stages(rank)}
    for index, action in enumerate(actions):
        own = waiting.get(action.stage, set())  # empty for a shared head, which is not in `waiting`
        if action.kind.is_forward:
            own.add(action.microbatch)
        elif action.kind.is_backward and action.microbatch not in own:
            yield index, Rule.ORDER, "its forward has not run yet"
        elif action.kind.is_backward:
            own.remove(action.microbatch)
        if action.kind is ActionKind.HEAD and action.microbatch not in waiting.get(
            action.stage - 1, {action.microbatch}
        ):
            yield index, Rule.ORDER, "it is not between forward and backward of the last stage"
        if own and not spec.is_evaluation and len(own) > (most := max_waiting(action.stage, spec)):
            yield index, Rule.ROUND, f"{len(own)} microbatches wait for their backward, at most {most} may"


def _check_residency(spec: ScheduleSpec, rank: int, actions: Actions) -> Iterator[_Breach]:
    num_slots = spec.slots[rank]
    loaded: set[int] = set()
    num_backwards: Counter[int] = Counter()
    for index, action in enumerate(actions):
        stage, kind = action.stage, action.kind
        if not kind.runs_on_compute_lane and kind is not ActionKind.GENERATE_DATA and kind not in _ACTIVATION_COPIES:
            if spec.num_slots is None:
                yield index, Rule.BUDGET, "the schedule has no slots, all weights stay on the GPU"
            if stage in spec.resident:
                yield index, Rule.RESIDENT, f"stage {stage} is resident, its weights stay on the GPU"
        if kind in _OUTSIDE_SLOTS or stage in spec.resident or kind is ActionKind.HEAD:
            continue
        is_loaded, done = stage in loaded, num_backwards[stage]
        if is_loaded == (kind is ActionKind.LOAD):
            yield index, Rule.RESIDENT, f"stage {stage} is {'already' if is_loaded else 'not'} loaded"
        if kind is ActionKind.LOAD:
            if len(loaded) == num_slots:
                yield index, Rule.BUDGET, f"all slots ({num_slots}) are in use by the stages {sorted(loaded)}"
            if done == spec.num_microbatches:
                yield index, Rule.GRADIENTS, "its gradients are already offloaded"
            loaded.add(stage)
        elif kind is ActionKind.OFFLOAD:
            loaded.remove(stage)
        elif kind.is_backward:
            num_backwards[stage] += 1
    if loaded and spec.is_evaluation:
        text = f"the stages {sorted(loaded)} are still loaded: each needs an offload after its last forward"
        yield len(actions), Rule.RESIDENT, text
    elif loaded:
        stages = f"the gradients of the stages {sorted(loaded)} are not offloaded"
        yield len(actions), Rule.GRADIENTS, f"{stages}: each needs an offload after its backward"


def _check_sums(spec: ScheduleSpec, rank: int, actions: Actions) -> Iterator[_Breach]:
    on_gpu: set[int] = set()
    num_backwards: Counter[int] = Counter()
    num_buffers = spec.num_sum_buffers(rank)
    for index, action in enumerate(actions):
        stage, kind, done = action.stage, action.kind, num_backwards[action.stage]
        if stage in spec.resident:
            continue
        there = f"the sums of its {done} backwards are {'on the GPU' if stage in on_gpu else 'on the host'}"
        if kind is ActionKind.LOAD_GRADIENT_SUMS:
            if done == 0 or stage in on_gpu:
                yield index, Rule.GRADIENTS, there if done else "it has no sums yet"
            on_gpu.add(stage)
        elif kind is ActionKind.OFFLOAD_GRADIENT_SUMS:
            if done in (0, spec.num_microbatches) or stage not in on_gpu:
                yield index, Rule.GRADIENTS, there
            on_gpu.discard(stage)
        elif kind is ActionKind.OFFLOAD and done == spec.num_microbatches:
            on_gpu.discard(stage)
        elif kind.is_backward:
            if done > 0 and stage not in on_gpu:
                yield index, Rule.GRADIENTS, there
            on_gpu.add(stage)
            num_backwards[stage] += 1
        if len(on_gpu) > num_buffers:
            yield index, Rule.BUDGET, f"the sums of the stages {sorted(on_gpu)} are on the GPU at the same time"


def _check_offloaded_activations(spec: ScheduleSpec, rank: int, actions: Actions) -> Iterator[_Breach]:
    left: set[tuple[int, int]] = set()
    """(stage, microbatch) pairs whose forward has run and whose layer inputs are still on the GPU."""
    host: dict[tuple[int, int], int] = {}
    """Microbatch whose layer inputs are on the host, by (stage, region)."""
    back: set[tuple[int, int]] = set()
    most_back = max_prefetched(spec.copy_lookahead)
    for index, action in enumerate(actions):
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if kind in _ACTIVATION_COPIES and stage not in spec.offloaded_activation_stages:
            yield index, Rule.OFFLOAD_ACTIVATIONS, f"stage {stage} does not offload activations"
        if microbatch is None or stage not in spec.offloaded_activation_stages or spec.is_evaluation:
            continue
        own, place = (stage, microbatch), (stage, microbatch % num_host_regions(stage, spec))
        if kind.is_forward:
            left.add(own)
        elif kind is ActionKind.OFFLOAD_ACTIVATIONS:
            if own not in left:
                yield index, Rule.OFFLOAD_ACTIVATIONS, "its forward has not run yet, or its inputs have left already"
            if place in host:
                yield index, Rule.OFFLOAD_ACTIVATIONS, f"microbatch {host[place]} is still in the same host region"
            left.discard(own)
            host[place] = microbatch
        elif kind is ActionKind.PREFETCH_ACTIVATIONS:
            if host.get(place) != microbatch:
                yield index, Rule.OFFLOAD_ACTIVATIONS, "its inputs are not on the host"
            back.add(own)
            if len(back) > most_back:
                yield (
                    index,
                    Rule.OFFLOAD_ACTIVATIONS,
                    f"{len(back)} microbatches have come back early, at most {most_back} may",
                )
        else:
            if own not in back:
                yield index, Rule.OFFLOAD_ACTIVATIONS, "its inputs have not come back"
            if kind is not ActionKind.RECOMPUTE_KV:
                host.pop(place, None)
            if kind is not ActionKind.RECOMPUTE_KV or (microbatch + 1) % spec.num_slices:
                back.discard(own)  # not if the last slice's backward follows and uses this copy


def _check_slices(spec: ScheduleSpec, rank: int, actions: Actions) -> Iterator[_Breach]:
    number, last_stage = spec.num_slices, spec.num_stages - 1
    forward, keys, backward = (Counter[tuple[int, int]]() for _ in range(3))
    """Number of slices done so far, by (stage, sequence)."""
    for index, action in enumerate(actions):
        kind, microbatch = action.kind, action.microbatch
        if kind is ActionKind.RECOMPUTE_KV and (number == 1 or action.stage == last_stage):
            yield index, Rule.SLICES, "there are no keys and values to recompute"
        if microbatch is None or not kind.runs_on_compute_lane or number == 1:
            continue
        sequence, place = divmod(microbatch, number)
        own = action.stage, sequence
        gone = forward if kind.is_forward else backward if kind.is_backward else keys
        wanted = number - 1 - gone[own] if kind.is_backward else gone[own]
        if place != wanted:
            yield index, Rule.SLICES, f"slice {place} of sequence {sequence} runs, but slice {wanted} is next"
        if kind.is_backward and action.stage != last_stage and keys[own] < number:
            text = f"keys and values of {keys[own]} of {number} slices of sequence {sequence} are recomputed"
            yield index, Rule.SLICES, text
        gone[own] += 1


_CHECKS = (
    _check_form,
    _check_data,
    _check_complete,
    _check_order,
    _check_residency,
    _check_sums,
    _check_offloaded_activations,
    _check_slices,
)
