"""Owns the picture of one measured or predicted step of a trace: a band for each rank, with its lanes beneath."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from mobius.output.picture_style import (
    IDLE_COLOUR,
    LANES,
    Colour,
    check_picture_name,
    describe_sizes,
    draw_frame,
    draw_legend,
    font_size_for,
    save_picture,
    stage_colour,
    text_colour,
)
from mobius.output.trace import Trace, TraceFacts, take_apart
from mobius.schedule.lanes import Lane, LaneSpan, WaitCause

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WAIT_COLOURS = {
    WaitCause.WEIGHTS.value: (0.99, 0.88, 0.70),
    WaitCause.NEIGHBOURS.value: (0.85, 0.85, 0.85),
    WaitCause.OPTIMIZER.value: (0.95, 0.80, 0.80),
}
_COMPUTE_HEIGHT, _LANE_HEIGHT, _SEND_HEIGHT, _GAP, _BAND_GAP = 0.50, 0.17, 0.07, 0.04, 0.16
_INCHES_PER_UNIT = 0.85
_SMALLEST_FONT = 5.5
_FILLED_SHARE = 0.85
_VISIBLE_SHARE = 0.003


@dataclass(frozen=True)
class _Bar:
    """A rectangle in milliseconds from the step's start, with its text."""

    start: float
    length: float
    text: str
    colour: Colour


def draw_timeline(trace: Trace, path: Path, *, step: int | None = None) -> None:
    """Write the picture of `step` (default: a typical one), PNG or SVG by the suffix of `path`.

    What was under way at the step's borders is cut there. Raises ConfigError for another suffix or a step that was
    not recorded.
    """
    check_picture_name(path)
    step = trace.choose_step(step)
    # Imported here: matplotlib takes half a second and training does not need it.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    start, end = trace.window(step)
    bands = [_bars(trace.within(rank, step), trace.facts, start) for rank in range(trace.facts.num_ranks)]
    lanes = [lane for lane in LANES if any(lane in band for band in bands)]
    places, pitch = _places([Lane.COMPUTE, *lanes])
    duration = 1000 * (end - start)
    width = _width(bands, duration)
    height = 1.4 + _INCHES_PER_UNIT * pitch * len(bands)
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((1.0 / width, 0.90 / height, 1 - 1.2 / width, 1 - 1.35 / height))
    points_per_ms = 72 * (width - 1.2) / duration
    for rank, band in enumerate(bands):
        axes.barh(rank * pitch + places[Lane.COMPUTE][0], duration, _COMPUTE_HEIGHT, align="edge",
                  color=IDLE_COLOUR)  # fmt: skip
        for lane in (Lane.WAIT, Lane.COMPUTE, *lanes):
            place, thickness = places[lane]
            _draw_lane(axes, band.get(lane, []), rank * pitch + place, thickness, points_per_ms, lane)
    name = "rank" if trace.facts.device == "cpu" else "GPU"
    shares = [100 * sum(bar.length for bar in band.get(Lane.COMPUTE, [])) / duration for band in bands]
    middles = [rank * pitch + _GAP + _COMPUTE_HEIGHT / 2 for rank in range(len(bands))]
    draw_frame(
        axes,
        duration,
        pitch * len(bands) - _BAND_GAP,
        {place: f"{name} {rank}\nbusy {shares[rank]:.0f} %" for rank, place in enumerate(middles)},
        title=_title(trace.facts, step, duration),
        x_label="time in ms",
        size=9,
    )
    waits = [bar for band in bands for bar in band.get(Lane.WAIT, [])]
    told = [
        Patch(color=colour, label=f"waits for {cause}")
        for cause, colour in _WAIT_COLOURS.items()
        if sum(bar.length for bar in waits if bar.colour == colour) > _VISIBLE_SHARE * duration
    ]
    draw_legend(figure, trace.facts, lanes, told, num_rows=2)
    save_picture(figure, path)


def _title(facts: TraceFacts, step: int, duration: float) -> str:
    sizes = describe_sizes(facts)
    if facts.device == "cpu":
        sizes = sizes.replace("GPUs", "CPU processes").replace("GPU", "CPU process")
    how = "as predicted" if facts.is_predicted else "as measured"
    return f"Step {step} {how} ({facts.device}), {duration:,.0f} ms: {sizes}"


