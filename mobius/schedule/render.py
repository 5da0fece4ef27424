"""Owns what a schedule looks like: a text grid for terminals and error messages, and a picture for documents.

Does not own when things happen (simulate.py), nor the colours, which the measured timeline shares (style.py).
"""

from pathlib import Path
from typing import TYPE_CHECKING

from mobius.schedule.action import ActionKind
from mobius.schedule.schedule import Schedule
from mobius.schedule.simulate import Lane, Span, Timeline, simulate
from mobius.schedule.style import (
    IDLE_COLOUR,
    LOAD_COLOUR,
    OFFLOAD_COLOUR,
    Colour,
    check_picture_name,
    describe_sizes,
    font_size_for,
    save_picture,
    stage_colour,
    text_colour,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ERROR_MARK = "<-- ERROR HERE"
_LABEL_WIDTH = 11

# Heights in a row of height 1, from the top: compute, then load and offload beneath it.
_LANE_PLACES = {Lane.COMPUTE: (0.04, 0.50), Lane.LOAD: (0.57, 0.17), Lane.OFFLOAD: (0.77, 0.17)}


def render_text(schedule: Schedule, failed: tuple[int, int] | None = None, *, line_width: int = 160) -> str:
    """The timeline as a grid: ranks are rows, time slots are columns, loads and offloads have rows of their own.

    A column is one forward of one microbatch long; `.` is an idle GPU. Grids wider than `line_width` go on below.
    `failed` is (rank, index into `schedule.actions[rank]`): that action is put between `>` and `<`, its row marked, and
    its text form added under the grid.
    """
    timeline = simulate(schedule)
    failed_span = None if failed is None else timeline[failed[0]][failed[1]]
    cell = max(len(_name(span, failed_span)) for spans in timeline for span in spans) + 1
    duration = _duration(timeline)
    per_band = max(1, (line_width - _LABEL_WIDTH) // cell)
    lines: list[str] = []
    for start in range(0, duration, per_band):
        band = range(start, min(start + per_band, duration))
        lines.append(("time".ljust(_LABEL_WIDTH) + "".join(str(slot).ljust(cell) for slot in band)).rstrip())
        for rank, spans in enumerate(timeline):
            for lane in tuple(Lane) if schedule.streamed_stages(rank) else (Lane.COMPUTE,):
                row = [span for span in spans if span.lane is lane]
                label = (f"rank {rank}" if lane is Lane.COMPUTE else f"  {lane}").ljust(_LABEL_WIDTH)
                line = (label + _draw_row(row, failed_span, cell, duration, lane)[_columns(band, cell)]).rstrip()
                is_failed = any(span is failed_span and span.start in band for span in row)
                lines.append(f"{line} {_ERROR_MARK}" if is_failed else line)
        lines.append("")
    if failed is not None:
        action = schedule.actions[failed[0]][failed[1]]
        lines.append(f"rank {failed[0]}, action {failed[1]}: {action.to_text(schedule.num_stages)} {_ERROR_MARK}")
    return "\n".join(lines).rstrip()


def _name(span: Span, failed_span: Span | None) -> str:
    return f">{span.action}<" if span is failed_span else str(span.action)


def _columns(slots: range, cell: int) -> slice:
    return slice(slots.start * cell, slots.stop * cell)


def _duration(timeline: Timeline) -> int:
    """The number of time slots to draw; an action that takes no time still gets one."""
    return max(max(span.end, span.start + 1) for spans in timeline for span in spans)


def _draw_row(spans: list[Span], failed_span: Span | None, cell: int, duration: int, lane: Lane) -> str:
    """One lane of one rank over the whole step, `cell` characters per time slot."""
    idle = "." if lane is Lane.COMPUTE else ""
    row = idle.ljust(cell) * duration
    # The batch takes no time and its place may be the first forward's: it is shown, on top, only when it failed.
    for span in sorted(spans, key=lambda span: span is failed_span):
        if span.action.kind is ActionKind.GENERATE_DATA and span is not failed_span:
            continue
        slots = range(span.start, max(span.end, span.start + 1))
        text = _name(span, failed_span).ljust(len(slots) * cell - 1, "-" if len(slots) > 1 else " ") + " "
        columns = _columns(slots, cell)
        row = row[: columns.start] + text + row[columns.stop :]
    return row


def render_picture(schedule: Schedule, path: Path) -> None:
    """Write the timeline as a picture, PNG or SVG by the suffix of `path`; raises ConfigError for another suffix."""
    check_picture_name(path)
    # Imported here: matplotlib takes half a second and training does not need it.
    from matplotlib.figure import Figure

    timeline = simulate(schedule)
    duration = _duration(timeline)
    width = min(max(1.6 + 0.40 * duration, 8.0), 40.0)
    height = 1.3 + 0.85 * schedule.num_ranks
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0.8 / width, 0.85 / height, 1 - 1.0 / width, 1 - 1.3 / height))
    points_per_slot = 72 * (width - 1.0) / duration
    longest_name = max(len(str(span.action)) for spans in timeline for span in spans)
    for rank, spans in enumerate(timeline):
        place, thickness = _LANE_PLACES[Lane.COMPUTE]
        axes.barh(rank + place, duration, thickness, align="edge", color=IDLE_COLOUR)
        for span in spans:
            _draw_span(axes, schedule, rank, span, points_per_slot, longest_name)
    _draw_frame(axes, schedule, duration)
    has_drops = any(s.lane is Lane.OFFLOAD and s.start == s.end for spans in timeline for s in spans)
    _draw_legend(figure, schedule, has_drops=has_drops)
    save_picture(figure, path)


