"""Owns whether the messages of a schedule can all be delivered: a simulation of the ranks and their queues.

Does not own real messages (the runtime's transport) or the other rules of a schedule (check.py).

    rank 0   compute, send ->  [queue (0, 1)] . . . . [queue (0, 1)]  <- receive, compute   rank 1

A rank hands each send and each receive to a queue and goes on computing; it waits only for what it must receive. A
queue executes its operations in the order given, and the first one completes only when the other side's first one is
its counterpart: how NCCL treats a communicator when messages are too large to be buffered. One communicator per
directed edge therefore means one queue per (source rank, target rank) on either side. Receives are posted here as late
as possible, when the action that needs them starts; on directed edges posting them earlier can only help.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from mobius.schedule.action import Action, incoming, outgoing
from mobius.schedule.schedule import Schedule

Channel = Callable[[int, int], Hashable]
"""From (source rank, target rank) to the name of the queue that a message takes, on both sides."""


def directed_edge(source_rank: int, target_rank: int) -> Hashable:
    """The channel Mobius uses: one queue per directed pair of ranks."""
    return source_rank, target_rank


@dataclass(frozen=True)
class Conflict:
    """Where a rank gets stuck (`is_deadlock`), or would receive another message than the one it needs."""

    rank: int
    index: int
    is_deadlock: bool
    text: str


class _Message(NamedTuple):
    source_stage: int
    target_stage: int
    microbatch: int | None

    def __str__(self) -> str:
        return f"microbatch {self.microbatch} from stage {self.source_stage} to stage {self.target_stage}"


class _Operation(NamedTuple):
    is_send: bool
    source_rank: int
    target_rank: int
    message: _Message

    @property
    def edge(self) -> tuple[int, int]:
        return self.source_rank, self.target_rank


def find_conflict(schedule: Schedule, channel: Channel = directed_edge) -> Conflict | None:
    """The first conflict of `schedule`'s messages on `channel`; None when every rank reaches its end."""
    return _Simulation(schedule, channel).run()


class _Simulation:
    """The ranks' positions in their lists and the operations that wait in their queues."""

    def __init__(self, schedule: Schedule, channel: Channel) -> None:
        self._schedule = schedule
        self._channel = channel
        self._next = [0] * schedule.num_ranks
        self._posted: list[_Message | None] = [None] * schedule.num_ranks
        self._queues: dict[tuple[int, Hashable], deque[_Operation]] = defaultdict(deque)
        self._local: list[deque[_Message]] = [deque() for _ in range(schedule.num_ranks)]
        self._delivered: set[_Message] = set()
        self._conflict: Conflict | None = None

    def run(self) -> Conflict | None:
        ranks = range(self._schedule.num_ranks)
        while self._conflict is None and any(self._current(rank) is not None for rank in ranks):
            before = (list(self._next), list(self._posted))
            for rank in ranks:
                while self._conflict is None and self._advance(rank):
                    pass
            if self._conflict is None and before == (self._next, self._posted):
                return self._deadlock()
        return self._conflict

    def _current(self, rank: int) -> Action | None:
        actions = self._schedule.actions[rank]
        return actions[self._next[rank]] if self._next[rank] < len(actions) else None

    def _advance(self, rank: int) -> bool:
        """Let `rank` finish its current action; False where it has none or still waits for a message."""
        action = self._current(rank)
        if action is None or not self._receive(rank, action):
            return False
        target = outgoing(action, self._schedule.num_stages)
        if target is not None:
            message = _Message(action.stage, target, action.microbatch)
            if self._schedule.rank_of(target) == rank:
                self._local[rank].append(message)
            else:
                self._post(rank, _Operation(True, rank, self._schedule.rank_of(target), message))
        self._next[rank] += 1
        return True

    def _receive(self, rank: int, action: Action) -> bool:
        source = incoming(action, self._schedule.num_stages)
        if source is None:
            return True
        message = _Message(source, action.stage, action.microbatch)
        if self._schedule.rank_of(source) == rank:
            return self._receive_locally(rank, message)
        if self._posted[rank] != message:
            self._posted[rank] = message
            self._post(rank, _Operation(False, self._schedule.rank_of(source), rank, message))
        return message in self._delivered

    def _receive_locally(self, rank: int, message: _Message) -> bool:
        waiting = self._local[rank]
        if not waiting:
            return False
        if waiting[0] != message:
            self._mismatch(rank, message, waiting[0])
            return False
        waiting.popleft()
        return True

    def _post(self, rank: int, operation: _Operation) -> None:
        """Append `operation` to its queue and deliver whatever now meets its counterpart, on any queue."""
        name = self._channel(operation.source_rank, operation.target_rank)
        self._queues[rank, name].append(operation)
        changed = [(rank, name)]
        while changed:
            here = self._queues[changed.pop()]
            if not here:
                continue
            first = here[0]
            name = self._channel(first.source_rank, first.target_rank)
            ends = ((first.source_rank, name), (first.target_rank, name))
            send_queue, receive_queue = (self._queues[end] for end in ends)
            if not send_queue or not receive_queue:
                continue
            send, receive = send_queue[0], receive_queue[0]
            if not send.is_send or receive.is_send or send.edge != receive.edge:
                continue
            if send.message != receive.message:
                self._mismatch(receive.target_rank, receive.message, send.message)
                return
            self._delivered.add(send.message)
            send_queue.popleft()
            receive_queue.popleft()
            changed += ends

    def _mismatch(self, rank: int, wanted: _Message, got: _Message) -> None:
        text = f"it needs {wanted}, but the edge delivers {got} first"
        self._conflict = Conflict(rank, self._next[rank], False, text)

    def _deadlock(self) -> Conflict:
        stuck = [(rank, action) for rank in range(self._schedule.num_ranks) if (action := self._current(rank))]
        waits = []
        for rank, action in stuck:
            source = incoming(action, self._schedule.num_stages)
            assert source is not None, "only an action that receives can be stuck"
            waits.append(f"rank {rank} at {action} for stage {source} on rank {self._schedule.rank_of(source)}")
        rank = stuck[0][0]
        return Conflict(rank, self._next[rank], True, f"nobody can go on; waiting: {'; '.join(waits)}")
