"""A ring of mailboxes carries messages in order and whole, in whatever order its streams happen to run."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from mobius.distributed.cuda_copies import CudaQueue
from mobius.distributed.mailboxes import EdgeEnd
from mobius.hardware.streams import Event

STALE = 0xEE
"""What memory holds while a copy into it is under way."""


@dataclass(frozen=True)
class Operation:
    """One thing a stream does: it may start once `ready`, and other streams go on between its start and its end."""

    start: Callable[[], None] = lambda: None
    end: Callable[[], None] = lambda: None
    ready: Callable[[], bool] = lambda: True


@dataclass
class Stream:
    """An ordered queue of operations."""

    waiting: deque[Operation] = field(default_factory=deque)
    running: Operation | None = None
    num_done: int = 0

    @property
    def num_given(self) -> int:
        return self.num_done + len(self.waiting) + (self.running is not None)


class Machine:
    """Memory, and streams whose operations it runs in a random order that is legal."""

    def __init__(self, seed: int, num_bytes: int) -> None:
        self.memory = bytearray([STALE]) * num_bytes
        self.words: dict[int, int] = {}
        self.streams: list[Stream] = []
        self._random = random.Random(seed)

    def new_stream(self) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def run(self) -> None:
        """Run until nothing is left; a circle of waits is an error."""
        while any(stream.waiting or stream.running for stream in self.streams):
            able = [s for s in self.streams if s.running or (s.waiting and s.waiting[0].ready())]
            assert able, "deadlock"
            stream = self._random.choice(able)
            if stream.running is None:
                stream.running = stream.waiting.popleft()
                stream.running.start()
            else:
                stream.running.end()
                stream.running = None
                stream.num_done += 1


class Point(Event):
    """A point in a stream, for which `waiter` can wait."""

    def __init__(self, stream: Stream, waiter: Stream) -> None:
        self._stream, self._number, self._waiter = stream, stream.num_given, waiter

    def wait(self) -> None:
        self._waiter.waiting.append(Operation(ready=self.is_completed))

    def synchronize(self) -> None:
        raise AssertionError("the host waits for nothing")

    def is_completed(self) -> bool:
        return self._stream.num_done >= self._number


class Queue(CudaQueue):
    """A copy queue of the machine, beside a compute stream."""

    def __init__(self, machine: Machine, compute: Stream, *, ignores: int | None = None) -> None:
        """`ignores` is the address of a counter for which it does not wait."""
        self._machine, self._compute, self._stream = machine, compute, machine.new_stream()
        self._ignores = ignores

    def follow_compute(self) -> None:
        self._stream.waiting.append(Operation(ready=Point(self._compute, self._stream).is_completed))

    def wait_value(self, address: int, value: int) -> None:
        assert 0 <= value < 2**32
        words = self._machine.words
        if address != self._ignores:
            self._stream.waiting.append(Operation(ready=lambda: (words[address] - value) % 2**32 < 2**31))

    def write_value(self, address: int, value: int) -> None:
        assert 0 <= value < 2**32
        self._stream.waiting.append(Operation(end=lambda: self._machine.words.update({address: value})))

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        memory = self._machine.memory

        def start() -> None:
            memory[target : target + num_bytes] = bytes([STALE]) * num_bytes

        def end() -> None:
            memory[target : target + num_bytes] = memory[source : source + num_bytes]

        self._stream.waiting.append(Operation(start, end))

    def record(self) -> Event:
        return Point(self._stream, self._compute)


ARRIVED, FREED = 10**6, 10**6 + 1
SIZE = 10
SEEDS = range(30)


def contents(number: int) -> bytes:
    return bytes((number * 7 + i) % 200 for i in range(SIZE))


def carry(
    seed: int,
    *,
    num_mailboxes: int,
    num_messages: int = 12,
    first: int = 0,
    posted_ahead: int = 2,
    make_queue: Callable[[Machine, Stream], CudaQueue] = Queue,
) -> list[bytes]:
    """Send messages over one edge, each made by compute in one of two buffers; what the target's compute then read.

    The target receives into `posted_ahead` + 1 buffers in turn, which its compute still reads when they are posted.
    """
    machine = Machine(seed, 20 * SIZE)
    machine.words = {ARRIVED: first % 2**32, FREED: first % 2**32}
    mailboxes = tuple(SIZE * i for i in range(num_mailboxes))
    send_buffers, receive_buffers = (50, 60), tuple(100 + SIZE * i for i in range(posted_ahead + 1))
    making, reading = machine.new_stream(), machine.new_stream()
    outbox, inbox = (
        EdgeEnd(make_queue(machine, compute), SIZE, mailboxes, ARRIVED, FREED, first) for compute in (making, reading)
    )
    memory, read = machine.memory, list[bytes]()

    def make(address: int, number: int) -> Operation:
        return Operation(end=lambda: memory.__setitem__(slice(address, address + SIZE), contents(number)))

    def look(address: int) -> Operation:
        """Reads at its end: until then nobody may write there."""
        return Operation(end=lambda: read.append(bytes(memory[address : address + SIZE])))

    sent: deque[Event] = deque()
    for number in range(num_messages):
        if len(sent) == len(send_buffers):
            sent.popleft().wait()
        making.waiting.append(make(send_buffers[number % 2], number))
        sent.append(outbox.send(send_buffers[number % 2]))

    posted: deque[tuple[int, Event]] = deque()
    num_posted = 0
    for _ in range(num_messages):
        while num_posted < num_messages and len(posted) < posted_ahead:
            address = receive_buffers[num_posted % len(receive_buffers)]
            posted.append((address, inbox.post(address)))
            num_posted += 1
        address, event = posted.popleft()
        event.wait()
        reading.waiting.append(look(address))
    machine.run()
    return read


@pytest.mark.parametrize("num_mailboxes", [1, 2, 3])
def test_messages_arrive_in_order_and_whole_in_any_order_of_streams(num_mailboxes: int) -> None:
    for seed in SEEDS:
        read = carry(seed, num_mailboxes=num_mailboxes)
        assert read == [contents(number) for number in range(12)], seed


@pytest.mark.parametrize("posted_ahead", [1, 4])
def test_it_does_not_matter_how_far_ahead_receives_are_posted(posted_ahead: int) -> None:
    for seed in SEEDS:
        read = carry(seed, num_mailboxes=2, posted_ahead=posted_ahead)
        assert read == [contents(number) for number in range(12)], seed


@pytest.mark.parametrize("first", [2**32 - 5, 2**31 - 4])
def test_counters_may_run_over(first: int) -> None:
    for seed in SEEDS:
        read = carry(seed, num_mailboxes=3, first=first)
        assert read == [contents(number) for number in range(12)], seed


@pytest.mark.parametrize("ignored", [ARRIVED, FREED])
def test_without_either_counter_messages_would_be_spoilt(ignored: int) -> None:
    """The machine does find what the protocol prevents."""

    def forgetful(machine: Machine, compute: Stream) -> CudaQueue:
        return Queue(machine, compute, ignores=ignored)

    expected = [contents(number) for number in range(12)]
    spoilt = [carry(seed, num_mailboxes=2, make_queue=forgetful) != expected for seed in SEEDS]
    assert sum(spoilt) > len(SEEDS) / 2


def test_a_queue_that_does_not_follow_compute_would_spoil_messages() -> None:
    class Hasty(Queue):
        def follow_compute(self) -> None:
            pass

    expected = [contents(number) for number in range(12)]
    assert any(carry(seed, num_mailboxes=2, make_queue=Hasty) != expected for seed in SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_edges_in_opposite_directions_never_wait_in_a_circle(seed: int) -> None:
    """Each rank sends all its messages before it receives the first: more than there are mailboxes."""
    machine = Machine(seed, 20 * SIZE)
    machine.words = dict.fromkeys((ARRIVED, FREED, ARRIVED + 2, FREED + 2), 0)
    compute = [machine.new_stream() for _ in range(2)]

    def end(rank: int, edge: int) -> EdgeEnd:
        mailboxes = (50 * edge, 50 * edge + SIZE)
        return EdgeEnd(Queue(machine, compute[rank]), SIZE, mailboxes, ARRIVED + 2 * edge, FREED + 2 * edge)

    outboxes = [end(rank, rank) for rank in range(2)]
    inboxes = [end(rank, 1 - rank) for rank in range(2)]
    for rank in range(2):
        for _ in range(6):
            outboxes[rank].send(100 + 20 * rank)
        for _ in range(6):
            inboxes[rank].post(140 + 20 * rank).wait()
    machine.run()
