"""Text tables of a plan: stages, GPU bytes by category and rank, host bytes, the predicted step, replicas."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from mobius.config.config import Packing
from mobius.config.objective import ObjectiveName
from mobius.planner.disk_use import DiskUse
from mobius.planner.gpu_specs import GEMM_SHARE
from mobius.planner.memory_estimates import estimate_host_memory, largest_gpu_estimate, tile_tokens
from mobius.planner.profile import Source
from mobius.planner.request import PlanRequest
from mobius.planner.solver import PlanResult
from mobius.planner.step_prediction import Resource, predict_step_seconds, with_faster
from mobius.schedule.checkpoint_estimates import estimate_checkpoint
from mobius.schedule.lanes import WaitCause
from mobius.schedule.partition import ModelShape, StageCut
from mobius.schedule.plan import Plan
from mobius.units import GIB, format_bytes, format_columns, format_gib, format_rounded

LONG_STEP, SHORT_STEP, SHORT_ROW = 1e12, 1e11, 128
"""Operations of a step that takes a few cores half a minute or more; operations of a step that takes them seconds;
tokens of a short row."""
ROWS_AS_PLANNED = (
    "rows are planned as full, one document each: packed data takes less attention, and a little more memory"
)
"""Line that is shown if packing may be on, because a dry run does not read the data."""


def describe_stages(plan: Plan, shape: ModelShape) -> str:
    """Line for each run of equal stages: ranks, layers, and each stage's parameters, weights, activations."""
    rows = [["stages", "ranks", "layers", "parameters", "weights", "activations"]]

    def parts_and_cells(cut: StageCut) -> tuple[object, ...]:
        return (cut.is_first, cut.is_last, len(cut.layers), *_stage_cells(plan, cut, shape))

    for _, alike in itertools.groupby(plan.cuts, key=parts_and_cells):
        cuts = list(alike)
        first, last, ranks = cuts[0], cuts[-1], sorted({cut.stage % plan.num_ranks for cut in cuts})
        parts = ["embedding"] if first.is_first else []
        parts += [_numbers(first.first_layer, last.end_layer - 1)] if first.layers else []
        parts += ["head"] if last.is_last else []
        rows.append(
            [
                _numbers(first.stage, last.stage),
                _numbers(ranks[0], ranks[-1]) if len(ranks) == ranks[-1] - ranks[0] + 1 else ",".join(map(str, ranks)),
                ", ".join(parts) or "none: pass messages on",
                *_stage_cells(plan, first, shape),
            ]
        )
    return f"{plan.describe()}\n{format_columns(rows)}"


def _stage_cells(plan: Plan, cut: StageCut, shape: ModelShape) -> list[str]:
    """Cells of a stage for parameters, weights and activations."""
    holds_nothing = not (cut.is_first or cut.layers or cut.is_last)
    return [
        f"{cut.num_parameters(shape) / 1e6:.1f}M",
        "-" if holds_nothing else "resident" if cut.stage in plan.resident else "streamed",
        _activations(plan, cut, shape),
    ]


def _numbers(first: int, last: int) -> str:
    """Format a range as `3` or `3-5`."""
    return str(first) if first == last else f"{first}-{last}"


def _activations(plan: Plan, cut: StageCut, shape: ModelShape) -> str:
    if not cut.layers:
        return "-"
    if not cut.backward_layers(shape.first_backward):
        return "no backward"
    if cut.stage in plan.saved_activation_stages:
        return "products kept" if cut.stage in plan.saved_product_stages else "kept"
    if cut.stage in plan.offloaded_activation_stages and plan.num_offloaded_microbatches:
        share = f"{plan.num_offloaded_microbatches} of {plan.microbatches_per_round}"
        return f"products from the host ({share}), else recomputed"
    what = "linear parts recomputed" if cut.stage in plan.saved_attention_stages else "recomputed"
    return f"{what} from the host" if cut.stage in plan.offloaded_activation_stages else what