def _bars(spans: Sequence[LaneSpan], facts: TraceFacts, origin: float) -> dict[Lane, list[_Bar]]:
    """Bars of one rank's lanes; `origin` is the picture's time 0 in seconds."""
    bars: dict[Lane, list[_Bar]] = {}
    for span in spans:
        colour = _colour(span, facts)
        if colour is not None:
            text = span.name if take_apart(span.name) else ""
            bar = _Bar(1000 * (span.start - origin), 1000 * (span.end - span.start), text, colour)
            bars.setdefault(span.lane, []).append(bar)
    return bars


def _colour(span: LaneSpan, facts: TraceFacts) -> Colour | None:
    """None for what is not drawn: steps, receives (the same as the neighbour's sends), the batch."""
    if span.lane is Lane.WAIT:
        return _WAIT_COLOURS.get(span.name)
    if span.lane is not Lane.COMPUTE:
        return LANES[span.lane][0] if span.lane in LANES else None
    action = take_apart(span.name)
    if action is None or action.letter not in "FB":
        return None
    return stage_colour(facts, action.stage, is_backward=action.letter == "B")


def _places(lanes: Sequence[Lane]) -> tuple[dict[Lane, tuple[float, float]], float]:
    """Top and height of each lane in a rank's band, and the height of a band."""
    places, top = {}, _GAP
    for lane in lanes:
        thickness = {Lane.COMPUTE: _COMPUTE_HEIGHT, Lane.SEND: _SEND_HEIGHT}.get(lane, _LANE_HEIGHT)
        places[lane] = (top, thickness)
        top += thickness + _GAP
    places[Lane.WAIT] = places[Lane.COMPUTE]
    return places, top + _BAND_GAP


def _width(bands: Sequence[dict[Lane, list[_Bar]]], duration: float) -> float:
    """Inches at which half of the compute bars are wide enough for their text."""
    lengths = [bar.length for band in bands for bar in band.get(Lane.COMPUTE, [])]
    return min(max(1.2 + 0.34 * duration / median(lengths), 12.0), 24.0) if lengths else 12.0


def _draw_lane(axes: Axes, bars: list[_Bar], top: float, thickness: float, points_per_ms: float, lane: Lane) -> None:
    largest = 8.5 if lane is Lane.COMPUTE else 7.0
    for bar in bars:
        # White between neighbours, but not instead of them where they are thin.
        edge = 0.0 if lane is Lane.WAIT else min(0.6, 0.1 * bar.length * points_per_ms)
        axes.barh(
            top, bar.length, thickness, bar.start, align="edge", color=bar.colour, edgecolor="white", linewidth=edge
        )
    for bar in _labelled(bars, points_per_ms):
        size = _font_size(bar, points_per_ms, largest)
        if bar.text and size >= _SMALLEST_FONT:
            axes.text(
                bar.start + bar.length / 2,
                top + thickness / 2,
                bar.text,
                ha="center",
                va="center_baseline",
                fontsize=size,
                color=text_colour(bar.colour),
            )


def _font_size(bar: _Bar, points_per_ms: float, largest: float) -> float:
    return font_size_for(max(1, len(bar.text)), bar.length * points_per_ms, largest)


def _labelled(bars: list[_Bar], points_per_ms: float) -> list[_Bar]:
    """The bars themselves; where those of one stage are mostly too narrow for their text, one in their place."""
    labelled = []
    for text, group in groupby(bars, key=lambda bar: bar.text.partition(".")[0]):
        members = list(group)
        num_narrow = sum(_font_size(bar, points_per_ms, largest=9.0) < _SMALLEST_FONT for bar in members)
        if num_narrow * 2 > len(members):
            first, last = members[0], members[-1]
            row = _Bar(first.start, last.start + last.length - first.start, text, first.colour)
            # A text over gaps would seem to name what fills them.
            members = [row] if sum(bar.length for bar in members) > _FILLED_SHARE * row.length else members
        labelled += members
    return labelled
