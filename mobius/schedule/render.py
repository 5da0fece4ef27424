"""Owns the text grid of a schedule, for terminals and error messages. Its picture is output/schedule_picture.py's."""

from mobius.schedule.action import ActionKind
from mobius.schedule.lanes import Lane
from mobius.schedule.schedule import Schedule
from mobius.schedule.simulate import ActionSpan, simulate

_ERROR_MARK = "<-- ERROR HERE"
_LABEL_WIDTH = 11


def render_text(schedule: Schedule, failed: tuple[int, int] | None = None, *, line_width: int = 160) -> str:
    """The timeline as a grid: ranks are rows, time slots are columns, copies have rows of their own by kind.

    A column is one forward of one microbatch long; `.` is an idle GPU. Grids wider than `line_width` go on below.
    `failed` is (rank, index into `schedule.actions[rank]`): that action is put between `>` and `<`, its row marked, and
    its text form added under the grid.
    """
    timeline = simulate(schedule)
    failed_span = None if failed is None else timeline[failed[0]][failed[1]]
    cell = max(len(_name(span, failed_span)) for spans in timeline for span in spans) + 1
    # An action that takes no time still gets a slot.
    duration = max(max(span.end, span.start + 1) for spans in timeline for span in spans)
    per_band = max(1, (line_width - _LABEL_WIDTH) // cell)
    lines: list[str] = []
    for start in range(0, duration, per_band):
        band = range(start, min(start + per_band, duration))
        lines.append(("time".ljust(_LABEL_WIDTH) + "".join(str(slot).ljust(cell) for slot in band)).rstrip())
        for rank, spans in enumerate(timeline):
            for lane in _lanes(schedule, rank):
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


def _lanes(schedule: Schedule, rank: int) -> list[Lane]:
    """The lanes on which the rank has anything to do."""
    moves = [Lane.LOAD, Lane.OFFLOAD] if schedule.streamed_stages(rank) else []
    stashes = (
        schedule.offloaded_activation_stages.intersection(schedule.local_stages(rank)) and not schedule.is_evaluation
    )
    return [Lane.COMPUTE, *moves, *([Lane.OFFLOAD_ACTIVATIONS, Lane.PREFETCH_ACTIVATIONS] if stashes else [])]


def _name(span: ActionSpan, failed_span: ActionSpan | None) -> str:
    return f">{span.action}<" if span is failed_span else str(span.action)


def _columns(slots: range, cell: int) -> slice:
    return slice(slots.start * cell, slots.stop * cell)


def _draw_row(spans: list[ActionSpan], failed_span: ActionSpan | None, cell: int, duration: int, lane: Lane) -> str:
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
