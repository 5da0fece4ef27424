"""The tasks of a step, made from a schedule and what its stages cost: what works on which lane, and waits for what."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from mobius.limits import PIECE_ELEMENTS, max_leaving
from mobius.plan.partition import ModelShape, StageCut
from mobius.plan.plan import KeptLevel, Plan
from mobius.plan.profile import Profile
from mobius.plan.tasks import Flow, SharedRates, StageCost, StepRules, Task
from mobius.schedule.action import Action, ActionKind, incoming, outgoing
from mobius.schedule.lanes import Lane, WaitCause
from mobius.schedule.schedule import Schedule, take_turns

ACTION_GAP = 40e-6
"""Seconds of a GPU between two actions: events and other streams are waited for (0.02 to 0.08 ms in traces)."""
LAUNCH_BESIDE_UPDATES = 1.25
"""The host's seconds for a backward while its other cores update streamed stages, over those on an idle host: 2.2 to
2.6 ms in runs for 2.0 alone."""
SEAL_BYTES = 14
"""GPU memory traffic per parameter behind a stage's last backward, when its message has left: norm 4, rounded to the
format in which gradients travel 6, sums cleared 4."""


def stage_costs(plan: Plan, shape: ModelShape, profile: Profile) -> tuple[StageCost, ...]:
    """The cost of every stage: a profile's seconds added up over its layers."""
    costs, launch, slices = [], profile.launch, plan.num_slices > 1
    for cut in plan.cuts:
        layers = [profile.of_layer(layer) for layer in cut.layers]
        forward = sum(layer.forward for layer in layers)
        keeps = cut.stage in plan.kept
        backward = sum(layer.backward if keeps else layer.recomputed_backward for layer in layers)
        elementwise = sum(profile.elementwise_seconds(layer, shape) for layer in cut.layers)
        if keeps and plan.kept_level is KeptLevel.PRODUCTS:
            backward += elementwise
        spared = sum(layer.recomputed_backward - layer.backward for layer in layers) - elementwise
        if cut.is_first:
            forward += profile.embedding_forward
            backward += profile.embedding_backward
        keys, attention = _slice_parts(cut, shape, profile) if slices else (0.0, (0.0, 0.0))
        if cut.stage in plan.attention_kept:  # backward is without the forward of it
            backward, attention = backward - attention[0], (attention[0], attention[1] - attention[0])
        if cut.is_last:
            # Slices go forward there as elsewhere, all but the last layer, which does in backward behind its keys.
            last, early = forward, 0.0
            if slices and layers:
                last, early, moved = layers[-1].forward, keys / len(layers), profile.attention.forward
                attention = attention[0] - moved, attention[1] + moved
            forward, backward = forward - last + early, last + profile.loss + backward
        num_layers = len(cut.layers)
        launch_back = launch.backward if keeps else launch.recomputed_backward
        forward_launch, backward_launch = (
            each * num_layers + profile.action_launch for each in (launch.forward, launch_back)
        )
        if len(plan.resident) < plan.num_stages:
            backward_launch *= LAUNCH_BESIDE_UPDATES
        with_products = None
        if plan.num_products_home and cut.stage in plan.stashed:
            spared_launch = (launch.recomputed_backward - launch.backward) * num_layers
            with_products = backward - spared + ACTION_GAP, backward_launch - spared_launch
        costs.append(
            StageCost(
                forward + (0.0 if cut.is_last else ACTION_GAP),
                backward + ACTION_GAP,
                cut.num_trained(shape),
                cut.stage in plan.resident,
                0.0 if cut.is_last else forward_launch,
                backward_launch + (forward_launch if cut.is_last else 0.0),
                num_layers,
                keys + ACTION_GAP,
                *attention,
                cut.stage in plan.attention_kept,
                loaded=cut.num_travelling(shape),
                from_products=with_products,
                keeps_trained=shape.keeps_trained,
            )
        )
    return tuple(costs)


def _slice_parts(cut: StageCut, shape: ModelShape, profile: Profile) -> tuple[float, tuple[float, float]]:
    """Seconds per microbatch of queries, keys and values of all layers, and of attention forward and backward."""
    attention, keys = profile.attention, 0.0
    for layer in cut.layers:
        projected = shape.hidden_size * (shape.attention_width + 2 * shape.key_width)
        products = profile.of_layer(layer).forward - attention.forward
        keys += products * min(1.0, projected / shape.active_parameters[layer])
    number = len(cut.layers)
    return keys, (number * attention.forward, number * attention.recomputed_backward)