def describe_gpus(result: PlanResult) -> str:
    """Return GPU memory in GiB by category, with a line for each run of equal ranks, and memory outside of torch."""
    request, needs = result.request, result.gpu_estimates
    machine, limit = request.machine, request.config.pipeline.gpu_memory_limit
    assert machine.gpu_spec is not None
    names = [name for name in needs[0].parts if any(need.parts[name] for need in needs)]
    cells = [
        [format_gib(num_bytes) for num_bytes in (*map(need.parts.__getitem__, names), need.total)] for need in needs
    ]
    rows = [["ranks", *names, "total"]]
    for own, alike in itertools.groupby(range(len(needs)), key=cells.__getitem__):
        ranks = list(alike)
        rows.append([_numbers(ranks[0], ranks[-1]), *own])
    memory = (machine.gpu_bytes or 0) / GIB
    available = memory if limit is None else min(limit, memory)
    lines = [f"GPU memory in GiB, {available:g} of {machine.gpu_spec.name} may be used", format_columns(rows)]
    mailboxes = request.mailbox_bytes * (machine.num_ranks > 1)
    lines.append(f"  besides: {format_bytes(mailboxes)} for mailboxes, and the memory of driver and communicators")
    if (tile := tile_tokens(request)) is not None:
        lines.append(f"  recomputed layers run in tiles of {tile} tokens")
    return "\n".join(lines)


def describe_verdict(result: PlanResult, available_bytes: int | None, *, fits_disks: bool = True) -> str:
    """Verdict on a plan: whether it fits, its step, the fullest GPU, the host, its numbers and its limit.

    `available_bytes` are the bytes of host memory; None if unknown.
    """
    request, host_bytes = result.request, result.host_estimate.total
    short = 0 if available_bytes is None else host_bytes - available_bytes
    fits = f"the run does not fit: {format_bytes(short)} of host memory are missing" if short > 0 else "the run fits"
    if short <= 0 and not fits_disks:
        fits = "the run does not fit its disks"
    lines = [fits, f"  step         {_describe_speed(result)}"]
    if (passes := describe_passes(result)) is not None:
        lines.append(f"  reference    {passes}")
    if (objective := request.config.objective).teacher_bytes:
        own = f"--model_path {objective.teacher_model} --no_do_train --do_eval"
        size = f"{objective.teacher_bytes} bytes per target on disk"
        lines.append(f"  teacher      scores the samples before step 1, {size}, with a plan of its own ({own})")
    if request.gpu_bytes is not None:
        most = largest_gpu_estimate(result.gpu_estimates).total
        name = f" {request.machine.gpu_spec.name}" if request.machine.gpu_spec else " GPU"
        lines.append(f"  GPU memory   {format_bytes(most)} of {format_bytes(request.gpu_bytes)} on each{name}")
    known = " (state yours with --host_memory_limit GIB)"
    of = known if available_bytes is None else f" of {format_bytes(available_bytes)}"
    lines.append(f"  host memory  {format_bytes(host_bytes)}{of}")
    if request.config.pipeline.offload_states_to is not None:
        lines.append(f"  disks        {describe_disks(result)}")
    lines.append(f"  plan         {result.plan.describe()}")
    if (limit := _describe_limit(result)) is not None:
        lines.append(f"  limited by   {limit}")
    return "\n".join(lines)


def _describe_speed(result: PlanResult) -> str:
    """Describe the predicted step and its tokens per second, or say why no step is predicted."""
    if result.request.machine.on_cpu:
        return "; ".join(filter(None, [describe_long_step(result.request), "no step is predicted for CPUs"]))
    if result.step_time_prediction is None:
        return "no step is predicted: the cards' rates are for formats of two bytes (bf16, fp16)"
    config = result.request.config
    rows = config.pipeline.batch_size
    return (
        f"{format_rounded(result.step_seconds)} s for {rows:,} row{'' if rows == 1 else 's'} of "
        f"{config.data.seq_length:,} tokens: {format_rounded(result.tokens_per_second)} tokens/s, "
        f"{100 * result.mfu:.0f} % MFU (estimated by data sheets)"
    )


