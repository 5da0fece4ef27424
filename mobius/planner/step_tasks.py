"""Tasks of a step, created from a schedule and the costs of its stages, with lanes and the tasks that they wait for.

Replicas reduce and gather during compute. A rank has two buffers for sums, which stages use in turn. So a stage's
backward begins when the sums of the stage before the previous stage are reduced.

    compute       last backward of s  | backward of the next stage ..        | next step: forward of s
    reduce                            | sums of s to their owners
    host or GPU                                                   | update of the own share
    load                                                                     | own share, gather others' | s computes
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice

from mobius.limits import MIN_GRADIENT_SUMS, UPDATE_CHUNK_ELEMENTS, max_pending_offloads
from mobius.planner.event_simulation import Flow, Task, shared_bandwidth
from mobius.planner.profile import Profile
from mobius.planner.stage_costs import StageCost, StepRules
from mobius.schedule.action import Action, ActionKind, source_stage, target_stage
from mobius.schedule.build import build_unchecked
from mobius.schedule.lanes import Lane, WaitCause
from mobius.schedule.memory_layout import SUM_BYTES, Part, Place
from mobius.schedule.schedule import Schedule
from mobius.schedule.spec import ScheduleSpec

FINISH_GRADIENTS_BYTES = 14
"""GPU memory traffic per parameter after a stage's last backward, when its message is sent: 4 bytes for the norm, 6 to
round gradients to the format in which they are copied, 4 to clear sums."""
CLEARED_BYTES = 4
"""Bytes per parameter on the compute stream with replicas: there this stream only clears sums."""

MessageKey = tuple[bool, int, int | None]
"""Key of a message: whether it belongs to a backward, the stage that sends it, and its microbatch."""
_WAITED_FOR = (WaitCause.NEIGHBOURS, WaitCause.OPTIMIZER, WaitCause.WEIGHTS, WaitCause.ACTIVATIONS)
"""Causes of waits, in the order in which an action waits."""


@dataclass(slots=True)
class ComputeTask:
    """A task of a rank's compute lane, and the tasks that it waits for."""

    task: Task
    waits: dict[WaitCause, Sequence[Task]]
    step: int
    begin: Task | None
    """Task for which the host waits before it begins the step."""


@dataclass(slots=True)
class _PlayedAction:
    """An action, and the values that are equal in all steps."""

    action: Action
    add: Callable[[StepTasks, int, _PlayedAction], None]
    stage: int
    is_forward: bool
    is_backward: bool
    key: MessageKey
    """Key of the message that the action sends."""
    source: MessageKey | None
    """Key of the message that the action waits for."""
    target: int | None
    """Rank that receives the action's message."""
    seconds: float = 0.0
    """Seconds on the GPU."""
    launch: float = 0.0
    """Seconds of the host to enqueue the action."""


@dataclass(slots=True)
class _Slot:
    stage: int | None = None
    free: Task | None = None
    weights_on_host: Task | None = None
    """Task after which gathered weights are on the host."""


@dataclass(slots=True)
class _RankTasks:
    """Progress of one rank while its tasks are created."""

    last: Task | None = None
    begin: Task | None = None
    slots: list[_Slot] = field(default_factory=list)
    loads: dict[int, Task] = field(default_factory=dict)
    updates: dict[int, Task] = field(default_factory=dict)
    sums: dict[int, Task] = field(default_factory=dict)
    """Last copy of a stage's sums between rounds, to the host or back."""
    sums_left: Task | None = None
    """Copy to the host that frees the memory into which the next sums are loaded."""
    leaving: deque[Task] = field(default_factory=deque)
    """Copies of layers' inputs to the host for which compute has not waited yet."""
    activation_copies: dict[tuple[int, int | None], Task] = field(default_factory=dict)
    """Last copy of the layers' inputs of a stage and microbatch, to the host or back."""
    left: Task | None = None
    """Copy for which the next compute task waits."""
    enqueued: float = 0.0
    """Seconds for which the host has enqueued work since the step began."""
    updating: float = 0.0
    """Seconds that the host's other cores still take for submitted updates, less the seconds enqueued since."""
    computed: float = 0.0
    """Least seconds that the GPU takes for its compute since the step began."""
    last_of_stage: dict[int, Task] = field(default_factory=dict)
    last_is_backward: dict[int, bool] = field(default_factory=dict)
    computes: list[ComputeTask] = field(default_factory=list)
    adds_up: int | None = None
    """Stage whose gradients are currently added up."""
    reductions: list[Task] = field(default_factory=list)
    """Latest reductions over the replicas, in order; stages use a rank's buffers for sums in turn."""
    gathered: Task | None = None
    written: dict[int, Task] = field(default_factory=dict)
    """Last write of a stage's optimizer states to disks."""
    buffers: deque[Task] = field(default_factory=deque)
    """Writes that free the buffers for states, in the order in which these buffers are used."""
    loads_from_disks: deque[Task] = field(default_factory=deque)
    """Loads that free the buffers for weights from disks, in the order in which these buffers are used."""
    updated: set[int] = field(default_factory=set)
    """Streamed stages whose next load also gathers the weights that other replicas have updated."""
    unquantized: set[int] = field(default_factory=set)
    """Stages whose weights were loaded or updated, and have not been used since."""