@dataclass(slots=True)
class ComputeTask:
    """A task of a rank's compute lane, and what it waits for beside the one before it."""

    task: Task
    waits: dict[WaitCause, Task | None]
    step: int
    begin: Task | None
    """Task that the host waited for before it began the step."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """The name of a message; as all names it becomes text only where spans are told."""

    action: Action
    target: int

    def __str__(self) -> str:
        return f"{self.action} to {self.target}"


@dataclass(slots=True)
class _Slot:
    stage: int | None = None
    free: Task | None = None


SUM_BYTES = 4
"""Bytes per parameter of a stage's sums, which travel in fp32 between rounds."""


@dataclass(slots=True)
class _RankTasks:
    """Where one rank has got to while its tasks are made."""

    last: Task | None = None
    begin: Task | None = None
    slots: list[_Slot] = field(default_factory=list)
    loads: dict[int, Task] = field(default_factory=dict)
    updates: dict[int, Task] = field(default_factory=dict)
    sums: dict[int, Task] = field(default_factory=dict)
    """The last copy of a stage's sums between rounds, to the host or back."""
    sums_left: Task | None = None
    """The copy to the host that frees the memory into which sums come next."""
    leaving: deque[Task] = field(default_factory=deque)
    """Copies of layers' inputs to the host that compute has not waited for."""
    stashed: dict[tuple[int, int | None], Task] = field(default_factory=dict)
    """The last copy of layers' inputs of a stage and microbatch, to the host or back."""
    left: Task | None = None
    """The copy that compute waits for before it goes on."""
    enqueued: float = 0.0
    """Seconds of the host since the step began."""
    computed: float = 0.0
    """The least seconds of the GPU since then."""
    last_of_stage: dict[int, Task] = field(default_factory=dict)
    last_is_backward: dict[int, bool] = field(default_factory=dict)
    computes: list[ComputeTask] = field(default_factory=list)


