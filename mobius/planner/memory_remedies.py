"""Changes with which a refused run fits; each one is solved by the planner."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import islice

import torch
from transformers import PretrainedConfig

from mobius.config.config import ActivationOffloading, AdapterConfig, FinetuningType
from mobius.config.validation import find_problems
from mobius.errors import ConfigError, GpuMemoryError, PlanError
from mobius.log import progress_bar
from mobius.models.blocks import ModelParts
from mobius.planner.fit import divisors, fits_gpus, least_host_bytes
from mobius.planner.memory_estimates import Remedy, estimate_host_memory, estimated_layer, largest_gpu_estimate
from mobius.planner.peak_memory import LayerBytes
from mobius.planner.request import PlanRequest
from mobius.planner.search import from_all_numbers, resolve_auto
from mobius.planner.solver import PlanResult, solve
from mobius.planner.step_prediction import predict_step_seconds
from mobius.units import GIB, format_bytes

FEWEST_TOKENS = 8
"""Largest factor by which a step is made smaller."""
HOST_ROOM = 1.03
"""Factor by which host memory is raised until a plan is found."""


def host_remedies(result: PlanResult, available_bytes: int, model: PretrainedConfig) -> Iterator[Remedy]:
    """Return changes with which a run fits the host, those first that cost training least.

    The last is the host memory that the run needs as it is. `model` is the model's configuration.
    """
    request = result.request
    if request.config.planning.plan is None:
        search = _Search(_as_asked(request), available_bytes, model, result.layer)
        yield from search.run((_left_open, _limit, _numbers, _rows, _length, _freeze, _lora))
    for options, changed in request.with_more_nodes():
        yield Remedy(options, estimate_host_memory(changed, result.plan).total)


def gpu_remedies(request: PlanRequest, available_bytes: int | None, model: PretrainedConfig) -> Iterator[Remedy]:
    """Return changes with which a run fits GPUs and host; None: the host's memory is not known."""
    yield from _Search(_as_asked(request), available_bytes, model, None).run((_numbers, _freeze, _lora))


def _as_asked(request: PlanRequest) -> PlanRequest:
    """Return the request with rounds and slices as the user typed them."""
    pipeline = request.config.pipeline
    slices = 1 if request.candidate.num_slices == 1 else pipeline.num_slices
    return request.trying(accumulation_rounds=pipeline.num_rounds, num_slices=slices)


Change = tuple[str, PlanRequest]
"""Options as the user types them, and the request with them."""


@dataclass(frozen=True)
class _Search:
    """Plans changed requests with estimates, without simulation."""

    request: PlanRequest
    available_bytes: int | None
    model: PretrainedConfig
    layer: LayerBytes | None
    """Measured bytes of a layer for the request's microbatches."""

    @cached_property
    def other_numbers(self) -> list[Change]:
        """Numbers of stages and chunks that fit, or those that need least host memory.

        Empty on CPUs, and if the planner chose the numbers, which has tried all of them.
        """
        asked, pipeline = self.request, self.request.config.pipeline
        if asked.machine.on_cpu or (pipeline.num_stages is None and pipeline.num_chunks is None):
            return []
        choices = []
        for each in from_all_numbers(asked.trying(num_stages=None, num_chunks=None)):
            found = each.candidate
            options = f"--num_stages {found.num_stages} --num_chunks {found.num_chunks}"
            if asked.candidate.accumulation_rounds is not None:
                options += f" --num_rounds {found.accumulation_rounds}"
            choices.append((options, asked.trying(num_stages=found.num_stages, num_chunks=found.num_chunks)))
        return choices

    def run(self, kinds: tuple[Callable[[_Search], Iterator[Change]], ...]) -> Iterator[Remedy]:
        """Return the first change of each kind that fits, and last the host that the run needs."""
        with progress_bar("looking for what fits", " kinds of changes", len(kinds) + 1) as bar:
            for kind in kinds:
                tried = (self.try_change(options, changed) for options, changed in kind(self))
                yield from islice(filter(None, tried), 1)
                bar.update()
            if (larger := self.larger_host()) is not None:
                yield larger
            bar.update()

    def may_fit(self, request: PlanRequest, host_bytes: int | None = None) -> bool | None:
        """Whether a plan fits GPUs and host in some number of rounds; None if only solving it tells, which is slow.

        `host_bytes` is the memory of another host.
        """
        tried, most = request.candidate, host_bytes or self.available_bytes or math.inf
        if request.machine.on_cpu or tried.num_slices is None:
            return None
        rounds = divisors(tried.num_chunks or 1) if tried.accumulation_rounds is None else [tried.accumulation_rounds]
        least = min(least_host_bytes(request.trying(accumulation_rounds=number)) for number in rounds)
        return math.isfinite(least) and least <= most

    def try_change(self, options: str, request: PlanRequest, host_bytes: int | None = None) -> Remedy | None:
        """Return the change if a plan for it fits GPUs and host, else None; `host_bytes` as in `may_fit`."""
        if self.may_fit(request, host_bytes) is False:
            return None
        try:
            resolved = resolve_auto(request)
            is_same = resolved.shape is self.request.shape and resolved.num_chunks == self.request.candidate.num_chunks
            is_same = is_same and resolved.all_tokens == self.request.all_tokens
            layer = self.layer if is_same and self.layer else estimated_layer(resolved)
            if not fits_gpus(resolved, layer):
                return None
            result = solve(resolved, layer=layer, is_preliminary=True)
        except (GpuMemoryError, PlanError):
            return None
        if result.host_estimate.total > (host_bytes or self.available_bytes or math.inf):
            return None
        details = _details(result) + ", on a host that has as much" * (host_bytes is not None)
        return Remedy(options, result.host_estimate.total, details, host_bytes)

    def with_adapters(self, adapters: AdapterConfig) -> PlanRequest | None:
        """Return the request with other trained parameters, if its other options allow them."""
        config = replace(self.request.config, adapters=adapters)
        if find_problems(config):
            return None
        try:
            shape = ModelParts(self.model, torch.device("cpu"), adapters=adapters).shape()
        except ConfigError:
            return None
        return replace(self.request, config=config, shape=shape)

    def larger_host(self) -> Remedy | None:
        """A host with as much memory as the run needs, with other numbers of stages and chunks if they need less."""
        if self.request.machine.on_cpu or self.available_bytes is None:
            return None
        tried = [("", self.request), *((f"{options} ", changed) for options, changed in self.other_numbers)]
        needs = [least_host_bytes(_on_any_host(request)) for _, request in tried]
        least = min(needs)
        if not math.isfinite(least):
            return None
        options, request = tried[0] if needs[0] <= least * HOST_ROOM else tried[needs.index(least)]
        for attempt in range(1, 6):
            gib = math.ceil(least * request.machine.replicas_per_node / GIB * HOST_ROOM**attempt)
            changed = _on_any_host(request).with_pipeline(host_memory_limit=float(gib))
            changed = replace(changed, candidate=request.candidate)
            if (found := self.try_change(f"{options}--host_memory_limit {gib}", changed, gib * GIB)) is not None:
                return found
        return None


