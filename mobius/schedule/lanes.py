"""Owns the words of a step's timeline, planned, predicted or measured: lanes, spans on them, causes of waits."""

from dataclasses import dataclass
from enum import StrEnum


class Lane(StrEnum):
    """Workers of a rank, which work at the same time, and the steps and waits that are shown beside them."""

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

    @classmethod
    def _missing_(cls, value: object) -> "Lane | None":
        """Lanes as traces of version 0.1 name them."""
        return {"stash": cls.OFFLOAD_ACTIVATIONS, "fetch": cls.PREFETCH_ACTIVATIONS}.get(str(value))


class WaitCause(StrEnum):
    """Reasons for which compute waits."""

    WEIGHTS = "weights"
    OPTIMIZER = "optimizer"
    NEIGHBOURS = "neighbours"
    ACTIVATIONS = "activations"
    """Inputs of layers that come back from the host, or must leave before there is room for others."""


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """Time in which one thing ran on a lane, in seconds: of `time.perf_counter`, or from a prediction's first step."""

    lane: Lane
    name: str
    step: int
    """The step in which it began, counted from 1."""
    start: float
    end: float
    peer: int | None = None
    """The other rank of a message."""
