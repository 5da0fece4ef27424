"""Connections that have a rate of their own keep to it, and only those that were there or came since."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from paced_sockets import SO_MAX_PACING_RATE, pace_new, pace_sockets

RATE = 20_000_000
SENT = RATE // 4


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        with sender, receiver:
            yield sender, receiver


def rate_of(own: socket.socket) -> int:
    """Bytes per second that a connection may send."""
    number: int = struct.unpack("Q", own.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8))[0]
    return number


def seconds_of(connection: tuple[socket.socket, socket.socket]) -> float:
    """What sending `SENT` bytes takes."""
    sender, receiver = connection
    start = time.perf_counter()
    thread = threading.Thread(target=sender.sendall, args=(bytes(SENT),))
    thread.start()
    left = SENT
    while left:
        left -= len(receiver.recv(left))
    thread.join()
    return time.perf_counter() - start


def test_a_paced_connection_sends_no_faster(connection: tuple[socket.socket, socket.socket]) -> None:
    known = pace_new(RATE, set())
    assert seconds_of(connection) > 0.9 * SENT / RATE
    assert pace_new(10 * RATE, known) == known
    assert seconds_of(connection) > 0.9 * SENT / RATE, "paced anew, though it was known"


def test_connections_that_come_later_are_paced(request: pytest.FixtureRequest) -> None:
    ended = pace_sockets(RATE / 1e9)
    connection: tuple[socket.socket, socket.socket] = request.getfixturevalue("connection")
    while rate_of(connection[0]) != RATE:  # or the test's time is up
        time.sleep(0.01)
    ended.set()
    assert seconds_of(connection) > 0.9 * SENT / RATE
