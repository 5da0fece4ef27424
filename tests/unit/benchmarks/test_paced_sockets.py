"""Connections that have a rate of their own keep to it, and only those that were there or came since."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from paced_sockets import pace_new

RATE = 20_000_000
SENT = RATE // 4


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        with sender, receiver:
            yield sender, receiver


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
