"""Refusals of runs that do not fit, and single changes with which they fit.

One list of changes serves GPU and host memory; changes that cost training least come first. To try a value of a change
takes milliseconds, because only a lower bound of memory is estimated. Then the smallest value that fits is planned.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from transformers import PretrainedConfig

from mobius.config.config import (
    ActivationOffloading,
    BaseDtype,
    FinetuningType,
    MatmulDtype,
    OptimizerStates,
    Order,
    Recompute,
)
from mobius.config.validation import find_problems
from mobius.errors import ConfigError, GpuMemoryError, HostMemoryError, PlanError, ScheduleError
from mobius.models.blocks import ModelParts
from mobius.planner.fit import MIN_SLICE_TOKENS, DoesNotFitError, divisors, fits_gpus, least_host_bytes
from mobius.planner.memory_estimates import TILE_TOKENS, estimated_layer, largest_gpu_estimate, tile_tokens
from mobius.planner.peak_memory import LayerBytes
from mobius.planner.request import PlanRequest
from mobius.planner.solver import Effort, PlanResult, least_host_need, round_numbers, solve
from mobius.planner.step_prediction import predict_step_seconds
from mobius.process.log import progress_bar
from mobius.schedule.memory_layout import SUM_BYTES
from mobius.schedule.partition import max_stages
from mobius.schedule.spec import ComputeOrder
from mobius.units import GIB, format_bytes

LOSS_CHUNKS = (4096, 2048, 1024, 512, 256, 128)
LENGTHS = 64
"""Number of parts into which a sequence is divided; shorter sequences leave out some parts."""
HOST_ROOM = 1.03
"""Memory of a suggested larger host / least memory that the run needs there."""


@dataclass(frozen=True)
class Change:
    """One kind of change of a request, with its values from the smallest change to the largest."""

    options: str
    """Options as the user types them; braces mark the place of the value."""
    apply: Callable[[Any], PlanRequest | None]
    """Function that returns the request with a value; None if the request's other options do not allow it."""
    values: Sequence[Any] = (None,)
    replaces: Set[str] = frozenset()
    """Options of simpler changes; if one of these fits, this change is not tried."""


def gpu_refusal(error: DoesNotFitError, model: PretrainedConfig | None = None) -> GpuMemoryError:
    """Return the error with changes that fit. Without `model` (a configuration), no frozen parameters are tried."""
    request = error.request
    if remedies := describe_remedies(find_remedies(request, error.layer, model), request.host_bytes):
        refusal = GpuMemoryError(f"{error}\n{list_remedies(remedies)}")
        refusal.remedies = remedies
        return refusal
    is_offloading = request.config.pipeline.use_offload
    stages = "raise --num_stages (smaller stages)" if is_offloading else "use --use_offload"
    return GpuMemoryError(
        f"{error} To fit: {stages}; raise --num_chunks (smaller microbatches) and --num_rounds; lower --batch_size or "
        f"--seq_length.{_describe_experts(request) if is_offloading else ''}"
    )


def check_host_memory(
    planned: PlanResult, available_bytes: int, model: PretrainedConfig | None = None, *, with_remedies: bool = True
) -> None:
    """Raise HostMemoryError with the arithmetic and what to change if a plan exceeds `available_bytes`.

    `model` as in `gpu_refusal`. For a given plan no changes are searched.
    """
    need, is_given = planned.host_estimate, planned.request.config.planning.plan is not None
    if need.total <= available_bytes:
        return
    is_searched = with_remedies and not is_given
    found = find_remedies(planned.request, planned.layer, model, available_bytes) if is_searched else {}
    remedies = describe_remedies(found, available_bytes)
    advice = f"\n{list_remedies(remedies)}" if remedies else " Use a smaller model or a larger host."
    refusal = HostMemoryError(
        f"{need.num_ranks} rank(s) need {format_bytes(need.total)} of host memory ({need.describe()}), "
        f"{format_bytes(available_bytes)} is available. If this host's memory grows on demand, state how much may be "
        f"used with --host_memory_limit.{advice}"
    )
    refusal.remedies = remedies
    raise refusal


def check_least_host_memory(request: PlanRequest, available_bytes: int) -> None:
    """Raise HostMemoryError if a bound shows that every plan of `request` needs more than `available_bytes`.

    The bound takes a tenth of the time of planning.
    """
    if available_bytes < (least := least_host_need(request)) < math.inf:
        raise HostMemoryError(
            f"needs {format_bytes(int(least))} of host memory (or more; {format_bytes(available_bytes)} is available)."
        )