def _details(result: PlanResult) -> str:
    """GPU memory of the fullest rank, and tokens per second by a quick simulation."""
    parts, request = [], result.request
    if not request.machine.on_cpu:
        parts.append(f"{format_bytes(largest_gpu_estimate(result.gpu_estimates).total)} per GPU")
    if result.profile is not None:
        seconds = predict_step_seconds(result.plan, request, result.profile)
        parts.append(f"about {request.all_tokens / seconds:,.0f} tokens/s")
    return ", ".join(parts)


def _left_open(search: _Search) -> Iterator[Change]:
    """Leave one option to the planner."""
    request, pipeline = search.request, search.request.config.pipeline
    if pipeline.num_rounds is not None:
        yield "--num_rounds auto", request.with_pipeline(num_rounds=None).trying(accumulation_rounds=None)
    if pipeline.resident_stages != "auto":
        yield "--resident_stages auto", request.with_pipeline(resident_stages="auto")
    if pipeline.activation_offloading is ActivationOffloading.ON:
        yield "--activation_offloading auto", request.with_pipeline(activation_offloading=ActivationOffloading.AUTO)


def _limit(search: _Search) -> Iterator[Change]:
    """State the free memory, if it is less than the plan counted on."""
    request, available = search.request, search.available_bytes
    if available is not None and request.host_bytes is not None and available < request.host_bytes:
        each_node = math.floor(10 * available * request.machine.replicas_per_node / GIB) / 10
        machine = replace(request.machine, agreed_host_bytes=None)
        changed = replace(request.with_pipeline(host_memory_limit=each_node), machine=machine)
        yield f"--host_memory_limit {each_node:g}", changed


def _numbers(search: _Search) -> Iterator[Change]:
    """Other numbers of stages and chunks if these were given."""
    yield from search.other_numbers


def _rows(search: _Search) -> Iterator[Change]:
    """Fewer sequences in a step."""
    request, rows = search.request, search.request.config.pipeline.batch_size
    together = (request.candidate.num_chunks or 1) * request.machine.num_replicas
    for fewer in range(rows // 2, rows // FEWEST_TOKENS - 1, -1):
        if fewer and rows % fewer == 0 and fewer % together == 0:
            yield f"--batch_size {fewer}", request.with_pipeline(batch_size=fewer)


def _length(search: _Search) -> Iterator[Change]:
    """Shorter sequences."""
    length = search.request.config.data.seq_length
    for part in (2, 4, FEWEST_TOKENS):
        if length % part == 0:
            yield f"--seq_length {length // part}", search.request.with_seq_length(length // part)


def _freeze(search: _Search) -> Iterator[Change]:
    """Freeze as few of the first layers as possible."""
    adapters, num_layers = search.request.config.adapters, search.request.shape.num_layers
    if adapters.is_lora or adapters.freeze is not None:
        return

    @cache
    def frozen(number: int) -> PlanRequest | None:
        return search.with_adapters(replace(adapters, freeze=f"embedding,layers.0-{number - 1}"))

    def is_enough(number: int) -> bool:
        if (changed := frozen(number)) is None:
            return False
        known = search.may_fit(changed)
        return search.try_change("", changed) is not None if known is None else known

    fewest = 1 + bisect_left(range(1, num_layers), True, key=is_enough)
    if fewest < num_layers and (changed := frozen(fewest)) is not None:
        yield f"--freeze embedding,layers.0-{fewest - 1}", changed


def _lora(search: _Search) -> Iterator[Change]:
    """Train adapters in place of all parameters."""
    adapters = search.request.config.adapters
    if adapters.is_lora or adapters.freeze is not None:
        return
    lora = replace(adapters, finetuning_type=FinetuningType.LORA)
    for options, tried in (("--use_lora", lora), ("--use_lora --merge", replace(lora, merge=True))):
        if (changed := search.with_adapters(tried)) is not None:
            yield options, changed
            return


def _on_any_host(request: PlanRequest) -> PlanRequest:
    """Return the request without a limit of host memory; by default one round of whole sequences."""
    machine = replace(request.machine, host_bytes=None, agreed_host_bytes=None)
    free = replace(request.with_pipeline(host_memory_limit=None), machine=machine)
    return free.trying(accumulation_rounds=free.candidate.accumulation_rounds or 1, num_slices=free.num_slices)
