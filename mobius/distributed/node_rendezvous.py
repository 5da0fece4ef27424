"""Rendezvous of a run's launchers, one per node, before torchrun's rendezvous; it names missing nodes.

torchrun's static rendezvous is silent for ten minutes and ends in a traceback that names no node. So this rendezvous
comes first:

    node 0     opens the store at --rdzv_endpoint, which torchrun's rendezvous in the same process also uses
    nodes 1..  connect to the store
    each node  writes a `Node`: its host and options; then it waits until all nodes have written theirs
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from mobius.distributed.rendezvous import decode_json, encode_json, parse_value
from mobius.errors import TransportError, first_line, reason_of

RENDEZVOUS_SECONDS: Final = 600.0
"""torchrun's time limit for all nodes, unless `--rdzv_conf timeout=` changes it."""
_TOLD_EVERY: Final = 30.0
_LOOK_SECONDS: Final = 0.2
_CONNECT_SECONDS: Final = 5.0
_LINGER_SECONDS: Final = 2.0
"""Time for which node 0 keeps its store open, so that other nodes can read why the rendezvous fails."""


@dataclass(frozen=True, slots=True)
class Node:
    """Facts that a launcher sends to the other nodes."""

    host: str
    num_nodes: int
    num_local: int
    """Number of processes that the launcher starts (--nproc_per_node)."""


class NodeRendezvous:
    """One launcher's connection to the launchers of all nodes."""

    def __init__(
        self, endpoint: str, node: int, own: Node, *, seconds: float = RENDEZVOUS_SECONDS, report: Callable[[str], None]
    ) -> None:
        """`endpoint` is HOST:PORT of node 0. `report` receives a line for the user every 30 seconds of waiting."""
        host, _, port = endpoint.rpartition(":")
        self.endpoint, self._host, self._port = endpoint, host.strip("[]"), int(port)
        self._node, self._own, self._report = node, own, report
        self._name = f"node {node} ({own.host})"
        self._begun, self._seconds, self._told = time.monotonic(), seconds, time.monotonic()

    def join(self) -> Store:
        """Wait until all nodes have joined; return the store.

        Raises TransportError if nodes are missing at the time limit, or were started with options that do not match.
        """
        if self._node > 0:
            self._wait_while(
                self._connection_problem,
                "Is the run started on node 0, with the same endpoint? Is the port blocked by a firewall, or node 0 in "
                "another network?",
            )
        raw = self._open_store()
        store = PrefixStore("mobius nodes", raw)
        try:
            if store.add(f"taken {self._node}", 1) > 1:
                raise TransportError(
                    f"{self._name} and another node are started with --node_rank {self._node}. Give each node a "
                    "different number, from 0."
                )
            store.set(str(self._node), encode_json(asdict(self._own)))
            self._wait_while(
                lambda: self._missing_nodes(store),
                "Start the run on every node, with the same endpoint and --nnodes, and a different --node_rank.",
            )
            self._check_alike({number: self._read(store, number) for number in range(self._own.num_nodes)})
            return raw
        except TransportError:
            if self._node == 0:
                time.sleep(_LINGER_SECONDS)
            raise
        except RuntimeError as error:
            raise TransportError(
                f"{self._name} lost node 0 at {self.endpoint} before all nodes had joined; the message of node 0 gives "
                f"the cause. Error on this node: {first_line(error)}"
            ) from error

    def _wait_while(self, awaited: Callable[[], str | None], advice: str) -> None:
        """Return once `awaited` returns None. Raises TransportError at the time limit."""
        while (what := awaited()) is not None:
            waited = time.monotonic() - self._begun
            if waited > self._seconds:
                raise TransportError(
                    f"{self._name} has waited {self._seconds:.0f} s for {what}. {advice} To wait longer, use "
                    "--rdzv_conf timeout=SECONDS."
                )
            if time.monotonic() - self._told >= _TOLD_EVERY:
                self._told = time.monotonic()
                self._report(f"{self._name} waits for {what} ({waited:.0f} of {self._seconds:.0f} s)")
            time.sleep(_LOOK_SECONDS)

    def _open_store(self) -> Store:
        is_first = self._node == 0
        left = max(1.0, self._begun + self._seconds - time.monotonic())
        try:
            return TCPStore(
                "localhost" if is_first else self._host,
                self._port,
                None,
                is_first,
                timedelta(seconds=left),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            reason = "it is in use, perhaps by another run" if "EADDRINUSE" in str(error) else first_line(error)
            raise TransportError(
                f"{self._name} cannot use port {self._port} of --rdzv_endpoint {self.endpoint}: {reason}. Use another "
                "port, the same on all nodes."
            ) from error

    def _connection_problem(self) -> str | None:
        """Return None if something listens at the endpoint, else the problem, which torch would print on its own."""
        try:
            with socket.create_connection((self._host, self._port), timeout=_CONNECT_SECONDS):
                return None
        except socket.gaierror:
            reason = f"the name {self._host} is unknown on this node"
        except TimeoutError:
            reason = "no answer"
        except OSError as error:
            reason = reason_of(error).lower()
        return f"node 0 at --rdzv_endpoint {self.endpoint}: {reason}"

    def _missing_nodes(self, store: Store) -> str | None:
        """Return `node(s) 1, 3 of 4 (there are 0 (host0), 2 (host2)) at ...`; None if no node is missing."""
        numbers = range(self._own.num_nodes)
        there = [number for number in numbers if store.check([str(number)])]
        if len(there) == len(numbers):
            return None
        names = ", ".join(f"{number} ({self._read(store, number).host})" for number in there)
        missing = ", ".join(str(number) for number in numbers if number not in there)
        return f"node(s) {missing} of {len(numbers)} (there are {names}) at --rdzv_endpoint {self.endpoint}"

    def _check_alike(self, nodes: dict[int, Node]) -> None:
        first = nodes[0]
        for number, node in nodes.items():
            for option, own, other in (
                ("--nnodes", first.num_nodes, node.num_nodes),
                ("--nproc_per_node", first.num_local, node.num_local),
            ):
                if own != other:
                    raise TransportError(
                        f"{option} is {own} on node 0 ({first.host}) and {other} on node {number} ({node.host}): all "
                        f"nodes of a run need the same value. Use for example {option} {min(own, other)} on all nodes."
                    )

    def _read(self, store: Store, number: int) -> Node:
        return parse_value(decode_json(store.get(str(number)), by=number), lambda facts: Node(**facts), by=number)
