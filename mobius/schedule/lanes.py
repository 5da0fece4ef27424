"""Vocabulary of a step's timeline, planned, predicted or measured: lanes, spans, and causes of waits."""

from dataclasses import dataclass
from enum import StrEnum


class Lane(StrEnum):
    """Concurrent workers of a rank, plus the steps and waits shown with them."""

    STEP = "step"
    COMPUTE = "compute"
    WAIT = "wait"
    LOAD = "load"
    OFFLOAD = "offload"
    OFFLOAD_ACTIVATIONS = "offload_activations"
    PREFETCH_ACTIVATIONS = "prefetch_activations"
    SEND = "send"
    RECEIVE = "receive"
    OPTIMIZER = "optimizer"
    REDUCE = "reduce"
    GATHER = "gather"


class WaitCause(StrEnum):
    """Causes for which compute waits."""

    WEIGHTS = "weights"
    OPTIMIZER = "optimizer"
    NEIGHBOURS = "neighbours"
    ACTIVATIONS = "activations"
    """Activations that are prefetched, or must be offloaded to free memory."""


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """Interval of one span on a lane, in seconds of `time.perf_counter` or from the first predicted step."""

    lane: Lane
    name: str
    step: int
    """Step in which it starts, counted from 1."""
    start: float
    end: float
    peer: int | None = None
    """The other rank of a message."""