def describe_passes(result: PlanResult) -> str | None:
    """Describe the forward passes before step 1 and in each step; None if the objective needs none."""
    config, objective, seconds = result.request.config, result.request.config.objective, result.pass_seconds
    of_tokens = objective.objective is ObjectiveName.POLICY
    is_single_step = of_tokens and config.optim.num_steps == 1 and not config.evaluation.evaluates
    if not objective.needs_reference or is_single_step:
        return None
    text, num_passes = "a forward pass scores the first epoch before step 1", 1
    if objective.needs_divergence:
        text, num_passes = "two forward passes score the first epoch before step 1", 2
    if seconds is not None:
        share = 100 * num_passes * seconds / result.step_seconds
        text += f": {format_rounded(num_passes * seconds)} s per step of it ({share:.0f} %)"
    text += f"; {4 * num_passes} bytes per {'token' if of_tokens else 'answer'} on disk"
    if objective.needs_divergence:
        text += "; each step includes another pass" + ("" if seconds is None else f", some {format_rounded(seconds)} s")
    return text


def _describe_limit(result: PlanResult) -> str | None:
    """Describe the part of the machine that limits the predicted step; None without a predicted step."""
    prediction = result.step_time_prediction
    if prediction is None:
        return None
    return f"{prediction.bottleneck} ({100 * prediction.gain:.1f} % shorter if it were 1.1 times as fast)"


def describe_details(result: PlanResult, available_bytes: int | None) -> Iterator[str]:
    """Plan and its arithmetic, part by part; `available_bytes` as in `describe_verdict`."""
    request, config, host_bytes = result.request, result.request.config, result.host_estimate.total
    if request.machine.num_replicas > 1:
        yield describe_replicas(request)
    yield describe_stages(result.plan, request.shape)
    if not request.machine.on_cpu:
        yield describe_gpus(result)
        if (step := describe_step(result)) is not None:
            yield step
        if config.data.packing in (Packing.AUTO, Packing.ON):
            yield f"  {ROWS_AS_PLANNED}"
    yield f"host memory: {format_bytes(host_bytes)} = {result.host_estimate.describe()}"
    if (pipelines := request.machine.replicas_per_node) > 1:
        together = format_bytes(pipelines * host_bytes)
        yield f"  {pipelines} pipelines on each node: {together} of each node's host memory together"
    if available_bytes is not None and (short := describe_short_host(result)) is not None:
        yield f"  {short}"
    if config.saving.is_on:
        need = estimate_checkpoint(
            result.plan, request.shape, request.memory_rules, has_optimizer=not config.saving.save_only_model
        )
        yield need.describe(None if available_bytes is None else available_bytes - host_bytes, None)


def describe_disks(result: PlanResult) -> str:
    """Line about the optimizer states on disks: bytes, wear and seconds."""
    use, disks = DiskUse.of(result), None if result.profile is None else result.profile.disks
    number = len(result.plan.states_in_memory)
    in_memory = f"; states of {number} stages stay in memory" * (number > 0)
    if use is None:
        return f"optimizer states of all {number} streamed stages stay in memory" if number else "no optimizer states"
    if disks is None:
        return f"{use.describe()}{in_memory}; the predicted seconds leave the disks out (--disk_rate)"
    host, source = result.host_estimate, ""
    if result.request.config.planning.disk_rate is None:
        source = " as measured here"
        source += ", in a burst that may have fitted the drives' caches: longer writes may be slower" * disks.is_burst
    read, written = host.disk_reads / disks.read, host.disk_writes / disks.write
    seconds = f"a step reads them in {read:.2f} s and writes them in {written:.2f} s"
    if disks.total < disks.read + disks.write:
        seconds += f", both in at least {(host.disk_reads + host.disk_writes) / disks.total:.2f} s"
    seconds += source
    return f"{use.describe()}; {seconds}{in_memory}"