class StepTasks:
    """Creates the tasks of the steps, in the order in which the ranks' hosts enqueue them.

    The names of a step's spans and waits are stored only if `is_described`, because this takes time.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Sequence[StageCost],
        profile: Profile,
        rules: StepRules,
        *,
        is_described: bool = True,
    ) -> None:
        self.schedule, self.costs, self.profile, self.rules = schedule, costs, profile, rules
        self.tasks: list[Task] = []
        self.names: dict[Task, tuple[int, Lane, object, int, int | None]] = {}
        """Task -> its rank, its lane, an object whose text is its name, its step, and its peer."""
        self.ranks = [_RankTasks() for _ in range(schedule.spec.num_ranks)]
        self.step_ends: list[Task] = []
        self.flows = shared_bandwidth(profile, schedule.spec.num_ranks)
        self._message = cache(self.flows.message)
        self._is_described, self._last_backward = is_described, schedule.spec.last_backward
        self.layouts = rules.layouts(schedule.spec, costs)
        self.regions = {stage: regions for layout in self.layouts for stage, regions in layout.stages.items()}
        self._is_shared, self._overlaps = rules.memory.num_replicas > 1, rules.memory.overlaps_optimizer
        self._actions, self._pass = self._played_of(schedule), list[list[_PlayedAction]]()
        if rules.begins_with_pass and not schedule.spec.is_evaluation:
            spec = schedule.spec
            self._pass = self._played_of(build_unchecked(spec.evaluation(spec.microbatches_per_round)))
        self._messages: dict[MessageKey, Task] = {}
        self._gradient_offloads: dict[int, Task] = {}

    def add_step(self) -> None:
        """Append the tasks of one more step, which begins when the previous step has ended.

        Of an evaluation, append one more pass, which follows the previous pass at once.
        """
        self._gradient_offloads = {}
        if self._pass:
            for _ in range(self.schedule.spec.num_rounds):
                self._add_actions(self._pass)
            self._begin(self._end())
        self._add_actions(self._actions)
        self.step_ends.append(self._end())
        if not self.schedule.spec.is_evaluation:
            self._finish(self.step_ends[-1])

    def _add_actions(self, actions_of_ranks: Sequence[Sequence[_PlayedAction]]) -> None:
        messages = self._messages = dict[MessageKey, Task]()
        positions, num_left = [0] * len(actions_of_ranks), sum(map(len, actions_of_ranks))
        while num_left:  # the ranks take turns; each rank goes on until it needs a message that does not exist yet
            num_before = num_left
            for rank, actions in enumerate(actions_of_ranks):
                at = positions[rank]
                for played in islice(actions, at, None):
                    if played.source is not None and played.source not in messages:
                        break
                    played.add(self, rank, played)
                    at += 1
                num_left -= at - positions[rank]
                positions[rank] = at
            assert num_left < num_before, "the schedule has not passed the check"

    def _end(self) -> Task:
        """Return the time when all ranks have ended and summed their numbers; passes of an evaluation sum nothing."""
        ends = [state.last for state in self.ranks if state.last is not None]
        ends += [state.reductions[-1] for state in self.ranks if state.reductions]  # the step's norm needs these sums
        return self._task(None, 0.0 if self.schedule.spec.is_evaluation else self.profile.step_overhead, ends)

    def _begin(self, end: Task) -> None:
        """Let the hosts go on at `end`."""
        for state in self.ranks:
            state.updating = max(0.0, state.updating - max(0.0, state.computed - state.enqueued))
            state.begin, state.enqueued, state.computed = end, 0.0, 0.0

    def _played_of(self, schedule: Schedule) -> list[list[_PlayedAction]]:
        return [list(self._played(actions, schedule.spec)) for actions in schedule.actions]

    def _played(self, actions: Sequence[Action], spec: ScheduleSpec) -> Iterator[_PlayedAction]:
        """Actions of a rank that have tasks."""
        chain_length = spec.chain_length
        for action in actions:
            cost, kind, stage = self.costs[action.stage], action.kind, action.stage
            add = StepTasks._add_compute if kind.runs_on_compute_lane else _ADDED_FOR.get(kind)
            sends_sums = kind in (ActionKind.OFFLOAD_GRADIENT_SUMS, ActionKind.LOAD_GRADIENT_SUMS)
            stays = cost.is_resident or (sends_sums and cost.keeps_trained_on_gpu)
            if add is None or (kind in _COPIES_OF_STAGES and stays):
                continue
            is_backward = kind.is_backward
            source, target = source_stage(action, chain_length), target_stage(action, chain_length)
            played = _PlayedAction(
                action,
                add,
                stage,
                kind.is_forward,
                is_backward,
                key=(is_backward or kind is ActionKind.HEAD, stage, action.microbatch),
                source=None if source is None else (is_backward, source, action.microbatch),
                target=None if target is None else spec.rank_of(target, action.microbatch),
            )
            if kind.runs_on_compute_lane:
                offloads_all = spec.offloads_all(stage, action.microbatch)
                played.seconds = cost.slice_seconds(action, spec.num_slices, offloads_all=offloads_all)
                played.launch = cost.launch_seconds(action, offloads_all=offloads_all)
            yield played

    def _add_compute(self, rank: int, played: _PlayedAction) -> None:
        state, stage, action = self.ranks[rank], played.stage, played.action
        cost, is_backward = self.costs[stage], played.is_backward
        neighbours: list[Task] = [] if played.source is None else [self._messages[played.source]]
        optimizer: list[Task] = []
        weights: list[Task] = []
        activations: list[Task] = []
        seconds = played.seconds
        # Without slices, the forward of the model's last stage only saves the input, and so needs no weights.
        if action.kind is not ActionKind.FORWARD_LAST or self.schedule.spec.num_slices > 1:
            if stage in state.updates:
                optimizer.append(state.updates[stage])
            if stage in state.loads:
                weights.append(state.loads[stage])
            if stage in state.unquantized:
                state.unquantized.remove(stage)
                seconds += cost.quantizing
        if state.left is not None:
            activations.append(state.left)
            state.left = None
        if not played.is_forward and (stage, action.microbatch) in state.activation_copies:
            activations.append(state.activation_copies[stage, action.microbatch])
        if is_backward and stage in state.sums:
            weights.append(state.sums.pop(stage))
        if is_backward and self._is_shared and state.adds_up != stage:
            state.adds_up = stage
            neighbours += state.reductions[-MIN_GRADIENT_SUMS:-1]
        waits = (neighbours, optimizer, weights, activations)
        task = self._compute(rank, action, seconds, waits, launch=played.launch)
        if played.target is not None:
            self._send(rank, played.target, played, task)
        ends_stage = is_backward and action.microbatch == self._last_backward
        if ends_stage:
            sealed = CLEARED_BYTES if self._is_shared else FINISH_GRADIENTS_BYTES
            task = self._compute(rank, f"seal {stage}", sealed * cost.parameters / self.profile.gpu_bandwidth)
            if self._is_shared and cost.parameters:
                task = self._reduce(rank, stage, task)
        state.last_of_stage[stage], state.last_is_backward[stage] = task, is_backward
        if ends_stage and cost.updates_on_gpu and not self.regions[stage].update_waits:
            self._update_on_gpu(rank, stage)

    def _compute(
        self,
        rank: int,
        name: object,
        seconds: float,
        waits: Sequence[Sequence[Task]] = ((),) * len(_WAITED_FOR),
        *,
        launch: float = 0.0,
    ) -> Task:
        state = self.ranks[rank]
        needs = [] if state.last is None else [state.last]  # tasks without a lane: each waits for the last one
        if state.begin is not None:
            needs.append(state.begin)
        for tasks in waits:
            needs += tasks
        if state.updating > 0:
            launch *= self.profile.launch_beside_updates
            state.updating -= launch
        state.enqueued += launch
        # If the GPU's work so far takes longer than the host's, the GPU does not wait for the host.
        if state.enqueued > state.computed:
            needs.append(self._task(None, state.enqueued, [] if state.begin is None else [state.begin]))
        state.computed += seconds
        task = state.last = self._task(None, seconds, needs)
        if self._is_described:
            self.names[task] = (rank, Lane.COMPUTE, name, len(self.step_ends) + 1, None)
            by_cause = dict(zip(_WAITED_FOR, waits, strict=True))
            state.computes.append(ComputeTask(task, by_cause, len(self.step_ends), state.begin))
        return task

    def _send(self, rank: int, target: int, played: _PlayedAction, sent: Task) -> None:
        if target != rank:
            work = self._message(rank, target, self.rules.message_bytes + self._head_bytes(rank, target, played))
            name = f"{played.action} to {target}" if self._is_described else ""
            sent = self._task((Lane.SEND, rank, target), work, [sent], name=name)
        self._messages[played.key] = sent

    def _head_bytes(self, rank: int, target: int, played: _PlayedAction) -> int:
        """Bytes of a shared head in a message: weights with the first microbatch, gradients with the last."""
        spec, microbatch = self.schedule.spec, played.action.microbatch
        if spec.spreads_head and played.is_forward and played.stage == spec.num_stages - 1:
            return self.rules.head_weight_bytes if microbatch == target else 0
        is_last = played.stage == spec.num_stages and microbatch == spec.head_microbatches(rank)[-1]
        return self.rules.head_sum_bytes if is_last else 0

    def _reduce(self, rank: int, stage: int, done: Task) -> Task:
        """Sum a stage's gradients over the replicas while the next stage computes (engine/reductions.py)."""
        state = self.ranks[rank]
        flow = self.flows.between_replicas(rank, self.rules.memory.reduce_bytes(self.costs[stage].parameters))
        task = self._task((Lane.REDUCE, rank), flow, [done], name=f"R{stage}")
        state.reductions = [*state.reductions[1 - MIN_GRADIENT_SUMS :], task]
        return task

    def _gather(self, rank: int, stage: int, slot: _Slot, load: Task) -> Task:
        """Copy the weights that other replicas have updated to the GPU and, for later loads, to the host."""
        num_bytes = self.rules.memory.remote_size(self.costs[stage].parameters) * self.rules.memory.weight
        flow = self.flows.between_replicas(rank, num_bytes)
        state = self.ranks[rank]
        needs = [task for task in (load, state.gathered) if task is not None]  # replicas gather in the order of loads
        task = state.gathered = self._task((Lane.GATHER, rank), flow, needs, name=f"G{stage}")
        slot.weights_on_host = self._task(f"weights to host {rank}", self.flows.offload(rank, num_bytes), [task])
        return task

    def _add_load(self, rank: int, played: _PlayedAction) -> None:
        state, stage = self.ranks[rank], played.stage
        slot = next((slot for slot in state.slots if slot.stage is None), None)
        if slot is None:
            slot = _Slot()
            state.slots.append(slot)
        points = (slot.free, slot.weights_on_host, state.begin, state.updates.get(stage))
        needs = [task for task in points if task is not None]
        cost = self.costs[stage]
        loaded = cost.parameters if cost.loaded is None else cost.loaded
        gathers = stage in state.updated
        loaded -= self.rules.memory.remote_size(cost.parameters) if gathers else 0
        num_bytes = loaded * self.rules.memory.weight
        reads = self.profile.disks is not None and self.regions[stage].place_of(Part.WEIGHTS) is Place.DISKS
        if reads:
            needs.append(self._read_weights(rank, stage, num_bytes))
        slot.stage = stage
        load = self._task((Lane.LOAD, rank), self.flows.load(rank, num_bytes), needs, name=f"L{stage}")
        if reads:
            state.loads_from_disks.append(load)
        state.loads[stage] = self._gather(rank, stage, slot, load) if gathers else load
        state.updated.discard(stage)
        state.unquantized.add(stage)

    def _read_weights(self, rank: int, stage: int, num_bytes: int) -> Task:
        """Read weights for a load, after an update has written them and a buffer is free (engine/weight_loads.py)."""
        state = self.ranks[rank]
        loads = state.loads_from_disks
        is_full = len(loads) == self.layouts[rank].load_buffers.number
        points = (state.begin, state.written.get(stage), loads.popleft() if is_full else None)
        needs = [task for task in points if task is not None]
        return self._task(f"weights read {rank}", self.flows.disk_read(num_bytes), needs)

    def _add_offload(self, rank: int, played: _PlayedAction) -> None:
        state, stage = self.ranks[rank], played.stage
        slot = next(slot for slot in state.slots if slot.stage == stage)
        last = state.last_of_stage[stage]
        slot.stage, slot.free = None, last
        if not state.last_is_backward[stage] or self.costs[stage].keeps_trained_on_gpu:
            return
        owned = self.rules.memory.shard_size(self.costs[stage].parameters)
        flow = self.flows.offload(rank, owned * self.rules.memory.gradient)
        begins = not self.regions[stage].update_waits and self._overlaps
        arrives_in_buffer = begins and self.regions[stage].place_of(Part.GRADIENTS) is Place.BUFFER
        needs = [last, *(self._free_buffer(rank) if arrives_in_buffer else ())]
        copied = slot.free = self._task((Lane.OFFLOAD, rank), flow, needs, name=f"O{stage}")
        self._gradient_offloads[stage] = copied
        if begins:
            self._update_on_host(rank, stage, [copied])

    def _add_sums_offload(self, rank: int, played: _PlayedAction) -> None:
        state, stage = self.ranks[rank], played.stage
        flow = self.flows.offload(rank, self.costs[stage].parameters * SUM_BYTES)
        copied = self._task((Lane.OFFLOAD, rank), flow, [state.last_of_stage[stage]], name=f"OS{stage}")
        state.sums[stage] = state.sums_left = copied

    def _add_sums_load(self, rank: int, played: _PlayedAction) -> None:
        state, stage = self.ranks[rank], played.stage
        flow = self.flows.load(rank, self.costs[stage].parameters * SUM_BYTES)
        needs = [task for task in (state.sums.get(stage), state.sums_left) if task is not None]
        state.sums[stage] = self._task((Lane.LOAD, rank), flow, needs, name=f"LS{stage}")

    def _add_offloaded_activations(self, rank: int, played: _PlayedAction) -> None:
        state, action = self.ranks[rank], played.action
        flow = self.flows.offload(rank, self._offloaded_bytes(action))
        task = self._task(
            (Lane.OFFLOAD_ACTIVATIONS, rank), flow, [] if state.last is None else [state.last], name=action
        )
        state.activation_copies[action.stage, action.microbatch] = task
        state.leaving.append(task)
        while len(state.leaving) > max_pending_offloads(self.schedule.spec.copy_lookahead):
            state.left = state.leaving.popleft()

    def _add_fetch(self, rank: int, played: _PlayedAction) -> None:
        state, action, key = self.ranks[rank], played.action, (played.stage, played.action.microbatch)
        flow = self.flows.load(rank, self._offloaded_bytes(action))
        needs = [task for task in (state.last, state.activation_copies[key]) if task is not None]
        state.activation_copies[key] = self._task((Lane.PREFETCH_ACTIVATIONS, rank), flow, needs, name=action)
        pending = max_pending_offloads(self.schedule.spec.copy_lookahead) if self.schedule.spec.is_depth_first else 0
        while len(state.leaving) > pending:
            state.left = state.leaving.popleft()

    def _offloaded_bytes(self, action: Action) -> int:
        offloads_all = self.schedule.spec.offloads_all(action.stage, action.microbatch)
        return self.rules.offloaded_bytes(self.costs[action.stage], offloads_all=offloads_all)

    def _finish(self, end: Task) -> None:
        """Update the remaining stages in forward order after the step has ended; then the next step may begin."""
        self._begin(end)
        for rank, state in enumerate(self.ranks):
            begin = end
            for stage in self.schedule.spec.local_stages(rank):
                if self.costs[stage].updates_on_gpu:
                    if self.regions[stage].update_waits:
                        self._update_on_gpu(rank, stage)
                elif self.regions[stage].update_waits or not self._overlaps:
                    self._update_on_host(rank, stage, [self._gradient_offloads[stage], begin])
                    if not self._overlaps and stage in state.updates:
                        begin = state.begin = state.updates[stage]

    def _update_on_gpu(self, rank: int, stage: int) -> None:
        state, parameters = self.ranks[rank], self.costs[stage].parameters
        if self.costs[stage].is_resident:
            state.unquantized.add(stage)
        seconds = self.rules.memory.shard_size(parameters) / self.profile.gpu_adamw
        if not self._is_shared:
            self._compute(rank, f"U{stage}", seconds)
        elif parameters:  # updated on the reduction stream, after the reduction
            needs = [task for task in (state.last_of_stage.get(stage), state.begin) if task is not None]
            update = self._task((Lane.REDUCE, rank), seconds, needs, name=f"U{stage}")
            num_bytes = self.rules.memory.remote_size(parameters) * self.rules.memory.weight
            flow = self.flows.between_replicas(rank, num_bytes)
            state.updates[stage] = self._task((Lane.REDUCE, rank), flow, [update], name=f"G{stage}")

    def _update_on_host(self, rank: int, stage: int, needs: Sequence[Task]) -> None:
        left, is_on_disks = self.rules.memory.shard_size(self.costs[stage].parameters), self._has_states_on_disks(stage)
        if is_on_disks and left:
            needs = [*needs, self._read_states(rank, stage)]
        if self._is_shared and left:
            self.ranks[rank].updated.add(stage)
        if self._overlaps:
            self.ranks[rank].updating += left / self.profile.cpu_adamw_together
        while left > 0:
            piece = min(left, UPDATE_CHUNK_ELEMENTS)
            flow = self.flows.update(piece)
            task = self._task((Lane.OPTIMIZER, rank), flow, needs, name=f"U{stage}", priority=stage)
            left, needs = left - piece, [task]
            self.ranks[rank].updates[stage] = task
        if is_on_disks and stage in self.ranks[rank].updates:
            self._write_states(rank, stage)

    def _has_states_on_disks(self, stage: int) -> bool:
        return self.profile.disks is not None and self.regions[stage].place_of(Part.STATES) is Place.DISKS

    def _read_states(self, rank: int, stage: int) -> Task:
        """Read a stage's states after its update is submitted and a buffer is free (engine/state_files.py)."""
        state = self.ranks[rank]
        regions = self.regions[stage]
        submitted = state.begin if regions.update_waits else state.last_of_stage.get(stage)
        needs = [task for task in (submitted, state.written.get(stage)) if task is not None]
        needs += self._free_buffer(rank)
        flow = self.flows.disk_read(regions.disk_bytes(self.rules.memory, 0).read)
        return self._task(f"states read {rank}", flow, needs)

    def _free_buffer(self, rank: int) -> list[Task]:
        """Return the write that frees the next buffer, if all buffers are in use."""
        buffers, number = self.ranks[rank].buffers, self.layouts[rank].state_buffers.number
        while len(buffers) > number:
            buffers.popleft()
        return [buffers[0]] if len(buffers) == number else []

    def _write_states(self, rank: int, stage: int) -> None:
        state = self.ranks[rank]
        flow = self.flows.disk_write(self.regions[stage].disk_bytes(self.rules.memory, 0).written)
        state.written[stage] = self._task(f"states written {rank}", flow, [state.updates[stage]])
        state.buffers.append(state.written[stage])

    def _task(
        self, lane: Hashable | None, work: float | Flow, needs: Sequence[Task], *, name: object = "", priority: int = 0
    ) -> Task:
        task = Task(lane, work, needs, priority)
        self.tasks.append(task)
        if self._is_described and isinstance(lane, tuple):
            peer = lane[2] if len(lane) > 2 else None
            self.names[task] = (lane[1], lane[0], name, len(self.step_ends) + 1, peer)
        return task


_COPIES_OF_STAGES = {
    ActionKind.LOAD: StepTasks._add_load,
    ActionKind.OFFLOAD: StepTasks._add_offload,
    ActionKind.OFFLOAD_GRADIENT_SUMS: StepTasks._add_sums_offload,
    ActionKind.LOAD_GRADIENT_SUMS: StepTasks._add_sums_load,
}
"""Copies that resident stages do not have."""
_ADDED_FOR = {
    **_COPIES_OF_STAGES,
    ActionKind.OFFLOAD_ACTIVATIONS: StepTasks._add_offloaded_activations,
    ActionKind.PREFETCH_ACTIVATIONS: StepTasks._add_fetch,
}
