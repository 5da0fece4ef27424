"""Exchanges small values between ranks, and runs joint setup steps: if one rank fails, all ranks cancel the step.

Values are JSON in torchrun's key-value store. The store listens on the network, so all values read from it are treated
as data and never executed.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, TypeAlias, TypeVar

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from mobius.errors import TransportError, first_line
from mobius.process.log import printable
from mobius.process.ranks import Ranks, master_address, num_restarts

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
"""A value that ranks exchange as JSON: numbers are finite, names are strings, a tuple arrives as a list, bytes are sent
as `bytes.hex()`. Senders convert values of other types; receivers use `parse_value`."""

TIMEOUT = timedelta(minutes=10)
"""Time limit for the answer of the slowest rank at a store."""
_SHORT: Final = timedelta(seconds=3)
_LOOK_SECONDS: Final = 1.0
_FAILURE_KEY: Final = "word"
"""Key of the first failure message."""

_Read = TypeVar("_Read")


def encode_json(value: JsonValue) -> str:
    """Return the value as JSON, in ASCII."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def decode_json(text: bytes, *, by: int) -> Any:
    """Return the value that rank `by` sent as `text`; raises TransportError if it is not JSON."""
    return parse_value(text, lambda encoded: json.loads(encoded.decode()), by=by)


def parse_value(value: Any, read: Callable[[Any], _Read], *, by: int) -> _Read:
    """Return `read(value)`; raises a TransportError that names rank `by` if `value` has an unexpected form."""
    try:
        return read(value)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise TransportError(
            f"the value from rank {by} cannot be read ({first_line(error)}). All ranks must run the same version "
            "of Mobius, and nothing else may use their --master_port."
        ) from error


def parse_values(gathered: Sequence[Any], read: Callable[[Any], _Read]) -> list[_Read]:
    """Return each rank's value, parsed by `parse_value`."""
    return [parse_value(value, read, by=rank) for rank, value in enumerate(gathered)]


def parse_count(value: Any) -> int:
    """Return an integer of at least 0; raises ValueError for anything else."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is not an integer of at least 0")
    return value


def parse_counts(value: Any) -> tuple[int, ...]:
    """Return the numbers of a list, each checked by `parse_count`."""
    if type(value) is not list:
        raise TypeError(f"{type(value).__name__} instead of a list")
    return tuple(map(parse_count, value))


class Rendezvous:
    """One rank's connection to all ranks, which make the same calls in the same order.

    It uses a store, before process groups exist. There is no time limit between two calls.
    """

    def __init__(self, store: Store, *, rank: int, num_ranks: int, part: str = "mobius") -> None:
        """`part` names the part of the run to which these ranks belong. `store` also has the text of `post_failure`."""
        self.rank, self.num_ranks = rank, num_ranks
        self._failure_store = store
        # A process may connect more than once, and must not read values of an earlier connection.
        number = store.add(f"{part}/{rank}", 1)
        self._store, self._num_gathered = PrefixStore(f"{part}/{number}", store), 0

    def gather(self, value: JsonValue) -> list[Any]:
        """Return every rank's value, decoded from JSON, in rank order; blocks until all ranks have sent theirs.

        Raises TransportError if a rank has ended or does not answer in time, or if its value is not JSON.
        """
        number = self._num_gathered
        self._num_gathered += 1
        self._store.set(f"{number}/{self.rank}", encode_json(value))
        values = []
        for rank in range(self.num_ranks):
            try:
                self._wait_for(number, rank)
                text = self._store.get(f"{number}/{rank}")
            except RuntimeError as error:
                raise TransportError(
                    f"rank {self.rank} stops: rank {rank} did not answer; the message of that rank gives the cause "
                    f"({first_line(error)})"
                ) from error
            values.append(decode_json(text, by=rank))
        return values

    def _wait_for(self, number: int, rank: int) -> None:
        """Return when rank `rank` has sent its value; raises TransportError if it failed or is late."""
        limit = self._store.timeout.total_seconds()  # type: ignore[attr-defined]
        end = time.monotonic() + limit
        while not self._store.check([f"{number}/{rank}"]):
            left = end - time.monotonic()
            if left <= 0:
                silent = [other for other in range(self.num_ranks) if not self._store.check([f"{number}/{other}"])]
                raise TransportError(
                    f"rank {self.rank} stops: after {limit:.0f} s rank {', '.join(map(str, silent))} did not answer at "
                    f"the launcher's store ({self.num_ranks - len(silent)} of {self.num_ranks} did). The output of "
                    "such a rank shows whether it hangs, is slow, or never started."
                )
            with contextlib.suppress(DistStoreError):  # raised after the time-out
                # torch treats a time-out below a millisecond as no time-out.
                self._store.wait([f"{number}/{rank}"], timedelta(seconds=min(max(left, 0.01), _LOOK_SECONDS)))
                return
            if self._failure_store.check([_FAILURE_KEY]):
                message = self._failure_store.get(_FAILURE_KEY).decode("utf-8", "replace")
                raise TransportError(f"rank {self.rank} stops: {printable(message, sys.stderr)}")


def post_failure(ranks: Ranks, text: str) -> None:
    """Post the reason why this rank ends, for ranks of other nodes that wait at the store; never raises."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        with socket.create_connection(master_address(), timeout=_SHORT.total_seconds()):
            pass  # this test prevents torch from writing to standard error if nobody listens
        store, _, _ = next(rendezvous("env://", ranks.rank, ranks.num_ranks, timeout=_SHORT))
        post_failure_at(store, num_restarts(), f"rank {ranks.rank} ({socket.gethostname()}) has ended: {text}")