def list_remedies(remedies: Mapping[str, str]) -> str:
    """Return one line for each change, from the texts of `describe_remedies`."""
    width = max(map(len, remedies))
    return "\n".join(
        ["Each of these alone fits:", *(f"  {each.ljust(width)}  {text}" for each, text in remedies.items())]
    )


def describe_remedies(remedies: Mapping[str, PlanResult], available_bytes: int | None) -> dict[str, str]:
    """Return for each change a text of memory and speed; `available_bytes` of this host (None: unknown)."""
    found = {}
    for options, planned in remedies.items():
        request, host_bytes = planned.request, planned.host_estimate.total
        parts = [f"{format_bytes(host_bytes)} of host memory"]
        if planned.host_estimate.disk:
            parts.append(f"{format_bytes(planned.host_estimate.disk)} on disks")
        if not request.machine.on_cpu:
            parts.append(f"{format_bytes(largest_gpu_estimate(planned.gpu_estimates).total)} per GPU")
        if planned.profile is not None:
            seconds = predict_step_seconds(planned.plan, request, planned.profile)
            text = f"about {request.all_tokens / seconds:,.0f} tokens/s"
            parts.append(
                f"{text} if disks were no limit"
                if planned.host_estimate.disk and planned.profile.disks is None
                else text
            )
        if host_bytes > (available_bytes or math.inf):
            parts.append("on a host that has as much")
        found[options] = ", ".join(parts)
    return found


def find_remedies(
    request: PlanRequest,
    layer: LayerBytes | None,
    model: PretrainedConfig | None = None,
    available_bytes: int | None = None,
) -> dict[str, PlanResult]:
    """Return the smallest change of each kind with which a plan fits GPUs and host: options as typed -> plan.

    `layer`: measured bytes of a layer for the request's microbatches. `available_bytes`: host memory of a pipeline, if
    it may differ from the memory that the request assumes.
    """
    typed, limit = PlanRequest.of(request.config, request.shape, request.machine).candidate, ""
    # Rounds are chosen again for each change. Breadth-first takes the least memory.
    order = typed.order or ComputeOrder.BREADTH_FIRST
    asked = request.trying(num_rounds=typed.num_rounds, order=order)
    if available_bytes is not None:
        if available_bytes < (request.host_bytes or 0):  # other programs use memory that the plan counted as free
            gib = math.floor(10 * available_bytes * asked.machine.replicas_per_node / GIB) / 10
            limit, available_bytes = f"--host_memory_limit {gib:g}", int(gib * GIB) // asked.machine.replicas_per_node
        asked = replace(asked, machine=replace(asked.machine, agreed_host_bytes=available_bytes))
    search, found = _Search(asked, layer), dict[str, tuple[str, PlanResult]]()
    if limit and (fitting := search.try_change(Change("", lambda _: asked))) is not None:
        return {limit: fitting[1]}
    with progress_bar("looking for what fits", " kinds of changes") as bar:
        for change in search.changes(model):
            bar.update()
            if not found.keys() & change.replaces and (fitting := search.try_change(change)) is not None:
                found[change.options] = fitting
    return {
        options if "--host_memory_limit" in options else f"{limit} {options}".strip(): planned
        for options, planned in found.values()
    }


