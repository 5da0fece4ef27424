"""Owns the picture of a schedule for documents: the slots of its text grid, drawn."""

from pathlib import Path

from mobius.output.step_picture import LANE_STYLES, StepPicture, check_picture_name, describe_sizes, lane_bars
from mobius.schedule.lanes import Lane, LaneSpan
from mobius.schedule.render import place_actions
from mobius.schedule.schedule import Schedule


def draw_schedule(schedule: Schedule, path: Path) -> None:
    """Write the picture, PNG or SVG by the suffix of `path`; raises ConfigError for another suffix."""
    check_picture_name(path)
    from matplotlib.lines import Line2D

    timeline = [
        [LaneSpan(span.lane, str(span.action), 1, span.start, span.end) for span in spans]
        for spans in place_actions(schedule)
    ]
    every = [span for spans in timeline for span in spans]
    duration = max(max(span.end, span.start + 1) for span in every)
    drops = []
    if any(span.lane is Lane.OFFLOAD and span.start == span.end for span in every):
        text, colour = "O s  weights dropped, nothing to copy", LANE_STYLES[Lane.OFFLOAD][0]
        drops.append(Line2D([], [], marker="d", color=colour, linestyle="", label=text))
    StepPicture(
        step=schedule,
        bands=[lane_bars(spans, schedule) for spans in timeline],
        duration=duration,
        width=min(max(1.8 + 0.40 * duration, 8.0), 40.0),
        labels=[f"GPU {rank}" for rank in range(schedule.num_ranks)],
        title=f"One step: {describe_sizes(schedule, len(schedule.resident))}",
        time_label="time (1 = forward of one microbatch)",
        more_legend=drops,
        longest_text=max(len(span.name) for span in every),
        smallest_font=3.5,
    ).save(path)