def post_failure_at(store: Store, restarts: int, text: str) -> None:
    """Post a message for all ranks that wait at the launcher's store; only the first message per restart is stored."""
    with contextlib.suppress(RuntimeError):
        PrefixStore(f"start {restarts}", store).compare_set(_FAILURE_KEY, "", text)


def open_store(ranks: Ranks) -> Store:
    """Return the store at the launcher's MASTER_ADDR and MASTER_PORT; raises TransportError.

    torchrun may use the same store again when it restarts the ranks, so values of earlier starts are hidden.
    """
    try:
        store, _, _ = next(rendezvous("env://", ranks.rank, ranks.num_ranks, timeout=TIMEOUT))
    except (RuntimeError, ValueError) as error:
        raise TransportError(f"rank {ranks.rank} cannot join the other ranks, start with torchrun: {error}") from error
    store.set_timeout(TIMEOUT)
    return PrefixStore(f"start {num_restarts()}", store)


def open_watchdog_store(ranks: Ranks) -> Store:
    """Return a separate connection for the watchdog's thread; raises TransportError."""
    return PrefixStore("watchdog", open_store(ranks))


def join_run(ranks: Ranks) -> Rendezvous:
    """Connect to all ranks of the run through the launcher's store; raises TransportError.

    Process groups that are created later use the same store, with other keys.
    """
    return Rendezvous(open_store(ranks), rank=ranks.rank, num_ranks=ranks.num_ranks)


def join_pipeline(ranks: Ranks) -> Rendezvous:
    """Connect to the ranks of this pipeline through the launcher's store; raises TransportError."""
    store, part = open_store(ranks), f"replica {ranks.replica}"
    return Rendezvous(store, rank=ranks.pipeline_rank, num_ranks=ranks.num_pipeline_ranks, part=part)


def join_node(ranks: Ranks) -> Rendezvous:
    """Connect to the ranks of this node through the launcher's store; raises TransportError."""
    store, part = open_store(ranks), f"node {ranks.node}"
    return Rendezvous(store, rank=ranks.local_rank, num_ranks=ranks.num_local, part=part)


def run_steps_together(
    rendezvous: Rendezvous, steps: Sequence[Callable[[list[Any]], JsonValue]]
) -> tuple[list[Any], str | None]:
    """Run `steps` on all ranks; a step starts once all ranks have ended the previous step. Collective.

    A step receives the results of the previous step from all ranks, decoded from JSON. OSError and RuntimeError are
    problems, which end the steps on all ranks; other errors are raised. Returns the results of the last step from all
    ranks, or no results and the problem of the lowest rank with a problem.
    """
    gathered: list[Any] = []
    for step in steps:
        given, problem = None, None
        try:
            given = step(gathered)
        except (OSError, RuntimeError) as error:
            problem = f"rank {rendezvous.rank}: {first_line(error)}"
        results = parse_values(rendezvous.gather([problem, given]), _read_step)
        for problem, _ in results:
            if problem is not None:
                return [], problem
        gathered = [given for _, given in results]
    return gathered, None


def _read_step(value: Any) -> tuple[str | None, Any]:
    problem, given = value
    if not isinstance(problem, str | None):
        raise TypeError(f"{type(problem).__name__} instead of a text")
    return problem, given
