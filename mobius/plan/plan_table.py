"""A plan as tables for a reader: stages, GPU bytes by category and rank, host bytes, the predicted step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from mobius.plan.budget import COMMUNICATOR_BYTES, CONTEXT_BYTES, HostNeed, fullest, host_need, tile_tokens
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
    """A line for each run of stages that are alike: ranks, layers, parameters of each stage, and where these are.

    Where layers have experts, also the parameters that compute for a token.
    """
    has_experts = shape.experts is not None
    active = ["active"] if has_experts else []
    rows = [["stages", "ranks", "layers", "parameters", *active, "weights", "activations"]]
    for _, alike in itertools.groupby(plan.cuts, key=lambda cut: (len(cut.layers), *_stage_cells(plan, cut, shape))):
        cuts = list(alike)
        first, last, ranks = cuts[0], cuts[-1], sorted({cut.stage % plan.num_ranks for cut in cuts})
        parts = ["embedding"] if first.is_first else []
        parts += [_numbers(first.first_layer, last.end_layer - 1)] if first.layers else []
        parts += ["head"] if last.is_last else []
        rows.append(
            [
                _numbers(first.stage, last.stage),
                _numbers(ranks[0], ranks[-1]) if len(ranks) == ranks[-1] - ranks[0] + 1 else ",".join(map(str, ranks)),
                ", ".join(parts) or "none",
                *_stage_cells(plan, first, shape)[1:],
            ]
        )
    slots = plan.describe_slots() if plan.num_slots is None else f"{plan.describe_slots()} per rank"
    head = f"{plan.num_stages} stages on {plan.num_ranks} rank(s), {plan.describe_microbatches()}, {slots}"
    return f"{head}\n{format_columns(rows)}"


def _stage_cells(plan: Plan, cut: StageCut, shape: ModelShape) -> list[str]:
    """Cells that tell stages apart: which end of the model they hold, parameters, weights and activations."""
    holds_nothing = not (cut.is_first or cut.layers or cut.is_last)
    return [
        f"{cut.is_first}{cut.is_last}",
        f"{cut.num_parameters(shape) / 1e6:.1f}M",
        *([f"{cut.num_active(shape) / 1e6:.1f}M"] if shape.experts is not None else []),
        "-" if holds_nothing else "resident" if cut.stage in plan.resident else "streamed",
        _activations(plan, cut, shape),
    ]


def _numbers(first: int, last: int) -> str:
    """`3`, or `3-5`."""
    return str(first) if first == last else f"{first}-{last}"


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
    rows = [["ranks", *(title for title, _ in categories), "= torch", "+ driver, mailboxes"]]
    # An estimate: context, mailboxes, communicators of a rank's edges and of all ranks; and two for each other replica,
    # of sums and of weights.
    edges = {1: 0, 2: 2}.get(machine.num_ranks, 4)
    pairs = edges + 2 * (machine.num_replicas - 1)
    beside = (pairs + (pairs > 0)) * COMMUNICATOR_BYTES + (found.request.mailbox_bytes if edges else 0)
    cells = [[*(gib_cell(getattr(need, name)) for _, name in categories), gib_cell(need.total)] for need in found.needs]
    first = 0
    for alike in (list(group) for _, group in itertools.groupby(cells)):
        rows.append([_numbers(first, first + len(alike) - 1), *alike[0], gib_cell(CONTEXT_BYTES + beside)])
        first += len(alike)
    memory = (machine.gpu_bytes or 0) / GIB
    available = memory if limit is None else min(limit, memory)
    tile = tile_tokens(found.request)
    in_tiles = "" if tile is None else f"\n  recomputed layers run in tiles of {tile} tokens"
    return f"GPU memory in GiB, {available:g} of {machine.card.name} may be used\n{format_columns(rows)}{in_tiles}"


def describe_verdict(found: Answer, available_bytes: int | None) -> str:
    """The verdict on a plan: whether it fits, its step, the fullest GPU, the host; None: its memory is not known."""
    request, host = found.request, found.host.total
    short = 0 if available_bytes is None else host - available_bytes
    fits = f"the run does not fit: {bytes_text(short)} of host memory are missing" if short > 0 else "the run fits"
    lines = [fits]
    if found.prediction is not None:
        lines.append(
            f"  step         {found.step_seconds:.3f} s for {request.all_tokens:,} tokens: "
            f"{found.tokens_per_second:,.0f} tokens/s, {100 * found.mfu:.0f} % MFU"
        )
    if request.gpu_bytes is not None:
        most, name = fullest(found.needs).total, f" {request.machine.card.name}" if request.machine.card else " GPU"
        lines.append(
            f"  GPU memory   {bytes_text(most)} of {bytes_text(request.gpu_bytes)} on each{name}, to within 5 %"
        )
    of = " (--host_memory_limit tells how much there is)" if available_bytes is None else ""
    of = of or f" of {bytes_text(available_bytes or 0)}"
    lines.append(f"  host memory  {bytes_text(host)}{of}")
    return "\n".join(lines)


def describe_host(need: HostNeed) -> str:
    """The host's bytes of all ranks, with their arithmetic."""
    return f"host memory: {bytes_text(need.total)} = {need.describe()}"


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
    """The part of the machine that limits the predicted step, waits, and the numbers that it rests on."""
    if found.prediction is None or found.forecast is None or found.profile is None:
        return "no step is predicted: the cards' rates are for formats of two bytes (bf16, fp16)"
    waits = ", ".join(f"{cause} {found.prediction.worst_wait(cause):.3f}" for cause in WaitCause)
    return "\n".join(
        [
            f"the step is limited by {found.forecast.limit} ({100 * found.forecast.gain:.1f} % shorter if it were 1.1 "
            f"times as fast); bubble {100 * found.prediction.bubble:.0f} %; the worst rank waits, s: {waits}",
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