@dataclass(frozen=True)
class _Search:
    """Tries changes of a request."""

    request: PlanRequest
    layer: LayerBytes | None

    def changes(self, model: PretrainedConfig | None) -> Iterator[Change]:
        """Yield all changes that the request's options allow."""
        request = self.request
        yield from _left_to_planner(request)
        yield from _less_memory(request)
        yield from _other_numbers(request)
        yield from _reduced_states(request)
        yield from _states_on_disks(request)
        yield from _smaller_steps(request)
        if model is not None:
            yield from _frozen_parameters(request, model)
        larger = self._larger_host("", request)
        smallest = _smallest_parts(request)
        if larger is None and smallest.values:
            value = smallest.values[-1]
            larger = self._larger_host(smallest.options.format(value), smallest.apply(value))
        if larger is not None:
            yield larger

    def try_change(self, change: Change) -> tuple[str, PlanResult] | None:
        """Return the options with the smallest value with which a plan fits, and the plan; None if no value fits."""

        @cache
        def fitting(place: int) -> PlanRequest | None:
            changed = change.apply(change.values[place])
            return None if changed is None else self._fitting(changed)

        last = len(change.values) - 1
        if last < 0 or fitting(last) is None:
            return None
        place = bisect_left(range(last), True, key=lambda each: fitting(each) is not None)
        request = fitting(place)
        assert request is not None
        with suppress(GpuMemoryError, PlanError):
            planned = solve(request, layer=self._layer_of(request), effort=Effort.NUMBERS)
            if planned.host_estimate.total <= (request.host_bytes or math.inf):
                return change.options.format(change.values[place]), planned
        return None

    def _larger_host(self, options: str, request: PlanRequest | None) -> Change | None:
        """Return the change to a host with enough memory for `request` (with `options`).

        None if the request fits this host, or does not fit the GPUs.
        """
        if request is None or request.host_bytes is None:
            return None
        machine = replace(request.machine, host_bytes=None, agreed_host_bytes=None)
        free = self._fitting(replace(request.with_pipeline(host_memory_limit=None), machine=machine))
        if free is None or least_host_bytes(free) <= request.host_bytes:
            return None
        gib = math.ceil(HOST_ROOM * least_host_bytes(free) * machine.replicas_per_node / GIB)
        larger = free.with_pipeline(host_memory_limit=float(gib))
        options = f"{options} --host_memory_limit {gib}".strip()
        return Change(options, lambda _: larger)

    def _fitting(self, request: PlanRequest) -> PlanRequest | None:
        """Return the request with the fewest rounds that fit, if none are given; None if no plan fits, by estimates."""
        with suppress(PlanError):  # PlanError: the model has too few layers
            tried = [request.trying(num_rounds=number) for number in sorted(round_numbers(request))]
            # From two rounds on, more rounds need less memory, so bisection works. One round is tried separately,
            # because it needs no partial sums.
            if tried and self._fits(tried[0]):
                return tried[0]
            if tried and self._fits(tried[-1]):
                return tried[bisect_left(tried, True, lo=1, hi=len(tried) - 1, key=self._fits)]
        return None

    def _fits(self, request: PlanRequest) -> bool:
        """Whether the smallest uses of GPU memory and host memory fit, by estimates."""
        try:
            request.plan.check_numbers()
        except (PlanError, ScheduleError):
            return False
        if not fits_gpus(request, self._layer_of(request)):
            return False
        return request.host_bytes is None or least_host_bytes(request) <= request.host_bytes

    def _layer_of(self, request: PlanRequest) -> LayerBytes:
        """Bytes of a layer: measured if layers, microbatches and tiles equal the measured ones; else estimated."""
        is_same = request.shape is self.request.shape and request.microbatch_tokens == self.request.microbatch_tokens
        if self.layer is None or not is_same or tile_tokens(request) != tile_tokens(self.request):
            return estimated_layer(request)
        return self.layer


def _left_to_planner(request: PlanRequest) -> Iterator[Change]:
    """Yield changes that set options of the user to auto."""
    pipeline = request.config.pipeline

    def auto(option: str, value: Any = "auto", **numbers: Any) -> Change:
        return Change(f"--{option} auto", lambda _: request.with_pipeline(**{option: value}).trying(**numbers))

    if pipeline.num_rounds is not None:
        yield auto("num_rounds", None, num_rounds=None)
    if pipeline.compute_order is Order.DEPTH_FIRST:
        yield auto("compute_order", Order.AUTO, order=ComputeOrder.BREADTH_FIRST)
    if pipeline.spread_head:
        order = None if pipeline.compute_order is Order.DEPTH_FIRST else ComputeOrder.BREADTH_FIRST
        alone = request.with_pipeline(spread_head=False).trying(order=order or request.candidate.order)
        yield Change("--no_spread_head", lambda _: alone)
    if pipeline.use_offload and pipeline.resident_stages != "auto":
        yield auto("resident_stages")
    if pipeline.activation_offloading is not ActivationOffloading.AUTO:
        yield auto("activation_offloading", ActivationOffloading.AUTO)
    if pipeline.recompute not in (Recompute.AUTO, Recompute.FULL):
        yield auto("recompute", Recompute.AUTO)


