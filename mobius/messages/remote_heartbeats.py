"""How watchdogs hear ranks of other nodes: through the launcher's store, in a thread and over a connection of its own.

    beats     one number, to which every rank in which something is done adds: that it grows is all that is read
    log       a line for each TELL, TOLD and END, with where its rank is

A step never waits for any of it. Where the store is gone nobody is heard: its node has ended, and so will the others.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Final

from torch.distributed.distributed_c10d import PrefixStore, Store

from mobius.errors import TransportError
from mobius.heartbeats import WatchdogMessage
from mobius.messages.rendezvous import open_store
from mobius.ranks import Ranks

_END_SECONDS: Final = 0.2
"""Time between two looks while a run ends."""
_FLUSH_SECONDS: Final = 1.0
_MOST_TEXT: Final = 2000
"""Characters of a rank's story that travel."""


class RemoteHeartbeats:
    """Owns this rank's part in the log; `mobius.heartbeats.RemoteRanks`."""

    def __init__(self, ranks: Ranks, *, open: Callable[[int, int], Store] = open_store) -> None:
        self._rank, self._num_ranks, self._open = ranks.rank, ranks.num_ranks, open
        first = ranks.node * ranks.num_local
        own = range(first, first + ranks.num_local)
        self.ranks = [rank for rank in range(ranks.num_ranks) if rank not in own]
        self.reports: dict[int, str] = {}
        self._deliver: Callable[[WatchdogMessage, int], None] = lambda call, rank: None
        self._interval = 0.0
        self._num_beats, self._num_posted = 0, 0
        self._outgoing: list[str] = []
        self._is_closed, self._wake, self._posted = threading.Event(), threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, deliver: Callable[[WatchdogMessage, int], None], seconds: float) -> None:
        """Give every call of another node to `deliver`, with its rank, and look for them every so many seconds."""
        self._deliver, self._interval = deliver, seconds
        self._is_closed.clear()
        self._thread = threading.Thread(target=self._run, name="other nodes", daemon=True)
        self._thread.start()

    def send(self, call: WatchdogMessage, report: str = "") -> None:
        """Tell the other nodes soon; returns at once, but for END, behind which the process ends.

        The store may end with this node, so that the others get the time to read it.
        """
        if call is WatchdogMessage.PROGRESS:
            self._num_beats += 1  # by one thread alone
            return
        self._posted.clear()
        self._outgoing.append(json.dumps([call, self._rank, report[:_MOST_TEXT]]) + "\n")
        self._interval = _END_SECONDS
        self._wake.set()
        if call is WatchdogMessage.END and self._posted.wait(_FLUSH_SECONDS):
            time.sleep(3 * _END_SECONDS)

    def close(self) -> None:
        """Listen no more."""
        self._is_closed.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_FLUSH_SECONDS)
            self._thread = None

    def _run(self) -> None:
        try:
            store = PrefixStore("watchdog", self._open(self._rank, self._num_ranks))
            heard, num_read = store.add("beats", 0), 0
            while not self._is_closed.is_set():
                heard = self._exchange_beats(store, heard)
                num_read = self._exchange_log(store, num_read)
                self._wake.wait(self._interval)
                self._wake.clear()
        except (RuntimeError, TransportError, ValueError, TypeError):
            return  # the store is gone, or a stranger writes to it

    def _exchange_beats(self, store: Store, heard: int) -> int:
        """Add this rank's beats to everybody's; returns their number."""
        own = self._num_beats - self._num_posted
        self._num_posted += own
        total = store.add("beats", own)
        if total - own > heard:
            self._deliver(WatchdogMessage.PROGRESS, self.ranks[0])
        return total

    def _exchange_log(self, store: Store, num_read: int) -> int:
        """Post what is to be told, and deliver what others have; returns the number of lines that are known."""
        while self._outgoing:
            store.append("log", self._outgoing.pop(0))  # type: ignore[attr-defined]
        self._posted.set()
        if not store.check(["log"]):
            return num_read
        lines = store.get("log").decode().splitlines()
        for line in lines[num_read:]:
            call, rank, report = json.loads(line)
            if rank in self.ranks:
                self._interval = _END_SECONDS
                self.reports |= {rank: str(report)} if report else {}
                self._deliver(WatchdogMessage(call), rank)
        return len(lines)
