"""Lets messages wait on one GPU and looks which other streams continue meanwhile; one process is both ranks.

python tests/harness/waiting_receive.py MIB

Prints one JSON line: the numbers of the streams that were held up, and how many messages came wrong in the end.
CUDA_DEVICE_MAX_CONNECTIONS=8 in the environment shows what happens with the hardware queues that CUDA takes by default.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from mobius.process.ranks import prepare_environment, set_cuda_max_connections

prepare_environment()  # before torch is imported
set_cuda_max_connections()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from mobius.distributed.cuda_copies import CudaCopyEngine  # noqa: E402
from mobius.distributed.mailboxes import EdgeEnd, SharedMemory  # noqa: E402
from mobius.hardware.streams import CudaEvent, Event  # noqa: E402

DEVICE = torch.device("cuda", 0)
NUM_STREAMS = 24
"""More than a rank's slots, offloads, communicators and traces use."""
SECONDS = 5.0


def main() -> None:
    """Two receives wait on one edge and two sends on another; then everything else has its turn, then they have."""
    num_bytes = int(float(sys.argv[1]) * 2**20)
    engine = CudaCopyEngine(DEVICE)
    (outbox, inbox), (full_outbox, full_inbox) = (_edge(engine, num_bytes) for _ in range(2))
    words = torch.arange(num_bytes // 4, dtype=torch.int32, device=DEVICE)
    messages = [words * (2 * number + 1) for number in range(6)]
    buffers = [torch.zeros_like(words) for _ in range(6)]
    streams = [torch.cuda.current_stream(DEVICE), *(torch.cuda.Stream(DEVICE) for _ in range(NUM_STREAMS))]
    hosts = [torch.ones(2**20, pin_memory=True) for _ in streams]
    devices = [torch.ones(2**20, device=DEVICE) for _ in streams]
    _work(streams, hosts, devices)  # loads the kernels
    torch.cuda.synchronize()

    events = [inbox.post(buffer.data_ptr()) for buffer in buffers[:2]]
    events += [full_outbox.send(message.data_ptr()) for message in messages[2:]]
    done = _work(streams, hosts, devices)
    end = time.monotonic() + SECONDS
    # The first two sends find a mailbox.
    while time.monotonic() < end and not all(event.is_completed() for event in [*done, *events[2:4]]):
        time.sleep(0.01)
    held = [number for number, event in enumerate(done) if not event.is_completed()]
    num_waiting = sum(not event.is_completed() for event in events)
    if held:
        for shared in _kept:  # lets every message pass, whatever it carries
            shared.write_word(0, 2**30)
            shared.write_word(128, 2**30)
        torch.cuda.synchronize()
        print(json.dumps({"held_up": held, "num_waiting": num_waiting, "num_wrong": None}), flush=True)
        return

    events += [outbox.send(message.data_ptr()) for message in messages[:2]]
    events += [full_inbox.post(buffer.data_ptr()) for buffer in buffers[2:]]
    torch.cuda.synchronize()
    num_wrong = sum(not torch.equal(a, b) for a, b in zip(messages, buffers, strict=True))
    print(json.dumps({"held_up": held, "num_waiting": num_waiting, "num_wrong": num_wrong}), flush=True)


def _edge(engine: CudaCopyEngine, num_bytes: int) -> list[EdgeEnd]:
    """Both ends of an edge with two mailboxes; the memory stays until the process ends."""
    shared = SharedMemory.create(4096)
    address = engine.register(shared.address, shared.num_bytes)
    start = engine.allocate(2 * num_bytes)
    mailboxes = (start, start + num_bytes)
    _kept.append(shared)
    return [EdgeEnd(engine.new_queue(), num_bytes, mailboxes, address, address + 128) for _ in range(2)]


_kept: list[SharedMemory] = []


def _work(streams: list[torch.cuda.Stream], hosts: list[Tensor], devices: list[Tensor]) -> list[Event]:
    """A load, a kernel and an offload on every stream."""
    events: list[Event] = []
    for stream, host, device in zip(streams, hosts, devices, strict=True):
        with torch.cuda.stream(stream):
            device.copy_(host, non_blocking=True)
            device.add_(1)
            host.copy_(device, non_blocking=True)
            events.append(CudaEvent(stream))
    return events


if __name__ == "__main__":
    main()
