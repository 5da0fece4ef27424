"""Ranks that pass a message around until one of them hangs, watched as a run is; and whole runs with a fault."""

from __future__ import annotations

import sys
import threading
from functools import partial
from importlib import import_module

import torch

from mobius.activity import Activity
from mobius.distributed.process_groups import DistributedTransport
from mobius.distributed.rendezvous import open_watchdog_store
from mobius.distributed.watchdog import Watchdog
from mobius.ranks import Ranks
from mobius.schedule.action import Action, ActionKind


def pass_messages(hanging: int, seconds: float) -> None:
    """Three steps of forwards; in the third, rank `hanging` never sends."""
    ranks = Ranks.from_environment()
    activity = Activity()
    transport = DistributedTransport(
        rank=ranks.rank, num_ranks=ranks.num_ranks, device=torch.device("cpu"), shape=(8,), dtype=torch.float32
    )
    watchdog = Watchdog(activity, ranks, minutes=seconds / 60, open_store=partial(open_watchdog_store, ranks))
    watchdog.start()
    try:
        _pass_around(ranks, hanging, activity, transport)
    finally:
        watchdog.stop()  # as a run does: another rank may have left, and this one's report comes first


def _pass_around(ranks: Ranks, hanging: int, activity: Activity, transport: DistributedTransport) -> None:
    rank = ranks.rank
    following, before = (rank + 1) % ranks.num_ranks, (rank - 1) % ranks.num_ranks
    for step in (1, 2, 3):
        activity.start_step(step)
        for microbatch in range(4):
            activity.start_action(Action(ActionKind.FORWARD_MIDDLE, rank, microbatch))
            transport.post_receive(before)
            if (step, rank, microbatch) == (3, hanging, 2):
                hang()
            transport.send(torch.zeros(8), following)
            with activity.waiting("neighbours", rank=before, stage=before):
                transport.receive(before)
        transport.finish_step()


def faulty_main(fault: str, *options: str) -> None:
    """The program, after the statements `fault`."""
    exec(fault, {})
    sys.argv = ["main.py", *options]
    import_module("main").main()


def hang() -> None:
    """Never return."""
    threading.Event().wait()
