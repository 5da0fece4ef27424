"""A plan as tables for a reader: stages, GPU bytes by category and rank, host bytes, the predicted step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mobius.plan.budget import COMMUNICATOR_BYTES, CONTEXT_BYTES, HostNeed, host_need, tile_tokens
from mobius.plan.choice import Answer
from mobius.plan.partition import ModelShape, StageCut
from mobius.plan.plan import KeptLevel, Plan
from mobius.plan.profile import Profile
from mobius.plan.simulation import plan_seconds
from mobius.schedule.lanes import WaitCause
from mobius.units import GIB, bytes_text, gib_cell

_CATEGORIES = (
    ("weights", "weights"),
    ("gradients", "gradients"),
    ("optimizer", "optimizer"),
    ("keys", "keys"),
    ("inputs", "inputs"),
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


def describe_stages(plan: Plan, shape: ModelShape) -> str:
    """One line per stage: its rank, layers, parameters, whether it is streamed, what backward runs again.

    Where layers have experts, also the parameters that compute for a token.
    """
    has_experts = shape.experts is not None
    active = ["active"] if has_experts else []
    rows = [["stage", "rank", "layers", "parameters", *active, "weights", "activations"]]
    for cut in plan.cuts:
        parts = ["embedding"] if cut.is_first else []
        parts += [f"{cut.first_layer}-{cut.end_layer - 1}"] if cut.layers else []
        parts += ["head"] if cut.is_last else []
        holds_nothing = not parts
        rows.append(
            [
                str(cut.stage),
                str(cut.stage % plan.num_ranks),
                ", ".join(parts) or "none",
                f"{cut.num_parameters(shape) / 1e6:.1f}M",
                *([f"{cut.num_active(shape) / 1e6:.1f}M"] if has_experts else []),
                "-" if holds_nothing else "resident" if cut.stage in plan.resident else "streamed",
                _activations(plan, cut, shape),
            ]
        )
    slots = plan.describe_slots() if plan.num_slots is None else f"{plan.describe_slots()} per rank"
    head = f"{plan.num_stages} stages on {plan.num_ranks} rank(s), {plan.describe_microbatches()}, {slots}"
    return f"{head}\n{format_columns(rows)}"


def _activations(plan: Plan, cut: StageCut, shape: ModelShape) -> str:
    if not cut.layers:
        return "-"
    if not cut.backward_layers(shape.first_backward):
        return "no backward"
    if cut.stage in plan.kept:
        return "kept" if plan.kept_level is KeptLevel.EVERYTHING else f"{plan.kept_level} kept"
    if cut.stage in plan.stashed and plan.num_products_home:
        share = f"{plan.num_products_home} of {plan.round_size}"
        return f"products from the host ({share}), else recomputed"
    what = "linear parts recomputed" if cut.stage in plan.attention_kept else "recomputed"
    return f"{what} from the host" if cut.stage in plan.stashed else what


def describe_gpus(found: Answer) -> str:
    """GiB by category, a line per rank; what is outside of torch's memory is in a column of its own."""
    machine, limit = found.request.machine, found.request.config.pipeline.gpu_memory_limit
    assert machine.card is not None
    has_keys = any(need.keys for need in found.needs)
    categories = [each for each in _CATEGORIES if has_keys or each[1] != "keys"]
    rows = [["rank", *(title for title, _ in categories), "= torch", "+ driver, mailboxes"]]
    # An estimate: context, mailboxes, communicators of a rank's edges and of all ranks; and two for each other replica,
    # of sums and of weights.
    edges = {1: 0, 2: 2}.get(machine.num_ranks, 4)
    pairs = edges + 2 * (machine.num_replicas - 1)
    beside = (pairs + (pairs > 0)) * COMMUNICATOR_BYTES + (found.request.mailbox_bytes if edges else 0)
    for need in found.needs:
        values = [gib_cell(getattr(need, name)) for _, name in categories]
        rows.append([str(need.rank), *values, gib_cell(need.total), gib_cell(CONTEXT_BYTES + beside)])
    memory = (machine.gpu_bytes or 0) / GIB
    available = memory if limit is None else min(limit, memory)
    tile = tile_tokens(found.request)
    in_tiles = "" if tile is None else f"\n  recomputed layers run in tiles of {tile} tokens"
    return f"GPU memory in GiB, {available:g} of {machine.card.name} may be used\n{format_columns(rows)}{in_tiles}"


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


def describe_short_host(found: Answer) -> str | None:
    """A line where stages stay on the GPUs because the host cannot hold them; None where it could hold all."""
    request, plan = found.request, found.plan
    streamed = host_need(request, request.plan).total
    is_open = request.num_resident is None and not request.machine.on_cpu
    if not is_open or request.host_bytes is None or streamed <= request.host_bytes:
        return None
    rounds = f", in {plan.num_rounds} rounds" * (plan.num_rounds > 1)
    return (
        f"all stages would take {bytes_text(streamed)} of host memory, and {bytes_text(request.host_bytes)} may be "
        f"used: {len(plan.resident)} stay on the GPUs{rounds}; more host memory may make steps shorter"
    )


def describe_step(found: Answer) -> str:
    """The predicted step, what holds it up, and on what the numbers rest."""
    if found.prediction is None or found.forecast is None or found.profile is None:
        return "no step is predicted: the cards' rates are for formats of two bytes (bf16, fp16)"
    waits = ", ".join(f"{cause} {found.prediction.worst_wait(cause):.3f}" for cause in WaitCause)
    return "\n".join(
        [
            f"predicted step: {found.step_seconds:.3f} s for {found.request.all_tokens:,} tokens, "
            f"{found.tokens_per_second:,.0f} tokens/s, {100 * found.mfu:.0f} % MFU",
            f"  limited by {found.forecast.limit} ({100 * found.forecast.gain:.1f} % shorter if it were 1.1 times as "
            f"fast); bubble {100 * found.prediction.bubble:.0f} %; the worst rank waits, s: {waits}",
            *([] if found.plan.num_rounds == 1 else [f"  {_describe_rounds(found, found.profile)}"]),
            f"  {found.profile.describe()}",
        ]
    )


def _describe_rounds(found: Answer, profile: Profile) -> str:
    """Compare with the same plan with all microbatches at once, as if there were the memory for it."""
    plan = found.plan
    at_once = plan_seconds(replace(plan, num_rounds=1), found.request, profile)
    sums = f", their fp32 sums {plan.num_rounds - 1} times each way" * (not found.request.shape.keeps_trained)
    return (
        f"{plan.num_rounds} rounds of {plan.round_size} microbatches cost {found.step_seconds - at_once:.3f} s of it: "
        f"weights of streamed stages travel {plan.num_rounds} times{sums}"
    )
