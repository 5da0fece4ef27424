"""The schedule type, and an order in which the ranks can play their actions.

    rank 0   compute, send ->  [messages from 0 to 1, in the order of their sending]  -> receive, compute   rank 1

Between two ranks, activations and gradients have separate queues in each direction, as in the runtime, which has a
communicator for each queue. With fewer queues, a send could block the receive that it waits for, because NCCL does not
buffer large messages. The runtime's limits apply here, too. A rank posts receives a few actions ahead, in the order in
which its actions need them. A message leaves when its receive is posted. A rank that has sent too many messages waits
until the oldest message has left.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mobius.limits import NUM_PREPOSTED_RECEIVES
from mobius.schedule.action import Action, Direction
from mobius.schedule.spec import ScheduleSpec


@dataclass(frozen=True)
class Schedule:
    """One step or one evaluation pass of all ranks: `actions[rank]` is the ordered list of the rank."""

    spec: ScheduleSpec
    actions: tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Conflict:
    """Action at which a rank waits forever (`is_deadlock`), or would receive another message than it needs."""

    rank: int
    index: int
    """Index into the rank's actions."""
    is_deadlock: bool
    text: str


_Message = tuple[int, int, int | None]
"""Source stage, target stage and microbatch."""


@dataclass(slots=True)
class _Queue:
    """Messages of one direction from one rank to another."""

    waiting: deque[_Message] = field(default_factory=deque)
    """Messages that are sent but not yet received, in the order in which they were sent."""
    num_sent: int = 0
    num_posted: int = 0
    """Number of receives that the target has posted; as many messages may leave."""


class _Player:
    """Plays one rank's actions until the rank must wait for a message, or until it has sent too many messages."""

    def __init__(self, schedule: Schedule, rank: int, queues: dict[tuple[int, int, Direction], _Queue]) -> None:
        """Play `rank`; all players share `queues`, by source, target and direction."""
        spec = schedule.spec
        self.rank, self.actions, self.position = rank, schedule.actions[rank], 0
        self.conflict: Conflict | None = None
        self._spec, self._queues, self._is_alone = spec, queues, spec.num_ranks == 1
        self._sources = [spec.source_of(action) for action in self.actions]
        self._receives = [queues[each[1], rank, each[2]] for each in self._sources if each is not None]
        """Queue of each message that the rank receives, in the order in which actions need the messages."""
        self._num_posted = self._num_received = 0
        self._in_flight: deque[tuple[_Queue, int, _Message]] = deque()
        """Queue, number and message of each sent message that may not have left yet, oldest first."""
        self._max_in_flight = spec.max_sends_in_flight

    def play(self, order: list[tuple[int, Action]]) -> bool:
        """Append the actions that can be played now to `order`; return whether another rank may now continue."""
        num_before = len(order) + self._num_posted
        while not self.is_waiting_for_a_send():
            self._post_receives()
            if self.position == len(self.actions) or not self._receive():
                break
            self._send()
            order.append((self.rank, self.actions[self.position]))
            self.position += 1
        return len(order) + self._num_posted > num_before

    def is_waiting_for_a_send(self) -> bool:
        """Whether the rank must wait because it has sent more messages than the transport can hold.

        Messages leave in the order in which they were sent.
        """
        while len(self._in_flight) > self._max_in_flight:
            queue, number, _ = self._in_flight[0]
            if number >= queue.num_posted:
                return True
            self._in_flight.popleft()
        return False

    def describe_wait(self) -> tuple[int, str]:
        """Return the index of the action at which the rank waits, and a text that says for which message it waits."""
        if self.is_waiting_for_a_send():
            message = self._in_flight[0][2]
            receiver = f"rank {self._spec.rank_of(*message[1:])} to receive {_describe(*message)}"
            return self.position - 1, f"rank {self.rank} at {self.actions[self.position - 1]} for {receiver}"
        source = self._sources[self.position]
        assert source is not None, "only an action that receives can be stuck"
        sender = f"stage {source[0]} on rank {source[1]}"
        return self.position, f"rank {self.rank} at {self.actions[self.position]} for {sender}"

    def _post_receives(self) -> None:
        for queue in self._receives[self._num_posted : self._num_received + NUM_PREPOSTED_RECEIVES]:
            queue.num_posted += 1
            self._num_posted += 1

    def _receive(self) -> bool:
        """Return whether the action can start: it needs no message, or its message has arrived."""
        action, source = self.actions[self.position], self._sources[self.position]
        if source is None:
            return True
        arriving, wanted = self._receives[self._num_received].waiting, (source[0], action.stage, action.microbatch)
        if not arriving:
            return False
        if arriving[0] != wanted:
            text = f"it needs {_describe(*wanted)}, but the queue delivers {_describe(*arriving[0])} first"
            self.conflict = Conflict(self.rank, self.position, False, text)
            return False
        arriving.popleft()
        self._num_received += 1
        return True

    def _send(self) -> None:
        action = self.actions[self.position]
        target = self._spec.target_of(action)
        if target is None:
            return
        message = (action.stage, target[0], action.microbatch)
        queue = self._queues[self.rank, *target[1:]]
        queue.waiting.append(message)
        if not self._is_alone:  # a single rank sends messages only to itself, which need no transport
            self._in_flight.append((queue, queue.num_sent, message))
        queue.num_sent += 1


def topological_order(schedule: Schedule) -> tuple[list[tuple[int, Action]], Conflict | None]:
    """Return the played actions with their ranks, each receive after its send, and the conflict that stopped the ranks.

    The ranks take turns; each rank plays until it must wait. The conflict is None if all ranks reach the end.
    """
    order: list[tuple[int, Action]] = []
    queues: dict[tuple[int, int, Direction], _Queue] = defaultdict(_Queue)
    players = [_Player(schedule, rank, queues) for rank in range(schedule.spec.num_ranks)]
    while sum(player.play(order) for player in players):
        pass
    wrong = [player.conflict for player in players if player.conflict is not None]
    return order, wrong[0] if wrong else _deadlock(players)


def _describe(source: int, target: int, microbatch: int | None) -> str:
    return f"microbatch {microbatch} from stage {source} to stage {target}"


def _deadlock(players: Sequence[_Player]) -> Conflict | None:
    """Return the conflict if no rank can continue; None if all ranks have reached the end."""
    stuck = [player for player in players if player.position < len(player.actions)]
    if not stuck:
        return None
    waits = [player.describe_wait() for player in stuck]
    text = f"no rank can continue; waiting: {'; '.join(wait for _, wait in waits)}"
    return Conflict(stuck[0].rank, waits[0][0], True, text)
