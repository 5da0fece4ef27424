"""Launchers of several nodes meet in a bounded time, and say who is missing and what differs."""

from __future__ import annotations

import socket
import threading

import pytest
from launch import free_port

from mobius.distributed import node_rendezvous
from mobius.distributed.node_rendezvous import Node, NodeRendezvous
from mobius.errors import TransportError


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_rendezvous, "_LINGER_SECONDS", 0.5)
    monkeypatch.setattr(node_rendezvous, "_TOLD_EVERY", 0.3)
    monkeypatch.setattr(node_rendezvous, "_LOOK_SECONDS", 0.05)


def meet(*nodes: tuple[int, Node], endpoint: str, seconds: float = 30) -> tuple[list[str], list[str]]:
    """Each launcher's error, or "met", and all lines told meanwhile; they are threads here."""
    ends, lines = [""] * len(nodes), list[str]()
    stores = []  # the first one's goes with the last that has it

    def run(index: int) -> None:
        node, own = nodes[index]
        try:
            stores.append(NodeRendezvous(endpoint, node, own, seconds=seconds, report=lines.append).join())
            ends[index] = "met"
        except TransportError as error:
            ends[index] = str(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ends, lines


@pytest.fixture
def place() -> str:
    return f"127.0.0.1:{free_port()}"


def test_nodes_that_all_come_have_met(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_rendezvous, "_TOLD_EVERY", 30.0)  # threads may start late
    ends, lines = meet(*((number, Node(f"host{number}", 3, 4)) for number in (2, 1, 0)), endpoint=place)
    assert ends == ["met"] * 3
    assert lines == []


@pytest.mark.parametrize(
    ("host", "problem"),
    [("127.0.0.1", "connection refused"), ("nowhere.invalid", "the name nowhere.invalid is unknown on this node")],
)
def test_a_first_node_that_is_not_reached_is_told_with_how_long_it_was_tried(host: str, problem: str) -> None:
    place = f"{host}:{free_port()}"
    (end,), lines = meet((1, Node("host1", 2, 4)), endpoint=place, seconds=0.8)
    assert f"node 1 (host1) has waited 1 s for node 0 at --rdzv_endpoint {place}: {problem}" in end
    assert any(f"node 1 (host1) waits for node 0 at --rdzv_endpoint {place}: {problem}" in line for line in lines)


def test_nodes_that_do_not_come_are_told_to_those_that_did(place: str) -> None:
    ends, lines = meet((0, Node("host0", 4, 2)), (2, Node("host2", 4, 2)), endpoint=place, seconds=1)
    assert all("has waited 1 s for node(s) 1, 3 of 4 (there are 0 (host0), 2 (host2)) at" in end for end in ends)
    assert any("waits for node(s) 1, 3 of 4" in line for line in lines)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (Node("host1", 3, 4), "--nnodes is 2 on node 0 (host0) and 3 on node 1 (host1)"),
        (Node("host1", 2, 8), "--nproc_per_node is 4 on node 0 (host0) and 8 on node 1 (host1)"),
    ],
)
def test_nodes_that_are_started_differently_are_told_with_both(place: str, other: Node, told: str) -> None:
    ends, _ = meet((0, Node("host0", 2, 4)), (1, other), endpoint=place, seconds=3)
    assert told in ends[0]


def test_two_nodes_of_one_number_are_told(place: str) -> None:
    nodes = (0, Node("host0", 2, 4)), (1, Node("host1", 2, 4)), (1, Node("host2", 2, 4))
    ends, _ = meet(*nodes, endpoint=place)
    assert ends[0] == "met"
    assert sorted(end == "met" for end in ends[1:]) == [False, True]
    (refused,) = (end for end in ends if end != "met")
    assert "and another node are started with --node_rank 1." in refused


def test_a_port_that_another_program_has_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (end,), _ = meet((0, Node("host0", 2, 4)), endpoint=f"127.0.0.1:{port}")
    assert f"node 0 (host0) cannot use port {port}" in end
    assert "it is in use, perhaps by another run" in end
