"""Reader of `trace.json`, for tests of what a run or a simulation has written."""

import json
from pathlib import Path

from mobius.reporting.trace import Trace, TraceFacts
from mobius.schedule.lanes import Lane, LaneSpan


def read_trace(path: Path) -> Trace:
    """The inverse of `write_trace`, but for the origin of time."""
    document = json.loads(path.read_text(encoding="utf-8"))
    facts = TraceFacts(**document["otherData"])
    spans: list[list[LaneSpan]] = [[] for _ in range(facts.num_ranks)]
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            start, args = event["ts"] / 1e6, event["args"]
            end, lane = start + event["dur"] / 1e6, Lane(event["cat"])
            spans[event["pid"]].append(LaneSpan(lane, event["name"], args["step"], start, end, args.get("peer")))
    return Trace(facts, tuple(map(tuple, spans)))
