"""Sent messages are kept until they have left, and no more of them than are allowed to be under way."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mobius.distributed.process_groups import DistributedTransport
from mobius.distributed.transport import MessageFormat, WarmupTransport
from mobius.distributed.world import World
from mobius.hardware.streams import Event
from mobius.process.ranks import Ranks
from mobius.schedule.action import Direction

SHAPE = (1, 2, 3)


class SlowMailboxes:
    """Mailboxes of which no message leaves by itself; `waited` are those that compute has waited for."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.waited: list[int] = []

    def open(self) -> "SlowMailboxes":
        return self

    def send(self, tensor: Tensor, target: int, direction: Direction) -> Event:
        self.sent.append(tensor)
        number, mailboxes = len(self.sent) - 1, self

        class Never(Event):
            def wait(self) -> None:
                mailboxes.waited.append(number)

            def is_completed(self) -> bool:
                return False

            def synchronize(self) -> None:
                raise AssertionError("the host does not wait")

        return Never()

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("max_pending_sends", "waited"), [(None, []), (2, [0, 1, 2]), (5, [])])
def test_compute_waits_for_the_first_message_when_too_many_are_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_pending_sends: int | None, waited: list[int]
) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    mailboxes, ranks, cpu = SlowMailboxes(), Ranks(0, 1, 0), torch.device("cpu")
    transport = DistributedTransport(
        World(ranks, cpu),
        ranks,
        device=cpu,
        message_format=MessageFormat(SHAPE, torch.float32),
        mailboxes=mailboxes,  # type: ignore[arg-type]
        max_pending_sends=max_pending_sends,
    )
    try:
        for _ in range(5):
            transport.send(torch.zeros(SHAPE), 0, Direction.FORWARD)
        assert mailboxes.waited == waited
        transport.finish_step()
        assert mailboxes.waited == [0, 1, 2, 3, 4]
        mailboxes.waited.clear()
        transport.limit_pending_sends(4)
        for _ in range(5):
            transport.send(torch.zeros(SHAPE), 0, Direction.FORWARD)
        assert mailboxes.waited == ([] if max_pending_sends is None else [5])
        transport.finish_step()
        mailboxes.waited.clear()
        for _ in range(5):  # others' memory, which no one counts
            transport.send(torch.zeros(SHAPE), 0, Direction.FORWARD, is_kept=True)
        assert not mailboxes.waited
        transport.finish_step()
        assert mailboxes.waited == [10, 11, 12, 13, 14]
    finally:
        transport.close()
    assert not dist.is_initialized()


def test_a_rehearsal_keeps_as_many_messages_as_a_step() -> None:
    transport = WarmupTransport(
        rank=0, device=torch.device("cpu"), message_format=MessageFormat(SHAPE, torch.float32), max_pending_sends=3
    )
    sent = [torch.zeros(SHAPE) for _ in range(5)]
    for tensor in sent:
        transport.send(tensor, 1, Direction.FORWARD)
    transport.send(torch.zeros(SHAPE), 1, Direction.FORWARD, is_kept=True)
    assert [id(tensor) for tensor in transport._sent] == [id(tensor) for tensor in sent[2:]]
