"""The meeting of a run's launchers, one on each node, before torchrun's own: it says who is missing, and gives up.

torchrun's static meeting is silent for ten minutes and ends in a traceback that names no node. This one comes first:

    node 0     opens the store at --rdzv_endpoint; torchrun's meeting in the same process shares it
    others     connect to it
    every one  writes its host and how it was started, and waits until all nodes have
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from mobius.errors import TransportError, first_line, reason_of
from mobius.messages.rendezvous import decode_json, encode_json, parse_count, parse_value

RENDEZVOUS_SECONDS: Final = 600.0
"""As long as torchrun waits for the nodes unless `--rdzv_conf timeout=` says another time."""
_TOLD_EVERY: Final = 30.0
_LOOK_SECONDS: Final = 0.2
_CONNECT_SECONDS: Final = 5.0
_LINGER_SECONDS: Final = 2.0
"""Time that the first node, which has the store, gives the others to read why the meeting fails."""


@dataclass(frozen=True, slots=True)
class Node:
    """A launcher as it tells the others of itself."""

    host: str
    num_nodes: int
    num_local: int
    """Processes that it starts (--nproc_per_node)."""


class NodeRendezvous:
    """One launcher's seat among those of all nodes."""

    def __init__(
        self, endpoint: str, node: int, own: Node, *, seconds: float = RENDEZVOUS_SECONDS, tell: Callable[[str], None]
    ) -> None:
        """`endpoint` is HOST:PORT of node 0. `tell` is given a line for the user every half minute of waiting."""
        host, _, port = endpoint.rpartition(":")
        self.endpoint, self._host, self._port = endpoint, host.strip("[]"), int(port)
        self._node, self._own, self._tell = node, own, tell
        self._begun, self._seconds, self._told = time.monotonic(), seconds, time.monotonic()

    def join(self) -> Store:
        """The store that all nodes have reached; blocks until they have.

        Raises TransportError where they do not come in time, or were started in ways that do not go together.
        """
        raw = self._open()
        store = PrefixStore("mobius nodes", raw)
        try:
            self._check_alone(store)
            store.set(str(self._node), encode_json(asdict(self._own)))
            nodes = self._all_nodes(store)
            self._check_alike(nodes)
            return raw
        except TransportError:
            if self._node == 0:
                time.sleep(_LINGER_SECONDS)
            raise
        except RuntimeError as error:
            raise TransportError(
                f"{self._name} lost node 0 at {self.endpoint} before all nodes had met; its own message tells the "
                f"cause. What this node saw: {first_line(error)}"
            ) from error

    @property
    def _name(self) -> str:
        return f"node {self._node} ({self._own.host})"

    def _open(self) -> Store:
        if self._node > 0:
            self._reach()
            return self._store(self._host, is_first=False)
        try:
            store = self._store("localhost", is_first=True)
        except RuntimeError as error:
            reason = "it is taken, perhaps by another run" if "EADDRINUSE" in str(error) else first_line(error)
            raise TransportError(
                f"{self._name} cannot listen at port {self._port} of --rdzv_endpoint {self.endpoint}: {reason}. Use "
                "another port, the same on all nodes."
            ) from error
        if (problem := self._connected()) is not None:
            raise TransportError(
                f"{self._name} listens at port {self._port}, but does not reach itself as {self._host} ({problem}). "
                "--rdzv_endpoint must name node 0, which has --node_rank 0, as the other nodes see it."
            )
        return store

    def _store(self, host: str, *, is_first: bool) -> TCPStore:
        return TCPStore(
            host,
            self._port,
            None,
            is_first,
            timedelta(seconds=max(1.0, self._left)),
            wait_for_workers=False,
            multi_tenant=True,
        )

    def _reach(self) -> None:
        """Return once node 0 listens."""
        while (problem := self._connected()) is not None:
            if self._left < 0:
                raise TransportError(
                    f"{self._name} has not reached node 0 at --rdzv_endpoint {self.endpoint} in "
                    f"{self._seconds:.0f} s: {problem}. Is the run started on node 0, with the same endpoint? Does a "
                    "firewall, or another network, lie between them?"
                )
            self._remind(f"{self._name} waits for node 0 at {self.endpoint}: {problem}")
            time.sleep(_LOOK_SECONDS)

    def _connected(self) -> str | None:
        """None if something listens at the endpoint, else the reason."""
        try:
            with socket.create_connection((self._host, self._port), timeout=_CONNECT_SECONDS):
                return None
        except socket.gaierror:
            return f"the name {self._host} is not known here"
        except TimeoutError:
            return "no answer"
        except OSError as error:
            return reason_of(error).lower()

    def _check_alone(self, store: Store) -> None:
        """Raise TransportError where another launcher has taken this node's number."""
        if store.add(f"taken {self._node}", 1) == 1:
            return
        end = time.monotonic() + _CONNECT_SECONDS
        while not store.check([str(self._node)]) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        other = self._read(store, self._node).host if store.check([str(self._node)]) else "another host"
        raise TransportError(
            f"two nodes are started with --node_rank {self._node}: {other} and {self._own.host}. Number them from 0, "
            "each with its own."
        )

    def _all_nodes(self, store: Store) -> Mapping[int, Node]:
        numbers = range(self._own.num_nodes)
        while not store.check(list(map(str, numbers))):
            there = [number for number in numbers if store.check([str(number)])]
            missing = [number for number in numbers if number not in there]
            if not missing:
                break
            names = ", ".join(f"{number} ({self._read(store, number).host})" for number in there)
            absent = ", ".join(map(str, missing))
            if self._left < 0:
                raise TransportError(
                    f"not all nodes came to --rdzv_endpoint {self.endpoint} in {self._seconds:.0f} s: there are "
                    f"{names}; missing are {absent} of {self._own.num_nodes}. Start the run on every node, with the "
                    "same endpoint and --nnodes and its own --node_rank."
                )
            self._remind(f"{self._name} waits for node(s) {absent} at {self.endpoint}; there are {names}")
            time.sleep(_LOOK_SECONDS)
        return {number: self._read(store, number) for number in numbers}

    def _check_alike(self, nodes: Mapping[int, Node]) -> None:
        first = nodes[0]
        for number, node in nodes.items():
            for option, own, other in (
                ("--nnodes", first.num_nodes, node.num_nodes),
                ("--nproc_per_node", first.num_local, node.num_local),
            ):
                if own != other:
                    raise TransportError(
                        f"{option} is {own} on node 0 ({first.host}) and {other} on node {number} ({node.host}): nodes "
                        "start equally many processes of one run. Give all of them the same, such as "
                        f"{option} {min(own, other)}."
                    )

    def _read(self, store: Store, number: int) -> Node:
        told = decode_json(store.get(str(number)), by=number)
        return parse_value(
            told,
            lambda each: Node(str(each["host"]), parse_count(each["num_nodes"]), parse_count(each["num_local"])),
            by=number,
        )

    @property
    def _left(self) -> float:
        return self._begun + self._seconds - time.monotonic()

    def _remind(self, line: str) -> None:
        now = time.monotonic()
        if now - self._told >= _TOLD_EVERY:
            self._told = now
            self._tell(f"{line} ({now - self._begun:.0f} of {self._seconds:.0f} s)")
