"""Turns a prediction into a trace, so that it is written and drawn exactly as a measured one is.

It neither predicts (plan/simulation.py) nor draws (timeline_picture.py). Two pictures with equal lanes and colours
can be laid side by side; two trace.json files open in one window of ui.perfetto.dev.
"""

from __future__ import annotations

from itertools import pairwise

from mobius.memory.spans import MeasuredSpan, TraceLane
from mobius.output.trace import Trace, TraceFacts
from mobius.plan.simulation import Prediction
from mobius.schedule.schedule import Schedule


def predicted_trace(prediction: Prediction, schedule: Schedule, *, device: str) -> Trace:
    """The simulated steps as a trace whose time 0 is their start; `device` is the card's name."""
    facts = TraceFacts(
        num_ranks=schedule.num_ranks,
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        num_slots=schedule.num_slots,
        device=device,
        is_predicted=True,
    )
    steps = [
        MeasuredSpan(TraceLane.STEP, f"step {number}", number, start, end)
        for number, (start, end) in enumerate(pairwise((0.0, *prediction.step_ends)), start=1)
    ]
    spans = []
    for rank_spans in prediction.spans:
        own = [MeasuredSpan(TraceLane(s.lane.value), s.name, s.step, s.start, s.end, s.peer) for s in rank_spans]
        spans.append(tuple(sorted([*steps, *own], key=lambda span: (span.start, -span.end))))
    return Trace(facts, tuple(spans))
