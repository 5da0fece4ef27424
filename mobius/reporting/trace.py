"""File `trace.json`: the measured or predicted spans of all ranks, for Perfetto and chrome://tracing.

pid        a rank              name   as in the schedule grid: F4.1, B4.1, L4, O4; U4 is the update of stage 4
tid        a lane of it        args   step, stage, microbatch, peer, if they apply
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from mobius.errors import ConfigError
from mobius.schedule.lanes import Lane, LaneSpan
from mobius.schedule.schedule import Schedule


@dataclass(frozen=True)
class TraceFacts:
    """Facts that a picture shows in addition to the spans."""

    num_ranks: int
    num_stages: int
    num_microbatches: int
    num_slots: int | None
    """Maximum number of weight slots of a rank; None if all weights stay on the device."""
    device: str
    """Name of each rank's device; `cpu` without a GPU."""
    is_predicted: bool = False
    """Whether the spans were simulated instead of measured."""


@dataclass(frozen=True)
class Trace:
    """Spans of all ranks, on one clock."""

    facts: TraceFacts
    spans: tuple[tuple[LaneSpan, ...], ...]

    @property
    def steps(self) -> list[int]:
        """Recorded steps, ascending."""
        return sorted({span.step for spans in self.spans for span in spans if span.lane is Lane.STEP})

    def choose_step(self, step: int | None) -> int:
        """Return `step`; None: the second step, as the first may warm up. Raises ConfigError if it was not recorded."""
        if not self.steps or (step is not None and step not in self.steps):
            known = f"steps {', '.join(map(str, self.steps))}" if self.steps else "no steps"
            raise ConfigError(f"the trace has {known}" + ("" if step is None else f", not step {step}"))
        return self.steps[min(1, len(self.steps) - 1)] if step is None else step

    def window(self, step: int) -> tuple[float, float]:
        """Earliest start and latest end of `step` on any rank, in seconds."""
        found = [span for spans in self.spans for span in spans if span.lane is Lane.STEP and span.step == step]
        return min(span.start for span in found), max(span.end for span in found)

    def within(self, rank: int, step: int) -> list[LaneSpan]:
        """Return the spans of `rank` that overlap `step`, cut at its borders."""
        start, end = self.window(step)
        cut = [replace(span, start=max(span.start, start), end=min(span.end, end)) for span in self.spans[rank]]
        return [span for span in cut if span.start < span.end]


class ActionName(NamedTuple):
    """Parts of a name in the schedule grid."""

    letter: str
    stage: int
    microbatch: int | None


def parse_action_name(name: str) -> ActionName | None:
    """Parse `F4.1` as (F, 4, 1) and `L4` as (L, 4, None); return None if `name` is not the name of an action."""
    if match := re.fullmatch(r"(LS|OS|OA|PA|[DFBGHKLORU])(\d+)(?:\.(\d+))?", name):
        return ActionName(match[1], int(match[2]), int(match[3]) if match[3] else None)
    return None


def predicted_trace(
    spans_of_ranks: Iterable[Iterable[LaneSpan]], step_ends: Sequence[float], schedule: Schedule, *, device: str
) -> Trace:
    """Simulated steps as a trace; time 0 is their start, and `device` is the GPU's name."""
    sizes = (schedule.spec.num_ranks, schedule.spec.num_stages, schedule.spec.num_microbatches, schedule.spec.num_slots)
    steps = [
        LaneSpan(Lane.STEP, f"step {number}", number, start, end)
        for number, (start, end) in enumerate(pairwise((0.0, *step_ends)), start=1)
    ]
    spans = (sorted([*steps, *own], key=lambda span: (span.start, -span.end)) for own in spans_of_ranks)
    return Trace(TraceFacts(*sizes, device, is_predicted=True), tuple(map(tuple, spans)))


def write_part(folder: Path, rank: int, spans: Sequence[LaneSpan]) -> None:
    """Write one rank's spans into `folder`, for `merge_parts`."""
    _part(folder, rank).write_text(json.dumps([asdict(span) for span in spans]), encoding="utf-8")


def merge_parts(folder: Path, facts: TraceFacts) -> Trace:
    """Read and remove the parts in `folder`, which all ranks must have written, and return them as one trace."""
    parts = [_part(folder, rank) for rank in range(facts.num_ranks)]
    rows = [json.loads(part.read_text(encoding="utf-8")) for part in parts]
    for part in parts:
        part.unlink()
    return Trace(facts, tuple(tuple(LaneSpan(**row | {"lane": Lane(row["lane"])}) for row in own) for own in rows))


def write_trace(path: Path, trace: Trace) -> None:
    """Write `trace` as a Chrome trace; its time 0 is the start of the first span."""
    origin = min((span.start for spans in trace.spans for span in spans), default=0.0)
    events = [event for rank, spans in enumerate(trace.spans) for event in _events(rank, spans, origin, trace.facts)]
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": asdict(trace.facts)}
    path.write_text(json.dumps(document), encoding="utf-8")


def _part(folder: Path, rank: int) -> Path:
    return folder / f"trace.rank{rank}.json"


def _events(rank: int, spans: Sequence[LaneSpan], origin: float, facts: TraceFacts) -> Iterator[dict[str, Any]]:
    """Events of one rank: names of the rank and of its lanes, then its spans."""

    def metadata(tid: int, kind: str, **arguments: str | int) -> dict[str, Any]:
        return {"ph": "M", "pid": rank, "tid": tid, "name": kind, "args": arguments}

    yield metadata(0, "process_name", name=f"rank {rank} ({facts.device})")
    yield metadata(0, "process_sort_index", sort_index=rank)
    lanes = sorted({_lane_key(span) for span in spans})
    for tid, (_, peer, lane) in enumerate(lanes):
        direction = {Lane.SEND: f" to {peer}", Lane.RECEIVE: f" from {peer}"}.get(lane, "")
        yield metadata(tid, "thread_name", name=f"{lane}{direction}")
        yield metadata(tid, "thread_sort_index", sort_index=tid)
    for span in spans:
        action = parse_action_name(span.name.partition(" ")[0])  # a message is named after the action that sent it
        about = {"stage": action.stage, "microbatch": action.microbatch} if action else {}
        values = {"step": span.step, **about, "peer": span.peer}
        yield {
            "ph": "X",
            "pid": rank,
            "tid": lanes.index(_lane_key(span)),
            "name": span.name,
            "cat": span.lane.value,
            "ts": round((span.start - origin) * 1e6, 3),
            "dur": round((span.end - span.start) * 1e6, 3),
            "args": {key: value for key, value in values.items() if value is not None},
        }


def _lane_key(span: LaneSpan) -> tuple[int, int, Lane]:
    """Sort key of a span's lane, in the order of `Lane`; messages have a lane for each peer."""
    return list(Lane).index(span.lane), -1 if span.peer is None else span.peer, span.lane
