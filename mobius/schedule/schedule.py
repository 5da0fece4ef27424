"""The schedule type, and an order in which its ranks can play it.

    rank 0   compute, send ->  [messages from 0 to 1, in the order of their sending]  -> receive, compute   rank 1

A rank appends each send to the queue of its edge and continues; it waits only for messages that it must receive. Each
pair of ranks has one queue per direction, as the runtime has one communicator for each. With fewer queues, a send could
block the receive that it waits for, because NCCL does not buffer large messages.
"""

from collections import defaultdict, deque
from dataclasses import dataclass

from mobius.schedule.action import Action, source_stage, target_stage
from mobius.schedule.spec import ScheduleSpec


@dataclass(frozen=True)
class Schedule:
    """One step of all ranks, or one evaluation pass: `actions[rank]` is that rank's ordered list.

    `build_schedule` returns only schedules that passed `check`.
    """

    spec: ScheduleSpec
    actions: tuple[tuple[Action, ...], ...]


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
    spec = schedule.spec
    order: list[tuple[int, Action]] = []
    positions = [0] * spec.num_ranks
    edges: dict[tuple[int, int], deque[tuple[int, int, int | None]]] = defaultdict(deque)
    num_before = -1
    while num_before < len(order):
        num_before = len(order)
        for rank, actions in enumerate(schedule.actions):
            while positions[rank] < len(actions):
                action = actions[positions[rank]]
                source, target = (
                    source_stage(action, spec.num_stages),
                    target_stage(action, spec.num_stages),
                )
                if source is not None:
                    wanted, arriving = (
                        (source, action.stage, action.microbatch),
                        edges[spec.rank_of(source), rank],
                    )
                    if not arriving:
                        break
                    if arriving[0] != wanted:
                        text = f"it needs {_describe(*wanted)}, but the edge delivers {_describe(*arriving[0])} first"
                        return order, Conflict(rank, positions[rank], False, text)
                    arriving.popleft()
                if target is not None:
                    edges[rank, spec.rank_of(target)].append((action.stage, target, action.microbatch))
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
        source = source_stage(action, schedule.spec.num_stages)
        assert source is not None, "only an action that receives can be stuck"
        waits.append(f"rank {rank} at {action} for stage {source} on rank {schedule.spec.rank_of(source)}")
    first = min(stuck)
    return Conflict(first, positions[first], True, f"no rank can continue; waiting: {'; '.join(waits)}")
