"""The schedule type, and an order in which its ranks can play it.

    rank 0   compute, send ->  [messages from 0 to 1, in the order of their sending]  -> receive, compute   rank 1

A rank appends each send to the queue of its edge and continues; it waits only for messages that it must receive. Each
pair of ranks has one queue per direction, as the runtime has one communicator for each. With fewer queues, a send could
block the receive that it waits for, because NCCL does not buffer large messages.
"""

from collections import defaultdict, deque
from dataclasses import dataclass

from mobius.schedule.action import Action, source_stage, target_stage
from mobius.schedule.activation_offloading import copy_lookahead, offloads_all


@dataclass(frozen=True)
class Schedule:
    """One step of all ranks, or one evaluation pass: `actions[rank]` is that rank's ordered list.

    The stages in `resident` keep their weights on the GPU and have no load or offload; the others are streamed through
    `slots[rank]` GPU slots, 0 if the rank streams no stage. `build_schedule` returns only schedules that passed
    `check`.
    """

    num_ranks: int
    num_stages: int
    num_microbatches: int
    slots: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    resident: frozenset[int] = frozenset()
    is_evaluation: bool = False
    """Whether there is no backward: stages only run forward, the last one with its loss."""
    accumulation_rounds: int = 1
    """Equal parts of the microbatches that run forward and backward one after the other (gradient accumulation)."""
    offloaded_activation_stages: frozenset[int] = frozenset()
    """Stages whose layers' inputs are on the host between forward and backward."""
    num_slices: int = 1
    """Slices per sequence; a microbatch is a slice of some sequences, and `num_microbatches` counts all slices."""
    num_offloaded_microbatches: int = 0
    """Microbatches per round whose matrix products are offloaded too, and so not recomputed."""

    def offloads_all(self, stage: int, microbatch: int | None) -> bool:
        """Whether a microbatch's products are offloaded, and not only the inputs of the stage's layers."""
        if stage not in self.offloaded_activation_stages or microbatch is None:
            return False
        return offloads_all(
            microbatch, microbatches_per_round=self.microbatches_per_round, number=self.num_offloaded_microbatches
        )

    @property
    def copy_lookahead(self) -> int:
        """Number of compute actions that an activation copy may span."""
        return copy_lookahead(self.microbatches_per_round, self.num_offloaded_microbatches)

    @property
    def microbatches_per_round(self) -> int:
        """Microbatches of a round: the maximum between forward and backward at a time."""
        return self.num_microbatches // self.accumulation_rounds

    @property
    def last_backward(self) -> int:
        """Microbatch whose backward is last in every stage: the first slice of the last sequences."""
        return self.num_microbatches - self.num_slices

    @property
    def num_slots(self) -> int | None:
        """Maximum number of slots of a rank; None if nothing is streamed."""
        return max(self.slots) or None

    def rank_of(self, stage: int) -> int:
        """Return the rank that runs `stage`."""
        return stage % self.num_ranks

    def local_stages(self, rank: int) -> range:
        """Return the stages of `rank`, ascending: rank, rank + num_ranks, ..."""
        return range(rank, self.num_stages, self.num_ranks)

    def streamed_stages(self, rank: int) -> list[int]:
        """Return the streamed stages of `rank`, ascending."""
        return [stage for stage in self.local_stages(rank) if stage not in self.resident]


@dataclass(frozen=True)
class Conflict:
    """Action at which a rank is stuck (`is_deadlock`), or would receive a different message than it needs."""

    rank: int
    index: int
    """Index into the rank's actions."""
    is_deadlock: bool
    text: str


def topological_order(schedule: Schedule) -> tuple[list[tuple[int, Action]], Conflict | None]:
    """Return the playable actions with their ranks, each receive after its send, and the conflict that stops them.

    The ranks take turns; each continues until a message is missing. The conflict is None if all reach the end.
    """
    order: list[tuple[int, Action]] = []
    positions = [0] * schedule.num_ranks
    edges: dict[tuple[int, int], deque[tuple[int, int, int | None]]] = defaultdict(deque)
    num_before = -1
    while num_before < len(order):
        num_before = len(order)
        for rank, actions in enumerate(schedule.actions):
            while positions[rank] < len(actions):
                action = actions[positions[rank]]
                source, target = source_stage(action, schedule.num_stages), target_stage(action, schedule.num_stages)
                if source is not None:
                    wanted, arriving = (source, action.stage, action.microbatch), edges[schedule.rank_of(source), rank]
                    if not arriving:
                        break
                    if arriving[0] != wanted:
                        text = f"it needs {_describe(*wanted)}, but the edge delivers {_describe(*arriving[0])} first"
                        return order, Conflict(rank, positions[rank], False, text)
                    arriving.popleft()
                if target is not None:
                    edges[rank, schedule.rank_of(target)].append((action.stage, target, action.microbatch))
                order.append((rank, action))
                positions[rank] += 1
    return order, _deadlock(schedule, positions)


def _describe(source: int, target: int, microbatch: int | None) -> str:
    return f"microbatch {microbatch} from stage {source} to stage {target}"


def _deadlock(schedule: Schedule, positions: list[int]) -> Conflict | None:
    """Return the conflict of the unfinished ranks once none can continue; None if all are finished."""
    stuck = {rank: a[positions[rank]] for rank, a in enumerate(schedule.actions) if positions[rank] < len(a)}
    if not stuck:
        return None
    waits = []
    for rank, action in stuck.items():
        source = source_stage(action, schedule.num_stages)
        assert source is not None, "only an action that receives can be stuck"
        waits.append(f"rank {rank} at {action} for stage {source} on rank {schedule.rank_of(source)}")
    first = min(stuck)
    return Conflict(first, positions[first], True, f"no rank can continue; waiting: {'; '.join(waits)}")