class StepTasks:
    """Makes the tasks of the steps, in the order in which the ranks' hosts enqueue them."""

    def __init__(self, schedule: Schedule, costs: Sequence[StageCost], profile: Profile, rules: StepRules) -> None:
        self.schedule, self.costs, self.profile, self.rules = schedule, costs, profile, rules
        self.tasks: list[Task] = []
        self.names: dict[Task, tuple[int, Lane, object, int, int | None]] = {}
        """Rank, lane, what tells its name as text, step and peer."""
        self.ranks = [_RankTasks() for _ in range(schedule.num_ranks)]
        self.step_ends: list[Task] = []
        self.flows = SharedRates(profile, schedule.num_ranks)
        self.capacities = self.flows.capacities
        # A message must be made before what receives it.
        self._order, conflict = take_turns(schedule)
        assert conflict is None, "the schedule has not passed the check"
        self._messages: dict[tuple[bool, int, int | None], Task] = {}
        self._homes: dict[int, Task] = {}

    def add_step(self) -> None:
        """Append the tasks of one more step, which begins when the one before has ended."""
        self._messages, self._homes = {}, {}
        for rank, action in self._order:
            self._add(rank, action)
        ends = [state.last for state in self.ranks if state.last is not None]
        end = self._task(None, self.profile.step_overhead, ends)
        self.step_ends.append(end)
        self._finish(end)

    def _add(self, rank: int, action: Action) -> None:
        is_resident = self.costs[action.stage].is_resident
        has_travelling_sums = not is_resident and not self.costs[action.stage].keeps_trained
        if action.kind.computes:
            self._add_compute(rank, action)
        elif action.kind is ActionKind.LOAD and not is_resident:
            self._add_load(rank, action.stage)
        elif action.kind is ActionKind.OFFLOAD and not is_resident:
            self._add_offload(rank, action.stage)
        elif action.kind is ActionKind.OFFLOAD_SUMS and has_travelling_sums:
            self._add_sums_offload(rank, action.stage)
        elif action.kind is ActionKind.LOAD_SUMS and has_travelling_sums:
            self._add_sums_load(rank, action.stage)
        elif action.kind is ActionKind.STASH:
            self._add_stash(rank, action)
        elif action.kind is ActionKind.FETCH:
            self._add_fetch(rank, action)

    def _add_compute(self, rank: int, action: Action) -> None:
        state, stage, cost = self.ranks[rank], action.stage, self.costs[action.stage]
        source = incoming(action, self.schedule.num_stages)
        message = None if source is None else self._messages[action.kind.is_backward, source, action.microbatch]
        # The model's last stage only keeps its input in forward.
        needs_weights = action.kind is not ActionKind.FORWARD_LAST or self.schedule.num_slices > 1
        waits = {
            WaitCause.NEIGHBOURS: message,
            WaitCause.OPTIMIZER: state.updates.get(stage) if needs_weights else None,
            WaitCause.WEIGHTS: state.loads.get(stage) if needs_weights else None,
        }
        is_backward = action.kind.is_backward
        fetched = None if action.kind.is_forward else state.stashed.get((stage, action.microbatch))
        copies = [state.left, fetched]
        if any(copies):
            waits[WaitCause.ACTIVATIONS] = self._task(None, 0.0, [task for task in copies if task is not None])
            state.left = None
        if is_backward and stage in state.sums:
            both = [task for task in (waits[WaitCause.WEIGHTS], state.sums.pop(stage)) if task is not None]
            waits[WaitCause.WEIGHTS] = self._task(None, 0.0, both)
        ends_stage = is_backward and action.microbatch == self.schedule.last_backward
        has_products = self.schedule.sends_products(stage, action.microbatch)
        seconds = cost.slice_seconds(action, self.schedule.num_slices, has_products=has_products)
        launch = cost.launch_seconds(action, has_products=has_products)
        task = self._compute(rank, action, seconds, waits, launch=launch)
        target = outgoing(action, self.schedule.num_stages)
        if target is not None:
            self._send(rank, self.schedule.rank_of(target), action, task)
        if ends_stage:
            task = self._compute(rank, f"seal {stage}", SEAL_BYTES * cost.parameters / self.profile.gpu_bandwidth, {})
        state.last_of_stage[stage], state.last_is_backward[stage] = task, is_backward
        if ends_stage and (cost.is_resident or cost.keeps_trained) and self._updates_at_once(stage):
            self._update_on_gpu(rank, stage)

    def _compute(
        self, rank: int, name: object, seconds: float, waits: dict[WaitCause, Task | None], *, launch: float = 0.0
    ) -> Task:
        state = self.ranks[rank]
        state.enqueued += launch
        # Where the GPU has had more to do than the host so far, it does not wait for it.
        launched = None
        if state.enqueued > state.computed:
            launched = self._task(None, state.enqueued, [] if state.begin is None else [state.begin])
        state.computed += seconds
        needs = [task for task in (state.last, state.begin, launched, *waits.values()) if task is not None]
        task = self._task((Lane.COMPUTE, rank), seconds, needs, name=name)
        state.computes.append(ComputeTask(task, waits, len(self.step_ends), state.begin))
        state.last = task
        return task

    def _send(self, rank: int, target: int, action: Action, sent: Task) -> None:
        key = (action.kind.is_backward, action.stage, action.microbatch)
        if target == rank:
            self._messages[key] = sent
            return
        work = self.flows.message(rank, target, self.rules.message_bytes)
        self._messages[key] = self._task((Lane.SEND, rank, target), work, [sent], name=_Sent(action, target))

    def _add_load(self, rank: int, stage: int) -> None:
        state = self.ranks[rank]
        slot = next((slot for slot in state.slots if slot.stage is None), None)
        if slot is None:
            slot = _Slot()
            state.slots.append(slot)
        needs = [task for task in (slot.free, state.begin, state.updates.get(stage)) if task is not None]
        cost = self.costs[stage]
        loaded = cost.parameters if cost.loaded is None else cost.loaded
        flow = self.flows.load(rank, loaded * self.rules.weight_bytes)
        slot.stage = stage
        state.loads[stage] = self._task((Lane.LOAD, rank), flow, needs, name=f"L{stage}")

    def _add_offload(self, rank: int, stage: int) -> None:
        state = self.ranks[rank]
        slot = next(slot for slot in state.slots if slot.stage == stage)
        last = state.last_of_stage[stage]
        slot.stage, slot.free = None, last
        if not self._has_gradients(rank, stage) or self.costs[stage].keeps_trained:
            return
        flow = self.flows.offload(rank, self.costs[stage].parameters * self.rules.gradient_bytes)
        home = slot.free = self._task((Lane.OFFLOAD, rank), flow, [last], name=f"O{stage}")
        self._homes[stage] = home
        if self._updates_at_once(stage) and self.rules.overlaps_optimizer:
            self._update_on_host(rank, stage, [home])

    def _add_sums_offload(self, rank: int, stage: int) -> None:
        state = self.ranks[rank]
        flow = self.flows.offload(rank, self.costs[stage].parameters * SUM_BYTES)
        home = self._task((Lane.OFFLOAD, rank), flow, [state.last_of_stage[stage]], name=f"OS{stage}")
        state.sums[stage] = state.sums_left = home

    def _add_sums_load(self, rank: int, stage: int) -> None:
        state = self.ranks[rank]
        flow = self.flows.load(rank, self.costs[stage].parameters * SUM_BYTES)
        needs = [task for task in (state.sums.get(stage), state.sums_left) if task is not None]
        state.sums[stage] = self._task((Lane.LOAD, rank), flow, needs, name=f"LS{stage}")

    def _add_stash(self, rank: int, action: Action) -> None:
        state = self.ranks[rank]
        flow = self.flows.offload(rank, self._home_bytes(action))
        task = self._task((Lane.STASH, rank), flow, [] if state.last is None else [state.last], name=action)
        state.stashed[action.stage, action.microbatch] = task
        state.leaving.append(task)
        while len(state.leaving) > max_leaving(self.schedule.reach):
            state.left = state.leaving.popleft()

    def _add_fetch(self, rank: int, action: Action) -> None:
        state, key = self.ranks[rank], (action.stage, action.microbatch)
        flow = self.flows.load(rank, self._home_bytes(action))
        needs = [task for task in (state.last, state.stashed[key]) if task is not None]
        state.stashed[key] = self._task((Lane.FETCH, rank), flow, needs, name=action)
        while state.leaving:
            state.left = state.leaving.popleft()

    def _home_bytes(self, action: Action) -> int:
        has_products = self.schedule.sends_products(action.stage, action.microbatch)
        return self.rules.kept_bytes(self.costs[action.stage], has_products=has_products)

    def _has_gradients(self, rank: int, stage: int) -> bool:
        return self.ranks[rank].last_is_backward[stage]

    def _updates_at_once(self, stage: int) -> bool:
        """Whether neither the norm over all ranks nor a tied matrix's other half has to be waited for."""
        waits_for_tied = self.rules.is_tied and stage in (0, self.schedule.num_stages - 1)
        return not self.rules.clips and not waits_for_tied

    def _finish(self, end: Task) -> None:
        """Update what is left once the step has ended, in forward order; then the next step may begin."""
        for rank, state in enumerate(self.ranks):
            state.begin, state.enqueued, state.computed = end, 0.0, 0.0
            for stage in self.schedule.local_stages(rank):
                if self.costs[stage].is_resident or self.costs[stage].keeps_trained:
                    if not self._updates_at_once(stage):
                        self._update_on_gpu(rank, stage)
                elif not self._updates_at_once(stage) or not self.rules.overlaps_optimizer:
                    self._update_on_host(rank, stage, [self._homes[stage], state.begin])
                    if not self.rules.overlaps_optimizer and stage in state.updates:
                        state.begin = state.updates[stage]

    def _update_on_gpu(self, rank: int, stage: int) -> None:
        self._compute(rank, f"U{stage}", self.costs[stage].parameters / self.profile.gpu_adamw, {})

    def _update_on_host(self, rank: int, stage: int, needs: Sequence[Task]) -> None:
        left = self.costs[stage].parameters
        while left > 0:
            piece = min(left, PIECE_ELEMENTS)
            flow = self.flows.update(piece)
            task = self._task((Lane.OPTIMIZER, rank), flow, needs, name=f"U{stage}", priority=stage)
            left, needs = left - piece, [task]
            self.ranks[rank].updates[stage] = task

    def _task(
        self, lane: Hashable | None, work: float | Flow, needs: Sequence[Task], *, name: object = "", priority: int = 0
    ) -> Task:
        task = Task(lane, work, tuple(dict.fromkeys(needs)), priority)
        self.tasks.append(task)
        if isinstance(lane, tuple):
            peer = lane[2] if len(lane) > 2 else None
            self.names[task] = (lane[1], lane[0], name, len(self.step_ends) + 1, peer)
        return task
