"""Types for the timeline of a step (planned, predicted or measured): lanes, spans, and causes of waits."""

from dataclasses import dataclass
from enum import StrEnum


class Lane(StrEnum):
    """Concurrent workers of a rank, and two more lanes: the rank's steps and its waits."""

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
    """Causes of waits of the compute lane."""

    WEIGHTS = "weights"
    OPTIMIZER = "optimizer"
    NEIGHBOURS = "neighbours"
    ACTIVATIONS = "activations"
    """Compute waits for prefetched activations, or for an offload of activations that frees memory."""


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """One span on a lane. Times are seconds, of `time.perf_counter` or since the first predicted step began."""

    lane: Lane
    name: str
    step: int
    """Step in which the span starts, counted from 1."""
    start: float
    end: float
    peer: int | None = None
    """The other rank of a message."""