def _draw_span(
    axes: "Axes", schedule: Schedule, rank: int, span: Span, points_per_slot: float, longest_name: int
) -> None:
    if span.action.kind is ActionKind.GENERATE_DATA:
        return
    place, thickness = _LANE_PLACES[span.lane]
    if span.lane is Lane.COMPUTE:
        colour = _colour(schedule, span.action.stage, is_backward=span.action.kind.is_backward)
    else:
        colour = LOAD_COLOUR if span.lane is Lane.LOAD else OFFLOAD_COLOUR
    letters, largest = text_colour(colour), 8.5 if span.lane is Lane.COMPUTE else 7.0
    length = span.end - span.start
    if length == 0:
        axes.plot([span.start], [rank + place + thickness / 2], marker="d", markersize=4.5, color=colour, linestyle="")
        position, align, room, letters = span.start + 0.2, "left", points_per_slot, colour
    else:
        axes.barh(
            rank + place, length, thickness, span.start, align="edge", color=colour, edgecolor="white", linewidth=0.8
        )
        position, align, room = span.start + length / 2, "center", points_per_slot * length
    name = str(span.action)
    # For the longest name of all, so that small and large labels do not alternate.
    font_size = font_size_for(longest_name, room, largest)
    if font_size >= 3.5:
        middle = rank + place + thickness / 2
        axes.text(position, middle, name, ha=align, va="center_baseline", fontsize=font_size, color=letters)


def _draw_frame(axes: "Axes", schedule: Schedule, duration: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0, duration)
    axes.set_ylim(schedule.num_ranks, 0)
    axes.set_yticks(
        [rank + 0.31 for rank in range(schedule.num_ranks)], [f"GPU {r}" for r in range(schedule.num_ranks)]
    )
    axes.tick_params(axis="y", length=0, labelsize=10)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("time (1 = forward of one microbatch)", fontsize=9)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    sizes = describe_sizes(
        num_ranks=schedule.num_ranks,
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        num_slots=schedule.num_slots,
        num_resident=len(schedule.resident),
    )
    axes.set_title(f"One step: {sizes}", fontsize=11, loc="left")


def _colour(schedule: Schedule, stage: int, *, is_backward: bool) -> Colour:
    return stage_colour(stage, num_ranks=schedule.num_ranks, num_stages=schedule.num_stages, is_backward=is_backward)


def _draw_legend(figure: "Figure", schedule: Schedule, *, has_drops: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = [
        Patch(color=_colour(schedule, 0, is_backward=False), label="F s.m  forward of stage s, microbatch m"),
        Patch(color=_colour(schedule, 0, is_backward=True), label="B s.m  backward"),
    ]
    if schedule.num_slots is not None:
        handles += [
            Patch(color=LOAD_COLOUR, label="L s  load weights"),
            Patch(color=OFFLOAD_COLOUR, label="O s  offload: gradients go home"),
        ]
    if has_drops:
        text = "O s  weights dropped, nothing to copy"
        handles.append(Line2D([], [], marker="d", color=OFFLOAD_COLOUR, linestyle="", label=text))
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=8, handlelength=1.2)
