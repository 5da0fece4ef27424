"""A plan as tables for a reader: stages, GPU bytes by category and rank, host bytes, the predicted step.

Only text; the numbers are budget.py's and what_if.py's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mobius.limits import INCOMING_EDGES, NUM_MAILBOXES
from mobius.plan.budget import COMMUNICATOR_BYTES, CONTEXT_BYTES, GpuNeed, HostNeed
from mobius.plan.cards import Card
from mobius.plan.plan import Plan
from mobius.plan.shape import ModelShape
from mobius.plan.what_if import Answer
from mobius.schedule.lanes import WaitCause
from mobius.units import bytes_text, gib_cell

_CATEGORIES = (
    ("weights", "weights"),
    ("gradients", "gradients"),
    ("optimizer", "optimizer"),
    ("inputs", "stash"),
    ("kept", "graphs"),
    ("messages", "messages"),
    ("work", "working_set"),
    ("libraries", "libraries"),
)


def format_columns(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, to the right but for the first."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def describe_stages(plan: Plan, shape: ModelShape, graph_stages: Collection[int]) -> str:
    """One line per stage: its rank, layers and parameters, whether it is streamed, what backward runs again."""
    rows = [["stage", "rank", "layers", "parameters", "weights", "activations"]]
    for span in plan.spans:
        parts = ["embedding"] if span.is_first else []
        parts += [f"{span.first_layer}-{span.end_layer - 1}"] if span.layers else []
        parts += ["head"] if span.is_last else []
        holds_nothing = not parts
        rows.append(
            [
                str(span.stage),
                str(span.stage % plan.num_ranks),
                ", ".join(parts) or "none",
                f"{span.num_parameters(shape) / 1e6:.1f}M",
                "-" if holds_nothing else "resident" if span.stage in plan.resident else "streamed",
                "-" if not span.layers else "kept" if span.stage in graph_stages else "recomputed",
            ]
        )
    slots = plan.describe_slots() if plan.num_slots is None else f"{plan.describe_slots()} per rank"
    head = f"{plan.num_stages} stages on {plan.num_ranks} rank(s), {plan.num_microbatches} microbatches, {slots}"
    return f"{head}\n{format_columns(rows)}"


@dataclass(frozen=True)
class GpuTable:
    """What the table of GPU bytes is made of."""

    needs: tuple[GpuNeed, ...]
    message_bytes: int
    num_ranks: int
    card: Card
    limit: float | None
    """GiB; None: the card's memory."""


def describe_gpus(table: GpuTable) -> str:
    """GiB by category, a line per rank; what is outside of torch's memory is in a column of its own."""
    head = ["rank", *(title for title, _ in _CATEGORIES), "= torch", "+ driver, mailboxes"]
    rows = [head]
    for need in table.needs:
        values = [gib_cell(getattr(need, name)) for _, name in _CATEGORIES]
        outside = outside_bytes(num_ranks=table.num_ranks, message_bytes=table.message_bytes)
        rows.append([str(need.rank), *values, gib_cell(need.total), gib_cell(outside)])
    available = table.card.memory_gb if table.limit is None else min(table.limit, table.card.memory_gb)
    return f"GPU memory in GiB, {available:g} of {table.card.name} may be used\n{format_columns(rows)}"


def outside_bytes(*, num_ranks: int, message_bytes: int) -> int:
    """GPU memory outside of torch's: context, communicators of a rank's edges, mailboxes. An estimate."""
    if num_ranks == 1:
        return CONTEXT_BYTES
    edges = 2 if num_ranks == 2 else 4
    return CONTEXT_BYTES + (edges + 1) * COMMUNICATOR_BYTES + INCOMING_EDGES * NUM_MAILBOXES * message_bytes


def describe_host(need: HostNeed, available_bytes: int | None) -> str:
    """The host's bytes of all ranks, with their arithmetic; None: it is not known how many there are."""
    if available_bytes is None:
        return (
            f"host memory: {bytes_text(need.total)} ({need.describe()})\n  not compared with this machine's, since the "
            "plan is for another one: --host_memory_limit says how much there is"
        )
    return (
        f"host memory: {bytes_text(need.total)} of {bytes_text(available_bytes)} that may be used ({need.describe()})"
    )


def describe_step(found: Answer) -> str:
    """The predicted step, what holds it up, and on what the numbers rest."""
    candidate, prediction = found.candidate, found.candidate.prediction
    waits = ", ".join(f"{cause} {prediction.worst_wait(cause):.3f}" for cause in WaitCause)
    return "\n".join(
        (
            f"predicted step: {prediction.step_seconds:.3f} s for {found.run.step_tokens:,} tokens, "
            f"{found.tokens_per_second:,.0f} tokens/s, {100 * found.mfu:.0f} % MFU",
            f"  limited by {found.limit} ({100 * found.gain:.1f} % shorter if it were 1.1 times as fast); "
            f"bubble {100 * prediction.bubble:.0f} %; the worst rank waits, s: {waits}",
            f"  {candidate.profile.describe()}",
        )
    )
