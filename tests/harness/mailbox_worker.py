"""Sends messages both ways between two ranks over mailboxes, during compute, and checks every one of them.

Activations and gradients take turns, and each gradient is received before the activation that was sent before it.

torchrun --nproc_per_node 2 tests/harness/mailbox_worker.py DEVICE MIB NUM_MESSAGES     (DEVICE: cpu or cuda)

The first rank prints one JSON line: whether mailboxes were used at all, and how many words came wrong.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from mobius.process.ranks import Ranks, allows_peer_copies, prepare_environment, set_cuda_max_connections  # noqa: E402

prepare_environment()  # before torch is imported
set_cuda_max_connections()

import torch  # noqa: E402
from harness.host_copies import HostCopyEngine  # noqa: E402

from mobius.distributed.cuda_copies import CudaCopyEngine  # noqa: E402
from mobius.distributed.mailboxes import Mailboxes  # noqa: E402
from mobius.distributed.process_groups import DistributedTransport  # noqa: E402
from mobius.distributed.rendezvous import join_run  # noqa: E402
from mobius.distributed.transport import MessageFormat  # noqa: E402
from mobius.distributed.world import World  # noqa: E402
from mobius.schedule.action import Direction  # noqa: E402

AHEAD = 2
GEMM = 4096


def main() -> None:
    """Meet, send, receive, compare, and tell what came wrong."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    kind, mib, num_messages = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    ranks = Ranks.from_environment()
    device = torch.device("cuda", ranks.local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    num_words = int(mib * 2**20) // 4
    rendezvous = join_run(ranks)

    def make_engine(device: torch.device) -> CudaCopyEngine:
        if kind == "cuda":
            return CudaCopyEngine(device)
        return HostCopyEngine(ranks.rank, peers=frozenset({1 - ranks.rank} if allows_peer_copies() else ()))

    mailboxes = Mailboxes(rendezvous, device, make_engine=make_engine, message_bytes=4 * num_words)
    transport = DistributedTransport(
        World(ranks, device),
        ranks,
        device=device,
        message_format=MessageFormat((num_words,), torch.int32),
        mailboxes=mailboxes,
    )
    num_wrong = _talk(transport, device, num_words, num_messages)
    wrong = transport.sum_over_ranks(torch.tensor([num_wrong], dtype=torch.float64))
    if ranks.is_first:
        report = {"over_mailboxes": transport._mailboxes is not None, "num_wrong": int(wrong.item())}
        print(json.dumps(report), flush=True)
    transport.barrier()
    transport.close()


def _talk(transport: DistributedTransport, device: torch.device, num_words: int, num_messages: int) -> int:
    """How many words came wrong in steps of 20 messages each way during products of matrices."""
    peer = 1 - transport.rank
    pattern = torch.arange(num_words, dtype=torch.int32, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    size = GEMM if device.type == "cuda" else 64
    left = torch.randn(size, size, device=device)
    # All kernels and all memory once, before anything waits for a message: loading a kernel may wait for an idle GPU.
    held = [pattern * (2 * number + 1) + peer for number in range(2 * AHEAD + 2)]
    left = (left @ left).clamp_(-1, 1)
    wrong += (held[0] != held[0]).sum()
    del held
    _synchronize(device)
    transport.barrier()
    for first in range(0, num_messages, 20):
        for number in range(first, min(first + 20, num_messages), 2):
            pair = ((number, Direction.FORWARD), (number + 1, Direction.BACKWARD))
            for _, direction in reversed(pair):
                transport.post_receive(peer, direction)
            for sent, direction in pair:
                # Made just before it is sent, in memory that earlier messages have used.
                transport.send(pattern * (2 * sent + 1) + transport.rank, peer, direction)
                left = (left @ left).clamp_(-1, 1)
            for expected, direction in reversed(pair):
                received = transport.receive(peer, direction)
                wrong += (received != pattern * (2 * expected + 1) + peer).sum()
                del received
        transport.finish_step()
    _synchronize(device)
    return int(wrong.item())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