def _less_memory(request: PlanRequest) -> Iterator[Change]:
    """Yield options with which the same microbatches need less GPU memory."""
    pipeline, tokens, length = request.config.pipeline, request.microbatch_tokens, request.config.data.seq_length
    recomputes = not request.recompute.saves_activations
    if recomputes and request.shape.is_tileable:
        tiles = [number for number in TILE_TOKENS if number < (tile_tokens(request) or tokens)]
        yield Change("--tile_tokens {}", lambda number: request.with_pipeline(tile_tokens=str(number)), tiles)
    if recomputes and request.shape.is_sliceable:
        slices = [n for n in range(request.num_slices + 1, length // MIN_SLICE_TOKENS + 1) if length % n == 0]
        yield Change("--num_slices {}", lambda number: request.trying(num_slices=number), slices)
    chunks = [number for number in LOSS_CHUNKS if number < min(pipeline.loss_chunk_tokens, tokens)]
    yield Change("--loss_chunk_tokens {}", lambda number: request.with_pipeline(loss_chunk_tokens=number), chunks)
    if not pipeline.use_offload:
        streamed = request.with_pipeline(use_offload=True, resident_stages="auto", recompute=Recompute.AUTO)
        yield Change("--use_offload --recompute auto", lambda _: streamed)
    if request.shape.quantized is not None:  # bf16 saves the codes that resident stages have beside weights
        plain = request.with_options("model", matmul_dtype=MatmulDtype.BF16)
        plain = replace(plain, shape=replace(request.shape, quantized=None))
        yield Change("--matmul_dtype bf16", lambda _: plain)


def _other_numbers(request: PlanRequest) -> Iterator[Change]:
    """Yield smaller stages and microbatches, if their numbers are given; auto has already tried all numbers."""
    pipeline, num_ranks = request.config.pipeline, request.machine.num_ranks
    if pipeline.num_stages is not None and pipeline.use_offload:
        most = max_stages(request.shape.num_layers, num_ranks)
        stages = range(request.plan.num_stages + num_ranks, most + 1, num_ranks)
        yield Change("--num_stages {}", lambda number: request.trying(num_stages=number), stages)
    if pipeline.num_chunks is not None:
        rounds = request.candidate.num_rounds or 1
        chunks = [n for n in divisors(request.rows) if n > request.num_chunks and n % rounds == 0]
        yield Change("--num_chunks {}", lambda number: request.trying(num_chunks=number), chunks)
    yield _smallest_parts(request)


def _reduced_states(request: PlanRequest) -> Iterator[Change]:
    """Yield optimizer states in fewer bytes, which auto never chooses."""
    yield Change("--optimizer_states {}", partial(_with_states, request), _smaller_states(request))


def _states_on_disks(request: PlanRequest) -> Iterator[Change]:
    """Yield optimizer states on disks, in fewer bytes if only that fits; then also gradients and weights on disks."""
    has_weights = request.machine.num_replicas == 1
    if request.config.pipeline.offload_states_to is None:
        on_disks, options = request.with_pipeline(offload_states_to="FOLDER"), "--offload_states_to FOLDER"
        yield Change(options, partial(_with_states, on_disks), [request.config.optim.optimizer_states])
        both = f"{options} --optimizer_states {{}}"
        yield Change(both, partial(_with_states, on_disks), _smaller_states(request), replaces={options})
        if has_weights:
            weights = partial(_with_states, on_disks.with_pipeline(weights_on_disks=True))
            formats = [request.config.optim.optimizer_states, *_smaller_states(request)]
            all_states = f"{options} --weights_on_disks --optimizer_states {{}}"
            yield Change(all_states, weights, formats, replaces={options, both})
        return
    simpler = set[str]()
    for options in ("gradients_on_disks", "weights_on_disks", "gradients_on_disks weights_on_disks"):
        names = [name for name in options.split() if not getattr(request.config.pipeline, name)]
        text = " ".join(f"--{name}" for name in names)
        if not names or text in simpler or ("weights_on_disks" in names and not has_weights):
            continue
        more = partial(_with_states, request.with_pipeline(**dict.fromkeys(names, True)))
        yield Change(text, more, [request.config.optim.optimizer_states], replaces={*simpler})
        simpler.add(text)


def _with_states(request: PlanRequest, states: OptimizerStates) -> PlanRequest | None:
    config = replace(request.config, optim=replace(request.config.optim, optimizer_states=states))
    return None if find_problems(config) else replace(request, config=config)


def _smaller_states(request: PlanRequest) -> Sequence[OptimizerStates]:
    formats = [*OptimizerStates]
    return formats[formats.index(request.config.optim.optimizer_states) + 1 :]


def _smallest_parts(request: PlanRequest) -> Change:
    """Change to the maximum number of stages and more microbatches; no values unless the user gave both numbers."""
    pipeline, num_ranks = request.config.pipeline, request.machine.num_ranks
    most, rounds = max_stages(request.shape.num_layers, num_ranks), request.candidate.num_rounds or 1
    is_open = pipeline.num_stages is None or pipeline.num_chunks is None or not pipeline.use_offload
    chunks = [] if is_open else [n for n in divisors(request.rows) if n > request.num_chunks and n % rounds == 0]
    return Change(
        f"--num_stages {most} --num_chunks {{}}",
        lambda number: request.trying(num_stages=most, num_chunks=number),
        chunks,
        replaces={"--num_stages {}", "--num_chunks {}"},
    )


def _smaller_steps(request: PlanRequest) -> Iterator[Change]:
    """Yield more nodes, which give each pipeline a smaller share of a step; then fewer tokens in a step."""
    nodes = dict(request.with_more_nodes())
    yield Change("{}", lambda options: nodes[options], list(nodes))
    rows, length = request.config.pipeline.batch_size, request.config.data.seq_length
    together = request.num_chunks * request.machine.num_replicas
    fewer = [number for number in reversed(divisors(rows)[:-1]) if number % together == 0]
    yield Change("--batch_size {}", lambda number: request.with_pipeline(batch_size=number), fewer)
    lengths = (length * part // LENGTHS for part in range(LENGTHS - 1, 0, -1))
    shorter = [number for number in lengths if number and number % request.num_slices == 0]
    yield Change("--seq_length {}", lambda length: request.with_options("data", seq_length=length), shorter)


def _frozen_parameters(request: PlanRequest, model: PretrainedConfig) -> Iterator[Change]:
    """Yield frozen first layers, adapters instead of training all parameters, and a frozen base in fewer bytes."""
    adapters, num_layers = request.config.adapters, request.shape.num_layers
    smaller = {BaseDtype.BF16: (BaseDtype.INT8, BaseDtype.NF4), BaseDtype.NF4: ()}.get(
        adapters.base_dtype, (BaseDtype.NF4,)
    )

    @cache
    def with_adapters(**options: Any) -> PlanRequest | None:
        config = replace(request.config, adapters=replace(adapters, **options))
        if find_problems(config):
            return None
        try:
            shape = ModelParts.of(config, model).shape()
        except ConfigError:
            return None
        return replace(request, config=config, shape=shape)

    if adapters.has_frozen_base:
        yield Change("--base_dtype {}", lambda base: with_adapters(base_dtype=base), smaller)
    if adapters.has_frozen_base or adapters.freeze is not None:
        return

    def frozen(last_layer: int) -> PlanRequest | None:
        return with_adapters(freeze=f"embedding,layers.0-{last_layer}")

    yield Change("--freeze embedding,layers.0-{}", frozen, range(num_layers - 1))
    options, lora = "--use_lora", dict[str, Any](finetuning_type=FinetuningType.LORA)
    if with_adapters(**lora) is None:  # None if adapters are refused, as with --do_predict but without --merge
        options, lora = "--use_lora --merge", lora | {"merge": True}
    yield Change(options, lambda _: with_adapters(**lora))
    yield Change(
        f"{options} --base_dtype {{}}", lambda base: with_adapters(**lora, base_dtype=base), smaller, replaces={options}
    )


def _describe_experts(request: PlanRequest) -> str:
    """Describe the memory of the largest layer, which more stages do not reduce; empty for a model without experts."""
    shape, slots = request.shape, request.config.pipeline.num_slots
    if shape.experts is None:
        return ""
    layer = max(range(shape.num_layers), key=lambda each: shape.layer_parameters[each])
    own, routed = shape.layer_parameters[layer], shape.experts.layers[layer]
    trained = own if shape.trained is None else 0 if shape.keeps_trained_on_gpu else shape.trained.layers[layer]
    weights, sums = own * request.memory_rules.weight, trained * SUM_BYTES
    text = (
        f" A layer's experts are loaded together: {routed:.3g} of layer {layer}'s {own:.3g} parameters belong to its "
        f"{shape.experts.number} experts. The layer takes {format_bytes(weights)} in each of {slots} weight slot(s) "
        f"and {format_bytes(sums)} for the fp32 sums of its gradients, {format_bytes(slots * weights + sums)} together"
    )
    if weights + sums <= (request.gpu_bytes or 0):
        return f"{text}."
    return f"{text}; with one slot (--no_prefetch) it would not fit either: use GPUs with more memory."