def describe_short_host(result: PlanResult) -> str | None:
    """Line about stages that stay on the GPUs because the host cannot hold them; None if it could hold all stages."""
    request, plan = result.request, result.plan
    streamed = estimate_host_memory(request, request.plan).total
    is_open = request.num_resident is None and not request.machine.on_cpu
    if not is_open or request.host_bytes is None or streamed <= request.host_bytes:
        return None
    rounds = f", in {plan.num_rounds} rounds" * (plan.num_rounds > 1)
    return (
        f"all stages would take {format_bytes(streamed)} of host memory, and {format_bytes(request.host_bytes)} may be "
        f"used: {len(plan.resident)} stages stay on the GPUs{rounds}; more host memory may make steps shorter"
    )


def describe_long_step(request: PlanRequest) -> str | None:
    """Line about a step that takes a CPU minutes, with options for a shorter step; None for any other step."""
    rows, length = request.config.pipeline.batch_size, request.config.data.seq_length
    operations = request.shape.product_operations * rows * length
    if not request.machine.on_cpu or operations < LONG_STEP:
        return None
    wanted, together = SHORT_STEP / operations * rows * length, request.num_chunks * request.machine.num_replicas
    fewer, shorter = max(together, int(wanted / length) // together * together), length
    while fewer * shorter > wanted and shorter > SHORT_ROW:
        shorter = max(SHORT_ROW, shorter // 2)
    options = [f"--batch_size {fewer}"] * (fewer < rows) + [f"--seq_length {shorter}"] * (shorter < length)
    if not options:
        return None
    share = rows * length / (fewer * shorter)
    return f"{rows * length:,} tokens take a CPU minutes; with {' '.join(options)} a step has 1/{share:.0f} of them"


def describe_step(result: PlanResult) -> str | None:
    """Describe bubble and waits of the predicted step, and the rates behind it; None if no step is predicted."""
    prediction = result.step_time_prediction
    if prediction is None or result.profile is None:
        return None
    waits = ", ".join(f"{cause} {prediction.worst_wait(cause):.3f}" for cause in WaitCause)
    lines = [f"bubble {100 * prediction.bubble:.0f} %; the worst rank waits, s: {waits}", result.profile.describe()]
    if (public := describe_public_rates(result)) is not None:
        lines.append(public)
    return "\n  ".join(lines)


def describe_public_rates(result: PlanResult) -> str | None:
    """Line with the step at published rates of the GPU's large products; None if the profile is measured."""
    request, profile, gpu_spec = result.request, result.profile, result.request.gpu_spec
    if profile is None or profile.source is Source.MEASURED or gpu_spec is None or gpu_spec.published is None:
        return None
    public, assumed = gpu_spec.published, gpu_spec.tera_flops * GEMM_SHARE
    slow, fast = (
        predict_step_seconds(result.plan, request, with_faster(profile, Resource.COMPUTE, rate / assumed))
        for rate in (public.lowest, public.highest)
    )
    return (
        f"with large products at {_span(public.lowest, public.highest, '.0f')} TFLOP/s, as published for this card: "
        f"{_span(fast, slow, '.3f')} s, {_span(request.all_tokens / slow, request.all_tokens / fast, ',.0f')} tokens/s "
        f"({public.source})"
    )


def _span(low: float, high: float, style: str) -> str:
    """Format a range as `3` or `3 to 5`."""
    return " to ".join(dict.fromkeys(format(number, style) for number in (low, high)))


def describe_replicas(request: PlanRequest) -> str:
    """Line with the number of pipelines, their nodes, and the part of a step that each pipeline computes."""
    machine, rows = request.machine, request.config.pipeline.batch_size
    where = f"{machine.replicas_per_node} on each of {machine.num_nodes} node(s)"
    return (
        f"{machine.num_replicas} replicas of a pipeline of {machine.num_ranks} rank(s), {where}: each computes "
        f"{request.rows} of {rows} rows of a step, and updates 1/{machine.num_replicas} of each stage"
    )
