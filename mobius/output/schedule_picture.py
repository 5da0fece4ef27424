"""Owns the picture of a schedule for documents: when each action would run if all stages cost the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mobius.output.picture_style import (
    IDLE_COLOUR,
    LANES,
    check_picture_name,
    describe_sizes,
    draw_frame,
    draw_legend,
    font_size_for,
    save_picture,
    stage_colour,
    text_colour,
)
from mobius.schedule.action import ActionKind
from mobius.schedule.lanes import Lane
from mobius.schedule.schedule import Schedule
from mobius.schedule.simulate import ActionSpan, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Heights in a row of height 1, from the top: compute, then load and offload beneath it.
_LANE_PLACES = {Lane.COMPUTE: (0.04, 0.50), Lane.LOAD: (0.57, 0.17), Lane.OFFLOAD: (0.77, 0.17)}


def draw_schedule(schedule: Schedule, path: Path) -> None:
    """Write the picture, PNG or SVG by the suffix of `path`; raises ConfigError for another suffix."""
    check_picture_name(path)
    # Imported here: matplotlib takes half a second and training does not need it.
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    timeline = simulate(schedule)
    duration = max(max(span.end, span.start + 1) for spans in timeline for span in spans)
    width = min(max(1.6 + 0.40 * duration, 8.0), 40.0)
    height = 1.3 + 0.85 * schedule.num_ranks
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0.8 / width, 0.85 / height, 1 - 1.0 / width, 1 - 1.3 / height))
    points_per_slot = 72 * (width - 1.0) / duration
    # One font size for all: small and large labels would alternate otherwise.
    longest_name = max(len(str(span.action)) for spans in timeline for span in spans)
    for rank, spans in enumerate(timeline):
        place, thickness = _LANE_PLACES[Lane.COMPUTE]
        axes.barh(rank + place, duration, thickness, align="edge", color=IDLE_COLOUR)
        for span in spans:
            _draw_span(axes, schedule, rank, span, points_per_slot, longest_name)
    draw_frame(
        axes,
        duration,
        schedule.num_ranks,
        {rank + 0.31: f"GPU {rank}" for rank in range(schedule.num_ranks)},
        title=f"One step: {describe_sizes(schedule, len(schedule.resident))}",
        x_label="time (1 = forward of one microbatch)",
        size=10,
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    drops = []
    if any(span.lane is Lane.OFFLOAD and span.start == span.end for spans in timeline for span in spans):
        text, colour = "O s  weights dropped, nothing to copy", LANES[Lane.OFFLOAD][0]
        drops.append(Line2D([], [], marker="d", color=colour, linestyle="", label=text))
    lanes = () if schedule.num_slots is None else (Lane.LOAD, Lane.OFFLOAD)
    draw_legend(figure, schedule, lanes, drops, num_rows=1)
    save_picture(figure, path)


def _draw_span(
    axes: Axes, schedule: Schedule, rank: int, span: ActionSpan, points_per_slot: float, longest_name: int
) -> None:
    if span.action.kind is ActionKind.GENERATE_DATA:
        return
    place, thickness = _LANE_PLACES[span.lane]
    if span.lane is Lane.COMPUTE:
        colour = stage_colour(schedule, span.action.stage, is_backward=span.action.kind.is_backward)
    else:
        colour = LANES[span.lane][0]
    letters, largest = text_colour(colour), 8.5 if span.lane is Lane.COMPUTE else 7.0
    length, middle = span.end - span.start, rank + place + thickness / 2
    if length == 0:
        axes.plot([span.start], [middle], marker="d", markersize=4.5, color=colour, linestyle="")
        position, align, room, letters = span.start + 0.2, "left", points_per_slot, colour
    else:
        axes.barh(
            rank + place, length, thickness, span.start, align="edge", color=colour, edgecolor="white", linewidth=0.8
        )
        position, align, room = span.start + length / 2, "center", points_per_slot * length
    font_size = font_size_for(longest_name, room, largest)
    if font_size >= 3.5:
        axes.text(position, middle, str(span.action), ha=align, va="center_baseline", fontsize=font_size, color=letters)
