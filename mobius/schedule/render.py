"""Text grid of a schedule, for terminals and error messages; reporting/pictures.py draws the picture.

The grid shows the order of actions, not their seconds (`mobius plan` predicts times). Computations take one or two
slots and wait for their messages. A copy is shown in the slot in which its rank starts it, after earlier copies of its
lane.
"""

from dataclasses import dataclass

from mobius.schedule.action import Action, ActionKind, source_stage
from mobius.schedule.lanes import Lane
from mobius.schedule.schedule import Schedule, topological_order

_ERROR_MARK = "<-- ERROR HERE"
_COPY_LANES = {
    ActionKind.LOAD: Lane.LOAD,
    ActionKind.LOAD_GRADIENT_SUMS: Lane.LOAD,
    ActionKind.OFFLOAD: Lane.OFFLOAD,
    ActionKind.OFFLOAD_GRADIENT_SUMS: Lane.OFFLOAD,
    ActionKind.OFFLOAD_ACTIVATIONS: Lane.OFFLOAD_ACTIVATIONS,
    ActionKind.PREFETCH_ACTIVATIONS: Lane.PREFETCH_ACTIVATIONS,
}


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """Time of one action, from `start` up to but not including `end`, in slots from the step's start."""

    action: Action
    lane: Lane
    start: int
    end: int


def place_actions(
    schedule: Schedule, *, forward_slots: int = 1, backward_slots: int = 2
) -> tuple[tuple[ActionSpan, ...], ...]:
    """Return the spans of every rank in the order of its actions; `schedule` must have passed `check`.

    A copy takes one slot. Loading the batch takes no slot, nor does an offload that drops weights without gradients.
    """
    spec = schedule.spec
    spans: list[list[ActionSpan]] = [[] for _ in range(spec.num_ranks)]
    lane_ends = [dict.fromkeys(Lane, 0) for _ in range(spec.num_ranks)]
    computed: dict[tuple[bool, int, int | None], int] = {}
    with_gradients: set[int] = set()
    order, conflict = topological_order(schedule)
    assert conflict is None, "the schedule has not passed the check"
    for rank, action in order:
        kind, source, ends = action.kind, source_stage(action, spec.chain_length), lane_ends[rank]
        lane = _COPY_LANES.get(kind, Lane.COMPUTE)
        arrival = 0 if source is None else computed[kind.is_backward, source, action.microbatch]
        start = max(ends[lane], ends[Lane.COMPUTE], arrival)
        duration = backward_slots if kind.is_backward else forward_slots if kind.runs_on_compute_lane else 1
        if kind is ActionKind.GENERATE_DATA or (kind is ActionKind.OFFLOAD and action.stage not in with_gradients):
            duration = 0
        if kind.is_backward:
            with_gradients.add(action.stage)
        elif kind in (ActionKind.OFFLOAD, ActionKind.OFFLOAD_GRADIENT_SUMS):
            with_gradients.discard(action.stage)
        sends_gradient = kind.is_backward or kind is ActionKind.HEAD
        ends[lane] = computed[sends_gradient, action.stage, action.microbatch] = start + duration
        spans[rank].append(ActionSpan(action, lane, start, start + duration))
    return tuple(map(tuple, spans))


def render_text(schedule: Schedule, failed: tuple[int, int] | None = None, *, line_width: int = 160) -> str:
    """Return the grid: ranks are rows, slots are columns (`place_actions`), and each copy lane is a separate row.

    `.` is an idle GPU. Grids wider than `line_width` continue below. `failed` is (rank, index into
    `schedule.actions[rank]`): that action is enclosed in `>` and `<`, its row is marked, and its text form follows the
    grid.
    """
    timeline = place_actions(schedule)
    failed_span = None if failed is None else timeline[failed[0]][failed[1]]
    cell = max(len(_name(span, failed_span)) for spans in timeline for span in spans) + 1
    # An action that takes no time still gets a slot.
    duration = max(max(span.end, span.start + 1) for spans in timeline for span in spans)
    label_width = max(len(lane) for rank in range(schedule.spec.num_ranks) for lane in _lanes(schedule, rank)) + 4
    per_band = max(1, (line_width - label_width) // cell)
    lines: list[str] = []
    for start in range(0, duration, per_band):
        band = range(start, min(start + per_band, duration))
        lines.append(("time".ljust(label_width) + "".join(str(slot).ljust(cell) for slot in band)).rstrip())
        for rank, spans in enumerate(timeline):
            for lane in _lanes(schedule, rank):
                row = [span for span in spans if span.lane is lane]
                label = (f"rank {rank}" if lane is Lane.COMPUTE else f"  {lane}").ljust(label_width)
                line = (label + _draw_row(row, failed_span, cell, duration, lane)[_columns(band, cell)]).rstrip()
                is_failed = any(span is failed_span and span.start in band for span in row)
                lines.append(f"{line} {_ERROR_MARK}" if is_failed else line)
        lines.append("")
    if failed is not None:
        text = schedule.actions[failed[0]][failed[1]].to_text(schedule.spec.chain_length)
        lines.append(f"rank {failed[0]}, action {failed[1]}: {text} {_ERROR_MARK}")
    return "\n".join(lines).rstrip()


def _lanes(schedule: Schedule, rank: int) -> list[Lane]:
    """Return the lanes that the rank uses."""
    moves = [Lane.LOAD, Lane.OFFLOAD] if schedule.spec.streamed_stages(rank) else []
    offloads_activations = (
        schedule.spec.offloaded_activation_stages.intersection(schedule.spec.local_stages(rank))
        and not schedule.spec.is_evaluation
    )
    activations = [Lane.OFFLOAD_ACTIVATIONS, Lane.PREFETCH_ACTIVATIONS] if offloads_activations else []
    return [Lane.COMPUTE, *moves, *activations]


def _name(span: ActionSpan, failed_span: ActionSpan | None) -> str:
    return f">{span.action}<" if span is failed_span else str(span.action)


def _columns(slots: range, cell: int) -> slice:
    return slice(slots.start * cell, slots.stop * cell)


def _draw_row(spans: list[ActionSpan], failed_span: ActionSpan | None, cell: int, duration: int, lane: Lane) -> str:
    """Draw one lane of one rank for the whole step, with `cell` characters per time slot."""
    idle = "." if lane is Lane.COMPUTE else ""
    row = idle.ljust(cell) * duration
    # Loading the batch takes no time and may share the first forward's slot: it is drawn, on top, only if it failed.
    for span in sorted(spans, key=lambda span: span is failed_span):
        if span.action.kind is ActionKind.GENERATE_DATA and span is not failed_span:
            continue
        slots = range(span.start, max(span.end, span.start + 1))
        text = _name(span, failed_span).ljust(len(slots) * cell - 1, "-" if len(slots) > 1 else " ") + " "
        columns = _columns(slots, cell)
        row = row[: columns.start] + text + row[columns.stop :]
    return row
