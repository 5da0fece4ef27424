"""Gives a process's TCP connections a rate of their own, so that sockets of one machine stand in for a slow network.

Over sockets of one machine the rate is what its processors have left, and changes from minute to minute; with less than
that for each connection it is the kernel that says when a packet leaves (SO_MAX_PACING_RATE, which TCP keeps to without
any queueing discipline). Libraries open connections when they please, so all there are get it again and again.
"""

import os
import socket
import struct
import threading

LOOK_SECONDS = 0.05
"""Between looks for connections that are new."""
SO_MAX_PACING_RATE = 47  # socket.h of Linux; Python has no name for it


def pace_sockets(gigabytes: float) -> threading.Event:
    """Let each TCP connection that this process has, or opens, send at most so many GB per second; Linux only.

    Once the event is set, connections that are new are no longer looked for.
    """
    rate, ended = int(gigabytes * 1e9), threading.Event()

    def keep_pacing() -> None:
        known = set[str]()
        while not ended.is_set():
            known = pace_new(rate, known)
            ended.wait(LOOK_SECONDS)

    threading.Thread(target=keep_pacing, name="pace", daemon=True).start()
    return ended


def pace_new(rate: int, known: set[str]) -> set[str]:
    """Give `rate`, in bytes per second, to connections that are not `known`; returns names of all that are open."""
    found = set[str]()
    for number in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
            if not name.startswith("socket:"):
                continue
            found.add(name)
            if name not in known:
                _pace(int(number), rate)
        except OSError:  # closed meanwhile
            continue
    return found


def _pace(number: int, rate: int) -> None:
    with socket.socket(fileno=os.dup(number)) as own:
        if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
            own.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("Q", rate))
